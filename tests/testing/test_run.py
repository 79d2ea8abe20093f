"""What a run asks of a cache beyond its contents: types, shapes, and which call is to blame."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinyllm.infer.paged import OutOfBlocks, PagedKVCache
from tinyllm.testing.contract import CAPABILITIES, Factory
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.run import Run, replay
from tinyllm.testing.trace import parse

Breaks = Callable[[Callable[[], object]], LawBroken]

SMALL = "new 4 2 2 1 1\nadd 0\nappend 0 0 3\nappend 0 1 1\n"


def with_gather(change: Callable[[Any], Any]) -> type[PagedKVCache]:
    class Changed(PagedKVCache):
        def gather(self, seq_id: int, layer: int) -> Any:
            return change(super().gather(seq_id, layer))

    return Changed


GATHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "three": (lambda pair: (*pair, pair[0]), "is a pair of arrays"),
    "none": (lambda _: None, "is a pair of arrays"),
    "rank": (lambda pair: (pair[0][0], pair[1]), r"float16 \[H, len, D\]"),
    "dtype of v": (lambda pair: (pair[0], pair[1].astype("f4")), r"float16 \[H, len, D\]"),
    "big-endian": (lambda pair: (pair[0].astype(">f2"), pair[1]), r"float16 \[H, len, D\]"),
    "token-major": (lambda pair: tuple(a.swapaxes(0, 1) for a in pair), "has shape"),
    "k twice": (lambda pair: (pair[0], pair[0].copy()), r"V of gather\(0, .\)\[0, 0, 0\] == -1"),
    "one short": (lambda pair: tuple(a[:, :-1] for a in pair), "has shape"),
}


@pytest.mark.parametrize("name", GATHERS)
def test_what_gather_returns_is_held_to_its_form(name: str, breaks: Breaks) -> None:
    change, words = GATHERS[name]
    factory = with_gather(change)
    broken = breaks(lambda: replay(factory, SMALL))
    assert broken.law in {3, 4, 13}  # 13 where the sequence is new, and not empty
    with pytest.raises(LawBroken, match=words):
        raise broken


def test_a_read_only_result_is_fine() -> None:
    def frozen(pair: Any) -> Any:
        for array in pair:
            array.flags.writeable = False
        return pair

    replay(with_gather(frozen), SMALL)


def test_memory_that_cannot_be_written_is_left_alone() -> None:
    def from_bytes(pair: Any) -> Any:
        return tuple(np.frombuffer(bytes(a), np.float16).reshape(a.shape) if a.size else a for a in pair)

    replay(with_gather(from_bytes), SMALL)


REFUSED = {
    "an OutOfBlocks that is none": ("add 0 ! ValueError", OutOfBlocks(1, 0), 15),
    "no OutOfBlocks": ("append 0 0 9 ! OutOfBlocks", ValueError("full"), 9),
    "another class": ("add 0 ! ValueError", KeyError(0), 15),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_of_another_class_is_a_finding(name: str, breaks: Breaks) -> None:
    line, error, law = REFUSED[name]
    run = replay(PagedKVCache, SMALL)

    class Other:
        def __getattr__(self, _: str) -> Any:
            def refuse(*_: Any) -> None:
                raise error

            return refuse

    run._cache = Other()
    broken = breaks(lambda: run.step(parse(line)[0]))
    assert (broken.law, broken.found) == (law, f"{type(error).__name__}: {error}")
    assert broken.__cause__ is error


def test_out_of_blocks_is_no_answer_to_a_bad_argument_even_without_exact_errors(breaks: Breaks) -> None:
    class Inexact(PagedKVCache):
        capabilities = frozenset(CAPABILITIES) - {"exact-errors"}

        def add_seq(self, seq_id: int) -> None:
            if seq_id in self._seqs:
                raise OutOfBlocks(1, 0)
            super().add_seq(seq_id)

    assert breaks(lambda: replay(Inexact, f"{SMALL}add 0 ! ValueError\n")).law == 15


def test_a_new_cache_replaces_the_old_one_unless_it_is_refused() -> None:
    run = replay(PagedKVCache, f"{SMALL}new 0 1 1 1 1 ! ValueError\nappend 0 0 1\n")
    assert run.oracle.lens(0) == [4, 1]
    again = replay(PagedKVCache, f"{SMALL}close\nnew 1 1 1 1 1\nadd 0\n")
    assert again.oracle.lens(0) == [0]
    assert not again.closed


def test_reads_are_steps_like_any_other() -> None:
    run = replay(PagedKVCache, f"{SMALL}table 0\nlen 0 1\ngather 0 0\nstats\n")
    assert [str(op) for op in run.ops[-4:]] == ["table 0", "len 0 1", "gather 0 0", "stats"]


def test_a_read_that_changes_something_is_a_finding(breaks: Breaks) -> None:
    class Peeks(PagedKVCache):
        def stats(self) -> dict[str, int]:
            if 0 in self._seqs and self._seqs[0].lens[0] == 3:
                self._k[0, 0, self._seqs[0].table[0] * 2] = 50
            return super().stats()

    assert breaks(lambda: replay(Peeks, f"{SMALL}stats\n")).law in {3, 4}


def test_the_first_finding_is_kept() -> None:
    kept: list[LawBroken] = []
    run = Run(with_gather(lambda _: None), kept)
    new, add, *_ = parse(SMALL)
    run.step(new)
    with pytest.raises(LawBroken) as caught:
        run.step(add)
    assert kept == [caught.value]
    assert kept[0].trace == "new 4 2 2 1 1\nadd 0\n"


def test_a_view_that_only_the_end_of_a_program_shows_is_told_as_the_ten_methods_fault(
    named: Callable[[str], Factory], breaks: Breaks
) -> None:
    broken = breaks(
        lambda: replay(named("wrong_caches:GathersAView"), "new 2 2 1 1 1\nadd 0\nappend 0 0 1\n")
    )
    assert (broken.law, broken.beyond) == (12, False)
