"""Put the class of a planted text in place of the tests' own cache class.

The module that defines their class runs unchanged, whatever its path and name; its class is replaced before
any importer can take it. So the bug is planted in the reference's text, whatever cache is tested.
"""

import functools
import importlib
import importlib.machinery
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tinyllm.grading.plant import Place, PlantError, Target, on_construction

ERROR = "OutOfBlocks"
_installed: list[tuple[Target, Callable[[], None]]] = []  # at most one in a process


def install(target: Target, tell: Callable[[], None]) -> None:
    """Replace the class whenever the file of the target's place runs from now on.

    Raises:
        PlantError: the file ran already.
    """
    if not any(known == target for known, _ in _installed):
        for name, module in list(sys.modules.items()):
            if _is_file(module, _place(target).path):
                raise PlantError(f"{name} was imported before its class could be replaced")
        _installed[:] = [(target, tell)]
    _wrap(importlib.machinery.SourceFileLoader)
    if rewriting := sys.modules.get("_pytest.assertion.rewrite"):  # it runs rewritten modules itself
        _wrap(rewriting.AssertionRewritingHook)


def _place(target: Target) -> Place:
    assert target.place is not None  # noqa: S101 - checked by the callers
    return target.place


def _wrap(loader: Any) -> None:
    run = loader.exec_module
    if getattr(run, "stands_in", False):
        return

    @functools.wraps(run)
    def exec_module(self: Any, module: ModuleType) -> None:
        run(self, module)
        for target, tell in _installed:
            if _is_file(module, _place(target).path):
                _replace(module, target, tell)

    exec_module.stands_in = True  # type: ignore[attr-defined]
    loader.exec_module = exec_module


def _is_file(module: Any, path: str) -> bool:
    own = getattr(module, "__file__", None)
    return (
        isinstance(own, str)
        and os.path.basename(own) == os.path.basename(path)  # noqa: PTH119 - every import comes by
        and os.path.realpath(own) == os.path.realpath(path)
    )


def _replace(module: ModuleType, target: Target, tell: Callable[[], None]) -> None:
    """Run the text in a separate module and replace their class, if it is there."""
    place = _place(target)
    outer, _, name = place.name.rpartition(".")
    holder = look_up(module, outer)
    theirs = look_up(holder, name)
    if holder is None or theirs is None or not target.source:
        return
    aside = ModuleType(target.module)
    error = _error_of(module, place)
    exec(target.code(), vars(aside))  # noqa: S102 - the planted text is ours
    cls = getattr(aside, target.cls)
    setattr(aside, ERROR, _both(getattr(aside, ERROR), error, target))
    cls.__module__, cls.__name__, cls.__qualname__ = module.__name__, name, place.name
    cls.__doc__ = theirs.__doc__ or cls.__doc__
    setattr(holder, name, cls)
    for other, value in list(vars(module).items()):
        if value is theirs:
            setattr(module, other, cls)
    on_construction(cls, tell)


def look_up(holder: Any, name: str) -> Any:
    """The object of a qualified name below a module or class, or None."""
    for part in filter(None, name.split(".")):
        holder = getattr(holder, part, None)
    return holder


def _error_of(module: ModuleType, place: Place) -> Any:
    """Their out-of-blocks error class as these tests import it, or None."""
    if place.error is None:
        return None
    path, name = place.error
    if _is_file(module, path):
        return look_up(module, name)
    return next((look_up(one, name) for one in list(sys.modules.values()) if _is_file(one, path)), None)


def _both(planted: type, theirs: Any, target: Target) -> type:
    """An error class that is a subclass of theirs and of the reference's, constructed as the reference's."""
    ours = getattr(importlib.import_module(target.module), ERROR)
    bases = list(dict.fromkeys([planted, *([theirs] if isinstance(theirs, type) else []), ours]))
    bases = [base for base in bases if not any(base is not one and issubclass(one, base) for one in bases)]

    def __init__(self: Any, needed: int, free: int) -> None:  # noqa: N807 - bypasses the constructor of theirs
        BaseException.__init__(self, needed, free)
        self.needed, self.free = needed, free

    own = {"__init__": __init__, "__str__": planted.__str__, "__module__": bases[-1].__module__}
    return type(ERROR, tuple(bases), own)
