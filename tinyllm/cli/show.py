"""`tinyllm show`: draw the pool after each line of a trace, or the whole trace as a film strip."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tinyllm.cli import reading
from tinyllm.cli.options import REFERENCE, Exec
from tinyllm.cli.outputs import check_writable, write
from tinyllm.cli.screen import fail, terminal
from tinyllm.exit_codes import INTERRUPTED, USAGE, WEAK

if TYPE_CHECKING:
    from tinyllm.render import Frame

TITLE = "The worked example"
PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


def show(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE.trace]", help="The program, in the trace language; - is stdin."),
    ] = None,
    impl: Annotated[
        str | None,
        typer.Argument(metavar="[IMPL]", help="path/to/paged.py, pkg.module or pkg.module:Class."),
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="The worked example, in place of FILE.trace.")
    ] = False,
    step: Annotated[bool, typer.Option("--step", help="Wait for Enter after each line.")] = False,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it as a film strip too, of at most 24 panels."),
    ] = None,
    command: Exec = None,
) -> None:
    """Step through a program; show the pool, the block tables, the lengths and the cost after each line.

    A block is drawn as `[b1 #. s0 s1]`: its number, its slots (# is filled), and the sequences that hold it.
    The effect of a line is beside it: `new`, `copy of b1`, `freed`. Every law is checked, as by `replay`.

    Examples: `tinyllm show --example`, `tinyllm show x.trace paged.py --step`
    """
    from tinyllm.render import EXAMPLE, roll  # noqa: PLC0415 - heavy
    from tinyllm.render.labels import short  # noqa: PLC0415
    from tinyllm.testing.adapters.loading import ImplementationError, load  # noqa: PLC0415
    from tinyllm.testing.contract import capabilities  # noqa: PLC0415
    from tinyllm.testing.laws import LawBroken  # noqa: PLC0415
    from tinyllm.testing.trace import TraceError  # noqa: PLC0415

    file, impl = _source(file, impl, example=example)
    if step and str(file) == "-":
        fail(USAGE, "--step waits for Enter on stdin, and - reads the program from there")
    check_writable(svg)
    text = EXAMPLE if file is None else reading.text(file, stdin=str(file) == "-")
    name = "the example" if file is None else "stdin" if str(file) == "-" else str(file)
    try:
        factory = load(f"exec:{command}" if command else impl)
        capabilities(factory)
    except (ImplementationError, ValueError) as error:
        fail(USAGE, str(error))

    console, law = terminal(), None
    frames: list[Frame] = []
    try:
        for frame in roll(text, factory):
            _show(console, frame, wait=step and bool(frames))
            frames.append(frame)
    except LawBroken as broken:
        law = broken
    except TraceError as error:
        fail(USAGE, f"{name}: {short(str(error), 400)}")
    except KeyboardInterrupt:
        console.print()  # the cursor stands behind the prompt
        raise typer.Exit(INTERRUPTED) from None
    if law:
        last = frames[-1]
        console.print(
            f"line {last.number} of {name} breaks law {law.law}: {short(last.line, 400)}\n", **PLAIN
        )
        console.print(str(law), **PLAIN)
    else:
        console.print(f"every law holds after each of {len(frames)} lines")
    if svg:
        _draw(console, svg, frames, TITLE if file is None else Path(name).name)
    raise typer.Exit(WEAK if law else 0)


def _source(file: Path | None, impl: str | None, *, example: bool) -> tuple[Path | None, str]:
    """The file, or None for the example, and the implementation, the one argument of --example."""
    if not example:
        if file is None:
            fail(USAGE, "nothing to show: give a FILE.trace, - for stdin, or --example")
        return file, impl or REFERENCE
    if impl is not None:
        fail(USAGE, f"--example replaces FILE.trace and takes IMPL alone; got {file} and {impl}")
    return None, str(file or REFERENCE)


def _draw(console: Console, path: Path, frames: "list[Frame]", title: str) -> None:
    from tinyllm.render import PANELS, svg  # noqa: PLC0415

    write(path, svg(frames, title=title))
    some = f"{PANELS - 1} of " if len(frames) > PANELS else ""
    console.print(f"{path} has {some}{len(frames)} lines drawn", **PLAIN)


def _show(console: Console, frame: "Frame", *, wait: bool) -> None:
    from tinyllm.cli.drawing import INDENT, drawn  # noqa: PLC0415

    if wait:
        typer.echo(" " * INDENT + "Enter: the next line" if console.is_terminal else "", nl=False)
        sys.stdin.readline()  # at the end of stdin this returns at once
    for line in drawn(frame, console.width):
        console.print(line, soft_wrap=True)
    console.print()
