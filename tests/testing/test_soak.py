"""The machine for hours: larger programs, a clock, and a record of the program that is being run."""

import itertools
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinyllm.infer.paged import PagedKVCache
from tinyllm.jobs.process import call
from tinyllm.testing import soak as module
from tinyllm.testing.check import shortest
from tinyllm.testing.contract import Factory
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.reach import BEYOND, Meter
from tinyllm.testing.run import Run, replay
from tinyllm.testing.scenes import MOST_BLOCKS, SCENES
from tinyllm.testing.soak import BLOCKS, Flight, Soaked, SoakMachine, SoakSearch, soak
from tinyllm.testing.trace import Op, parse


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time goes by line by line: a second has five hundred of them, however busy the machine is."""
    ticks = itertools.count(0, 0.002)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(ticks)))


@pytest.mark.usefixtures("steps")
def test_it_ends_when_the_time_is_up_and_says_how_far_it_came() -> None:
    heard: list[Any] = []
    found = soak(PagedKVCache, 1, 2.0, heard.append)
    assert 500 < found.lines < 1500
    assert found.broken is None
    assert found.lines > found.programs > 0
    assert found.reached["live", 2] > 0
    assert all(count <= found.programs for count in found.reached.values())
    assert "truncate" in found.offers
    assert "fork" in found.offers
    assert heard, "it tells how far it is"
    assert all(isinstance(one, Soaked) and one.programs <= found.programs for one in heard)


@pytest.mark.usefixtures("steps")
def test_pools_are_larger_than_those_of_check() -> None:
    class Seen(PagedKVCache):
        sizes: set[int] = set()  # noqa: RUF012

        def __init__(self, num_blocks: int, *more: int) -> None:
            super().__init__(num_blocks, *more)
            self.sizes.add(num_blocks)

    soak(Seen, 2, 3.0)
    assert max(Seen.sizes) > 9
    assert min(Seen.sizes) < 10


@pytest.mark.parametrize(
    "name", ["s07", *(pytest.param(name, marks=pytest.mark.long) for name in ("w05", "e03"))]
)
def test_a_bug_is_found_told_at_once_and_made_short(name: str, named: Callable[[str], Factory]) -> None:
    heard: list[Any] = []
    found = soak(named(name), 3, 300.0, heard.append)
    assert found.broken is not None
    raw = [one for one in heard if isinstance(one, LawBroken)]
    assert [one.beyond for one in raw] in ([False], [True, False])
    assert len(found.broken.trace.splitlines()) <= len(raw[-1].trace.splitlines())
    for one in (raw[-1], found.broken):
        with pytest.raises(LawBroken):
            replay(named(name), one.trace)


def test_the_same_seed_draws_the_same_programs(named: Callable[[str], Factory]) -> None:
    def hear(one: Any) -> None:
        if isinstance(one, LawBroken):
            raise KeyboardInterrupt(one.trace)  # before it is made short

    def first(seed: int) -> str:
        with pytest.raises(KeyboardInterrupt) as caught:
            soak(named("s07"), seed, 300.0, hear)
        return str(caught.value)

    assert first(5) == first(5)


def test_the_program_that_is_being_run_is_in_a_file(tmp_path: Path) -> None:
    """A cache that ends its process leaves the program behind, with the line that did it."""
    flight = tmp_path / "flight"
    ended = call(_fatal, flight, timeout=120)
    assert ended.how == "died"
    *before, last = parse(flight.read_text(encoding="utf-8"))
    assert before[0].name == "new"
    assert (last.name, sum(op.name == "fork" for op in before)) == ("fork", 2)


def _fatal(send: Any, flight: Path) -> None:
    import os  # noqa: PLC0415

    del send

    class Fatal(PagedKVCache):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self._forks = 0

        def fork(self, parent: Any, child: Any) -> None:
            super().fork(parent, child)
            self._forks += 1
            if self._forks == 3:
                os._exit(1)

    soak(Fatal, 1, 300.0, flight=flight)


@pytest.mark.usefixtures("steps")
def test_progress_is_told_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow cache may need minutes for a program, and is not taken for one that does not answer."""
    monkeypatch.setattr(module, "EVERY", 0.0)
    heard: list[Any] = []
    found = soak(PagedKVCache, 1, 1.0, heard.append)
    assert len(heard) >= found.lines > 0


@pytest.mark.usefixtures("steps")
def test_what_extensions_show_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes on, for the ten methods come first; then it is made shorter, under watch."""
    ticks: list[float] = []

    def watched(*args: Any) -> LawBroken:
        ticks.append(signal.getitimer(signal.ITIMER_REAL)[0])
        return shortest(*args)

    monkeypatch.setattr(module, "shortest", watched)

    class Wrong(PagedKVCache):
        def blocks_needed(self, *args: Any, **more: Any) -> int:
            return super().blocks_needed(*args, **more) + 1

    heard: list[Any] = []
    found = soak(Wrong, 1, 1.0, heard.append)
    (raw,) = [one for one in heard if isinstance(one, LawBroken)]
    assert raw.law == 16
    assert ticks[0] > 0
    assert found.broken is not None
    assert len(found.broken.trace.splitlines()) <= len(raw.trace.splitlines())


def test_after_a_law_of_the_ten_methods_no_extension_is_told() -> None:
    heard: list[Any] = []
    looking = SoakSearch(300.0, heard.append, None)
    looking.extensions = LawBroken(16, "needed", "one", "two", beyond=True)
    looking.core = LawBroken(8, "append", "one", "two")
    looking.ended(Run(PagedKVCache), Meter())
    assert heard == [looking.core]


def test_a_full_disk_is_no_fault_of_the_cache() -> None:
    flight = Flight(Path("/dev/full"))
    flight.note(Op("new", (1, 1, 1, 1, 1)))
    flight.note(Op("add", (0,)))


def test_what_is_out_of_reach_is_what_the_sizes_are() -> None:
    assert f"more than {len(SoakMachine.ids)} tables to a block" in BEYOND
    assert max(start.config.num_blocks for start in SCENES) == MOST_BLOCKS > BLOCKS[1]
    assert f"more than {MOST_BLOCKS} blocks to a pool" in BEYOND


def test_what_several_searches_did_is_added_up() -> None:
    """Of two broken laws, the first is told."""
    one, other = LawBroken(7, "a", "b", ""), LawBroken(8, "a", "b", "")
    total = Soaked(1, 20, Counter({("live", 2): 1}), frozenset({"fork"}), one)
    total.add(Soaked(2, 30, Counter({("live", 2): 2}), frozenset({"truncate"}), other))
    assert (total.programs, total.lines, total.reached["live", 2]) == (3, 50, 3)
    assert total.offers == {"fork", "truncate"}
    assert total.broken is one
