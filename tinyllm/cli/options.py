"""Options that several commands have."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

PROFILES = ("dev", "ci", "deep")
REFERENCE = "tinyllm.infer.paged"

Impl = Annotated[
    str, typer.Argument(metavar="[IMPL]", help="path/to/paged.py, pkg.module or pkg.module:Class.")
]
Exec = Annotated[
    str | None,
    typer.Option("--exec", metavar="COMMAND", help="An engine behind a pipe, in place of IMPL."),
]


def at_least(bound: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """A parser of numbers with a lower bound; its error names the value and the bound."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if (value := kind(text)) >= bound:
                return value
        raise typer.BadParameter(f"{text} is no {'whole ' if kind is int else ''}number of at least {bound}")

    return parse


Jobs = Annotated[
    int | None,
    typer.Option(
        "-j",
        "--jobs",
        parser=at_least(1),
        metavar="N",
        help="Number of runs at the same time.",
        show_default="cores",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        parser=at_least(0), metavar="N", help="Seed of Hypothesis; the first, if there are several trials."
    ),
]
Only = Annotated[list[str] | None, typer.Option(metavar="ID", help="Plant only this bug; may be repeated.")]
Reveal = Annotated[bool, typer.Option("--reveal", help="Show what surviving bugs do in the code.")]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the grade as a page: what survives and why it matters."),
]
Junit = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write JUnit XML: a test case for each check and bug.")
]
Badge = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a badge: the JSON of a shields.io endpoint.")
]
On = Annotated[
    str | None,
    typer.Option(
        "--executor",
        metavar="dask://HOST:PORT",
        help="Have the workers of a Dask cluster do the work.",
        show_default="this machine",
    ),
]


def set_option(default: str) -> Any:
    """The option --set, with this default in the help."""
    meaning = "Which bugs to plant: course, wild, engine, field or all."
    return typer.Option("--set", metavar="NAME", help=meaning, show_default=default)


def chosen(impl: str, command: str | None) -> str:
    """The name that `load` takes; `clashes` refuses both."""
    return impl if command is None else f"exec:{command}"
