"""A planted bug as data: what goes wrong, the edits that bring it about, and a program that shows it."""

import difflib
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from tinyllm.grading.plant import PlantError, Target, find, read

HERE = Path(__file__).parent
FOLDER = next(folder for folder in (HERE / "planted", HERE.parents[1] / "mutants") if folder.is_dir())
"""The folder of the sets: beside this file in the wheel, `mutants` in the repository."""
SETS = ("course", "wild", "engine", "field")
MODULE = "tinyllm.infer.paged"
"""The module that the bugs of all sets are planted in; a test must construct its class.

The bugs of most sets are edits of its text, those of `field` of another text, which takes its place."""
CLASS = "PagedKVCache"


class BugError(ValueError):
    """A file of bugs is invalid, or a bug's edits do not fit the source."""


@dataclass(frozen=True)
class Edit:
    """Replace `find`, which occurs in the source exactly once."""

    find: str
    replace: str


class Text(NamedTuple):
    """A Python file and its text."""

    path: str
    source: str


@dataclass(frozen=True)
class Bug:
    """One planted bug.

    Its edits are of the text of the module that it is planted in, or of `implementation`, which then takes
    the place of that text.

    Attributes:
        id: short and unique, such as `s06`.
        title: what the code does wrong.
        symptom: what a user would see.
        edits: the change to the source.
        required: no pass while this bug survives.
        survives: the change is no bug, and no good suite objects to it.
        caught_by: names of the catalogue's tests that fail.
        laws: the laws it breaks.
        source: where the bug is known from.
        witness: the shortest trace that shows it; empty if there is none, or the module is no paged cache.
        cause: why tests tend to miss it.
        implementation: the text that the edits are of; None for that of the module.
    """

    id: str
    title: str
    symptom: str
    edits: tuple[Edit, ...]
    required: bool = False
    survives: bool = False
    caught_by: tuple[str, ...] = ()
    laws: tuple[int, ...] = ()
    source: str = ""
    witness: str = ""
    cause: str = ""
    implementation: Text | None = field(default=None, repr=False)

    def clean(self, target: Target) -> Target:
        """The target with the text that the edits are of, and no bug in it."""
        return replace(target, **self.implementation._asdict()) if self.implementation else target

    def planted(self, target: Target) -> Target:
        """The target with the bug in it. Raises BugError."""
        clean = self.clean(target)
        return clean.with_source(self.apply(clean.source))

    def apply(self, source: str) -> str:
        """The source with the bug in it.

        Raises:
            BugError: an edit's text does not occur exactly once, or the edits change nothing.
        """
        text = source
        for edit in self.edits:
            count = text.count(edit.find)
            if count != 1:
                raise BugError(f"{self.id}: this text stands {count} times in the source:\n{edit.find}")
            text = text.replace(edit.find, edit.replace)
        if text == source:
            raise BugError(f"{self.id}: its edits change nothing")
        return text

    def diff(self, target: Target) -> str:
        """The bug as a unified diff of the file that its edits are of."""
        clean, name = self.clean(target), Path(self.clean(target).path).name
        old = clean.source.splitlines(keepends=True)
        new = self.apply(clean.source).splitlines(keepends=True)
        return "".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", n=2))


def load(path: Path) -> list[Bug]:
    """The bugs of a TOML file, in its order. Raises BugError, which names the file and what is wrong.

    `implementation`, at its head, names a Python file beside it: the text that all of its bugs are edits of.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BugError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # of TOML, or of UTF-8
        raise BugError(f"{path} is not TOML: {error}") from error
    entries, named = tables.pop("bug", []), tables.pop("implementation", None)
    if tables or not isinstance(entries, list) or not entries:
        raise BugError(f"{path}: it must hold one [[bug]] or more, and nothing else but implementation")
    text = None if named is None else _implementation(path, named)
    bugs = [_bug(path, number, entry, text) for number, entry in enumerate(entries, 1)]
    ids = [bug.id for bug in bugs]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise BugError(f"{path}: ids used twice: {', '.join(twice)}")
    return bugs


def reference() -> Target:
    """The module that the bugs of all sets are planted in. Raises PlantError."""
    return find(MODULE, CLASS)


def load_set(name: str) -> list[Bug]:
    """The bugs of a set that ships with the project: one of `SETS`, or `all`."""
    names = SETS if name == "all" else (name,)
    return [bug for part in names for bug in load(FOLDER / f"{part}.toml")]


def _implementation(path: Path, named: Any) -> Text:
    if not isinstance(named, str):
        raise BugError(f"{path}: implementation has the wrong type: {named!r}")
    file = path.parent / named
    try:
        return Text(str(file), read(file))
    except PlantError as error:
        raise BugError(f"{path}: implementation: {error}") from error


def _bug(path: Path, number: int, entry: Any, implementation: Text | None) -> Bug:
    where = f"{path}, bug {number}"
    if not isinstance(entry, dict):
        raise BugError(f"{where}: it must be a table")
    fields = {
        name: kind for name, kind in Bug.__annotations__.items() if name not in {"edits", "implementation"}
    }
    edits = entry.pop("edits", None)
    if unknown := sorted(entry.keys() - fields):
        raise BugError(f"{where}: unknown keys {', '.join(unknown)}; known are edits, {', '.join(fields)}")
    if missing := sorted({"id", "title", "symptom"} - entry.keys()):
        raise BugError(f"{where}: {', '.join(missing)} missing")
    for name, value in entry.items():
        if not _fits(value, fields[name]):
            raise BugError(f"{where}: {name} has the wrong type: {value!r}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", entry["id"]):
        raise BugError(f"{where}: {entry['id']!r} is no id: letters, digits, '.', '_' and '-'")
    if not isinstance(edits, list) or not edits or not all(_is_edit(edit) for edit in edits):
        raise BugError(f"{where}: edits must be one or more tables of find and replace, find not empty")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()
    }
    return Bug(edits=tuple(Edit(**edit) for edit in edits), implementation=implementation, **values)


def _fits(value: Any, kind: Any) -> bool:
    if kind in {bool, str}:
        return isinstance(value, kind)
    return isinstance(value, list) and all(type(one) is get_args(kind)[0] for one in value)


def _is_edit(edit: Any) -> bool:
    return (
        isinstance(edit, dict)
        and edit.keys() == {"find", "replace"}
        and all(isinstance(text, str) for text in edit.values())
        and bool(edit["find"])
    )
