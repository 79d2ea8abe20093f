"""Find the cache that a command line names.

`pkg.module`, `pkg.module:Class`, `path/to/paged.py`, or `exec:COMMAND`.
"""

import importlib
import importlib.util
import shlex
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

from tinyllm.testing.contract import Factory

DEFAULT = "tinyllm.infer.paged"
CLASS = "PagedKVCache"
COMMAND = "exec:"
_loaded: list[tuple[Any, str]] = []  # factories, and how each was named; not all of them can be hashed


class ImplementationError(Exception):
    """What was named cannot be used; the message says why, and what to do."""


def load(impl: str = DEFAULT) -> Factory:
    """The factory that `impl` names; without `:Name` it is the module's `PagedKVCache`.

    `exec:COMMAND` starts an engine that speaks the protocol of docs/protocol.md.

    Raises:
        ImplementationError: nothing there, not importable, no such class in it, or no engine.
    """
    if impl.startswith(COMMAND):
        return _engine(impl)
    where, _, name = impl.partition(":")
    name = name or CLASS
    is_path = where.endswith(".py") or "/" in where
    module = _from_file(Path(where)) if is_path else _imported(where)
    try:
        factory = attrgetter(name)(module)
    except AttributeError:
        raise ImplementationError(
            f"{where} defines no {name}; write {where}:NAME if yours has another name"
        ) from None
    if not callable(factory):
        raise ImplementationError(f"{name} of {where} is not callable; the kit needs a class or a factory")
    impl = f"{Path(where).resolve()}:{name}" if is_path else impl
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


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ImplementationError(
                f"there is no module {name!r} here; a file is named with its .py"
            ) from error
        raise ImplementationError(f"{name} imports {error.name!r}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raise ImplementationError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise ImplementationError(f"there is no file {path}")
    name = f"tinyllm_given_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImplementationError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    sys.path.insert(
        0, str(path.resolve().parent)
    )  # what lies beside the file can be imported, as in a script
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise ImplementationError(f"{path} imports {error.name!r}, which is not installed") from error
    except SyntaxError as error:
        raise ImplementationError(f"{path}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise ImplementationError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return module
