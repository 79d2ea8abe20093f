"""`tinyllm reach`: several soaks, told as one."""

import html
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tinyllm.cli.reach import Report, headline, picture
from tinyllm.testing.reach import FEATURES

Invoke = Callable[..., Any]
OFFERS = frozenset({"fork", "truncate", "independent-layers"})
EVERY = Counter({(name, step): 10 for name, one in FEATURES.items() for step in one.steps})


def saved(path: Path, **more: Any) -> Path:
    report = Report("mine.py", 7, "1/2", 60.0, 100, 5000, Counter(EVERY), OFFERS)
    for name, value in more.items():
        setattr(report, name, value)
    path.write_text(json.dumps(report.as_json()), encoding="utf-8")
    return path


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = saved(tmp_path / "r.json", law=8, trace="x.trace", story="the story", code=1, replayed=3)
    found = json.loads(path.read_text())
    assert Report.from_json(found).as_json() == found


def test_reports_are_added_up(invoke: Invoke, tmp_path: Path) -> None:
    rare = EVERY - Counter({("copied", 8): 10, ("sharing", 8): 10})
    one = saved(tmp_path / "1.json", reached=rare)
    other = saved(tmp_path / "2.json", reached=EVERY - Counter({("copied", 8): 10}), shard="2/2")
    done = invoke("reach", str(one), str(other))
    assert done.exit_code == 0
    assert done.stdout.count("mine.py") == 2
    assert "8 5.0%" in done.stdout, "10 of 200"
    assert "8 never" in done.stdout
    assert "Not reached: shared blocks that one append copied: 8 or more\n" in done.stdout


def test_one_that_found_something_decides(invoke: Invoke, tmp_path: Path) -> None:
    files = [
        saved(tmp_path / "1.json"),
        saved(tmp_path / "2.json", law=8, story="law 8, at length", code=1),
        saved(tmp_path / "3.json", code=6),
    ]
    done = invoke("reach", *map(str, files))
    assert done.exit_code == 1
    assert "law 8 is broken" in done.stdout
    assert "law 8, at length" in done.stdout
    assert "ended with 6" in done.stdout
    assert invoke("reach", str(files[0]), str(files[2])).exit_code == 6


def test_the_summary_of_a_job(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    invoke("reach", str(saved(tmp_path / "1.json", law=8, story="a <b> story", code=1)))
    text = summary.read_text(encoding="utf-8")
    assert html.unescape(text).startswith("### FAIL: 100 programs, 5,000 steps: law 8 is broken\n")
    assert "tables that hold one block" in text
    assert "a &lt;b&gt; story" in text


@pytest.mark.parametrize("width", [94, 95])
def test_what_a_cache_does_not_offer_is_no_row(width: int) -> None:
    """And where there is little room, each feature has a line for its numbers."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(picture([Report("mine.py", 7, programs=100, reached=EVERY)], width))
    shown = re.sub(" +\n", "\n", console.file.getvalue())  # type: ignore[attr-defined]
    assert ("sequences at once\n" in shown) == (width < 95)
    assert "blocks that one truncate gave back" not in shown


def test_a_report_from_elsewhere_is_no_markup(invoke: Invoke, tmp_path: Path) -> None:
    done = invoke("reach", str(saved(tmp_path / "1.json", implementation="[/x]", shard="[/y]")))
    assert done.exit_code == 0
    assert "[/x]" in done.stdout
    assert "[/y]" in done.stdout


def test_a_law_that_is_no_number(invoke: Invoke, tmp_path: Path) -> None:
    assert invoke("reach", str(saved(tmp_path / "1.json", law="[", story="x", code=1))).exit_code == 2


@pytest.mark.parametrize("text", ["", "[" * 10**5, "[]", "{}", '{"implementation": 1, "seed": "x"}', "\xff"])
def test_what_is_no_report(invoke: Invoke, tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text, encoding="latin-1")
    done = invoke("reach", "r.json")
    assert done.exit_code == 2
    assert "r.json " in done.stderr
    assert invoke("reach", "none.json").exit_code == 2


def test_reports_without_a_program_are_no_pass(invoke: Invoke, tmp_path: Path) -> None:
    nothing = saved(tmp_path / "0.json", programs=0, lines=0, reached=Counter())
    done = invoke("reach", str(nothing), str(nothing))
    assert done.exit_code == 2
    assert "no program ran to its end, so nothing was checked" in done.stderr
    assert headline([Report.from_json(json.loads(nothing.read_text()))]).endswith(": nothing was checked")
    assert invoke("reach", str(nothing), str(saved(tmp_path / "1.json"))).exit_code == 0


@pytest.mark.parametrize("name", ["/dev/zero", "empty", "pipe", "."])
def test_what_is_no_report_is_refused_at_once(invoke: Invoke, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").write_text("")
    os.mkfifo(tmp_path / "pipe")
    done = invoke("reach", name)
    assert done.exit_code == 2
    assert f"tinyllm: {name} " in done.stderr
