"""Attention on either cache, both ways, against float64 and one query at a time."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tinyllm.infer import attention
from tinyllm.infer.attention import Attention, as_float32, dense, gathered, in_place, runs_of, tiled
from tinyllm.infer.kvcache import KVCache
from tinyllm.infer.paged import PagedKVCache
from tinyllm.llm.llama import Llama, PagedSequence, toy

Floats = NDArray[np.floating[Any]]
WAYS: list[Attention] = [gathered, in_place]
EPS = 2.0**-23
LAYER = 1  # the layer that is read; layer 0 holds something else


def oracle(q: Floats, k: Floats, v: Floats) -> NDArray[np.float64]:
    """Each query by itself, over what it sees and nothing else."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    (heads, tokens, dims), groups, n = q.shape, len(k), k.shape[1]
    out = np.empty(q.shape)
    for head in range(heads):
        group = head * groups // heads
        for t in range(tokens):
            seen = n - tokens + t + 1
            scores = k[group, :seen] @ q[head, t] / math.sqrt(dims)
            weights = np.exp(scores - scores.max())
            out[head, t] = weights @ v[group, :seen] / weights.sum()
    return out


def tolerance(q: Floats, k: Floats, v: Floats) -> float:
    """What rounding to float32 may cost: an error in a score is a relative error in a weight."""
    q, k, v = (np.abs(x.astype(np.float64)) for x in (q, k, v))
    queries = q.reshape(len(k), -1, q.shape[2])
    highest = (queries @ k.swapaxes(1, 2)).max() / math.sqrt(q.shape[2])
    return float(EPS * (4 * (q.shape[2] + 8) * (1 + highest) + 4 * k.shape[1] + 20) * v.max())


def assert_same_bits(a: Floats, b: Floats) -> None:
    """NaN equals NaN; otherwise every bit counts, of -0.0 too."""
    assert a.dtype == b.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    same = np.where(np.isnan(a), 0, a.view(np.uint32)) == np.where(np.isnan(b), 0, b.view(np.uint32))
    assert same.all()


@contextmanager
def small(tile: int, few: int) -> Iterator[None]:
    """Small tiles, casts by shifting, and prompts in parts as long as a tile, for little data."""
    with mock.patch.multiple(attention, TILE=tile, FEW=few, QUERIES=tile):
        yield


@dataclass
class Twins:
    """Sequences of a pool, each beside a contiguous cache and the arrays it was made of."""

    pool: PagedKVCache
    rng: np.random.Generator
    scale: float
    arrays: dict[int, tuple[NDArray[np.float16], NDArray[np.float16]]]

    def append(self, seq_id: int, tokens: int) -> None:
        pool = self.pool
        shape = (pool.n_kv_heads, tokens, pool.d_head)
        k, v = ((self.rng.standard_normal(shape) * self.scale).astype(np.float16) for _ in range(2))
        pool.append(seq_id, 0, v, k)
        pool.append(seq_id, LAYER, k, v)
        before = self.arrays[seq_id]
        self.arrays[seq_id] = np.concatenate([before[0], k], 1), np.concatenate([before[1], v], 1)

    def fork(self, seq_id: int) -> None:
        child = len(self.arrays)
        self.pool.fork(seq_id, child)
        self.arrays[child] = self.arrays[seq_id]

    def contiguous(self, seq_id: int) -> KVCache:
        k, v = self.arrays[seq_id]
        cache = KVCache(k.shape[1] + 3, 2, self.pool.n_kv_heads, self.pool.d_head)
        cache.append(LAYER, k, v)
        return cache

    def queries(self, group: int, tokens: int) -> NDArray[np.float32]:
        shape = (self.pool.n_kv_heads * group, tokens, self.pool.d_head)
        return self.rng.standard_normal(shape).astype(np.float32)


def twins(seed: int, block_size: int, heads: int, dims: int, scale: float = 1.0, blocks: int = 2000) -> Twins:
    pool = PagedKVCache(blocks, block_size, 2, heads, dims)
    empty = np.empty((heads, 0, dims), np.float16)
    for seq_id in range(2):
        pool.add_seq(seq_id)
    return Twins(pool, np.random.default_rng(seed), scale, {0: (empty, empty), 1: (empty, empty)})


