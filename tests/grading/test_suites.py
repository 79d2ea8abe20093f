"""Suites of all shapes, which are graded as pytest runs them."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinyllm.jobs import process

PASS, WEAK, USAGE, BASELINE, INVALID, TIMEOUT = range(6)

KILLER = "PRELUDE\ndef test(): assert not has_s02()"
PROFILED = (
    "PRELUDE\nfrom hypothesis import given, settings, strategies as st\n@given(st.integers())\n"
    "def test(n): assert not has_s02()"
)
GIVEN = PROFILED.replace("@given", "@settings(deadline=None, max_examples=5)\n@given")
Grade = Callable[..., Any]


def ini(text: str) -> str:
    return "[pytest]\n" + text


SHAPES = {
    "warnings are errors": {"pytest.ini": ini("filterwarnings = error\n"), "test_it.py": GIVEN},
    "strict": {"pytest.ini": ini("strict = true\nfilterwarnings = error\n"), "test_it.py": KILLER},
    "-n 2": {"pytest.ini": ini("addopts = -n 2\n"), "test_it.py": KILLER},
    "-n 2 --dist": {
        "pytest.ini": ini("addopts = -n 2 --dist=loadscope --maxprocesses=2\n"),
        "test_it.py": KILLER,
    },
    "--maxfail": {"pytest.ini": ini("addopts = --maxfail=1\n"), "test_it.py": KILLER},
    "no cache": {
        "pytest.ini": ini("addopts = -p no:cacheprovider\nfilterwarnings = error\n"),
        "test_it.py": KILLER,
    },
    "asserts rewritten": {"pytest.ini": ini("addopts = --assert=rewrite\n"), "test_it.py": KILLER},
    "folders of its own": {
        "pytest.ini": ini("addopts = --basetemp=TMP/base -o cache_dir=TMP/cache -s\n"),
        "test_it.py": KILLER.replace("test()", "test(tmp_path)"),
    },
    "no Hypothesis plugin": {
        "pytest.ini": ini("addopts = -p no:hypothesispytest\n"),
        "test_it.py": GIVEN,
    },
    "a profile of its own": {
        "conftest.py": "from hypothesis import settings\n"
        "settings.register_profile('own', derandomize=True, deadline=None, max_examples=5)\n"
        "settings.load_profile('own')\n",
        "test_it.py": PROFILED,
    },
    "a database of its own": {
        "conftest.py": "from hypothesis import settings\n"
        "from hypothesis.database import InMemoryExampleDatabase as D\n"
        "settings.register_profile('own', database=D(), deadline=None)\nsettings.load_profile('own')\n",
        "test_it.py": PROFILED,
    },
    "one of our profiles": {
        "pytest.ini": ini("addopts = --hypothesis-profile=tinyllm-dev\n"),
        "test_it.py": PROFILED,
    },
    "a plugin of its own": {
        "pytest.ini": ini("addopts = -p own_plugin\npythonpath = .\n"),
        "own_plugin.py": "import pytest\n@pytest.fixture\ndef cache():\n"
        "    from tinyllm.infer.paged import PagedKVCache\n    return PagedKVCache(1, 1, 1, 1, 1)\n",
        "test_it.py": KILLER.replace("test()", "test(cache)"),
    },
    "a hook that reorders": {
        "conftest.py": "def pytest_collection_modifyitems(items): items.reverse()\n",
        "test_it.py": KILLER + "\ndef test_more(): pass",
    },
    "a package": {
        "__init__.py": "",
        "conftest.py": "from . import helper\n",
        "helper.py": "",
        "test_it.py": KILLER,
    },
    "classes": {"test_it.py": KILLER.replace("def test()", "class TestIt:\n  def test(self)")},
    "doctests": {
        "pytest.ini": ini("addopts = --doctest-modules\n"),
        "test_it.py": "PRELUDE\ndef f():\n    '''\n    >>> has_s02()\n    False\n    '''\n",
    },
    "2,000 tests": {
        "test_it.py": "PRELUDE\nimport pytest\n@pytest.mark.parametrize('n', range(2000))\n"
        "def test(n): assert n < 1999 or not has_s02()"
    },
}


@pytest.mark.long
@pytest.mark.parametrize("files", SHAPES.values(), ids=SHAPES)
def test_a_suite_of_this_shape_is_graded(grade: Grade, files: dict[str, str]) -> None:
    verdict = grade(files)
    assert (verdict.code, verdict.statuses) == (PASS, {"s02": "killed"}), verdict


@pytest.mark.parametrize("files", SHAPES.values(), ids=SHAPES)
def test_a_suite_of_this_shape_kills(kills: Callable[..., set[str]], files: dict[str, str]) -> None:
    assert len(kills(files)) == 1


def test_where_a_suite_wants_its_files_nothing_is_left(grade: Grade, tmp_path: Path) -> None:
    verdict = grade(SHAPES["folders of its own"])
    assert (verdict.code, verdict.statuses) == (PASS, {"s02": "killed"}), verdict
    assert sorted(path.name for path in tmp_path.iterdir()) == ["suite"]
    assert sorted(path.name for path in (tmp_path / "suite").iterdir()) == ["pytest.ini", "test_it.py"]


def test_a_leak_is_seen_in_teardown(grade: Grade) -> None:
    text = (
        "PRELUDE\nimport pytest\n@pytest.fixture\ndef cache():\n    cache = cache_of_one()\n    yield cache\n"
        "    cache.free(0)\n    assert cache.num_free_blocks() == 4\ndef test(cache): pass"
    )
    verdict = grade(text, "s08", "s02")
    assert verdict.statuses == {"s08": "killed", "s02": "survived"}
    ((trial,),) = [result.trials for result in verdict.grade.results if result.bug.id == "s08"]
    assert [(kill.test.rpartition("::")[2], kill.phase) for kill in trial.outcome.kills] == [
        ("test", "teardown")
    ]


NAIVE = """
import numpy as np
from tinyllm.infer.paged import PagedKVCache

