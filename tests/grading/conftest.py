"""Suites written on the spot: graded (`grade`; by the command: `invoke`, `tinyllm`), or run (`kills`)."""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from typer.testing import Result as Done

from tinyllm.cli.app import app
from tinyllm.grading import bugs
from tinyllm.grading.grade import Grader
from tinyllm.grading.plant import Target
from tinyllm.grading.verdict import Grade, GradeError, Result, Trial
from tinyllm.grading.worker import Failure, Job, Outcome
from tinyllm.grading.worker import run as once
from tinyllm.jobs.process import call

PRELUDE = """
import numpy as np
from tinyllm.infer.paged import PagedKVCache

def cache_of_one():
    cache = PagedKVCache(4, 2, 1, 1, 1)
    cache.add_seq(0)
    cache.append(0, 0, np.ones((1, 1, 1)), np.ones((1, 1, 1)))
    return cache

def has_s02():
    return cache_of_one().gather(0, 0)[0].shape != (1, 1, 1)
"""
"""What most suites begin with: `has_s02()` is true while that bug is planted."""


HOSTILE = (
    "<script>alert('x')</script> </style> \"q\" & \u202egnippilf\u202c \x1b[31mred\x1b[0m \x00 \ud800 "
    "{{ 7 * 7 }}"
)
"""What may stand in a title, a test id or a message, and must stay text."""
LONG = f"tests/test_a.py::Test::test_{'x' * 300}[a::b-{HOSTILE}]"


@dataclass(frozen=True)
class Verdict:
    """The exit code, and what was said or found."""

    code: int
    message: str
    grade: Grade | None = None

    @property
    def statuses(self) -> dict[str, str]:
        return {result.bug.id: result.status for result in self.grade.results} if self.grade else {}


@pytest.fixture
def suite(tmp_path: Path) -> Callable[..., Path]:
    """Writes a suite: one text, or several by file name; PRELUDE stands for the usual beginning."""

    def write(files: str | Mapping[str, str], folder: str = "suite") -> Path:
        named = {"test_it.py": files} if isinstance(files, str) else files
        for name, text in named.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("PRELUDE", PRELUDE).replace("TMP", str(tmp_path)), encoding="utf-8")
        return tmp_path / folder

    return write


@pytest.fixture
def grade(suite: Callable[..., Path]) -> Callable[..., Verdict]:
    """Grades a suite by some bugs, s02 by default; `options` are those of Grader."""
    known = {bug.id: bug for bug in bugs.load_set("all")}

    def run(tests: str | Mapping[str, str] | Path, *ids: str, **options: Any) -> Verdict:
        path = tests if isinstance(tests, Path) else suite(tests)
        chosen = [known[name] for name in ids or ("s02",)]
        grader = Grader((str(path),), bugs.reference(), chosen, **{"jobs": 2, **options})
        try:
            found = grader.grade(lambda *_: None)
        except GradeError as error:
            return Verdict(error.code, f"{error}\n{error.detail}")
        return Verdict(found.code, "\n".join(found.reasons), found)

    return run


@pytest.fixture
def kills(suite: Callable[..., Path]) -> Callable[..., set[str]]:
    """Two runs of a suite, each whole, and no verdict: the tests that fail with a bug, by their names.

    On clean code none may fail, and the module has to be put to use.
    """
    known = {bug.id: bug for bug in bugs.load_set("all")}

    def run(
        tests: str | Mapping[str, str] | None, bug: str = "s02", target: Target | None = None
    ) -> set[str]:
        clean = target or bugs.reference()
        path = "tests" if tests is None else str(suite(tests))
        planted = known[bug].planted(clean)
        outcomes = []
        for one in (clean, planted):
            ended = call(once, Job((path,), one, 0, keep_going=True), timeout=120)
            assert (ended.how, ended.value and ended.value.broken) == ("done", ""), ended
            outcomes.append(ended.value)
        assert (outcomes[0].kills + outcomes[0].excused, outcomes[0].used) == ([], True)
        return {kill.test.rpartition("::")[2] for kill in outcomes[1].kills}

    return run


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Done]]:
    """Runs `tinyllm` in this process, in `cwd`; what it imports from the test's own folder is forgotten."""
    for name in set(os.environ) - set(clean_environment()):
        if not name.startswith("PYTEST"):
            monkeypatch.delenv(name)

    def run(*arguments: object, cwd: Path = tmp_path) -> Done:
        monkeypatch.chdir(cwd)
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    yield run
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", "") or ""):
            del sys.modules[name]


@pytest.fixture(scope="session")
def command() -> str:
    """The path of the installed `tinyllm`."""
    return str(Path(sysconfig.get_path("scripts"), "tinyllm"))


