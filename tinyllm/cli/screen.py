"""What a person sees: the console, a verdict, a diff, a message."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tinyllm.exit_codes import PASS
from tinyllm.grading.foreign import visible

if TYPE_CHECKING:
    from tinyllm.grading.verdict import Grade, Result


NARROW = 60  # columns: a table with fewer would lose words


class Screen(Console):
    """A console which shows control characters as escapes: what others wrote gives a terminal no orders.

    It prints a table row by row where there is no room for columns side by side.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich does."""
        narrow = self.width < NARROW
        super().print(
            *(_records(one) if narrow and isinstance(one, Table) else one for one in objects), **options
        )

    def render_str(self, text: str, **options: Any) -> Text:
        """As rich does; each string comes by, also to be measured."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does; what is no string comes by in pieces, and rich's own orders are apart from them."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def on_broken_pipe(self) -> None:
        """Nobody reads on: `streams.errors_told` is to know, which rich's exit with 1 might not reach."""
        raise  # noqa: PLE0704 - rich calls this where it has caught it


def _records(table: Table) -> str:
    """The rows of a table, a line a cell, in rich's markup."""
    lines = []
    for name, *cells in zip(*(column.cells for column in table.columns)):
        lines.append(str(name).replace("\n", "  "))
        for column, cell in zip(table.columns[1:], cells):
            if said := str(cell).replace("\n", ", "):
                lines.append(f"  {column.header}: {said}" if column.header else f"  {said}")
    return "\n".join(lines)


def terminal(*, stderr: bool = False) -> Console:
    """Where to print; a pipe or a file has no width of its own, and gets one that the tables fit into."""
    console = Screen(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 110
    return console


def fail(code: int, message: str) -> NoReturn:
    """Say what is wrong on stderr, and exit."""
    terminal(stderr=True).print(f"[red]tinyllm:[/red] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


def show(console: Console, grade: "Grade", *, reveal: bool) -> None:
    """The verdict for a person: the table, what survives and why it matters, the score.

    What a surviving bug of ours does in the code is told only with `reveal`: a test is to find it.
    """
    reveal = reveal or not grade.in_reference
    if grade.count:
        console.print(_table(grade, reveal=reveal))
    for result in grade.results if grade.count else []:
        if result in grade.alive:
            _show_alive(console, grade, result, reveal=reveal)
        elif result.objected:
            _show_objection(console, grade, result)
    colour = "green" if grade.code == PASS else "red"
    seeds = (
        f"seed {grade.seeds[0]}" if len(grade.seeds) == 1 else f"seeds {grade.seeds[0]} to {grade.seeds[-1]}"
    )
    console.print(
        f"\n[bold {colour}]{grade.verdict}[/]  {grade.sentence}  [dim]({grade.count} tests, {seeds})[/dim]"
    )
    for reason in grade.reasons:
        console.print(f"      {escape(reason)}")
    for command in grade.missed:
        console.print(f"      no bug was planted in {escape(command)}", soft_wrap=True)


def _table(grade: "Grade", *, reveal: bool) -> Table:
    table = Table(
        "bug", "", "what the code does wrong", "killed by", "s", "examples", box=None, pad_edge=False
    )
    for name in ("s", "examples"):
        table.columns[[c.header for c in table.columns].index(name)].justify = "right"
    many = len(grade.seeds) > 1
    for result in grade.results:
        status = coloured(result.label)
        if many:
            status += f" {result.kills}/{len(result.trials)}"
        seconds, examples = result.median("seconds"), result.median("examples")
        table.add_row(
            result.bug.id,
            status,
            "[dim](see below)[/dim]"
            if result.label == "survived" and not reveal
            else escape(result.bug.title),
            escape("".join(result.killers)),
            "" if seconds is None else f"{seconds:.2f}",
            "" if examples is None else f"{examples:.0f}",
        )
    return table


def coloured(status: str) -> str:
    """The status in the words and the colour of the table."""
    good, bad = ("killed", "as it must"), ("survived", "objected")
    colour = "green" if status in good else "red" if status in bad else "yellow"
    words = {
        "survived": "SURVIVES",
        "as it must": "survives",
        "timeout": "TIMEOUT",
        "invalid": "INVALID",
        "objected": "KILLED",
    }
    return f"[{colour}]{words.get(status, status)}[/{colour}]"


def _show_alive(console: Console, grade: "Grade", result: "Result", *, reveal: bool) -> None:
    bug = result.bug
    console.print(
        f"\n[bold]{bug.id}[/bold] {coloured(result.status)}  a user would see: {escape(bug.symptom)}"
    )
    hidden = result.label == "survived" and not reveal
    if not hidden:
        console.print(f"  what the code does wrong: {escape(bug.title)}")
    for note in result.notes:
        console.print(f"  {escape(note)}")
    if bug.caught_by:
        console.print(f"  the kind of test that catches it: {', '.join(bug.caught_by)}")
    if grade.in_reference:
        from tinyllm.grading.junit import repeat  # noqa: PLC0415 - heavy

        console.print(f"  see it: {escape(repeat(grade, bug))}")
    if result.trials and result.trials[0].outcome.excused:
        first = result.trials[0].outcome.excused[0]
        console.print(f"  no kill: {escape(first.test)}: {escape(first.message)}")
    if hidden:
        console.print("  what the code does wrong, and its diff: add --reveal")
    else:
        show_diff(console, grade.diff(bug))


def _show_objection(console: Console, grade: "Grade", result: "Result") -> None:
    from tinyllm.grading.junit import objection  # noqa: PLC0415 - heavy

    console.print(f"\n{escape(objection(result))}", soft_wrap=True)
    console.print(f"  what the code does otherwise: {escape(result.bug.title)}")
    show_diff(console, grade.diff(result.bug))


def show_diff(console: Console, text: str) -> None:
    """A unified diff, in colour where there is colour; as plain text it can be fed to `patch`."""
    if not console.is_terminal:
        print(text, end="")  # noqa: T201
        return
    from rich.syntax import Syntax  # noqa: PLC0415

    console.print(Syntax(text, "diff", theme="ansi_dark", background_color="default"))
