"""The gate: reports for CI, what GitHub Actions shows by itself, and what other repositories use."""

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from tinyllm.cli.check_worker import Held, Progress

PASS, WEAK, USAGE, BASELINE = range(4)
ROOT = Path(__file__).parents[2]
Invoke = Callable[..., Any]
ONE = (
    "import numpy as np\nfrom tinyllm.infer.paged import PagedKVCache\n\n"
    "def test():\n    cache = PagedKVCache(4, 2, 1, 1, 1)\n"
    "    cache.add_seq(0)\n    one = np.ones((1, 1, 1))\n    cache.append(0, 0, one, one)\n"
    "    assert cache.gather(0, 0)[0].shape == one.shape\n"
)
SHARED = "[refs[block] + 1 for block in table]", "[refs[block] for block in table]"


@pytest.fixture
def summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As under GitHub Actions: the file of the job's summary."""
    path = tmp_path / "summary.md"
    path.write_text("what an earlier step wrote\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    return path


def cases(path: Path) -> dict[str, str]:
    """The end of each test case of a JUnit file."""
    found = ElementTree.parse(path).iter("testcase")
    return {case.attrib["name"]: next((one.tag for one in case), "passed") for case in found}


def commands(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("::")]


def test_grade_writes_its_reports(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(ONE, encoding="utf-8")
    options = ("--bug", "s02", "--bug", "s06", "--junit", "out.xml", "--badge", "badge.json")
    done = invoke("grade", "test_it.py", *options)
    assert done.exit_code == WEAK
    ends = {name.partition(":")[0]: end for name, end in cases(tmp_path / "out.xml").items()}
    assert ends == {"s02": "passed", "s06": "failure"}
    badge = json.loads((tmp_path / "badge.json").read_text(encoding="utf-8"))
    assert badge == {"schemaVersion": 1, "label": "planted bugs", "message": "1 of 2 killed", "color": "red"}
    assert commands(done.stdout) == []


def test_grade_under_github_actions(invoke: Invoke, tmp_path: Path, summary: Path) -> None:
    (tmp_path / "test_it.py").write_text(ONE, encoding="utf-8")
    done = invoke("grade", "test_it.py", "--bug", "s06")
    assert done.exit_code == WEAK
    (line,) = commands(done.stdout)
    assert line.startswith("::error title=s06 survived::")  # the reference is not in this repository
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("what an earlier step wrote\n\n### FAIL: 0 of 1 planted bugs killed: 0%\n")
    assert "pytest --plant s06 test_it.py" in text


@pytest.mark.usefixtures("summary")
@pytest.mark.parametrize("where", ["folder", pytest.param("none/summary.md", marks=pytest.mark.long)])
def test_a_summary_that_cannot_be_written(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    (tmp_path / "test_it.py").write_text(ONE, encoding="utf-8")
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / where))
    done = invoke("grade", "test_it.py", "--bug", "s02")
    assert done.exit_code == PASS
    assert "the summary of the job cannot be written" in done.stderr


def test_no_verdict_is_told_as_well(invoke: Invoke, tmp_path: Path, summary: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test():\n    assert 'red' == ''\n", encoding="utf-8")
    options = ("--bug", "s02", "--junit", "out.xml", "--badge", "badge.json")
    done = invoke("grade", "test_it.py", *options)
    assert done.exit_code == BASELINE
    assert cases(tmp_path / "out.xml") == {"verdict": "error"}
    assert json.loads((tmp_path / "badge.json").read_text(encoding="utf-8"))["message"] == "no verdict"
    assert commands(done.stdout)[0].startswith("::error title=no verdict::no verdict: the clean tests fail")
    assert "no verdict&#58; the clean tests fail" in summary.read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["--junit", "--badge"])
@pytest.mark.parametrize("command", ["check", "grade"])
def test_what_cannot_be_written_is_said_before_the_work(invoke: Invoke, command: str, option: str) -> None:
    done = invoke(command, "nothing.py", option, "none/out")
    assert done.exit_code == USAGE
    assert "none/out cannot be written" in done.stderr


def test_check_tells_a_broken_law(invoke: Invoke, tmp_path: Path, reference: str, summary: Path) -> None:
    (tmp_path / "paged.py").write_text(reference.replace(*SHARED), encoding="utf-8")
    done = invoke("check", "paged.py", "--junit", "out.xml", "--badge", "badge.json")
    assert done.exit_code == WEAK
    ends = cases(tmp_path / "out.xml")
    assert ends["test_layers_keep_independent_lengths"] == "passed"
    assert ends["test_fork_shares_until_a_write"] == "failure"
    failures = list(ElementTree.parse(tmp_path / "out.xml").iter("failure"))
    assert {one.attrib["type"] for one in failures} == {"AssertionError", "law 8 is broken"}
    assert "fork 0 1" in (failures[-1].text or "")
    badge = json.loads((tmp_path / "badge.json").read_text(encoding="utf-8"))
    assert (badge["message"], badge["color"]) == ("law 8 is broken", "red")
    (line,) = commands(done.stdout)
    assert line.startswith("::error file=paged.py,title=law 8 is broken::law 8, copy on write: ")
    text = summary.read_text(encoding="utf-8")
    assert "### FAIL: law 8 is broken\n" in text
    assert "<pre>law 8, copy on write" in text


@pytest.mark.usefixtures("few_bugs")
def test_check_tells_both_steps(invoke: Invoke, tmp_path: Path, reference: str, summary: Path) -> None:
    """What is not offered is skipped; weak tests fail the second step."""
    text = reference.replace(
        "    _closed = True  #", "    capabilities = frozenset({'contents'})\n    _closed = True  #"
    )
    (tmp_path / "paged.py").write_text(text, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(ONE.replace("tinyllm.infer.paged", "paged"), encoding="utf-8")
    options = ("--tests", "test_it.py", "--profile", "dev", "--junit", "out.xml", "--badge", "badge.json")
    done = invoke("check", "paged.py", *options)
    assert done.exit_code == WEAK
    ends = cases(tmp_path / "out.xml")
    assert ends["random programs"] == "passed"
    assert "skipped" in ends.values()
    assert sum(end == "failure" for end in ends.values()) == len(commands(done.stdout)) > 2
    message = json.loads((tmp_path / "badge.json").read_text(encoding="utf-8"))["message"]
    assert message.startswith("every law holds, ")
    shown = summary.read_text(encoding="utf-8")
    assert "### PASS: every law holds\n" in shown
    assert "- not checked: " in shown
    assert "### FAIL: " in shown


def test_check_tells_what_is_not_there(invoke: Invoke, tmp_path: Path, summary: Path) -> None:
    (tmp_path / "paged.py").write_text("1 +", encoding="utf-8")
    done = invoke("check", "paged.py", "--junit", "out.xml", "--badge", "badge.json")
    assert done.exit_code == USAGE
    assert cases(tmp_path / "out.xml") == {"verdict": "error"}
    assert commands(done.stdout) == ["::error title=no verdict::paged.py, line 1: invalid syntax"]
    assert "invalid syntax" in summary.read_text(encoding="utf-8")


def test_check_tells_what_is_not_written_and_what_did_not_end() -> None:
    from tinyllm.cli.ci_reports import Gate  # noqa: PLC0415

    gate = Gate(impl="paged.py", held=Held(unwritten="fork", failed=[Progress("catalogue", "t")]))
    ((case,),) = gate._suites().values()
    assert (case.group, case.outcome, case.message) == (
        "paged.py.catalogue",
        "error",
        "it did not finish",
    )
    assert gate._badge(WEAK)["message"] == "fork is not written yet"
    gate = Gate(impl="paged.py", held=Held(failed=[Progress("catalogue", "t", 1.0, "NameError: x")]))
    assert gate._badge(WEAK)["message"] == "a check fails"
    assert gate._annotations() == ["::error title=a check fails::t: NameError: x"]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", sorted((ROOT / ".github" / "workflows").iterdir())),
        ("vendor.github-actions", [ROOT / "action.yml"]),
    ],
)
def test_workflows_and_action_are_valid(schema: str, files: list[Path]) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("what", "file"),
    [("validate-manifest", ".pre-commit-hooks.yaml"), ("validate-config", ".pre-commit-config.yaml")],
)
def test_hooks_are_valid(what: str, file: str) -> None:
    command = [sys.executable, "-m", "pre_commit", what, str(ROOT / file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hooks_run_commands_that_are_there(invoke: Invoke) -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert [hook["id"] for hook in hooks] == ["tinyllm-check", "tinyllm-grade"]
    for hook in hooks:
        name, *arguments = shlex.split(hook["entry"])
        assert name == "tinyllm"
        assert invoke(*arguments, "--help").exit_code == 0


@pytest.mark.parametrize(
    ("what", "target", "arguments", "code", "said"),
    [
        ("check", "paged.py", "--junit 'a report.xml'", WEAK, "Next: write __init__."),
        ("grade", "none here", "", USAGE, "there are no tests at none here"),
        ("rm", "-rf", "", 1, "what: rm: there are check and grade"),
    ],
)
def test_the_step_of_the_action(
    invoke: Invoke, tmp_path: Path, what: str, target: str, arguments: str, code: int, said: str
) -> None:
    invoke("start")
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    step = action["runs"]["steps"][-1]
    assert {name: f"${{{{ inputs.{name.lower()} }}}}" for name in step["env"]} == step["env"]
    assert step["env"].keys() <= {name.upper() for name in action["inputs"]}
    given = {"WHAT": what, "TARGET": target, "ARGUMENTS": arguments}
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-c", step["run"]],
        cwd=tmp_path,
        env={**os.environ, **given, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert (tmp_path / "a report.xml").exists() is ("junit" in arguments)
