"""Grade a test suite by the planted bugs it kills: baseline, run, confirm, score.

Every run of the suite is a `Job` in a process of its own. A trial is one seed for all bugs. Clean runs come
before any bug, with two seeds or more, and again at the end, several times if a failure did not recur: a
suite that fails or is flaky is refused. `confirm.py` decides which failures are kills.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from tinyllm.exit_codes import BASELINE, INVALID, LOST, USAGE
from tinyllm.grading import confirm
from tinyllm.grading.bugs import MODULE, Bug, BugError
from tinyllm.grading.plant import Target
from tinyllm.grading.verdict import Grade, GradeError, Result, Trial
from tinyllm.grading.worker import Failure, Job, Outcome, run
from tinyllm.jobs.cluster import ClusterError
from tinyllm.jobs.process import PRELOAD, Cancel, Ended, call

BASELINE_TIMEOUT = 300.0  # seconds; the duration of the suite is not known yet
SUSPECT = 3  # more clean runs after a failure that did not recur: they see tests that fail one time in three
SLACK = 10.0  # a run with a bug may take this multiple of a clean run, plus as many seconds
SHOWN = 3  # of the tests that fail on clean code

PRELOAD.append("tinyllm.grading.warm")

Listener = Callable[[str, Bug | None, Trial | None], None]
"""Called with the progress: ("clean", None, None) after a clean run that passed, ("run", bug, None) after the
first run of a trial, ("bug", bug, trial) at its end."""


@dataclass
class Grader:
    """What to grade, and how.

    Args:
        tests: paths of tests, as for pytest.
        target: the module as it is, without a bug.
        bugs: what to plant.
        trials: how many seeds.
        seed: the first seed.
        jobs: the number of runs at the same time.
        timeout: seconds for a run; by default derived from the slowest clean run.
        keep_going: run all tests on each bug, for a matrix of bugs and tests.
        options: more options for pytest.
        place: maps a path to its name on the machine that does the runs.

    The tests must pass on each text that bugs are edits of, and on what these texts replace: the target, or
    the unchanged class of its place.
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
    place: Callable[[str], str] = str

    def grade(self, listener: Listener, executor: Executor | None = None) -> Grade:
        """Grade the suite; `executor` runs the jobs, threads of our own by default.

        Raises:
            GradeError: there is no verdict: the bugs do not apply, a clean run fails, no test uses the
                planted module, or the cluster is lost; then it has the results so far.
        """
        planted = self._apply()
        seeds = [self.seed + trial for trial in range(self.trials)]
        before = self._fingerprint()
        self._cancelled = Cancel()
        pool = executor or ThreadPoolExecutor(self.jobs, thread_name_prefix="grade")
        grade: Grade | None = None
        try:
            count, missed, slowest = self._baseline(pool, seeds, listener)
            self._unchanged(before)
            timeout = self.timeout or slowest * SLACK + SLACK
            results = {bug.id: Result(bug) for bug in self.bugs}
            grade = Grade(
                self.target, self.tests, count, list(results.values()), seeds, slowest, missed=missed
            )
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
        """The grade of the finished trials, or None."""
        known = [result for result in grade.results if result.trials] if grade else []
        done = sum(len(result.trials) for result in known)
        missing = len(self.bugs) * self.trials + len(self._clean) - done  # plus the clean runs at the end
        return replace(grade, results=known, missing=missing) if grade and known else None

    def _apply(self) -> dict[str, Target]:
        try:
            return {bug.id: bug.planted(self.target) for bug in self.bugs}
        except BugError as error:
            raise GradeError(INVALID, f"a bug does not apply to {self.target.module}", str(error)) from error

    @property
    def _clean(self) -> list[Target]:
        """The target with each text that bugs are edits of."""
        return list(dict.fromkeys(bug.clean(self.target) for bug in self.bugs))

    def _job(self, target: Target, seed: int) -> Job:
        there = replace(target, path=self.place(target.path))
        return Job(tuple(map(self.place, self.tests)), there, seed, self.keep_going, self.options)

    def _baseline(
        self, pool: Executor, seeds: list[int], listener: Listener
    ) -> tuple[int, tuple[str, ...], float]:
        """Clean runs with at least two seeds: the number of tests, the missed processes, the seconds."""
        as_it_is = self.target.with_source("") if self.target.place else self.target
        clean = list(dict.fromkeys([as_it_is, *self._clean]))
        several = seeds if len(seeds) > 1 else [*seeds, seeds[0] + 1]
        timeout = self.timeout or BASELINE_TIMEOUT
        runs: dict[Future[Ended], tuple[Target, int]] = {}
        for target in clean:
            for seed in several:
                job = self._job(target, seed)
                job = replace(job, keep_going=True, options=("--tb=short", *job.options))
                runs[pool.submit(once, job, timeout, self._cancelled)] = target, seed
        outcomes, green, slowest, red = [], set(), 0.0, []
        for future in as_completed(runs):
            ended, (target, seed) = future.result(), runs[future]
            problem = _problem(ended, timeout)
            if problem is None:
                outcomes.append((target, ended.value))
                green.add(target)
                slowest = max(slowest, ended.seconds)
                listener("clean", None, None)
            else:
                red.append((target, seed, problem, ended.output))
                if problem.code == USAGE:
                    break
        if red:
            raise self._refused(sorted(red, key=lambda one: clean.index(one[0])), green, as_it_is)
        counts = {outcome.tests for _, outcome in outcomes}
        if len(counts) > 1:
            raise GradeError(BASELINE, f"flaky: the number of tests changes between runs: {sorted(counts)}")
        missed = {command for _, outcome in outcomes for command in outcome.missed}
        count = counts.pop()
        if count and not any(outcome.used for _, outcome in outcomes):
            raise self._unused(missed)
        return count, tuple(sorted(missed)), slowest

    def _refused(
        self, red: list[tuple[Target, int, GradeError, str]], green: set[Target], as_it_is: Target
    ) -> GradeError:
        """The error for clean runs that failed."""
        target, seed, problem, output = red[0]
        said, place = str(problem), self.target.place
        if target in green:
            said += "; with another seed they pass: they are flaky"
        elif target != as_it_is and problem.code == BASELINE:
            own = place.impl if place else target.module
            other = "the reference" if target == self.target else Path(target.path).name
            said = (
                f"the tests pass on {own}, but not on {other} in its place: "
                f"they ask for more than the contract: {said}"
            )
        elif place:
            said += f"; on {place.impl} as it is"
        return GradeError(problem.code, f"{said} (seed {seed})", output)

    def _unused(self, missed: set[str]) -> GradeError:
        """The error if no test uses the planted module."""
        target = self.target
        if target.place:
            said = f"no test constructs {target.place.name} of {target.place.impl.partition(':')[0]}"
        elif target.cls:
            said = f"no test constructs {target.cls} of {target.module}"
        else:
            said = f"no test imports {target.module}"
        said += ", where the bugs are planted"
        if target.module == MODULE and not target.place:
            said += "; to grade the tests of your own cache: tinyllm check IMPL --tests PATH"
        return GradeError(USAGE, said, "\n".join(f"no bug can be planted in {one}" for one in sorted(missed)))

    def _run(
        self,
        pool: Executor,
        planted: dict[str, Target],
        results: dict[str, Result],
        seeds: list[int],
        timeout: float,
        listener: Listener,
    ) -> None:
        """Run every bug with every seed, confirm the kills, and run clean code last; fills `results`."""

        def submit(job: Job) -> Future[Ended]:
            return pool.submit(once, job, timeout, self._cancelled)

        def settle(name: str, trial: Trial) -> None:
            results[name].trials.append(trial)
            listener("bug", results[name].bug, trial)

        jobs = [(name, self._job(target, seed)) for seed in seeds for name, target in planted.items()]
        first = {submit(job): (name, job) for name, job in jobs}
        suspects, lost = [], None
        for future in as_completed(first):
            name, job = first[future]
            try:
                trial = confirm.judged(job.seed, future.result(), timeout)
            except ClusterError as error:  # the other results are kept
                lost = error
                continue
            listener("run", results[name].bug, None)
            if trial.status == "killed":
                clean = self._job(results[name].bug.clean(self.target), job.seed)
                suspects.append(confirm.Suspect(name, job, clean.target, trial))
            else:
                settle(name, trial)
        if lost:
            raise lost
        confirm.confirm(suspects, submit, settle)
        self._last([self._job(target, seeds[0]) for target in self._clean], results, submit, timeout)

    def _last(
        self, clean: list[Job], results: dict[str, Result], submit: confirm.Submit, timeout: float
    ) -> None:
        """The clean runs at the end: several of each if a failure did not recur."""
        unsteady = any(trial.unsteady for result in results.values() for trial in result.trials)
        last = [submit(job) for job in clean * (1 + SUSPECT * unsteady)]
        for future in last:
            ended = future.result()
            if problem := _problem(ended, timeout):
                text = f"flaky: clean runs passed before, but not at the end: {problem}"
                raise GradeError(BASELINE, text, ended.output)
        for result in results.values():
            result.trials.sort(key=lambda trial: trial.seed)

    def _unchanged(self, before: dict[str, str]) -> None:
        after = self._fingerprint()
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        if changed:
            text = f"files changed during the grading, and were not restored: {', '.join(changed)}"
            raise GradeError(BASELINE, text)

    def _fingerprint(self) -> dict[str, str]:
        """The digests of what bugs are edits of, and of every Python file of the tests."""
        files = [Path(target.path) for target in (self.target, *self._clean)]
        files += [Path(self.target.place.path)] if self.target.place else []
        for test in self.tests:
            path = Path(test.split("::")[0])
            files += path.rglob("*.py") if path.is_dir() else [path]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}


def once(job: Job, timeout: float, cancelled: Cancel) -> Ended:
    """Run the job in a process of its own."""
    return call(run, job, timeout=timeout, cancelled=cancelled)


def _problem(ended: Ended, timeout: float) -> GradeError | None:
    """Why a clean run cannot be the baseline, or None."""
    if ended.how == "timeout":
        return GradeError(BASELINE, f"the clean tests do not end within {timeout:.0f} s (--timeout)")
    if ended.how != "done":
        return GradeError(BASELINE, f"the clean tests end their own run: {confirm.how(ended)}")
    outcome: Outcome = ended.value
    if outcome.broken:
        return GradeError(USAGE, f"the tests cannot be run: {outcome.broken}")
    failures: list[Failure] = outcome.kills + outcome.late + outcome.excused
    if failures:
        said = "; ".join(f"{one.test} ({one.phase}): {one.message}" for one in failures[:SHOWN])
        more = f"; and {len(failures) - SHOWN} more" if len(failures) > SHOWN else ""
        return GradeError(BASELINE, f"the clean tests fail: {said}{more}")
    return None
