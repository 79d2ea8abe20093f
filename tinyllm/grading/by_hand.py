"""`pytest --plant ID[:IMPL]`: one of our bugs, planted until pytest ends."""

import shutil
from atexit import register
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

from tinyllm.grading import bugs, handover
from tinyllm.grading.locate import located
from tinyllm.grading.plant import PlantError


def offer_bug(named: str, tests: Sequence[str] = ()) -> None:
    """Plant a bug, `ID` or `ID:IMPL`, in this process and in those it starts, until it ends.

    Raises:
        PlantError: the id is unknown, nothing can stand in for the cache, or the disk refuses a file.
    """
    bug_id, _, impl = named.partition(":")
    known = {bug.id: bug for bug in bugs.load_set("all")}
    if bug_id not in known:
        raise PlantError(f"there is no bug {bug_id!r}; expected one of {', '.join(known)}")
    paths = [one for one in tests if Path(one.partition("::")[0]).exists()]
    target = located(impl, paths) if impl else bugs.reference()
    try:
        folder = mkdtemp(prefix="tinyllm-plant-")
        register(shutil.rmtree, folder, ignore_errors=True)
        handover.offer(known[bug_id].planted(target), Path(folder))
    except OSError as error:
        raise PlantError(f"no temporary file can be written: {error.strerror}") from error
