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
    """The verdict, the score, a table, and what lives with its symptom, as Markdown.

    What a bug that lives does in the code is seen by those who open it: a test is to find it.
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
    """A workflow command for each bug that lives, an error, or a warning where the verdict is a pass.

    And an error for what is no bug and does not live.
    """
    level = "warning" if grade.code == PASS else "error"
    found = []
    for result in grade.alive:
        said = f"A user would see: {result.bug.symptom}."
        place = location(grade.target.path, edited_line(result.bug, grade.target.source))
        found.append(annotation(level, said, **place, title=f"{result.bug.id} {result.status}"))
    for result in grade.objections:
        place = location(grade.target.path, edited_line(result.bug, grade.target.source))
        found.append(annotation(level, objection(result), **place, title=f"{result.bug.id} killed"))
    if not found and grade.reasons:
        found.append(annotation(level, "; ".join(grade.reasons), title="no pass"))
    return found


def edited_line(bug: Bug, source: str) -> int:
    """The first line that the bug changes, counted from 1."""
    pairs = zip_longest(source.splitlines(), bug.apply(source).splitlines())
    return next(number for number, (old, new) in enumerate(pairs, 1) if old != new)


def location(path: str, line: int | None = None) -> dict[str, str]:
    """`file` and `line` of an annotation, where the file is in the repository that is checked out."""
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
    value = printable(value).replace("%", "%25")  # first: it is what all others become
    for character in f"\r\n{also}":
        value = value.replace(character, f"%{ord(character):02X}")
    return value


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """The lines of a table whose cells are Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


def text(value: str) -> str:
    """Any text on one line, with nothing in it that Markdown or HTML would take for markup."""
    flat = " ".join(printable(value).split())
    return "".join(one if one.isalnum() or one in PLAIN else f"&#{ord(one)};" for one in flat)


def code(value: str) -> str:
    """The same as code."""
    return f"<code>{text(value)}</code>"


def detail(title: str, body: str) -> str:
    """A line that opens on a click, and then shows the body as it is."""
    shown = html.escape(printable(body)).replace("\n", "&#10;")  # an empty line would end the HTML
    return f"\n<details><summary>{text(title)}</summary>\n<pre>{shown}</pre>\n</details>\n"


def fit(parts: list[str]) -> str:
    """The parts as one text, as many of the first as GitHub takes."""
    size, kept = 0, []
    for part in parts:
        size += len(part.encode()) + 1
        if size > LIMIT:
            kept.append("\nThe rest is too long for a summary; it is in the log.\n")
            break
        kept.append(part)
    return "\n".join(kept) + "\n"
