"""A real Dask cluster on loopback: the verdicts of one machine, whatever becomes of a worker."""

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

from tinyllm.jobs import bundle, remote
from tinyllm.jobs.cluster import Cluster, ClusterError

Call = Callable[..., subprocess.CompletedProcess[str]]
USAGE, LOST = 2, 6
START = 60  # seconds, for a cluster to come up on a busy machine

FILES = {
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--strict-markers"\nmarkers = ["ours"]\n',
    "tests/conftest.py": """
import pytest
from pathlib import Path
import numpy as np
from helpers import SIZES
from tinyllm.infer.paged import PagedKVCache

@pytest.fixture
def tokens(): return int(Path(__file__).with_name("tokens.txt").read_text())

@pytest.fixture
def cache():
    cache = PagedKVCache(*SIZES)
    cache.add_seq(0)
    return cache
""",
    "helpers.py": "SIZES = 4, 2, 1, 1, 1",
    "tests/tokens.txt": "3",
    "tests/test_it.py": """
import numpy as np
import pytest
from pathlib import Path

@pytest.mark.ours
def test_gather(cache, tokens):
    ones = np.ones((1, tokens, 1))
    cache.append(0, 0, ones, ones)
    assert cache.gather(0, 0)[0].shape == (1, tokens, 1)

def test_free(cache, tokens):
    ones = np.ones((1, tokens, 1))
    cache.append(0, 0, ones, ones)
    cache.free(0)
    assert cache.num_free_blocks() == 4
""",
}
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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "project"


def verdicts(path: Path) -> dict[str, Any]:
    """What a report says of each bug, and of the whole; times aside."""
    found = json.loads(path.read_text(encoding="utf-8"))
    (file,) = found["files"].values()
    bugs = {one["id"]: (one["status"], one["killedBy"], one["statusReason"]) for one in file["mutants"]}
    return {"bugs": bugs, "score": found["config"]["score"], "code": found["config"]["exitCode"]}


def test_grade_decides_as_it_does_here(cluster: Loopback, project: Path, tinyllm: Call) -> None:
    """Tests with a conftest, a data file, a link and settings above them; kills, survivors, two seeds."""
    (project / "shared").mkdir()
    (project / "tests/test_it.py").rename(project / "shared/linked.py")
    (project / "tests/test_linked.py").symlink_to("../shared/linked.py")
    for name, on in (("here", []), ("there", ["--executor", cluster.address])):
        done = tinyllm("grade", "tests", *BUGS, "--trials", 2, "--json", f"{name}.json", *on, cwd=project)
        assert done.returncode == 1, done.stdout + done.stderr
    here, there = verdicts(project / "here.json"), verdicts(project / "there.json")
    assert {status for status, *_ in here["bugs"].values()} == {"Killed", "Survived", "Ignored"}
    assert there == here
    with (project / "tests/conftest.py").open("a") as conftest:
        conftest.write("\nimport random\ndef pytest_collection_modifyitems(items):\n")
        conftest.write("    random.SystemRandom().shuffle(items)\n")
    options = [*BUGS, "--trials", 2, "--json", "any.json", "--executor", cluster.address]
    assert tinyllm("grade", "tests", *options, cwd=project).returncode == 1
    shuffled = verdicts(project / "any.json")
    assert {name: one[0] for name, one in shuffled.pop("bugs").items()} == {
        name: one[0] for name, one in here.pop("bugs").items()
    }
    assert shuffled == here


def test_as_many_tests_there_as_here(cluster: Loopback, project: Path, tinyllm: Call) -> None:
    """What they find in files that are not sent is missing there: the numbers say so, before any run."""
    (project / "data").mkdir()
    for name in "abc":
        (project / "data" / name).touch()
    text = (
        "import pathlib, pytest\n@pytest.mark.parametrize('path', pathlib.Path('data').glob('*'), ids=str)\n"
    )
    (project / "tests/test_data.py").write_text(f"{text}def test_it(path): open('ran', 'w')\n")
    done = tinyllm("grade", "tests", *BUGS, "--executor", cluster.address, cwd=project)
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert done.stderr.startswith("tinyllm: 5 tests are collected here, but 3 on the cluster: ")
    assert not (project / "ran").exists()


