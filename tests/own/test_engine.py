"""What engines ask beyond the ten methods: admission, rollback, page tables, books, runs (laws 16-20)."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tinyllm.infer.paged import OutOfBlocks, PagedKVCache

Array = NDArray[Any]


def tokens(count: int, first: float = 1) -> Array:
    return first + np.arange(2 * count * 3, dtype=np.float32).reshape(2, count, 3)


def made() -> PagedKVCache:
    """Sequence 0 with layers of 5 and 2 positions, its fork 1, and 2, which is empty; eight blocks of two."""
    cache = PagedKVCache(8, 2, 2, 2, 3)
    cache.add_seq(0)
    cache.append(0, 0, tokens(5), -tokens(5))
    cache.append(0, 1, tokens(2, 50), -tokens(2, 50))
    cache.fork(0, 1)
    cache.add_seq(2)
    return cache


@pytest.mark.parametrize(
    ("seq", "layer", "count", "need"),
    [(0, 0, 1, 1), (0, 0, 2, 2), (0, 1, 1, 1), (0, 1, 5, 3), (2, 0, 4, 2), (2, 1, 99, 50)],
)
def test_blocks_needed_is_what_an_append_takes(seq: int, layer: int, count: int, need: int) -> None:
    cache = made()
    assert cache.blocks_needed(seq, layer, count) == need
    assert cache.num_free_blocks() == 5
    if need > 5:
        with pytest.raises(OutOfBlocks) as info:
            cache.append(seq, layer, tokens(count), tokens(count))
        assert (info.value.needed, info.value.free) == (need, 5)
    else:
        cache.append(seq, layer, tokens(count), tokens(count))
        assert cache.num_free_blocks() == 5 - need


def test_lists_are_refused_before_they_become_arrays() -> None:
    """Values that no array of numbers can hold are never looked at."""
    cache = made()
    lists = [[["no number"] * 3] * 15] * 2
    with pytest.raises(OutOfBlocks) as info:
        cache.append(0, 1, lists, lists)
    assert (info.value.needed, info.value.free) == (8, 5)
    with pytest.raises(TypeError, match="k must hold integers or floats"):
        cache.append(2, 0, [row[:10] for row in lists], [row[:10] for row in lists])


BAD: list[tuple[Callable[[PagedKVCache], object], type[Exception], str]] = [
    (lambda c: c.blocks_needed(0, 0, 0), ValueError, "tokens is 0; it must be at least 1"),
    (lambda c: c.blocks_needed(0, 0, 1.5), TypeError, "tokens must be an integer"),  # type: ignore[arg-type]
    (lambda c: c.blocks_needed(9, 0, 1), KeyError, "sequence 9 is not one of the 3 live ones"),
    (lambda c: c.blocks_needed(0, 2, 1), IndexError, r"layer 2 is outside \[0, 2\)"),
    (lambda c: c.truncate(0, 6), ValueError, r"length 6 is outside \[0, 5\], the longest layer's length"),
    (lambda c: c.truncate(0, -1), ValueError, r"length -1 is outside \[0, 5\]"),
    (lambda c: c.truncate(2, 1), ValueError, r"length 1 is outside \[0, 0\]"),
    (lambda c: c.truncate(9, 0), KeyError, "sequence 9"),
    (lambda c: c.truncate(0, 1.0), TypeError, "length must be an integer"),  # type: ignore[arg-type]
    (lambda c: c.truncate("0", 1), TypeError, "seq_id must be an integer"),  # type: ignore[arg-type]
    (lambda c: c.page_table([0, 9], 0), KeyError, "sequence 9"),
    (lambda c: c.page_table([0], -1), IndexError, r"layer -1 is outside \[0, 2\)"),
    (lambda c: c.page_table([0.5], 0), TypeError, "seq_id must be an integer"),  # type: ignore[list-item]
    (lambda c: c.gather_runs(9, 0), KeyError, "sequence 9"),
    (lambda c: c.gather_runs(0, 2), IndexError, "layer 2"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_a_bad_argument_is_named_and_changes_nothing(
    call: Callable[[PagedKVCache], object], error: type[Exception], message: str
) -> None:
    cache = made()
    with pytest.raises(error, match=message):
        call(cache)
    cache.check()
    assert [cache.seq_len(0, layer) for layer in (0, 1)] == [5, 2]
    assert cache.num_free_blocks() == 5


@pytest.mark.parametrize("length", range(6))
def test_a_rollback_is_the_owners_alone(length: int) -> None:
    cache = made()
    cache.truncate(1, length)
    assert [cache.seq_len(1, layer) for layer in (0, 1)] == [min(5, length), min(2, length)]
    assert len(cache.block_table(1)) == -(-length // 2)
    np.testing.assert_array_equal(cache.gather(1, 0)[0], tokens(5)[:, :length])
    np.testing.assert_array_equal(cache.gather(1, 1)[1], -tokens(2, 50)[:, :length])
    np.testing.assert_array_equal(cache.gather(0, 0)[0], tokens(5))
    assert cache.num_free_blocks() == 5
    cache.append(
        1, 0, tokens(3, 900), tokens(3, 900)
    )  # over what was cut: in a copy, for the block is shared
    np.testing.assert_array_equal(cache.gather(0, 0)[0], tokens(5))
    both = np.concatenate([tokens(5)[:, :length], tokens(3, 900)], axis=1)
    np.testing.assert_array_equal(cache.gather(1, 0)[0], both)
    cache.free(0)
    cache.check()
    assert cache.num_free_blocks() == 8 - -(-(length + 3) // 2)


def test_a_rollback_of_the_last_holder_frees_and_writes_nothing() -> None:
    cache = made()
    cache.free(1)
    before = cache._k.copy()
    cache.truncate(0, 1)
    np.testing.assert_array_equal(cache._k, before)
    assert cache.num_free_blocks() == 7
    cache.truncate(0, 0)
    assert cache.num_free_blocks() == 8
    assert cache.block_table(0).size == 0


def test_a_page_table_is_flashinfers() -> None:
    cache = made()
    table = cache.block_table(0).tolist()
    for layer, pages, last in ((0, table, 1), (1, table[:1], 2)):
        indptr, indices, lengths = cache.page_table([0, 2, 1, 0], layer)
        assert indptr.tolist() == [0, len(pages), len(pages), 2 * len(pages), 3 * len(pages)]
        assert indices.tolist() == pages * 3
        assert lengths.tolist() == [last, 0, last, last]
        assert {a.dtype for a in (indptr, indices, lengths)} == {np.dtype(np.int32)}
    assert [a.tolist() for a in cache.page_table([], 0)] == [[0], [], []]
    assert [a.dtype.name for a in cache.page_table(iter(()), 0)] == ["int32"] * 3


ops = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(1, 5), st.booleans()), max_size=25)


@given(ops, st.integers(1, 5))
def test_gather_can_be_rebuilt_from_a_page_table_and_from_runs(
    ops: list[tuple[int, int, int, bool]], size: int
) -> None:
    cache = PagedKVCache(12, size, 2, 2, 3)
    live = [0]
    cache.add_seq(0)
    for number, (pick, layer, count, back) in enumerate(ops, 1):
        seq = live[pick % len(live)]
        if back:
            cache.fork(seq, number)
            live.append(number)
            cache.truncate(number, min(count, max(cache.seq_len(seq, layer) for layer in (0, 1))))
        elif cache.blocks_needed(seq, layer, count) <= cache.num_free_blocks():
            cache.append(seq, layer, tokens(count, number), -tokens(count, number))
    cache.check()
    for layer in (0, 1):
        pool = cache._k[layer].reshape(2, 12, size, 3)
        indptr, indices, last = cache.page_table(live, layer)
        for i, seq in enumerate(live):
            k, v = cache.gather(seq, layer)
            pages = indices[indptr[i] : indptr[i + 1]]
            length = max(0, len(pages) - 1) * size + int(last[i])
            np.testing.assert_array_equal(pool[:, pages].reshape(2, -1, 3)[:, :length], k)
            runs = cache.gather_runs(seq, layer)
            assert bool(runs) == bool(k.size)
            for whole, pieces in ((k, [k for k, _ in runs]), (v, [v for _, v in runs])):
                np.testing.assert_array_equal(np.concatenate([whole[:, :0], *pieces], axis=1), whole)
                assert all(np.shares_memory(p, cache._k) or np.shares_memory(p, cache._v) for p in pieces)
                assert not any(piece.flags.writeable for piece in pieces)


def test_the_pool_itself_stays_writable() -> None:
    cache = made()
    cache.gather_runs(0, 0)
    cache.append(2, 0, tokens(2), tokens(2))
    assert cache._k.flags.writeable


BROKEN: dict[str, tuple[Callable[[PagedKVCache, list[int], list[int]], object], str]] = {
    "a block lost": (lambda _c, free, _: free.pop(), "law 5: 4 free and 3 held of 8 blocks"),
    "a block free twice": (
        lambda _c, free, _: swap(free, 0, free[1]),
        "^law 6: a block is free twice, or free and held, or not of this pool$",
    ),
    "a block free and held": (
        lambda _c, free, table: swap(free, 0, table[0]),
        "law 6: a block is free twice,",
    ),
    "a block of nowhere": (lambda _c, free, _: swap(free, 0, 8), "law 6: .* or not of this pool"),
    "a negative block": (lambda _c, free, _: swap(free, 0, -1), "law 6: .* or not of this pool"),
    "a count too high": (
        lambda c, _, table: swap(c._refs, table[0], 3),
        r"law 6: block \d is counted 3 times, and held by 2",
    ),
    "a free block counted": (
        lambda c, free, _: swap(c._refs, free[0], 1),
        r"law 6: block \d is counted 1 times, and held by 0",
    ),
    "a table too long": (
        lambda c, free, _: c._seqs[2].table.append(free[0]),
        "law 2: sequence 2 of 0 positions has 1 blocks",
    ),
    "a layer too long": (
        lambda c, *_: swap(c._seqs[2].lens, 1, 3),
        "law 2: sequence 2 of 3 positions has 0 blocks",
    ),
    "a block twice": (
        lambda _c, _, table: swap(table, 1, table[0]),
        "law 6: the table of sequence 0 holds a block twice",
    ),
}


def swap(items: list[int], at: int, value: int) -> None:
    items[at] = value


@pytest.mark.parametrize("name", BROKEN)
def test_the_books_show_what_is_wrong(name: str) -> None:
    cache = made()
    cache.check()
    spoil, message = BROKEN[name]
    spoil(cache, cache._free, cache._seqs[0].table)
    with pytest.raises(AssertionError, match=message):
        cache.check()


def test_the_pool_is_drawn() -> None:
    cache = made()
    cache.append(1, 0, tokens(1), tokens(1))
    holders = cache.block_table(0).tolist() + cache.block_table(1).tolist()
    drawn = "".join(".#2"[holders.count(block)] for block in range(8))
    assert sorted(drawn) == sorted("22##....")
    assert cache.describe() == f"<PagedKVCache: 4 of 8 blocks free, 3 sequences>\n       0  {drawn}\n"


def test_a_drawing_has_a_character_a_block_and_64_a_line() -> None:
    cache = PagedKVCache(66, 1, 1, 1, 1)
    cache._refs = [0, 1, 2, 9, 10, 300, *[0] * 60]
    assert cache.describe().partition("\n")[2] == f"       0  .#29++{'.' * 58}\n      64  ..\n"


def test_a_cache_is_neither_copied_nor_pickled() -> None:
    said = "a PagedKVCache can be neither copied nor pickled, for its pool is its own; fork a sequence, or"
    with pytest.raises(TypeError, match=f"^{said} append what gather returns to another cache$"):
        copy.copy(made())


def test_closed_means_closed() -> None:
    cache = made()
    sizes = vars(cache).keys() - {"_k", "_v", "_read_k", "_read_v", "_refs", "_free", "_seqs"}
    cache.close()
    assert vars(cache).keys() == sizes  # nothing of the pool is kept
    calls: list[Callable[[], object]] = [
        lambda: cache.blocks_needed(0, 0, 1),
        lambda: cache.truncate(0, 0),
        lambda: cache.page_table([], 0),
        lambda: cache.gather_runs(0, 0),
        cache.check,
        cache.describe,
    ]
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()
