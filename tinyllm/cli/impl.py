"""Which cache a command is about: IMPL, or an engine behind a pipe with --exec."""

from typing import Annotated

import typer

from tinyllm.cli.screen import fail

REFERENCE = "tinyllm.infer.paged"
USAGE = 2

Impl = Annotated[
    str, typer.Argument(metavar="[IMPL]", help="path/to/paged.py, pkg.module or pkg.module:Class.")
]
Exec = Annotated[
    str | None,
    typer.Option("--exec", metavar="COMMAND", help="An engine behind a pipe, in place of IMPL."),
]


def chosen(impl: str, command: str | None) -> str:
    """What `load` takes; exits with a message when both are named."""
    if command is None:
        return impl
    if impl != REFERENCE:
        fail(USAGE, f"--exec {command} and {impl}: name one of the two")
    return f"exec:{command}"
