"""A grade as JUnit XML and for GitHub: what each bug becomes, and text that means to do harm."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tinyllm.grading import github, junit, report
from tinyllm.grading.bugs import MODULE, Bug, Edit
from tinyllm.grading.plant import Target
from tinyllm.grading.verdict import Grade, Result, Trial
from tinyllm.grading.worker import Failure, Outcome

SOURCE = "first\nsecond line\n    third\n"
SUITE = {"name", "package", "id", "timestamp", "hostname", "tests", "failures", "errors", "skipped", "time"}
HOSTILE = "</pre>|*`a`* <script> & ::error::\x1b[31m\x00 %0A \ud800 @x #1 ]]>"


def trial(status: str, *tests: str, note: str = "") -> Trial:
    kills = [Failure(test, "call", "") for test in tests]
    return Trial(0, status, Outcome(tests=3, kills=kills, seconds=0.5, examples=7), note)


def graded(*ends: str, module: str = "pkg.mod", path: str = "mod.py", symptom: str = "it breaks") -> Grade:
    """A grade whose bugs b0, b1, ... ended so; one that begins with `no ` must survive."""
    results = []
    for number, end in enumerate(ends):
        edits = (Edit("line\n    ", "line\n\t"),)
        bug = Bug(f"b{number}", "a title", symptom, edits, survives=end.startswith("no "))
        status = end.removeprefix("no ")
        results.append(Result(bug, [trial(status, *(["t::a"] if status == "killed" else []), note="")]))
    return Grade(Target(module, path, SOURCE), ("my tests",), 3, results, [0], 1.0)


def as_junit(grade: Grade) -> str:
    return junit.render({"planted bugs": junit.cases(grade)})


def parse(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text.encode())


def test_each_bug_is_a_test_case() -> None:
    ends = ("killed", "survived", "timeout", "invalid", "no survived", "no killed", "no timeout")
    (suite,) = parse(as_junit(graded(*ends)))
    shown = {case.attrib["name"]: next(iter(case), None) for case in suite.iter("testcase")}
    found = {name.partition(":")[0]: None if one is None else one.tag for name, one in shown.items()}
    assert found == {
        "b0": None,
        "b1": "failure",
        "b2": "error",
        "b3": "error",
        "b4": None,
        "b5": "failure",
        "b6": "error",
    }
    counts = {name: suite.attrib[name] for name in ("tests", "failures", "errors", "skipped", "time")}
    assert counts == {"tests": "7", "failures": "2", "errors": "3", "skipped": "0", "time": "3.500"}
    failure = shown["b1: it breaks"]
    assert failure is not None
    assert failure.attrib == {"type": "survived", "message": "b1 survived"}
    objection = shown["b5: it breaks"]
    assert objection is not None
    assert objection.attrib["message"].startswith("b5 is no bug, yet t::a objects: the tests ask for more")
    text = failure.text or ""
    for part in (
        "a user would see: it breaks\n",
        "see it: tinyllm grade --bugs FILE --module pkg.mod --bug b1 'my tests'\n",
        "what the code does wrong: a title\n",
        "--- a/mod.py\n+++ b/mod.py\n",
        "-    third\n+\tthird\n",
    ):
        assert part in text


def test_the_shape_is_that_of_the_common_schemas() -> None:
    """What Ant's schema requires of each element, and nothing that Jenkins' does not know."""
    root = parse(as_junit(graded("killed", "survived", "no killed")))
    assert (root.tag, root.attrib) == ("testsuites", {})
    for suite in root:
        assert suite.attrib.keys() == SUITE
        assert re.fullmatch(r"\d{4}(-\d\d){2}T\d\d(:\d\d){2}", suite.attrib["timestamp"])
        tags = [one.tag for one in suite]
        assert tags == ["properties", *["testcase"] * (len(tags) - 3), "system-out", "system-err"]
        for case in suite.iter("testcase"):
            assert case.attrib.keys() == {"name", "classname", "time"}
            for end in case:
                assert end.attrib.keys() == {"type", "message"}


def test_a_note_and_the_command_that_repeats() -> None:
    grade = graded("survived", module=MODULE)
    grade.results[0].trials.append(trial("survived", note="a note"))
    text = junit.explain(grade, grade.results[0])
    assert "\na note\nsee it: pytest --plant b0 'my tests'\n" in text


def test_text_that_means_to_do_harm() -> None:
    grade = graded("survived", symptom=HOSTILE)
    (failure,) = parse(as_junit(grade)).iter("failure")
    assert r"::error::\x1b[31m\x00 %0A \ud800" in (failure.text or "")
    summary = github.summary(grade)
    summary.encode()
    body = summary.partition("<pre>")[2]
    assert body.count("</pre>") == 1
    assert "<script>" not in summary
    assert "\x1b" not in summary
    line = github.annotations(grade)[0]
    assert len(line.splitlines()) == 1, "a command within the message would stand at the start of a line"
    assert "%250A" in line


def test_annotations_are_escaped_as_github_reads_them() -> None:
    line = github.annotation("error", "100%\r\nsure: a, b", file="a,b:c%.py", line="3")
    assert line == "::error file=a%2Cb%3Ac%25.py,line=3::100%25%0D%0Asure: a, b"
    assert github.annotation("warning", "plain") == "::warning::plain"


def test_annotations_point_at_the_edited_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pkg" / "mod.py"
    path.parent.mkdir()
    path.write_text(SOURCE, encoding="utf-8")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    (line,) = github.annotations(graded("killed", "survived", "no survived", path=str(path)))
    assert line.startswith("::error file=pkg/mod.py,line=3,title=b1 survived::A user would see: it breaks.")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "elsewhere"))
    (line,) = github.annotations(graded("killed", "survived", path=str(path)))
    assert line.startswith("::error title=b1 survived::")


def test_a_survivor_of_a_good_suite_is_a_warning() -> None:
    (line,) = github.annotations(graded(*["killed"] * 9, "survived"))
    assert line.startswith("::warning title=b9 survived::")
    assert github.annotations(graded("killed", "no survived")) == []


def test_what_is_no_bug_and_is_killed_is_an_error() -> None:
    (line,) = github.annotations(graded("killed", "no killed"))
    assert line.startswith("::error title=b1 killed::b1 is no bug, yet t::a objects: the tests ask")


def test_a_suite_without_a_test_is_told_though_no_bug_counts() -> None:
    (line,) = github.annotations(graded("no survived", "no timeout"))
    assert line == "::error title=no pass::the score is 0%25, below 80%25"


def test_the_summary() -> None:
    text = github.summary(graded("killed", "survived", "timeout", "no survived", "no killed"))
    assert text.startswith(
        "### FAIL: 1 of 3 planted bugs killed: 33%\n\n- b4 is no bug, and is killed\n- the score is 33&#37;, "
    )
    rows = [line for line in text.splitlines() if line.startswith("| b")][1:]
    assert rows == [
        "| b0 | killed | a title | <code>a</code> |",
        "| b1 | **survives** | (see below) |  |",
        "| b2 | **timeout** | a title |  |",
        "| b3 | survives, as it must | a title |  |",
        "| b4 | **no bug, but killed** | a title | <code>a</code> |",
    ]
    assert text.count("<details>") == text.count("</details>") == 3


def test_a_summary_is_no_longer_than_github_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = github.summary(graded("survived", "survived"))
    monkeypatch.setattr(github, "LIMIT", len(whole.encode()) - 10)
    cut = github.summary(graded("survived", "survived"))
    assert cut.count("<details>") == cut.count("</details>") == 1
    assert "too long for a summary" in cut


@pytest.mark.parametrize(
    ("ends", "message", "colour"),
    [
        (("killed", "killed", "no survived"), "2 of 2 killed", "brightgreen"),
        (("killed", "survived"), "1 of 2 killed", "red"),
        (("killed", "no killed"), "1 of 1 killed, and b1, no bug", "red"),
        (("killed", "invalid"), "1 of 2 killed", "lightgrey"),
    ],
)
def test_the_badge(ends: tuple[str, ...], message: str, colour: str) -> None:
    assert report.as_badge(graded(*ends)) == {
        "schemaVersion": 1,
        "label": "planted bugs",
        "message": message,
        "color": colour,
    }
