"""The unit of work: one run of a test suite on one text of the module, in a process of its own."""

import errno
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyllm.grading.plant import Target
from tinyllm.jobs.process import Send

NO_KILL = frozenset({"DeadlineExceeded", "FailedHealthCheck", "Flaky"})
"""Hypothesis errors about the machine or the test, not about the module."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""errno values that mean a full disk."""


class Stopped(Exception):  # noqa: N818 - it is no error of ours
    """The tests ended pytest, for example by `pytest.exit`."""


@dataclass(frozen=True)
class Job:
    """The tests to run, the text of the module, and the seed.

    Attributes:
        tests: paths for pytest.
        target: the module and its text.
        seed: the seed of Hypothesis and of plugins that shuffle.
        keep_going: whether to go on after the first kill.
        options: more options for pytest.
        only: the tests to run; all that are collected, if empty.
        order: node ids in the order to run, whatever plugins do.
    """

    tests: tuple[str, ...]
    target: Target
    seed: int
    keep_going: bool = False
    options: tuple[str, ...] = ()
    only: tuple["Failure", ...] = ()
    order: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A failed test: its node id, the phase, the message, and its file relative to the current folder."""

    test: str
    phase: str
    message: str
    file: str = ""


@dataclass
class Outcome:
    """The outcome of one run.

    Attributes:
        tests: the number of collected tests.
        kills: failures that count; the first is the kill.
        excused: failures that do not count, of the kinds in `NO_KILL`.
        late: tests that pytest-timeout ended; the run ends with the first.
        broken: the error of collection or of pytest that makes the run invalid; else empty.
        used: whether a test, or a process that it started, used the planted text.
        missed: processes that tests started without the planted text, each with the reason.
        order: node ids of the tests in running order.
        seconds: from the start of the first test to the first kill, or to the end.
        examples: test cases run until then; a plain test is one.
    """

    tests: int = 0
    kills: list[Failure] = field(default_factory=list)
    excused: list[Failure] = field(default_factory=list)
    late: list[Failure] = field(default_factory=list)
    broken: str = ""
    used: bool = False
    missed: list[str] = field(default_factory=list)
    order: tuple[str, ...] = ()
    seconds: float = 0.0
    examples: int = 0


def run(send: Send, job: Job) -> Outcome:
    """Run the job in this process, which must end afterwards. Raises Stopped."""
    del send
    import pytest  # noqa: PLC0415 - pytest may be missing where this module is imported
    from hypothesis.configuration import set_hypothesis_home_dir  # noqa: PLC0415

    from tinyllm.grading import handover, plant  # noqa: PLC0415
    from tinyllm.grading.recorder import Recorder, hurry  # noqa: PLC0415

    folder = Path(os.environ["TMPDIR"])
    set_hypothesis_home_dir(os.environ["HYPOTHESIS_STORAGE_DIRECTORY"])
    try:
        handover.offer(job.target, folder)
    except OSError as error:
        return Outcome(broken=f"{folder} cannot be written: {error.strerror}")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["COVERAGE_FILE"] = str(
        folder / "coverage"
    )  # for processes that measure coverage from their start
    sys.dont_write_bytecode = True
    sys.path.append(str(Path.cwd()))
    recorder = Recorder(job)
    hurry(recorder)
    # Plugins are named, since a suite may disable autoloading.
    # Nothing is captured: pytest would keep all output on disk, where `call` keeps its end.
    arguments = ["-p", "hypothesispytest", "-p", "tinyllm", "-p", "tinyllm_plant"]
    arguments += ["--assert=plain", "--capture=no", "--color=no", "--tb=native"]
    arguments += [f"--hypothesis-seed={job.seed}", f"--basetemp={folder / 'pytest'}"]
    arguments += [
        "-o",
        f"cache_dir={folder / 'cache'}",
        "--color=no",
        "--tb=native",
        *job.options,
        *job.tests,
    ]
    started = time.monotonic()
    status = pytest.main(arguments, plugins=[recorder])
    if recorder.stopped:
        raise Stopped(recorder.stopped)
    outcome = recorder.outcome
    outcome.used, outcome.missed = handover.used(), handover.missed()
    if not outcome.kills:
        outcome.seconds = time.monotonic() - (recorder.started or started)
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and not recorder.broken:
        status = pytest.ExitCode.OK
    if recorder.broken:
        outcome.broken = recorder.broken
    elif status not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        outcome.broken = f"pytest ended with {_exit_name(status)}"
    elif plant.elsewhere(job.target):
        outcome.broken = f"{job.target.module} was imported from elsewhere: its text was not replaced"
    return outcome


def _exit_name(status: Any) -> str:
    return f"status {int(status)} ({getattr(status, 'name', 'unknown').lower().replace('_', ' ')})"
