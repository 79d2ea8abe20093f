"""A grade as JUnit XML, which GitLab, Jenkins, Azure and others show: a test case for each bug."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from xml.etree import ElementTree

from tinyllm.grading.bugs import Bug
from tinyllm.grading.verdict import Grade, Result

UNFIT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold: most control characters, and halves of characters."""


@dataclass(frozen=True)
class Case:
    """A test case. `outcome` is `passed` or the name of an element: failure, error or skipped."""

    group: str
    name: str
    seconds: float = 0.0
    outcome: str = "passed"
    kind: str = ""
    message: str = ""
    text: str = ""


def cases(grade: Grade) -> list[Case]:
    """A test case for each bug: killed passes, survived fails; a timeout or an invalid run is an error.

    A change that is no bug passes when it survives, and fails when a test objects to it.
    """
    return [_case(grade, result) for result in grade.results]


def _case(grade: Grade, result: Result) -> Case:
    bug, status = result.bug, result.status
    group, name = f"{grade.target.module}.bugs", f"{bug.id}: {bug.symptom}"
    seconds = sum(trial.outcome.seconds for trial in result.trials)
    if result.is_right:
        return Case(group, name, seconds)
    if result.objected:
        return Case(group, name, seconds, "failure", "killed", objection(result), explain(grade, result))
    outcome = "failure" if status == "survived" else "error"
    return Case(group, name, seconds, outcome, status, f"{bug.id} {status}", explain(grade, result))


def objection(result: Result) -> str:
    """The message for a change that is no bug and was killed."""
    by = result.killed_by
    who = f"{', '.join(by)} {'object' if len(by) > 1 else 'objects'}"
    return f"{result.bug.id} is no bug, yet {who}: the tests ask for more than the contract says"


def explain(grade: Grade, result: Result) -> str:
    """The text for a bug that is not right: symptom, notes, command to repeat, title, diff."""
    bug = result.bug
    lines = [f"a user would see: {bug.symptom}"]
    lines += result.notes
    if bug.caught_by:
        lines.append(f"the kind of test that catches it: {', '.join(bug.caught_by)}")
    lines += [f"see it: {repeat(grade, bug)}", f"what the code does wrong: {bug.title}", ""]
    lines.append(grade.diff(bug))
    return "\n".join(lines)


def repeat(grade: Grade, bug: Bug) -> str:
    """The command that runs the tests with the bug in the module's place."""
    if grade.in_reference:
        place = grade.target.place
        return shlex.join(["pytest", "--plant", f"{bug.id}:{place.impl}" if place else bug.id, *grade.tests])
    planted = ["--module", grade.target.module, "--bug", bug.id]
    return shlex.join(["tinyllm", "grade", "--bugs", "FILE", *planted, *grade.tests])


def render(suites: Mapping[str, Sequence[Case]]) -> str:
    """The XML of named suites, valid by the JUnit schemas of Ant and Jenkins."""
    root = ElementTree.Element("testsuites")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    for number, (name, found) in enumerate(suites.items()):
        count = {outcome: sum(case.outcome == outcome for case in found) for outcome in _COUNTED}
        attributes = {
            "name": name,
            "package": "tinyllm",
            "id": number,
            "timestamp": now,
            "hostname": "localhost",
            "tests": len(found),
            **{attribute: count[outcome] for outcome, attribute in _COUNTED.items()},
            "time": f"{sum(case.seconds for case in found):.3f}",
        }
        suite = _add(root, "testsuite", **attributes)
        _add(suite, "properties")
        for case in found:
            _add_case(suite, case)
        _add(suite, "system-out")
        _add(suite, "system-err")
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


_COUNTED = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def _add_case(suite: ElementTree.Element, case: Case) -> None:
    element = _add(suite, "testcase", name=case.name, classname=case.group, time=f"{case.seconds:.3f}")
    if case.outcome != "passed":
        _add(element, case.outcome, type=case.kind, message=case.message).text = printable(case.text)


def _add(parent: ElementTree.Element, tag: str, **attributes: object) -> ElementTree.Element:
    texts = {name: printable(str(value)) for name, value in attributes.items()}
    return ElementTree.SubElement(parent, tag, texts)


def printable(text: str) -> str:
    """The text with the characters that XML cannot hold as Python escapes."""
    return UNFIT.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
