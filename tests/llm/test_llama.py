"""The decoder: its mathematics against a naive rewrite, and the same logits from either cache."""

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tinyllm.infer.kvcache import CacheFull, KVCache
from tinyllm.infer.paged import OutOfBlocks, PagedKVCache
from tinyllm.llm import llama
from tinyllm.llm.llama import TOY, Llama, LlamaConfig, PagedSequence, toy

# vocab, width, layers, query heads, key/value heads, dims, feed-forward, context, theta, and an epsilon that
# matters; three query heads to a key/value head, and heads that are together wider than the model.
ODD = LlamaConfig(19, 10, 3, 6, 2, 4, 7, 40, rope_theta=50.0, rms_eps=0.1)
IDS = [3, 17, 0, 5, 5, 11, 18, 2, 9, 1, 3, 7]


def fresh(model: Llama, max_len: int = 64, dtype: Any = np.float16) -> KVCache:
    config = model.config
    return KVCache(max_len, config.n_layers, config.n_kv_heads, config.d_head, dtype)


def paged(model: Llama, num_blocks: int = 40, block_size: int = 3) -> PagedKVCache:
    config = model.config
    return PagedKVCache(num_blocks, block_size, config.n_layers, config.n_kv_heads, config.d_head)


def with_layer(model: Llama, index: int, **arrays: NDArray[np.float32]) -> Llama:
    layers = list(model.weights.layers)
    layers[index] = replace(layers[index], **arrays)
    return Llama(model.config, replace(model.weights, layers=tuple(layers)))


def contents(cache: llama.LayerCache, n_layers: int) -> list[tuple[int, bytes, bytes]]:
    pairs = [cache.gather(layer) for layer in range(n_layers)]
    return [(cache.seq_len(layer), k.tobytes(), v.tobytes()) for layer, (k, v) in enumerate(pairs)]


def assert_same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def rotated(head: NDArray[Any], position: int, theta: float) -> NDArray[np.float64]:
    """One head of a query or key, turned by its position: neighbouring dimensions are the pairs."""
    out = np.empty(len(head))
    for i in range(0, len(head), 2):
        angle = position / theta ** (i / len(head))
        out[i] = head[i] * math.cos(angle) - head[i + 1] * math.sin(angle)
        out[i + 1] = head[i] * math.sin(angle) + head[i + 1] * math.cos(angle)
    return out


def naive(model: Llama, ids: list[int]) -> NDArray[np.float64]:
    """Logits in float64, position by position and head by head, with no cache."""
    c, w = model.config, model.weights

    def times(matrix: NDArray[Any], x: NDArray[Any]) -> NDArray[np.float64]:
        return np.array([sum(float(a) * float(b) for a, b in zip(row, x, strict=True)) for row in matrix])

    def norm(x: NDArray[Any], weight: NDArray[Any]) -> NDArray[np.float64]:
        return np.array(x * weight / math.sqrt(sum(x**2) / len(x) + c.rms_eps))

    def heads(matrix: NDArray[Any], x: NDArray[Any]) -> list[NDArray[np.float64]]:
        return np.split(times(matrix, x), len(matrix) // c.d_head)

    xs = [w.embedding[i].astype(np.float64) for i in ids]
    for layer in w.layers:
        hs = [norm(x, layer.attn_norm) for x in xs]
        ks = [[rotated(k, p, c.rope_theta) for k in heads(layer.k, h)] for p, h in enumerate(hs)]
        vs = [heads(layer.v, h) for h in hs]
        for p, h in enumerate(hs):
            mixed = []
            for number, q in enumerate(heads(layer.q, h)):
                group = number // (c.n_heads // c.n_kv_heads)
                turned = rotated(q, p, c.rope_theta)
                weights = [math.exp(turned @ ks[past][group] / math.sqrt(c.d_head)) for past in range(p + 1)]
                mixed.append(np.array(weights) @ np.array([v[group] for v in vs[: p + 1]]) / sum(weights))
            xs[p] = xs[p] + times(layer.o, np.concatenate(mixed))
            x = norm(xs[p], layer.ffn_norm)
            gate = np.array([g / (1 + math.exp(-g)) for g in times(layer.gate, x)])
            xs[p] = xs[p] + times(layer.down, gate * times(layer.up, x))
    return np.array([times(w.embedding if w.head is None else w.head, norm(x, w.norm)) for x in xs])


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("config", [ODD, TOY], ids=["odd", "toy"])
def test_matches_a_naive_rewrite(config: LlamaConfig, tied: bool) -> None:
    model = toy(1, config)
    if tied:
        model = Llama(config, replace(model.weights, head=None))
    logits = model.forward(IDS, fresh(model, dtype=np.float32))
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, naive(model, IDS), rtol=0, atol=1e-4)


def test_a_float16_cache_costs_float16_precision() -> None:
    model = toy()
    half, single = (model.forward(IDS, fresh(model, dtype=d)) for d in (np.float16, np.float32))
    error = np.abs(half - single).max()
    assert 0 < error < 0.05  # not 0: attention reads what the cache rounded