def test_grade_of_another_module(cluster: Loopback, tmp_path: Path, tinyllm: Call) -> None:
    """A package beside the tests comes along, in `src`, and is planted in."""
    files = {
        "pyproject.toml": "",
        "src/mine/__init__.py": "",
        "src/mine/other.py": "ONE = 1\n",
        "src/mine/sums.py": "from mine.other import ONE\n\ndef up(x):\n    return x + ONE\n",
        "tests/test_up.py": "from mine.sums import up\ndef test(): assert up(1) == 2\n",
        "bugs.toml": '[[bug]]\nid = "m1"\ntitle = "down"\nsymptom = "less"\n'
        'edits = [{find = "x + ONE", replace = "x - ONE"}]\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = tinyllm(
        *("grade", "tests", "--bugs", "bugs.toml", "--module", "mine.sums", "--executor", cluster.address)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 planted bugs killed" in done.stdout


def test_power_finds_what_it_finds_here(cluster: Loopback, tmp_path: Path, tinyllm: Call) -> None:
    for name, on in (("here", []), ("there", ["--executor", cluster.address])):
        done = tinyllm("power", "--trials", 3, "--bug", "s09", "--bug", "w01", "--json", f"{name}.json", *on)
        assert done.returncode == 0, done.stdout + done.stderr
    here, there = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("here", "there"))
    assert there == here
    assert "lost" not in json.dumps(here)


def test_soak(cluster: Loopback, tmp_path: Path, tinyllm: Call) -> None:
    """A file with a neighbour that it imports; the trace it finds is written here."""
    (tmp_path / "beside.py").write_text("from tinyllm.infer.paged import PagedKVCache as Right\n")
    (tmp_path / "mine.py").write_text(
        "from beside import Right\nclass PagedKVCache(Right):\n    def truncate(self, seq, length): pass\n"
    )
    on = ("--executor", cluster.address)
    done = tinyllm("soak", "mine.py", "--for", "60s", "--seed", 1, *on)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "law 17, rollback" in done.stdout
    assert [path.name[:6] for path in (tmp_path / "tinyllm-traces").iterdir()] == ["law-17"]
    again = tinyllm("soak", "mine.py", "--for", "60s", "--seed", 1, *on)
    assert again.returncode == 1
    assert "still fails" in again.stdout
    right = tinyllm("soak", "--for", "3s", "--json", "right.json", *on)
    assert right.returncode == 0, right.stdout + right.stderr
    assert "1 known counterexamples hold" in right.stdout
    report = json.loads((tmp_path / "right.json").read_text())
    assert report["steps"] > report["programs"] > 0


def test_a_worker_that_is_killed_costs_a_retry_and_no_verdict(
    cluster: Loopback, project: Path, tinyllm: Call
) -> None:
    """Each run says when it begins and ends; one worker is killed by its process id between the two.

    From the third run on they wait while a file is there, so that both workers are in the middle of one.
    """
    log, stay = project / "log", project / "stay"
    slow = f"""
import pathlib, time
def test_slowly():
    with open({str(log)!r}, "a") as log: log.write("begin\\n")
    while pathlib.Path({str(stay)!r}).exists(): time.sleep(0.02)
    with open({str(log)!r}, "a") as log: log.write("end\\n")
"""
    (project / "tests/test_a_slow_one.py").write_text(slow, encoding="utf-8")
    here = tinyllm("grade", "tests", *BUGS, "--json", "here.json", cwd=project)
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
            cwd=project,
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
    assert verdicts(project / "there.json") == verdicts(project / "here.json")
    assert victim not in after.values(), "another took its place"
    begun, ended = log.read_text().count("begin"), log.read_text().count("end")
    assert begun > ended >= runs, "a run was cut short, and done again"


def test_a_scheduler_that_is_lost(alone: Loopback, project: Path) -> None:
    """A clear error; what was known by then is saved."""
    for _ in range(2):
        alone.worker()
    alone.up(2)
    (project / "tests/test_slow.py").write_text("import time\ndef test_slowly(): time.sleep(1)\n")
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
        cwd=project,
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
    found = verdicts(project / "so_far.json")
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


