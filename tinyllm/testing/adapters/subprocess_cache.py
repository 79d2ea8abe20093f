"""A cache behind a pipe, so that an engine in any language can be held to the laws.

The protocol is docs/protocol.md: a line there, a line back. What the laws ask of a cache is asked of the
engine; only what no line can carry is refused on this side. Nothing that an engine does can make the kit
wait for ever.
"""

import contextlib
import gc
import math
import operator
import os
import re
import select
import shlex
import signal
import subprocess
import textwrap
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tinyllm.testing.adapters.loading import ImplementationError
from tinyllm.testing.contract import EXTENSIONS
from tinyllm.testing.trace import encode

T = TypeVar("T")
Words = list[str]
Ints = NDArray[np.int32]
CARRIED = frozenset(EXTENSIONS) - {
    "gather_runs"
}  # what is in place on one side of a pipe is not on the other
SHOWN = 160  # characters of a request or an answer that a message quotes
TAIL = 2000  # bytes of standard error that are kept
SHORT = 4096  # bytes of an answer that carries no contents
MANY = 4  # processes, before a search for those whose cache is garbage
PROTOCOL = 1  # the newest version that is spoken here
START = 10.0  # seconds that a process may take to start, and to answer `hello`
GRACE = 1.0  # seconds for last words, and for ending, once an engine has closed a pipe
HURRY = 50  # after the first answer that did not come, others are waited for this much shorter: the verdict
#             is settled by then, and the program that shows it is being made smaller


class EngineError(RuntimeError):
    """The engine broke the protocol: what was sent, what came, how the process ended, its last words."""


class _BadAnswer(Exception):  # noqa: N818 - what the engine did, in words; `late` when it did nothing
    def __init__(self, what: str, *, late: bool = False) -> None:
        super().__init__(what)
        self.late = late


class Engine:
    """A factory of caches that live in other processes: an argument for `check_cache`.

    A process holds one cache. When that is garbage, `new` makes the next one in the same process; after an
    EngineError, in a fresh one. Not thread-safe; needs a POSIX system.

    Args:
        command: the program and its arguments.
        timeout: seconds that an answer may take.

    Raises:
        ImplementationError: the command cannot be started, or does not answer `hello` as it must.
    """

    def __init__(self, command: Sequence[str], timeout: float = 10.0) -> None:
        self.command, self.timeout = list(command), timeout
        self._patience = timeout
        self.patience = START + 2 * timeout  # of the kit, with one call
        self._alive: list[_Process] = []
        self._idle: list[_Process] = []
        if not hasattr(select, "poll"):
            raise ImplementationError("an engine is reached through pipes, which this system cannot poll")
        try:
            self._idle.append(self._start())
        except EngineError as error:
            raise ImplementationError(f"{shlex.join(self.command)!r} is no engine: {error}") from error

    def __call__(self, *sizes: Any) -> "_Cache":
        """A new, empty cache: num_blocks, block_size, n_layers, n_kv_heads, d_head."""
        request = " ".join(["new", *map(_word, sizes)])
        process = self._take()
        try:
            self.ask(process, request, _nothing)
        except BaseException:
            self._idle.append(process)
            raise
        cache = _Cache(self, process, *map(int, sizes))
        weakref.finalize(cache, self._idle.append, process).atexit = False
        return cache

    def ask(self, process: "_Process", request: str, read: Callable[[Words], T], timeout: float = 0) -> T:
        """Send a request; `read` makes a value of the words after `ok`. Raises what the engine answers."""
        if process.gone:
            raise EngineError(f"this cache is gone: {process.gone}")
        try:
            answer = process.ask(request, timeout or self._patience)
            kind, *words = answer.split() or [""]
            if kind == "ok":
                return read(words)
            if kind != "error" or not words or not words[0].isidentifier():
                raise _BadAnswer(  # noqa: TRY301 - one place tells what went wrong
                    f"answered {_cut(answer)}: neither 'ok ...' nor 'error NAME ...'"
                )
        except _BadAnswer as bad:
            process.gone = f"to {_cut(request)} the engine {bad}; {process.end()}"
            if bad.late:
                self._patience = self.timeout / HURRY
            raise EngineError(process.gone) from None
        except BaseException:  # interrupted: the answer would be taken for that of the next request
            process.gone = f"{_cut(request)} was interrupted"
            process.end()
            raise
        raise _error(words[0])(" ".join(words[1:]))

    def close(self) -> None:
        """End all processes, as garbage collection and the end of the interpreter do."""
        for process in self._alive:
            process.gone = process.gone or "its engine was closed"
            process.end()

    def _take(self) -> "_Process":
        """A process whose cache is garbage, or a fresh one."""
        self._alive = [process for process in self._alive if not process.gone]
        if not self._idle and len(self._alive) >= MANY:
            gc.collect()  # errors and their tracebacks, which keep caches alive, are cycles
        while self._idle:
            process = self._idle.pop()
            if not process.gone:
                return process
        return self._start()

    def _start(self) -> "_Process":
        try:
            process = _Process(self.command)
        except OSError as error:
            raise EngineError(f"it cannot be started: {error.strerror}") from error
        weakref.finalize(self, process.end)
        self._alive.append(process)
        named = frozenset(self.ask(process, "hello", _offered, timeout=max(START, self.timeout)))
        self.capabilities, self.extends = named - CARRIED, named & CARRIED
        return process


