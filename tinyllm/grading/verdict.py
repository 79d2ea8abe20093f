"""The grade of a suite: trials, results, the score, the exit code."""

import statistics
from dataclasses import dataclass, field

from tinyllm.exit_codes import INVALID, LOST, PASS, TIMEOUT, WEAK
from tinyllm.grading.bugs import MODULE, Bug
from tinyllm.grading.plant import Target
from tinyllm.grading.worker import Outcome

THRESHOLD = 0.80
"""The share of the counted bugs that a pass needs."""

STATUSES = ("killed", "survived", "timeout", "invalid")


class GradeError(Exception):
    """There is no verdict. `code` is the exit code, `detail` the output that shows the reason.

    `so_far` is the grade of the finished trials, if the others were lost.
    """

    def __init__(self, code: int, message: str, detail: str = "", so_far: "Grade | None" = None) -> None:
        super().__init__(message)
        self.code = code
        self.detail = detail
        self.so_far = so_far


@dataclass(frozen=True)
class Trial:
    """One bug and one seed: `status` is one of `STATUSES`, `unsteady` marks a failure that did not recur."""

    seed: int
    status: str
    outcome: Outcome
    note: str = ""
    unsteady: bool = False


@dataclass
class Result:
    """One bug and its trials. Killed means killed in every trial."""

    bug: Bug
    trials: list[Trial] = field(default_factory=list)

    @property
    def status(self) -> str:
        """The worst of its trials: invalid, then timeout, then survived."""
        statuses = {trial.status for trial in self.trials}
        return next((s for s in ("invalid", "timeout", "survived") if s in statuses), "killed")

    @property
    def kills(self) -> int:
        """The number of trials that killed it."""
        return sum(trial.status == "killed" for trial in self.trials)

    @property
    def killed_by(self) -> list[str]:
        """Node ids of all tests that killed it, in any trial."""
        return sorted({kill.test for trial in self.trials for kill in trial.outcome.kills})

    @property
    def killers(self) -> tuple[str, str]:
        """The name of the first test that killed it, and ` and N more`; empty where there is none."""
        names = sorted({test.rpartition("::")[2] for test in self.killed_by}) or [""]
        return names[0], f" and {len(names) - 1} more" if len(names) > 1 else ""

    @property
    def notes(self) -> list[str]:
        """The notes of its trials, each text once."""
        return list(dict.fromkeys(trial.note for trial in self.trials if trial.note))

    @property
    def objected(self) -> bool:
        """Whether a test fails, in any trial, on a change that is no bug."""
        return self.bug.survives and self.kills > 0

    @property
    def is_right(self) -> bool:
        """Whether every trial ended as it must: a bug killed, a change that is no bug alive."""
        return self.status == ("survived" if self.bug.survives else "killed") and not self.objected

    @property
    def label(self) -> str:
        """The status, or `as it must` or `objected` for a change that is no bug."""
        if self.objected:
            return "objected"
        return "as it must" if self.bug.survives and self.is_right else self.status

    def median(self, what: str) -> float | None:
        """Median `seconds` or `examples` to a kill; None without a kill."""
        values = [getattr(trial.outcome, what) for trial in self.trials if trial.status == "killed"]
        return statistics.median(values) if values else None


@dataclass(frozen=True)
class Grade:
    """The verdict on a suite, partial if runs are `missing`; processes `missed` ran without a bug."""

    target: Target
    tests: tuple[str, ...]
    count: int
    results: list[Result]
    seeds: list[int]
    clean_seconds: float
    missing: int = 0
    missed: tuple[str, ...] = ()

    @property
    def counted(self) -> list[Result]:
        """The bugs that count: all but those that must survive."""
        return [result for result in self.results if not result.bug.survives]

    @property
    def killed(self) -> int:
        """How many of the counted bugs were killed; a timeout is no kill."""
        return sum(result.status == "killed" for result in self.counted)

    @property
    def alive(self) -> list[Result]:
        """The counted bugs that were not killed."""
        return [result for result in self.counted if result.status != "killed"]

    @property
    def objections(self) -> list[Result]:
        """The changes that are no bug, and were killed."""
        return [result for result in self.results if result.objected]

    @property
    def killers(self) -> list[str]:
        """Node ids of the tests that killed anything, sorted."""
        return sorted({test for result in self.results for test in result.killed_by})

    @property
    def in_reference(self) -> bool:
        """Whether the bugs are planted in place of the reference cache."""
        return self.target.module == MODULE

    def diff(self, bug: Bug) -> str:
        """A bug as a unified diff of the file that its edits are of."""
        return bug.diff(self.target)

    @property
    def score(self) -> float:
        """The share of the counted bugs that were killed; 0 where none counts."""
        return self.killed / len(self.counted) if self.counted else 0.0

    @property
    def sentence(self) -> str:
        """The score in words, such as `13 of 13 planted bugs killed: 100%`."""
        trials = f" in each of {len(self.seeds)} trials" if len(self.seeds) > 1 else ""
        return f"{self.killed} of {len(self.counted)} planted bugs killed{trials}: {self.score:.0%}"

    @property
    def reasons(self) -> list[str]:
        """The reasons why the verdict is not a pass."""
        found = []
        if self.missing:
            found.append(f"{self.missing} runs are missing")
        if not self.count:
            found.append("there is no test to grade")
        found += [f"{r.bug.id} is required, and {_alive(r)}" for r in self.counted if _bad(r)]
        found += [f"{r.bug.id} is no bug, and is killed{_in(r, r.kills)}" for r in self.objections]
        if self.score < THRESHOLD:
            found.append(f"the score is {self.score:.0%}, below {THRESHOLD:.0%}")
        return found

    @property
    def verdict(self) -> str:
        """`PASS` or `FAIL`."""
        return "PASS" if self.code == PASS else "FAIL"

    @property
    def code(self) -> int:
        """The exit code."""
        if self.missing:
            return LOST
        if any(result.status == "invalid" for result in self.results):
            return INVALID
        if not self.reasons:
            return PASS
        return TIMEOUT if self._passes_with_timeouts() else WEAK

    def _passes_with_timeouts(self) -> bool:
        """Whether the verdict would be a pass, were each timeout a kill."""
        if self.objections:
            return False
        dead = sum(result.status in {"killed", "timeout"} for result in self.counted)
        required = all(r.status in {"killed", "timeout"} for r in self.counted if r.bug.required)
        timeouts = any(result.status == "timeout" for result in self.counted)
        return timeouts and required and dead / len(self.counted) >= THRESHOLD


def _bad(result: Result) -> bool:
    return result.bug.required and result.status != "killed"


def _alive(result: Result) -> str:
    some = _in(result, len(result.trials) - result.kills)
    return f"{'survives' if result.status == 'survived' else f'is no kill ({result.status})'}{some}"


def _in(result: Result, count: int) -> str:
    """` in N of M trials`; empty if N is all of them."""
    return f" in {count} of {len(result.trials)} trials" if count < len(result.trials) else ""
