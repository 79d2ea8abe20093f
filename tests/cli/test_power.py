"""`tinyllm power`: the table, the bars, and the exit code."""

import json
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tinyllm.cli.executor import Pool
from tinyllm.cli.power import SOON, Power, _buckets, _by_cause
from tinyllm.grading.bugs import load_set
from tinyllm.jobs.cluster import ClusterError
from tinyllm.testing.power import Found

Call = Callable[..., Any]
BUG = load_set("course")[0]


def test_what_is_found_is_counted(invoke: Call, tmp_path: Path) -> None:
    path = tmp_path / "power.json"
    done = invoke("power", "--trials", 2, "--bug", "s09", "--bug", "s08", "--json", path)
    assert done.exit_code == 0, done.output
    assert "s08" in done.stdout
    assert done.stdout.count("2/2") == 2
    assert "median of the medians: " in done.stdout
    written = json.loads(path.read_text(encoding="utf-8"))
    assert (written["seeds"], written["exitCode"]) == ([0, 1], 0)
    assert [trial["law"] for trial in written["bugs"]["s09"]["trials"]] == [6, 6]
    assert "why tests miss them" not in done.stdout


def test_a_fault_of_the_second_cache_is_found_in_it(invoke: Call) -> None:
    done = invoke("power", "--trials", 1, "--set", "field", "--bug", "f04")
    assert done.exit_code == 0, done.output
    last = re.search(r"^lines that nobody looks at .*$", done.stdout, re.MULTILINE)
    assert last is not None
    faults, found, programs, *others = last[0].split()[5:]
    assert (faults, found, others) == ("1", "1/1", ["0", "-"])
    assert 1 <= int(programs) <= 100


def test_what_was_known_when_the_cluster_was_lost(
    invoke: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second unit is lost: the trial of the first is told and written, and said to be all."""

    class Lost(ThreadPoolExecutor):
        units = 0

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            self.units += 1
            if self.units == 1:
                return super().submit(fn, *args, **kwargs)
            gone: Future[Any] = Future()
            gone.set_exception(ClusterError("it was lost"))
            return gone

    made = Pool(Lost(1), lambda: 1, str, away=True)
    monkeypatch.setattr("tinyllm.cli.executor._cluster", lambda *_: made)
    done = invoke("power", "--trials", "2", "--bug", "s09", "--executor", "dask://nowhere:1")
    assert done.exit_code == 6
    assert "1/1" in done.stdout
    assert "it was lost; the results so far are in tinyllm-power-so-far.json" in done.stderr
    written = json.loads((tmp_path / "tinyllm-power-so-far.json").read_text(encoding="utf-8"))
    first, second = written["bugs"]["s09"]["trials"]
    assert first["law"] == 6
    assert (second, written["exitCode"]) == ("lost", 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trials", 0), "number of at least 1"),
        (("--bug", "s99"), "there is no bug s99; expected one of s01"),
        (("--profile", "long"), "--profile long: expected one of dev, ci, deep"),
        (("--json", "/nowhere/p.json"), "/nowhere/p.json cannot be written"),
    ],
)
def test_wrong_options_are_refused(invoke: Call, arguments: tuple[Any, ...], message: str) -> None:
    done = invoke("power", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr.replace("\n", " ")


def test_late_never_and_directed() -> None:
    early, late = Found(6, 3, 50), Found(6, SOON + 1, 5000)
    assert Power(BUG, {0: early, 1: early}).sure
    assert not Power(BUG, {0: early, 1: late}).sure
    assert not Power(BUG, {0: early, 1: None}).sure
    assert not Power(BUG).sure
    assert Power(BUG, {0: None}, directed="32,776 blocks").sure


def test_bugs_are_summed_by_the_cause_for_which_tests_miss_them() -> None:
    early, late = Found(6, 3, 50), Found(6, SOON + 1, 5000)
    a, b, other = (replace(BUG, id=name, cause=cause) for name, cause in (("a", "x"), ("b", "x"), ("c", "y")))
    powers = [Power(BUG, {0: early, 1: early}), Power(a, {0: early, 1: late}, directed="a case")]
    powers += [Power(b, {0: None, 1: None}), Power(other, {0: None, 1: None}, directed="a case")]
    with (console := Console(width=100)).capture() as shown:
        console.print(_by_cause(powers))
    assert [line.split() for line in shown.get().splitlines()[1:]] == [
        ["x", "2", "2/4", "52", "1", "b"],
        ["y", "1", "0/2", "-", "1", "-"],
    ]


def test_every_trial_is_in_one_bucket() -> None:
    rows = dict(_buckets([1, 2, 3, 4, 100, 101, None]))
    assert rows == {
        "1": 1,
        "2 to 3": 2,
        "4 to 10": 1,
        "11 to 30": 0,
        "31 to 100": 1,
        "more than 100": 1,
        "never": 1,
    }
