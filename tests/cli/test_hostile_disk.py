"""The disk is full: what was there is intact, nothing is left beside it, the verdict is told, and so is why.

A limit to the size of files makes writing fail in the middle, anywhere, and for root as well; `/dev/full` is
a device that has no space left.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

WEAK, USAGE = 1, 2
SUITE = (
    "import numpy as np\nfrom tinyllm.infer.paged import PagedKVCache\n\n"
    "def test_it():\n    cache = PagedKVCache(4, 2, 1, 1, 1)\n    cache.add_seq(0)\n"
    "    one = np.ones((1, 1, 1))\n    cache.append(0, 0, one, one)\n"
    "    assert cache.gather(0, 0)[0].shape == one.shape\n"
)
LIMITED = """
import os, resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
os.execv(sys.argv[2], sys.argv[2:])
"""
Limited = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder for the command, with a short name: a socket goes there."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


@pytest.fixture
def limited(
    command: str, tmp_path: Path, temporary: Path, environment: Callable[..., dict[str, str]]
) -> Limited:
    """Runs `tinyllm` where no file can have more bytes than that; nor could one with what is covered."""

    def run(limit: int, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
        # A compiled module that breaks off half-way would be left behind, and read by every later process.
        kept = environment(TMPDIR=str(temporary), PYTHONDONTWRITEBYTECODE="1", **env)
        return subprocess.run(
            [sys.executable, "-c", LIMITED, str(limit), command, *map(str, arguments)],
            cwd=tmp_path,
            env={name: value for name, value in kept.items() if not name.startswith("COV")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_reports_of_check(limited: Limited, tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "paged.py").write_text("class PagedKVCache:\n    pass\n", encoding="utf-8")
    names = "--json", "--junit", "--badge"
    for name in (*names, "summary"):
        (tmp_path / name).write_text("old", encoding="utf-8")
    before = contents(tmp_path)
    options = [one for name in names for one in (name, f"./{name}")]
    github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    done = limited(16, "check", "paged.py", *options, **github)
    assert done.returncode == USAGE
    for name in names:
        assert f"tinyllm: {name} cannot be written: File too large" in done.stderr
    assert "the summary of the job cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Step 2, grading the tests, waits until step 1 passes." in done.stdout
    assert "::error " in done.stdout
    assert contents(tmp_path) == before
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "--example", "--svg"], "every law holds after each of 14 lines"),
        pytest.param(
            ["power", "--trials", "1", "--bug", "s01", "--json"],
            "median of the medians",
            marks=pytest.mark.long,
        ),
    ],
    ids=["show", "power"],
)
def test_other_reports(limited: Limited, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "out").write_text("old", encoding="utf-8")
    done = limited(16, *arguments, "out")
    assert done.returncode == USAGE
    assert said in done.stdout
    assert done.stderr == "tinyllm: out cannot be written: File too large\n"
    assert contents(tmp_path) == {str(tmp_path / "out"): b"old"}


def test_a_stub_is_whole_or_not_there(limited: Limited, tmp_path: Path) -> None:
    done = limited(1000, "start", "new")
    assert done.returncode == USAGE
    assert done.stderr == "tinyllm: new/paged.py cannot be written: File too large\n"
    assert contents(tmp_path) == {}
    assert limited(100_000, "start", "new").returncode == 0


def test_reports_of_grade(here: Callable[..., Any], tmp_path: Path) -> None:
    """One that cannot be written is named, and keeps none of the others."""
    (tmp_path / "test_it.py").write_text(SUITE, encoding="utf-8")
    good = {"--junit": "j.xml", "--badge": "b.json", "--html": "p.html"}
    options = [word for pair in good.items() for word in pair]
    full = "--json", "/dev/full", "--matrix", "/dev/full"
    done = here("grade", "test_it.py", "--bug", "s06", *options, *full)
    assert done.returncode == USAGE
    assert b"FAIL  0 of 1 planted bugs killed: 0%" in done.stdout
    assert done.stderr == b"tinyllm: /dev/full cannot be written: No space left on device\n" * 2
    assert {path for path in good.values() if (tmp_path / path).stat().st_size} == set(good.values())


def test_there_is_no_room_for_a_run(limited: Limited, tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE, encoding="utf-8")
    before = contents(tmp_path)
    done = limited(1000, "grade", "test_it.py", "--bug", "s02")
    assert done.returncode == USAGE
    assert "no verdict: the tests cannot be run: " in done.stderr
    assert f"{temporary}/tinyllm-" in done.stderr
    assert done.stderr.rstrip(")01\n").endswith("cannot be written: File too large (seed ")
    assert contents(tmp_path) == before
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "grade test_it.py",
        *(pytest.param(line, marks=pytest.mark.long) for line in ("check", "power --bug s01")),
    ],
)
def test_there_is_no_room_for_anything(limited: Limited, tmp_path: Path, line: str) -> None:
    (tmp_path / "test_it.py").write_text(SUITE, encoding="utf-8")
    done = limited(0, *line.split())
    assert done.returncode == USAGE
    assert "tinyllm: the system refuses: No usable temporary directory found in " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_what_can_be_written_is(limited: Limited, tmp_path: Path) -> None:
    """The badge is small; that another report is not there does not keep it away."""
    (tmp_path / "paged.py").write_text("class PagedKVCache:\n    pass\n", encoding="utf-8")
    done = limited(400, "check", "paged.py", "--junit", "out.xml", "--badge", "badge.json")
    assert done.returncode == USAGE
    assert json.loads((tmp_path / "badge.json").read_text(encoding="utf-8"))["schemaVersion"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["badge.json", "paged.py"]