@pytest.fixture
def tinyllm(command: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `tinyllm` with arguments, in `cwd` (the test's own folder by default) and with more `env`."""

    def run(*arguments: object, cwd: Path = tmp_path, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command, *map(str, arguments)],
            cwd=cwd,
            env={**clean_environment(), **env},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def clean_environment() -> dict[str, str]:
    """The environment without what pytest and xdist put there, and without CI."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CI", "GITHUB_"))
    }


@pytest.fixture(scope="session")
def weak() -> Grade:
    """Everything at once, in two trials: s02 is killed, s06 once, s07 survives; and hostile text."""
    known = {bug.id: bug for bug in bugs.load_set("all")}
    target = bugs.reference()

    def trial(status: str, *tests: str, note: str = "", seed: int = 0) -> Trial:
        kills = [Failure(test, "call", "") for test in tests]
        excused = (
            [Failure("t.py::slow", "call", f"DeadlineExceeded {HOSTILE}")] if status == "survived" else []
        )
        return Trial(seed, status, Outcome(9, kills, excused, seconds=0.25, examples=40), note)

    def bad(name: str, **more: Any) -> bugs.Bug:
        return bugs.Bug(name, f"{name} {HOSTILE}", f"symptom {HOSTILE}", known["s06"].edits, **more)

    gone = f"{HOSTILE} in {Path.cwd()}/tests and {Path.home()}/elsewhere"
    pairs = [
        (known["w01"], trial("survived"), trial("survived")),
        (known["s02"], trial("killed", "t.py::test_b", LONG), trial("killed", LONG)),
        (known["s03"], trial("killed", "t.py::test_b"), trial("killed", "t.py::test_b")),
        (known["order"], trial("survived"), trial("survived")),
        (known["s06"], trial("killed", "t.py::test_b"), trial("survived")),
        (known["s07"], trial("survived"), trial("survived", note=gone)),
        (
            bad("x1", source=HOSTILE, caught_by=(HOSTILE,), witness=HOSTILE),
            trial("survived"),
            trial("survived"),
        ),
        (bad("x2"), trial("timeout", note="no end within 3 s"), trial("killed", LONG)),
        (bad("x3"), trial("invalid", note=gone), trial("timeout", note="no end within 3 s")),
        (bad("x4", survives=True), trial("killed", LONG), trial("killed", LONG)),
    ]
    results = [Result(bug, list(trials)) for bug, *trials in pairs]
    return Grade(target, ("tests/my own", "t.py"), 9, results, [3, 4], 1.5)


PROJECT = {
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--strict-markers"\nmarkers = ["ours"]\n',
    "tests/conftest.py": """
import pytest
from pathlib import Path
import numpy as np
from helpers import SIZES
from tinyllm.infer.paged import PagedKVCache

@pytest.fixture
def tokens(): return int(Path(__file__).with_name("tokens.txt").read_text())

@pytest.fixture
def cache():
    cache = PagedKVCache(*SIZES)
    cache.add_seq(0)
    return cache
""",
    "helpers.py": "SIZES = 4, 2, 1, 1, 1",
    "tests/tokens.txt": "3",
    "tests/test_it.py": """
import numpy as np
import pytest
from pathlib import Path

@pytest.mark.ours
def test_gather(cache, tokens):
    ones = np.ones((1, tokens, 1))
    cache.append(0, 0, ones, ones)
    assert cache.gather(0, 0)[0].shape == (1, tokens, 1)

def test_free(cache, tokens):
    ones = np.ones((1, tokens, 1))
    cache.append(0, 0, ones, ones)
    cache.free(0)
    assert cache.num_free_blocks() == 4
""",
}
"""Tests with a conftest, a data file, a module beside them and settings above them."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Dask cluster with two workers.

    Its threads draw from `random`, which Hypothesis, in whatever test came next, would take for a strategy's.
    """
    from ..jobs.local_cluster import address, local  # noqa: PLC0415 - heavy

    with local(2) as made:
        yield address(made)


@pytest.fixture
def suite_project(tmp_path: Path) -> Path:
    for name, text in PROJECT.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "project"


def verdicts(path: Path) -> dict[str, Any]:
    """What a report says of each bug, and of the whole; times aside."""
    found = json.loads(path.read_text(encoding="utf-8"))
    (file,) = found["files"].values()
    bugs = {one["id"]: (one["status"], one["killedBy"], one["statusReason"]) for one in file["mutants"]}
    return {"bugs": bugs, "score": found["config"]["score"], "code": found["config"]["exitCode"]}
