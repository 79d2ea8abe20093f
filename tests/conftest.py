"""A skipped test fails the run, unless it stands here with its reason."""

from collections.abc import Generator

import pytest

ALLOWED_SKIPS: dict[str, str] = {}
"""Node id of a test that may be skipped: why."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.nodeid not in ALLOWED_SKIPS:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and is not on the list in tests/conftest.py"
    return report
