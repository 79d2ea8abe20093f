"""One run of a suite, from within: in a process that is allowed to end by itself, which `Grader` forbids."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RUN = """
import dataclasses, json, sys
from tinyllm.grading import bugs, plant
from tinyllm.grading.worker import Job, run

path, bug, seed, keep_going, report = json.loads(sys.argv[1])
target = bugs.reference()
if bug:
    planted = {known.id: known for known in bugs.load_set("all")}[bug]
    target = target.with_source(planted.apply(target.source))
try:
    outcome = dataclasses.asdict(run(print, Job((path,), target, seed, keep_going)))
except BaseException as error:
    outcome = {"raised": f"{type(error).__name__}: {error}"}
with open(report, "w") as file:
    json.dump(outcome, file)
"""
KILLER = "PRELUDE\ndef test_killer(): assert not has_s02()\n"
Worked = Callable[..., dict[str, Any]]


@pytest.fixture
def work(suite: Callable[..., Path], tmp_path: Path) -> Worked:
    """Runs a suite with a bug, or none, and returns the outcome."""

    def run(files: Any, bug: str = "s02", *, seed: int = 0, keep_going: bool = False, **env: str) -> Any:
        own = {"TMPDIR": str(tmp_path), "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path / "hypothesis")}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "CI"))}
        given = json.dumps([str(suite(files)), bug, seed, keep_going, str(tmp_path / "report")])
        subprocess.run(
            [sys.executable, "-c", RUN, given],
            env={**kept, **own, **env},
            stdout=subprocess.DEVNULL,
            timeout=300,
            check=True,
        )
        return json.loads((tmp_path / "report").read_text(encoding="utf-8"))

    return run


def test_a_kill(work: Worked) -> None:
    found = work(KILLER + "def test_after(): pass\n")
    (kill,) = found["kills"]
    assert kill["test"].endswith("test_it.py::test_killer")  # below whatever pytest takes for its root
    assert (kill["phase"], kill["message"]) == ("call", "AssertionError")
    assert (found["tests"], found["examples"], found["broken"]) == (2, 1, "")
    assert found["used"]
    assert found["seconds"] > 0


def test_after_a_kill_it_stops_unless_told_otherwise(work: Worked) -> None:
    text = KILLER + "def test_again(): assert not has_s02()\n"
    assert [len(work(text, keep_going=more)["kills"]) for more in (False, True)] == [1, 2]


def test_no_kill(work: Worked) -> None:
    found = work(KILLER, "")
    assert (found["kills"], found["excused"], found["broken"]) == ([], [], "")
    assert found["seconds"] > 0


def test_the_disk_is_full(work: Worked) -> None:
    """It says nothing of the module: not what fails because of it, and not a run that cannot begin."""
    found = work("import errno\ndef test(): raise OSError(errno.ENOSPC, 'full')\n")
    assert ([one["message"] for one in found["excused"]], found["kills"]) == (
        ["OSError: [Errno 28] full"],
        [],
    )
    found = work(KILLER, TMPDIR="/proc/nowhere")
    assert found["broken"] == "/proc/nowhere cannot be written: No such file or directory"


def test_no_test(work: Worked) -> None:
    found = work("x = 1")
    assert (found["tests"], found["kills"], found["broken"], found["used"]) == (0, [], "", False)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ("import nothing_there", "test_it.py: ModuleNotFoundError: No module named 'nothing_there'"),
        (
            {"conftest.py": "def pytest_runtest_setup(): 1 / 0", "test_it.py": "def test(): pass"},
            "",
        ),
        (
            {"conftest.py": "def pytest_runtest_logstart(): 1 / 0", "test_it.py": "def test(): pass"},
            "pytest failed: ",
        ),
        ({"conftest.py": "1 / 0", "test_it.py": ""}, "pytest ended with status 4 (usage error)"),
        (
            "import sys, types\nsys.modules['tinyllm.infer.paged'] = types.ModuleType('x')\ndef test(): pass",
            "was imported from elsewhere",
        ),
        (
            {
                "conftest.py": "def pytest_sessionfinish(session): session.exitstatus = 77",
                "test_it.py": KILLER,
            },
            "pytest ended with status 77 (unknown)",
        ),
    ],
    ids=["import", "setup", "plugin", "conftest", "elsewhere", "status"],
)
def test_worth_nothing(work: Worked, files: Any, words: str) -> None:
    found = work(files, "")
    assert words in found["broken"]
    assert bool(found["broken"]) == bool(words)


@pytest.mark.parametrize("how", ["pytest.exit('enough', returncode=0)", "raise KeyboardInterrupt"])
def test_stopped_by_the_tests(work: Worked, how: str) -> None:
    assert work(f"import pytest\ndef test(): {how}")["raised"].startswith("Stopped: ")


@pytest.mark.parametrize(
    ("error", "excused"),
    [
        ("Flaky('x')", True),
        ("FlakyFailure('x', [ValueError()])", False),
        ("FlakyFailure('x', [Flaky('x')])", True),
        ("FlakyReplay('x')", True),
        ("FailedHealthCheck('x')", True),
        ("DeadlineExceeded(timedelta(1), timedelta(1))", True),
        ("ExceptionGroup('x', [Flaky('x'), FailedHealthCheck('x')])", True),
        ("ExceptionGroup('x', [ExceptionGroup('x', [Flaky('x')])])", True),
        ("ExceptionGroup('x', [Flaky('x'), AssertionError()])", False),
        ("Unsatisfiable('x')", False),
        ("AssertionError()", False),
        ("SystemExit(0)", False),
    ],
)
def test_what_is_no_kill(work: Worked, error: str, excused: bool) -> None:
    """What Hypothesis says of the machine or of the test."""
    text = f"from datetime import timedelta\nfrom hypothesis.errors import *\ndef test(): raise {error}"
    found = work(text)
    assert [len(found["kills"]), len(found["excused"])] == ([0, 1] if excused else [1, 0])


def test_after_what_is_no_kill_the_run_goes_on(work: Worked) -> None:
    text = "from hypothesis.errors import Flaky\ndef test_flaky(): raise Flaky('x')\n" + KILLER
    found = work(text)
    assert [len(found["kills"]), len(found["excused"])] == [1, 1]


DRAWN = "PRELUDE\nfrom hypothesis import given, settings, strategies as st\n"


def test_examples_are_counted_up_to_the_kill(work: Worked) -> None:
    text = DRAWN + (
        "def test_plain(): pass\n"
        "count = []\n@settings(deadline=None)\n@given(st.integers())\ndef test(n):\n"
        "    count.append(n)\n    assert len(set(count)) < 7 or not has_s02()"
    )
    assert work(text)["examples"] >= 1 + 7
    assert work(text, "")["examples"] >= 1 + 100


def test_examples_after_the_first_kill_are_no_cost_of_it(work: Worked) -> None:
    text = (
        "PRELUDE\ndef test_a(): pass\ndef test_b(): assert not has_s02()\ndef test_c(): assert not has_s02()"
    )
    found = work(text, keep_going=True)
    assert (len(found["kills"]), found["examples"]) == (2, 2)


def test_nothing_is_shrunk(work: Worked) -> None:
    """The first number that fails ends it; shrinking would go on to 1000."""
    text = DRAWN + (
        "@settings(deadline=None)\n@given(st.integers(0, 10**9))\ndef test(n):\n"
        "    with open('TMP/drawn', 'a') as file: print(n, file=file)\n    assert n < 1000"
    )
    found = work(text)
    assert len(found["kills"]) == 1
    assert found["examples"] < 100


def test_no_patch_is_made_of_an_example(work: Worked, tmp_path: Path) -> None:
    """What it takes is there (mutmut needs it as well), and would be imported after the first kill."""
    assert importlib.util.find_spec("libcst")
    text = DRAWN + "import atexit, sys\n@given(st.integers())\ndef test(n): assert not has_s02()\n"
    text += "@atexit.register\ndef end():\n    open('TMP/loaded', 'w').write(str('libcst' in sys.modules))\n"
    assert len(work(text)["kills"]) == 1
    assert (tmp_path / "loaded").read_text() == "False"


def test_a_suite_may_use_the_engine_itself(work: Worked) -> None:
    text = (
        "from hypothesis.internal.conjecture.engine import ConjectureRunner\n"
        "def test(): ConjectureRunner(lambda data: None).test_function\n"
    )
    assert (work(text)["kills"], work(text)["broken"]) == ([], "")


@pytest.mark.parametrize("ini", ["addopts = -n 2", "addopts = -p no:xdist"])
def test_with_and_without_xdist(work: Worked, ini: str) -> None:
    found = work({"pytest.ini": f"[pytest]\n{ini}\n", "test_it.py": KILLER})
    assert len(found["kills"]) == 1


def test_under_ci_seeds_count(work: Worked, tmp_path: Path) -> None:
    text = DRAWN + (
        "@settings(deadline=None)\n@given(st.integers(0, 2**64))\ndef test(n):\n"
        "    with open('TMP/drawn', 'a') as file: print(n, file=file)\n"
    )
    seen = []
    for seed in (1, 2):
        work(text, "", seed=seed, CI="1")
        seen.append((tmp_path / "drawn").read_text(encoding="utf-8"))
        (tmp_path / "drawn").unlink()
    assert seen[0] != seen[1]
