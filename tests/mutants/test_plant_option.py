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
    text = "PRELUDE\nimport pytest\n@pytest.mark.parametrize('n', range(4))\ndef test(n):\n"
    text += "    cache = cache_of_one()\n    cache.fork(0, 1)\n    cache.append(1, 0, 1, 1)\n"
    path = suite({"pytest.ini": "[pytest]\nfilterwarnings = error\n", "test_it.py": text})
    done = run("--plant", "s13", path, *more)
    assert done.returncode == 1, done.stdout
    assert "4 failed" in done.stdout
    assert "in append" in done.stdout or "append" in done.stdout
    assert list((tmp_path / "temporary").glob("tinyllm-*")) == []


def test_the_same_without_the_bug(run: Run, suite: Callable[..., Path]) -> None:
    path = suite("PRELUDE\ndef test(): assert not has_s02()")
    assert run("--plant", "s02", path).returncode == 1
    assert run("--plant", "s13", path).returncode == 0
    assert run(path).returncode == 0


def test_our_own_tests_fail_on_s06(run: Run) -> None:
    done = run("--plant", "s06", "-x", "-c", OWN.parents[2] / "pyproject.toml", OWN)
    assert (done.returncode, done.stderr) == (1, "")
    assert "1 failed" in done.stdout


def test_the_planted_line_is_shown(run: Run, suite: Callable[..., Path]) -> None:
    """s13 asks T for nothing, and what comes then fails at a line that tracebacks show."""
    text = (
        "PRELUDE\nimport inspect, linecache\nimport tinyllm.infer.paged as paged\n"
        "def test():\n    code = PagedKVCache.append.__code__\n"
        "    lines = inspect.getsource(PagedKVCache.append)\n    assert 'tokens = k.shape[1]' in lines\n"
        "    assert code.co_filename.startswith('<planted ')\n"
    )
    done = run("--plant", "s13", suite(text))
    assert done.returncode == 0, done.stdout


def test_an_unknown_bug(run: Run, suite: Callable[..., Path]) -> None:
    done = run("--plant", "nope", suite("def test(): pass"))
    assert done.returncode == 4
    assert "no bug can be planted: there is no bug 'nope'; there are s01, s02, " in done.stderr
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
