"""The terminal: a console, a message, a diff, a progress bar."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tinyllm.grading.foreign import visible

if TYPE_CHECKING:
    from rich.progress import Progress


NARROW = 60  # columns: a table with fewer would lose words


class Screen(Console):
    """A console that escapes control characters, so that foreign text cannot command the terminal.

    On a narrow terminal it prints each row of a table as lines.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, tables as lines if the terminal is narrow."""
        narrow = self.width < NARROW
        super().print(
            *(_records(one) if narrow and isinstance(one, Table) else one for one in objects), **options
        )

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a string, escaped; rich calls this to measure it too."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render any other object, its text escaped and rich's control codes kept."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def on_broken_pipe(self) -> None:
        """Re-raise for `streams.report_errors`, where rich would exit with 1."""
        raise  # noqa: PLE0704 - rich calls this where it has caught it


def _records(table: Table) -> str:
    """The rows of a table in rich's markup, one cell a line."""
    lines = []
    for name, *cells in zip(*(column.cells for column in table.columns)):
        lines.append(str(name).replace("\n", "  "))
        for column, cell in zip(table.columns[1:], cells):
            if said := str(cell).replace("\n", ", "):
                lines.append(f"  {column.header}: {said}" if column.header else f"  {said}")
    return "\n".join(lines)


def terminal(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; a pipe or a file gets a width that fits the tables."""
    console = Screen(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 110
    return console


def fail(code: int, message: str) -> NoReturn:
    """Print a problem on stderr, and exit."""
    terminal(stderr=True).print(f"[red]tinyllm:[/red] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


def show_diff(console: Console, text: str) -> None:
    """Print a unified diff, coloured on a terminal, else as text that `patch` reads."""
    if not console.is_terminal:
        print(text, end="")  # noqa: T201
        return
    from rich.syntax import Syntax  # noqa: PLC0415

    console.print(Syntax(text, "diff", theme="ansi_dark", background_color="default"))


def progress_bar(console: Console) -> "Progress":
    """A progress bar with counts and elapsed time, shown on a terminal alone."""
    from rich.progress import (  # noqa: PLC0415 - heavy
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
