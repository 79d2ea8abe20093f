"""The HTML page of a grade, with the kit's words and pictures and the command line."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from tinyllm.cli.outputs import write
from tinyllm.grading.bugs import Bug
from tinyllm.grading.html_report import as_html
from tinyllm.grading.verdict import Grade
from tinyllm.render import frames, svg
from tinyllm.testing.catalogue import CATALOGUE
from tinyllm.testing.laws import LAWS, LawBroken
from tinyllm.testing.trace import TraceError


def write_page(
    console: Console, path: Path, grade: Grade, context: typer.Context, *, whole: bool = False
) -> None:
    """Write the grade as an HTML page, and print its path."""
    write(path, render(grade, context, whole=whole))
    console.print(f"\nThe page: {escape(str(path))}", soft_wrap=True)


def render(grade: Grade, context: typer.Context, *, whole: bool) -> str:
    """The page; for modules other than the cache, without words and pictures of the kit."""
    command = command_line(context)
    if not grade.in_reference:
        return as_html(grade, command=command, whole=whole)
    return as_html(grade, command=command, whole=whole, draw=draw, catchers=catchers)


def draw(bug: Bug) -> str:
    """The witness as a film strip on a correct cache; empty if it cannot be run."""
    if not bug.witness:
        return ""
    try:
        picture = svg(frames(bug.witness), title=f"{bug.id}: {bug.title}")
    except (TraceError, LawBroken, MemoryError):  # of somebody's own bugs
        return ""
    return picture


def catchers(bug: Bug) -> Sequence[str]:
    """The tests of the catalogue that catch the bug, or else the laws it breaks."""
    if bug.caught_by:
        known = {name: CATALOGUE.get(name) for name in bug.caught_by}
        return [f"{name} ({one.kind}): {one.checks}" if one else name for name, one in known.items()]
    return [f"one of law {law}, {': '.join(LAWS[law])}" for law in bug.laws if law in LAWS]


def command_line(context: typer.Context) -> str:
    """The command as given, quoted for a shell, without defaults."""
    words = context.command_path.split()
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        for one in value if isinstance(value, list | tuple) else [value]:
            option = [max(parameter.opts, key=len)] if parameter.param_type_name == "option" else []
            words += [*option, str(one)]
    return shlex.join(words)
