"""`pytest --plant s06 tests` lets a person see why a bug survives, or how it is killed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

OWN = Path(__file__).parents[1] / "own" / "test_properties.py"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs pytest in a folder of its own, with a temporary folder of its own."""
    (tmp_path / "temporary").mkdir()

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)],
            cwd=tmp_path,
            env={**kept, "TMPDIR": str(tmp_path / "temporary")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return call


@pytest.mark.parametrize("more", [[], ["-n", "2"]], ids=["alone", "with xdist"])
def test_a_planted_bug_fails_the_tests(
    run: Run, suite: Callable[..., Path], tmp_path: Path, more: list[str]
) -> None:
    """Seen with its own line, in this process and in the workers of xdist, and nothing is left."""
    path = suite({"pytest.ini": "[pytest]\nfilterwarnings = error\n", "test_it.py": OVERRUN})
    done = run("--plant", "s05", path, *more)
    assert done.returncode == 1, done.stdout
    assert "4 failed" in done.stdout
    assert "for first_block, stop_block in [(block, block + 1) for block in blocks]:" in done.stdout
    assert list((tmp_path / "temporary").glob("tinyllm-*")) == []


OVERRUN = """
import numpy as np
import pytest
from tinyllm.infer.paged import PagedKVCache

@pytest.mark.parametrize("n", range(4))
def test_reused_block(n):
    # The second of two blocks comes first: with s05 the write runs past the pool.
    cache = PagedKVCache(2, 2, 1, 1, 1)
    for seq in (0, 1):
        cache.add_seq(seq)
        cache.append(seq, 0, np.ones((1, 1, 1)), np.ones((1, 1, 1)))
    cache.free(0)
    cache.append(1, 0, np.ones((1, 2, 1)), np.ones((1, 2, 1)))
"""


def test_the_same_without_the_bug(run: Run, suite: Callable[..., Path]) -> None:
    path = suite("PRELUDE\ndef test(): assert not has_s02()")
    assert run("--plant", "s13", path).returncode == 0
    assert run(path).returncode == 0


@pytest.mark.long
def test_our_own_tests_fail_on_s06(run: Run) -> None:
    done = run("--plant", "s06", "-x", "-c", OWN.parents[2] / "pyproject.toml", OWN)
    assert (done.returncode, done.stderr) == (1, "")
    assert "1 failed" in done.stdout


def test_an_unknown_bug(run: Run, suite: Callable[..., Path]) -> None:
    done = run("--plant", "nope", suite("def test(): pass"))
    assert done.returncode == 4
    assert "no bug can be planted: there is no bug 'nope'; expected one of s01, s02, " in done.stderr
    assert "Traceback" not in done.stderr


def test_too_late(run: Run, suite: Callable[..., Path]) -> None:
    files = {
        "pytest.ini": "[pytest]\naddopts = -p early\npythonpath = .\n",
        "early.py": "import tinyllm.infer.paged",
        "test_it.py": "def test(): pass",
    }
    done = run("--plant", "s06", suite(files))
    assert done.returncode == 4
    assert "tinyllm.infer.paged was imported before its text could be replaced" in done.stderr
    assert "Traceback" not in done.stderr
