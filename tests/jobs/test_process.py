"""A call in a process of its own ends, whatever it does, with all that it started."""

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinyllm.jobs import process
from tinyllm.jobs.process import call

FUNCTIONS = """
import os, signal, subprocess, sys, tempfile, time, threading

def adds(send, a, b): return a + b
def fails(send): raise ValueError("no")
def exits(send): sys.exit("left")
def dies(send): os._exit(7)
def sleeps(send): time.sleep(1000)
def prints(send): print("out"); print("err", file=sys.stderr); os.system("echo shell"); os._exit(0)
def prints_much(send):
    for _ in range(50): print("x" * 1_000_000)
    print("the end")
def speaks(send):
    for number in range(3): send(number)
    return "done"
def waits(send):
    send("here")
    time.sleep(1000)
def whereabouts(send):
    names = "TMPDIR", "HYPOTHESIS_STORAGE_DIRECTORY"
    return tempfile.gettempdir(), *(os.environ[name] for name in names), os.getpid()
def reads_constants(send, note):
    storage = os.environ["HYPOTHESIS_STORAGE_DIRECTORY"]
    constants = os.path.join(storage, "constants")
    found = os.listdir(constants)
    for folder in (storage, constants):
        open(os.path.join(folder, note), "w").close()
    return storage, sorted(os.listdir(storage)), found
def sends_nonsense(send): return Nonsense()
class Nonsense:
    def __reduce__(self): return (int, ("nonsense",))
def unsendable(send): return threading.Lock()
def interrupted(send):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(100)
    except KeyboardInterrupt:
        return "interrupted"
def litters(send, path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    open(path, "w").write(str(child.pid))
    open(os.path.join(tempfile.gettempdir(), "litter"), "w").close()
    return os.environ["TMPDIR"]
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """FUNCTIONS as a module that a child can import."""
    name = f"called_{os.getpid()}_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(name)
    del sys.modules[name]


def test_of_hypothesis_storage_the_constants_alone_are_shared(functions: Any) -> None:
    """They are what it reads in source files. Examples go with their run: they would kill bug after bug."""
    first, second = (call(functions.reads_constants, note, timeout=60).value for note in ("one", "two"))
    assert first[0] != second[0]
    assert (first[1], second[1]) == (["constants", "one"], ["constants", "two"])
    assert ("one" in first[2], "one" in second[2]) == (False, True)


def test_a_value(functions: Any) -> None:
    ended = call(functions.adds, 1, 2, timeout=60)
    assert (ended.how, ended.value, ended.output) == ("done", 3, "")
    assert 0 < ended.seconds < 60


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("fails", "error", "ValueError: no"),
        ("exits", "error", "SystemExit: left"),
        ("sends_nonsense", "error", "cannot be read: invalid literal"),
        ("unsendable", "died", ""),
        ("dies", "died", ""),
    ],
)
def test_no_value(functions: Any, name: str, how: str, words: str) -> None:
    ended = call(getattr(functions, name), timeout=60)
    assert ended.how == how
    assert words in str(ended.value or "")


def test_output_of_all_kinds_is_kept(functions: Any) -> None:
    ended = call(functions.prints, timeout=60)
    assert set(ended.output.split()) >= {"err", "shell"}  # "out" may be lost in its buffer


def test_only_the_end_of_much_output_is_kept(functions: Any) -> None:
    ended = call(functions.prints_much, timeout=300)
    assert ended.how == "done"
    assert len(ended.output) == process.TAIL
    assert ended.output.endswith("x\nthe end\n")


def test_events_come_as_they_are_sent(functions: Any) -> None:
    heard: list[int] = []
    assert call(functions.speaks, timeout=60, on_event=heard.append).value == "done"
    assert heard == [0, 1, 2]
    assert call(functions.speaks, timeout=60).value == "done"


def test_an_event_starts_the_time_anew(functions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ninety seconds by the clock that it looks at, with a word every thirty, under a limit of forty."""
    now = [0]
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: 30 * sum(now)))
    assert call(functions.speaks, timeout=40, on_event=lambda _: now.append(1)).how == "done"
    assert sum(now) == 3


def test_it_ends_when_the_time_is_up(functions: Any) -> None:
    ended = call(functions.sleeps, timeout=1)
    assert (ended.how, ended.value) == ("timeout", None)
    assert ended.seconds >= 1


def test_it_ends_when_it_is_cancelled(functions: Any) -> None:
    cancelled = threading.Event()
    ended = call(functions.waits, timeout=300, cancelled=cancelled, on_event=lambda _: cancelled.set())
    assert ended.how == "cancelled"


def test_ctrl_c_from_within_is_one(functions: Any) -> None:
    assert call(functions.interrupted, timeout=60).value == "interrupted"


def test_each_has_an_empty_folder_which_goes(functions: Any) -> None:
    folders = []
    for _ in range(2):
        temporary, folder, hypothesis, pid = call(functions.whereabouts, timeout=60).value
        assert folder == temporary == str(Path(hypothesis).parent)
        assert pid != os.getpid()
        assert not Path(folder).exists()
        folders.append(folder)
    assert folders[0] != folders[1]


def test_what_it_started_goes_too(functions: Any, tmp_path: Path) -> None:
    folder = call(functions.litters, str(tmp_path / "pid"), timeout=60).value
    assert not Path(folder).exists()
    wait_until_gone(int((tmp_path / "pid").read_text(encoding="utf-8")))


def test_ctrl_c_while_it_runs_ends_it(functions: Any) -> None:
    """In the main thread, as in step 1 of `check`."""
    with pytest.raises(KeyboardInterrupt):
        call(functions.speaks, timeout=300, on_event=lambda _: signal.raise_signal(signal.SIGINT))
    assert not multiprocessing.active_children()


def test_without_fork_there_are_fresh_interpreters(functions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert call(functions.adds, 1, 2, timeout=60).value == 3


def test_without_signals_and_groups_it_works_too(functions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    monkeypatch.delattr(os, "set_blocking")
    monkeypatch.delattr(signal, "pthread_sigmask")
    assert call(functions.adds, 1, 2, timeout=60).value == 3


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() if Path("/proc/self").exists() else answers(pid):
        assert time.monotonic() < until, f"process {pid} is left"
        time.sleep(0.1)


def answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_many_at_once(functions: Any) -> None:
    answers: list[Any] = []

    def one(number: int) -> None:
        answers.append(call(functions.adds, number, 1, timeout=120).value)

    threads: list[threading.Thread] = [threading.Thread(target=one, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == list(range(1, 9))


def test_it_does_not_matter_that_the_fork_server_was_killed(functions: Any) -> None:
    kill: Callable[..., Any] = functions.adds
    assert call(kill, 1, 1, timeout=60).value == 2
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(server, signal.SIGKILL)
    wait_for_zombie(server)
    assert call(kill, 1, 2, timeout=60).value == 3


def wait_for_zombie(pid: int) -> None:
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.1)
