"""`tinyllm power`: how soon the machine finds each planted bug."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tinyllm.cli.executor import pool
from tinyllm.cli.extras import need
from tinyllm.cli.options import PROFILES, Jobs, On, Only, Seed, at_least, set_option
from tinyllm.cli.outputs import check_writable, write
from tinyllm.cli.screen import fail, progress_bar, terminal
from tinyllm.cli.suite import choose
from tinyllm.exit_codes import LOST, PASS, USAGE, WEAK

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

    from tinyllm.grading.bugs import Bug
    from tinyllm.grading.plant import Target
    from tinyllm.jobs.process import Cancel, Send
    from tinyllm.testing.power import Found

SO_FAR = Path("tinyllm-power-so-far.json")  # where no other file was named
SOON = 100  # programs within which the machine should find a bug
BUCKETS = (1, 3, 10, 30, SOON)
LONGEST = 600.0  # seconds for one trial
BAR = 40  # characters


@dataclass
class Power:
    """The trials of one bug by seed: a `Found`, or None if the machine found nothing."""

    bug: "Bug"
    trials: "dict[int, Found | None]" = field(default_factory=dict)
    directed: str = ""

    @property
    def found(self) -> "list[Found]":
        """The trials that found it."""
        return [trial for trial in self.trials.values() if trial is not None]

    @property
    def sure(self) -> bool:
        """Whether every trial found it soon, or a directed case did."""
        soon = [trial for trial in self.found if trial.programs <= SOON]
        return 0 < len(soon) == len(self.trials) or bool(self.directed)


def power(
    trials: Annotated[
        int, typer.Option(parser=at_least(1), metavar="N", help="Seeds to search from, for each bug.")
    ] = 10,
    jobs: Jobs = None,
    seed: Seed = 0,
    bug: Only = None,
    bug_set: Annotated[str | None, set_option("all")] = None,
    profile: Annotated[
        str, typer.Option(metavar="dev|ci|deep", help="When to give up: 100, 200 or 5,000 programs.")
    ] = "ci",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every trial as JSON.")] = None,
    executor: On = None,
) -> None:
    """Measure how soon the machine finds each planted bug: programs and lines to the kill.

    Every trial searches from its own seed, without the catalogue, the directed cases or shrinking. A bug that
    some trial does not find within 100 programs must be found by a directed case, which is named. The exit
    code is 1 if neither finds it.
    """
    need("pytest", "hypothesis")
    console = terminal()
    if profile not in PROFILES:
        fail(USAGE, f"--profile {profile}: expected one of {', '.join(PROFILES)}")
    check_writable(json)
    target, bugs = choose(bug or [], bug_set or "all", None, None)
    seeds = [seed + trial for trial in range(trials)]
    powers = [Power(one) for one in bugs if not one.survives]
    lost = _run(console, target, powers, seeds, profile, jobs, executor)
    _show(console, powers)
    code = LOST if lost else PASS if all(one.sure for one in powers) else WEAK
    if json or lost:
        write(json or SO_FAR, _as_json(powers, seeds, profile, code))
    if lost:
        fail(LOST, f"{lost}; the results so far are in {json or SO_FAR}")
    raise typer.Exit(code)


def search(send: "Send", target: "Target", seed: int, profile: str) -> "Found | str | None":
    """One trial, in its own process; without a profile, the directed case that finds the bug."""
    del send
    from tinyllm.testing.power import directed, factory_of, measure  # noqa: PLC0415 - heavy
    from tinyllm.testing.profiles import profile as settings_of  # noqa: PLC0415

    factory = factory_of(target.source, target.path, target.module)
    return measure(factory, seed, settings_of(profile)) if profile else directed(factory)


def trial(target: "Target", seed: int, profile: str, cancelled: "Cancel") -> Any:
    """The unit of work, one trial: its `Found`, or None if it found nothing in time."""
    from tinyllm.jobs.process import call  # noqa: PLC0415 - heavy

    ended = call(search, target, seed, profile, timeout=LONGEST, cancelled=cancelled)
    if ended.how == "error":
        raise RuntimeError(ended.value)
    return ended.value if ended.how == "done" else None


def _run(
    console: Console,
    target: "Target",
    powers: list[Power],
    seeds: list[int],
    profile: str,
    jobs: int | None,
    address: str | None,
) -> str:
    """Run all trials; return why the rest could not run, if the cluster was lost."""
    from concurrent.futures import as_completed  # noqa: PLC0415 - heavy

    from tinyllm.jobs import bundle  # noqa: PLC0415
    from tinyllm.jobs.cluster import ClusterError  # noqa: PLC0415
    from tinyllm.jobs.process import Cancel  # noqa: PLC0415

    cancelled = Cancel()
    with pool(address, jobs, bundle.nothing) as workers, progress_bar(console) as progress:
        task = progress.add_task("random programs", total=len(powers) * len(seeds))

        def submit(executor: "Executor", one: Power, seed: int, profile: str) -> "Future[Any]":
            return executor.submit(trial, one.bug.planted(target), seed, profile, cancelled)

        lost = ""
        try:
            futures = {
                submit(workers.executor, one, seed, profile): (one, seed) for seed in seeds for one in powers
            }
            for future in as_completed(futures):
                one, seed = futures[future]
                try:
                    one.trials[seed] = future.result()
                except ClusterError as error:  # the other results are kept
                    lost = str(error)
                progress.update(task, advance=1)
            late = (
                {} if lost else {submit(workers.executor, one, 0, ""): one for one in powers if not one.sure}
            )
            for future in as_completed(late):
                late[future].directed = future.result() or ""
        except ClusterError as error:
            lost = str(error)
        finally:
            cancelled.set()
    return lost


def _show(console: Console, powers: list[Power]) -> None:
    table = Table("bug", "what the code does wrong", box=None, pad_edge=False)
    for name in ("found", "programs", "worst", "lines", "worst"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in powers:
        programs, lines = [f.programs for f in one.found], [f.lines for f in one.found]
        counts = [text for values in (programs, lines) for text in (_median(values), _worst(values))]
        colour = "green" if one.sure else "red"
        found = f"[{colour}]{len(one.found)}/{len(one.trials)}[/{colour}]"
        also = f"directed: {one.directed}" if one.directed else ""
        table.add_row(one.bug.id, escape(one.bug.title), found, *counts, escape(also))
    console.print(table)
    if any(one.bug.cause for one in powers):
        console.print()
        console.print(_by_cause(powers))
    every = [trial and trial.programs for one in powers for trial in one.trials.values()]
    console.print(f"\nprograms to the kill, all {len(every)} trials")
    for label, count in _buckets(every):
        console.print(f"  {label:>12} {'█' * round(BAR * count / max(1, len(every))):{BAR}} {count}")
    medians = [statistics.median(f.programs for f in one.found) for one in powers if one.found]
    if medians:
        console.print(f"\nmedian of the medians: {statistics.median(medians):g} programs")
    if weak := [one.bug.id for one in powers if not one.sure]:
        console.print(
            f"[red]neither within {SOON} programs in every trial nor directed:[/red] {' '.join(weak)}"
        )


def _by_cause(powers: list[Power]) -> Table:
    """The bugs that have one, by the cause for which tests miss them."""
    table = Table("why tests miss them", box=None, pad_edge=False)
    for name in ("bugs", "found", "programs", "directed"):
        table.add_column(name, justify="right")
    table.add_column("missed")
    for cause in dict.fromkeys(one.bug.cause for one in powers if one.bug.cause):
        alike = [one for one in powers if one.bug.cause == cause]
        found = [found for one in alike for found in one.found]
        trials = sum(len(one.trials) for one in alike)
        missed = [one.bug.id for one in alike if not one.found and not one.directed]
        table.add_row(
            escape(cause),
            str(len(alike)),
            f"{len(found)}/{trials}",
            _median([one.programs for one in found]),
            str(sum(bool(one.directed) for one in alike)),
            " ".join(missed) or "-",
        )
    return table


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


def _trial_as_json(one: Power, seed: int) -> Any:
    if seed not in one.trials:
        return "lost"
    found = one.trials[seed]
    return found._asdict() if found else None


def _as_json(powers: list[Power], seeds: list[int], profile: str, code: int) -> dict[str, Any]:
    bugs = {
        one.bug.id: {
            "trials": [_trial_as_json(one, seed) for seed in seeds],
            "directed": one.directed,
        }
        for one in powers
    }
    return {"profile": profile, "seeds": seeds, "exitCode": code, "bugs": bugs}
