"""Which cache a command is about: IMPL, or an engine behind a pipe with --exec."""

from typing import Annotated

import typer

REFERENCE = "tinyllm.infer.paged"

Impl = Annotated[
    str, typer.Argument(metavar="[IMPL]", help="path/to/paged.py, pkg.module or pkg.module:Class.")
]
Exec = Annotated[
    str | None,
    typer.Option("--exec", metavar="COMMAND", help="An engine behind a pipe, in place of IMPL."),
]


def chosen(impl: str, command: str | None) -> str:
    """What `load` takes; `options` refuses both."""
    return impl if command is None else f"exec:{command}"
