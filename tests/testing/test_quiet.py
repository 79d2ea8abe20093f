"""What shows only where nobody looked, is asked beyond the ten methods in between, or follows a refusal."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings

from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.check import run_machine
from tinyllm.testing.contract import Config, Factory
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.profiles import profile
from tinyllm.testing.run import replay
from tinyllm.testing.trace import TraceError, parse, values

Breaks = Callable[[Callable[[], object]], LawBroken]


class MergesWhenRead(PagedKVCache):
    """What truncate gives back is on a list of its own, which only a read of the counts merges."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._aside: list[int] = []

    def truncate(self, seq_id: int, length: int) -> None:
        before = len(self._free)
        super().truncate(seq_id, length)
        self._aside += self._free[before:]
        del self._free[before:]

    def num_free_blocks(self) -> int:
        self._free += self._aside
        self._aside.clear()
        return super().num_free_blocks()


class KeepsItsPages(PagedKVCache):
    """A page table is renewed by an append alone."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._pages: dict[Any, Any] = {}

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        super().append(seq_id, layer, k, v)
        self._pages.clear()

    def page_table(self, seq_ids: Any, layer: int) -> Any:
        key = tuple(seq_ids), layer
        if key not in self._pages:
            self._pages[key] = super().page_table(seq_ids, layer)
        return tuple(array.copy() for array in self._pages[key])


class TakesTheChild(PagedKVCache):
    """A fork of an unknown sequence is refused, and yet its child's id is taken."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._taken: set[int] = set()

    def fork(self, parent: int, child: int) -> None:
        try:
            super().fork(parent, child)
        except KeyError:
            self._taken.add(child)
            raise

    def add_seq(self, seq_id: int) -> None:
        if seq_id in self._taken:
            raise ValueError("taken")
        super().add_seq(seq_id)


FAULTS: dict[type[PagedKVCache], tuple[int, str, int]] = {
    MergesWhenRead: (9, "quiet", 1000),
    KeepsItsPages: (18, "", 20),
    TakesTheChild: (13, "! KeyError", 1000),
}


@pytest.mark.parametrize("factory", FAULTS, ids=lambda one: one.__name__)
def test_the_machine_finds_what_no_look_after_each_line_shows(factory: Factory, breaks: Breaks) -> None:
    law, words, examples = FAULTS[factory]  # type: ignore[index]
    some = settings(profile("ci"), max_examples=examples, phases=[Phase.generate])
    broken = breaks(lambda: run_machine(factory, shard(CacheMachine, 1, factory), some))
    assert broken.law == law
    assert words in broken.trace


QUIET = "new 2 1 1 1 1\nadd 0\nappend 0 0 2\ntruncate 0 1 quiet\nappend 0 0 1"


def test_a_quiet_line_is_not_looked_at(breaks: Breaks) -> None:
    assert breaks(lambda: replay(MergesWhenRead, QUIET)).law == 9
    replay(MergesWhenRead, QUIET.replace(" quiet", ""))
    replay(PagedKVCache, QUIET)


def test_a_program_is_looked_at_once_more_at_its_end(breaks: Breaks) -> None:
    class Shrinks(PagedKVCache):
        def free(self, seq_id: int) -> None:
            super().free(seq_id)
            self._free.pop()

    broken = breaks(lambda: replay(Shrinks, "new 2 1 1 1 1\nadd 0 quiet\nappend 0 0 1 quiet\nfree 0 quiet"))
    assert broken.law == 6


def test_each_sequence_is_blamed_for_what_was_done_to_it(breaks: Breaks) -> None:
    class Cuts(PagedKVCache):
        def truncate(self, seq_id: int, length: int) -> None:
            super().truncate(seq_id, max(0, length - 1))

    program = "new 4 1 1 1 1\nadd 0\nadd 1\nappend 0 0 2\ntruncate 0 1 quiet\nappend 1 0 1"
    assert breaks(lambda: replay(Cuts, program)).law == 17


def test_a_refused_quiet_line_is_refused_and_no_more_is_asked() -> None:
    replay(PagedKVCache, "new 1 1 1 1 1\nadd 0\nappend 0 0 2 ! OutOfBlocks quiet\nfree 7 ! KeyError\n")


def test_values_repeat_where_a_line_names_their_place() -> None:
    config = Config(4, 2, 1, 1, 2)
    same, other = parse("append 0 0 3 @7\nappend 0 0 3 @7/40 quiet")
    assert [str(op) for op in (same, other)] == ["append 0 0 3 @7/7", "append 0 0 3 @7/40 quiet"]
    (k, v), (k2, v2) = values(same, 99, config), values(other, 0, config)
    assert k.ravel().tolist() == [8, 9, 10, 11, 12, 13]
    assert np.array_equal(v, -k)
    assert np.array_equal(k2, k)
    assert v2.ravel().tolist() == [-41, -42, -43, -44, -45, -46]
    run = replay(PagedKVCache, "new 4 2 1 1 2\nadd 0\nappend 0 0 3 @7\nappend 0 0 1\n")
    assert run.oracle.contents[0][0][0][0, 3].tolist() == [1, 2], "the count did not advance"


PLACES = ["@", "@x", "@-1", "@1/", "@1/x", "@1/2/3", "@" + 13 * "9", "@" + 9999 * "9", "@7 00000000", "@7 @9"]


@pytest.mark.parametrize("word", PLACES, ids=lambda word: word[:15])
def test_a_place_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(TraceError, match=r"no place in the pattern|takes sequence|not the hex"):
        parse(f"append 0 0 1 {word}")


def test_page_tables_of_one_look_share_no_buffer(breaks: Breaks) -> None:
    class OneBuffer(PagedKVCache):
        buffer = np.zeros(64, np.int32)

        def page_table(self, seq_ids: Any, layer: int) -> Any:
            indptr, indices, last = super().page_table(seq_ids, layer)
            self.buffer[: len(last)] = last
            return indptr, indices, self.buffer[: len(last)]

    broken = breaks(lambda: replay(OneBuffer, "new 4 2 2 1 1\nadd 0\nappend 0 0 1\n"))
    assert (broken.law, broken.beyond) == (12, True)


def test_page_tables_are_copies(breaks: Breaks) -> None:
    class Kept(PagedKVCache):
        def page_table(self, seq_ids: Any, layer: int) -> Any:
            key = str((seq_ids, layer, self._seqs))
            return vars(self).setdefault(key, super().page_table(seq_ids, layer))

    broken = breaks(lambda: replay(Kept, "new 4 2 1 1 1\nadd 0\nappend 0 0 1\nstats\n"))
    assert (broken.law, broken.beyond) == (12, True)
