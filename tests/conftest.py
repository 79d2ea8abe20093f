"""A skipped test fails the run, unless it stands here with its reason."""

import os
import signal
import sys
import tomllib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(
        name, "1"
    )  # before NumPy is imported: threads that wait for a busy core stall the rest

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the hundreds of processes that tests start compile once
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's `&` does that, and processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.append(str(Path(__file__).parents[1]))  # last, for `benchmarks`, which is in no wheel

ALLOWED_SKIPS: dict[str, str] = {}
"""Beginning of the node ids of tests that may be skipped: why."""

if os.environ.get("TINYLLM_MODEL") != "required":
    ALLOWED_SKIPS["tests/model/"] = "they need the model, 93 MB: tinyllm model fetch"

if os.environ.get("TINYLLM_BROWSER") != "required":
    ALLOWED_SKIPS["tests/grading/test_page_browser.py"] = (
        "they need Chromium: Debian's chromium, chromium-driver"
    )


def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: half as many again as there are cores, since many tests wait for what they started."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + cores // 2


HERE = Path(__file__).parent
LONG: dict[str, str] = tomllib.loads((HERE / "long.toml").read_text(encoding="utf-8"))


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = set()
    for item in items:
        for beginning in LONG:
            if item.nodeid.removeprefix("tests/").startswith(beginning):
                item.add_marker("long")
                found.add(beginning)
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and (gone := LONG.keys() - found):
        raise pytest.UsageError(f"tests/long.toml names what is not there: {', '.join(sorted(gone))}")


def allowed(nodeid: str) -> bool:
    """Whether a test may be skipped."""
    return nodeid.startswith(tuple(ALLOWED_SKIPS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not allowed(item.nodeid):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and is not on the list in tests/conftest.py"
    return report


@pytest.fixture
def greedy() -> Callable[..., list[int]]:
    """The likeliest ids one by one, by `forward` alone: what every way to generate is compared with."""

    def likeliest(model: Any, cache: Any, ids: list[int], n: int) -> list[int]:
        new: list[int] = []
        for _ in range(n):
            ids = [int(model.forward(ids, cache, last_only=True)[-1].argmax())]
            new += ids
        return new

    return likeliest
