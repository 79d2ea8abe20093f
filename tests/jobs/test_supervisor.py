"""What a call has started ends with it, wherever it has gone; and the code of the far side, from within."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinyllm.jobs import process, server, supervisor
from tinyllm.jobs.process import call

linux = pytest.mark.xfail(not sys.platform.startswith("linux"), reason="orphans go elsewhere", strict=False)


def note(path: Path) -> None:
    """Say which process this is, and stay."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(1000)


def fork(*steps: Callable[[], object]) -> None:
    """Do the steps in a process of its own, which is not waited for."""
    if os.fork() == 0:
        for step in steps:
            step()
        os._exit(0)


def stubborn() -> None:
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)


def leave(send: Any, path: Path, how: str) -> None:
    """Start a process that is not to be found again, and end in one of three ways."""
    fork(lambda: note(path))
    fork(os.setsid, lambda: note(path))
    fork(os.setsid, lambda: fork(os.setsid, lambda: os.closerange(0, 256), stubborn, lambda: note(path)))
    fork(lambda: os.chdir("/"), lambda: os.execv("/bin/sh", ["sh", "-c", f"echo $$ >> {path}; sleep 1000"]))
    while not path.exists() or len(path.read_text(encoding="utf-8").splitlines()) < 4:
        time.sleep(0.01)
    send("ready")
    if how == "exits":
        os._exit(0)
    if how == "hangs":
        time.sleep(1000)
    if how == "kills its group":
        os.killpg(0, signal.SIGKILL)


def lives(pid: object) -> bool:
    """Whether a process is there, and has not ended; not everywhere does somebody take note of its end."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(path: Path) -> bool:
    return not any(map(lives, path.read_text(encoding="utf-8").split()))


@linux
@pytest.mark.parametrize(
    ("how", "ended"),
    [("returns", "done"), ("exits", "died"), ("hangs", "cancelled"), ("kills its group", "died")],
)
def test_nobody_escapes(tmp_path: Path, how: str, ended: str) -> None:
    """A child; a leader of a session; a daemon that ignores signals and closes its files; a shell."""
    path, cancelled = tmp_path / "pids", threading.Event()
    ready = (lambda _: cancelled.set()) if how == "hangs" else None
    assert call(leave, path, how, timeout=300, cancelled=cancelled, on_event=ready).how == ended
    assert gone(path), "when the call has ended, so have they"


def kill_keeper(send: Any, path: Path, whom: str) -> None:
    path.write_text(f"{os.getpid()}\n", encoding="utf-8")
    fork(lambda: note(path))
    while len(path.read_text(encoding="utf-8").splitlines()) < 2:
        time.sleep(0.01)
    send("ready")
    if whom == "it":
        os.kill(os.getppid(), signal.SIGKILL)
    else:
        os.killpg(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


@linux
@pytest.mark.parametrize("whom", ["it", "its group"])
def test_without_its_keeper_a_call_ends(tmp_path: Path, whom: str) -> None:
    path = tmp_path / "pids"
    assert call(kill_keeper, path, whom, timeout=60).how == "died"
    until = time.monotonic() + 60
    while not gone(path):
        assert time.monotonic() < until, "a process is left"
        time.sleep(0.01)


def stop_keeper(send: Any) -> str:
    send("ready")
    os.kill(os.getppid(), signal.SIGSTOP)
    return "done"


def test_a_keeper_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PATIENCE", 0.5)
    assert call(stop_keeper, timeout=60).value == "done"


FAR = """
import os, select, signal, sys
from multiprocessing.connection import Connection
from tinyllm.jobs import supervisor

way, folder, *numbers = sys.argv[1:]
pipe, output, caller = (Connection(int(n), readable=i == 2, writable=i < 2) for i, n in enumerate(numbers))
if way == "windows":
    del os.fork, os.setsid, signal.pthread_sigmask
    supervisor.time.sleep = lambda _: caller.poll(None)
