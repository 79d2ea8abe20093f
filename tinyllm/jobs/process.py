"""Call a function in a process of its own, and be sure that it ends, with all that it started.

Processes come from a fork server that has imported what takes long (a fresh interpreter where there is no
fork). Whatever happens, `supervisor.py` ends each with all that it started. What it prints comes through a
pipe, of which the end is kept: it takes no room on a disk, however much it is.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from tinyllm.jobs.supervisor import make

PRELOAD = [
    *("numpy", "numpy.testing", "numpy.typing"),
    *("hypothesis", "hypothesis.stateful"),
    *("pytest", "xdist.plugin", "xdist.looponfail", "asyncio", "ctypes", "pdb", "unittest"),
    "tinyllm.jobs.server",
]
"""Imported once, in the fork server; who calls often adds to it before the first call. Never a module that a
bug may be planted in, nor `numpy.random`, which draws its state when it is imported: all runs would draw
alike, and a flaky suite would not show; nor Hypothesis' plugin for pytest, after which it takes everything
for the loading of tests, and warns."""
TAIL = 20_000  # bytes of output that are kept
CHUNK = 1 << 16  # bytes of output that are read at once: what a pipe holds
LAST = 32  # chunks read after the end: a process that escaped may print for ever
LONGEST = 70  # bytes of a temporary folder's name: a socket's name may have 103, and 32 are added
POLL = 0.1  # seconds between two looks at `cancelled`
PATIENCE = 10.0  # seconds in which a supervisor that is well has killed everything
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

    Raises:
        OSError: there can be no folder, or no process.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tinyllm-", ignore_cleanup_errors=True) as folder:
        _share_constants(Path(folder, "hypothesis"))
        # Each is for one direction: who holds an end too long would hide that the other side is gone.
        (pipe, there), (output, output_there), (caller_there, caller) = (
            multiprocessing.Pipe(duplex=False) for _ in range(3)
        )
        theirs = there, output_there, caller_there
        process = context().Process(target=make, args=(*theirs, folder, function, args), daemon=False)
        with _starting, _ctrl_c_waits():
            process.start()
        for end in theirs:
            end.close()
        far = _Far(output)
        how, value = "cancelled", None
        try:
            how, value = _listen(
                pipe, far, process, timeout, cancelled or threading.Event(), on_event or _ignore
            )
        finally:
            _end(process, caller, far.group)
            pipe.close()
    return Ended(how, value, far.close(), time.monotonic() - started)


def _ignore(_: Any) -> None:
    pass


def _share_constants(storage: Path) -> None:
    """Let all runs share the constants that Hypothesis reads in source files, and nothing that it finds.

    It looks them up by a digest of the file. To parse every file that tests import takes as long as all else
    before the first test. They are where the fork server's socket is, and go with it.
    """
    storage.mkdir()
    with _starting, contextlib.suppress(OSError):  # there may be no links here
        shared = Path(get_temp_dir(), "constants")
        shared.mkdir(exist_ok=True)
        Path(storage, "constants").symlink_to(shared, target_is_directory=True)


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


class _Far:
    """What is known of the far side: the process group that makes the call, the end of what it prints."""

    def __init__(self, output: Connection) -> None:
        self.group, self.output, self.kept = 0, output, b""
        with contextlib.suppress(AttributeError, OSError):
            os.set_blocking(output.fileno(), False)

    def read(self) -> bool:
        """Take in what is there; whether something was."""
        try:
            more = os.read(self.output.fileno(), CHUNK)
        except OSError:  # nothing is there now
            return False
        self.kept = (self.kept + more)[-TAIL:]
        return bool(more)

    def close(self) -> str:
        """The end of all that was printed."""
        chunks = 0
        while chunks < LAST and self.read():
            chunks += 1
        self.output.close()
        return self.kept.decode(errors="replace")


def _listen(
    pipe: Connection,
    far: _Far,
    process: Any,
    timeout: float,
    cancelled: threading.Event,
    on_event: Send,
) -> tuple[str, Any]:
    deadline = time.monotonic() + timeout
    watched = [pipe, far.output]
    while time.monotonic() < deadline:
        if cancelled.is_set():
            return "cancelled", None
        ready = wait(watched, POLL)
        if far.output in ready and not far.read():
            watched.remove(far.output)  # it was closed
        if pipe not in ready:
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
        if kind == "group":
            far.group = value
            continue
        if kind != "event":
            return kind, value
        on_event(value)
        deadline = time.monotonic() + timeout
    return "timeout", None


def _end(process: Any, caller: Connection, group: int) -> None:
    """Have the supervisor kill everything, even when the call is through: what is left would linger."""
    caller.close()
    process.join(PATIENCE)
    process.kill()  # does nothing to one that has ended
    process.join()
    if process.exitcode and group:  # the supervisor was killed, and so has not done its work
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
