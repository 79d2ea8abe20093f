"""A pytest plugin that records the outcome of a run, and stops at the first kill."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.internal.conjecture.engine import ConjectureRunner

from tinyllm.grading.worker import FULL, NO_KILL, Failure, Job, Outcome

REPORTS: dict[str, Any] = {
    **dict.fromkeys(("xmlpath", "log_file", "htmlpath", "report_log", "json_report_file")),
    **dict.fromkeys(("allure_report_dir", "benchmark_json", "benchmark_save", "pastebin")),
    **dict.fromkeys(("json_report", "benchmark_autosave", "store_durations", "update_snapshots"), False),
    **dict.fromkeys(("force_regen", "regen_all"), False),
}
"""Options of pytest and its plugins that write report files, and the values that write none."""
LATE = "pytest_timeout.py"


class Recorder:
    """Fills an `Outcome`.

    `broken` says why the run is invalid, `stopped` how the tests ended it, `started` when they began.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.outcome = Outcome()
        self._here = Path.cwd()  # which tests may leave, or remove
        self._only = {os.path.abspath(one.file) for one in job.only}  # noqa: PTH100 - as pytest, past no link
        self.broken = self.stopped = ""
        self.started: float | None = None
        self.drawn = 0  # test cases of Hypothesis, counted by `hurry`
        self._drawn_before = 0
        self._session: pytest.Session | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, Any, Any]:
        """Override `addopts`: run in this one process, write no report, shuffle by the seed."""
        option = config.option
        if hasattr(option, "numprocesses"):
            option.numprocesses, option.dist, option.tx = None, "no", []
        for name in REPORTS.keys() & vars(option).keys():
            setattr(option, name, REPORTS[name])
        if hasattr(option, "randomly_seed"):
            option.randomly_seed = self.job.seed
        if getattr(option, "random_order_enabled", False):
            option.random_order_seed = str(self.job.seed)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> Generator[None, Any, Any]:
        """Measure no coverage, which would overwrite the suite's own data.

        Under CI Hypothesis chooses a profile that ignores seeds; a suite that wants it can load it later.
        """
        early_config.known_args_namespace.cov_source = []
        if settings.get_current_profile_name() == "ci":
            settings.register_profile("tinyllm-seeded", settings.get_profile("ci"), derandomize=False)
            settings.load_profile("tinyllm-seeded")
        return (yield)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep the session, so that it can be stopped."""
        self._session = session

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported makes the run invalid."""
        if report.failed and not self.broken:
            self.broken = f"{report.nodeid or 'collection'}: {_last_line(report.longreprtext)}"

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Ignore the files without a wanted test, if the job wants only some."""
        others = self._only and collection_path.is_file() and str(collection_path) not in self._only
        return True if others else None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, Any, Any]:
        """Keep the wanted tests in the wanted order, after all other plugins."""
        found = yield
        if self.job.only:
            names = {one.test for one in self.job.only}
            items[:] = [item for item in items if item.nodeid in names]
        if self.job.order:
            place = {name: number for number, name in enumerate(self.job.order)}
            items.sort(key=lambda item: place.get(item.nodeid, len(place)))
        return found

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the number and the order of the tests."""
        self.outcome.tests = len(session.items)
        self.outcome.order = tuple(item.nodeid for item in session.items)

    def pytest_internalerror(self, excrepr: object) -> None:
        """Record that pytest or a plugin of the suite failed."""
        self.broken = self.broken or f"pytest failed: {_last_line(str(excrepr))}"

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Record `pytest.exit` or Ctrl-C from a test: the later tests did not run."""
        self.stopped = "" if self.broken else excinfo.exconly()

    def pytest_runtest_logstart(self) -> None:
        """Record the start of the first test, and the examples drawn before this one."""
        self.started = self.started or time.monotonic()
        self._drawn_before = self.drawn

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> Any:
        """Let pytest-timeout fail a late test, where it would end the process."""
        if settings.method != "thread" or not hasattr(signal, "SIGALRM"):
            return None
        plugin = sys.modules[type(settings).__module__]
        return plugin.pytest_timeout_set_timer(item, settings._replace(method="signal"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach to each failure the list of the outcome that it belongs to."""
        report = yield
        if report.failed:
            report.__dict__["tinyllm"] = self._failure(item, report, call)
        return report

    def _failure(
        self, item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None]
    ) -> tuple[Failure, list[Failure]]:
        """The failure, and its list of the outcome."""
        outcome, file = self.outcome, os.path.relpath(item.path, self._here)
        if call.excinfo is None:  # a plugin reports the failure
            message = _last_line(report.longreprtext)
            return Failure(report.nodeid, report.when or "", message, file), outcome.kills
        error = call.excinfo.value
        counted = [one for one in _leaves(error) if not _named(one)]
        message = _first_line((counted or [error])[0])
        kind = outcome.kills if counted else outcome.excused
        if any(Path(entry.path).name == LATE for entry in call.excinfo.traceback):
            kind = outcome.late
        return Failure(report.nodeid, report.when or "", message, file), kind

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record failures of setup, call and teardown."""
        if report.when == "call" and not self.outcome.kills:
            drawn = self.drawn - self._drawn_before
            self.outcome.examples += max(1, drawn)
        if not report.failed:
            return
        failure, kind = report.__dict__.pop("tinyllm", None) or (
            Failure(report.nodeid, report.when or "", _last_line(report.longreprtext)),
            self.outcome.kills,
        )
        if kind is self.outcome.kills and not kind:
            self.outcome.seconds = time.monotonic() - (self.started or time.monotonic())
        kind.append(failure)
        ends = kind is self.outcome.late or (kind is self.outcome.kills and not self.job.keep_going)
        if ends and self._session is not None:
            self._session.shouldfail = "killed"


def hurry(recorder: Recorder) -> None:
    """Let Hypothesis stop at the first failing example, unshrunk and unsaved, and count the examples.

    A suite's own settings would override any setting. If Hypothesis changes these two methods, grading is
    slower and counts are missing, but no verdict differs. No patch is made of the example either: importing
    libcst, where it is installed, takes longer than most kills.
    """
    without = "hypothesis.extra._patching"
    sys.modules[without] = ModuleType(without)  # an empty module: as if libcst were missing
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


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group; Hypothesis' Flaky is a group of the failures that did not recur."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _first_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[0].strip().partition("\n")[0][:300]


def _named(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return any(cls.__name__ in NO_KILL for cls in type(error).__mro__)


def _last_line(text: str) -> str:
    """The line of a failure's report that pytest marks as the error's, or its last line."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E") and line[1:].strip()]
    return (lines[0] if lines else next(iter(text.strip().splitlines()[::-1]), ""))[:300]