def test_other_versions_are_refused(alone: Loopback, project: Path, tinyllm: Call) -> None:
    """A worker that has another NumPy, as far as its metadata says."""
    fake = project / "fake" / "numpy-0.0.1.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n")
    alone.worker(PYTHONPATH=str(project / "fake"))
    alone.up(1)
    done = tinyllm("grade", "tests", "--executor", alone.address, cwd=project)
    assert done.returncode == USAGE, done.stdout
    assert "would decide otherwise: numpy is 0.0.1 there and " in " ".join(done.stderr.split())


def test_a_worker_without_this_package(alone: Loopback, project: Path, tinyllm: Call) -> None:
    (project / "fake/tinyllm").mkdir(parents=True)
    (project / "fake/tinyllm/__init__.py").write_text("")
    alone.worker(PYTHONPATH=str(project / "fake"))
    alone.up(1)
    done = tinyllm("power", "--executor", alone.address, cwd=project)
    assert done.returncode == USAGE, done.stdout
    said = f"tinyllm: the workers of {alone.address} cannot do this; they need tinyllm-paged[cluster]: "
    assert done.stderr.startswith(said)
    assert "No module named 'tinyllm.jobs'" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_worker(alone: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    alone.client().close()  # it listens
    monkeypatch.setattr("tinyllm.jobs.cluster.WAIT", 1.0)
    with pytest.raises(ClusterError, match=f"the cluster at {alone.address} has no worker"):
        Cluster(alone.address, bundle.nothing())


def test_no_worker_is_left(alone: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever."""
    alone.worker()
    alone.up(1)
    monkeypatch.setattr("tinyllm.jobs.cluster.ALONE", 1.0)
    pool = Cluster(alone.address, bundle.nothing())
    try:
        assert pool.submit(divmod, 7, 2).result(60) == (3, 1)
        waiting = pool.submit(time.sleep, 600)
        os.killpg(alone.processes[-1].pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match=f"the cluster at {alone.address} has no worker left"):
            waiting.result(60)
    finally:
        pool.shutdown()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--executor", "localhost:8786"), "localhost:8786: a cluster is named as dask://HOST:PORT"),
        (("--executor", "dask://localhost"), "dask://localhost: a cluster is named as dask://HOST:PORT"),
        (("--executor", "dask://127.0.0.1:1"), "no Dask scheduler answers at dask://127.0.0.1:1"),
        (("--executor", "dask://127.0.0.1:8786", "-j", 2), "-j is for this machine"),
    ],
)
def test_an_address_that_is_none(project: Path, tinyllm: Call, arguments: tuple[Any, ...], said: str) -> None:
    done = tinyllm("grade", "tests", *arguments, cwd=project)
    assert done.returncode == USAGE
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_units_that_fail(cluster: Loopback, tmp_path: Path) -> None:
    """An error, the end of its process, and keywords; the next unit is done all the same.

    One whose process is killed once is done again.
    """
    marker = str(tmp_path / "marker")
    once = f"import os, pathlib\nif not pathlib.Path({marker!r}).exists():\n"
    once += f"    pathlib.Path({marker!r}).touch(); os.kill(os.getpid(), 9)"
    pool = Cluster(cluster.address, bundle.nothing())
    try:
        assert pool.threads == 2
        with pytest.raises(ClusterError, match=r"(?s)could not do its work: .*ZeroDivisionError"):
            pool.submit(divmod, 1, 0).result(60)
        with pytest.raises(ClusterError, match="the work ended with 3"):
            pool.submit(os._exit, 3).result(60)
        with pytest.raises(TypeError, match="no keywords"):
            pool.submit(int, base=3)
        assert pool.submit(divmod, 7, 2).result(60) == (3, 1)
        assert pool.submit(exec, once).result(60) is None
        assert Path(marker).exists()
    finally:
        pool.shutdown()


def test_versions_are_compared_once_more_where_the_work_is_done() -> None:
    """A worker can join later, or be older than what is installed beside it."""
    expected = remote.versions() | {"numpy": "0.0.1"}
    with pytest.raises(remote.RemoteError, match=r"other versions: numpy is .* there and 0\.0\.1 here"):
        remote.away(expected, bundle.nothing(), b"")


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
