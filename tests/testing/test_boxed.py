"""Boxed numbers, layers and lengths beyond a word, and what NumPy may raise."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tinyllm.grading.bugs import FOLDER, load
from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.contract import Factory
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.power import factory_of
from tinyllm.testing.run import replay
from tinyllm.testing.shrink import shorten
from tinyllm.testing.trace import Op, parse

Breaks = Callable[[Callable[[], object]], LawBroken]
FAULTS = {bug.id: bug for bug in load(FOLDER / "field.toml")}


def planted(bug: str) -> Factory:
    factory: Factory = factory_of(
        FAULTS[bug].apply((FOLDER / "second.py").read_text(encoding="utf-8")), "second.py", "second"
    )
    return factory


def test_a_boxed_line_says_so_and_is_read_again() -> None:
    line = "append 3 0 9 as list ! OutOfBlocks boxed quiet"
    (op,) = parse(line)
    assert op == Op("append", (3, 0, 9), "list", None, "OutOfBlocks", True, None, True)
    assert str(op) == line
    assert [op.boxed for op in parse("add 0 boxed\nadd 1 quiet\nadd 2")] == [True, False, False]


BOXED = """
new 4 2 2 1 1 boxed
add 0 boxed
append 0 0 3 boxed
append 0 0 1
fork 0 1 boxed
truncate 1 2 boxed
table 0 boxed
len 0 1 boxed
gather 0 1 boxed
needed 1 0 3 boxed
pages 1 0 boxed
runs 0 0 boxed
append 0 5 1 ! IndexError boxed
add 0.5 ! TypeError boxed
free 7 ! KeyError boxed
free 0 boxed
"""


def test_a_right_cache_takes_boxed_numbers_for_what_they_are() -> None:
    run = replay(PagedKVCache, BOXED)
    assert run.oracle.lens(1) == [2, 0]


def test_an_object_that_is_itself_the_key_is_found_and_told_by_one_line(breaks: Breaks) -> None:
    factory = planted("f48")
    broken = shorten(factory, breaks(lambda: replay(factory, BOXED)))
    assert "add 0 boxed" in broken.trace
    assert broken.trace.count("boxed") == 1


def test_a_number_that_is_kept_is_the_callers(breaks: Breaks) -> None:
    class Keeps(PagedKVCache):
        """The layer that was used last is looked up when another one is not named."""

        last: Any = None

        def truncate(self, seq_id: int, length: int) -> None:
            super().truncate(seq_id, length)
            self.last = length if operator.index(length) == 1 else self.last

        def seq_len(self, seq_id: int, layer: int = 0) -> int:
            return super().seq_len(seq_id, layer) if self.last is None else int(self.last)

    program = "new 4 2 1 1 1\nadd 0\nappend 0 0 3\ntruncate 0 1"
    replay(Keeps, program)
    assert breaks(partial(replay, Keeps, f"{program} boxed\n")).law == 17


def test_an_underflow_is_no_error_whatever_numpy_is_told(breaks: Breaks) -> None:
    class Partly(PagedKVCache):
        def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
            with np.errstate(over="ignore", invalid="ignore"):
                pair = [np.asarray(a).astype(np.float16) for a in (k, v)]
            super().append(seq_id, layer, *pair)

    tiny = np.array([2.0**-25 * 1.5], "<f4").tobytes().hex()
    program = f"new 4 2 1 1 1\nadd 0\nappend 0 0 1 {tiny} {tiny}\n"
    replay(PagedKVCache, program)
    broken = breaks(lambda: replay(Partly, program))
    assert broken.law == 3
    assert "FloatingPointError: underflow" in broken.found
