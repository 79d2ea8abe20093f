"""A limit on how long one call of a cache may take, so that an endless loop is a finding with a program.

Python code can only be stopped by a signal, and only in the main thread: elsewhere, and on Windows, nothing
is limited. A timer looks now and then whether a call is still the one that it was the last time.

A cache that is slow is not wrong. What many calls may take together is limited too, everywhere, and ends
between two calls (`limited`); how far a check came by then is told, and is no finding.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from tinyllm.testing.contract import stated

T = TypeVar("T")

LIMIT = 15.0  # seconds: longer than an engine behind a pipe is waited for
HURRY = 20  # once a call has not returned, others are waited for this much shorter: the verdict is settled
TICK = 0.25  # seconds between two looks
INSIST = 0.01  # and once the limit is over: a loop that catches everything is hit in its handler at last

BEAT = 5.0  # seconds between two words of one who has nothing else to say, and is at work

_calls = 0
_ends = math.inf  # when the calls under way have taken long enough
_beat: Callable[[], object] | None = None
_beats = math.inf  # when to say so next
_due = math.inf  # the earlier of the two


class NotReturned(BaseException):
    """A call has taken too long, and was stopped."""


class CutShort(BaseException):
    """A check whose calls took long together has ended before its end; all that it saw was right."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Calls inside may take so long together: the first one after that is not made, but raises CutShort."""
    global _ends  # noqa: PLW0603
    began, before, calls = time.monotonic(), _ends, _calls
    _ends = began + seconds
    _wind()
    try:
        yield
    except CutShort as cut:
        if cut.args:  # it is told already
            raise
        took, calls = time.monotonic() - began, _calls - calls
        each = f"{1000 * took / calls:.3g} ms each"
        raise CutShort(f"cut short after {calls:,} calls in {took:.0f} s, {each}") from None
    finally:
        _ends = before
        _wind()


def left() -> float:
    """Seconds that calls may still take."""
    return _ends - time.monotonic()


@contextlib.contextmanager
def beating(beat: Callable[[], object]) -> Iterator[None]:
    """Call `beat` every few seconds, between two calls of a cache."""
    global _beat, _beats
    before, _beat, _beats = (_beat, _beats), beat, time.monotonic() + BEAT
    _wind()
    try:
        yield
    finally:
        _beat, _beats = before
        _wind()


def _wind() -> None:
    global _due  # noqa: PLW0603
    _due = min(_ends, _beats)


def _strike(now: float) -> None:
    """Do what is due."""
    global _beats  # noqa: PLW0603
    if now >= _ends:
        raise CutShort
    _beats = now + BEAT
    _wind()
    if _beat is not None:
        _beat()


def patience(factory: Any) -> float:
    """Seconds that one call of a factory's caches may take: it may know that they need more."""
    return max(LIMIT, float(stated(factory, "patience", 0.0)))


def watch_over(factory: Any) -> "Watch":
    """A watch for the caches of a factory."""
    return Watch(patience(factory))


def watched(call: Callable[..., T], *args: Any) -> T:
    """Make a call that `Watch` may stop, with NotReturned: it looks for the frame of this function."""
    global _calls  # noqa: PLW0603 - what costs least
    _calls += 1
    if (now := time.monotonic()) >= _due:
        _strike(now)
    return call(*args)


def asked(cache: Any, method: str, args: tuple[Any, ...]) -> Any:
    """Call a method by its name, watched as well."""
    global _calls  # noqa: PLW0603
    _calls += 1
    if (now := time.monotonic()) >= _due:
        _strike(now)
    return getattr(cache, method)(*args)


WATCHED = frozenset({watched.__code__, asked.__code__})


class Watch:
    """Limits every watched call inside its `with` blocks. An alarm that the caller has set still rings."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._depth = 0

    def __enter__(self) -> Self:
        self._on = (
            hasattr(signal, "setitimer")
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGALRM) is not None  # set by C code, it could not be put back
        )
        self._depth += 1
        if self._on and self._depth == 1:
            self._call, self._since = _calls, time.monotonic()
            self._theirs = signal.getsignal(signal.SIGALRM)
            left, self._interval = signal.getitimer(signal.ITIMER_REAL)
            self._due = time.monotonic() + left if left else 0.0
            signal.signal(signal.SIGALRM, self._look)
            self._wait(TICK)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._on or self._depth:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._theirs)
        if self._due:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, self._due - time.monotonic()), self._interval)

    def _wait(self, seconds: float) -> None:
        if self._due:
            seconds = min(seconds, max(1e-6, self._due - time.monotonic()))
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _look(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        now = time.monotonic()
        if self._due and now >= self._due:
            self._due = now + self._interval if self._interval else 0.0
            self._wait(TICK)
            self._ring_theirs(number, frame)
            return
        if self._call != _calls or not _inside(frame):
            self._call, self._since = _calls, now
        if now - self._since < self.limit:
            self._wait(min(TICK, self.limit))
            return
        self._wait(INSIST)
        waited, self.limit = self.limit, min(self.limit, LIMIT / HURRY)
        raise NotReturned(f"it had not returned after {waited:g} s, and was stopped in {_place(frame)}")

    def _ring_theirs(self, number: int, frame: FrameType | None) -> None:
        if callable(self._theirs):
            self._theirs(number, frame)
        elif self._theirs == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _inside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in WATCHED:
            return True
        frame = frame.f_back
    return False


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return "no function of Python"
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"


class Watched:
    """A cache whose every call is watched, for tests that call it themselves."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cache, name)

        def call(*args: Any) -> Any:
            return watched(lambda: method(*args))

        call.__name__ = name
        return call
