"""Call a function in a process of its own, and be sure that it ends, with all that it started.

Processes come from a fork server that has imported what takes long (a fresh interpreter where there is no
fork). Each leads a process group of its own and keeps a pipe to its parent: when the time is up, when the
call is cancelled, or when the parent is gone, the whole group is killed.
"""

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOAD = [
    *("numpy", "numpy.testing", "numpy.typing"),
    *("hypothesis", "hypothesis.stateful"),
    *("pytest", "xdist.plugin", "xdist.looponfail", "asyncio", "pdb", "unittest"),
]
"""Imported once, in the fork server; never a module that a bug may be planted in, nor `numpy.random`, which
draws its state when it is imported: all runs would draw alike, and a flaky suite would not show; nor the
plugin of Hypothesis, which warns of all that is drawn before pytest starts, and pytest may never start."""
TAIL = 20_000  # bytes of output that are kept
LONGEST = 70  # bytes of a temporary folder's name: a socket's name may have 103, and 32 are added
POLL = 0.1  # seconds between two looks at `cancelled`
Send = Callable[[Any], None]


class Cancel(threading.Event):
    """Ends calls in this process; sent to another, it is one that is never set there."""

    def __reduce__(self) -> tuple[type["Cancel"], tuple[()]]:
        return Cancel, ()


class Here:
    """A listener in this process; sent to another, it hears nothing."""

    def __init__(self, listener: Send | None = None) -> None:
        self._listener = listener

    def __call__(self, event: Any) -> None:
        """Hear an event."""
        if self._listener:
            self._listener(event)

    def __reduce__(self) -> tuple[type["Here"], tuple[()]]:
        return Here, ()


_starting = threading.Lock()  # multiprocessing starts a process and cleans up others in no thread-safe way


@dataclass(frozen=True)
class Ended:
    """How a call ended: `done` with its value, `error`, `timeout`, `cancelled`, or `died` without a word."""

    how: str
    value: Any
    output: str
    seconds: float


def context() -> Any:
    """The fork server where there is fork, and room for the name of its socket; else fresh interpreters."""
    room = len(os.fsencode(tempfile.gettempdir())) <= LONGEST
    if not room or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    return server


def call(
    function: Callable[..., Any],
    *args: Any,
    timeout: float,
    cancelled: threading.Event | None = None,
    on_event: Send | None = None,
) -> Ended:
    """Call `function(send, *args)` in a process of its own; what it sends reaches `on_event` as it comes.

    `timeout` is in seconds; each event starts it anew. The process has an empty temporary folder, which is
    also where Hypothesis keeps its examples; the folder goes when the call ends. Function, arguments and
    value are pickled.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tinyllm-", ignore_cleanup_errors=True) as folder:
        parent, child = context().Pipe()
        process = context().Process(target=_child, args=(child, folder, function, args), daemon=False)
        with _starting, _ctrl_c_waits():
            process.start()
        child.close()
        how, value = "cancelled", None
        try:
            how, value = _listen(
                parent, process, timeout, cancelled or threading.Event(), on_event or _ignore
            )
        finally:
            _end(process)
            parent.close()
        output = _tail(Path(folder, "output"))
    return Ended(how, value, output, time.monotonic() - started)


def _ignore(_: Any) -> None:
    pass


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Block it here, and so for ever in the fork server if that is what starts now."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # when it starts, it unblocks what others have blocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(
    pipe: Connection, process: Any, timeout: float, cancelled: threading.Event, on_event: Send
) -> tuple[str, Any]:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if cancelled.is_set():
            return "cancelled", None
        if not pipe.poll(POLL):
            with _starting:
                alive = process.is_alive()
            if not alive and not pipe.poll():  # what it started may keep its end of the pipe open
                return "died", None
            continue
        try:
            kind, value = pipe.recv()
        except (EOFError, ConnectionError):
            return "died", None
        except Exception as error:
            return "error", f"what the process sent cannot be read: {error}"
        if kind != "event":
            return kind, value
        on_event(value)
        deadline = time.monotonic() + timeout
    return "timeout", None


def _end(process: Any) -> None:
    """Kill the process and every process it started, even when it is through: what is left would linger."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read().decode(errors="replace")


def _child(pipe: Connection, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    output = os.open(Path(folder, "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(output, number)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(Path(folder, "hypothesis"))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    threading.Thread(target=die_with_parent, args=(pipe, folder), daemon=True).start()
    gc.freeze()  # what the fork server has imported: pytest collects garbage several times, and never that
    own = os.getpid()
    try:
        message = ("done", function(lambda event: pipe.send(("event", event)), *args))
    except BaseException:
        message = ("error", traceback.format_exc())
    if os.getpid() != own:
        os._exit(1)  # a test forked, and this is the copy: it has no say
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(message)
    threading.Event().wait()  # the parent ends us: nothing that runs at exit can change the verdict


def die_with_parent(pipe: Connection, folder: str) -> None:
    """Wait until nobody holds the other end of the pipe; then remove the folder, and end our group."""
    with contextlib.suppress(OSError, EOFError):
        pipe.recv()  # the parent never speaks: this returns when it is gone
    shutil.rmtree(folder, ignore_errors=True)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