STEPS = st.lists(
    st.tuples(st.sampled_from(["append", "append", "append", "fork"]), st.integers(0, 9), st.integers(1, 20)),
    min_size=1,
    max_size=8,
)


@st.composite
def ragged(draw: st.DrawFn) -> Twins:
    """A pool in which sequences grew by turns and forked."""
    made = twins(
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(1, 17)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 3, 8, 33])),
        draw(st.sampled_from([1.0, 1.0, 2.0**-20, 6.0])),
    )
    for what, which, tokens in draw(STEPS):
        seq_id = which % len(made.arrays)
        if what == "append":
            made.append(seq_id, tokens)
        else:
            made.fork(seq_id)
    return made


TILES = st.sampled_from([1, 2, 3, 5, 16, 1024])
FEWS = st.sampled_from([0, 4096])


def both_ways_match_the_oracle_on_either_cache(
    made: Twins, group: int, tokens: int, tile: int, few: int
) -> None:
    for seq_id, (k, v) in made.arrays.items():
        n = k.shape[1]
        if not n:
            continue
        q = made.queries(group, min(tokens, n))
        expected, most = oracle(q, k, v), tolerance(q, k, v)
        with small(tile, few):
            paged = [way(q, PagedSequence(made.pool, seq_id), LAYER) for way in WAYS]
            straight = [way(q, made.contiguous(seq_id), LAYER) for way in WAYS]
        for a, b in zip(paged, straight):
            assert a.shape == q.shape
            np.testing.assert_allclose(a, expected, rtol=0, atol=most)
            assert_same_bits(a, b)  # where the blocks lie changes nothing
        np.testing.assert_allclose(paged[0], paged[1], rtol=0, atol=most)


QUERIES = given(ragged(), st.integers(1, 4), st.integers(1, 30), TILES, FEWS)
test_both_ways_match_the_oracle_on_either_cache = settings(max_examples=50)(
    QUERIES(both_ways_match_the_oracle_on_either_cache)
)
test_both_ways_match_the_oracle_on_either_cache_at_length = pytest.mark.long(
    QUERIES(both_ways_match_the_oracle_on_either_cache)
)


@pytest.mark.parametrize("n", [1023, 1024, 1025, 2048, 3000])
@pytest.mark.parametrize("tokens", [1, 3])
def test_long_sequences_scattered_and_forked(n: int, tokens: int) -> None:
    made = twins(n, 16, 2, 16)
    for at in range(0, n - 40, 100):  # two sequences take turns, so that runs are of 7 blocks or so
        made.append(0, min(100, n - 40 - at))
        made.append(1, 50)
    made.fork(0)
    made.append(0, 40)
    made.append(2, 41)
    for seq_id in (0, 2):
        k, v = made.arrays[seq_id]
        assert k.shape[1] == n + seq_id // 2
        q = made.queries(2, tokens)
        for way in WAYS:
            paged = way(q, PagedSequence(made.pool, seq_id), LAYER)
            np.testing.assert_allclose(paged, oracle(q, k, v), rtol=0, atol=tolerance(q, k, v))
            assert_same_bits(paged, way(q, made.contiguous(seq_id), LAYER))


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 40), TILES, st.sampled_from(WAYS))
def test_a_prompt_whole_or_query_by_query(seed: int, n: int, tokens: int, tile: int, way: Attention) -> None:
    made = twins(seed, 4, 2, 8)
    made.append(0, n)
    k, v = made.arrays[0]
    q = made.queries(3, min(tokens, n))
    late = n - q.shape[1]
    with small(tile, 0):
        whole = way(q, made.contiguous(0), LAYER)
        single = [dense(q[:, [t]], k[:, : late + t + 1], v[:, : late + t + 1]) for t in range(q.shape[1])]
    np.testing.assert_allclose(whole, np.concatenate(single, 1), rtol=0, atol=tolerance(q, k, v))


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.integers(0, 39),
    st.sampled_from([math.inf, -math.inf, math.nan]),
    st.sampled_from(["k", "v"]),
    TILES,
    FEWS,
)
def test_what_is_not_finite_reaches_only_queries_that_see_it(
    seed: int, n: int, where: int, value: float, into: str, tile: int, few: int
) -> None:
    made = twins(seed, 4, 2, 4)
    made.append(0, n)
    k, v = made.arrays[0]
    clean = k.copy(), v.copy()
    position = where % n
    {"k": k, "v": v}[into][1, position, 2] = value
    q = np.abs(made.queries(2, n)) + np.float32(0.1)  # so that the score has the sign of the value
    expected = oracle(q, *clean)
    most = tolerance(q, *clean)
    with small(tile, few):
        results = [way(q, made.contiguous(0), LAYER) for way in WAYS]
    for result in results:
        untouched = np.ones(q.shape, bool)
        untouched[2:, position:, slice(None) if into == "k" else 2] = False
        np.testing.assert_allclose(result[untouched], expected[untouched], rtol=0, atol=most)
        touched = result[~untouched]
        if into == "v":
            np.testing.assert_array_equal(touched, np.float32(value))
        elif value == -math.inf:  # no weight: as if the position were not there, unless there is no other
            start = max(position, 1)
            assert np.isnan(result[2:, position:start]).all()
            if start < n:
                k_rest, v_rest = (np.delete(x[1:], position, 1) for x in clean)
                without = oracle(q[2:, start:], k_rest, v_rest)
                np.testing.assert_allclose(result[2:, start:], without, rtol=0, atol=most)
        else:
            assert np.isnan(touched).all()


