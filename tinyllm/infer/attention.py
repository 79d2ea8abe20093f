"""Causal attention with grouped queries on a cache, for a prompt or a single new position, two ways.

`gathered` asks the cache for K and V as two arrays and works on them whole. `in_place` reads the cache's own
memory, a tile of positions at a time, through *runs*: consecutive blocks are one view, uncopied. Its softmax
is that of Milakov and Gimelshein, "Online normalizer calculation for softmax": weights are relative to the
highest score so far, and a higher score scales the earlier sums down. The two agree within the rounding of
float32.

Tiles begin at every `TILE`-th position, wherever the runs begin. So `in_place`, like `gathered`, gives equal
results, bit for bit, on any two caches that hold the same numbers.

Shapes: H query heads of D dimensions; G key/value heads, each serving `H // G` query heads that follow one
another; n cached positions, of which the T queries are the last: query t sees those up to `n - T + t`.

Values that are not finite follow IEEE 754, without a warning, and affect only queries that see them: a NaN or
+inf among the scores makes a result NaN; a NaN or an infinity among the values makes its own dimension NaN or
infinite.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Run = tuple[NDArray[Any], NDArray[Any]]  # K and V of positions that lie together, `[G, n_i, D]`

TILE = 1024  # positions: 768 KiB of float32 with 3 heads of 64 dimensions
QUERIES = 256  # of a prompt at a time: the scores of more queries exceed the processor's caches
FEW = 4096  # values; for no more than these, NumPy's cast from float16 is faster (measured on x86-64)


class Cache(Protocol):
    """What attention needs of one sequence's cache; `gather_runs`, as in `PagedSequence`, is optional."""

    def gather(self, layer: int) -> Run:
        """K and V of one layer, `[G, n, D]`, in position order."""


class Attention(Protocol):
    """A way to attend: `gathered` or `in_place`."""

    def __call__(self, q: Array, cache: Cache, layer: int) -> Array:
        """Queries `[H, T, D]` over one layer of a cache: `[H, T, D]`."""


def gathered(q: Array, cache: Cache, layer: int) -> Array:
    """Attend to what the cache gathers.

    Args:
        q: queries, float32 `[H, T, D]`, T >= 1: the last T of the layer's n positions, which the cache holds.
        cache: the cache of one sequence.
        layer: the layer.

    Returns:
        The mixed values, float32 `[H, T, D]`.

    Raises:
        ValueError: a shape that does not fit the cache's, or more queries than positions.
        TypeError: `q` is not float32.
        Exception: what the cache raises.
    """
    return dense(q, *cache.gather(layer))


def in_place(q: Array, cache: Cache, layer: int) -> Array:
    """Attend to the cache's own memory, a tile at a time; arguments, result and errors as for `gathered`.

    A cache without `gather_runs` gathers, which costs nothing where that is a view, as in `KVCache`.
    """
    runs = getattr(cache, "gather_runs", None)
    return tiled(q, [cache.gather(layer)] if runs is None else runs(layer))


def runs_of(cache: Any, seq_id: int, layer: int) -> Sequence[Run]:
    """K and V of one layer of one sequence of a paged cache, in position order, a pair for each run.

    Read-only views `[G, n_i, D]` where the cache has `gather_runs`; one run, gathered, where it has not.
    """
    own = getattr(cache, "gather_runs", None)
    return [cache.gather(seq_id, layer)] if own is None else own(seq_id, layer)


def dense(q: Array, k: NDArray[Any], v: NDArray[Any]) -> Array:
    """Attend to keys and values `[G, n, D]` in two products; see `gathered`."""
    _check(q, k, k.shape[1])
    (_, tokens, d_head), (groups, n, _) = q.shape, k.shape
    if tokens > QUERIES:
        parts = [dense(q[:, a:b], k[:, :seen], v[:, :seen]) for a, b, seen in _parts(tokens, n)]
        return np.concatenate(parts, axis=1)
    # Query heads that share a key/value head follow one another, so they stack into the rows of one product.
    queries = (q * np.float32(d_head**-0.5)).reshape(groups, -1, d_head)
    with np.errstate(all="ignore"):
        scores = _scores(queries, as_float32(k), tokens)
        _hide_future(scores, 0, n - tokens)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed: Array = (scores.reshape(groups, -1, n) @ as_float32(v)).reshape(q.shape)
    if tokens == 1 or np.isfinite(mixed).all():
        return mixed
    # 0 * inf is NaN: queries must not multiply a value that they do not see, even by a weight of 0.
    half = tokens // 2
    seen = n - tokens + half
    early = dense(q[:, :half], k[:, :seen], v[:, :seen])
    return np.concatenate([early, dense(q[:, half:], k, v)], axis=1)


def tiled(q: Array, runs: Sequence[Run]) -> Array:
    """Attend to keys and values `[G, n_i, D]` that lie in runs, in position order; see `in_place`."""
    if not runs:
        raise ValueError("there are queries, but no position is cached")
    n = sum(k.shape[1] for k, _ in runs)
    if 0 < n <= TILE:  # nothing to scale down: the two ways are one
        return dense(q, *next(_tiles(runs, n)))
    _check(q, runs[0][0], n)
    return _tiled(q, runs, n)


