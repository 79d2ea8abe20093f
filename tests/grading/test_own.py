"""The project's own tests are what the chapter asks of a learner's, and are graded as those are."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyllm.exit_codes import MEANINGS
from tinyllm.grading import bugs
from tinyllm.grading.grade import Grader
from tinyllm.grading.worker import Job, run
from tinyllm.jobs import process

OWN = Path(__file__).parents[1] / "own"
ROOT = OWN.parents[1]
MAY_IMPORT = {
    "test_properties.py": {"tinyllm.infer.paged"},
    "test_engine.py": {"tinyllm.infer.paged"},
    "test_machine.py": {
        "tinyllm.infer.paged",
        "tinyllm.testing.machine",
        "tinyllm.testing.check",
        "tinyllm.testing.profiles",
    },
}
OTHERS = {*sys.stdlib_module_names, "numpy", "pytest", "hypothesis"} - {"importlib", "runpy", "subprocess"}


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it, and what it could import by a name made up."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name} imports from its own folder"
            yield node.module or ""
        elif isinstance(node, ast.Name) and node.id in {"__import__", "exec", "eval", "open"}:
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "mutants" in node.value:
            yield "mutants"


def test_they_import_neither_the_catalogue_nor_the_trace_reader() -> None:
    assert {path.name for path in OWN.glob("*.py")} == MAY_IMPORT.keys()
    for name, allowed in MAY_IMPORT.items():
        found = set(imported(OWN / name))
        ours = {module for module in found if module.partition(".")[0] in {"tinyllm", "mutants", "tests"}}
        assert ours <= allowed, name
        assert "tinyllm.infer.paged" in ours
        assert {module.partition(".")[0] for module in found - ours} <= OTHERS, name


def test_that_test_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text("def f():\n    from tinyllm.testing.catalogue import CATALOGUE\n", encoding="utf-8")
    assert list(imported(path)) == ["tinyllm.testing.catalogue"]


@pytest.mark.long
def test_the_properties_alone_kill() -> None:
    """Eleven or more, s06 and s07 among them; `tinyllm check` grades all of `tests/own`."""
    tests, quick = (str(OWN / "test_properties.py"),), ("--hypothesis-profile=tinyllm-dev",)
    grader = Grader(tests, bugs.reference(), bugs.load_set("course"), jobs=2, options=quick)
    found = grader.grade(lambda *_: None)
    killed = {result.bug.id for result in found.counted if result.status == "killed"}
    assert len(killed) >= 11
    assert {"s06", "s07"} <= killed
    (order,) = [result for result in found.results if result.bug.survives]
    assert (order.status, found.code) == ("survived", 0)


def test_none_of_them_asks_for_an_order_of_the_free_blocks() -> None:
    """With `-x` a grader would stop at the first that does: each has to pass. Without it they do."""
    (order,) = [bug for bug in bugs.load_set("course") if bug.survives]
    target = bugs.reference()
    planted = target.with_source(order.apply(target.source))
    job = Job((str(OWN),), planted, 0, keep_going=True, options=("--hypothesis-profile=tinyllm-dev",))
    ended = process.call(run, job, timeout=300)
    assert ended.how == "done", ended.output
    outcome = ended.value
    assert (outcome.broken, outcome.used, outcome.kills, outcome.excused) == ("", True, [], [])
    assert outcome.tests > 50


def test_the_exit_codes_are_documented(tinyllm: Callable[..., Any]) -> None:
    """The table on their page is the one here; --help gives each number in a few of its words."""
    page = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    on_page = re.findall(r"^\| ([0-9]) \| (.+) \|$", page, re.MULTILINE)
    assert [(int(number), words) for number, words in on_page] == list(MEANINGS.items())
    shown = " ".join(tinyllm("--help").stdout.split())
    in_help = re.findall(r"([0-9]) ([^;.]+)[;.]", shown[shown.index("Exit codes") :])
    assert [int(number) for number, _ in in_help] == list(MEANINGS)
    for number, words in in_help:
        assert " ".join(words.rstrip(",").split()[:2]).rstrip(",") in MEANINGS[int(number)]
