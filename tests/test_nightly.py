"""The nightly workflow: its commands are ours, and what its last job does is done here once."""

import json
import os
import re
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tinyllm.cli.app import app
from tinyllm.cli.reach import Report

WORKFLOW = Path(__file__).parents[1] / ".github" / "workflows" / "nightly.yml"


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    return found


def scripts(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_its_commands_are_ours(jobs: dict[str, Any]) -> None:
    commands: Any = typer.main.get_command(app)
    (soak,) = [run for run in scripts(jobs["soak"]) if run.startswith("tinyllm ")]
    for shard in jobs["soak"]["strategy"]["matrix"]["shard"]:
        line = re.sub(r"\$\{\{ matrix.shard \}\}", str(shard), soak)
        line = re.sub(r"\$\{\{ github.run_id \}\}", "12345678901", line).replace('"$LASTS"', "5h")
        name, what, *arguments = line.split()
        context = commands.commands[what].make_context(name, arguments)
        assert context.params["seed"] == 12345678901
        assert context.params["shard"] == f"{shard}/{len(jobs['soak']['strategy']['matrix']['shard'])}"


def test_its_last_job(jobs: dict[str, Any], tmp_path: Path) -> None:
    """Two shards ended, one was lost; one found a law broken. The traces are gathered, the summary is one."""
    for number, code in ((1, 0), (2, 1)):
        folder = tmp_path / "soaks" / f"soak-{number}"
        (folder / "tinyllm-traces").mkdir(parents=True)
        report = Report("tinyllm.infer.paged", 7, f"{number}/4", 9.0, 10, 500, Counter({("live", 2): 9}))
        report.offers = frozenset({"fork"})
        report.code, report.story, report.law = code, "law 8, at length" if code else "", 8 if code else None
        (folder / "report.json").write_text(json.dumps(report.as_json()))
        (folder / "tinyllm-traces" / "law-08-same.trace").write_text("new 1 1 1 1 1\n")
        (folder / "tinyllm-traces" / f"law-08-{number}.trace").write_text("new 1 1 1 1 1\n")
    (tmp_path / "soaks" / "soak-3").mkdir()
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    gather, tell = [run for run in scripts(jobs["report"]) if "soaks" in run]
    for script, code in ((gather, 0), (tell, 1)):
        done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=env, text=True, check=False)
        assert done.returncode == code
    gathered = sorted(path.name for path in (tmp_path / "tinyllm-traces").iterdir())
    assert gathered == ["law-08-1.trace", "law-08-2.trace", "law-08-same.trace"]
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("### FAIL: 20 programs, 1,000 steps")
    assert "law 8, at length" in summary
