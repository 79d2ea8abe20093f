"""A pytest plugin that notes what happened, and stops at the first kill."""

import sys
import time
from collections.abc import Generator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.internal.conjecture.engine import ConjectureRunner

from tinyllm.grading.worker import FULL, NO_KILL, Failure, Outcome


class Recorder:
    """Fills an `Outcome`.

    `broken` says why the run is worth nothing, `stopped` how the tests ended it, `started` when they began.
    """

    def __init__(self, keep_going: bool) -> None:
        self.keep_going = keep_going
        self.outcome = Outcome()
        self.broken = self.stopped = ""
        self.started: float | None = None
        self.drawn = 0  # test cases of Hypothesis, counted by `hurry`
        self._drawn_before = 0
        self._session: pytest.Session | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, Any, Any]:
        """Run in this one process, whatever `addopts` asks of xdist."""
        if hasattr(config.option, "numprocesses"):
            config.option.numprocesses = None
            config.option.dist = "no"
            config.option.tx = []
        return (yield)

    def pytest_load_initial_conftests(self) -> None:
        """Under CI Hypothesis chooses a profile that ignores seeds; a suite that wants it says so later."""
        if settings.get_current_profile_name() == "ci":
            settings.register_profile("tinyllm-seeded", settings.get_profile("ci"), derandomize=False)
            settings.load_profile("tinyllm-seeded")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep the session, to stop it."""
        self._session = session

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported makes the run worthless."""
        if report.failed and not self.broken:
            self.broken = f"{report.nodeid or 'collection'}: {_last_line(report.longreprtext)}"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests."""
        self.outcome.tests = len(session.items)

    def pytest_internalerror(self, excrepr: object) -> None:
        """Pytest itself, or a plugin of the suite, failed."""
        self.broken = self.broken or f"pytest failed: {_last_line(str(excrepr))}"

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """`pytest.exit` and Ctrl-C, from within: the tests that come after were not run."""
        self.stopped = "" if self.broken else excinfo.exconly()

    def pytest_runtest_logstart(self) -> None:
        """Note when the first test began, and what was drawn before this one."""
        self.started = self.started or time.monotonic()
        self._drawn_before = self.drawn

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Tell a failure that counts from one that does not."""
        report = yield
        report.__dict__["tinyllm_excused"] = call.excinfo is not None and _excused(call.excinfo.value)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note failures of setup, call and teardown alike."""
        if report.when == "call" and not self.outcome.kills:
            drawn = self.drawn - self._drawn_before
            self.outcome.examples += max(1, drawn)
        if not report.failed:
            return
        failure = Failure(report.nodeid, report.when or "", _last_line(report.longreprtext))
        if getattr(report, "tinyllm_excused", False):
            self.outcome.excused.append(failure)
            return
        if not self.outcome.kills:
            self.outcome.seconds = time.monotonic() - (self.started or time.monotonic())
        self.outcome.kills.append(failure)
        if not self.keep_going and self._session is not None:
            self._session.shouldfail = "killed"


def hurry(recorder: Recorder) -> None:
    """Have Hypothesis stop at the first failing example, unshrunk and unsaved, and count the examples.

    There is no setting for this that a suite's own settings would not override. Were these two methods to
    change, grading would be slower and counts missing, but no verdict would differ. Nor is
    a patch made of the example: where libcst is installed, its import takes longer than most kills.
    """
    without = "hypothesis.extra._patching"
    sys.modules[without] = ModuleType(without)  # which defines nothing: as if libcst were missing
    initialise, run_example = ConjectureRunner.__init__, ConjectureRunner.test_function

    def without_shrinking(self: ConjectureRunner, *args: Any, **kwargs: Any) -> None:
        if isinstance(given := kwargs.get("settings"), settings):
            phases = [phase for phase in given.phases if phase not in {Phase.shrink, Phase.explain}]
            kwargs["settings"] = settings(given, phases=phases, database=None)
        initialise(self, *args, **kwargs)

    def counted(self: ConjectureRunner, *args: Any, **kwargs: Any) -> Any:
        recorder.drawn += 1
        return run_example(self, *args, **kwargs)

    ConjectureRunner.__init__ = without_shrinking  # type: ignore[method-assign]
    ConjectureRunner.test_function = counted  # type: ignore[method-assign]


def _excused(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup) and not _named(error):
        return all(_excused(inner) for inner in error.exceptions)
    return _named(error)


def _named(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return any(cls.__name__ in NO_KILL for cls in type(error).__mro__)


def _last_line(text: str) -> str:
    """The line of a failure's report that says most: the last one that pytest marks as the error's."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E") and line[1:].strip()]
    return (lines[0] if lines else next(iter(text.strip().splitlines()[::-1]), ""))[:300]
