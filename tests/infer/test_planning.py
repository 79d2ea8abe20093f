"""How many bytes, how many blocks, and what is wasted, counted out slot by slot."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.infer.paged import PagedKVCache
from tinyllm.infer.planning import (
    Waste,
    blocks_for_budget,
    blocks_for_lengths,
    bytes_per_block,
    bytes_per_token,
    waste,
)

SIZE = st.integers(1, 9)


def append(cache: PagedKVCache, seq_id: int, layer: int, tokens: int) -> None:
    chunk = np.ones((cache.n_kv_heads, tokens, cache.d_head))
    cache.append(seq_id, layer, chunk, chunk)


def test_a_model_that_is_known() -> None:
    """SmolLM2-135M: 30 layers, 3 key/value heads of 64 dimensions."""
    assert bytes_per_token(30, 3, 64) == 23_040
    assert bytes_per_token(30, 3, 64, itemsize=4) == 46_080
    assert bytes_per_block(16, 30, 3, 64) == 368_640
    assert blocks_for_budget(10**9, 16, 30, 3, 64) == 2712
    assert blocks_for_lengths([1, 16, 17, 0], 16) == 4


@given(SIZE, SIZE, SIZE, SIZE, SIZE)
def test_a_pool_takes_the_bytes_of_its_blocks(b: int, layers: int, heads: int, dims: int, n: int) -> None:
    with PagedKVCache(n, b, layers, heads, dims) as cache:
        assert cache._k.nbytes + cache._v.nbytes == n * bytes_per_block(b, layers, heads, dims)
    assert bytes_per_block(b, layers, heads, dims) == b * bytes_per_token(layers, heads, dims)


@given(st.integers(1, 10**7), SIZE, SIZE, SIZE, SIZE, st.sampled_from([1, 2, 4, 8]))
def test_a_budget_is_used_up_but_for_less_than_a_block(
    budget: int, b: int, layers: int, heads: int, dims: int, itemsize: int
) -> None:
    blocks, block = (
        blocks_for_budget(budget, b, layers, heads, dims, itemsize),
        bytes_per_block(b, layers, heads, dims, itemsize),
    )
    assert blocks * block <= budget < (blocks + 1) * block


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 17))
def test_lengths_take_as_many_blocks_as_a_pool_gives_them(lengths: list[int], b: int) -> None:
    cache = PagedKVCache(300, b, 1, 1, 1)
    for seq_id, length in enumerate(lengths):
        cache.add_seq(seq_id)
        if length:
            append(cache, seq_id, 0, length)
    assert blocks_for_lengths(iter(lengths), b) == cache.stats()["used"]


STEPS = st.lists(
    st.tuples(st.sampled_from(["append", "fork", "free"]), st.integers(0, 9), SIZE, st.integers(0, 2)),
    max_size=12,
)


@given(STEPS, st.integers(1, 17), st.sets(st.integers(0, 9)))
def test_waste_counts_each_slot_that_nobody_fills(
    steps: list[tuple[str, int, int, int]], b: int, chosen: set[int]
) -> None:
    """The oracle notes every slot that some sequence's position lies in."""
    cache = PagedKVCache(500, b, 3, 2, 5)
    cache.add_seq(0)
    live, unused = [0], 1
    for what, which, tokens, layer in steps:
        if what == "append" and live:
            append(cache, live[which % len(live)], layer, tokens)
        elif what == "fork" and live:
            cache.fork(live[which % len(live)], unused)
            live.append(unused)
            unused += 1
        elif what == "free" and live:
            cache.free(live.pop(which % len(live)))
    asked = [seq_id for i, seq_id in enumerate(live) if i in chosen]
    held, filled = set(), set()
    for seq_id in asked:
        table = cache.block_table(seq_id).tolist()
        held |= {(block, slot, layer) for block in table for slot in range(b) for layer in range(3)}
        for layer in range(3):
            filled |= {(table[p // b], p % b, layer) for p in range(cache.seq_len(seq_id, layer))}
    assert filled <= held
    empty = len(held - filled)
    found = waste(cache, iter(asked + asked))
    assert found.bytes == empty * 2 * 2 * 5 * 2  # K and V, heads, dimensions, bytes of a value
    assert found.share == (empty / len(held) if held else 0)
    assert 0 <= found.share < 1


def test_waste_of_a_full_pool_an_empty_one_and_a_fork() -> None:
    cache = PagedKVCache(10, 4, 2, 3, 8)
    slot = 2 * 3 * 8 * 2
    cache.add_seq(0)
    assert waste(cache, []) == waste(cache, [0]) == Waste(0, 0.0)
    for layer in range(2):
        append(cache, 0, layer, 4)
    assert waste(cache, [0]) == Waste(0, 0.0)
    append(cache, 0, 0, 1)  # layer 1 lags: 3 slots of one layer are empty, and 4 of the other
    assert waste(cache, [0]) == Waste(7 * slot, 7 / 16)
    cache.fork(0, 1)
    assert waste(cache, [0, 1]) == waste(cache, [0])  # shared blocks count once
    append(cache, 1, 1, 1)  # copies the last block
    assert waste(cache, [0, 1]) == Waste(13 * slot, 13 / 24)
    assert waste(cache, [1]) == Waste(6 * slot, 6 / 16)


def test_a_shared_block_is_as_full_as_its_fullest_holder_says() -> None:
    """No append leads there, but a cache that can also shorten a sequence would."""

    class Shortened:
        block_size, n_layers, n_kv_heads, d_head = 4, 2, 1, 1

        def block_table(self, seq_id: int) -> Any:
            return np.array([[7, 3], [7]][seq_id], np.int32)

        def seq_len(self, seq_id: int, layer: int) -> int:
            return [[5, 1], [3, 2]][seq_id][layer]

    cache: Any = Shortened()
    for order in ([0, 1], [1, 0]):
        assert waste(cache, order) == Waste((2 + 3 + 4) * 4, 9 / 16)
    assert waste(cache, [1]) == Waste(3 * 4, 3 / 8)


@pytest.mark.parametrize("position", range(4))
def test_sizes_are_checked(position: int) -> None:
    name = ["n_layers", "n_kv_heads", "d_head", "itemsize"][position]
    bad: list[tuple[Any, type[Exception]]] = [(0, ValueError), (-1, ValueError), (2.0, TypeError)]
    for value, error in bad:
        sizes: list[Any] = [3, 3, 3, 3]
        sizes[position] = value
        functions: list[tuple[Callable[..., int], list[int]]] = [
            (bytes_per_token, []),
            (bytes_per_block, [2]),
            (blocks_for_budget, [9, 2]),
        ]
        for function, before in functions:
            with pytest.raises(error, match=name):
                function(*before, *sizes)


def test_other_arguments_are_checked() -> None:
    cache = PagedKVCache(10, 4, 2, 3, 8)
    not_integer: Any = 1.5
    bad: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: bytes_per_block(0, 1, 1, 1), ValueError, "block_size is 0; it must be at least 1"),
        (lambda: blocks_for_lengths([1], 0), ValueError, "block_size is 0"),
        (lambda: blocks_for_budget(0, 1, 1, 1, 1), ValueError, "budget is 0; it must be at least 1"),
        (lambda: blocks_for_budget(not_integer, 1, 1, 1, 1), TypeError, "budget must be an integer"),
        (lambda: blocks_for_lengths([3, -1], 2), ValueError, "length is -1; it must be at least 0"),
        (lambda: blocks_for_lengths([not_integer], 2), TypeError, "length must be an integer, not 1.5"),
        (lambda: waste(cache, [5]), KeyError, "sequence 5"),
        (lambda: waste(cache, [not_integer]), TypeError, "seq_id must be an integer"),
    ]
    for call, error, message in bad:
        with pytest.raises(error, match=message):
            call()
    cache.close()
    with pytest.raises(ValueError, match="closed"):
        waste(cache, [0])
    assert blocks_for_budget(1, 1, 1, 1, 1) == 0
    assert blocks_for_lengths([], 3) == 0
    assert blocks_for_budget(2**70, 1, 1, 1, 1) == 2**68
    assert type(blocks_for_lengths(np.array([3, 4], np.int8), 3)) is int
