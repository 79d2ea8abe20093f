"""The far side of a call: a supervisor, and below it the process that makes the call.

The supervisor kills everything that was started, removes the temporary folder and ends, when the caller
closes its pipe or dies, or when the call's process ends. On Linux it adopts orphans, so that a process in a
session of its own does not escape. Two can: one that forks faster than it can be killed, and one in a session
of its own after the call has killed the supervisor.
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

POLL = 0.1  # seconds between two checks for the end of the call's process
DEATH_SIGNAL, SUBREAPER = 1, 36  # of Linux's prctl


def make(
    pipe: Connection,
    output: Connection,
    caller: Connection,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Call `function(send, *args)`, below this process if there is fork; never returns.

    Args:
        pipe: gets the process group, then events, at last `done` with the value or `error` with a traceback.
        output: gets everything that is printed.
        caller: its other end closes when the caller ends the call or dies.
        folder: the folder for temporary files.
        function: the function to call.
        args: its arguments.
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
    gc.freeze()  # pytest collects garbage several times; the fork server's imports are left out
    own = os.getpid()
    try:
        message = ("done", function(lambda event: pipe.send(("event", event)), *args))
    except BaseException:
        message = ("error", traceback.format_exc())
    if os.getpid() != own:
        os._exit(1)  # a test forked, and this is the copy
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            stream.flush()
    pipe.send(message)
    while True:  # killed from outside: no exit handler can change the verdict
        time.sleep(3600)


def _keep(pipe: Connection, output: Connection, caller: Connection, folder: str) -> None:
    """Fork, and return in the child alone."""
    os.setsid()
    _prctl(SUBREAPER, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a library's idle threads
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
    """Call prctl, where there is one."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import ctypes  # noqa: PLC0415 - some interpreters lack it

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _runs(made: int) -> bool:
    """Whether the process is alive; reaps other children."""
    while ended := os.waitpid(-1, os.WNOHANG)[0]:
        if ended == made:
            return False
    return True


def _kill(made: int) -> None:
    """Kill the process, its group, and every child left or adopted meanwhile."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(made, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # no child is left
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
        caller.recv()  # nothing is sent: this returns when the caller dies
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
