"""What fails now and then is refused, or at least never scored: and each bug is graded for itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BASELINE = 3
BUGS = [f"s{number:02}" for number in range(1, 8)]

EVERY = """
PRELUDE
from pathlib import Path

def test_counted():
    assert cache_of_one()
    with open("TMP/count", "a") as file:
        file.write(".")
    assert Path("TMP/count").stat().st_size % {every} != 0
"""

Grade = Callable[..., Any]


@pytest.mark.parametrize(("every", "jobs"), [(2, 2), (3, 1)])
def test_what_fails_every_other_run_is_refused(grade: Grade, every: int, jobs: int) -> None:
    """Every second time, the first clean runs see it; every third time, a kill that does not happen again.

    Side by side, which run is the third is a matter of chance: so one after another there.
    """
    verdict = grade(EVERY.format(every=every), jobs=jobs)
    assert (verdict.code, verdict.grade) == (BASELINE, None)
    assert "flaky" in verdict.message


@pytest.mark.long
def test_with_a_test_that_kills_as_well_it_is_refused_all_the_same(grade: Grade) -> None:
    killer = "PRELUDE\ndef test_killer(): assert not has_s02()"
    files = {"test_a.py": EVERY.format(every=3), "test_b.py": killer}
    verdict = grade(files, "s12", "s13", "s02", jobs=1)
    assert (verdict.code, verdict.grade) == (BASELINE, None)


def test_what_fails_so_rarely_that_no_clean_run_sees_it_kills_nothing(grade: Grade) -> None:
    """Runs 1 and 2 are clean, run 9 is s07's; eight more would confirm it, and end the grade."""
    verdict = grade(EVERY.format(every=9), *BUGS, jobs=1)
    assert set(verdict.statuses.values()) == {"survived"}
    (failed,) = [r for r in verdict.grade.results if any(trial.unsteady for trial in r.trials)]
    assert failed.bug.id == "s07"
    assert "failed, but not again without failing on clean code too: " in failed.trials[0].note
    assert verdict.grade.score == 0


def test_what_is_red_only_at_the_end_is_refused(grade: Grade) -> None:
    """Three clean runs in all, of which the third fails; the bug's own run is not among them."""
    files = {
        "test_it.py": "PRELUDE\nimport os, json\nfrom pathlib import Path\n"
        "def test():\n    assert cache_of_one()\n"
        "    planted = json.loads(Path(os.environ['TINYLLM_PLANT']).read_text())\n"
        "    if planted['source'] != Path(planted['path']).read_text(): return\n"
        "    with open('TMP/count', 'a') as file: file.write('.')\n"
        "    assert Path('TMP/count').stat().st_size < 3"
    }
    verdict = grade(files)
    assert verdict.code == BASELINE
    assert "clean runs passed before, but not at the end" in verdict.message


def test_the_number_of_tests_must_not_change(grade: Grade) -> None:
    text = "import pytest, uuid\n@pytest.mark.parametrize('n', range(uuid.uuid4().int % 10**9 + 1))\n"
    text = text.replace(
        "uuid.uuid4().int % 10**9", "len(list(__import__('pathlib').Path('TMP').glob('run-*')))"
    )
    text += "def test(n): pass\nimport tempfile\ntempfile.mkdtemp(prefix='run-', dir='TMP')\n"
    verdict = grade(text, jobs=1)
    assert verdict.code == BASELINE
    assert "the number of tests changes between runs: [1, 2]" in verdict.message


DRAWS = """
PRELUDE
import os
from hypothesis import given, settings, strategies as st

@settings(deadline=None)
@given(st.integers(0, 2**64))
def test_draws(n):
    assert cache_of_one()
    with open(f"TMP/drawn-{os.getpid()}", "a") as file:
        print(n, file=file)
"""


@pytest.mark.long
def test_trials_draw_different_programs_under_ci_too(
    suite: Callable[..., Path], tinyllm: Callable[..., Any], tmp_path: Path
) -> None:
    """Where Hypothesis by itself draws the same every time. Each seed runs clean and with the bug."""
    done = tinyllm("grade", suite(DRAWS), "--bug", "s02", "--seed", 5, "--trials", 2, CI="1")
    assert done.returncode == 1, done.stderr
    drawn = [path.read_text(encoding="utf-8") for path in tmp_path.glob("drawn-*")]
    assert sorted(drawn.count(one) for one in set(drawn)) == [2, 3]  # and clean once more at the end


KEEPS = """
PRELUDE
from pathlib import Path
from hypothesis import given, settings, strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

settings.register_profile("kept", database=DirectoryBasedExampleDatabase("TMP/examples"), deadline=None)
settings.load_profile("kept")
failed = Path("TMP/failed")
tried = []

def has_s12():
    cache = PagedKVCache(4, 2, 2, 1, 1)
    cache.add_seq(0)
    cache.append(0, 0, np.ones((1, 1, 1)), np.ones((1, 1, 1)))
    return cache.seq_len(0, 1) != cache.gather(0, 1)[0].shape[1]

@given(st.integers(0, 2**64))
def test_keeps(n):
    tried.append(n)
    if has_s02() and n > 2**32:
        with failed.open("a") as file:
            print(n, file=file)
        assert False, "what fails on s02 is kept"
    if has_s12() and failed.exists() and tried == [n]:
        assert str(n) not in failed.read_text().split(), "tried first: from the database"
"""


def test_a_database_of_the_suite_leaks_no_kill(grade: Grade, tmp_path: Path) -> None:
    """The example that killed s02 would kill s12, too, were it tried first there; nobody draws it first."""
    verdict = grade(KEEPS, "s02", "s12", jobs=1)
    assert verdict.statuses == {"s02": "killed", "s12": "survived"}
    assert not (tmp_path / "examples").exists()
