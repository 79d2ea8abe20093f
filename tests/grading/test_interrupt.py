"""Whatever ends `tinyllm` early ends all it started, and nothing is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SUITE = """
import os, subprocess, sys, tempfile, time
import tinyllm.infer.paged

def test_slow():
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    child = subprocess.Popen(sleep, start_new_session=True)
    with open("TMP/pids", "a") as file:
        print(os.getpid(), child.pid, file=file)
    with open(os.path.join(tempfile.gettempdir(), "litter"), "w") as file:
        file.write("x")
    time.sleep(1000)
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder for the command, with a short name: a socket goes there."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def wait_for(what: Callable[[], bool], why: str) -> None:
    until = time.monotonic() + 120
    while not what():
        assert time.monotonic() < until, why
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"


def words(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split()) if path.exists() else 0


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("number", "to_group", "code"),
    [
        (signal.SIGINT, True, 130),
        pytest.param(signal.SIGTERM, False, 143, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, True, 143, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, True, 129, marks=pytest.mark.long),
        (signal.SIGKILL, False, -9),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGTERM to all", "the terminal closes", "SIGKILL"],
)
def test_nothing_is_left(
    command: str,
    suite: Callable[..., Path],
    tmp_path: Path,
    temporary: Path,
    number: signal.Signals,
    to_group: bool,
    code: int,
) -> None:
    path, pids = suite(SUITE), tmp_path / "pids"
    process = subprocess.Popen(
        [command, "grade", str(path), "--bug", "s02", "-j", "2"],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    wait_for(lambda: process.poll() is not None or words(pids) == 4, "two clean runs")
    (os.killpg if to_group else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, out + err
    assert "Traceback" not in out + err
    assert (out, err.strip()) == ("", "")
    for pid in map(int, pids.read_text(encoding="utf-8").split()):
        wait_for(lambda pid=pid: gone(pid), f"process {pid} is left")  # type: ignore[misc]
    wait_for(lambda: group_is_gone(process.pid), "the fork server is left")
    if number == signal.SIGKILL:  # then others take away what is left
        wait_for(lambda: not list(temporary.iterdir()), "a folder is left")
    assert list(temporary.iterdir()) == []


IMPL = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
subprocess.Popen(sleep, start_new_session=True)
subprocess.Popen(sleep)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("line", "number", "times", "code"),
    [
        pytest.param("grade tests", signal.SIGINT, 5, 130, marks=pytest.mark.long),
        ("check paged.py", signal.SIGINT, 5, 130),
        pytest.param("check paged.py", signal.SIGKILL, 1, -9, marks=pytest.mark.long),
        ("power --trials 50 --profile deep", signal.SIGTERM, 5, 143),
        pytest.param("power --trials 50 --profile deep", signal.SIGKILL, 1, -9, marks=pytest.mark.long),
    ],
)
def test_nothing_is_left_by_any_command(
    command: str,
    suite: Callable[..., Path],
    tmp_path: Path,
    temporary: Path,
    line: str,
    number: signal.Signals,
    times: int,
    code: int,
) -> None:
    """Also when one is impatient."""
    suite({"paged.py": IMPL, "tests/test_it.py": SUITE})
    process = subprocess.Popen(
        [command, *line.split()],
        cwd=tmp_path / "suite",
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    wait_for(lambda: process.poll() is not None or len(users(temporary)) > 4, "it works")
    for _ in range(times):
        os.kill(process.pid, number)
        time.sleep(0.02)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err.strip()) == (code, "")
    wait_for(lambda: not users(temporary), "a process is left")
    wait_for(lambda: not list(temporary.iterdir()), "a folder is left")


def users(folder: Path) -> list[str]:
    """The processes that were told to use a temporary folder, themselves or by who started them."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in environ.read_bytes():
                found.append(environ.parent.name)
    return found


@pytest.mark.parametrize(
    "delay",
    [*(pytest.param(delay, marks=pytest.mark.long) for delay in (0.05, 0.3, 0.9, 1.3)), 0.6],
)
def test_ctrl_c_at_any_time_shows_no_traceback(
    suite: Callable[..., Path], tmp_path: Path, temporary: Path, delay: float
) -> None:
    """While Python starts nobody can catch it; after that, from the imports to the fork server's start."""
    ready, path = tmp_path / "ready", suite(SUITE)
    starter = (
        "import sys, tinyllm.cli\nopen(sys.argv[1], 'w').close()\n"
        "tinyllm.cli.main(['grade', sys.argv[2], '--bug', 's02'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", starter, str(ready), str(path)],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    wait_for(ready.exists, "the command starts")
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err.strip()) == (130, "", "")
    wait_for(lambda: group_is_gone(process.pid), "a process is left")
    assert list(temporary.iterdir()) == []