@pytest.mark.parametrize("sizes", [(1,) * 12, (5, 7), (11, 1), (1, 4, 2, 5)])
def test_a_prompt_in_parts_gives_the_logits_it_gives_whole(sizes: tuple[int, ...]) -> None:
    model = toy(0, ODD)
    whole, cache = model.forward(IDS, fresh(model, dtype=np.float32)), fresh(model, dtype=np.float32)
    parts, at = [], 0
    for size in sizes:
        parts.append(model.forward(IDS[at : at + size], cache))
        at += size
        assert {cache.seq_len(layer) for layer in range(ODD.n_layers)} == {at}
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-4)


def test_a_later_token_does_not_change_earlier_logits() -> None:
    model = toy(0, ODD)
    before = model.forward(IDS, fresh(model))
    for position in (1, 6, 11):
        after = model.forward([*IDS[:position], 13, *IDS[position + 1 :]], fresh(model))
        np.testing.assert_allclose(after[:position], before[:position], rtol=0, atol=1e-5)
        assert (np.abs(after - before)[position:].max(axis=1) > 1e-3).all()


@pytest.mark.parametrize("head", range(ODD.n_heads))
def test_query_heads_that_follow_one_another_share_a_kv_head(head: int) -> None:
    """With one query head let through, only its own key/value head can change the logits."""
    model = toy(0, replace(ODD, n_layers=1))
    layer, dims = model.weights.layers[0], ODD.d_head
    only = np.zeros_like(layer.o)
    only[:, head * dims : (head + 1) * dims] = layer.o[:, head * dims : (head + 1) * dims]
    before = with_layer(model, 0, o=only).forward(IDS, fresh(model))
    for group in range(ODD.n_kv_heads):
        v = layer.v.copy()
        v[group * dims : (group + 1) * dims] += 1
        after = with_layer(model, 0, o=only, v=v).forward(IDS, fresh(model))
        assert (np.abs(after - before).max() > 1e-3) == (group == head // 3)


def test_keys_rotate_in_neighbouring_pairs_and_values_do_not() -> None:
    model = toy(0, ODD)
    cache = fresh(model, dtype=np.float64)
    model.forward([4, 4, 4, 4], cache)
    model.forward([4], cache)  # the same token, so in layer 0 only the position tells its keys apart
    k, v = cache.gather(0)
    for position in range(5):
        expected = [rotated(head, position, ODD.rope_theta) for head in k[:, 0]]
        np.testing.assert_allclose(k[:, position], expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(v[:, position], v[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_paged_and_contiguous_logits_are_equal_in_every_bit(block_size: int) -> None:
    """Through a prompt in two chunks and two forked branches, in blocks that another sequence scatters."""
    model, pool = toy(), paged(toy(), 100, block_size)
    pool.add_seq(0)
    pool.add_seq(9)
    sequence, other, straights = PagedSequence(pool, 0), PagedSequence(pool, 9), (fresh(model), fresh(model))
    for ids in (IDS[:5], IDS[5:11]):
        logits = model.forward(ids, sequence)
        for straight in straights:  # one for each branch, since a contiguous cache cannot fork
            assert_same_bits(model.forward(ids, straight), logits)
        model.forward(IDS[:4], other)
    pool.fork(0, 1)
    branches = [[8], [41]]
    for _ in range(20):
        for branch, ids in enumerate(branches):
            a = model.forward(ids[-1:], PagedSequence(pool, branch))
            b = model.forward(ids[-1:], straights[branch])
            assert_same_bits(a, b)
            ids.append(int(a[-1].argmax()))
    assert branches[0][1:] != branches[1][1:]
    for branch, cache in enumerate(straights):
        assert contents(PagedSequence(pool, branch), 2) == contents(cache, 2)


BAD_IDS: list[tuple[Any, type[Exception], str]] = [
    ([], ValueError, r"shape \(0,\)"),
    ([[1, 2]], ValueError, r"shape \(1, 2\)"),
    (5, ValueError, r"shape \(\)"),
    ([3, 64], ValueError, r"id 64 is outside the vocabulary, \[0, 64\)"),
    ([3, -1, 5], ValueError, r"id -1 is outside"),
    ([2**63], ValueError, r"id 9223372036854775808 is outside"),
    ([1.0], TypeError, "float64"),
    ([True], TypeError, "bool"),
    ([1] * 250, ValueError, r"7 cached and 250 new positions are 257; .* at most 256"),
]


@pytest.mark.parametrize(("ids", "error", "message"), BAD_IDS, ids=[m for _, _, m in BAD_IDS])
def test_bad_ids_leave_the_cache_untouched(ids: Any, error: type[Exception], message: str) -> None:
    model, pool = toy(), paged(toy(), 200)
    pool.add_seq(0)
    for cache in (PagedSequence(pool, 0), fresh(model, 300)):
        model.forward(IDS[:7], cache)
        before = contents(cache, 2)
        with pytest.raises(error, match=message):
            model.forward(ids, cache)
        assert contents(cache, 2) == before
    assert pool.num_free_blocks() == 197


def test_the_whole_context_can_be_used() -> None:
    model = toy(0, ODD)
    cache = fresh(model, 41)
    assert model.forward([*IDS, *IDS, *IDS, *IDS[:4]], cache).shape == (40, ODD.vocab)
    with pytest.raises(ValueError, match=r"40 cached and 1 new positions are 41; .* 40"):
        model.forward([1], cache)


def test_a_cache_out_of_space_refuses_before_anything_changes() -> None:
    model, pool = toy(), paged(toy(), num_blocks=3, block_size=2)
    pool.add_seq(0)
    caches: tuple[llama.LayerCache, ...] = (PagedSequence(pool, 0), fresh(model, 6))
    for cache in caches:
        model.forward(IDS[:4], cache)
        before = contents(cache, 2)
        with pytest.raises((OutOfBlocks, CacheFull)):
            model.forward(IDS[4:7], cache)
        assert contents(cache, 2) == before
    a, b = (model.forward(IDS[4:6], cache) for cache in caches)  # what does fit still goes in
    assert_same_bits(a, b)


def test_layers_of_unequal_length_are_refused() -> None:
    model, pool = toy(), paged(toy())
    pool.add_seq(0)
    for cache in (PagedSequence(pool, 0), fresh(model)):
        cache.append(1, np.ones((2, 3, 8)), np.ones((2, 3, 8)))
        with pytest.raises(ValueError, match="layers differ in length: 0 to 3"):
            model.forward([1], cache)
        assert (cache.seq_len(0), cache.seq_len(1)) == (0, 3)


def test_last_only_is_the_last_row() -> None:
    model, caches = toy(0, ODD), (fresh(toy(0, ODD)), fresh(toy(0, ODD)))
    every, last = model.forward(IDS, caches[0]), model.forward(IDS, caches[1], last_only=True)
    assert last.shape == (1, ODD.vocab)
    np.testing.assert_allclose(last[0], every[-1], rtol=0, atol=1e-5)
    assert contents(caches[0], 3) == contents(caches[1], 3)
    for ids in (tuple(IDS), np.array(IDS, np.uint8)):  # any row of integers, and nothing is remembered
        assert_same_bits(model.forward(ids, fresh(model)), every)


def test_large_activations_neither_overflow_nor_warn() -> None:
    model = toy(0, ODD)
    layer = model.weights.layers[0]
    loud = with_layer(model, 0, q=layer.q * 300, k=layer.k * 300, gate=layer.gate * 1000)
    assert np.isfinite(loud.forward(IDS, fresh(model))).all()


def test_a_fed_back_id_gives_what_the_whole_text_gives(greedy: Callable[..., list[int]]) -> None:
    model, cache = toy(), fresh(toy())
    ids = IDS.copy()
    for _ in range(6):
        ids.append(int(model.forward(ids, fresh(model))[-1].argmax()))
    assert greedy(model, cache, IDS, 6) == ids[len(IDS) :]
    assert cache.seq_len() == len(ids) - 1


def test_the_toy_is_seeded_and_has_something_to_say(greedy: Callable[..., list[int]]) -> None:
    outputs = [greedy(toy(seed), fresh(toy()), IDS, 40) for seed in (0, 0, 1, 2)]
    assert outputs[0] == outputs[1] != outputs[2]
    assert all(len(set(ids)) > 10 for ids in outputs)
    ordered = np.sort(toy().forward(range(64), fresh(toy())), axis=1)
    assert (ordered[:, -1] - ordered[:, -2]).min() > 1e-3  # no near tie, which rounding could decide


def test_sizes_and_weights_that_do_not_fit_are_refused() -> None:
    weights = toy(0, ODD).weights
    table, norm, layers = weights.embedding, weights.norm, weights.layers
    wrong_layer = (layers[0], replace(layers[1], k=layers[1].q), layers[2])
    bad: list[tuple[Any, type[Exception], str, dict[str, Any]]] = [
        (ODD, ValueError, "n_heads is 6; it must be a multiple of n_kv_heads, 4", {"n_kv_heads": 4}),
        (ODD, ValueError, "d_head is 5; it must be even", {"d_head": 5}),
        (ODD, ValueError, "max_context is 0", {"max_context": 0}),
        (ODD, TypeError, "vocab must be an integer", {"vocab": 2.0}),
        (weights, ValueError, "embedding has shape (18, 10); it must be (19, 10)", {"embedding": table[1:]}),
        (weights, ValueError, "head has shape (19, 9)", {"head": table[:, 1:]}),
        (weights, ValueError, "norm has shape (9,)", {"norm": norm[1:]}),
        (weights, TypeError, "norm must be float32, not float64", {"norm": norm.astype(np.float64)}),
        (weights, ValueError, "2 layers, not of 3", {"layers": layers[1:]}),
        (weights, ValueError, "layer 1: k has shape (24, 10); it must be (8, 10)", {"layers": wrong_layer}),
    ]
    for good, error, message, change in bad:
        with pytest.raises(error, match=re.escape(message)):
            Llama(ODD, replace(good, **change))


def test_the_decoder_imports_no_cache() -> None:
    names = "['tinyllm.infer.paged', 'tinyllm.infer.kvcache']"
    code = f"import sys, tinyllm.llm.llama; sys.exit(any(name in sys.modules for name in {names}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
