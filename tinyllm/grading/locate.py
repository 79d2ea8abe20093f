"""Find where a named cache class is defined, so that the reference can stand in for it."""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinyllm.grading import bugs
from tinyllm.grading.plant import Place, PlantError, Target
from tinyllm.grading.stand_in import ERROR, look_up
from tinyllm.jobs.process import Send, call
from tinyllm.named import ImplementationError, find

LONG = 60.0  # seconds to import a module
NOT_HERE = "tests cannot be graded by planting bugs in place of it"


def located(impl: str, tests: Sequence[str]) -> Target:
    """The reference as a target in place of a cache class, which another process looks up.

    `sys.path` is set so that the class can be imported as in `tests`.

    Raises:
        PlantError: the class cannot be loaded, or nothing can stand in for it.
    """
    ended = call(locate, impl, tuple(tests), timeout=LONG)
    if ended.how == "timeout":
        raise PlantError(f"{impl} has not been imported within {LONG:.0f} s")
    if ended.how != "done":
        said = next(iter(str(ended.value or ended.output).strip().splitlines()[::-1]), "nothing")
        raise PlantError(f"{impl} ended the process that imported it, saying {said!r}")
    found, path = ended.value
    if isinstance(found, str):
        raise PlantError(found)
    sys.path[:] = path
    target = bugs.reference()
    return target if found.path == str(Path(target.path).resolve()) else replace(target, place=found)


def locate(send: Send, impl: str, tests: tuple[str, ...]) -> tuple[Place | str, list[str]]:
    """The place, or why there is none, and the `sys.path` that finds it."""
    del send
    sys.path += [folder for folder in (str(Path.cwd()), str(Path.cwd() / "src")) if folder not in sys.path]
    known = set(sys.modules)
    try:
        try:
            cache, _ = find(impl)
        except ImplementationError:
            top = impl.partition(":")[0].partition(".")[0]
            for name in set(sys.modules) - known:
                if name.partition(".")[0] == top:  # a folder of the package's name would stay its namespace
                    del sys.modules[name]
            importlib.invalidate_caches()
            sys.path[:] = [*sys.path, *_path_of(tests)]
            cache, _ = find(impl)
    except ImplementationError as error:
        return str(error), sys.path
    return _place(impl, cache), sys.path


def _path_of(tests: tuple[str, ...]) -> list[str]:
    """The folders that pytest adds to `sys.path` for these tests (`pythonpath`, conftests)."""
    import pytest  # noqa: PLC0415 - only if the module is not found otherwise

    class Look:
        """Notes the path, and ends the session."""

        path: list[str] = []  # noqa: RUF012 - of this one class

        def pytest_sessionstart(self) -> None:
            self.path[:] = sys.path
            pytest.exit("seen")

    os.environ.pop("TINYLLM_PLANT", None)  # this process plants nothing
    before = list(sys.path)
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=no", *tests], plugins=[Look()])
    return [folder for folder in Look.path if folder not in before]


def _place(impl: str, cache: Any) -> Place | str:
    if not isinstance(cache, type):
        return (
            f"{impl} is a {type(cache).__name__} that makes caches, not a class: {NOT_HERE}; name the class"
        )
    module = sys.modules.get(cache.__module__)
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        where = f"compiled: {file}" if file else f"built in {cache.__module__}"
        return f"{impl} has no Python source, it is {where}: {NOT_HERE}"
    if look_up(module, cache.__qualname__) is not cache:
        return f"{impl} is made as it runs: {file} has no class {cache.__qualname__}: {NOT_HERE}"
    return Place(impl, str(Path(file).resolve()), cache.__qualname__, _error(cache, module))


def _error(cache: type, module: Any) -> tuple[str, str] | None:
    """The class's out-of-blocks error: the one it raises, or the one with that name in its module."""
    error = _raised(cache) or getattr(module, ERROR, None)
    if not isinstance(error, type):
        return None
    file = getattr(sys.modules.get(error.__module__), "__file__", None)
    return (str(Path(file).resolve()), error.__qualname__) if file else None


def _raised(cache: type) -> type | None:
    try:
        one = cache(1, 1, 1, 1, 1)
        one.add_seq(0)
        one.append(0, 0, [[[1.0], [2.0]]], [[[1.0], [2.0]]])
    except Exception as error:
        return type(error) if any(base.__name__ == ERROR for base in type(error).__mro__) else None
    return None
