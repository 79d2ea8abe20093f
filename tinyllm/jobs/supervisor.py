"""The far side of a call: a supervisor, and below it the process that makes the call.

When the caller closes its end of a pipe, or is gone, or when the call's process has ended by itself, the
supervisor kills whatever was started, removes the temporary folder, and ends. On Linux orphans become its
children, so that a process in a session of its own does not escape either. One that forks on and on, faster
than it can be killed, may; and so may one in a session of its own when the call kills its supervisor.
"""

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

POLL = 0.1  # seconds between two looks at whether the call's process has ended
DEATH_SIGNAL, SUBREAPER = 1, 36  # of Linux's prctl


def make(
    pipe: Connection,
    output: Connection,
    caller: Connection,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Call `function(send, *args)`, in a process below this one where there is fork; it does not return.

    Args:
        pipe: where the process group is told, then events, at last `done` with the value or `error` with a
            traceback.
        output: where everything goes that is printed.
        caller: its other end is closed when there is nobody to call for any more.
        folder: for temporary files.
        function: what to call.
        args: with what.
    """
    if hasattr(os, "fork"):
        _keep(pipe, output, caller, folder)
        caller.close()
        pipe.send(("group", os.getpid()))
        sink = output.fileno()
    else:
        threading.Thread(target=_end_with_caller, args=(caller, folder), daemon=True).start()
        sink = os.open(os.devnull, os.O_WRONLY)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    streams = sys.stdout, sys.stderr
    for number, stream in enumerate(streams, 1):
        stream.flush()
        os.dup2(sink, number)
    output.close()
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(Path(folder, "hypothesis"))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    gc.freeze()  # what the fork server has imported: pytest collects garbage several times, and never that
    own = os.getpid()
    try:
        message = ("done", function(lambda event: pipe.send(("event", event)), *args))
    except BaseException:
        message = ("error", traceback.format_exc())
    if os.getpid() != own:
        os._exit(1)  # a test forked, and this is the copy: it has no say
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):  # it may have been closed
            stream.flush()
    pipe.send(message)
    while True:  # we are ended from outside: nothing that runs at exit can change the verdict
        time.sleep(3600)


def _keep(pipe: Connection, output: Connection, caller: Connection, folder: str) -> None:
    """Fork, and return in the child alone."""
    os.setsid()
    _prctl(SUBREAPER, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a library's threads: none of them is at work
        made = os.fork()
    if not made:
        os.setsid()
        _prctl(DEATH_SIGNAL, signal.SIGKILL)
        return
    pipe.close()
    output.close()
    while not caller.poll(POLL) and _runs(made):
        pass
    _kill(made)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _prctl(option: int, value: int) -> None:
    """Does nothing where there is none."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import ctypes  # noqa: PLC0415 - there are interpreters without

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _runs(made: int) -> bool:
    """Whether the process has not ended; what else has is reaped."""
    while ended := os.waitpid(-1, os.WNOHANG)[0]:
        if ended == made:
            return False
    return True


def _kill(made: int) -> None:
    """Kill the process, its group, and every child that is left or is inherited meanwhile."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(made, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # nobody is left
        while True:
            for pid in _children(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children(parent: int) -> Iterator[int]:
    """The children of a process, where there is /proc."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                yield int(stat.parent.name)


def _end_with_caller(caller: Connection, folder: str) -> None:
    with contextlib.suppress(OSError, EOFError):
        caller.recv()  # it never speaks: this returns when it is gone
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
