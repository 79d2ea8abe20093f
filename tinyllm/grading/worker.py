"""One run of a test suite on one text of the module: the unit of work, called in a process of its own."""

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
"""Errors by which Hypothesis says something of the machine or of the test, not of the module."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""By which the system does: the disk is full."""


class Stopped(Exception):  # noqa: N818 - it is no error of ours
    """The tests ended pytest, as `pytest.exit` does."""


@dataclass(frozen=True)
class Job:
    """What to run: these tests, with this text in the module's place, drawing from this seed.

    Attributes:
        tests: paths, as pytest takes them.
        target: the module and its text.
        seed: of Hypothesis, and of plugins that shuffle.
        keep_going: do not stop at the first kill.
        options: more options for pytest.
        only: of all tests collected, run these alone.
        order: the node ids of all tests, to run them in this order whatever a plugin wants.
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
    """A test that failed: its node id, the phase, what it said, and its file from the current folder."""

    test: str
    phase: str
    message: str
    file: str = ""


@dataclass
class Outcome:
    """What one run showed.

    Attributes:
        tests: how many were collected.
        kills: failures that count; the first one is what killed.
        excused: failures that do not count, of the kinds in `NO_KILL`.
        late: tests that a plugin ended after a time; the run ends with the first.
        broken: why the run says nothing: an error of collection or of pytest; empty if it went through.
        used: whether a test, or a process that one started, put the planted text to use.
        missed: processes that tests started, in which nothing was planted, each with the reason.
        order: node ids of the tests, as they were to run.
        seconds: from the start of the first test to the first kill, or to the end.
        examples: test cases run by then; a plain test is one.
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
    """Run the job in this process, which is fit for nothing else afterwards. Raises Stopped."""
    del send
    import pytest  # noqa: PLC0415 - the module is imported where there may be no pytest
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
    os.environ["COVERAGE_FILE"] = str(folder / "coverage")  # of processes that are measured as they start
    sys.dont_write_bytecode = True
    sys.path.append(str(Path.cwd()))
    recorder = Recorder(job)
    hurry(recorder)
    # Plugins by name, since a suite may load none by itself.
    # Nothing is captured: pytest would keep on disk, whole, what `call` keeps the end of.
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
