"""Plugins that shuffle, that end what is late, that write reports: they change no verdict, and no file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PASS, WEAK, USAGE, BASELINE, INVALID, TIMEOUT = range(6)
Grade = Callable[..., Any]

SHUFFLES = "import random\ndef pytest_collection_modifyitems(items): random.SystemRandom().shuffle(items)\n"
MANY = """
PRELUDE
import pytest

def has_s12():
    cache = PagedKVCache(4, 2, 2, 1, 1)
    cache.add_seq(0)
    cache.append(0, 0, np.ones((1, 1, 1)), np.ones((1, 1, 1)))
    return cache.gather(0, 1)[0].shape[1]

@pytest.mark.parametrize("n", range(8))
def test_s02(n): assert not has_s02()

@pytest.mark.parametrize("n", range(8))
def test_s12(n): assert not has_s12()

@pytest.mark.parametrize("n", range(8))
def test_either(n): assert not has_s02() and not has_s12()

def test_neither(): assert cache_of_one()
"""


@pytest.mark.parametrize(
    "keep_going",
    [pytest.param(False, marks=pytest.mark.long), True],
    ids=["verdict", "matrix"],
)
def test_a_plugin_that_shuffles_changes_nothing(grade: Grade, keep_going: bool) -> None:
    """Whatever each of the runs happens to begin with: in each of two trials."""
    verdict = grade(
        {"conftest.py": SHUFFLES, "test_it.py": MANY}, "s02", "s12", "s13", trials=2, keep_going=keep_going
    )
    assert verdict.statuses == {"s02": "killed", "s12": "killed", "s13": "survived"}
    assert [result.kills for result in verdict.grade.results] == [2, 2, 0]
    assert not [trial for result in verdict.grade.results for trial in result.trials if trial.unsteady]
    if keep_going:
        by = [
            {name.rpartition("::")[2].partition("[")[0] for name in result.killed_by}
            for result in verdict.grade.results
        ]
        assert by == [{"test_s02", "test_either"}, {"test_s12", "test_either"}, set()]
        assert [len(result.killed_by) for result in verdict.grade.results] == [16, 16, 0]


@pytest.mark.parametrize(
    "assertion", ["not (state and has_s02())", "state and not has_s02()"], ids=["on the bug", "on any code"]
)
def test_a_kill_that_needs_the_tests_before_it(grade: Grade, assertion: str) -> None:
    """It does not happen again alone, or does so on clean code as well; after the same tests it does."""
    text = f"PRELUDE\nstate = []\ndef test_a(): state.append(1)\ndef test_b(): assert {assertion}\n"
    verdict = grade(text, "s02", "s12")
    assert verdict.statuses == {"s02": "killed", "s12": "survived"}
    assert verdict.code == WEAK


def test_what_a_wrong_order_breaks_is_no_kill(grade: Grade) -> None:
    """In the run of s12 alone the tests come in an order in which one of them fails on any code."""
    conftest = (
        "import json, os\nfrom pathlib import Path\ndef pytest_collection_modifyitems(items):\n"
        "    planted = json.loads(Path(os.environ['TINYLLM_PLANT']).read_text())['source']\n"
        "    if planted != Path('MODULE').read_text(): items.reverse()\n"
    )
    import tinyllm.infer.paged as paged  # noqa: PLC0415 - for its path

    conftest = conftest.replace("MODULE", str(paged.__file__))
    text = "PRELUDE\nstate = []\ndef test_a(): state.append(cache_of_one())\ndef test_b(): assert state\n"
    verdict = grade({"conftest.py": conftest, "test_it.py": text}, "s12")
    assert verdict.statuses == {"s12": "survived"}
    (trial,) = verdict.grade.results[0].trials
    assert "test_b failed, but not again without failing on clean code too: run alone" in trial.note


BURST = """
PRELUDE
from pathlib import Path

def test_counted():
    assert cache_of_one()
    with open("TMP/count", "a") as file:
        file.write(".")
    assert not FIRST <= Path("TMP/count").stat().st_size <= LAST
"""


@pytest.mark.parametrize("last", [*(pytest.param(last, marks=pytest.mark.long) for last in (4, 9)), 5])
def test_a_burst_of_failures_kills_nothing(grade: Grade, last: int) -> None:
    """Runs 1 and 2 are clean, 3 and 4 have bugs; from 5 on there are those that would confirm their kills."""
    verdict = grade(BURST.replace("FIRST", "3").replace("LAST", str(last)), "s12", "s13", jobs=1)
    assert set(verdict.statuses.values()) <= {"survived"}
    assert verdict.code in {WEAK, BASELINE}


LATE = """
PRELUDE
import pytest, time

def pytest_collection_modifyitems(items):
    if has_s02():
        for item in items:
            item.add_marker(pytest.mark.timeout(0.5, method="METHOD"))
"""


@pytest.mark.parametrize("method", [pytest.param("signal", marks=pytest.mark.long), "thread"])
def test_a_test_that_a_plugin_ends_is_a_timeout(grade: Grade, method: str) -> None:
    hangs = "PRELUDE\nimport time\ndef test():\n    while has_s02(): time.sleep(0.01)\n"
    verdict = grade({"conftest.py": LATE.replace("METHOD", method), "test_it.py": hangs})
    assert (verdict.code, verdict.statuses) == (TIMEOUT, {"s02": "timeout"}), verdict
    (trial,) = verdict.grade.results[0].trials
    assert "test_it.py::test: Failed: Timeout" in trial.note


def test_a_run_that_ends_itself_is_told_as_that(grade: Grade) -> None:
    verdict = grade("PRELUDE\nimport os\ndef test(): has_s02() and os.abort()")
    assert (verdict.code, verdict.statuses) == (INVALID, {"s02": "invalid"})
    (trial,) = verdict.grade.results[0].trials
    assert trial.note.startswith("the tests end their own run on this bug, but never on clean code: ")


REPORTS = (
    "--junitxml=TMP/junit.xml --log-file=TMP/log.txt --log-file-level=DEBUG --random-order "
    "--cov=. --cov-report=xml:TMP/cov.xml --cov-report=html:TMP/html"
)


def test_nothing_of_the_owners_is_written(grade: Grade, suite: Callable[..., Path], tmp_path: Path) -> None:
    text = "PRELUDE\nimport logging\ndef test():\n    logging.warning('x')\n    assert not has_s02()\n"
    path = suite({"pytest.ini": f"[pytest]\naddopts = {REPORTS}\n", "test_it.py": text, ".coverage": "kept"})
    before = sorted(tmp_path.rglob("*"))
    verdict = grade(path)
    assert (verdict.code, verdict.statuses) == (PASS, {"s02": "killed"}), verdict
    assert sorted(tmp_path.rglob("*")) == before
    assert (path / ".coverage").read_text() == "kept"
