"""Put source text in a module's place: the one way in which a bug is planted.

A finder ahead of all others answers for one module name with the text it was given, in this process alone.
Nothing on disk is edited, and reloading the module, or importing it anew, finds the same text again.
"""

import importlib.abc
import importlib.util
import linecache
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType


class PlantError(RuntimeError):
    """The module cannot be found, or it is too late to put a text in its place."""


@dataclass(frozen=True)
class Target:
    """A module: its dotted name, its file, its text, and other names under which tests may import it."""

    module: str
    path: str
    source: str
    aliases: tuple[str, ...] = ()

    def with_source(self, source: str) -> "Target":
        """The same module with another text."""
        return replace(self, source=source)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that it goes by."""
        return (self.module, *self.aliases)


def find(module: str) -> Target:
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
    return Target(module, spec.origin, source)


class Planted(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finder and loader of the target; `used` says whether its text has been run."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.used = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for the target's names alone."""
        del path, target
        if fullname not in self.target.names:
            return None
        spec = ModuleSpec(fullname, self, origin=self.target.path, is_package=self.is_package(fullname))
        spec.has_location = True
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(str(Path(self.target.path).parent))
        return spec

    def is_package(self, fullname: str) -> bool:
        """Whether the target is a package's `__init__`."""
        return fullname in self.target.names and Path(self.target.path).name == "__init__.py"

    def get_source(self, fullname: str) -> str:
        """The planted text; tracebacks show it."""
        del fullname
        return self.target.source

    def get_code(self, fullname: str) -> CodeType:
        """The text, compiled under a name that is no file: a traceback must not show lines from disk."""
        name, text = f"<planted {self.target.path}>", self.get_source(fullname)
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        return compile(text, name, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        """Run the text in the module."""
        self.used = True
        super().exec_module(module)


def install(target: Target) -> Planted:
    """Answer for the target from now on; once is enough, though pytest may be run within pytest.

    Raises:
        PlantError: the module has been imported already; whoever holds it would keep the old text.
    """
    for finder in sys.meta_path:
        if isinstance(finder, Planted) and finder.target == target:
            return finder
    if early := [name for name in target.names if name in sys.modules]:
        raise PlantError(f"{early[0]} was imported before its text could be replaced")
    planted = Planted(target)
    sys.meta_path.insert(0, planted)
    return planted


def proof(target: Target) -> str:
    """What this process imported under the target's names: `planted`, `nothing`, or `another` text."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, Planted)]
    modules = [sys.modules[name] for name in target.names if name in sys.modules]
    if modules:
        loaders = {getattr(getattr(module, "__spec__", None), "loader", None) for module in modules}
        return "planted" if loaders <= set(finders) else "another"
    used = any(finder.used for finder in finders if finder.target.module == target.module)
    return "planted" if used else "nothing"
