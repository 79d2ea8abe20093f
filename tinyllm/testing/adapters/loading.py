"""Find the cache that a command line names.

`pkg.module`, `pkg.module:Class`, `path/to/paged.py`, or `exec:COMMAND`.
"""

import shlex
import sys
from typing import Any

from tinyllm.named import ImplementationError, find
from tinyllm.testing.contract import Factory

DEFAULT = "tinyllm.infer.paged"
COMMAND = "exec:"
__all__ = ["ImplementationError", "load", "spelling"]
_loaded: list[tuple[Any, str]] = []  # factories, and how each was named; not all of them can be hashed


def load(impl: str = DEFAULT) -> Factory:
    """The factory that `impl` names; without `:Name` it is the module's `PagedKVCache`.

    `exec:COMMAND` starts an engine that speaks the protocol of docs/protocol.md.

    Raises:
        ImplementationError: nothing there, not importable, no such class in it, or no engine.
    """
    if impl.startswith(COMMAND):
        return _engine(impl)
    factory, impl = find(impl)
    _loaded.append((factory, impl))
    return factory  # type: ignore[no-any-return]


def spelling(factory: Factory) -> tuple[list[str], str]:
    """Lines that import `factory` in a fresh interpreter, and the name they give it."""
    name = getattr(factory, "__name__", "")
    if name.startswith("_") or not name.isidentifier():
        name = "factory"  # a lambda, the method of a machine, or an object that makes caches
    for known, impl in reversed(_loaded):
        if known is factory:
            return ["from tinyllm.testing import load, replay", f"{name} = load({impl!r})"], name
    module = getattr(factory, "__module__", "")
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is factory:
        return ["from tinyllm.testing import replay", f"from {module} import {name}"], name
    return ["from tinyllm.testing import replay", f"{name} = ...  # the cache under test"], name


def _engine(impl: str) -> Factory:
    from tinyllm.testing.adapters.subprocess_cache import Engine  # noqa: PLC0415 - only where there is one

    try:
        words = shlex.split(impl.removeprefix(COMMAND))
    except ValueError as error:
        raise ImplementationError(f"{impl}: {error}") from None
    if not words:
        raise ImplementationError(f"{COMMAND} is followed by the command that starts an engine")
    engine = Engine(words)
    _loaded.append((engine, impl))
    return engine
