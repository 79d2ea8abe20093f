"""A grade for GitHub Actions: a summary in Markdown, and annotations at the lines where bugs were planted."""

import html
import os
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

from tinyllm.exit_codes import PASS
from tinyllm.grading.bugs import Bug
from tinyllm.grading.junit import explain, objection, printable
from tinyllm.grading.verdict import Grade, Result

LIMIT = 1_000_000  # bytes; GitHub takes 1 MiB a step
PLAIN = frozenset(" ,()/")
WORDS = {
    "survived": "**survives**",
    "timeout": "**timeout**",
    "invalid": "**invalid**",
    "as it must": "survives, as it must",
}


def summary(grade: Grade) -> str:
    """The verdict, the score, a table, and the surviving bugs with their symptoms, as Markdown.

    The diff of a surviving bug is folded, so that a test can be written from its symptom.
    """
    head = [
        f"### {grade.verdict}: {grade.sentence}",
        "",
        *(f"- {text(reason)}" for reason in grade.reasons),
        "",
    ]
    head += table(("bug", "", "what the code does wrong", "killed by"), map(_row, grade.results))
    alive = [
        detail(f"{result.bug.id} {result.status}: {result.bug.symptom}", explain(grade, result))
        for result in grade.alive
    ]
    alive += [detail(f"{one.bug.id} is no bug: {one.bug.title}", objection(one)) for one in grade.objections]
    return fit(["\n".join(head), *alive])


def _row(result: Result) -> tuple[str, ...]:
    status = WORDS.get(result.label, result.label)
    if result.bug.survives and not result.is_right:
        status = f"**no bug, but {'killed' if result.objected else result.status}**"
    title = "(see below)" if result.label == "survived" else text(result.bug.title)
    first, more = result.killers
    return text(result.bug.id), status, title, f"{code(first)}{more}" if first else ""


def annotations(grade: Grade) -> list[str]:
    """A workflow command for each surviving bug and each objection: an error, or a warning on a pass."""
    level = "warning" if grade.code == PASS else "error"
    found = []
    for result in grade.alive:
        said = f"A user would see: {result.bug.symptom}."
        place = _edited(grade, result.bug)
        found.append(annotation(level, said, **place, title=f"{result.bug.id} {result.status}"))
    for result in grade.objections:
        place = _edited(grade, result.bug)
        found.append(annotation(level, objection(result), **place, title=f"{result.bug.id} killed"))
    if not found and grade.reasons:
        found.append(annotation(level, "; ".join(grade.reasons), title="no pass"))
    return found


def _edited(grade: Grade, bug: Bug) -> dict[str, str]:
    """The location of the bug's first edit."""
    clean = bug.clean(grade.target)
    return location(clean.path, edited_line(bug, clean.source))


def edited_line(bug: Bug, source: str) -> int:
    """The number of the first line that the bug changes, from 1."""
    pairs = zip_longest(source.splitlines(), bug.apply(source).splitlines())
    return next(number for number, (old, new) in enumerate(pairs, 1) if old != new)


def location(path: str, line: int | None = None) -> dict[str, str]:
    """`file` and `line` of an annotation; empty if the file is not in the checked-out repository."""
    root = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd()).resolve()
    full = Path(path).resolve()
    if not full.is_relative_to(root) or not full.is_file():
        return {}
    place = {"file": full.relative_to(root).as_posix()}
    return place | ({"line": str(line)} if line else {})


def annotation(level: str, message: str, **properties: str) -> str:
    """A workflow command such as `::error file=a.py,line=1,title=s06::...`, on one line."""
    named = ",".join(f"{name}={_escape(value, ':,')}" for name, value in properties.items())
    return f"::{level}{' ' if named else ''}{named}::{_escape(message)}"


def _escape(value: str, also: str = "") -> str:
    value = printable(value).replace("%", "%25")  # first: the other escapes contain it
    for character in f"\r\n{also}":
        value = value.replace(character, f"%{ord(character):02X}")
    return value


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """The lines of a table whose cells are Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


def text(value: str) -> str:
    """The text on one line, escaped for Markdown and HTML."""
    flat = " ".join(printable(value).split())
    return "".join(one if one.isalnum() or one in PLAIN else f"&#{ord(one)};" for one in flat)


def code(value: str) -> str:
    """The text as code, escaped."""
    return f"<code>{text(value)}</code>"


def detail(title: str, body: str) -> str:
    """A folded section with the body unchanged."""
    shown = html.escape(printable(body)).replace("\n", "&#10;")  # an empty line would end the HTML
    return f"\n<details><summary>{text(title)}</summary>\n<pre>{shown}</pre>\n</details>\n"


def fit(parts: list[str]) -> str:
    """The parts as one text, cut at GitHub's limit."""
    size, kept = 0, []
    for part in parts:
        size += len(part.encode()) + 1
        if size > LIMIT:
            kept.append("\nThe rest is too long for a summary; it is in the log.\n")
            break
        kept.append(part)
    return "\n".join(kept) + "\n"
