"""Hand a planted text to a process, and to every Python that it starts.

The text is in a file that the environment names. Another folder, ahead on PYTHONPATH, has a `sitecustomize`
that takes it when an interpreter starts; it then runs the one that it hides. What else is known of the run is
noted beside the file: whether the text was put to use, and which processes could not take it.
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
    except ImportError:  # an interpreter that has no cache to plant in
        pass
    else:
        handover.take()
        for name in [name for name in sys.modules if name.partition(".")[0] == "tinyllm"]:
            del sys.modules[name]  # who imports it is to find it as if it were new
if spec := importlib.machinery.PathFinder.find_spec("sitecustomize"):
    hidden = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hidden)
'''


def offer(target: Target, folder: Path) -> None:
    """Have this process, and those it starts from now on, put the target's text in the module's place."""
    path = folder / "target.json"
    path.write_text(json.dumps(asdict(target)), encoding="utf-8")
    (folder / SITE).mkdir(exist_ok=True)
    (folder / SITE / "sitecustomize.py").write_text(CUSTOMIZE, encoding="utf-8")
    os.environ[VARIABLE] = str(path)
    others = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / SITE), *others])


def take() -> None:
    """Plant what the environment names, and watch for processes that cannot. Raises PlantError."""
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


_watching: list[Path] = []  # the file that was taken last
_used: set[Path] = set()  # by this process


def _note_use() -> None:
    """For this process, and the one that started it; where tests leave no room for files, for this alone."""
    _used.update(_watching)
    with contextlib.suppress(OSError):
        _watching[0].with_name(USED).touch()


def used() -> bool:
    """Whether what this process took was put to use, in it or in one that it started."""
    return bool(_watching) and (_watching[0] in _used or _watching[0].with_name(USED).exists())


def missed() -> list[str]:
    """The commands that started a Python which could not take it, each with the reason."""
    if not _watching or not (noted := _watching[0].with_name(MISSED)).exists():
        return []
    return sorted(set(noted.read_text(encoding="utf-8").splitlines()))


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Note a process that is started and will not take what is planted; called for every event of Python."""
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
        return  # it is somebody else's call, and goes on as it would


def _unreached(executable: str, words: Sequence[str], environment: Mapping[Any, Any] | None) -> str:
    """Why a process will not run our sitecustomize; "" if it will, or is no Python."""
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