@pytest.mark.parametrize("way", WAYS)
def test_infinities_that_overflow_or_meet(way: Attention) -> None:
    cache = KVCache(4, 2, 1, 2)
    cache.append(LAYER, np.ones((1, 3, 2)), [[[1e9, 1.0], [-1e9, 2.0], [3.0, 3.0]]])
    q = np.ones((1, 3, 2), np.float32)
    result = way(q, cache, LAYER)
    assert result[0, 0, 0] == math.inf
    assert np.isnan(result[0, 1:, 0]).all()
    np.testing.assert_allclose(result[0, :, 1], [1, 1.5, 2], rtol=1e-6)
    cache.append(0, np.full((1, 2, 2), -np.inf), np.ones((1, 2, 2)))
    assert np.isnan(way(q[:, :2], cache, 0)).all()  # no score is finite


@pytest.mark.parametrize("way", WAYS)
def test_scores_far_apart_neither_overflow_nor_lose_the_highest(way: Attention) -> None:
    """Rising scores, so that every tile scales down what came before; falling ones; and both below zero."""
    for start, stop in ((-6e4, 6e4), (6e4, -6e4), (-6e4, -5e4), (5e4, 6e4)):
        k = np.linspace(start, stop, 50)[None, :, None].repeat(2, 2)
        v = np.arange(50.0)[None, :, None].repeat(2, 2)
        cache = KVCache(50, 2, 1, 2)
        cache.append(LAYER, k, v)
        with small(3, 0):
            result = way(np.full((1, 1, 2), 100, np.float32), cache, LAYER)
        np.testing.assert_array_equal(result, np.full((1, 1, 2), 49.0 if stop > start else 0.0))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_tile_without_any_weight_changes_nothing(way: Attention, at: int) -> None:
    k, v = np.ones((1, 6, 2)), np.arange(6.0)[None, :, None].repeat(2, 2)
    k[:, at : at + 2] = -np.inf
    cache = KVCache(6, 2, 1, 2)
    cache.append(LAYER, k, v)
    with small(2, 0):
        result = way(np.ones((1, 1, 2), np.float32), cache, LAYER)
    np.testing.assert_allclose(result, np.delete(v, [at, at + 1], 1).mean(axis=1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["<f2", ">f2", "f4", "f8"])
def test_a_contiguous_cache_of_any_dtype(dtype: str) -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 30, 8)).astype(dtype)
    cache = KVCache(40, 2, 2, 8, dtype)
    cache.append(LAYER, k, v)
    q = rng.standard_normal((4, 5, 8)).astype(np.float32)
    for way in WAYS:
        with small(7, 0):
            result = way(q, cache, LAYER)
        np.testing.assert_allclose(result, oracle(q, k, v), rtol=0, atol=tolerance(q, k, v))


