"""Call a function in a process of its own, which surely ends with all that it started.

Processes come from a fork server that has imported the slow modules, or are fresh interpreters where there is
no fork. `supervisor.py` ends each with all that it started. Output comes through a pipe, and only its end is
kept: no amount of it takes room on a disk.
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
"""Modules that the fork server imports once; frequent callers add to it before the first call.

Three kinds must stay out: a module that a bug may be planted in; `numpy.random`, which draws its state when
it is imported, so that all runs would draw alike and hide a flaky suite; Hypothesis' plugin for pytest, which
takes all later imports for the collection of tests, and warns."""
TAIL = 20_000  # bytes of output that are kept
CHUNK = 1 << 16  # bytes of output read at once: the capacity of a pipe
LAST = 32  # chunks read after the end: an escaped process may print for ever
LONGEST = 70  # bytes of a temporary folder's name: a socket's name may have 103, and 32 are added
POLL = 0.1  # seconds between two checks of `cancelled`
PATIENCE = 10.0  # seconds that a healthy supervisor needs at most to kill everything
Send = Callable[[Any], None]


class Cancel(threading.Event):
    """An event that ends calls in this process; pickled, it is one that is never set."""

    def __reduce__(self) -> tuple[type["Cancel"], tuple[()]]:
        return Cancel, ()


class Here:
    """A listener in this process; pickled, it ignores every event."""

    def __init__(self, listener: Send | None = None) -> None:
        self._listener = listener

    def __call__(self, event: Any) -> None:
        """Pass an event to the listener."""
        if self._listener:
            self._listener(event)

    def __reduce__(self) -> tuple[type["Here"], tuple[()]]:
        return Here, ()


_starting = threading.Lock()  # multiprocessing does not start and reap processes thread-safely


@dataclass(frozen=True)
class Ended:
    """The end of a call: `done` with its value, `error`, `timeout`, `cancelled`, or `died`."""

    how: str
    value: Any
    output: str
    seconds: float


def context() -> Any:
    """The fork server, if there is fork and its socket's name fits; else fresh interpreters."""
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
    """Call `function(send, *args)` in a process of its own; `on_event` gets each event it sends.

    `timeout` is in seconds since the last event. The process has an empty temporary folder, also for the
    examples of Hypothesis; it is removed when the call ends. Function, arguments and value are pickled.

    Raises:
        OSError: the folder or the process cannot be created.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tinyllm-", ignore_cleanup_errors=True) as folder:
        _share_constants(Path(folder, "hypothesis"))
        # One direction each: an end held too long would hide the death of the other side.
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
    """Share between runs the constants that Hypothesis reads in source files, and none of its examples.

    It looks them up by a digest of the file. Parsing every imported file takes as long as everything else
    before the first test. The shared folder is beside the fork server's socket and is removed with it.
    """
    storage.mkdir()
    with _starting, contextlib.suppress(OSError):  # links may be unsupported
        shared = Path(get_temp_dir(), "constants")
        shared.mkdir(exist_ok=True)
        Path(storage, "constants").symlink_to(shared, target_is_directory=True)


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Block Ctrl-C meanwhile; a fork server that starts now inherits the block for good."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # its start would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Far:
    """The far side of a call: its process group, and the end of its output."""

    def __init__(self, output: Connection) -> None:
        self.group, self.output, self.kept = 0, output, b""
        with contextlib.suppress(AttributeError, OSError):
            os.set_blocking(output.fileno(), False)

    def read(self) -> bool:
        """Read the output that is there; returns whether there was any."""
        try:
            more = os.read(self.output.fileno(), CHUNK)
        except OSError:  # no output now
            return False
        self.kept = (self.kept + more)[-TAIL:]
        return bool(more)

    def close(self) -> str:
        """The end of the whole output."""
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
            if not alive and not pipe.poll():  # a process that it started may hold the pipe open
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
    """Let the supervisor kill everything, also after a finished call, which may have left processes."""
    caller.close()
    process.join(PATIENCE)
    process.kill()  # no effect on an ended process
    process.join()
    if process.exitcode and group:  # the supervisor was killed before it could do this
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
