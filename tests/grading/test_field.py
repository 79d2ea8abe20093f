"""Bugs that are edits of another text: the text takes the module's place, clean and with each of them."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tinyllm.grading import bugs, github, junit, report
from tinyllm.grading.grade import Grader
from tinyllm.grading.locate import located
from tinyllm.grading.plant import Target
from tinyllm.grading.verdict import GradeError

PASS, WEAK, USAGE, BASELINE = range(4)
PAGED = bugs.reference()
KNOWN = {bug.id: bug for bug in bugs.load_set("all")}
SECOND = KNOWN["f02"].clean(PAGED)
ROLLBACK = """
import numpy as np
import pytest
from tinyllm.infer.paged import OutOfBlocks, PagedKVCache as Cache

def test_rollback():
    cache = Cache(1, 4, 1, 1, 1)
    cache.add_seq(0)
    cache.append(0, 0, np.ones((1, 2, 1)), np.ones((1, 2, 1)))
    cache.truncate(0, 1)
    assert cache.gather(0, 0)[0].tolist() == [[[1]]]
    with pytest.raises(OutOfBlocks) as info:
        cache.append(0, 0, np.ones((1, 4, 1)), np.ones((1, 4, 1)))
    assert (info.value.needed, info.value.free) == (1, 0)
"""
MINE = "from tinyllm.infer.paged import OutOfBlocks, PagedKVCache\nclass Cache(PagedKVCache): pass\n"


class Noting(ThreadPoolExecutor):
    """One thread, and the target of each run with how many tests it is of; 0 are all."""

    def __init__(self) -> None:
        super().__init__(1)
        self.runs: list[tuple[Target, int]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.runs.append((args[0].target, len(args[0].only)))
        return super().submit(fn, *args, **kwargs)


def test_clean_runs_are_on_the_text_that_a_bug_is_an_edit_of(suite: Callable[..., Path]) -> None:
    """Before the bugs, between a failure and its confirmation, and at the end."""
    chosen = [KNOWN[name] for name in ("f02", "f06")]
    bug = chosen[0].planted(PAGED)
    with Noting() as pool:
        found = Grader((str(suite(ROLLBACK)),), PAGED, chosen).grade(lambda *_: None, pool)
    assert [result.status for result in found.results] == ["killed", "survived"]
    assert pool.runs == [
        *[(PAGED, 0), (PAGED, 0), (SECOND, 0), (SECOND, 0)],
        *[(bug, 0), (chosen[1].planted(PAGED), 0)],
        *[(SECOND, 1), (bug, 1)],
        (SECOND, 0),
    ]


def test_bugs_of_both_texts_in_one_grade(suite: Callable[..., Path]) -> None:
    """Each is told by the file that it is an edit of: in diffs, in JSON, by JUnit and GitHub."""
    chosen = [KNOWN[name] for name in ("s03", "f02", "f06")]
    found = Grader((str(suite(ROLLBACK)),), PAGED, chosen, jobs=2).grade(lambda *_: None)
    assert [result.status for result in found.results] == ["survived", "killed", "survived"]
    files = report.as_json(found)["files"]
    assert {name: [one["id"] for one in file["mutants"]] for name, file in files.items()} == {
        "tinyllm/infer/paged.py": ["s03"],
        "mutants/second.py": ["f02", "f06"],
    }
    for file in files.values():
        for one in file["mutants"]:
            line = file["source"].splitlines()[one["location"]["start"]["line"] - 1]
            assert KNOWN[one["id"]].edits[0].find.splitlines()[0] in line
    (_, f06) = [case for case in junit.cases(found) if case.outcome == "failure"]
    assert "\n--- a/second.py\n+++ b/second.py\n" in f06.text
    s03, f06_line = github.annotations(found)
    assert "file=tinyllm/infer/paged.py,line=" in s03
    assert "file=mutants/second.py,line=" in f06_line


def test_tests_that_ask_for_more_than_any_cache_promises(grade: Any) -> None:
    verdict = grade("PRELUDE\ndef test(): assert cache_of_one().describe()", "s02", "f06")
    assert verdict.code == BASELINE
    said = "the tests pass on tinyllm.infer.paged, but not on second.py in its place: they ask for more than"
    assert said in verdict.message
    assert "no attribute 'describe'" in verdict.message


def test_in_place_of_a_class_of_ones_own(suite: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    tests = ROLLBACK.replace("tinyllm.infer.paged", "mine").replace("PagedKVCache as Cache", "Cache")
    monkeypatch.chdir(suite({"pytest.ini": "[pytest]\npythonpath = .\n", "mine.py": MINE}, "project"))
    target = located("mine.py:Cache", [])
    assert target.place
    path = suite(tests, "project/tests")
    found = Grader((str(path),), target, [KNOWN["f02"], KNOWN["f06"]], jobs=2).grade(lambda *_: None)
    assert [result.status for result in found.results] == ["killed", "survived"]


def test_planted_by_hand(suite: Callable[..., Path]) -> None:
    path = suite({"pytest.ini": "[pytest]\n", "test_it.py": ROLLBACK})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path), "--plant", "f02"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=path)
    assert done.returncode == 1, done.stdout
    assert "1 failed" in done.stdout


def test_the_text_may_not_change_while_it_is_graded(tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "b.toml").write_text(
        'implementation = "other.py"\n[[bug]]\nid = "b"\ntitle = ""\nsymptom = ""\n'
        'edits = [{find = "1", replace = "2"}]\n',
        encoding="utf-8",
    )
    (bug,) = bugs.load(tmp_path / "b.toml")
    assert bug.planted(PAGED) == Target(PAGED.module, str(other), "x = 2\n", PAGED.cls)
    grader = Grader((), PAGED, [bug])
    before = grader._fingerprint()
    other.write_text("x = 3\n", encoding="utf-8")
    with pytest.raises(GradeError, match=r"files changed during the grading, .*other\.py"):
        grader._unchanged(before)
