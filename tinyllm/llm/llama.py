"""A Llama decoder in NumPy: RMSNorm, rotary embedding, grouped-query causal attention, SwiGLU.

It shows that a cache works: attention reads every key and value from the cache, so two caches with the same
numbers give the same logits, bit for bit. The seeded `toy` and a real model differ in configuration and
weights only.

Shapes: T new positions, n cached ones, H query heads and G key/value heads of D dimensions each. Matrices are
`[out, in]`, as weight files hold them. The source is Touvron et al., "LLaMA: Open and
Efficient Foundation Language Models", section 2, with the grouped queries of Ainslie et al., "GQA".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tinyllm.infer.arguments import as_size
from tinyllm.infer.attention import Attention, Run, gathered, runs_of

Array = NDArray[np.float32]


class LayerCache(Protocol):
    """The interface of the decoder to the cache of one sequence; `KVCache` has it."""

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Add K and V `[G, T, D]` to one layer."""

    def gather(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of one layer, `[G, n, D]`, in position order; valid until the next call, at least."""

    def seq_len(self, layer: int = 0) -> int:
        """The number of positions in one layer."""


class BlockCache(Protocol):
    """The interface of `PagedSequence` to a cache of many sequences; `PagedKVCache` has it."""

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        """Add K and V `[G, T, D]` to one layer of one sequence."""

    def gather(self, seq_id: int, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of one layer of one sequence, `[G, n, D]`, in position order."""

    def seq_len(self, seq_id: int, layer: int = 0) -> int:
        """The number of positions in one layer of one sequence."""


@dataclass(frozen=True)
class PagedSequence:
    """One sequence of a paged cache as a `LayerCache`; it neither adds nor frees the sequence."""

    cache: BlockCache
    seq_id: int

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Call `append` of the paged cache; errors pass through, also below."""
        self.cache.append(self.seq_id, layer, k, v)

    def gather(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Call `gather` of the paged cache."""
        return self.cache.gather(self.seq_id, layer)

    def gather_runs(self, layer: int) -> Sequence[Run]:
        """Call `gather_runs` of the paged cache, or gather one run if it has no such method."""
        return runs_of(self.cache, self.seq_id, layer)

    def seq_len(self, layer: int = 0) -> int:
        """Call `seq_len` of the paged cache."""
        return self.cache.seq_len(self.seq_id, layer)


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model. Raises ValueError or TypeError for impossible sizes."""

    vocab: int
    d_model: int
    n_layers: int
    n_heads: int  # query heads
    n_kv_heads: int  # each serves `n_heads // n_kv_heads` consecutive query heads
    d_head: int
    d_ff: int  # width of the feed-forward layer
    max_context: int  # positions that the model was trained on
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items())[:8]:  # the whole numbers
            as_size(name, value)
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads is {self.n_heads}; it must be a multiple of n_kv_heads, {self.n_kv_heads}"
            )
        if self.d_head % 2:
            raise ValueError(f"d_head is {self.d_head}; it must be even, since dimensions rotate in pairs")


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer, float32; for their shapes see `layer_shapes`."""

    attn_norm: Array
    q: Array  # rows ordered so that neighbouring dimensions rotate; see `_rotate`
    k: Array  # likewise
    v: Array
    o: Array
    ffn_norm: Array
    gate: Array
    up: Array
    down: Array


@dataclass(frozen=True)
class Weights:
    """The weights of a model, float32."""

    embedding: Array  # [vocab, d_model]
    layers: tuple[LayerWeights, ...]
    norm: Array  # [d_model]
    head: Array | None = None  # [vocab, d_model]; None: tied, the embedding is the head too


def layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each field of `LayerWeights`."""
    q, kv = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    d, ff = config.d_model, config.d_ff
    attention = {"attn_norm": (d,), "q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}
    return {**attention, "ffn_norm": (d,), "gate": (ff, d), "up": (ff, d), "down": (d, ff)}


class Llama:
    """A decoder from token ids and a cache to logits; only the cache has state.

    Args:
        config: the sizes.
        weights: the weights.
        attention: how to attend, `gathered` or `in_place` of `tinyllm.infer.attention`.

    Raises:
        ValueError: the weights do not fit `config`. TypeError: a weight is not float32.
    """

    def __init__(self, config: LlamaConfig, weights: Weights, attention: Attention = gathered) -> None:
        self.config = config
        self.weights = weights
        self.attention = attention
        self._head = weights.embedding if weights.head is None else weights.head
        table: tuple[int, ...] = (config.vocab, config.d_model)
        expected = [("embedding", weights.embedding, table), ("head", self._head, table)]
        expected.append(("norm", weights.norm, table[1:]))
        for i, layer in enumerate(weights.layers):
            expected += [(f"layer {i}: {n}", getattr(layer, n), s) for n, s in layer_shapes(config).items()]
        if len(weights.layers) != config.n_layers:
            raise ValueError(f"there are weights of {len(weights.layers)} layers, not of {config.n_layers}")
        for name, array, shape in expected:
            if array.shape != shape:
                raise ValueError(f"{name} has shape {array.shape}; it must be {shape}")
            if array.dtype != np.float32:
                raise TypeError(f"{name} must be float32, not {array.dtype}")

    def forward(self, ids: ArrayLike, cache: LayerCache, *, last_only: bool = False) -> Array:
        """Decode T tokens after the cached ones: a prompt, a part of one, or a single token.

        A prompt in parts gives the same logits as a whole one, up to the rounding of sums. A full cache
        refuses in layer 0, and nothing has changed. Any other error within a layer leaves layers of unequal
        length, and the sequence cannot be continued.

        Args:
            ids: T token ids in `[0, vocab)`, T >= 1.
            cache: the cache of one sequence; each of its layers grows by T positions.
            last_only: compute only the logits of the last position, as for a prompt.

        Returns:
            Logits, float32 `[T, vocab]`, or `[1, vocab]` with `last_only`.

        Raises:
            ValueError: ids are empty or not one row, an id is outside the vocabulary, positions exceed
                `max_context`, or layers of the cache differ in length; the cache is unchanged.
            TypeError: ids are not integers; the cache is unchanged.
            Exception: any error of the cache, such as OutOfBlocks or CacheFull.
        """
        tokens = self._tokens(ids)
        start = self._start(cache, len(tokens))
        config, weights = self.config, self.weights
        turns = _turns(config, np.arange(start, start + len(tokens)))

        x = weights.embedding[tokens]  # a copy; the layers add to it
        for i, layer in enumerate(weights.layers):
            h = _rms_norm(x, layer.attn_norm, config.rms_eps)
            q, k, v = (self._heads(h @ w.T) for w in (layer.q, layer.k, layer.v))
            cache.append(i, _rotate(k, turns), v)
            mixed = self.attention(_rotate(q, turns), cache, i)
            x += mixed.swapaxes(0, 1).reshape(len(tokens), -1) @ layer.o.T
            h = _rms_norm(x, layer.ffn_norm, config.rms_eps)
            x += (_silu(h @ layer.gate.T) * (h @ layer.up.T)) @ layer.down.T
        x = _rms_norm(x[-1:] if last_only else x, weights.norm, config.rms_eps)
        return x @ self._head.T

    def _tokens(self, ids: ArrayLike) -> NDArray[np.intp]:
        array = np.asarray(ids)
        if array.ndim != 1 or array.size == 0:
            raise ValueError(f"ids have shape {array.shape}; they must be one row [T], T at least 1")
        if array.dtype.kind not in "iu":
            raise TypeError(f"ids must be integers, not {array.dtype}")
        for extreme in (int(array.min()), int(array.max())):
            if not 0 <= extreme < self.config.vocab:
                raise ValueError(f"id {extreme} is outside the vocabulary, [0, {self.config.vocab})")
        return array.astype(np.intp)

    def _start(self, cache: LayerCache, tokens: int) -> int:
        lens = {cache.seq_len(layer) for layer in range(self.config.n_layers)}
        start = max(lens)
        if len(lens) > 1:
            raise ValueError(f"the cache's layers differ in length: {min(lens)} to {start} positions")
        if start + tokens > self.config.max_context:
            bound = f"the model takes at most {self.config.max_context}"
            raise ValueError(f"{start} cached and {tokens} new positions are {start + tokens}; {bound}")
        return start

    def _heads(self, x: Array) -> Array:
        return x.reshape(len(x), -1, self.config.d_head).swapaxes(0, 1)  # [T, heads * D] -> [heads, T, D]


TOY = LlamaConfig(
    vocab=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_head=8, d_ff=64, max_context=256
)


def toy(seed: int = 0, config: LlamaConfig = TOY) -> Llama:
    """A model with seeded random weights; two layers by default."""
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...]) -> Array:
        # Norm weights are near 1, and sums over a row of a matrix near 2: attention is sharp, ids vary.
        mean, spread = (1.0, 0.3) if len(shape) == 1 else (0.0, 2 * shape[-1] ** -0.5)
        return rng.normal(mean, spread, shape).astype(np.float32)

    layers = tuple(
        LayerWeights(**{name: draw(shape) for name, shape in layer_shapes(config).items()})
        for _ in range(config.n_layers)
    )
    table = (config.vocab, config.d_model)
    return Llama(config, Weights(draw(table), layers, draw(table[1:]), draw(table)))


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    normed: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return normed * weight


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) of a very negative x is inf, and x / inf the right zero
        gated: Array = x / (1 + np.exp(-x))
    return gated


def _turns(config: LlamaConfig, positions: NDArray[np.intp]) -> NDArray[np.complex64]:
    """The rotation of each pair of dimensions at each position, as complex numbers `[T, D / 2]`."""
    frequencies = config.rope_theta ** (-np.arange(0, config.d_head, 2) / config.d_head)
    turns: NDArray[np.complex64] = np.exp(1j * positions[:, None] * frequencies).astype(np.complex64)
    return turns


def _rotate(x: Array, turns: NDArray[np.complex64]) -> Array:
    """Rotate the pairs (2i, 2i + 1) of `[heads, T, D]`, as a product of complex numbers.

    Rows of q and k that pair dimension i with i + D / 2 must be reordered when they are loaded.
    """
    return (x.view(np.complex64) * turns).view(np.float32)
