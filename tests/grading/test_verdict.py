"""What results are worth: the score, the reasons, the exit code."""

from typing import Any

import pytest

from tinyllm.grading.bugs import Bug, Edit
from tinyllm.grading.plant import Target
from tinyllm.grading.verdict import Grade, Result, Trial
from tinyllm.grading.worker import Failure, Outcome

PASS, WEAK, USAGE, BASELINE, INVALID, TIMEOUT = range(6)
STATUS = {"k": "killed", "s": "survived", "t": "timeout", "i": "invalid"}


def result(name: str, trials: str, **of_bug: Any) -> Result:
    """A bug and its trials, a letter each."""
    found = Result(Bug(name, "title", "symptom", (Edit("a", "b"),), **of_bug))
    for seed, letter in enumerate(trials):
        kills = [Failure(f"test_{seed}", "call", "")] if letter == "k" else []
        outcome = Outcome(tests=1, kills=kills, seconds=float(seed), examples=10 * seed)
        found.trials.append(Trial(seed, STATUS[letter], outcome))
    return found


def grade(*results: Result, count: int = 1) -> Grade:
    target = Target("module", "module.py", "a")
    return Grade(target, ("tests",), count, list(results), [0], 1.0)


def graded(spelling: str, **options: Any) -> Grade:
    """A bug a letter, one trial each; a capital letter is a required bug, and * one that must survive."""
    results, letters = [], iter(spelling)
    for number, letter in enumerate(letters):
        survives = letter == "*"
        kind = next(letters) if survives else letter
        results.append(result(f"b{number}", kind.lower(), required=kind.isupper(), survives=survives))
    return grade(*results, **options)


@pytest.mark.parametrize(
    ("spelling", "score", "code"),
    [
        ("kkkkk", 1.0, PASS),
        ("kkkks", 0.8, PASS),
        ("kkkss", 0.6, WEAK),
        ("kkks", 0.75, WEAK),
        ("sssss", 0.0, WEAK),
        ("Kkkks", 0.8, PASS),
        ("Skkkk", 0.8, WEAK),  # a required one survives
        ("kkkkt", 0.8, PASS),  # a timeout that does not matter
        ("kkktt", 0.6, TIMEOUT),  # either way
        ("kkkts", 0.6, TIMEOUT),  # a kill would make it 80 %
        ("kktss", 0.4, WEAK),  # a kill would not be enough
        ("Tkkkk", 0.8, TIMEOUT),
        ("TSkkkkkkkk", 0.8, WEAK),
        ("Tksss", 0.2, WEAK),
        ("kkkki", 0.8, INVALID),  # an invalid one always shows
        ("sssTi", 0.0, INVALID),
        ("kkkkk*s", 1.0, PASS),
        ("kkkkk*k", 1.0, WEAK),  # they object to what is no bug
        ("kkkkt*k", 0.8, WEAK),
        ("kkktt*k", 0.6, WEAK),  # with more time, too
        ("kkkss*k", 0.6, WEAK),  # and no kill
        ("kkkss*t", 0.6, WEAK),
        ("kkkkk*i", 1.0, INVALID),
        ("*s", 0.0, WEAK),  # nothing to be measured by
    ],
)
def test_score_and_exit_code(spelling: str, score: float, code: int) -> None:
    found = graded(spelling)
    assert found.score == pytest.approx(score)
    assert found.code == code
    assert bool(found.reasons) == (score < 0.8 or spelling[:1] in "ST" or "*k" in spelling)


def test_thirteen_bugs() -> None:
    """The chapter's: eleven of thirteen are enough, ten are not."""
    assert [graded("KK" + "k" * n + "s" * (11 - n)).code for n in (9, 8)] == [PASS, WEAK]


@pytest.mark.parametrize(
    ("trials", "status", "kills"),
    [
        ("k", "killed", 1),
        ("kk", "killed", 2),
        ("ks", "survived", 1),
        ("kst", "timeout", 1),
        ("kti", "invalid", 1),
    ],
)
def test_the_worst_trial_counts(trials: str, status: str, kills: int) -> None:
    found = result("b", trials)
    assert (found.status, found.kills) == (status, kills)


def test_medians_are_those_of_the_kills() -> None:
    found = result("b", "kskk")  # at 0, 2, 3 seconds and 0, 20, 30 examples
    assert (found.median("seconds"), found.median("examples")) == (2.0, 20)
    assert found.killed_by == ["test_0", "test_2", "test_3"]
    assert found.killers == ("test_0", " and 2 more")
    assert result("b", "ss").median("seconds") is None
    assert result("b", "ss").killers == ("", "")


@pytest.mark.parametrize(
    ("trials", "survives", "label", "is_right"),
    [
        ("kk", False, "killed", True),
        ("ks", False, "survived", False),
        ("kt", False, "timeout", False),
        ("ss", True, "as it must", True),
        ("sk", True, "objected", False),
        ("st", True, "timeout", False),
    ],
)
def test_labels(trials: str, survives: bool, label: str, is_right: bool) -> None:
    found = result("b", trials, survives=survives)
    assert (found.label, found.is_right) == (label, is_right)


def test_a_grade_counts_what_was_killed() -> None:
    found = grade(result("b", "k"), result("c", "s"), result("order", "k", survives=True))
    assert (found.killed, [one.bug.id for one in found.alive]) == (1, ["c"])
    assert found.verdict == "FAIL" and grade(result("b", "k")).verdict == "PASS"


@pytest.mark.parametrize(
    ("spelling", "options", "reasons"),
    [
        ("k", {}, []),
        ("s", {"count": 0}, ["there is no test to grade", "the score is 0%, below 80%"]),
        ("S", {}, ["b0 is required, and survives", "the score is 0%, below 80%"]),
        ("k*k", {}, ["b1 is no bug, and is killed"]),
        ("T", {}, ["b0 is required, and is no kill (timeout)", "the score is 0%, below 80%"]),
    ],
)
def test_reasons(spelling: str, options: dict[str, Any], reasons: list[str]) -> None:
    assert graded(spelling, **options).reasons == reasons


def test_a_required_bug_killed_now_and_then_is_not_killed() -> None:
    found = grade(result("b", "ksk", required=True), *(result("c", "kkk") for _ in range(4)))
    assert found.reasons == ["b is required, and survives in 1 of 3 trials"]
    assert found.code == WEAK


def test_one_objection_is_enough() -> None:
    """A bug must be killed with each seed; what is no bug must live with each."""
    found = grade(result("b", "kkk"), result("order", "ssk", survives=True))
    assert found.reasons == ["order is no bug, and is killed in 1 of 3 trials"]
    assert found.code == WEAK
