"""Hand a planted text to a process, and to all that it starts: a file, named in the environment."""

import atexit
import json
import os
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from tinyllm.grading import bugs, plant

VARIABLE = "TINYLLM_PLANT"
"""Names a JSON file with the fields of `plant.Target`. `tinyllm.testing.plugin` looks for it."""


def offer(target: plant.Target, folder: Path) -> None:
    """Have this process, and those it starts from now on, put the target's text in the module's place."""
    path = folder / "target.json"
    path.write_text(json.dumps(asdict(target)), encoding="utf-8")
    os.environ[VARIABLE] = str(path)


def offer_bug(named: str) -> None:
    """The same for one of our bugs, `ID` or `ID:ALIAS`, until this process ends.

    Raises:
        PlantError: an unknown id, or no room for a temporary file.
    """
    bug_id, _, alias = named.partition(":")
    known = {bug.id: bug for bug in bugs.load_set("all")}
    if bug_id not in known:
        raise plant.PlantError(f"there is no bug {bug_id!r}; there are {', '.join(known)}")
    target = replace(plant.find(bugs.MODULE), aliases=(alias,) if alias else ())
    try:
        folder = tempfile.mkdtemp(prefix="tinyllm-plant-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        offer(target.with_source(known[bug_id].apply(target.source)), Path(folder))
    except OSError as error:
        raise plant.PlantError(f"no temporary file can be written: {error.strerror}") from error


def take() -> None:
    """Plant what the environment names. Raises PlantError."""
    path = Path(os.environ[VARIABLE])
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        plant.install(plant.Target(**fields | {"aliases": tuple(fields["aliases"])}))
    except OSError as error:
        raise plant.PlantError(f"{path}, named by {VARIABLE}, cannot be read: {error.strerror}") from error
