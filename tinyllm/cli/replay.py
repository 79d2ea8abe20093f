"""`tinyllm replay`: run a program of cache operations from a file, checking every law after each line."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from tinyllm.cli import reading
from tinyllm.cli.options import REFERENCE, Exec, Impl, chosen
from tinyllm.cli.screen import fail, terminal
from tinyllm.exit_codes import USAGE, WEAK


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE.trace", help="The program, in the trace language.")],
    impl: Impl = REFERENCE,
    command: Exec = None,
) -> None:
    """Run a program from a file, and name the line and the law that break, if any.

    The trace language is that of the counterexamples that `tinyllm check` prints: `new 4 2 1 1 2`, `add 0`,
    `append 0 0 3`, `fork 0 1`, `append 1 0 9 ! OutOfBlocks`, `free 0`.
    """
    from tinyllm.testing.adapters.loading import ImplementationError, load  # noqa: PLC0415 - heavy
    from tinyllm.testing.laws import LawBroken  # noqa: PLC0415
    from tinyllm.testing.run import Run  # noqa: PLC0415
    from tinyllm.testing.trace import NotOffered, TraceError, parse, program  # noqa: PLC0415

    console = terminal()
    impl = chosen(impl, command)
    text = reading.text(file)
    try:
        run = Run(load(impl))
    except (ImplementationError, ValueError) as error:
        fail(USAGE, str(error))
    number, lines = 0, text.splitlines()
    try:
        program(text)
        while number < len(lines):
            number += 1
            for op in parse(lines[number - 1]):
                run.step(op)
        run.finish()
    except LawBroken as broken:
        console.print(f"line {number} of {file} breaks law {broken.law}: {escape(lines[number - 1])}\n")
        console.print(str(broken), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(WEAK) from None
    except NotOffered as needed:
        fail(USAGE, f"{file}, line {number}: the implementation does not offer {needed}")
    except TraceError as error:
        fail(USAGE, f"{file}{f', line {number}' if number else ''}: {error}")
    result = f"every law holds after each of {len(run.ops)} lines"
    console.print(f"{result}: {escape(command or impl)}", soft_wrap=True)
