"""What the kit asks of no other cache: zeros in the pool, memory, this cache's own errors and words.

The laws that hold for every cache are checked by the kit (tests/testing/test_check.py).
"""

import contextlib
import copy
import gc
import os
import pickle
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tinyllm.infer.paged
from tinyllm.grading.bugs import load_set
from tinyllm.infer.paged import OutOfBlocks, PagedKVCache

Array = NDArray[Any]
STATM = Path("/proc/self/statm")
MIB = 2**20
SIZES = {"num_blocks": 6, "block_size": 2, "n_layers": 2, "n_kv_heads": 2, "d_head": 3}


def tokens(count: int, first: float = 1, heads: int = 2, dims: int = 3) -> Array:
    """K `[H, T, D]` of distinct values other than 0; V is its negative."""
    return first + np.arange(heads * count * dims, dtype=np.float32).reshape(heads, count, dims)


def put(cache: PagedKVCache, seq: int, count: int, layer: int = 0, first: float = 1) -> None:
    k = tokens(count, first, cache.n_kv_heads, cache.d_head)
    cache.append(seq, layer, k, -k)


def view(cache: PagedKVCache, live: tuple[int, ...]) -> tuple[object, ...]:
    """Everything that a caller can observe."""
    layers = range(cache.n_layers)
    arrays = [a for seq in live for layer in layers for a in cache.gather(seq, layer)]
    lens = [cache.seq_len(seq, layer) for seq in live for layer in layers]
    tables = [cache.block_table(seq).tolist() for seq in live]
    return cache.stats(), lens, tables, [(a.shape, a.tobytes()) for a in arrays]


def queue_of_free_blocks() -> type[PagedKVCache]:
    """The cache with another order of free blocks, in which a recycled block comes out in any place."""
    (order,) = [bug for bug in load_set("course") if bug.id == "order"]
    path = tinyllm.infer.paged.__file__
    module = ModuleType("queue_of_free_blocks")
    source = order.apply(Path(path).read_text(encoding="utf-8"))
    exec(compile(source, path, "exec"), module.__dict__)  # under the same name, for the measure of coverage
    module.__dict__["OutOfBlocks"] = OutOfBlocks  # one class for both orders
    made: type[PagedKVCache] = module.PagedKVCache
    return made


@pytest.fixture(params=["stack", "queue"])
def cache(request: pytest.FixtureRequest) -> Iterator[PagedKVCache]:
    make = PagedKVCache if request.param == "stack" else queue_of_free_blocks()
    with make(**SIZES) as made:
        yield made


