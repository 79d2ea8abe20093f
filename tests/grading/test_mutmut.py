"""mutmut writes into `mutants/`, and nothing of ours is disturbed; every survivor has to be accounted for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tinyllm.grading import plant
from tinyllm.grading.bugs import MODULE
from tools import generic

ROOT = Path(__file__).parents[2]
SLICE = "tinyllm.infer.paged.xǁPagedKVCacheǁseq_len__mutmut_*"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in a repository of its own, in which a slice of the mutants has been run.

    The tests are the project's own, in the shortest profile: how much they notice is not the point.
    """
    copy = tmp_path_factory.mktemp("tree") / "tinyllm"
    skip = shutil.ignore_patterns(
        ".git", ".venv", ".tox", ".*_cache", ".hypothesis", "__pycache__", "dist", "*.egg-info"
    )
    shutil.copytree(ROOT, copy, ignore=skip)
    shutil.rmtree(copy / "mutants" / "tinyllm", ignore_errors=True)
    settings = copy / "pyproject.toml"
    text = settings.read_text(encoding="utf-8")
    assert "=tinyllm-ci" in text
    assert text.count('["tests/own"]') == 1
    text = text.replace('["tests/own"]', '["tests/own/test_properties.py"]')
    settings.write_text(text.replace("=tinyllm-ci", "=tinyllm-dev"), encoding="utf-8")
    run(copy, "git", "init", "-q")
    run(copy, "git", "add", "-A")
    run(copy, "git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "all")
    run(copy, sys.executable, "-m", "mutmut", "run", SLICE)
    return copy


def run(folder: Path, *command: str) -> str:
    """What the command prints; it has to succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.long
def test_mutmut_has_run_beside_the_planted_bugs(tree: Path) -> None:
    assert (tree / "mutants" / "tinyllm" / "infer" / "paged.py").exists()
    assert (tree / "mutants" / "course.toml").read_bytes() == (ROOT / "mutants" / "course.toml").read_bytes()
    lines = run(tree, sys.executable, "-m", "mutmut", "results", "--all", "true").splitlines()
    mine = [line for line in lines if "seq_len__mutmut" in line]
    assert mine
    assert all(line.endswith(": killed") for line in mine), mine


@pytest.mark.long
def test_git_sees_none_of_it(tree: Path) -> None:
    assert run(tree, "git", "status", "--porcelain") == ""


@pytest.mark.long
def test_one_command_clears_it(tree: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy)
    assert "git clean -fdXq mutants" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    run(copy, "git", "clean", "-fdXq", "mutants")
    assert not (copy / "mutants" / "tinyllm").exists()
    assert not list((copy / "mutants").glob("*.json"))
    assert (copy / "mutants" / "course.toml").exists()


@pytest.mark.long
def test_pytest_the_grader_and_coverage_still_run(tree: Path) -> None:
    collected = run(tree, sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header")
    assert "tests/own/test_properties.py::" in collected
    assert "mutants/tests" not in collected
    properties = "tests/own/test_properties.py"
    assert "killed" in run(tree, sys.executable, "-m", "mutants", properties, "--bug", "s06", "--bug", "s07")
    run(tree, sys.executable, "-m", "coverage", "run", "-m", "pytest", "-q", "tests/infer/test_paged.py")
    run(tree, sys.executable, "-m", "coverage", "combine", "-q")
    report = run(tree, sys.executable, "-m", "coverage", "report", "--skip-empty")
    assert "tinyllm/infer/paged.py" in report
    assert "mutants/tinyllm" not in report


@pytest.mark.long
def test_types_still_check(tree: Path) -> None:
    assert "Success" in run(tree, sys.executable, "-m", "mypy", "-p", "mutants", "-p", "tinyllm")


STATUS = {f"m{i}": "killed" for i in range(98)} | {"m98": "survived", "m99": "survived"}
CHANGES = {"m98": "-a\n+b", "m99": "-c\n+d"}


@pytest.fixture
def last_run(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A last run of a hundred mutants, two of which survived; both are listed."""
    status = dict(STATUS)
    monkeypatch.setattr(generic, "results", lambda: status)
    monkeypatch.setattr(generic, "change", lambda name: CHANGES[name])
    monkeypatch.setattr(generic, "listed", lambda: dict.fromkeys(CHANGES.values(), "reason"))
    return status


def test_listed_survivors_are_accounted_for(
    last_run: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generic.account(1.25) == []
    expected = f"{len(last_run)} mutants: 98 killed, 2 survived; 2 listed as equivalent, 1.2 minutes\n"
    assert capsys.readouterr().out == expected


def test_a_new_survivor_fails(last_run: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generic, "listed", lambda: {"-a\n+b": "reason"})
    assert generic.account(None) == ["m99 is survived:\n-c\n+d"]
    last_run["m98"] = "killed"
    assert generic.account(None) == ["m99 is survived:\n-c\n+d", "listed, but killed or gone:\n-a\n+b"]


@pytest.mark.parametrize("status", ["timeout", "suspicious", "no tests", "segfault"])
def test_what_is_neither_killed_nor_alive_fails(last_run: dict[str, str], status: str) -> None:
    last_run["m99"] = status
    assert generic.account(None) == [f"m99 is {status}:\n-c\n+d"]


def test_the_list_is_short(last_run: dict[str, str]) -> None:
    for name in list(last_run)[:70]:
        del last_run[name]
    assert generic.account(None) == ["2 are listed, more than 5% of 30"]


def test_every_listed_change_applies_to_the_source_as_it_is() -> None:
    source = plant.find(MODULE).source
    changes = generic.listed()
    assert changes
    for text, reason in changes.items():
        assert len(reason) > 20
        assert generic.apply(source, text) != source


@pytest.mark.parametrize(
    "change",
    [
        "-lens[layer] = stop\n+lens[layer] = start",
        "-if plan.need > len(self._free):\n+if plan.need >= len(self._free):",
    ],
)
def test_a_change_that_a_trace_notices_is_no_equivalent(change: str) -> None:
    assert generic.noticed(change).startswith("a trace: law ")
