"""A file of bugs that cannot be used is refused: the message names the file, the bug, and the fault."""

import subprocess
import sys
from pathlib import Path

import pytest

from tinyllm.grading import bugs
from tinyllm.grading.bugs import Bug, BugError, Edit, load, load_set
from tinyllm.grading.plant import Target

GOOD = """
[[bug]]
id = "b1"
title = "a title"
symptom = "a symptom"
edits = [{find = "x", replace = "y"}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "bugs.toml"


def test_a_good_one(file: Path) -> None:
    more = 'required = true\nsurvives = false\ncaught_by = ["t"]\nlaws = [1]\nsource = "s"\nwitness = "w"\n'
    file.write_text(GOOD + more, encoding="utf-8")
    edits = (Edit("x", "y"),)
    assert load(file) == [
        Bug(
            "b1",
            "a title",
            "a symptom",
            edits,
            required=True,
            caught_by=("t",),
            laws=(1,),
            source="s",
            witness="w",
        )
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[bug", "is not TOML: "),
        ("\ud800", "is not TOML: "),
        ("", "it must hold one [[bug]] or more, and nothing else"),
        ("bug = 3", "it must hold one [[bug]] or more, and nothing else"),
        ("bug = []", "it must hold one [[bug]] or more, and nothing else"),
        (GOOD + "[other]\n", "it must hold one [[bug]] or more, and nothing else"),
        ("bug = [1]", ", bug 1: it must be a table"),
        (GOOD + "colour = 1", ", bug 1: unknown keys colour; known are edits, id, title, symptom, required"),
        (GOOD + GOOD.replace("title", "#"), ", bug 2: title missing"),
        (GOOD + "[[bug]]", ", bug 2: id, symptom, title missing"),
        (GOOD.replace('"a title"', "1"), ", bug 1: title has the wrong type: 1"),
        (GOOD + 'required = "yes"', ", bug 1: required has the wrong type: 'yes'"),
        (GOOD + "required = 1", ", bug 1: required has the wrong type: 1"),
        (GOOD + 'caught_by = "test"', ", bug 1: caught_by has the wrong type: 'test'"),
        (GOOD + "laws = 6", ", bug 1: laws has the wrong type: 6"),
        (GOOD + "laws = ['six']", ", bug 1: laws has the wrong type: ['six']"),
        (GOOD + "caught_by = [1]", ", bug 1: caught_by has the wrong type: [1]"),
        (GOOD.replace('"b1"', '"a b"'), ", bug 1: 'a b' is no id: letters, digits"),
        (GOOD.replace('"b1"', '""'), ", bug 1: '' is no id: letters, digits"),
        (GOOD.replace('"b1"', '"../b"'), ", bug 1: '../b' is no id: letters, digits"),
        (GOOD.replace("edits", "#"), ", bug 1: edits must be one or more tables of find and replace"),
        (GOOD.replace("find", "found"), ", bug 1: edits must be one or more tables of find and replace"),
        (GOOD.replace('"x"', '""'), ", bug 1: edits must be one or more tables of find and replace"),
        (GOOD.replace('"x"', "1"), ", bug 1: edits must be one or more tables of find and replace"),
        (GOOD.replace('[{find = "x", replace = "y"}]', "[]"), ", bug 1: edits must be one or more tables"),
        (GOOD.replace('[{find = "x", replace = "y"}]', "[1]"), ", bug 1: edits must be one or more tables"),
        (GOOD.replace('[{find = "x", replace = "y"}]', '"x"'), ", bug 1: edits must be one or more tables"),
        (GOOD + GOOD, ": ids used twice: b1"),
        ("implementation = 1\n" + GOOD, ": implementation has the wrong type: 1"),
        ('implementation = "none.py"\n' + GOOD, ": implementation: "),
    ],
)
def test_a_bad_one(file: Path, text: str, words: str) -> None:
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(BugError) as info:
        load(file)
    assert str(info.value).startswith(f"{file}{words}" if words[0] in ",:" else str(file))
    assert words in str(info.value)


def test_one_that_is_not_there(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(BugError, match=f"{path} cannot be read: {why}"):
            load(path)


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ([("z", "y")], "b1: this text stands 0 times in the source:\nz"),
        ([("a", "y")], "b1: this text stands 2 times in the source:\na"),
        ([("x", "x")], "b1: its edits change nothing"),
        ([("x", "y"), ("y", "x")], "b1: its edits change nothing"),
        ([("x", "y"), ("x", "z")], "b1: this text stands 0 times in the source:\nx"),
    ],
)
def test_one_that_does_not_apply(edits: list[tuple[str, str]], words: str) -> None:
    bug = Bug("b1", "title", "symptom", tuple(Edit(*edit) for edit in edits))
    with pytest.raises(BugError) as info:
        bug.apply("a x a\n")
    assert str(info.value) == words


def test_edits_are_made_one_after_the_other() -> None:
    bug = Bug("b1", "title", "symptom", (Edit("x", "yz"), Edit("z", "w")))
    assert bug.apply("a x a\n") == "a yw a\n"
    target = Target("pkg.f", "/pkg/f.py", "a x a\n")
    assert bug.planted(target) == target.with_source("a yw a\n")
    assert bug.diff(target) == "--- a/f.py\n+++ b/f.py\n@@ -1 +1 @@\n-a x a\n+a yw a\n"


def test_sets() -> None:
    assert [bug.id for bug in load_set("all")] == [bug.id for name in bugs.SETS for bug in load_set(name)]


def test_no_bug_uses_a_name_that_is_not_there(tmp_path: Path) -> None:
    """It would be killed by a NameError, and say nothing of the tests."""
    target = bugs.reference()
    for bug in bugs.load_set("all"):
        (tmp_path / f"{bug.id}.py").write_text(bug.planted(target).source, encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
