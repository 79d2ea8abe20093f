"""One run of a suite, from within: in a process that is allowed to end by itself, which `Grader` forbids."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SERVER = """
import dataclasses, importlib, json, os, sys, tempfile
from tinyllm.grading import bugs, plant
from tinyllm.grading.grade import PRELOAD
from tinyllm.grading.worker import Job, run

for name in PRELOAD:
    importlib.import_module(name)

def work(path, bug, seed, keep_going, report):
    target = bugs.reference()
    if bug:
        target = {known.id: known for known in bugs.load_set("all")}[bug].planted(target)
    try:
        outcome = dataclasses.asdict(run(print, Job((path,), target, seed, keep_going)))
    except BaseException as error:
        outcome = {"raised": f"{type(error).__name__}: {error}"}
    with open(report, "w") as file:
        json.dump(outcome, file)

for line in sys.stdin:
    env, given = json.loads(line)
    if (child := os.fork()) == 0:
        os.environ.update(env)
        tempfile.tempdir = None
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        work(*given)
        sys.exit()
    os.waitpid(child, 0)
    print("done", flush=True)
"""
"""Each run is a fork of one that has imported what takes long, as under the fork server."""
KILLER = "PRELUDE\ndef test_killer(): assert not has_s02()\n"
Worked = Callable[..., dict[str, Any]]


Server = subprocess.Popen[str]


@contextlib.contextmanager
def serving(**more: str) -> Iterator[Server]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "CI"))} | more
    command, pipe = [sys.executable, "-c", SERVER], subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        assert process.stdin
        process.stdin.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as process:
        yield process


@pytest.fixture
def work(suite: Callable[..., Path], tmp_path: Path, server: Server) -> Worked:
    """Runs a suite with a bug, or none, and returns the outcome; `by` is who does it."""

    def run(
        files: Any,
        bug: str = "s02",
        *,
        seed: int = 0,
        keep_going: bool = False,
        by: Server = server,
        **env: str,
    ) -> Any:
        own = {"TMPDIR": str(tmp_path), "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path / "hypothesis")}
        given = [str(suite(files)), bug, seed, keep_going, str(tmp_path / "report")]
        assert by.stdin
        assert by.stdout
        print(json.dumps([own | env, given]), file=by.stdin, flush=True)
        assert by.stdout.readline() == "done\n"
        return json.loads((tmp_path / "report").read_text(encoding="utf-8"))

    return run


@pytest.fixture
def ci() -> Iterator[Server]:
    """Hypothesis looks once, when it is imported, whether it is under CI."""
    with serving(CI="1") as process:
        yield process


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


@pytest.mark.parametrize(
    "how",
    ["pytest.exit('enough', returncode=0)", pytest.param("raise KeyboardInterrupt", marks=pytest.mark.long)],
)
def test_stopped_by_the_tests(work: Worked, how: str) -> None:
    assert work(f"import pytest\ndef test(): {how}")["raised"].startswith("Stopped: ")


ERRORS = {
    "Flaky('x')": True,
    "FlakyFailure('x', [ValueError()])": False,
    "FlakyFailure('x', [Flaky('x')])": True,
    "FlakyReplay('x')": True,
    "FailedHealthCheck('x')": True,
    "DeadlineExceeded(timedelta(1), timedelta(1))": True,
    "ExceptionGroup('x', [Flaky('x'), FailedHealthCheck('x')])": True,
    "ExceptionGroup('x', [ExceptionGroup('x', [Flaky('x')])])": True,
    "ExceptionGroup('x', [Flaky('x'), AssertionError()])": False,
    "Unsatisfiable('x')": False,
    "AssertionError()": False,
    "SystemExit(0)": False,
}
"""What a test raises: whether it says something of the machine or of the test, and not of the module."""


def test_what_is_no_kill(work: Worked) -> None:
    text = "from datetime import timedelta\nfrom hypothesis.errors import *\n"
    text += "".join(f"def test_{number}(): raise {error}\n" for number, error in enumerate(ERRORS))
    found = work(text, keep_going=True)
    by = {kind: [one["test"].rpartition("::")[2] for one in found[kind]] for kind in ("kills", "excused")}
    expected = {True: "excused", False: "kills"}
    for number, (error, excused) in enumerate(ERRORS.items()):
        assert f"test_{number}" in by[expected[excused]], error
    assert sum(map(len, by.values())) == len(ERRORS)


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
    found = work(text)
    assert (found["kills"], found["broken"]) == ([], "")


@pytest.mark.parametrize("ini", ["addopts = -n 2", "addopts = -p no:xdist"])
def test_with_and_without_xdist(work: Worked, ini: str) -> None:
    found = work({"pytest.ini": f"[pytest]\n{ini}\n", "test_it.py": KILLER})
    assert len(found["kills"]) == 1


def test_under_ci_seeds_count(work: Worked, ci: Server, tmp_path: Path) -> None:
    text = DRAWN + (
        "@settings(deadline=None)\n@given(st.integers(0, 2**64))\ndef test(n):\n"
        "    with open('TMP/drawn', 'a') as file: print(n, file=file)\n"
    )
    seen = []
    for seed in (1, 2):
        work(text, "", seed=seed, by=ci)
        seen.append((tmp_path / "drawn").read_text(encoding="utf-8"))
        (tmp_path / "drawn").unlink()
    assert seen[0] != seen[1]


def test_under_ci_there_is_no_deadline(work: Worked, ci: Server) -> None:
    """As Hypothesis has it there: nothing but the randomness is turned on again."""
    text = (
        "PRELUDE\nimport time\nfrom hypothesis import given, settings, strategies as st\n"
        "@settings(max_examples=1)\n@given(st.integers())\ndef test(n):\n    time.sleep(0.3)\n"
        "    assert not has_s02()"
    )
    for bug in ("", "s02"):
        found = work(text, bug, by=ci)
        assert (len(found["kills"]), found["excused"]) == (bool(bug), [])