def stray(cache: PagedKVCache, live: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(sequence, layer, slot in the table) of the slots in held blocks that should read zero, but do not."""
    found = []
    for seq in live:
        table = cache.block_table(seq)
        slots = (table[:, None] * cache.block_size + np.arange(cache.block_size)).ravel()
        for layer in range(cache.n_layers):
            for pool in (cache._k, cache._v):
                empty = slots[cache.seq_len(seq, layer) :]
                dirty = pool[layer][:, empty].any(axis=(0, 2))
                found += [(seq, layer, int(at)) for at in np.flatnonzero(dirty)]
    return found


def test_recycled_blocks_read_zero_where_no_layer_has_appended(cache: PagedKVCache) -> None:
    cache.add_seq(0)
    for layer in range(2):
        put(cache, 0, 12, layer)  # every slot of every block is used once
    cache.free(0)
    cache.add_seq(1)
    put(cache, 1, 3, 1)
    assert stray(cache, (1,)) == []
    cache.fork(1, 2)
    put(cache, 2, 2, 1)  # a copied block and a fresh one
    put(cache, 1, 1, 0)
    assert stray(cache, (1, 2)) == []
    put(cache, 1, 5, 0)
    assert stray(cache, (1, 2)) == []
    assert cache.num_free_blocks() == 0


@pytest.mark.parametrize("seed", range(4))
def test_slots_read_zero_through_a_long_run(cache: PagedKVCache, seed: int) -> None:
    rng = np.random.default_rng(seed)
    live: list[int] = []
    for _ in range(300):
        move, unused = rng.random(), [seq for seq in range(4) if seq not in live]
        seq = int(rng.choice(live)) if live else 0
        if live and (move < 0.25 or not unused):
            cache.free(seq)
            live.remove(seq)
        elif live and move < 0.4:
            cache.fork(seq, unused[0])
            live.append(unused[0])
        elif live and move < 0.9:
            with contextlib.suppress(OutOfBlocks):
                put(cache, seq, int(rng.integers(1, 6)), int(rng.integers(2)))
        elif unused:
            cache.add_seq(unused[0])
            live.append(unused[0])
        assert stray(cache, tuple(live)) == []


def test_out_of_blocks_says_how_many_were_needed_and_free(cache: PagedKVCache) -> None:
    cache.add_seq(0)
    put(cache, 0, 5)
    cache.fork(0, 1)
    with pytest.raises(OutOfBlocks, match="needs 5 blocks, but only 3 are free") as caught:
        put(cache, 1, 8)  # a copy of the shared tail, and four new blocks
    assert isinstance(caught.value, RuntimeError)
    assert (caught.value.needed, caught.value.free) == (5, 3)


def test_out_of_blocks_survives_a_pickle() -> None:
    again = pickle.loads(pickle.dumps(OutOfBlocks(4, 1)))
    assert (type(again), again.needed, again.free) == (OutOfBlocks, 4, 1)
    assert str(again) == str(OutOfBlocks(4, 1))
    assert "4" in repr(again)


CALLS: dict[str, Callable[[PagedKVCache], object]] = {
    "add_seq": lambda c: c.add_seq(5),
    "fork": lambda c: c.fork(0, 5),
    "append": lambda c: put(c, 0, 1),
    "block_table": lambda c: c.block_table(0),
    "seq_len": lambda c: c.seq_len(0),
    "gather": lambda c: c.gather(0, 0),
    "free": lambda c: c.free(0),
    "stats": lambda c: c.stats(),
    "num_free_blocks": lambda c: c.num_free_blocks(),
    "__enter__": lambda c: c.__enter__(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_cache_refuses_every_call_as_a_closed_file_does(name: str, cache: PagedKVCache) -> None:
    cache.add_seq(0)
    CALLS["append"](cache)
    cache.close()
    with pytest.raises(ValueError, match="closed"):
        CALLS[name](cache)


def test_closing_twice_is_fine(cache: PagedKVCache) -> None:
    cache.close()
    cache.close()


def test_a_with_block_closes_also_when_it_is_left_by_an_error() -> None:
    with PagedKVCache(**SIZES) as cache:
        assert cache.num_free_blocks() == 6
    with pytest.raises(ValueError, match="closed"):
        cache.stats()
    with pytest.raises(OSError, match="mine"), PagedKVCache(**SIZES) as cache:
        raise OSError("mine")
    with pytest.raises(ValueError, match="closed"):
        cache.stats()


def test_what_was_gathered_outlives_the_cache(cache: PagedKVCache) -> None:
    cache.add_seq(0)
    put(cache, 0, 5)
    k, v = cache.gather(0, 0)
    table = cache.block_table(0)
    cache.close()
    np.testing.assert_array_equal(k, tokens(5))
    np.testing.assert_array_equal(v, -tokens(5))
    assert len(table) == 3


def resident() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not STATM.exists(), reason="no /proc to read resident memory from")
@pytest.mark.parametrize("how", ["close", "with", "del"])
def test_the_memory_goes_back_to_the_system(how: str) -> None:
    ones = np.ones((1, 2**13, 2**10), np.float16)  # 16 MiB each of K and V
    start = resident()
    cache = PagedKVCache(4, 2**11, 1, 1, 2**10)
    cache.add_seq(0)
    cache.append(0, 0, ones, ones)
    assert resident() - start > 31 * MIB
    alive = weakref.ref(cache)
    if how == "close":
        cache.close()
    elif how == "with":
        with cache:
            pass
    else:
        del cache
        gc.collect()
        assert alive() is None
    assert resident() - start < 8 * MIB


def test_repr_counts_while_open_and_never_raises() -> None:
    cache = PagedKVCache(**SIZES)
    cache.add_seq(0)
    put(cache, 0, 3)
    assert repr(cache) == "<PagedKVCache: 4 of 6 blocks free, 1 sequences>"
    cache.close()
    assert repr(cache) == "<PagedKVCache: closed>"
    half_built = PagedKVCache.__new__(PagedKVCache)
    assert repr(half_built) == "<PagedKVCache: closed>"
    with pytest.raises(ValueError, match="d_head is 0"):
        half_built.__init__(4, 2, 1, 1, 0)  # type: ignore[misc]
    assert repr(half_built) == "<PagedKVCache: closed>"
    half_built.close()


def test_ids_are_integers_however_they_come(cache: PagedKVCache) -> None:
    cache.add_seq(np.int64(3))  # type: ignore[arg-type]
    cache.fork(3, True)
    cache.append(np.uint8(1), np.int32(1), tokens(3), tokens(3))  # type: ignore[arg-type]
    assert cache.seq_len(1, 1) == cache.seq_len(True, np.int8(1)) == 3  # type: ignore[arg-type]
    assert cache.gather(True, np.uint64(1))[0].shape == (2, 3, 3)  # type: ignore[arg-type]
    assert cache.block_table(np.int16(1)).shape == (2,)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sequence 3 is live"):
        cache.add_seq(3)
    with pytest.raises(ValueError, match=r"sequence 1 is live; an id can be used again once it is freed"):
        cache.add_seq(True)
    cache.free(np.int64(3))  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="sequence 3 is not one of the 1 live ones"):
        cache.seq_len(3)


def test_any_integer_is_an_id(cache: PagedKVCache) -> None:
    for seq in (-1, -(2**70), 2**70):
        cache.add_seq(seq)
        put(cache, seq, 2)
    assert cache.num_free_blocks() == 3


def test_sizes_may_be_any_integers() -> None:
    cache = PagedKVCache(np.int64(4), np.uint8(2), np.int16(200), np.int8(1), np.array(1))  # type: ignore[arg-type]
    cache.add_seq(0)
    put(cache, 0, 3, 199)
    assert cache.gather(0, 199)[0].ravel().tolist() == [1, 2, 3]
    assert {type(getattr(cache, name)) for name in SIZES} == {int}


@pytest.mark.parametrize("name", SIZES)
def test_a_wrong_size_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        PagedKVCache(**{**SIZES, name: 0})
    with pytest.raises(TypeError, match=f"{name} must be an integer, not 2.0"):
        PagedKVCache(**{**SIZES, name: 2.0})  # type: ignore[arg-type]


def test_a_block_id_must_fit_into_a_table() -> None:
    with pytest.raises(ValueError, match="num_blocks is 2147483648; it must be at most 2147483647"):
        PagedKVCache(2**31, 1, 1, 1, 1)


def test_an_empty_chunk_is_refused_by_name(cache: PagedKVCache) -> None:
    cache.add_seq(0)
    with pytest.raises(ValueError, match="T is 0; it must be at least 1"):
        put(cache, 0, 0)
    assert view(cache, (0,))[1] == [0, 0]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda how: how.__name__)
def test_a_copy_is_refused_and_says_what_to_do(how: Callable[[Any], object]) -> None:
    class Own(PagedKVCache):
        pass

    for cls in (PagedKVCache, Own):
        with cls(**SIZES) as cache:
            cache.add_seq(0)
            put(cache, 0, 3)
            before = view(cache, (0,))
            for held in (cache, [cache]):
                if held is cache or how is not copy.copy:
                    with pytest.raises(
                        TypeError, match=f"^a {cls.__name__} can be neither copied .* fork a seq"
                    ):
                        how(held)
            assert view(cache, (0,)) == before


def test_views_in_place_stay_read_only(cache: PagedKVCache) -> None:
    cache.add_seq(0)
    put(cache, 0, 5)
    for pair in cache.gather_runs(0, 0):
        bases: list[Any] = [array.base for array in pair]
        for part in (*pair, *bases):
            with pytest.raises(ValueError, match="WRITEABLE"):
                part.flags.writeable = True
    put(cache, 0, 1)  # the cache itself still writes
    assert cache.seq_len(0) == 6


def test_the_picture_of_an_append_is_what_happens() -> None:
    text = str(PagedKVCache.append.__doc__)
    rows = dict(line.split(maxsplit=1) for line in text.splitlines() if "table [" in line)
    cache = PagedKVCache(8, 2, 1, 1, 1)
    cache.add_seq(0)
    letters = np.arange(8.0).reshape(1, 8, 1)
    cache.append(0, 0, letters[:, :3], letters[:, :3])
    cache.fork(0, 1)
    assert rows["before"].startswith(f"table {cache.block_table(0).tolist()} ")
    plan = cache._plan(cache._seqs[0].table, 3, 8)
    said = ", ".join(f"{name} {value}" for name, value in plan._asdict().items())
    assert f"plan    {said}\n" in text
    cache.append(0, 0, letters[:, 3:], letters[:, 3:])
    assert rows["after"].startswith(f"table {cache.block_table(0).tolist()} ")
    assert cache.gather(0, 0)[0].ravel().tolist() == list(range(8))


def test_a_page_table_covers_the_length_and_no_more() -> None:
    cache = PagedKVCache(16, 2, 2, 1, 1)
    for seq, length in enumerate([5, 4, 0, 1, 2]):
        cache.add_seq(seq)
        if seq == 1:  # a layer that is ahead
            cache.append(seq, 1, np.ones((1, 7, 1)), np.ones((1, 7, 1)))
        if length:
            cache.append(seq, 0, np.ones((1, length, 1)), np.ones((1, length, 1)))
    indptr, indices, last_page_len = cache.page_table(range(5), 0)
    tables = [cache.block_table(seq).tolist() for seq in range(5)]
    assert len(tables[1]) == 4
    assert indptr.tolist() == [0, 3, 5, 5, 6, 7]
    assert indices.tolist() == tables[0] + tables[1][:2] + tables[3] + tables[4]
    assert last_page_len.tolist() == [1, 2, 0, 1, 2]


def test_blocks_of_a_sequence_that_grows_alone_are_one_run() -> None:
    """The reference hands out new blocks in their order; other caches may do as they like."""
    cache = PagedKVCache(8, 2, 1, 2, 3)
    cache.add_seq(0)
    cache.append(0, 0, np.ones((2, 7, 3)), np.ones((2, 7, 3)))
    assert [k.shape for k, _ in cache.gather_runs(0, 0)] == [(2, 7, 3)]


def test_the_books_take_as_much_as_the_docstring_says() -> None:
    tracemalloc.start()
    try:
        cache = PagedKVCache(2**16, 1, 1, 1, 1)
        held = tracemalloc.get_traced_memory()[0] / cache.num_blocks
    finally:
        tracemalloc.stop()
    assert f"{round(held)} bytes a block" in str(PagedKVCache.__doc__)
