"""The learner's path: the progress of a cache, and the next step with a hint and a picture."""

import tomllib
from collections.abc import Collection, Iterator, Mapping
from importlib import resources
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

UNWRITTEN = " is not written yet"
"""The end of a problem that a missing method causes."""


class Stage(NamedTuple):
    """A program in the trace language, a hint for it, and a hint for each test of the catalogue."""

    title: str
    program: str
    hint: str
    tests: dict[str, str]


def stages() -> list[Stage]:
    """The stages of learner/stages.toml, in order."""
    text = (resources.files("tinyllm.cli") / "learner" / "stages.toml").read_text(encoding="utf-8")
    return [Stage(**{"tests": {}, **stage}) for stage in tomllib.loads(text)["stage"]]


def show(console: Console, passed: Collection[str], programs: Mapping[str, str], unwritten: str) -> None:
    """Print the progress, and the next step with its hint and its picture.

    Args:
        console: where to print.
        passed: the names of the tests that pass.
        programs: the problem of each stage's program, by title; empty if it passes.
        unwritten: the first method that is not written yet, if one is missing.
    """
    console.print()
    step = None
    for number, stage in enumerate(stages(), 1):
        left = [name for name in stage.tests if name not in passed]
        wrong = programs.get(stage.title, "")
        done = len(stage.tests) - len(left) + (not wrong)
        mark = "[red]✗[/red]" if wrong or left else "[green]✓[/green]"
        total = len(stage.tests) + 1
        console.print(f"   stage {number} {mark} {stage.title:48}{done} of {total}", highlight=False)
        if step is None and (wrong or left):
            step = stage, wrong, "" if wrong else left[0]
    if step is None:  # the ten tests pass: the broken law was printed
        return
    stage, wrong, name = step
    missing = bool(unwritten) and wrong.endswith(UNWRITTEN)
    what = f"write {unwritten}." if missing else name or stage.title
    console.print(f"\n[bold]Next: {escape(what)}[/bold]", highlight=False)
    if name:
        from tinyllm.testing.catalogue import CATALOGUE  # noqa: PLC0415 - heavy

        console.print(f"  {escape(CATALOGUE[name].checks)}", highlight=False)
    elif not missing:
        console.print(f"  {escape(wrong)}", highlight=False)
    console.print(f"  a hint: {escape(stage.tests.get(name, stage.hint))}", highlight=False)
    console.print(
        "  the same program in a correct cache (new BLOCKS B LAYERS HEADS DIMS; append SEQ LAYER TOKENS):"
    )
    for number, begun in enumerate(stage.program.splitlines()[:2], 1):
        console.print(f"  [dim]{number}[/dim] [bold]{escape(begun)}[/bold]", highlight=False)
    for line in picture(stage.program, console.width):
        console.print(line, highlight=False, soft_wrap=True)


def picture(program: str, width: int) -> Iterator[object]:
    """A program drawn on the reference, line by line from its first append."""
    from tinyllm.cli.drawing import drawn  # noqa: PLC0415
    from tinyllm.render import frames  # noqa: PLC0415

    for frame in frames(program)[2:]:
        yield from drawn(frame, width)
