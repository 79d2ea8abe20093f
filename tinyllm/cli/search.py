"""The work of `tinyllm soak`: known counterexamples first, then searches, one after another."""

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from tinyllm.cli import reading, traces
from tinyllm.cli.executor import Pool
from tinyllm.cli.reach import Report, picture
from tinyllm.cli.slice import Slice, again, search
from tinyllm.exit_codes import INTERRUPTED, LOST, PASS, USAGE, WEAK
from tinyllm.jobs.cluster import ClusterError
from tinyllm.jobs.process import PATIENCE, Cancel, Here
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.soak import Soaked

SLICE = 30.0  # seconds of one search: a cluster reports this often, and loses this much with a worker
LOOK = 0.25  # seconds between two polls
SAY = 60.0  # seconds between two lines of progress without a terminal
LATE = 300.0  # seconds that a search may take beyond its time, to shorten its finding


class Search:
    """One soak; `report` has its results, `problem` says why it had to stop."""

    def __init__(self, console: Console, report: Report, part: tuple[int, int], folder: Path) -> None:
        self.console = console
        self.report = report
        self.problem = ""
        self._numbers = itertools.count(part[0] - 1, part[1])
        self._folder = folder
        self._cancelled = Cancel()
        self._running: dict[Future[Slice], int] = {}
        self._partial: dict[int, Soaked] = {}  # the last progress of each running search
        self._raw: dict[int, tuple[LawBroken, Path | None]] = {}  # not shortened yet

    def run(self, workers: Pool, seconds: float) -> None:
        """Run the known traces, then search until the time is up, a law breaks, or Ctrl-C."""
        started = time.monotonic()
        try:
            self._replay(workers)
            if self.report.code == PASS:
                self._search(workers, time.monotonic() + seconds)
        except (KeyboardInterrupt, SystemExit) as stop:
            self.stop(int(stop.code or 0) if isinstance(stop, SystemExit) else INTERRUPTED)
        except ClusterError as error:
            self.stop(LOST, str(error))
        except OSError as error:
            self.stop(USAGE, f"{error.filename or 'the system refuses'}: {error.strerror or error}")
        finally:
            self._cancelled.set()
            self._end(workers)
            self.report.seconds = time.monotonic() - started
            for one in list(self._partial.values()):  # a thread may still add to it
                _add(self.report, one)
            for broken, path in list(self._raw.values()):  # broken laws whose search did not end
                self._found(Slice(Soaked(broken=broken)), path)

    def stop(self, code: int, problem: str = "") -> None:
        """End with this code and problem; a broken law stays the verdict."""
        if self.report.code != WEAK:
            self.report.code = code
        self.problem = "; ".join(dict.fromkeys(filter(None, (self.problem, problem))))

    def show(self) -> None:
        """Print the finding, the reach, and what was not reached."""
        report, say = self.report, self.console.print
        if report.story:
            say()
            say(report.story, markup=False, soft_wrap=True)
            if report.trace:
                say(f"\nThe trace: {escape(report.trace)}; tinyllm replay runs it again.", soft_wrap=True)
            for path in {str(path) for _, path in self._raw.values() if path} - {report.trace}:
                say(f"Another, not shortened: {escape(path)}", soft_wrap=True)
        say()
        if report.programs:
            say(picture([report], self.console.width))
            say()
        if report.story:
            verdict = "[bold red]FAIL[/bold red]"
        else:
            verdict = (
                "[bold green]PASS[/bold green]" if report.programs else "[bold yellow]NOT RUN[/bold yellow]"
            )
        ended = "" if report.code in {PASS, WEAK} else ", ended early"
        say(f"{verdict}  {_counts(report)}{ended}  [dim](seed {report.seed}, shard {report.shard})[/dim]")

    def _place(self, workers: Pool) -> str:
        path, colon, name = self.report.implementation.partition(":")
        return self.report.implementation if path == "exec" else workers.place(path) + colon + name

    def _replay(self, workers: Pool) -> None:
        """Run the known traces; one that still breaks a law ends the soak."""
        impl = self._place(workers)
        runs = {}
        for path in traces.known(self._folder):
            try:
                text = reading.kept(path).decode("utf-8", errors="replace")
            except OSError as error:
                self._say(f"{path}: not run: {error.strerror}")
                continue
            runs[workers.executor.submit(again, impl, text, self._cancelled)] = path
        for future in as_completed(runs):
            path, one = runs[future], future.result()
            if one.unusable:
                self.stop(USAGE, one.unusable)
                return
            if one.skipped:
                self._say(f"{path}: not run: {one.skipped}")
                continue
            self.report.replayed += 1
            if one.died or one.soaked.broken:
                self.console.print(f"[red]{escape(str(path))} still fails[/red]", soft_wrap=True)
                self._found(one, path)
        if self.report.replayed and self.report.code == PASS:
            self.console.print(
                f"{self.report.replayed} known counterexamples hold, from {escape(str(self._folder))}"
            )

    def _search(self, workers: Pool, ends: float) -> None:
        impl = self._place(workers)
        with self._progress(ends) as show:
            while (left := ends - time.monotonic()) > 0 and self.report.code == PASS:
                while len(self._running) < workers.size():
                    number = next(self._numbers)
                    seconds = min(SLICE, left)
                    hear = Here(partial(self._hear, number))
                    seed = _seed(self.report.seed, number)
                    future = workers.executor.submit(search, impl, seed, seconds, self._cancelled, hear)
                    self._running[future] = number
                self._take(min(LOOK, left))
                show()
            while self._running and self.report.code == PASS and time.monotonic() < ends + LATE:
                self._take(LOOK)  # their time is up too
                show()

    def _take(self, seconds: float) -> None:
        """Wait for searches to end, up to `seconds`, and add up their results."""
        done, _ = wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED)
        for future in done:
            try:
                self._settle(self._running[future], future.result())
            except ClusterError as error:  # the other findings are kept
                self.stop(LOST, str(error))
            del self._running[future]  # last: Ctrl-C may come in between

    def _settle(self, number: int, one: Slice) -> None:
        if one.unusable:
            self.stop(USAGE, one.unusable)
        elif not one.cancelled:
            heard = self._partial.pop(number, Soaked())
            _add(self.report, heard if one.died or one.raw else one.soaked)
            if one.died or one.soaked.broken:
                self._found(one, self._keep(number, one))

    def _end(self, workers: Pool) -> None:
        """Collect the findings that are there, shortened or not."""
        wait(self._running, timeout=0 if workers.away else PATIENCE)
        self._take(0)
        if self._running and self.report.code == PASS:
            self.stop(LOST, f"{len(self._running)} searches did not come back in time")

    def _hear(self, number: int, event: Soaked | LawBroken) -> None:
        """Take the progress of a search; called in other threads."""
        if isinstance(event, Soaked):
            self._partial[number] = event
        else:
            path = self._written(lambda: traces.keep(self._folder, event, whole=False))
            _, former = self._raw.get(number, (None, None))  # one that showed in extensions alone
            self._raw[number] = event, path
            if former and former != path:
                former.unlink(missing_ok=True)

    def _keep(self, number: int, one: Slice) -> Path | None:
        broken = one.soaked.broken
        if broken is None:
            return self._written(lambda: traces.keep_last(self._folder, one.program, one.died))
        path = self._written(lambda: traces.keep(self._folder, broken, whole=not one.raw))
        _, raw = self._raw.pop(number, (None, None))
        if raw and path and raw != path:
            raw.unlink(missing_ok=True)
        return path or raw

    def _written(self, write: Callable[[], Path]) -> Path | None:
        try:
            return write()
        except OSError as error:
            text = f"the trace cannot be written to {self._folder}: {error.strerror}"
            self._say(f"{text}; the program is printed below")
            return None

    def _say(self, text: str) -> None:
        self.console.print(f"[yellow]{escape(text)}[/yellow]", soft_wrap=True)

    def _found(self, one: Slice, path: Path | None) -> None:
        self.report.code = WEAK
        if self.report.story:  # only the first is reported
            return
        broken = one.soaked.broken
        self.report.trace = str(path or "")
        self.report.law = broken.law if broken else None
        self.report.story = str(broken) if broken else f"While this program ran, {one.died}\n\n{one.program}"

    def _now(self, started: float) -> Report:
        """The report, with the progress of running searches."""
        report = replace(self.report, seconds=time.monotonic() - started)
        for one in list(self._partial.values()):
            _add(report, one)
        return report

    @contextmanager
    def _progress(self, ends: float) -> Iterator[Callable[[], None]]:
        """Show progress: a live table, or one line a minute without a terminal."""
        started = said = time.monotonic()
        seconds = ends - started
        if not self.console.is_terminal:

            def say() -> None:
                nonlocal said
                if time.monotonic() - said >= SAY:
                    said = time.monotonic()
                    self.console.print(_counts(self._now(started)))

            yield say
            return
        with Live(console=self.console, transient=True, auto_refresh=False) as live:

            def draw() -> None:
                now = self._now(started)
                left = timedelta(seconds=round(max(0.0, seconds - now.seconds)))
                at_work = (
                    f"{len(self._running)} searches under way, {left} left; Ctrl-C ends it with its report"
                )
                live.update(
                    Group(
                        Text(_counts(now)),
                        Text(at_work, "dim"),
                        Text(),
                        picture([now], self.console.width, whole=False),
                    ),
                    refresh=True,
                )

            yield draw


def _add(report: Report, one: Soaked) -> None:
    report.programs += one.programs
    report.lines += one.lines
    report.reached = report.reached + one.reached
    report.offers |= one.offers


def _counts(report: Report) -> str:
    rate = report.lines / report.seconds if report.seconds else 0.0
    took = timedelta(seconds=round(report.seconds))
    return f"{report.programs:,} programs, {report.lines:,} steps in {took}: {rate:,.0f} steps/s"


def _seed(base: int, number: int) -> int:
    """The seed of one search; soaks with neighbouring bases share none."""
    return int.from_bytes(hashlib.sha256(f"{base}/{number}".encode()).digest()[:8])