class _Cache:
    """The ten methods of the contract, and those beyond them that the engine names, each a request."""

    def __init__(self, engine: Engine, process: "_Process", *sizes: int) -> None:
        self._blocks, size, _, self._heads, self._dims = sizes
        blocks = self._blocks
        self._engine, self._process = engine, process
        for name in CARRIED - engine.extends:
            setattr(self, name, None)  # not offered
        # No right answer has more bytes: a table of ten digits an id, or K and V of the whole pool in hex.
        process.longest = SHORT + 12 * blocks + 8 * blocks * size * self._heads * self._dims

    def _ask(self, read: Callable[[Words], T], name: str, *args: Any, data: Sequence[str] = ()) -> T:
        request = " ".join([name, *map(_word, args), *data])
        return self._engine.ask(self._process, request, read)

    def add_seq(self, seq_id: int) -> None:
        self._ask(_nothing, "add", seq_id)

    def fork(self, parent: int, child: int) -> None:
        self._ask(_nothing, "fork", parent, child)

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        tokens, data = _chunk(k, v, self._heads, self._dims)
        self._ask(_nothing, "append", seq_id, layer, tokens, data=data)

    def block_table(self, seq_id: int) -> Ints:
        return self._ask(_table, "table", seq_id)

    def seq_len(self, seq_id: int, layer: int = 0) -> int:
        return self._ask(lambda words: _integers(words, 1)[0], "len", seq_id, layer)

    def gather(self, seq_id: int, layer: int) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
        return self._ask(lambda words: _contents(words, self._heads, self._dims), "gather", seq_id, layer)

    def free(self, seq_id: int) -> None:
        self._ask(_nothing, "free", seq_id)

    def stats(self) -> dict[str, int]:
        keys = ("free", "used", "cached", "evictions")
        return self._ask(lambda words: dict(zip(keys, _integers(words, 4))), "stats")

    def num_free_blocks(self) -> int:
        return self._ask(lambda words: _integers(words, 1)[0], "freeblocks")

    def close(self) -> None:
        self._ask(_nothing, "close")

    def blocks_needed(self, seq_id: int, layer: int, tokens: int) -> int:
        return self._ask(lambda words: _integers(words, 1)[0], "needed", seq_id, layer, tokens)

    def truncate(self, seq_id: int, length: int) -> None:
        self._ask(_nothing, "truncate", seq_id, length)

    def page_table(self, seq_ids: Iterable[int], layer: int) -> tuple[Ints, Ints, Ints]:
        seqs = list(seq_ids)
        self._process.longest = max(self._process.longest, SHORT + 12 * self._blocks * len(seqs))
        return self._ask(lambda words: _pages(words, len(seqs)), "pages", layer, *seqs)

    def check(self) -> None:
        self._ask(_nothing, "check")