def test_naive():
    '''One sequence, one layer; append and gather.'''
    cache = PagedKVCache(8, 2, 1, 2, 3)
    cache.add_seq(0)
    k = np.arange(5 * 6).reshape(2, 5, 3)
    for t in range(5):
        cache.append(0, 0, k[:, t : t + 1], -k[:, t : t + 1])
    assert np.array_equal(cache.gather(0, 0)[0], k)
    assert np.array_equal(cache.gather(0, 0)[1], -k)
"""


def test_a_naive_suite_kills_these_few(grade: Grade) -> None:
    verdict = grade(NAIVE, *(NAIVE_KILLS - {"s03"}), "s06", "s07", "order")
    assert {name for name, status in verdict.statuses.items() if status == "killed"} == NAIVE_KILLS - {"s03"}
    assert verdict.code == WEAK
    assert [reason.split(",")[0] for reason in verdict.grade.reasons[:2]] == [
        "s06 is required",
        "s07 is required",
    ]


@pytest.mark.long
def test_a_naive_suite_kills_no_more(grade: Grade) -> None:
    verdict = grade(NAIVE, *(f"s{number:02}" for number in range(1, 14)), "order")
    assert {name for name, status in verdict.statuses.items() if status == "killed"} == NAIVE_KILLS


NAIVE_KILLS = {"s02", "s03", "s04"}


def test_processes_that_tests_leave_behind_are_ended(grade: Grade, tmp_path: Path) -> None:
    text = (
        "PRELUDE\nimport subprocess, sys\ndef test():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "    with open('TMP/pids', 'a') as file: print(child.pid, file=file)\n"
        "    assert not has_s02()"
    )
    assert grade(text).code == PASS
    pids = [int(pid) for pid in (tmp_path / "pids").read_text(encoding="utf-8").split()]
    assert len(pids) == 6  # twice clean, the bug, clean, the bug again, clean at the end
    until = time.monotonic() + 60
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < until, "left behind"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


NAIVE_TOO = """
def test_two():
    cache = PagedKVCache(4, 2, 1, 2, 2)
    cache.add_seq(0)
    k = np.arange(16).reshape(2, 4, 2)
    cache.append(0, 0, k[:, :1], -k[:, :1])
    cache.append(0, 0, k[:, 1:], -k[:, 1:])
    assert len(cache.block_table(0)) == 2
    assert np.array_equal(cache.gather(0, 0), (k, -k))
"""
HANGS_WITH_THE_BUG = """
PRELUDE
import time

def test_one():
    while has_s02():
        open("TMP/hangs", "w").close()
        time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("more", "ids", "code"),
    [
        ("", ["s02"], TIMEOUT),
        (NAIVE_TOO, ["s02", "s01", "s03", "s04", "s05"], PASS),
    ],
    ids=["decides", "does not matter"],
)
def test_a_timeout_is_no_kill_and_is_shown_apart(
    grade: Grade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, ids: list[str], code: int
) -> None:
    """Time is up the moment it hangs: until then, however long that takes, the clock stands."""
    up = tmp_path / "hangs"
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: 1000.0 * up.exists()))
    verdict = grade(HANGS_WITH_THE_BUG + more, *ids, timeout=6, jobs=1)
    assert verdict.statuses["s02"] == "timeout"
    assert verdict.code == code, verdict
    assert [trial.note for result in verdict.grade.results for trial in result.trials if trial.note] == [
        "no end within 6 s"
    ]


@pytest.mark.parametrize(
    "variable",
    [
        pytest.param("PYTEST_DISABLE_PLUGIN_AUTOLOAD", marks=pytest.mark.long),
        pytest.param("CI", marks=pytest.mark.long),
        "PYTEST_ADDOPTS",
    ],
)
def test_in_an_environment_like_this(
    suite: Callable[..., Path], tinyllm: Callable[..., Any], variable: str
) -> None:
    """And from a folder outside the repository."""
    path = suite(GIVEN)
    done = tinyllm(
        "grade", path, "--bug", "s02", **{variable: "-n2" if variable == "PYTEST_ADDOPTS" else "1"}
    )
    assert (done.returncode, done.stderr) == (PASS, "")
