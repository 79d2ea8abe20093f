"""What a run asks of a cache beyond its contents: types, shapes, and which call is to blame."""

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinyllm.infer.paged import OutOfBlocks, PagedKVCache
from tinyllm.testing.check import run_directed, run_entry
from tinyllm.testing.contract import CAPABILITIES, Factory
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.observe import ROUNDS
from tinyllm.testing.run import Observer, Run, replay
from tinyllm.testing.trace import TooLarge, TraceError, encode, parse

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

    run._caller.cache = Other()
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

    class Keeps(Observer):
        def broke(self, run: Run, broken: LawBroken) -> None:
            assert run.ops
            kept.append(broken)

    run = Run(with_gather(lambda _: None), Keeps())
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


class Odd:
    """Cannot be copied, compared or shown."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, _: object) -> bool:
        raise RuntimeError

    def __deepcopy__(self, _: object) -> None:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError


class OddKey:
    def __eq__(self, _: object) -> bool:
        raise RuntimeError

    def __hash__(self) -> int:
        return hash("used")


EXTRAS: dict[str, Callable[[], dict[Any, Any]]] = {
    "a generator": lambda: {"more": (i for i in range(3))},
    "a lock": lambda: {"more": threading.Lock()},
    "a module": lambda: {"more": threading},
    "a function": lambda: {"more": lambda: 3},
    "an odd object": lambda: {"more": Odd()},
    "objects in a dict": lambda: {"more": {"a": object()}},
    "an array": lambda: {"more": np.arange(4)},
    "a number, another each time": lambda: {"more": time.perf_counter_ns()},
}


@pytest.mark.parametrize("name", EXTRAS)
def test_what_else_is_in_stats_is_the_engines_own_business(name: str, breaks: Breaks) -> None:
    class Says(PagedKVCache):
        def stats(self) -> dict[str, Any]:
            return super().stats() | EXTRAS[name]()

    replay(Says, f"{SMALL}append 0 0 9 ! OutOfBlocks\n")

    class Wrong(Says):
        def stats(self) -> dict[str, Any]:
            return super().stats() | {"used": 1.0}

    assert breaks(lambda: replay(Wrong, SMALL)).expected.startswith("stats() counts free, used")


def test_a_key_that_cannot_be_compared_hides_the_counts(breaks: Breaks) -> None:
    class Hides(PagedKVCache):
        def stats(self) -> dict[Any, Any]:
            return {OddKey(): 1, **super().stats()}

    broken = breaks(lambda: replay(Hides, SMALL))
    assert (broken.law, broken.expected) == (5, "stats() succeeds")


def test_a_dict_of_their_own_will_do() -> None:
    class Counts(dict[str, int]):
        def copy(self) -> Any:
            raise RuntimeError

        __eq__ = copy  # type: ignore[assignment]
        __hash__ = None

    class Own(PagedKVCache):
        def stats(self) -> dict[str, int]:
            return Counts(super().stats())

    replay(Own, SMALL)


WARNED = ("append", "add_seq", "fork", "seq_len", "gather", "stats")
LINES = f"{SMALL}append 0 1 1 {encode([1])} {encode([2])}\nfork 0 1\nadd 2\n"


def warns(method: str, category: type[Warning]) -> type[PagedKVCache]:
    def call(self: PagedKVCache, *args: Any) -> Any:
        warnings.warn("mind you", category, stacklevel=2)
        return getattr(PagedKVCache, method)(self, *args)

    return type("Warns", (PagedKVCache,), {method: call})


@pytest.mark.parametrize("method", WARNED)
@pytest.mark.parametrize("category", [UserWarning, DeprecationWarning, ResourceWarning])
@pytest.mark.parametrize("action", ["error", "always"])
def test_what_a_cache_has_to_say_is_no_finding(action: Any, category: type[Warning], method: str) -> None:
    factory = warns(method, category)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter(action)
        replay(factory, LINES)
        run_entry(factory, "test_hand_example_block_table")
        run_directed(factory, "other integers")
    assert heard
    assert {one.category for one in heard} == {category}


@pytest.mark.parametrize("action", ["error", "ignore"])
@pytest.mark.parametrize("lines", [SMALL, LINES.replace("append 0 0 3\n", "").replace("append 0 1 1\n", "")])
@pytest.mark.parametrize("method", ["append", "gather"])
def test_a_runtime_warning_is_law_3_on_every_line_that_rounds(
    action: Any, lines: str, method: str, breaks: Breaks
) -> None:
    factory = warns(method, RuntimeWarning)
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        broken = breaks(lambda: replay(factory, lines))
        plain = breaks(lambda: run_directed(factory, "other integers"))
    assert (broken.law, plain.law) == (3, 3)
    assert broken.expected.endswith(" gives no warning: rounding never does")
    assert broken.found == "RuntimeWarning: mind you"


@pytest.mark.parametrize("method", [name for name in WARNED if name not in ROUNDS])
def test_one_where_nothing_is_rounded_is_no_finding(method: str) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("error")
        replay(warns(method, RuntimeWarning), LINES)
    assert heard


def test_a_refused_append_gives_no_warning_either(breaks: Breaks) -> None:
    class Rounds(PagedKVCache):
        def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
            if np.shape(k)[1] > 8:
                warnings.warn("overflow", RuntimeWarning, stacklevel=2)
            super().append(seq_id, layer, k, v)

    assert breaks(lambda: replay(Rounds, f"{SMALL}append 0 0 9 ! OutOfBlocks\n")).law == 3


def test_a_pool_that_this_machine_has_no_room_for_is_no_broken_law(breaks: Breaks) -> None:
    class Small(PagedKVCache):
        def __init__(self, *_: int) -> None:
            raise MemoryError("no room")

    with pytest.raises(TooLarge, match=r"'new 100000 1024 8 8 128' needs more memory than .*: no room"):
        replay(Small, "new 100000 1024 8 8 128\n")
    assert breaks(lambda: replay(Small, SMALL)).law == 15, "for so little there is room"


def test_nothing_to_run_is_nothing_checked() -> None:
    for text in ("", "\n\n", "# nothing\n"):
        with pytest.raises(TraceError, match="there is no line to run"):
            replay(PagedKVCache, text)