class _Process:
    """A process of an engine, the leader of a group that is killed with it, and the bytes to and from it."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self._owner = os.getpid()
        self._popen = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
        # If we are killed, an engine that reads sees its input end; the guard kills one that does not.
        kill = f"read line; kill -s KILL -- -{self._popen.pid}"
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", kill], stdin=pipe, stdout=null, stderr=null, start_new_session=True
        )
        files = self._popen.stdin, self._popen.stdout, self._popen.stderr, self._guard.stdin
        self._files = [file for file in files if file]
        self._in, self._out, self._err, _ = (file.fileno() for file in self._files)
        os.set_blocking(self._in, False)
        self._poll, self._open = select.poll(), {self._out, self._err}
        for fd in self._open:
            self._poll.register(fd, select.POLLIN)
        self._said, self._tail, self._status, self._leaving = b"", b"", "", False
        self.longest = SHORT  # bytes of an answer
        self.gone = ""  # why nothing more can be asked

    def ask(self, request: str, timeout: float) -> str:
        """Send a line, and wait for the one line that answers it. Raises _BadAnswer."""
        deadline = time.monotonic() + timeout
        self._listen(0)
        if self._said:
            raise _BadAnswer(f"had already said, unasked, {_cut(self._said)}")
        unsent = memoryview(f"{request}\n".encode())
        while b"\n" not in self._said:
            if self._out not in self._open:
                raise _BadAnswer(f"closed its output{self._so_far()}")
            if len(self._said) > self.longest:
                raise _BadAnswer(f"does not end its answer{self._so_far()}")
            unsent = unsent[self._write(unsent) :]
            left = deadline - time.monotonic()
            if left <= 0:
                raise _BadAnswer(f"gave no answer within {timeout:g} s{self._so_far()}", late=True)
            self._listen(left, writing=bool(unsent))
        line, _, more = self._said.partition(b"\n")
        if more or unsent:
            how = "with more than a line" if more else "before it was asked"
            raise _BadAnswer(f"answered {how}: {_cut(self._said)}")
        self._said = b""
        try:
            return line.decode()
        except UnicodeDecodeError:
            raise _BadAnswer(f"answered {_cut(line)}, which is not UTF-8") from None

    def _so_far(self) -> str:
        return f"; so far it said {_cut(self._said)}" if self._said else ""

    def _write(self, unsent: memoryview) -> int:
        try:
            return os.write(self._in, unsent) if unsent else 0
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            self._listen(GRACE)
            self._leaving = True
            raise _BadAnswer(f"closed its input{self._so_far()}") from None

    def _listen(self, seconds: float, *, writing: bool = False) -> None:
        """Take in whatever comes first within that time, or wait for room to write."""
        if writing:
            self._poll.register(self._in, select.POLLOUT)
        events = self._poll.poll(math.ceil(seconds * 1000))
        if writing:
            self._poll.unregister(self._in)
        for fd, _ in events:
            chunk = os.read(fd, 1 << 18) if fd != self._in else b"-"
            if not chunk:
                self._poll.unregister(fd)
                self._open.remove(fd)
                self._leaving |= fd == self._out
            elif fd == self._out:
                self._said += chunk
            elif fd == self._err:
                self._tail = (self._tail + chunk)[-TAIL:]

    def end(self) -> str:
        """Kill the group, if that is not done yet: how the process ended, in words."""
        if self._status or os.getpid() != self._owner:  # a fork of the owner has no say
            return self._status
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(GRACE if self._leaving else 0)
        code = self._popen.returncode
        self._guard.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._guard.wait()
        self._popen.wait()
        deadline = time.monotonic() + GRACE
        while self._err in self._open and (left := deadline - time.monotonic()) > 0:
            self._listen(left)
        for file in self._files:
            file.close()
        self._status = "it was still running, and was killed" if code is None else f"it ended {_how(code)}"
        if words := self._tail.decode(errors="replace").strip():
            self._status += f"; its standard error ends:\n{textwrap.indent(words, '    ')}"
        return self._status


def _how(code: int) -> str:
    return f"with status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"


def _cut(text: str | bytes) -> str:
    return f"{text[:SHOWN]!r}" + (f"... ({len(text)} long)" if len(text) > SHOWN else "")


KNOWN = (AssertionError, ValueError, KeyError, IndexError, TypeError)
_errors: dict[str, Any] = {one.__name__: one for one in KNOWN}


def _error(name: str) -> Any:
    """A class of that name, by which the kit knows an error (law 15)."""
    if name not in _errors:
        _errors[name] = type(name, (RuntimeError,), {})
    return _errors[name]


def _word(value: Any) -> str:
    """An id, layer or size as it is written; a float too, so that the engine has to refuse it."""
    if isinstance(value, (float, np.floating)):
        return repr(float(value))
    try:
        return str(operator.index(value))
    except TypeError:
        raise TypeError(f"{value!r} ({type(value).__name__}) must be an integer") from None


def _chunk(k: Any, v: Any, heads: int, dims: int) -> tuple[int, list[str]]:
    """T and the hex of K and V. A wrong shape is refused here only where the engine could not see it."""
    arrays = [np.asarray(given) for given in (k, v)]
    for array in arrays:
        if array.dtype.kind not in "iuf":
            raise TypeError(f"K and V must hold integers or floats, not {array.dtype}")
        if array.ndim != 3:
            raise ValueError(f"a shape of K or V is {array.shape}; it must be [{heads}, T, {dims}]")
    tokens = arrays[0].shape[1]
    for array in arrays:
        if array.shape != (heads, tokens, dims) and array.size == heads * tokens * dims:
            raise ValueError(f"a shape of K or V is {array.shape}; it must be [{heads}, {tokens}, {dims}]")
    return tokens, [_hex(array) for array in arrays]


def _hex(array: NDArray[Any]) -> str:
    """As little-endian float32; what is not float32 is rounded to float16 first, and so only once (law 3)."""
    if array.dtype != np.float32:
        with np.errstate(all="ignore"):
            array = array.astype(np.float16)
    return encode(array) or "-"


def _offered(words: Words) -> frozenset[str]:
    """What the answer to `hello` names; a version among the names must be one that is spoken here."""
    for word in words:
        name, dash, version = word.partition("-")
        if name == "protocol" and dash and (not version.isdecimal() or not 1 <= int(version) <= PROTOCOL):
            raise _BadAnswer(f"speaks {_cut(word)}; this kit speaks protocol-1 to protocol-{PROTOCOL}")
    return frozenset(word for word in words if not word.startswith("protocol-"))


def _nothing(words: Words) -> None:
    _integers(words, 0)


def _integers(words: Words, count: int) -> list[int]:
    if len(words) != count or not all(re.fullmatch("-?[0-9]{1,18}", word) for word in words):
        raise _BadAnswer(f"answered 'ok' and {_cut(' '.join(words))}, where {count} integers are due")
    return [int(word) for word in words]


def _pages(words: Words, rows: int) -> tuple[Ints, Ints, Ints]:
    """A page table of so many rows: `indptr`, a number more than rows; `indices`; `last_page_len`."""
    if len(words) < 2 * rows + 1:
        raise _BadAnswer(
            f"answered 'ok' and {_cut(' '.join(words))}, where {2 * rows + 1} integers are least"
        )
    numbers = _table(words)
    ends = rows + 1, len(words) - rows
    return numbers[: ends[0]], numbers[ends[0] : ends[1]], numbers[ends[1] :]


def _table(words: Words) -> Ints:
    ids = np.array(_integers(words, len(words)), np.int64)
    if (ids != ids.astype(np.int32)).any():
        raise _BadAnswer(f"answered 'ok' and {_cut(' '.join(words))}, which int32 cannot hold")
    return ids.astype(np.int32)


def _contents(words: Words, heads: int, dims: int) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """K and V of `gather` from the number of positions and two words of hex."""
    (length,) = _integers(words[:1], 1)
    try:
        k, v = (np.frombuffer(bytes.fromhex("" if word == "-" else word), "<f2") for word in words[1:])
        if k.size != heads * length * dims:  # reshape would take -1 for any number
            raise ValueError  # noqa: TRY301
        shape = heads, length, dims
        return k.reshape(shape).astype(np.float16), v.reshape(shape).astype(np.float16)
    except ValueError:
        what = f"the hex of K and V, float16 [{heads}, {length}, {dims}]"
        raise _BadAnswer(f"answered 'ok' and {_cut(' '.join(words))}, which is not {what}") from None
