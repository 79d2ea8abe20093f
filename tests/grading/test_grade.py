"""The order of things: clean runs, every bug with every seed, a clean run at the end."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tinyllm.grading import bugs
from tinyllm.grading.bugs import Bug
from tinyllm.grading.grade import Grader
from tinyllm.grading.plant import Target
from tinyllm.grading.verdict import GradeError, Trial
from tinyllm.jobs.cluster import ClusterError

PASS, WEAK, USAGE, BASELINE, INVALID, TIMEOUT, LOST = range(7)
KILLER = "PRELUDE\ndef test(): assert not has_s02()"
TARGET = bugs.reference()
KNOWN = {bug.id: bug for bug in bugs.load_set("all")}
Heard = list[tuple[str, str | None, int | None]]


@pytest.fixture
def heard() -> Heard:
    return []


@pytest.fixture
def listener(heard: Heard) -> Callable[[str, Bug | None, Trial | None], None]:
    def listen(kind: str, bug: Bug | None, trial: Trial | None) -> None:
        heard.append((kind, bug.id if bug else None, trial.seed if trial else None))

    return listen


def test_one_trial(suite: Callable[..., Path], listener: Any, heard: Heard) -> None:
    """Two clean runs with two seeds, though one is asked for; the one at the end is not told of."""
    found = Grader((str(suite(KILLER)),), TARGET, [KNOWN["s02"], KNOWN["s12"]], seed=7).grade(listener)
    assert heard == [("clean", None, None)] * 2 + [
        ("run", "s02", None),
        ("run", "s12", None),
        ("bug", "s12", 7),
        ("bug", "s02", 7),
    ]
    assert [(result.bug.id, result.status) for result in found.results] == [
        ("s02", "killed"),
        ("s12", "survived"),
    ]
    assert (found.count, found.seeds) == (1, [7])
    assert found.clean_seconds > 0


def test_trials(suite: Callable[..., Path], listener: Any, heard: Heard) -> None:
    """The bug is seen with two seeds of three: killed in 2/3, and so not solved."""
    text = (
        "PRELUDE\nimport hypothesis.core\n"
        "def test(): assert not has_s02() or hypothesis.core.global_force_seed == 11"
    )
    grader = Grader((str(suite(text)),), TARGET, [KNOWN["s02"], KNOWN["s12"]], trials=3, seed=10, jobs=2)
    found = grader.grade(listener)
    assert heard[:3] == [("clean", None, None)] * 3
    assert {(name, seed) for kind, name, seed in heard if kind == "bug"} == {
        (name, seed) for name in ("s02", "s12") for seed in (10, 11, 12)
    }
    first = found.results[0]
    assert [(trial.seed, trial.status) for trial in first.trials] == [
        (10, "killed"),
        (11, "survived"),
        (12, "killed"),
    ]
    assert (first.kills, first.status, found.score, found.code) == (2, "survived", 0.0, WEAK)
    assert first.median("examples") == 1


def test_a_clean_run_of_each_trial_confirms_it(suite: Callable[..., Path], grade: Any) -> None:
    """What fails on clean code with the third seed alone is refused when that seed is among the trials."""
    path = suite(
        "PRELUDE\nimport hypothesis.core\n"
        "def test(): assert cache_of_one() and hypothesis.core.global_force_seed != 2"
    )
    assert grade(path, trials=2).code == WEAK
    verdict = grade(path, trials=3)
    assert verdict.code == BASELINE
    assert "with another seed they pass: they are flaky (seed 2)" in verdict.message


def test_an_executor_of_ones_own(suite: Callable[..., Path], listener: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        grader = Grader((str(suite(KILLER)),), TARGET, [KNOWN["s02"]])
        assert grader.grade(listener, pool).code == PASS
        assert pool.submit(int, "3").result() == 3, "it is left open"


class Lost(ThreadPoolExecutor):
    """Threads that are as a cluster whose scheduler goes after so many units."""

    def __init__(self, units: int) -> None:
        super().__init__(1)
        self.left = units

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            gone: Future[Any] = Future()
            gone.set_exception(ClusterError("the cluster was lost"))
            return gone
        return super().submit(fn, *args, **kwargs)


@pytest.mark.parametrize(
    ("units", "known", "missing"),
    [
        pytest.param(1, None, None, marks=pytest.mark.long),
        pytest.param(2, None, None, marks=pytest.mark.long),
        (3, None, None),
        (6, ["s12"], 3),
        pytest.param(10, ["s02", "s12"], 1, marks=pytest.mark.long),
    ],
)
def test_what_was_known_when_the_workers_were_lost(
    suite: Callable[..., Path], listener: Any, units: int, known: Any, missing: Any
) -> None:
    """Two clean runs, two bugs with two seeds, what confirms two kills, a clean run: the settled is kept."""
    grader = Grader((str(suite(KILLER)),), TARGET, [KNOWN["s02"], KNOWN["s12"]], trials=2)
    with Lost(units) as pool, pytest.raises(GradeError, match="the cluster was lost") as info:
        grader.grade(listener, pool)
    assert info.value.code == LOST
    found = info.value.so_far
    assert (found and [result.bug.id for result in found.results]) == known
    assert (found and found.missing) == missing
    if found:
        assert found.code == LOST
        assert f"{missing} runs are missing" in found.reasons


def test_all_tests_run_for_a_matrix(grade: Any) -> None:
    text = KILLER + "\ndef test_more(): assert not has_s02()\ndef test_blind(): pass"
    by = [grade(text, keep_going=more).grade.results[0].killed_by for more in (False, True)]
    names = [
        [name.rpartition("/")[2] for name in one] for one in by
    ]  # below whatever pytest takes for its root
    assert names == [["test_it.py::test"], ["test_it.py::test", "test_it.py::test_more"]]


def test_a_bug_that_does_not_apply() -> None:
    wrong = Target(bugs.MODULE, TARGET.path, "x = 1\n")
    with pytest.raises(GradeError) as info:
        Grader(("nowhere",), wrong, [KNOWN["s02"]]).grade(lambda *_: None)
    assert info.value.code == INVALID
    assert "s02: this text stands 0 times" in info.value.detail


def test_a_single_test_and_several_paths(suite: Callable[..., Path]) -> None:
    one, other = suite(KILLER), suite({"test_other.py": "def test_other(): pass"}, "more")
    for paths, count in (((f"{one}/test_it.py::test",), 1), ((str(one), str(other)), 2)):
        found = Grader(paths, TARGET, [KNOWN["s02"]], jobs=2).grade(lambda *_: None)
        assert (found.count, found.code) == (count, PASS)


def test_options_for_pytest(grade: Any) -> None:
    text = KILLER + "\ndef test_other(): assert cache_of_one()"
    assert grade(text, options=("-k", "other")).code == WEAK


def test_a_run_that_breaks_with_the_bug_is_invalid(grade: Any) -> None:
    """A kill that is followed by an error of pytest is none."""
    verdict = grade(
        {"conftest.py": "PRELUDE\ndef pytest_sessionfinish(): assert not has_s02()", "test_it.py": KILLER}
    )
    assert verdict.statuses == {"s02": "invalid"}
    assert verdict.code == INVALID


def test_time_is_up_for_a_bug_by_how_long_a_clean_run_takes(
    grade: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyllm.grading.grade.SLACK", 3.0)
    verdict = grade("PRELUDE\nimport time\ndef test():\n    if has_s02(): time.sleep(1000)")
    assert verdict.statuses == {"s02": "timeout"}
