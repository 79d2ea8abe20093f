"""Where and how Python was started: the same verdict, or a refusal that says why."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PASS, WEAK, USAGE = 0, 1, 2
SUITE = (
    "import numpy as np\nfrom tinyllm.infer.paged import PagedKVCache\n"
    "from hypothesis import given, settings, strategies as st\n\n"
    "@settings(deadline=None)\n@given(st.integers(1, 3))\n"
    "def test_it(n):\n    cache = PagedKVCache(4, 2, 1, 1, 1)\n    cache.add_seq(0)\n"
    "    one = np.ones((1, n, 1))\n    cache.append(0, 0, one, one)\n"
    "    assert cache.gather(0, 0)[0].shape == one.shape\n"
)
SHARED = "[refs[block] + 1 for block in table]", "[refs[block] for block in table]"
Tinyllm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, reference: str) -> None:
    """A suite that kills s02 alone, and a cache that breaks law 8."""
    (tmp_path / "test_it.py").write_text(SUITE, encoding="utf-8")
    (tmp_path / "paged.py").write_text(reference.replace(*SHARED), encoding="utf-8")


def found(tinyllm: Tinyllm, folder: Path, **env: str) -> dict[str, Any]:
    """All that is said, but for times."""
    grade = tinyllm("grade", "test_it.py", "--bug", "s02", "--bug", "s06", "--json", "g.json", "-j", 1, **env)
    check = tinyllm("check", "paged.py", "--json", "c.json", **env)
    graded = json.loads((folder / "g.json").read_text(encoding="utf-8"))
    for file in graded["files"].values():
        for mutant in file["mutants"]:
            mutant.pop("duration", None)
    return {
        "codes": (grade.returncode, check.returncode),
        "errors": (grade.stderr, check.stderr),
        "grade": re.sub(r"\d+\.\d\d", "0.00", grade.stdout),
        "graded": graded,
        "check": check.stdout,
        "checked": json.loads((folder / "c.json").read_text(encoding="utf-8")),
        "others": [tinyllm(*line.split(), **env).stdout for line in ("bugs s07", "show --example")],
    }


def test_the_hash_seed_changes_no_check(tinyllm: Tinyllm) -> None:
    first, second = (tinyllm("check", "paged.py", PYTHONHASHSEED=seed) for seed in ("0", "12345"))
    assert (first.returncode, first.stderr) == (WEAK, "")
    assert "law 8" in first.stdout
    assert second.stdout == first.stdout


@pytest.mark.long
def test_the_hash_seed_changes_nothing(tinyllm: Tinyllm, tmp_path: Path) -> None:
    first = found(tinyllm, tmp_path, PYTHONHASHSEED="0")
    assert first["codes"] == (WEAK, WEAK)
    assert first["errors"] == ("", "")
    assert first["checked"]["check"]["law"] == 8
    assert found(tinyllm, tmp_path, PYTHONHASHSEED="12345") == first


ONE = {
    "HOME": "/proc/nowhere",
    "XDG_CACHE_HOME": "",
    "TMPDIR": "/proc/nowhere",
    "TERM": "dumb",
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONWARNINGS": "error",
}
OTHER = {"HOME": "/dev/null/x", "TMPDIR": "/dev/null", "OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.parametrize("env", [ONE, pytest.param(OTHER, marks=pytest.mark.long)], ids=["one", "other"])
def test_the_same_verdict(tinyllm: Tinyllm, env: dict[str, str]) -> None:
    """On one core as well."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if cores:
        os.sched_setaffinity(0, {min(cores)})
    try:
        done = tinyllm("grade", "test_it.py", "--bug", "s02", **env)
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
    assert (done.returncode, done.stderr) == (PASS, "")
    assert "PASS  1 of 1 planted bugs killed: 100%" in done.stdout


def test_a_temporary_folder_with_a_long_name(tinyllm: Tinyllm, tmp_path: Path) -> None:
    """Too long for a socket: then there is no fork server."""
    folder = tmp_path / ("long" * 50)
    folder.mkdir()
    (tmp_path / "paged.py").write_text("class PagedKVCache:\n    pass\n", encoding="utf-8")
    done = tinyllm("check", "paged.py", TMPDIR=str(folder))
    assert (done.returncode, done.stderr) == (WEAK, "")
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_to(
    invoke: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc is one even for root."""
    monkeypatch.chdir("/proc")
    done = invoke("grade", f"{tmp_path}/test_it.py", "--bug", "s02")
    assert (done.exit_code, done.stderr) == (PASS, "")
    for words in (["start", "/proc/new"], ["show", "--example", "--svg", "/proc/new"]):
        done = invoke(*words)
        assert done.exit_code == USAGE
        assert re.match(r"tinyllm: /proc/new\S* cannot be written: ", done.stderr)
        assert "Traceback" not in done.stderr


def test_the_model_without_a_home(here: Callable[..., Any]) -> None:
    for command in ("fetch", "info"):
        env = {"HOME": "/dev/null/x", "XDG_CACHE_HOME": "", "TINYLLM_CACHE": ""}
        done = here("model", command, env=env)
        assert done.returncode == USAGE
        assert done.stderr.startswith(b"tinyllm: ")
        assert b"/dev/null/x/" in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_warnings_are_errors_to_the_machine_as_well(tinyllm: Tinyllm) -> None:
    """Hypothesis warns of what is slow while tests are loaded, and once thought that they always are."""
    done = tinyllm("power", "--trials", "1", "--bug", "s01", PYTHONWARNINGS="error")
    assert (done.returncode, done.stderr) == (PASS, "")


@pytest.mark.parametrize("line", ["check", "grade test_it.py"])
def test_without_assertions_there_is_no_verdict(tinyllm: Tinyllm, line: str) -> None:
    done = tinyllm(*line.split(), PYTHONOPTIMIZE="1")
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert "Python ignores assertions here (-O, PYTHONOPTIMIZE)" in done.stderr


def test_without_assertions_the_kit_refuses(tinyllm: Tinyllm, tmp_path: Path) -> None:
    """The laws alone do not need them."""
    code = (
        "from tinyllm.testing import check_cache\nfrom tinyllm import PagedKVCache\ncheck_cache(PagedKVCache)"
    )
    done = subprocess.run(
        [sys.executable, "-OO", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "RuntimeError: Python ignores assertions here" in done.stderr
    (tmp_path / "x.trace").write_text(
        "new 4 2 1 1 1\nadd 0\nappend 0 0 1\nfork 0 1\nappend 0 0 1\n", encoding="utf-8"
    )
    done = tinyllm("replay", "x.trace", "paged.py", PYTHONOPTIMIZE="1")
    assert done.returncode == WEAK
    assert "breaks law 8" in done.stdout