PATTERNS = np.arange(65536, dtype=np.uint16).view(np.float16)
FINITE = PATTERNS[np.isfinite(PATTERNS)]


def test_all_finite_float16_are_shifted_exactly() -> None:
    assert FINITE.size > attention.FEW
    expected = np.array([float(x) for x in FINITE]).astype(np.float32)  # by way of float64, which is exact
    assert_same_bits(as_float32(FINITE), expected)
    for x in (FINITE[::-1], FINITE.reshape(2, -1, 8).swapaxes(0, 2), FINITE.reshape(4, -1)[1:, 5:8000]):
        assert_same_bits(as_float32(x), x.astype(np.float32))


def test_what_is_shifted_is_not_cast() -> None:
    """One finite float16 at a time would be cast; an array of them must not be, or nothing is gained."""

    class Watched(np.ndarray[Any, Any]):
        def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
            assert self.dtype != np.float16 or self.size <= attention.FEW, "cast"
            return super().astype(dtype, *args, **kwargs)

    as_float32(FINITE.view(Watched))
    with pytest.raises(AssertionError, match="cast"):
        as_float32(PATTERNS.view(Watched))


def test_all_float16_that_are_not_finite_are_cast_wherever_they_stand() -> None:
    assert_same_bits(as_float32(PATTERNS), PATTERNS.astype(np.float32))
    around = np.linspace(-3, 3, attention.FEW + 2).astype(np.float16)
    for i, pattern in enumerate(PATTERNS[~np.isfinite(PATTERNS)]):
        around[i] = pattern
        assert_same_bits(as_float32(around), around.astype(np.float32))
        around[i] = 1


def test_other_dtypes_and_few_values_are_cast() -> None:
    x = np.linspace(-1, 1, 5000, dtype=np.float32)
    assert as_float32(x) is x
    for y in (x.astype(np.float64), x.astype(">f2"), x[:7].astype(np.float16), x[:0].astype(np.float16)):
        assert_same_bits(as_float32(y), y.astype(np.float32))


@given(ragged())
def test_runs_are_views_in_order_and_cannot_be_written(made: Twins) -> None:
    for seq_id, arrays in made.arrays.items():
        runs = runs_of(made.pool, seq_id, LAYER)
        table = made.pool.block_table(seq_id)
        assert len(runs) == len(table) - int((np.diff(table) == 1).sum())
        for pairs, pool, array in zip(zip(*runs), (made.pool._k, made.pool._v), arrays):
            for view in pairs:
                assert np.shares_memory(view, pool)
                assert not view.flags.writeable
            np.testing.assert_array_equal(np.concatenate(pairs, 1), array)
    assert made.pool._k.flags.writeable


def test_runs_of_a_layer_that_lags_end_where_it_ends() -> None:
    made = twins(0, 4, 1, 2)
    made.append(0, 5)
    made.pool.append(0, LAYER, np.ones((1, 9, 2)), np.ones((1, 9, 2)))
    assert [k.shape[1] for k, _ in runs_of(made.pool, 0, 0)] == [5]
    assert [k.shape[1] for k, _ in runs_of(made.pool, 0, LAYER)] == [14]
    assert list(runs_of(made.pool, 1, 0)) == []


