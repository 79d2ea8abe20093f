"""Programs that break a law are made smaller, and still break it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.grading.bugs import Bug, load_set
from tinyllm.infer.paged import OutOfBlocks, PagedKVCache
from tinyllm.testing.contract import Factory
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.run import replay
from tinyllm.testing.shrink import shorten
from tinyllm.testing.trace import TraceError, parse

Named = Callable[[str], Factory]
Breaks = Callable[[Callable[[], object]], LawBroken]

BUGS = [bug for bug in load_set("course") if not bug.survives]
LONG = """
new 11 2 3 2 2
add 5
append 5 1 1
stats
append 5 0 3 as list
fork 5 3
append 3 2 1
append 3 1 4
append 3 0 1 as strided
free 5
add 5
append 5 0 3 as float64
fork 5 4
append 4 0 2
append 3 0 7
append 5 2 33 ! OutOfBlocks
append 5 2 0 ! ValueError
free 3
free 4
append 5 0 9
"""


def test_the_long_program_is_a_right_one() -> None:
    assert replay(PagedKVCache, LONG).oracle.lens(5) == [12, 0, 0]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_a_long_program_comes_down_to_the_bugs_witness(bug: Bug, named: Named, breaks: Breaks) -> None:
    factory = named(bug.id)
    broken = breaks(lambda: replay(factory, LONG))
    found = shorten(factory, broken)
    assert found.law == broken.law
    assert breaks(lambda: replay(factory, found.trace)).law == broken.law
    assert len(found.trace.splitlines()) <= len(broken.trace.splitlines())
    assert len(found.trace.splitlines()) <= len(bug.witness.splitlines())
    assert "as" not in found.trace.split()


def removals(text: str) -> Iterator[str]:
    lines = text.splitlines()
    yield from ("\n".join([*lines[:i], *lines[i + 1 :]]) for i in range(len(lines)))


@pytest.mark.parametrize("name", ["s01", "s06", "s09", "s10", "s12"])
def test_no_line_can_go_and_no_number_be_lower_by_one(name: str, named: Named, breaks: Breaks) -> None:
    factory = named(name)
    broken = breaks(lambda: replay(factory, LONG))
    found = shorten(factory, broken)
    lower = []
    ops = parse(found.trace)
    for i, op in enumerate(ops):
        for at, number in enumerate(op.args):
            if number > 0:
                args = (*op.args[:at], number - 1, *op.args[at + 1 :])
                lower.append("\n".join(map(str, [*ops[:i], op._replace(args=args), *ops[i + 1 :]])))
    for text in (*removals(found.trace), *lower):
        law = 0
        with contextlib.suppress(TraceError):  # it makes no sense any more
            try:
                replay(factory, text)
            except LawBroken as other:
                law = other.law
        assert law != broken.law, text


def wrong_from(length: int) -> type[PagedKVCache]:
    class Wrong(PagedKVCache):
        def seq_len(self, seq_id: int, layer: int = 0) -> int:
            n = super().seq_len(seq_id, layer)
            return n + (n >= length)

    return Wrong


@given(st.integers(1, 300), st.integers(300, 500))
@settings(max_examples=15, deadline=None)
def test_numbers_are_found_as_by_bisection(length: int, first: int) -> None:
    factory = wrong_from(length)
    with pytest.raises(LawBroken) as caught:
        replay(factory, f"new 1000 2 2 1 1\nadd 3\nappend 3 1 {first}\n")
    small = shorten(factory, caught.value)
    new, add, append = parse(small.trace)
    assert add.args == (0,)
    assert append.args == (0, 0, length)
    assert new.args[2:] == (1, 1, 1)
    blocks, size = (int(a) for a in new.args[:2])
    assert blocks * size >= length


def test_a_program_that_is_as_small_as_can_be_comes_back(named: Named, breaks: Breaks) -> None:
    factory = named("s04")
    broken = breaks(lambda: replay(factory, "new 1 1 1 1 1\nadd 0\nappend 0 0 1\n"))
    assert shorten(factory, broken) is broken


def test_data_and_forms_go_where_they_do_not_matter(breaks: Breaks) -> None:
    text = "new 4 2 2 1 1\nadd 1\nappend 1 1 1 0000803f 0000803f\nappend 1 1 1 as list\n"
    factory = wrong_from(2)
    broken = breaks(lambda: replay(factory, text))
    assert shorten(factory, broken).trace == "new 1 2 1 1 1\nadd 0\nappend 0 0 2\n"


def test_the_search_ends_where_it_costs_too_much(breaks: Breaks, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    class Counted(wrong_from(40)):  # type: ignore[misc]
        def __init__(self, *sizes: Any) -> None:
            super().__init__(*sizes)
            runs.append(sizes)

    appends = "append 7 0 1\n" * 50
    broken = breaks(lambda: replay(Counted, f"new 99 1 1 1 1\nadd 7\n{appends}"))
    monkeypatch.setattr("tinyllm.testing.shrink.WORK", 300)
    found = shorten(Counted, broken)
    assert len(runs) < 12
    assert found.law == broken.law
    assert len(found.trace) <= len(broken.trace)


FULL = """
new 9 2 2 3 2
add 3
append 3 0 3
append 3 1 6
append 3 0 2 as strided
fork 3 1
append 3 0 1
free 1
append 3 1 3
append 3 0 3
fork 3 2
append 3 0 2
append 2 1 1
fork 3 1
append 3 1 2
append 1 1 1
append 3 0 2 ! OutOfBlocks
append 2 0 4 ! OutOfBlocks
append 1 0 3 ! OutOfBlocks
append 3 1 1
fork 3 4
append 4 0 2 ! OutOfBlocks
free 4
free 3
free 2
append 1 1 2
free 1
"""


class WritesIntoAFullPool(PagedKVCache):
    """A copy that is refused, and no block is free: it has written all the same."""

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        try:
            super().append(seq_id, layer, k, v)
        except OutOfBlocks:
            table = self._seqs[seq_id].table
            if not self._free and table and self._refs[table[-1]] > 1:
                self._k[layer, :, self._slots(table[-1])] = 7
            raise


class LosesWhatFillsThePool(PagedKVCache):
    """A pool that was full gets a block fewer back."""

    def free(self, seq_id: int) -> None:
        full = not self._closed and not self._free and len(self._seqs) > 1
        super().free(seq_id)
        if full and len(self._free) > 1:
            self._free.pop(0)


class CopiesOneLayerLess(PagedKVCache):
    """The copy that takes the last free block leaves out the last layer."""

    def _claim(self, plan: Any) -> list[int]:
        last = plan.need == len(self._free)
        blocks = super()._claim(plan)
        for old, new in zip(plan.blocks, blocks, strict=False):
            if last and old != new:
                self._v[-1, :, self._slots(new)] = 0
        return blocks


@pytest.mark.parametrize(
    ("factory", "lines"), [(WritesIntoAFullPool, 5), (LosesWhatFillsThePool, 5), (CopiesOneLayerLess, 5)]
)
def test_a_program_that_needs_a_full_pool_comes_down_to_a_few_lines(
    factory: type[PagedKVCache], lines: int, breaks: Breaks, again: Callable[[Factory, LawBroken], None]
) -> None:
    replay(PagedKVCache, FULL)
    found = shorten(factory, breaks(lambda: replay(factory, FULL)))
    assert len(found.trace.splitlines()) <= lines, found.trace
    again(factory, found)
