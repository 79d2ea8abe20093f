"""Find what a command line names: `pkg.module`, `pkg.module:Class` or `path/to/paged.py`."""

import importlib
import importlib.util
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

CLASS = "PagedKVCache"


class ImplementationError(Exception):
    """What was named cannot be used; the message says why, and what to do."""


def find(impl: str) -> tuple[Any, str]:
    """The class or factory, and how it is named from any folder; without `:Name` it is the `PagedKVCache`.

    Raises:
        ImplementationError: nothing there, not importable, or no such class in it.
    """
    where, _, name = impl.partition(":")
    name = name or CLASS
    is_path = where.endswith(".py") or "/" in where
    module = _from_file(Path(where)) if is_path else _imported(where)
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        raise ImplementationError(
            f"{where} defines no {name}; write {where}:NAME if yours has another name"
        ) from None
    if not callable(found):
        raise ImplementationError(f"{name} of {where} is not callable; the kit needs a class or a factory")
    return found, f"{Path(where).resolve()}:{name}" if is_path else impl


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