def test_caches_that_have_runs_and_caches_that_have_none() -> None:
    made = twins(0, 4, 2, 8)
    made.append(0, 5)
    made.append(1, 5)
    made.append(0, 8)
    runs = runs_of(made.pool, 0, LAYER)

    class Foreign:
        def gather(self, seq_id: int, layer: int) -> attention.Run:
            return made.pool.gather(seq_id, layer)

        def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
            raise NotImplementedError

        seq_len = append

    class WithRuns(Foreign):
        def gather(self, *_: int) -> attention.Run:
            raise AssertionError("gathered")

        def gather_runs(self, seq_id: int, layer: int) -> list[attention.Run]:
            assert (seq_id, layer) == (0, LAYER)
            return list(runs)

    q = made.queries(1, 2)
    expected = in_place(q, PagedSequence(made.pool, 0), LAYER)
    for cache in (Foreign(), WithRuns()):
        assert_same_bits(in_place(q, PagedSequence(cache, 0), LAYER), expected)  # type: ignore[arg-type]
    assert len(runs) == 2
    assert len(runs_of(Foreign(), 0, LAYER)) == 1


def test_a_run_that_is_a_whole_tile_is_not_copied() -> None:
    k, v = np.ones((2, 2, 10, 3), np.float16)
    with small(4, 0):
        tiles = list(attention._tiles([(k[:, :5], v[:, :5]), (k[:, 5:], v[:, 5:])], 10))
    assert [tile.shape[1] for tile, _ in tiles] == [4, 4, 2]
    assert [np.shares_memory(a, k) and np.shares_memory(b, v) for a, b in tiles] == [True, False, True]


@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_fit_is_refused(way: Attention) -> None:
    made = twins(0, 4, 2, 8)
    made.append(0, 5)
    good = made.queries(1, 2)
    bad: list[tuple[Any, type[Exception], str]] = [
        (good.astype(np.float64), TypeError, "queries must be float32, not float64"),
        (good[0], ValueError, r"shape \(2, 8\); it must be \[H, T, 8\], H a multiple of 2"),
        (good[:1], ValueError, r"shape \(1, 2, 8\)"),
        (good[:0], ValueError, r"shape \(0, 2, 8\)"),
        (good[:, :0], ValueError, r"shape \(2, 0, 8\)"),
        (good[..., :7], ValueError, r"shape \(2, 2, 7\)"),
        (made.queries(1, 6), ValueError, "6 queries, but only 5 positions"),
    ]
    for cache in (PagedSequence(made.pool, 0), made.contiguous(0)):
        for q, error, message in bad:
            with pytest.raises(error, match=message):
                way(q, cache, LAYER)
    for empty in (PagedSequence(made.pool, 1), KVCache(3, 2, 2, 8)):
        with pytest.raises(ValueError, match="position"):
            way(good, empty, LAYER)
    with pytest.raises(ValueError, match="no position"):
        tiled(good, [])
    with pytest.raises(KeyError):
        way(good, PagedSequence(made.pool, 7), LAYER)
    with pytest.raises(IndexError):
        way(good, PagedSequence(made.pool, 0), 2)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_decoder_gives_the_same_in_place(block_size: int, greedy: Callable[..., list[int]]) -> None:
    """The logits of the default but for rounding, the same ids, and the same bits from either cache."""
    model = toy()
    layers = []

    def watched(q: NDArray[np.float32], cache: attention.Cache, layer: int) -> NDArray[np.float32]:
        layers.append(layer)
        return in_place(q, cache, layer)

    other = Llama(model.config, model.weights, watched)
    prompt = [3, 17, 0, 5, 5, 11, 18, 2]

    def paged() -> PagedSequence:
        pool = PagedKVCache(100, block_size, 2, 2, 8)
        for seq_id in range(2):
            pool.add_seq(seq_id)
            model.forward([7] * 5, PagedSequence(pool, seq_id))
        return PagedSequence(pool, 0)

    def straight() -> KVCache:
        cache = KVCache(90, 2, 2, 8)
        model.forward([7] * 5, cache)
        return cache

    with small(4, 0):
        logits = [m.forward(prompt, cache()) for m in (other, model) for cache in (paged, straight)]
        ids = [greedy(m, cache(), prompt, 20) for m in (other, model) for cache in (paged, straight)]
    assert_same_bits(logits[0], logits[1])
    assert_same_bits(logits[2], logits[3])
    assert layers == [0, 1] * 42
    np.testing.assert_allclose(logits[0], logits[2], rtol=0, atol=1e-4)
    assert ids[0] == ids[1] == ids[2] == ids[3]
