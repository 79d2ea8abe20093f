"""Options that contradict each other, and reports that would overwrite a file.

An `Exact` command refuses them before it does anything, where it would otherwise ignore one in silence.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand

from tinyllm.cli.screen import fail
from tinyllm.exit_codes import USAGE

Values = Mapping[str, Any]


class Clash(NamedTuple):
    """Parameters that cannot be given together, the reason, and the condition on the other values."""

    names: tuple[str, ...]
    why: str
    when: Callable[[Values], bool] = lambda _: True


def _greedy(values: Values) -> bool:
    many = values.get("n", 1) > 1
    return not values["temperature"] and not (many and values["temperature"] is None)


PAGED = "is for --cache paged"
DRAWN = "is for random draws, and --temperature 0 draws nothing"
CLASHES: dict[str, tuple[Clash, ...]] = {
    "grade": (Clash(("bugs", "bug_set"), "say which bugs to plant: name one of the two"),),
    "show": (
        Clash(("impl", "command"), "say which cache to show: name one of the two"),
        Clash(("example", "file", "command"), "take FILE.trace for IMPL, and --exec takes its place"),
    ),
    **dict.fromkeys(
        ("check", "replay", "soak"),
        (Clash(("impl", "command"), "say which cache it is: name one of the two"),),
    ),
    "generate": (
        Clash(("num_blocks",), PAGED, lambda values: values["cache"] == "contiguous"),
        Clash(("block_size",), PAGED, lambda values: values["cache"] == "contiguous"),
        Clash(("top_p",), DRAWN, _greedy),
        Clash(("seed",), DRAWN, _greedy),
        Clash(("chat", "prompt_ids"), "do not go together: the chat template is for a text"),
    ),
}
"""By the name of the command."""

REPORTS = {
    "json": ".json",
    "badge": ".json",
    "matrix": ".csv",
    "html": ".html",
    "junit": ".xml",
    "svg": ".svg",
}
"""Options that name a file to write, and the suffix of its format."""
OTHERS = {".py", ".toml", ".trace", ".gguf", ".ini", ".cfg", ".htm"}
"""Other suffixes that name a format; `.htm` is one of HTML."""


class Exact(TyperCommand):
    """A command that refuses options it would ignore, and one file for two uses."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command, unless its options contradict each other."""
        context: typer.Context = ctx
        for clash in CLASHES.get(context.info_name or "", ()):
            if all(map(given(context), clash.names)) and clash.when(context.params):
                named = " and ".join(_called(context, name) for name in clash.names)
                fail(USAGE, f"{named} {clash.why}")
        _each_its_own_file(context)
        return super().invoke(context)


def given(context: typer.Context) -> Callable[[str], bool]:
    """A function that says whether a parameter was given, by its name."""

    def tells(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name in {"COMMANDLINE", "ENVIRONMENT"}

    return tells


def _called(context: typer.Context, name: str) -> str:
    (parameter,) = (one for one in context.command.params if one.name == name)
    option = parameter.param_type_name == "option"
    return max(parameter.opts, key=len) if option else str(context.params[name])


def _each_its_own_file(context: typer.Context) -> None:
    written = {
        name: value
        for name, value in context.params.items()
        if name in REPORTS and isinstance(value, Path) and (value.is_file() or not value.exists())
    }
    for name, path in written.items():
        own = REPORTS[name]
        for suffix in (Path(one).suffix.lower() for one in (path, os.path.realpath(path))):
            if suffix in {*REPORTS.values(), *OTHERS} - {own, ".htm" if own == ".html" else own}:
                fail(
                    USAGE, f"{_called(context, name)} {path}: it writes {own}, and this name ends in {suffix}"
                )
    for (one, path), (other, same) in itertools.combinations(written.items(), 2):
        if _same(path, same):
            both = f"{_called(context, one)} {path} and {_called(context, other)} {same}"
            fail(USAGE, f"{both} are one file: name two")
    for (name, path), read in itertools.product(written.items(), _read(context)):
        if _same(path, read):
            fail(USAGE, f"{_called(context, name)} {path} would overwrite {read}, which is read")


def _read(context: typer.Context) -> Iterator[Path]:
    """The files that the other parameters name."""
    for name, value in context.params.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if name not in REPORTS and isinstance(one, str | Path):
                path = str(one).partition("::")[0]
                if os.path.isfile(path):  # noqa: PTH113 - False for what can be no path
                    yield Path(path)


def _same(one: Path, other: Path) -> bool:
    """Whether two paths name the same file."""
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there yet
        return os.path.realpath(one) == os.path.realpath(other)
