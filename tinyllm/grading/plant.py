"""Put source text in a module's place: the one way in which a bug is planted.

A finder ahead of all others answers for one module name with the text it was given, in this process alone.
Nothing on disk is edited, and reloading the module, or importing it anew, finds the same text again. Where
the tests use a cache class of their own, the text is run aside, and its class stands in for theirs
(`stand_in.py`).
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
    """The module cannot be found, or it is too late to put a text in its place."""


@dataclass(frozen=True)
class Place:
    """A class that tests use, which the class of the planted text stands in for.

    Attributes:
        impl: how the class was named: `path/to/paged.py:Cache` or `pkg.module:Cache`.
        path: the file that defines it, under whatever name tests import that.
        name: its qualified name there.
        error: file and qualified name of the error by which it says that it is out of blocks.
    """

    impl: str
    path: str
    name: str
    error: tuple[str, str] | None = None


@dataclass(frozen=True)
class Target:
    """What a bug is planted in.

    Attributes:
        module: the dotted name of the module.
        path: its file.
        source: its text.
        cls: the class that a test has to construct, or it does not test the module; "" if any use will do.
        place: where the class goes, if tests do not import the module itself.
    """

    module: str
    path: str
    source: str
    cls: str = ""
    place: Place | None = None

    def with_source(self, source: str) -> "Target":
        """The same with another text."""
        return replace(self, source=source)

    def code(self) -> CodeType:
        """The text, compiled under a name that is no file: a traceback must not show lines from disk."""
        name = f"<planted {self.path}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        return compile(self.source, name, "exec", dont_inherit=True)


def find(module: str, cls: str = "") -> Target:
    """The module as it is on disk; it is not imported, though its parent packages are.

    Raises:
        PlantError: no such module, or one without Python source.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (Exception, SystemExit) as error:  # a parent package runs code of its own
        raise PlantError(f"there is no module {module!r}: {type(error).__name__}: {error}") from error
    if spec is None:
        raise PlantError(f"there is no module {module!r}")
    if not spec.origin or not spec.origin.endswith(".py"):
        raise PlantError(f"{module} has no Python source to plant a bug in ({spec.origin})")
    try:
        source = importlib.util.decode_source(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, UnicodeError) as error:
        raise PlantError(f"{spec.origin} cannot be read: {error}") from error
    return Target(module, spec.origin, source, cls)


def on_construction(cls: type, tell: Callable[[], None]) -> None:
    """Call `tell` when the class is first constructed; from then on it is as it was."""
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
    """Finder and loader of the target; `tell` is called when its text is put to use."""

    def __init__(self, target: Target, tell: Callable[[], None]) -> None:
        self.target = target
        self.tell = tell

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for the target's name alone."""
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
    """Answer for the target from now on; once is enough, though pytest may be run within pytest.

    `tell` is called, at least once, when its class is constructed; when its text is run, if it has none.

    Raises:
        PlantError: the module has been imported already; whoever holds it would keep the old text.
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
