"""A grade on the terminal: the table, what survives and why it matters, the score."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tinyllm.cli.screen import show_diff
from tinyllm.exit_codes import PASS

if TYPE_CHECKING:
    from tinyllm.grading.verdict import Grade, Result


def show(console: Console, grade: "Grade", *, reveal: bool) -> None:
    """Print the table, the surviving bugs and the score.

    The diff of a surviving bug is shown only with `reveal`, so that a test can be written from its symptom.
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
    """A status in its word and colour."""
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
