"""`--html`: the page of a grade, where it is, and the command that it names."""

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tinyllm.cli.html_report import catchers, draw
from tinyllm.grading.bugs import Bug, Edit, load_set

Invoke = Callable[..., Any]
SUITE = (
    "import numpy as np\nfrom tinyllm.infer.paged import PagedKVCache\n\ndef test():\n"
    "    cache = PagedKVCache(4, 2, 1, 1, 1)\n    cache.add_seq(0)\n    one = np.ones((1, 1, 1))\n"
    "    cache.append(0, 0, one, one)\n    assert cache.gather(0, 0)[0].shape == one.shape\n"
)


@pytest.fixture
def suite(tmp_path: Path) -> str:
    """Kills s02, and leaves s06 alive; its name is to be quoted."""
    (tmp_path / "test it.py").write_text(SUITE, encoding="utf-8")
    return "test it.py"


def test_a_grade_as_a_page(invoke: Invoke, suite: str, tmp_path: Path) -> None:
    (tmp_path / "out.html").write_text("old")
    done = invoke("grade", suite, "--bug", "s06", "-j", 2, "--bug", "s02", "--html", "out.html")
    assert done.exit_code == 1, done.output
    assert done.stdout.endswith("\nThe page: out.html\n")
    text = unescape((tmp_path / "out.html").read_text(encoding="utf-8"))
    assert "1 of 2 planted bugs killed" in text
    command = "grade 'test it.py' --jobs 2 --bug s06 --bug s02 --html out.html"
    assert re.search(rf'class="command">\w+ {command}<', text)
    assert "Each run ended with its first kill" in text
    assert "<figure>" in text
    assert "test_fork_shares_until_a_write (unit): a fork allocates nothing" in text
    assert str(tmp_path) not in text
    assert sorted(path.name for path in tmp_path.glob("*.html")) == ["out.html"]


def test_with_the_matrix_it_is_whole(invoke: Invoke, suite: str, tmp_path: Path) -> None:
    done = invoke("grade", suite, "--bug", "s02", "--html", "out.html", "--matrix", "out.csv")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "Every test ran on every bug." in text


def test_another_module_has_no_witness_and_no_law(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "stack.py").write_text("def top(items):\n    return items[-1]\n")
    (tmp_path / "test_stack.py").write_text("import stack\n\ndef test(): assert stack.top([1]) == 1\n")
    (tmp_path / "bugs.toml").write_text(
        '[[bug]]\nid = "b1"\ntitle = "t"\nsymptom = "s"\nlaws = [3]\nwitness = "new 1 1 1 1 1"\n'
        'edits = [{find = "-1", replace = "0"}]\n'
    )
    arguments = ("--bugs", "bugs.toml", "--module", "stack", "--html", "out.html")
    done = invoke("grade", "test_stack.py", *arguments)
    assert done.exit_code == 1, done.output
    text = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "new 1 1 1 1 1" in text
    assert "<figure>" not in text
    assert "law 3" not in text


def test_every_bug_of_ours_is_drawn_and_says_what_catches_it() -> None:
    for bug in load_set("all"):
        if not bug.survives:
            assert draw(bug).startswith("<svg ") == bool(bug.witness), bug.id
            assert catchers(bug), bug.id
    (wild,) = (bug for bug in load_set("wild") if bug.id == "w01")
    assert all(re.match(r"one of law \d+, \w.*: [A-Z]", line) for line in catchers(wild))


def test_bugs_of_ones_own_may_say_anything() -> None:
    bug = Bug("b", "t", "s", (Edit("a", "b"),), witness="nonsense 1", caught_by=("test_mine",), laws=(99,))
    assert draw(bug) == ""
    assert catchers(bug) == ["test_mine"]
    assert catchers(Bug("b", "t", "s", (Edit("a", "b"),), laws=(99,))) == []
    assert draw(Bug("b", "t", "s", (Edit("a", "b"),))) == ""
