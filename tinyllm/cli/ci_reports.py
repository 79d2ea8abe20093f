"""Reports for CI: JUnit XML, a badge, and the annotations and summary of GitHub Actions."""

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tinyllm.cli import streams
from tinyllm.cli.check_worker import Held, Progress
from tinyllm.cli.outputs import append, check_writable, write
from tinyllm.cli.screen import fail

if TYPE_CHECKING:
    from tinyllm.grading.junit import Case
    from tinyllm.grading.verdict import Grade


@dataclass
class Gate:
    """Collects the findings of a command, and publishes them once.

    `tinyllm check` sets `impl`, `steps` and `held`; `problem` and `detail` say why there is no verdict.
    """

    junit: Path | None = None
    badge: Path | None = None
    impl: str = ""
    steps: list[Progress] = field(default_factory=list)
    held: Held | None = None
    grade: "Grade | None" = None
    problem: str = ""
    detail: str = ""

    def __post_init__(self) -> None:
        check_writable(self.junit, self.badge)

    def refuse(self, code: int, problem: str, detail: str = "") -> NoReturn:
        """Publish that there is no verdict, and exit."""
        self.problem, self.detail = problem, detail
        try:
            self.publish(code)
        finally:
            fail(code, problem)

    def publish(self, code: int) -> None:
        """Write the requested files and, under GitHub Actions, the summary and the annotations.

        Every file is tried, even if one cannot be written; then the command exits with a message.
        """
        from tinyllm.grading import junit  # noqa: PLC0415 - heavy

        if os.environ.get("GITHUB_ACTIONS") == "true":
            for line in self._annotations():
                streams.command(line)
            if path := os.environ.get("GITHUB_STEP_SUMMARY"):
                append(Path(path), self._summary(code))
        with contextlib.ExitStack() as each:
            if self.junit:
                each.callback(write, self.junit, junit.render(self._suites()))
            if self.badge:
                each.callback(write, self.badge, self._badge(code))

    def _suites(self) -> "dict[str, list[Case]]":
        from tinyllm.grading import junit  # noqa: PLC0415

        suites = {}
        if self.held:
            suites["laws"] = [self._case(step, self.held) for step in self._steps()]
        if self.grade:
            suites["planted bugs"] = junit.cases(self.grade)
        if self.problem:
            case = junit.Case("tinyllm", "verdict", 0, "error", "no verdict", self.problem, self.detail)
            suites["verdict"] = [case]
        return suites

    def _steps(self) -> list[Progress]:
        """The finished checks, and the one that did not finish."""
        return self.steps + [one for one in self.held.failed if one not in self.steps] if self.held else []

    def _case(self, step: Progress, held: Held) -> "Case":
        from tinyllm.grading.junit import Case  # noqa: PLC0415

        group, seconds = f"{self.impl}.{step.kind or 'start'}", step.seconds or 0.0
        if step not in held.failed:
            reason = next((one for one in held.not_checked if f": {step.name} needs " in one), "")
            return Case(group, step.name, seconds, *(("skipped", "not checked", reason) if reason else ()))
        problem = step.problem or "it did not finish"
        story = held.story if step.problem == f"law {held.law} is broken" else ""
        kind = problem.partition(":")[0]  # the class of an error, or the law
        outcome = "failure" if kind == "AssertionError" or kind.startswith("law ") else "error"
        return Case(group, step.name, seconds, outcome, kind, problem, story)

    def _badge(self, code: int) -> dict[str, Any]:
        from tinyllm.grading import report  # noqa: PLC0415

        if not self.held:
            return (
                report.as_badge(self.grade)
                if self.grade
                else report.badge("planted bugs", "no verdict", code)
            )
        said = "every law holds" if self.held.passed else _said(self.held)
        if self.grade:
            said += f", {report.as_badge(self.grade)['message']}"
        return report.badge("paged KV cache", said, code)

    def _annotations(self) -> list[str]:
        from tinyllm.grading import github  # noqa: PLC0415

        found = []
        if self.problem:
            found.append(github.annotation("error", self.problem, title="no verdict"))
        if self.held and not self.held.passed:
            where = github.location(self.impl.partition(":")[0])
            story = self.held.story or "; ".join(f"{one.name}: {one.problem}" for one in self.held.failed)
            found.append(github.annotation("error", story, **where, title=_said(self.held)))
        return found + (github.annotations(self.grade) if self.grade else [])

    def _summary(self, code: int) -> str:
        from tinyllm.grading import github  # noqa: PLC0415

        parts = []
        if self.held:
            end = "every law holds" if self.held.passed else _said(self.held)
            parts.append(f"### {'PASS' if self.held.passed else 'FAIL'}: {github.text(end)}\n")
            parts.append(f"{github.code(self.impl)}, {self.held.programs:,} random programs\n")
            parts += [
                f"- {github.text(one.name)}: {github.text(one.problem or 'it did not finish')}"
                for one in self.held.failed
            ]
            parts += [f"- not checked: {github.text(one)}" for one in self.held.not_checked]
            if self.held.story:
                parts.append(github.detail("the shortest program that shows it", self.held.story))
        if self.grade:
            parts.append("\n" + github.summary(self.grade))
        if self.problem:
            parts.append(f"### {github.text(self.problem)} ({code})\n")
            parts += [github.detail("the output", self.detail)] if self.detail else []
        return github.fit(parts)


def _said(held: Held) -> str:
    """The problem of the implementation in a few words."""
    if held.unwritten:
        return f"{held.unwritten} is not written yet"
    return f"law {held.law} is broken" if held.law else "a check fails"
