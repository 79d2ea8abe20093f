"""A call that does not return is stopped, and nobody else's alarm is."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing import check as check_module
from tinyllm.testing import time_limit
from tinyllm.testing.adapters.subprocess_cache import Engine
from tinyllm.testing.check import check_cache, run_directed, run_machine
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.profiles import profile
from tinyllm.testing.time_limit import NotReturned, Watch, Watched, watch_over, watched

LIMIT = 2.0  # that a right call stays below on a busy machine
CEILING = 300.0  # for what comes at once


def until(happened: Callable[[], object]) -> None:
    ends = time.monotonic() + CEILING
    while not happened():
        assert time.monotonic() < ends
        time.sleep(0.01)


class Clock:
    """Tells a time that goes on when it is told to; then the watch looks."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def go_on(self, seconds: float) -> None:
        self.now += seconds
        signal.raise_signal(signal.SIGALRM)


pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(time_limit, "LIMIT", LIMIT)
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    yield
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)) == before


def forever() -> None:
    while True:
        pass


def stubborn() -> None:
    """Catches everything, and goes on."""
    while True:
        try:
            time.sleep(0.001)
        except BaseException:
            sum(range(1_000_000))


class LoopsAtFive(PagedKVCache):
    looped = 0

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        super().append(seq_id, layer, k, v)
        if self.seq_len(seq_id, layer) == 5:
            LoopsAtFive.looped += 1
            forever()


class Sleeps(PagedKVCache):
    def gather(self, seq_id: int, layer: int) -> Any:
        if self.seq_len(seq_id, layer) == 3:
            time.sleep(1000)
        return super().gather(seq_id, layer)


class Locks(PagedKVCache):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._lock = threading.Lock()

    def free(self, seq_id: int) -> None:
        super().free(seq_id)
        self._lock.acquire()


class NeverMade(PagedKVCache):
    def __init__(self, *_: int) -> None:
        forever()


class RefusesByLooping(PagedKVCache):
    """Where it need not name its errors, any will do, but not this one."""

    capabilities = frozenset({"fork", "contents", "counts", "block-tables", "lazy-copy", "exact-cost"})

    def gather(self, seq_id: int, layer: int) -> Any:
        if layer < 0:
            forever()
        return super().gather(seq_id, layer)


HANGING = {LoopsAtFive: 9, Sleeps: 3, Locks: 6, NeverMade: 15, RefusesByLooping: 15}


@pytest.mark.parametrize(("factory", "law"), HANGING.items())
def test_a_call_that_does_not_return_breaks_its_law(
    factory: Any, law: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_module, "CATALOGUE", {})  # each call that is waited for costs seconds
    if factory is not LoopsAtFive:
        monkeypatch.setattr(check_module, "shorten", lambda _, broken: broken)
    with pytest.raises(LawBroken) as caught:
        check_cache(factory, settings=profile("dev"))
    assert caught.value.law == law
    assert "NotReturned: it had not returned after " in str(caught.value)
    assert "test_time_limit.py, line " in str(caught.value)
    assert caught.value.trace.startswith("new ")


def test_the_machine_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "shorten", lambda _, broken: broken)
    monkeypatch.setattr(LoopsAtFive, "looped", 0)
    with pytest.raises(LawBroken, match="NotReturned"):
        run_machine(LoopsAtFive, shard(CacheMachine, 0, LoopsAtFive), profile("ci"))
    assert LoopsAtFive.looped == 1, "and not as often as Hypothesis would try to make it shorter"


@pytest.mark.parametrize("loop", [forever, stubborn])
def test_loops_end(loop: Any) -> None:
    with pytest.raises(NotReturned, match=r"after 0\.\d+ s, and was stopped in "), Watch(0.3):
        watched(loop)


def test_a_call_that_is_quick_enough_and_the_time_between_calls_are_nobodys_business(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(time_limit, "time", clock)
    with Watch(0.3) as watch:
        for _ in range(4):
            watched(clock.go_on, 0.1)
        clock.go_on(0.8)
        with watch:  # once more, inside
            assert watched(lambda: 3) == 3
        with pytest.raises(NotReturned):
            watched(lambda: list(map(clock.go_on, [0.1] * 9)))


def test_the_callers_alarm_still_rings() -> None:
    rung: list[float] = []
    theirs = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.3)
        with Watch(60):
            until(lambda: len(rung) == 2)
        left, interval = signal.getitimer(signal.ITIMER_REAL)
        assert interval == pytest.approx(0.3)
        assert 0 < left <= 0.3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, theirs)


def test_an_ignored_alarm_stays_ignored() -> None:
    theirs = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with Watch(60) as watch:
            until(lambda: not watch._due)
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, theirs)


def test_other_threads_are_left_alone() -> None:
    done: list[int] = []

    def work() -> None:
        with Watch(0.1):
            watched(lambda: time.sleep(0.5))
        run_directed(PagedKVCache, "uneven layers")
        done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    with Watch(0.3):
        thread.join()  # a call goes on, but not here
    assert done == [1]


def test_a_watched_cache_is_the_cache() -> None:
    cache = Watched(PagedKVCache(2, 2, 1, 1, 1))
    cache.add_seq(3)
    assert cache.seq_len(3) == 0
    assert cache.free.__name__ == "free"
    with pytest.raises(AttributeError):
        cache.fly  # noqa: B018 - it is the question


def test_a_factory_may_ask_for_patience() -> None:
    class Patient(PagedKVCache):
        patience = 70.0

    assert watch_over(Patient).limit == 70
    assert watch_over(PagedKVCache).limit == LIMIT
    assert "patience" in Engine.__init__.__code__.co_names