def _tiled(q: Array, runs: Sequence[Run], n: int) -> Array:
    """Attend to the first n positions of `runs`."""
    (heads, tokens, d_head), groups = q.shape, len(runs[0][0])
    if tokens > QUERIES:
        parts = [_tiled(q[:, a:b], runs, seen) for a, b, seen in _parts(tokens, n)]
        return np.concatenate(parts, axis=1)
    queries = (q * np.float32(d_head**-0.5)).reshape(groups, -1, tokens, d_head)
    mixed = np.zeros(queries.shape, np.float32)
    # The highest score so far, and the sum of weights. Not -inf at first: -inf - -inf would be NaN.
    peak = np.full((*queries.shape[:3], 1), np.finfo(np.float32).min)
    total = np.zeros_like(peak)
    with np.errstate(all="ignore"):
        for start, (k, v) in zip(range(0, n, TILE), _tiles(runs, n)):
            first = max(0, start - (n - tokens))  # the first query that sees anything of this tile
            new = queries[:, :, first:]
            scores = _scores(new.reshape(groups, -1, d_head), as_float32(k), tokens - first)
            _hide_future(scores, start, n - tokens + first)
            higher = np.maximum(peak[:, :, first:], scores.max(axis=-1, keepdims=True))
            scores -= higher
            np.exp(scores, out=scores)
            shrink = np.exp(peak[:, :, first:] - higher)
            peak[:, :, first:] = higher
            total[:, :, first:] *= shrink
            total[:, :, first:] += scores.sum(axis=-1, keepdims=True)
            mixed[:, :, first:] *= shrink
            mixed[:, :, first:] += (scores.reshape(groups, -1, k.shape[1]) @ as_float32(v)).reshape(new.shape)
        mixed /= total
    result = mixed.reshape(heads, tokens, d_head)
    if tokens == 1 or np.isfinite(result).all():
        return result
    half = tokens // 2  # as in `dense`
    early = _tiled(q[:, :half], runs, n - tokens + half)
    return np.concatenate([early, _tiled(q[:, half:], runs, n)], axis=1)


def _parts(tokens: int, n: int) -> Iterator[tuple[int, int, int]]:
    """Split the last `tokens` of n positions: the first query, the one past the last, the positions seen."""
    for start in range(0, tokens, QUERIES):
        stop = min(start + QUERIES, tokens)
        yield start, stop, n - tokens + stop


def _tiles(runs: Sequence[Run], n: int) -> Iterator[Run]:
    """The first n positions of `runs`, cut before every `TILE`-th. Only a tile of several runs is a copy."""
    ks, vs, room = [], [], min(TILE, n)
    for k, v in runs:
        at, length = 0, k.shape[1]
        while room and at < length:
            stop = min(at + room, length)
            ks.append(k if stop - at == length else k[:, at:stop])
            vs.append(v if stop - at == length else v[:, at:stop])
            n, room, at = n - (stop - at), room - (stop - at), stop
            if not room:
                yield (ks[0], vs[0]) if len(ks) == 1 else (np.concatenate(ks, 1), np.concatenate(vs, 1))
                ks, vs, room = [], [], min(TILE, n)


def as_float32(x: NDArray[Any]) -> Array:
    """`x` as float32: bit for bit what `astype` gives, but faster from float16; `x` itself if it is float32.

    NumPy casts float16 one value after the other. This function moves the bits to their places in float32:
    the sign to the top, the rest up by 13. The exponent is then 112 too low, and a multiplication corrects
    it: exactly, even for subnormals, but not for infinities and NaN, which `astype` casts.
    """
    if x.dtype != np.float16 or x.size <= FEW:
        return x.astype(np.float32, copy=False)
    halves = x.view(np.int16)
    if halves.max() >= 0x7C00 or halves.view(np.uint16).max() >= 0xFC00:
        return x.astype(np.float32)
    bits = halves.astype(np.int32)  # the sign now fills the upper half
    bits <<= 13
    bits &= -0x70000001  # of the four signs at the top, keep the first
    result = bits.view(np.float32)
    result *= np.float32(2.0**112)
    return result


def _scores(queries: Array, keys: Array, tokens: int) -> Array:
    """Products of queries `[G, H / G * T, D]` and keys `[G, n, D]`: `[G, H / G, T, n]`, contiguous."""
    # Keys first: with few queries this way round is twice as fast. The copy puts a query's scores in one row.
    scores = np.ascontiguousarray((keys @ queries.swapaxes(1, 2)).swapaxes(1, 2))
    return scores.reshape(len(keys), -1, tokens, keys.shape[1])


def _hide_future(scores: Array, start: int, first: int) -> None:
    """Set scores `[..., T, n]` of unseen positions to -inf; query 0 is `first`, and key 0 `start`."""
    tokens, width = scores.shape[2:]
    ahead = max(first + 1 - start, 0)  # columns that all queries see
    if tokens > 1 and ahead < width:
        positions = np.arange(start + ahead, start + width)
        future = positions > np.arange(first, first + tokens)[:, None]
        np.copyto(scores[..., ahead:], np.float32(-np.inf), where=future)


def _check(q: Array, k: NDArray[Any], n: int) -> None:
    if q.dtype != np.float32:
        raise TypeError(f"queries must be float32, not {q.dtype}")
    groups, _, d_head = k.shape
    if q.ndim != 3 or q.shape[2] != d_head or q.shape[0] % groups or not q.size:
        bound = f"[H, T, {d_head}], H a multiple of {groups}, T at least 1"
        raise ValueError(f"queries have shape {q.shape}; it must be {bound}")
    if q.shape[1] > n:
        raise ValueError(f"there are {q.shape[1]} queries, but only {n} positions are cached")
