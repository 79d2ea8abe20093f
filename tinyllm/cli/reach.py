"""`tinyllm reach`: the reports of soaks, as a table and as JSON, added up."""

import io
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tinyllm.cli import reading
from tinyllm.cli.outputs import append
from tinyllm.cli.screen import fail, terminal
from tinyllm.exit_codes import PASS, USAGE, WEAK

if TYPE_CHECKING:
    from tinyllm.testing.reach import Reached

WIDE = 95  # characters: what the table of what was reached needs
NOTHING = "no program ran to its end, so nothing was checked"
RARE = 0.001  # share of the programs below which a count is shown in its place


@dataclass
class Report:
    """The report of one soak: its subject, its time, its reach and its finding."""

    implementation: str
    seed: int
    shard: str = "1/1"
    seconds: float = 0.0
    programs: int = 0
    lines: int = 0
    reached: "Reached" = field(default_factory=Counter)
    offers: frozenset[str] = frozenset()
    replayed: int = 0
    law: int | None = None
    trace: str = ""
    story: str = ""
    code: int = PASS

    def as_json(self) -> dict[str, Any]:
        """The report as JSON."""
        from tinyllm.testing.reach import FEATURES, missed  # noqa: PLC0415 - heavy

        reach = {
            name: {str(step): self.reached[name, step] for step in one.steps}
            for name, one in FEATURES.items()
        }
        return {
            "implementation": self.implementation,
            "seed": self.seed,
            "shard": self.shard,
            "seconds": round(self.seconds, 1),
            "programs": self.programs,
            "steps": self.lines,
            "reach": reach,
            "notReached": missed(self.reached, self.offers),
            "offers": sorted(self.offers),
            "replayed": self.replayed,
            "law": self.law,
            "trace": self.trace,
            "story": self.story,
            "exitCode": self.code,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Report":
        """The report of a result of `as_json`. Raises KeyError, TypeError, ValueError or AttributeError."""
        return cls(
            str(found["implementation"]),
            int(found["seed"]),
            str(found["shard"]),
            float(found["seconds"]),
            int(found["programs"]),
            int(found["steps"]),
            Counter(
                {
                    (name, int(step)): int(count)
                    for name, steps in found["reach"].items()
                    for step, count in steps.items()
                }
            ),
            frozenset(found["offers"]),
            int(found["replayed"]),
            None if found["law"] is None else int(found["law"]),
            str(found["trace"]),
            str(found["story"]),
            int(found["exitCode"]),
        )


def reach(
    files: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="Files of `tinyllm soak --json`.")],
) -> None:
    """Add up the reports of several soaks: their programs, their joint reach, and what none reached.

    Under GitHub Actions the table is also added to the summary of the job. The exit code is the worst one of
    the reports: 1 if a law is broken.

    Example: `tinyllm reach soak-*/report.json`
    """
    from tinyllm.grading import github, junit  # noqa: PLC0415 - heavy

    reports = [_read(file) for file in files]
    console = terminal()
    table = Table("soak", "shard", "seed", box=None, pad_edge=False)
    for name in ("seconds", "programs", "steps"):
        table.add_column(name, justify="right")
    table.add_column("found")
    for one in reports:
        table.add_row(
            escape(one.implementation),
            escape(one.shard),
            str(one.seed),
            f"{one.seconds:,.0f}",
            f"{one.programs:,}",
            f"{one.lines:,}",
            _found(one),
        )
    console.print(table)
    console.print()
    console.print(picture(reports, console.width))
    broken = [one for one in reports if one.story]
    for one in broken:
        console.print()
        console.print(one.story, markup=False, soft_wrap=True)
    code = max((one.code for one in reports), key=lambda code: (code == WEAK, code))
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        plain = Console(width=110, file=io.StringIO(), color_system=None)
        plain.print(table, "", picture(reports, plain.width))
        shown = plain.file.getvalue()  # type: ignore[attr-defined]
        parts = [f"### {'FAIL' if code else 'PASS'}: {github.text(headline(reports))}\n"]
        parts += [github.detail("the shortest program that shows it", one.story) for one in broken]
        parts += [f"\n```\n{junit.printable(shown)}```\n"]
        append(Path(path), github.fit(parts))
    if code == PASS and not any(one.programs for one in reports):
        fail(USAGE, NOTHING)
    raise typer.Exit(code)


def _read(file: Path) -> Report:
    text = reading.text(file)
    try:
        return Report.from_json(json.loads(text))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        fail(USAGE, f"{file} is no report of `tinyllm soak --json`")


def _found(one: Report) -> str:
    if one.story:
        return f"[red]law {one.law} is broken[/red]" if one.law else "[red]its process died[/red]"
    return "nothing" if one.code == PASS else f"ended with {one.code}"


def headline(reports: Sequence[Report]) -> str:
    """The result of several soaks in one line."""
    programs, lines = sum(one.programs for one in reports), sum(one.lines for one in reports)
    broken = sorted({one.law for one in reports if one.law})
    laws = ", ".join(map(str, broken))
    held = "every law holds" if programs else "nothing was checked"
    died = "a process died" if any(one.story for one in reports) else held
    end = f"law {laws} is broken" if broken else died
    return f"{programs:,} programs, {lines:,} steps: {end}"


def picture(reports: Sequence[Report], width: int, *, whole: bool = True) -> Group:
    """The joint reach of some soaks and what none reached, in a width in characters."""
    from tinyllm.testing.reach import BEYOND, FEATURES, missed  # noqa: PLC0415 - heavy

    reached: Reached = sum((one.reached for one in reports), Counter())
    offers = frozenset().union(*(one.offers for one in reports))
    programs = sum(one.programs for one in reports)
    wide = width >= WIDE
    heads = ("at least so much in a program", "share of programs", "", "", "")
    table = Table(
        *(heads if wide else ["at least so much, in a share of programs"]), box=None, pad_edge=False
    )
    for name, one in FEATURES.items():
        if one.needs and one.needs not in offers and programs:
            continue
        cells = [_cell(step, reached[name, step], programs) for step in one.steps]
        for row in [[one.title, *cells]] if wide else [[one.title], ["  " + "  ".join(cells)]]:
            table.add_row(*row)
    never = "; ".join(missed(reached, offers) if programs else []) or "nothing of the above"
    lines = [Text.assemble(("Not reached: ", "bold"), never)]
    lines += [Text.assemble(("Out of reach: ", "bold"), BEYOND)] if whole else []
    return Group(table, Text(), *lines)


def _cell(step: int, count: int, programs: int) -> str:
    if not programs:
        return f"{step}"
    if not count:
        return f"{step} [red]never[/red]"
    return f"{step} {count / programs:.1%}" if count >= RARE * programs else f"{step} {count} times"
