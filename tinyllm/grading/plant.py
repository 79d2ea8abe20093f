"""Replace a module's source text: the one way in which a bug is planted.

A finder ahead of all others serves the text for one module name, in this process alone. No file on disk is
changed, and a reload or a new import finds the same text. If the tests use their own cache class, the text
runs in a separate module, and its class stands in for theirs (`stand_in.py`).
"""

import functools
import importlib.abc
import importlib.util
import linecache
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType


class PlantError(RuntimeError):
    """The module cannot be found, or was imported before its text could be replaced."""


@dataclass(frozen=True)
class Place:
    """A class of the tests, to be replaced by the class of the planted text.

    Attributes:
        impl: the name that the user gave: `path/to/paged.py:Cache` or `pkg.module:Cache`.
        path: the file that defines it, whatever name tests import it by.
        name: its qualified name in that file.
        error: file and qualified name of its out-of-blocks error.
    """

    impl: str
    path: str
    name: str
    error: tuple[str, str] | None = None


@dataclass(frozen=True)
class Target:
    """A module to plant a bug in.

    Attributes:
        module: the dotted name of the module.
        path: its file.
        source: its text.
        cls: the class that a test must construct; "" if importing the module is enough.
        place: the class to replace, if tests do not import the module itself.
    """

    module: str
    path: str
    source: str
    cls: str = ""
    place: Place | None = None

    def with_source(self, source: str) -> "Target":
        """The target with another text."""
        return replace(self, source=source)

    def code(self) -> CodeType:
        """The text, compiled under a name that is no file, so that tracebacks show the planted lines."""
        name = f"<planted {self.path}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        return compile(self.source, name, "exec", dont_inherit=True)


def find(module: str, cls: str = "") -> Target:
    """The module as it is on disk. Its parent packages are imported, the module is not.

    Raises:
        PlantError: there is no such module, or it has no Python source.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (Exception, SystemExit) as error:  # a parent package runs code of its own
        raise PlantError(f"there is no module {module!r}: {type(error).__name__}: {error}") from error
    if spec is None:
        raise PlantError(f"there is no module {module!r}")
    if not spec.origin or not spec.origin.endswith(".py"):
        raise PlantError(f"{module} has no Python source to plant a bug in ({spec.origin})")
    return Target(module, spec.origin, read(Path(spec.origin)), cls)


def read(path: Path) -> str:
    """The text of a Python file. Raises PlantError."""
    try:
        return importlib.util.decode_source(path.read_bytes())
    except (OSError, SyntaxError, UnicodeError) as error:
        raise PlantError(f"{path} cannot be read: {error}") from error


def on_construction(cls: type, tell: Callable[[], None]) -> None:
    """Call `tell` at the first construction of the class, and then restore its `__init__`."""
    own = vars(cls).get("__init__")
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: object, *args: object, **named: object) -> None:  # noqa: N807
        if own is None:
            del cls.__init__  # type: ignore[misc]
        else:
            cls.__init__ = own  # type: ignore[misc]
        tell()
        init(self, *args, **named)

    cls.__init__ = __init__  # type: ignore[misc]


class Planted(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finder and loader of the target; `tell` is called when its text is used."""

    def __init__(self, target: Target, tell: Callable[[], None]) -> None:
        self.target = target
        self.tell = tell

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the target's name; None for any other."""
        del path, target
        if fullname != self.target.module:
            return None
        spec = ModuleSpec(fullname, self, origin=self.target.path, is_package=self.is_package(fullname))
        spec.has_location = True
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(str(Path(self.target.path).parent))
        return spec

    def is_package(self, fullname: str) -> bool:
        """Whether the target is a package's `__init__`."""
        return fullname == self.target.module and Path(self.target.path).name == "__init__.py"

    def get_source(self, fullname: str) -> str:
        """The planted text; tracebacks show it."""
        del fullname
        return self.target.source

    def get_code(self, fullname: str) -> CodeType:
        """The text, compiled."""
        del fullname
        return self.target.code()

    def exec_module(self, module: ModuleType) -> None:
        """Run the text in the module."""
        super().exec_module(module)
        if isinstance(cls := getattr(module, self.target.cls, None), type):
            on_construction(cls, self.tell)
        else:
            self.tell()


def install(target: Target, tell: Callable[[], None] = lambda: None) -> None:
    """Serve the target's text from now on. A second call for the same target does nothing.

    `tell` is called at the construction of its class; if it has none, when its text runs.

    Raises:
        PlantError: the module was imported already, with the old text.
    """
    if target.place is not None:
        from tinyllm.grading import stand_in  # noqa: PLC0415 - it imports this file

        stand_in.install(target, tell)
        return
    if any(isinstance(finder, Planted) and finder.target == target for finder in sys.meta_path):
        return
    if target.module in sys.modules:
        raise PlantError(f"{target.module} was imported before its text could be replaced")
    sys.meta_path.insert(0, Planted(target, tell))


def elsewhere(target: Target) -> bool:
    """Whether this process has another module under the target's name."""
    if target.place is not None or target.module not in sys.modules:
        return False
    spec = getattr(sys.modules[target.module], "__spec__", None)
    return not isinstance(getattr(spec, "loader", None), Planted)
