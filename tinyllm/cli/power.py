"""`tinyllm power`: how soon the machine alone finds each planted bug."""

import statistics
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tinyllm.cli import need
from tinyllm.cli.check import PROFILES
from tinyllm.cli.gate import check_writable, write
from tinyllm.cli.grade import (
    BugSet,
    Jobs,
    Only,
    Seed,
    at_least,
    choose,
    cores,
    progress_bar,
)
from tinyllm.cli.screen import fail, terminal

if TYPE_CHECKING:
    from mutants.bugs import Bug
    from mutants.plant import Target
    from mutants.process import Send
    from tinyllm.testing.power import Found

PASS, WEAK, USAGE = 0, 1, 2
SOON = 100  # programs: what the machine finds at all, it should find within so many
BUCKETS = (1, 3, 10, 30, SOON)
LONGEST = 600.0  # seconds for one trial
BAR = 40  # characters


@dataclass
class Power:
    """What the trials of one bug showed: a `Found` each, None where the machine found nothing."""

    bug: "Bug"
    trials: "list[Found | None]"
    directed: str = ""

    @property
    def found(self) -> "list[Found]":
        """The trials that found it."""
        return [trial for trial in self.trials if trial is not None]

    @property
    def sure(self) -> bool:
        """Found soon in every trial, or by a directed case."""
        soon = [trial for trial in self.found if trial.programs <= SOON]
        return len(soon) == len(self.trials) or bool(self.directed)


def power(
    trials: Annotated[
        int, typer.Option(parser=at_least(1), metavar="N", help="Seeds to search from, for each bug.")
    ] = 10,
    jobs: Jobs = None,
    seed: Seed = 0,
    bug: Only = None,
    bug_set: BugSet = "all",
    profile: Annotated[
        str, typer.Option(metavar="dev|ci|deep", help="When to give up: 100, 200 or 5,000 programs.")
    ] = "ci",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every trial as JSON.")] = None,
) -> None:
    """Measure how soon the machine alone finds each planted bug: programs and lines to the kill.

    Every trial searches from a seed of its own, without the catalogue, the directed cases or shrinking. What
    it does not find within 100 programs in every trial has to be found by a directed case, which is named:
    the exit code is 1 where neither does.
    """
    need("pytest", "hypothesis")
    console = terminal()
    if profile not in PROFILES:
        fail(USAGE, f"--profile {profile}: there are {', '.join(PROFILES)}")
    check_writable(*([json] if json else []))
    target, bugs = choose(bug or [], bug_set, None, None)
    seeds = [seed + trial for trial in range(trials)]
    powers = [Power(one, [None] * trials) for one in bugs if not one.survives]
    _run(console, target, powers, seeds, profile, jobs or cores())
    _show(console, powers, trials)
    code = PASS if all(one.sure for one in powers) else WEAK
    if json:
        write(json, _as_json(powers, seeds, profile, code))
    raise typer.Exit(code)


def search(send: "Send", target: "Target", seed: int, profile: str) -> "Found | str | None":
    """One trial, in a process of its own; without a profile, the directed case that finds the bug."""
    del send
    from tinyllm.testing.power import directed, factory_of, measure  # noqa: PLC0415 - heavy
    from tinyllm.testing.profiles import profile as settings_of  # noqa: PLC0415

    factory = factory_of(target.source, target.path, target.module)
    return measure(factory, seed, settings_of(profile)) if profile else directed(factory)


def _run(
    console: Console, target: "Target", powers: list[Power], seeds: list[int], profile: str, jobs: int
) -> None:
    from mutants.process import call  # noqa: PLC0415 - heavy

    cancelled = threading.Event()

    def work(bug: "Bug", seed: int, profile: str) -> Any:
        planted = target.with_source(bug.apply(target.source))
        ended = call(search, planted, seed, profile, timeout=LONGEST, cancelled=cancelled)
        if ended.how == "error":
            raise RuntimeError(f"{bug.id}, seed {seed}: {ended.value}")
        return ended.value if ended.how == "done" else None

    with progress_bar(console) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("random programs", total=len(powers) * len(seeds))
        try:
            futures = {
                pool.submit(work, one.bug, seed, profile): (one, number)
                for number, seed in enumerate(seeds)
                for one in powers
            }
            for future in as_completed(futures):
                one, number = futures[future]
                one.trials[number] = future.result()
                progress.update(task, advance=1)
            late = [one for one in powers if not one.sure]
            for one, name in zip(late, pool.map(lambda one: work(one.bug, 0, ""), late), strict=True):
                one.directed = name or ""
        finally:
            cancelled.set()
            pool.shutdown(cancel_futures=True)


def _show(console: Console, powers: list[Power], trials: int) -> None:
    table = Table("bug", "what the code does wrong", box=None, pad_edge=False)
    for name in ("found", "programs", "worst", "lines", "worst"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in powers:
        programs, lines = [f.programs for f in one.found], [f.lines for f in one.found]
        counts = [text for values in (programs, lines) for text in (_median(values), _worst(values))]
        colour = "green" if one.sure else "red"
        found = f"[{colour}]{len(one.found)}/{trials}[/{colour}]"
        also = f"directed: {one.directed}" if one.directed else ""
        table.add_row(one.bug.id, escape(one.bug.title), found, *counts, escape(also))
    console.print(table)
    console.print(f"\nprograms to the kill, all {len(powers) * trials} trials")
    every = [trial and trial.programs for one in powers for trial in one.trials]
    for label, count in _buckets(every):
        console.print(f"  {label:>12} {'█' * round(BAR * count / len(every)):{BAR}} {count}")
    medians = [statistics.median(f.programs for f in one.found) for one in powers if one.found]
    if medians:
        console.print(f"\nmedian of the medians: {statistics.median(medians):g} programs")
    if weak := [one.bug.id for one in powers if not one.sure]:
        console.print(
            f"[red]neither within {SOON} programs in every trial nor directed:[/red] {' '.join(weak)}"
        )


def _median(values: list[int]) -> str:
    return f"{statistics.median(values):g}" if values else "-"


def _worst(values: list[int]) -> str:
    return str(max(values)) if values else "-"


def _buckets(every: Sequence[int | None]) -> list[tuple[str, int]]:
    rows, low = [], 0
    for high in BUCKETS:
        count = sum(one is not None and low < one <= high for one in every)
        rows.append((f"{low + 1} to {high}" if low + 1 < high else str(high), count))
        low = high
    rows.append((f"more than {low}", sum(one is not None and one > low for one in every)))
    return [*rows, ("never", sum(one is None for one in every))]


def _as_json(powers: list[Power], seeds: list[int], profile: str, code: int) -> dict[str, Any]:
    bugs = {
        one.bug.id: {
            "trials": [trial._asdict() if trial else None for trial in one.trials],
            "directed": one.directed,
        }
        for one in powers
    }
    return {"profile": profile, "seeds": seeds, "exitCode": code, "bugs": bugs}
