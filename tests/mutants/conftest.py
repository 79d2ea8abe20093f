"""Suites written on the spot, graded in this process (`grade`) or by the command (`tinyllm`)."""

import os
import subprocess
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mutants import bugs, plant
from mutants.grade import Grader
from mutants.verdict import Grade, GradeError

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
        grader = Grader((str(path),), plant.find(bugs.MODULE), chosen, **{"jobs": 2, **options})
        try:
            found = grader.grade(lambda *_: None)
        except GradeError as error:
            return Verdict(error.code, f"{error}\n{error.detail}")
        return Verdict(found.code, "\n".join(found.reasons), found)

    return run


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
    ours = ("PYTEST_", "CI", "GITHUB_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