elif way != "waits":
    supervisor.time.sleep = lambda _: os._exit(0)  # or it would be killed, and nothing measured
if way == "no ctypes":
    sys.modules["ctypes"] = None

def act(send, a):
    print("printed")
    send(a)
    if way == "forks" and os.fork() == 0:
        return "the copy"
    if way == "forks":
        os.wait()
    if way == "orphans":
        if os.fork() == 0:
            os.fork() and os._exit(0)  # the other lives on for a moment, as an orphan
            sleep(0.3)
            os._exit(0)
        os.wait()
        sleep(0.6)
        if os.fork() == 0:
            os.setsid()
            sleep(1000)
    if way == "fails":
        raise SystemExit(a)
    return a

def sleep(seconds):
    select.select([], [], [], seconds)

supervisor.make(pipe, output, caller, folder, act, ("a",))
"""


@pytest.mark.parametrize("way", ["plain", "fails", "windows", "forks", "orphans", "waits", "no ctypes"])
def test_the_far_side_from_within(tmp_path: Path, way: str) -> None:
    """In processes that are allowed to end by themselves, where they can be measured."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "litter").touch()
    (pipe, pipe_there), (output, output_there), (caller_there, caller) = (Pipe(duplex=False) for _ in "123")
    theirs = [pipe_there, output_there, caller_there]
    numbers = [one.fileno() for one in theirs]
    far = subprocess.Popen([sys.executable, "-c", FAR, way, folder, *map(str, numbers)], pass_fds=numbers)
    for one in theirs:
        one.close()
    if way != "windows":
        kind, group = pipe.recv()
        assert kind == "group"
        assert group not in {os.getpid(), far.pid}
    assert pipe.recv() == ("event", "a")
    how, value = pipe.recv()
    if way == "fails":
        assert how == "error"
        assert value.endswith("SystemExit: a\n")
    else:
        assert (how, value) == ("done", "a")
    printed = b"" if way == "windows" else b"printed\n"
    assert os.read(output.fileno(), 100) == printed
    if way in {"windows", "waits"}:
        assert far.poll() is None, "it waits for its end"
        caller.close()
    assert far.wait(60) == (1 if way == "windows" else 0)
    assert not folder.exists(), "it goes with the call"


def test_children_are_found() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in set(supervisor._children(os.getpid()))
        assert child.pid not in set(supervisor._children(child.pid))


@pytest.mark.parametrize(
    ("folder", "here", "started", "left"),
    [
        ("pymp-x", os.getpid(), None, False),
        ("pymp-x", os.getpid(), 7, True),
        ("pymp-x", 7, None, True),
        ("other", os.getpid(), None, True),
    ],
    ids=["the server", "who started it", "a fork of it", "another folder"],
)
def test_the_folder_of_the_fork_server(
    tmp_path: Path, folder: str, here: int, started: int | None, left: bool
) -> None:
    """Only the server takes it away; test_interrupt.py sees it done."""
    path = tmp_path / folder
    path.mkdir()
    address = str(path / "listener")
    server.sweep(here, SimpleNamespace(_forkserver_address=address, _forkserver_pid=started))
    assert path.exists() is left


@linux
def test_the_call_ends_with_its_keeper(tmp_path: Path) -> None:
    """Also if there is no caller any more, to end it."""
    (pipe, pipe_there), (output, output_there), (caller_there, caller) = (Pipe(duplex=False) for _ in "123")
    theirs = [pipe_there, output_there, caller_there]
    numbers = [one.fileno() for one in theirs]
    arguments = [sys.executable, "-c", FAR, "waits", str(tmp_path), *map(str, numbers)]
    with subprocess.Popen(arguments, pass_fds=numbers) as far:
        for one in theirs:
            one.close()
        _, made = pipe.recv()
        assert pipe.recv() == ("event", "a")
        far.kill()
    until = time.monotonic() + 60
    while lives(made):
        assert time.monotonic() < until, "it is left"
        time.sleep(0.01)
    caller.close()
    output.close()
