"""Reports for machines: the schema's shape, where a bug is, the matrix; written whole or not at all."""

import csv
import io
import json
import os
import resource
import stat
from pathlib import Path
from typing import Any

import pytest

from tinyllm.grading import report
from tinyllm.grading.bugs import Bug, Edit
from tinyllm.grading.plant import Target
from tinyllm.grading.verdict import Grade, Result, Trial
from tinyllm.grading.worker import Failure, Outcome

SOURCE = "first\nsecond line\n    third\n"
KEYS = {"schemaVersion", "thresholds", "files", "testFiles", "framework", "system", "config"}
STATUSES = {
    "Killed",
    "Survived",
    "NoCoverage",
    "CompileError",
    "RuntimeError",
    "Timeout",
    "Ignored",
    "Pending",
}


def trial(status: str, *tests: str, note: str = "", seconds: float = 0.5) -> Trial:
    kills = [Failure(test, "call", "") for test in tests]
    return Trial(0, status, Outcome(tests=3, kills=kills, seconds=seconds, examples=7), note)


@pytest.fixture
def graded(tmp_path: Path) -> Grade:
    def bug(name: str, find: str = "first", **more: Any) -> Bug:
        return Bug(name, f"title of {name}", "symptom", (Edit(find, "other"), Edit("third", "3rd")), **more)

    results = [
        Result(
            bug("b1", "line\n    "), [trial("killed", "t::a", "t::b"), trial("killed", "t::a", seconds=1.5)]
        ),
        Result(bug("b2"), [trial("killed", "t::b"), trial("survived")]),
        Result(bug("b3"), [trial("timeout", note="no end"), trial("survived")]),
        Result(bug("b4"), [trial("invalid", note="left"), trial("timeout", note="no end")]),
        Result(bug("b5", survives=True), [trial("survived"), trial("survived")]),
        Result(bug("b6", survives=True), [trial("killed", "t::a"), trial("killed", "t::a")]),
    ]
    target = Target("pkg.mod", str(tmp_path / "pkg" / "mod.py"), SOURCE)
    return Grade(target, ("tests",), 3, results, [0, 1], 1.0)


def test_the_shape_is_that_of_the_schema(
    graded: Grade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2 of mutation-testing-report-schema; what it requires, and its enumerations."""
    monkeypatch.chdir(tmp_path)
    found = json.loads(json.dumps(report.as_json(graded)))
    assert found.keys() == KEYS
    assert found["schemaVersion"] == "2"
    assert 0 <= found["thresholds"]["low"] <= found["thresholds"]["high"] <= 100
    ((name, file),) = found["files"].items()
    assert (name, file["language"], file["source"]) == ("pkg/mod.py", "python", SOURCE)
    tests = {test["id"] for test in found["testFiles"][""]["tests"]}
    assert tests == {"t::a", "t::b"}
    for mutant in file["mutants"]:
        assert {"id", "mutatorName", "location", "status"} <= mutant.keys()
        assert mutant["status"] in STATUSES
        assert set(mutant["killedBy"]) <= tests
        for end in mutant["location"].values():
            assert end.keys() == {"line", "column"}
            assert min(end.values()) >= 1
    assert found["framework"].keys() == {"name", "version", "branding", "dependencies"}
    assert found["system"]["os"].keys() == {"platform", "version"}
    assert found["config"]["exitCode"] == graded.code == 4


def test_each_bug(graded: Grade) -> None:
    found = {
        mutant["id"]: mutant
        for file in report.as_json(graded)["files"].values()
        for mutant in file["mutants"]
    }
    assert {name: mutant["status"] for name, mutant in found.items()} == {
        "b1": "Killed",
        "b2": "Survived",
        "b3": "Timeout",
        "b4": "RuntimeError",
        "b5": "Ignored",
        "b6": "Ignored",
    }
    assert found["b1"]["statusReason"] == "killed in 2 of 2 trials"
    assert found["b2"]["statusReason"] == "killed in 1 of 2 trials"
    assert found["b4"]["statusReason"] == "left"
    assert found["b6"]["statusReason"] == "no bug, yet killed in 2 of 2 trials"
    assert found["b6"]["killedBy"] == ["t::a"]
    assert found["b1"]["location"] == {"start": {"line": 2, "column": 8}, "end": {"line": 3, "column": 5}}
    assert found["b2"]["location"] == {"start": {"line": 1, "column": 1}, "end": {"line": 1, "column": 6}}
    assert found["b1"]["killedBy"] == ["t::a", "t::b"]
    assert found["b1"]["duration"] == 1000
    assert "duration" not in found["b3"]
    assert found["b1"]["replacement"] == "other\n...\n3rd"


def test_a_module_from_elsewhere_goes_by_its_name(graded: Grade) -> None:
    assert list(report.as_json(graded)["files"]) == ["mod.py"]


def test_the_matrix(graded: Grade) -> None:
    rows = list(csv.reader(io.StringIO(report.as_matrix(graded))))
    assert rows == [
        ["bug", "status", "t::a", "t::b"],
        ["b1", "killed", "2", "1"],
        ["b2", "survived", "0", "1"],
        ["b3", "timeout", "0", "0"],
        ["b4", "invalid", "0", "0"],
        ["b5", "survived", "0", "0"],
        ["b6", "killed", "2", "0"],
    ]


@pytest.mark.parametrize(("content", "text"), [("a,b\n", "a,b\n"), ({"a": "ä"}, '{\n  "a": "\\u00e4"\n}\n')])
def test_a_report_takes_the_old_ones_place(tmp_path: Path, content: Any, text: str) -> None:
    path = tmp_path / "report"
    path.write_text("old", encoding="utf-8")
    report.write(path, content)
    assert path.read_text(encoding="utf-8") == text
    assert [one.name for one in tmp_path.iterdir()] == ["report"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize(("where", "at"), [(os, "fsync"), (Path, "chmod"), (Path, "replace")])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, at: str, error: BaseException
) -> None:
    """`fsync` is the last to fail for what is written; test_hostile_disk.py has limits that are real."""
    path = tmp_path / "report"
    path.write_text("old", encoding="utf-8")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(where, at, fail)
    with pytest.raises(type(error)) as raised:
        report.write(path, "new")
    if isinstance(raised.value, OSError):
        assert raised.value.filename == str(path)
    assert path.read_text(encoding="utf-8") == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["report"]


def test_half_a_character_is_written_as_its_number(tmp_path: Path) -> None:
    """Such as Python makes of a byte in a file's name that is not UTF-8."""
    report.write(tmp_path / "report", "a\udcffb")
    assert (tmp_path / "report").read_bytes() == rb"a\udcffb"


def test_an_appended_text_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "summary"
    report.append(path, "one\n")
    report.append(path, "two\n")
    assert path.read_text(encoding="utf-8") == "one\ntwo\n"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            report.append(path, "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text(encoding="utf-8") == "one\ntwo\n"
    with pytest.raises(OSError, match="No space left"):
        report.append(Path("/dev/full"), "x")


def test_through_a_link_and_into_a_device(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    report.write(link, "text")
    assert link.is_symlink()
    assert file.read_text(encoding="utf-8") == "text"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    report.write(pipe, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode), "not replaced by a file"
