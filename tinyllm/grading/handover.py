"""Hand a planted text to a process, and to every Python that it starts.

An environment variable names the file of the text. A folder ahead on PYTHONPATH has a `sitecustomize` that
plants it when an interpreter starts, and then runs the one that it hides. Files beside the text note whether
it was used, and which processes could not plant it.
"""

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tinyllm.grading import plant
from tinyllm.grading.plant import Place, Target

VARIABLE = "TINYLLM_PLANT"
"""Names a JSON file with the fields of `plant.Target`. `tinyllm.grading.plugin` looks for it."""
USED, MISSED, SITE = "used", "missed", "site"  # beside it: files, and the folder of the sitecustomize
CUSTOMIZE = '''\
"""Take what TINYLLM_PLANT names; then run the sitecustomize that this one hides."""

import importlib.machinery
import importlib.util
import os
import sys

here = os.path.realpath(os.path.dirname(__file__))
sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != here]
if "TINYLLM_PLANT" in os.environ:
    try:
        from tinyllm.grading import handover
    except ImportError:  # an interpreter without tinyllm
        pass
    else:
        handover.take()
        for name in [name for name in sys.modules if name.partition(".")[0] == "tinyllm"]:
            del sys.modules[name]  # later imports load it anew
if spec := importlib.machinery.PathFinder.find_spec("sitecustomize"):
    hidden = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hidden)
'''


def offer(target: Target, folder: Path) -> None:
    """Let this process, and those it starts from now on, use the target's text as the module."""
    path = folder / "target.json"
    path.write_text(json.dumps(asdict(target)), encoding="utf-8")
    (folder / SITE).mkdir(exist_ok=True)
    (folder / SITE / "sitecustomize.py").write_text(CUSTOMIZE, encoding="utf-8")
    os.environ[VARIABLE] = str(path)
    others = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / SITE), *others])


def take() -> None:
    """Plant the text that the environment names, and note processes that cannot. Raises PlantError."""
    path = Path(os.environ[VARIABLE])
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise plant.PlantError(f"{path}, named by {VARIABLE}, cannot be read: {error.strerror}") from error
    if place := fields["place"]:
        fields["place"] = Place(**place | {"error": tuple(place["error"]) if place["error"] else None})
    plant.install(Target(**fields), _note_use)
    if path not in _watching:
        _watching[:] = [path]
        _used.clear()
        sys.addaudithook(_audit)


_watching: list[Path] = []  # the last planted file
_used: set[Path] = set()  # by this process


def _note_use() -> None:
    """Note the use for this process and, if the disk has room, for the one that started it."""
    _used.update(_watching)
    with contextlib.suppress(OSError):
        _watching[0].with_name(USED).touch()


def used() -> bool:
    """Whether the planted text was used, in this process or in one that it started."""
    return bool(_watching) and (_watching[0] in _used or _watching[0].with_name(USED).exists())


def missed() -> list[str]:
    """The commands that started a Python without the planted text, each with the reason."""
    if not _watching or not (noted := _watching[0].with_name(MISSED)).exists():
        return []
    return sorted(set(noted.read_text(encoding="utf-8").splitlines()))


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Note a started process that will not plant the text; called for every audit event."""
    if event == "subprocess.Popen":
        executable, command, _, environment = args
    elif event in {"os.posix_spawn", "os.exec"}:
        executable, command, environment = args
    else:
        return
    if not _watching:
        return
    try:
        words = [os.fsdecode(word) for word in ([command] if isinstance(command, str | bytes) else command)]
        reason = _unreached(os.fsdecode(executable or words[0]), words, environment)
        if reason:
            with _watching[0].with_name(MISSED).open("a", encoding="utf-8") as file:
                file.write(f"{' '.join(words)[:200]!r}: {reason}\n")
    except (OSError, TypeError, ValueError, IndexError):
        return  # a foreign call, which must not be disturbed


def _unreached(executable: str, words: Sequence[str], environment: Mapping[Any, Any] | None) -> str:
    """Why a process will not run our sitecustomize; empty if it will, or is no Python."""
    if not os.path.basename(executable).lower().startswith("python"):  # noqa: PTH119 - any text may come
        return ""
    for word in words[1:]:
        if not word.startswith("-") or word in {"-c", "-m", "-"} or word.startswith("--"):
            break
        if found := set(word[1:]) & set("IES"):
            return f"-{min(found)} keeps Python from it"
    if environment is None:
        return ""
    named = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    site = str(_watching[0].with_name(SITE))
    if VARIABLE not in named or site not in named.get("PYTHONPATH", "").split(os.pathsep):
        return "its environment is without PYTHONPATH or TINYLLM_PLANT"
    return ""
