"""What shows only where nobody looked, is asked beyond the ten methods in between, or follows a refusal."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings

from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.check import run_machine
from tinyllm.testing.contract import Config, Factory
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.observe import Answer, Held, image
from tinyllm.testing.profiles import profile
from tinyllm.testing.run import replay
from tinyllm.testing.scenes import Start
from tinyllm.testing.trace import Op, TraceError, parse, values

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
        pages = super().page_table(seq_ids, layer)
        return tuple(array.copy() for array in self._pages.setdefault((tuple(seq_ids), layer), pages))


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
    KeepsItsPages: (18, "", 100),
    TakesTheChild: (13, "! KeyError", 1000),
}


@pytest.mark.parametrize("factory", FAULTS, ids=lambda one: one.__name__)
def test_the_machine_finds_what_no_look_after_each_line_shows(factory: Factory, breaks: Breaks) -> None:
    law, words, examples = FAULTS[factory]  # type: ignore[index]
    some = settings(profile("ci"), max_examples=examples, phases=[Phase.generate])
    broken = breaks(lambda: run_machine(factory, shard(CacheMachine, 2, factory), some))
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


def test_what_a_read_mends_is_asked_first(breaks: Breaks) -> None:
    class RenewedByTables(PagedKVCache):
        """A page table is as long as the block table was when somebody last looked at it."""

        def block_table(self, seq_id: int) -> Any:
            table = super().block_table(seq_id)
            vars(self).setdefault("pages", {})[seq_id] = len(table)
            return table

        def page_table(self, seq_ids: Any, layer: int) -> Any:
            indptr, indices, last = super().page_table(seq_ids, layer)
            return indptr, indices[: sum(vars(self).get("pages", {}).get(i, 0) for i in seq_ids)], last

    program = "new 4 1 1 1 1\nadd 0\nappend 0 0 1\nappend 0 0 1 quiet\n"
    replay(RenewedByTables, program + "stats\n")
    for line in ("pages 0 0", "check", "needed 0 0 1"):
        broken = breaks(partial(replay, RenewedByTables, f"{program}{line}\n"))
        assert (broken.law, broken.beyond) == (18, True)


def test_a_read_beyond_the_ten_that_fails_is_told_after_the_ten(breaks: Breaks) -> None:
    class Fails(PagedKVCache):
        right = True

        def check(self) -> None:
            raise AssertionError("law 5: never")

        def seq_len(self, seq_id: int, layer: int = 0) -> int:
            return super().seq_len(seq_id, layer) + (not self.right and seq_id == 1)

    program = "new 4 1 1 1 1 quiet\ncheck quiet\nadd 0\nadd 1\n"
    broken = breaks(lambda: replay(Fails, program))
    assert (broken.law, broken.beyond) == (19, True)
    Fails.right = False
    broken = breaks(lambda: replay(Fails, program))
    assert (broken.law, broken.beyond) == (13, False)


def test_what_an_append_needs_is_judged_in_a_line_of_its_own(breaks: Breaks) -> None:
    class NoneForNew(PagedKVCache):
        def blocks_needed(self, seq_id: int, layer: int, tokens: int) -> int:
            return 0 if tokens == 3 else super().blocks_needed(seq_id, layer, tokens)

    broken = breaks(lambda: replay(NoneForNew, "new 4 2 1 1 1\nadd 0\nneeded 0 0 3\n"))
    assert (broken.law, broken.beyond) == (16, True)


def test_views_in_place_are_no_copies_and_their_list_is_the_callers(breaks: Breaks) -> None:
    class Copies(PagedKVCache):
        def gather_runs(self, seq_id: int, layer: int) -> Any:
            pair = tuple(array.copy() for array in self.gather(seq_id, layer))
            for array in pair:
                array.flags.writeable = False
            return [pair]

    class OneList(PagedKVCache):
        def gather_runs(self, seq_id: int, layer: int) -> Any:
            key = str((seq_id, layer, self._seqs))
            return vars(self).setdefault(key, super().gather_runs(seq_id, layer))

    program = "new 4 2 1 1 1\nadd 0\nappend 0 0 1\n"
    assert breaks(lambda: replay(Copies, program)).law == 20
    assert breaks(lambda: replay(OneList, program)).law == 12


class Window(PagedKVCache):
    """`gather` of one block is a view of the pool that nobody can write into."""

    def gather(self, seq_id: int, layer: int) -> Any:
        runs = super().gather_runs(seq_id, layer)
        return runs[0] if len(runs) == 1 else super().gather(seq_id, layer)


HELD = "new 4 2 1 1 1\nadd 0\nappend 0 0 1\nfree 0\nadd 0\nadd 1\nadd 2\nappend 0 0 1\n"


@pytest.mark.parametrize("end", ["", "close\n"])
def test_an_answer_is_held_until_its_block_is_used_again(end: str, breaks: Breaks) -> None:
    broken = breaks(lambda: replay(Window, HELD + end))
    assert (broken.law, broken.name) == (12, "answers")
    assert "gather(0, 0)" in broken.expected


def test_page_tables_are_held_as_well(breaks: Breaks) -> None:
    class TakesTurns(PagedKVCache):
        """Buffers are handed out in turns, and so used again after a while."""

        def page_table(self, seq_ids: Any, layer: int) -> Any:
            turns = vars(self).setdefault("turns", [np.zeros(9, np.int32) for _ in range(10)])
            turns.append(turns.pop(0))
            indptr, indices, last = super().page_table(seq_ids, layer)
            turns[0][: len(indptr)] = indptr
            return turns[0][: len(indptr)], indices, last

    program = "new 4 2 1 1 1\nadd 0\nstats\nstats\nstats\nstats\nstats\n"
    for end in ("", "close\n"):
        broken = breaks(partial(replay, TakesTurns, program + end))
        assert (broken.law, broken.beyond) == (12, True)


def test_few_answers_are_held_and_one_that_is_let_go_is_compared(breaks: Breaks) -> None:
    def answers() -> list[Answer]:
        array = np.zeros(8, np.float16)
        return [Answer("gather(0, 0)", array, image(array))]

    for most in ({"MOST": 2}, {"BYTES": 40}):
        held = type("Few", (Held,), most)()
        first, *others = (answers() for _ in range(4))
        held.hold(first)
        first[0].value[:] = 1
        held.hold(others[0])
        assert breaks(partial(held.hold, others[1])).law == 12
        held.hold(others[2])
        held.check()


def test_a_program_is_run_once_more_and_looked_at_at_its_end_alone(breaks: Breaks) -> None:
    """A fault that every look mends, and of which a program whose lines are all looked at shows nothing."""
    machine = shard(CacheMachine, 0, MergesWhenRead)()
    start = Start(Config(2, 1, 1, 1, 1), (Op("add", (0,)), Op("append", (0, 0, 2))), silent=False)
    machine.new(start, forked=False, again=True)
    for line in ("truncate 0 0", "append 0 0 1"):
        name, *args = line.split()
        machine.line(name, *map(int, args))
        machine.run.hold()
    broken = breaks(machine.teardown)
    assert broken.law == 9
    assert broken.trace.splitlines()[-2:] == ["truncate 0 0 quiet", "append 0 0 1 quiet"]
    assert breaks(lambda: replay(MergesWhenRead, broken.trace)).law == 9
