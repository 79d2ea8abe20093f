"""What makes a failure a kill: it happens again, with the bug alone, and not without it.

After the first run of every bug, each failed test runs by itself, first on clean code and then again on the
bug. A clean run thus lies between its two failures: a burst of failures with another cause kills nothing, and
neither does a plugin that reorders tests. A failure that does not recur alone may need the tests before it:
then all tests run once more in the order of the first run, on clean code and on the bug.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from tinyllm.grading.plant import Target
from tinyllm.grading.verdict import Trial
from tinyllm.grading.worker import Failure, Job, Outcome
from tinyllm.jobs.process import Ended

Submit = Callable[[Job], Future[Ended]]
Settle = Callable[[str, Trial], None]


@dataclass(frozen=True)
class Suspect:
    """A bug on which a test failed: its id, the job, the target without it, the trial with its failures."""

    bug: str
    job: Job
    clean: Target
    trial: Trial

    @property
    def tests(self) -> tuple[Failure, ...]:
        """The tests that failed, without their messages, to be run again."""
        names = {(one.test, one.file) for one in self.trial.outcome.kills}
        return tuple(Failure(test, "", "", file) for test, file in sorted(names))


def judged(seed: int, ended: Ended, timeout: float) -> Trial:
    """The trial of a first run on a bug; "killed" if a test failed."""
    if ended.how == "timeout":
        return Trial(seed, "timeout", Outcome(), f"no end within {timeout:.0f} s")
    if ended.how != "done":
        note = f"the tests end their own run on this bug, but never on clean code: {how(ended)}"
        return Trial(seed, "invalid", Outcome(), note)
    outcome: Outcome = ended.value
    if outcome.broken:
        return Trial(seed, "invalid", outcome, outcome.broken)
    if outcome.kills:
        return Trial(seed, "killed", outcome)
    if outcome.late:
        return Trial(seed, "timeout", outcome, f"{outcome.late[0].test}: {outcome.late[0].message}")
    return Trial(seed, "survived", outcome)


def confirm(suspects: Sequence[Suspect], submit: Submit, settle: Settle) -> None:
    """Run the failed tests again, and settle every suspect. Raises ClusterError."""
    alone = [(one, replace(one.job, only=one.tests)) for one in suspects]
    rest = []
    for one, seen in zip(suspects, _again(alone, submit)):
        if seen >= {test.test for test in one.tests}:
            settle(one.bug, one.trial)
        else:
            rest.append((one, seen))
    ordered = [(one, replace(one.job, order=one.trial.outcome.order)) for one, _ in rest]
    for (one, seen), more in zip(rest, _again(ordered, submit)):
        kills = [kill for kill in one.trial.outcome.kills if kill.test in seen | more]
        outcome = replace(one.trial.outcome, kills=kills)
        if kills:
            settle(one.bug, replace(one.trial, outcome=outcome, unsteady=True))
        else:
            note = f"{one.tests[0].test} failed, but not again without failing on clean code too"
            note = f"{note}: run alone, and run after the same tests"
            settle(one.bug, Trial(one.trial.seed, "survived", outcome, note, unsteady=True))


def _again(jobs: Sequence[tuple[Suspect, Job]], submit: Submit) -> list[set[str]]:
    """For each suspect, the tests that pass on clean code in this job and then fail on the bug."""
    cleans = [replace(job, target=one.clean) for one, job in jobs]
    without = {job: submit(job) for job in set(cleans)}  # one for each test, shared by its bugs
    passed = {job: _passed(future.result()) for job, future in without.items()}
    runs = [submit(job) for _, job in jobs]
    return [_failed(future.result()) & passed[clean] for clean, future in zip(cleans, runs)]


def _failed(ended: Ended) -> set[str]:
    fit = ended.how == "done" and not ended.value.broken
    return {kill.test for kill in ended.value.kills} if fit else set()


def _passed(ended: Ended) -> set[str]:
    """The tests that ran and passed; none if the run did not finish."""
    if ended.how != "done" or ended.value.broken:
        return set()
    outcome: Outcome = ended.value
    return set(outcome.order) - {one.test for one in outcome.kills + outcome.excused + outcome.late}


def how(ended: Ended) -> str:
    """The end of a process that did not finish: its error, or its last line of output."""
    last = next(iter(str(ended.value or ended.output).strip().splitlines()[::-1]), "")
    return last if ended.how == "error" else f"without notice, after printing {last!r}"
