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


def show_diff(console: Console, text: str) -> None:
    """A unified diff, in colour where there is colour; as plain text it can be fed to `patch`."""
    if not console.is_terminal:
        print(text, end="")  # noqa: T201
        return
    from rich.syntax import Syntax  # noqa: PLC0415

    console.print(Syntax(text, "diff", theme="ansi_dark", background_color="default"))


def progress_bar(console: Console) -> "Progress":
    """What is done, of how much, for how long; nothing where nobody watches."""
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
