"""A Dask cluster of processes on loopback, some of which go: the same verdicts, or a clear end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from .conftest import verdicts

Call = Callable[..., subprocess.CompletedProcess[str]]
USAGE, LOST = 2, 6
START = 60  # seconds, for a cluster to come up on a busy machine
pytestmark = pytest.mark.long
BUGS = [word for name in ("s02", "s08", "s09", "s12", "order") for word in ("--bug", name)]


class Loopback:
    """A scheduler and its workers, processes as `dask scheduler` and `dask worker` start them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", str(self.port))
        self.address = f"dask://127.0.0.1:{self.port}"
        self.tcp = f"tcp://127.0.0.1:{self.port}"

    def worker(self, **env: str) -> None:
        self._start("worker", self.tcp, "--nthreads", "1", "--host", "127.0.0.1", **env)

    def client(self) -> Any:
        deadline = time.monotonic() + START
        while True:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of other versions, which one test is about
                    return Client(self.tcp, timeout=START, set_as_default=False)  # type: ignore[no-untyped-call]
            except OSError:  # it is not listening yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def up(self, workers: int) -> None:
        with self.client() as client:
            client.wait_for_workers(workers, timeout=START)

    def _start(self, what: str, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}", *arguments, "--no-dashboard"]
        with (self.folder / f"{what}-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env={**os.environ, **env}, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def down(self) -> None:
        for process in reversed(self.processes):  # a worker and its nanny are one group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Loopback]:
    """A scheduler without workers."""
    (tmp_path / "dask").mkdir()
    loopback = Loopback(tmp_path / "dask")
    yield loopback
    loopback.down()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    loopback = Loopback(tmp_path_factory.mktemp("dask"))
    for _ in range(2):
        loopback.worker()
    loopback.up(2)
    yield loopback
    loopback.down()


def test_a_worker_that_is_killed_costs_a_retry_and_no_verdict(
    cluster: Loopback, suite_project: Path, tinyllm: Call
) -> None:
    """Each run says when it begins and ends; one worker is killed by its process id between the two.

    From the third run on they wait while a file is there, so that both workers are in the middle of one.
    """
    log, stay = suite_project / "log", suite_project / "stay"
    slow = f"""
import pathlib, time
def test_slowly():
    with open({str(log)!r}, "a") as log: log.write("begin\\n")
    while pathlib.Path({str(stay)!r}).exists(): time.sleep(0.02)
    with open({str(log)!r}, "a") as log: log.write("end\\n")
"""
    (suite_project / "tests/test_a_slow_one.py").write_text(slow, encoding="utf-8")
    here = tinyllm("grade", "tests", *BUGS, "--json", "here.json", cwd=suite_project)
    runs = log.read_text().count("end")
    log.write_text("")
    with cluster.client() as client:
        before = client.run(os.getpid)
        process = subprocess.Popen(
            [
                *tinyllm_command(),
                "grade",
                "tests",
                *BUGS,
                "--json",
                "there.json",
                "--executor",
                cluster.address,
            ],
            cwd=suite_project,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wait_for(lambda: log.read_text().count("end") >= 2)
        stay.touch()
        wait_for(lambda: under_way(log) == 2)
        victim = next(iter(before.values()))
        stations = children(victim)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in stations))
        stay.unlink()
        said, _ = process.communicate(timeout=300)
        after = client.run(os.getpid)
    assert process.returncode == here.returncode == 1, said
    assert verdicts(suite_project / "there.json") == verdicts(suite_project / "here.json")
    assert victim not in after.values(), "another took its place"
    begun, ended = log.read_text().count("begin"), log.read_text().count("end")
    assert begun > ended >= runs, "a run was cut short, and done again"


def test_a_scheduler_that_is_lost(alone: Loopback, suite_project: Path) -> None:
    """A clear error; what was known by then is saved."""
    for _ in range(2):
        alone.worker()
    alone.up(2)
    (suite_project / "tests/test_slow.py").write_text("import time\ndef test_slowly(): time.sleep(1)\n")
    process = subprocess.Popen(
        [
            *tinyllm_command(),
            "grade",
            "tests",
            "--set",
            "all",
            "--executor",
            alone.address,
            "--json",
            "so_far.json",
        ],
        cwd=suite_project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    for line in process.stdout:
        if "SURVIVES" in line:  # told as it comes
            break
    os.killpg(alone.scheduler.pid, signal.SIGKILL)
    said, error = process.communicate(timeout=120)
    assert process.returncode == LOST, said + error
    lost = f"tinyllm: no verdict: the cluster at {alone.address} was lost: its scheduler is gone"
    assert error.strip() == lost
    assert "What was known by then is in so_far.json." in said
    found = verdicts(suite_project / "so_far.json")
    assert found["code"] == LOST
    assert 0 < len(found["bugs"]) < 46


def test_a_soak_whose_scheduler_is_lost(alone: Loopback, tmp_path: Path) -> None:
    alone.worker()
    alone.up(1)
    process = subprocess.Popen(
        [*tinyllm_command(), "soak", "--for", "5m", "--executor", alone.address, "--json", "r.json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with alone.client() as client:
        wait_for(lambda: any(client.processing().values()))
        os.killpg(alone.scheduler.pid, signal.SIGKILL)
    said, error = process.communicate(timeout=120)
    assert process.returncode == LOST, said + error
    assert "was lost: its scheduler is gone" in " ".join(error.split())
    assert json.loads((tmp_path / "r.json").read_text())["exitCode"] == LOST


def test_other_versions_are_refused(alone: Loopback, suite_project: Path, tinyllm: Call) -> None:
    """A worker that has another NumPy, as far as its metadata says."""
    fake = suite_project / "fake" / "numpy-0.0.1.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n")
    alone.worker(PYTHONPATH=str(suite_project / "fake"))
    alone.up(1)
    done = tinyllm("grade", "tests", "--executor", alone.address, cwd=suite_project)
    assert done.returncode == USAGE, done.stdout
    assert "would decide otherwise: numpy is 0.0.1 there and " in " ".join(done.stderr.split())


def test_a_worker_without_this_package(alone: Loopback, suite_project: Path, tinyllm: Call) -> None:
    (suite_project / "fake/tinyllm").mkdir(parents=True)
    (suite_project / "fake/tinyllm/__init__.py").write_text("")
    alone.worker(PYTHONPATH=str(suite_project / "fake"))
    alone.up(1)
    done = tinyllm("power", "--executor", alone.address, cwd=suite_project)
    assert done.returncode == USAGE, done.stdout
    said = f"tinyllm: the workers of {alone.address} cannot do this; they need tinyllm-paged[cluster]: "
    assert done.stderr.startswith(said)
    assert "No module named 'tinyllm.jobs'" in done.stderr
    assert "Traceback" not in done.stderr


def tinyllm_command() -> list[str]:
    return [sys.executable, "-c", "from tinyllm.cli import main; main()"]


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def under_way(log: Path) -> int:
    return log.read_text().count("begin") - log.read_text().count("end")


def children(pid: int) -> list[int]:
    """Of a process: those it started, and they."""
    direct = [
        int(one) for file in Path(f"/proc/{pid}/task").glob("*/children") for one in file.read_text().split()
    ]
    return direct + [one for child in direct for one in children(child)]
