"""Grade a test suite by the planted bugs it kills: baseline, run, confirm, score.

Every run of the suite is a `Job` in a process of its own. A trial is one seed for all bugs, and the clean run
with that seed is what confirms its kills: what fails on the bug passes without it. A kill must happen twice:
what fails now and then can be lucky in the clean runs. These come before any bug, with two seeds or more, and
once more at the end, several times if a kill did not happen again: a suite that is red or flaky is refused.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from tinyllm.grading.bugs import Bug, BugError
from tinyllm.grading.plant import Target
from tinyllm.grading.verdict import BASELINE, INVALID, LOST, USAGE, Grade, GradeError, Result, Trial
from tinyllm.grading.worker import Failure, Job, Outcome, run
from tinyllm.jobs.cluster import ClusterError
from tinyllm.jobs.process import Cancel, Ended, call

BASELINE_TIMEOUT = 300.0  # seconds; nothing is known yet of how long the suite takes
SUSPECT = 3  # more clean runs when a kill did not happen again: they see what fails every third time
SLACK = 10.0  # a run with a bug may take this many times the clean one, and as many seconds more

Runs = list[Ended]
"""A run, and a second one if something was killed in it."""
Listener = Callable[[str, Bug | None, Trial | None], None]
"""Told of progress: ("clean", None, None) for a clean run that passed, ("bug", bug, trial) for a trial."""


@dataclass
class Grader:
    """What to grade, and how.

    Args:
        tests: paths of tests, as for pytest.
        target: the module as it is, without a bug.
        bugs: what to plant.
        trials: how many seeds.
        seed: the first of them.
        jobs: runs at the same time.
        timeout: seconds for a run; by default it follows from how long a clean run takes.
        keep_going: run all tests on each bug, for a matrix of bugs and tests.
        options: more options for pytest.
        also: another text of the module that the tests must pass on as well: a learner's own.
        place: how a path is named where the runs are done, if that is another machine.
    """

    tests: tuple[str, ...]
    target: Target
    bugs: list[Bug]
    trials: int = 1
    seed: int = 0
    jobs: int = 1
    timeout: float | None = None
    keep_going: bool = False
    options: tuple[str, ...] = ()
    also: Target | None = None
    place: Callable[[str], str] = str

    def grade(self, listener: Listener, executor: Executor | None = None) -> Grade:
        """Grade the suite; `executor` runs the jobs, threads of our own by default.

        Raises:
            GradeError: there is no verdict: the bugs do not apply, the baseline is not green, or the machines
                that did the work are lost; then it has what was known by then.
        """
        planted = self._apply()
        seeds = [self.seed + trial for trial in range(self.trials)]
        before = self._fingerprint()
        self._cancelled = Cancel()
        pool = executor or ThreadPoolExecutor(self.jobs, thread_name_prefix="grade")
        grade: Grade | None = None
        try:
            count, imported, slowest = self._baseline(pool, seeds, listener)
            self._unchanged(before)
            timeout = self.timeout or slowest * SLACK + SLACK
            results = {bug.id: Result(bug) for bug in self.bugs}
            grade = Grade(self.target, self.tests, count, list(results.values()), seeds, imported, slowest)
            if count:
                self._run(pool, planted, results, seeds, timeout, listener)
            else:
                for result in grade.results:
                    result.trials += [Trial(seed, "survived", Outcome()) for seed in seeds]
            self._unchanged(before)
        except ClusterError as error:
            raise GradeError(LOST, str(error), so_far=self._so_far(grade)) from error
        finally:
            self._cancelled.set()
            if executor is None:
                pool.shutdown(wait=True, cancel_futures=True)
        return grade

    def _so_far(self, grade: Grade | None) -> Grade | None:
        """The part of a grade that is known, if any is."""
        known = [result for result in grade.results if result.trials] if grade else []
        done = sum(len(result.trials) for result in known)
        missing = len(self.bugs) * self.trials + 1 - done  # the clean run at the end is one more
        return replace(grade, results=known, missing=missing) if grade and known else None

    def _apply(self) -> dict[str, Target]:
        try:
            return {bug.id: self.target.with_source(bug.apply(self.target.source)) for bug in self.bugs}
        except BugError as error:
            raise GradeError(INVALID, f"a bug does not apply to {self.target.module}", str(error)) from error

    def _submit(self, pool: Executor, target: Target, seed: int, timeout: float) -> Future[Runs]:
        there = replace(target, path=self.place(target.path))
        job = Job(tuple(map(self.place, self.tests)), there, seed, self.keep_going, self.options)
        return pool.submit(_runs, job, timeout, self._cancelled)

    def _baseline(self, pool: Executor, seeds: list[int], listener: Listener) -> tuple[int, bool, float]:
        """Clean runs with every seed, two at least: how many tests, whether they import it, seconds."""
        clean = [self.target] + ([self.also] if self.also else [])
        several = seeds if len(seeds) > 1 else [*seeds, seeds[0] + 1]
        timeout = self.timeout or BASELINE_TIMEOUT
        runs = {
            self._submit(pool, target, seed, timeout): (target, seed) for target in clean for seed in several
        }
        outcomes, green, slowest, red = [], set(), 0.0, []
        for future in as_completed(runs):
            ended, (target, seed) = future.result()[0], runs[future]
            problem = _problem(ended, timeout)
            if problem is None:
                outcomes.append(ended.value)
                green.add(target)
                slowest = max(slowest, ended.seconds)
                listener("clean", None, None)
            else:
                red.append((target, seed, problem, ended.output))
                if problem.code == USAGE:
                    break
        if red:
            target, seed, problem, output = red[0]
            where = "" if target is self.target else f" on {target.path}"
            flaky = f"; with another seed they pass: they are flaky{where}" if target in green else where
            raise GradeError(problem.code, f"{problem}{flaky} (seed {seed})", output)
        counts = {outcome.tests for outcome in outcomes}
        if len(counts) > 1:
            raise GradeError(BASELINE, f"flaky: the number of tests changes between runs: {sorted(counts)}")
        return counts.pop(), all(outcome.imported == "planted" for outcome in outcomes), slowest

    def _run(
        self,
        pool: Executor,
        planted: dict[str, Target],
        results: dict[str, Result],
        seeds: list[int],
        timeout: float,
        listener: Listener,
    ) -> None:
        """Every bug with every seed, and a last clean run beside them; `results` are filled as they come."""
        runs = {
            self._submit(pool, target, seed, timeout): (name, seed)
            for seed in seeds
            for name, target in planted.items()
        }
        last = [self._submit(pool, self.target, seeds[0], timeout)]
        lost: ClusterError | None = None
        for future in as_completed(runs):
            name, seed = runs[future]
            try:
                trial = _trial(seed, future.result(), timeout)
            except ClusterError as error:  # what others have done, or can still do, is not to be lost with it
                lost = error
                continue
            results[name].trials.append(trial)
            listener("bug", results[name].bug, trial)
        if lost:
            raise lost
        if any(trial.unsteady for result in results.values() for trial in result.trials):
            last += [self._submit(pool, self.target, seeds[0], timeout) for _ in range(SUSPECT)]
        for future in last:
            ended = future.result()[0]
            if problem := _problem(ended, timeout):
                text = f"flaky: clean runs passed before, but not at the end: {problem}"
                raise GradeError(BASELINE, text, ended.output)
        for result in results.values():
            result.trials.sort(key=lambda trial: trial.seed)

    def _unchanged(self, before: dict[str, str]) -> None:
        after = self._fingerprint()
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        if changed:
            text = f"files changed while they were graded, and were left as they are: {', '.join(changed)}"
            raise GradeError(BASELINE, text)

    def _fingerprint(self) -> dict[str, str]:
        """A digest of every Python file among the tests, and of the module."""
        files = [Path(self.target.path)]
        for test in self.tests:
            path = Path(test.split("::")[0])
            files += path.rglob("*.py") if path.is_dir() else [path]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}


def _runs(job: Job, timeout: float, cancelled: Cancel) -> Runs:
    """Run the job; once more if something was killed."""
    first = call(run, job, timeout=timeout, cancelled=cancelled)
    if first.how != "done" or first.value.broken or not first.value.kills:
        return [first]
    return [first, call(run, job, timeout=timeout, cancelled=cancelled)]


def _trial(seed: int, runs: Runs, timeout: float) -> Trial:
    ended, *more = runs
    if ended.how == "timeout":
        return Trial(seed, "timeout", Outcome(), f"no end within {timeout:.0f} s")
    if ended.how != "done":
        return Trial(seed, "invalid", Outcome(), f"the tests ended their own run: {_how(ended)}")
    outcome: Outcome = ended.value
    if outcome.broken:
        return Trial(seed, "invalid", outcome, outcome.broken)
    if not outcome.kills:
        return Trial(seed, "survived", outcome)
    again = {kill.test for one in more if one.how == "done" for kill in one.value.kills}
    kills = [kill for kill in outcome.kills if kill.test in again]
    if not kills:
        note = f"{outcome.kills[0].test} failed, but not when it was run again with the same seed"
        return Trial(seed, "survived", replace(outcome, kills=[]), note, unsteady=True)
    return Trial(seed, "killed", replace(outcome, kills=kills))


def _problem(ended: Ended, timeout: float) -> GradeError | None:
    """Why a clean run is no baseline, if it is none."""
    if ended.how == "timeout":
        return GradeError(BASELINE, f"the clean tests do not end within {timeout:.0f} s (--timeout)")
    if ended.how != "done":
        return GradeError(BASELINE, f"the clean tests end their own run: {_how(ended)}")
    outcome: Outcome = ended.value
    if outcome.broken:
        return GradeError(USAGE, f"the tests cannot be run: {outcome.broken}")
    failures: list[Failure] = outcome.kills + outcome.excused
    if failures:
        first = failures[0]
        return GradeError(BASELINE, f"the clean tests fail: {first.test} ({first.phase}): {first.message}")
    return None


def _how(ended: Ended) -> str:
    """How a process ended that did not run to its end: its error, or the last that it printed."""
    last = next(iter(str(ended.value or ended.output).strip().splitlines()[::-1]), "")
    return last if ended.how == "error" else f"without notice, after printing {last!r}"
