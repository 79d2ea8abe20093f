"""Beam search: equal to one that knows no pools and copies whole caches, and never worse than greedy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.infer.kvcache import KVCache
from tinyllm.infer.paged import OutOfBlocks
from tinyllm.llm.beams import Beam, beam_search
from tinyllm.llm.generate import generate
from tinyllm.llm.llama import TOY, Llama, toy
from tinyllm.llm.sequences import Contiguous, Paged, new_pool

MODEL = toy()
PROMPT = [5, 9, 33, 2, 61, 7]


def copied(cache: KVCache) -> KVCache:
    twin = KVCache(cache.max_len, cache.n_layers, cache.n_kv_heads, cache.d_head)
    for layer in range(cache.n_layers):
        k, v = cache.gather(layer)
        twin.append(layer, k, v)
    return twin


def scores(row: Any) -> Any:
    wide = row.astype(np.float64) - row.astype(np.float64).max()
    return wide - np.log(np.exp(wide).sum())


def plain_search(
    model: Llama, prompt: list[int], beams: int, most: int, stop: set[int]
) -> list[tuple[list[int], float]]:
    """Every continuation of every beam is listed and sorted; each beam has a cache of its own, a copy."""
    cache = KVCache(200, TOY.n_layers, TOY.n_kv_heads, TOY.d_head)
    row = model.forward(prompt, cache, last_only=True)[0]
    kept: list[Any] = [([], 0.0, True, False, cache, row)]  # ids, score, greedy, over, cache, row
    for _ in range(most):
        offers = [beam for beam in kept if beam[3]]
        for ids, score, greedy, over, cache, row in kept:
            if not over:
                steps = scores(row)
                order = sorted(range(len(steps)), key=lambda i: (-steps[i], i))
                offers += [
                    ([*ids, i], score + steps[i], greedy and i == order[0], i in stop, cache, None)
                    for i in order
                ]
        offers.sort(key=lambda offer: -offer[1])
        best = offers[:beams]
        if not any(offer[2] for offer in best):
            best[-1] = next(offer for offer in offers if offer[2])
        kept = []
        for ids, score, greedy, over, theirs, _ in best:
            own = copied(theirs)
            row = None if over or len(ids) == most else model.forward([ids[-1]], own)[0]
            kept.append((ids, score, greedy, over, own, row))
    return [(ids, score) for ids, score, *_ in kept]


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 3),
    st.lists(st.integers(0, 63), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sets(st.integers(0, 63), max_size=20),
    st.integers(1, 5),
)
def test_it_is_a_search_that_copies_caches(
    seed: int, prompt: list[int], beams: int, most: int, stop: set[int], block_size: int
) -> None:
    model = toy(seed)
    expected = plain_search(model, prompt, beams, most, stop)
    pool = new_pool(TOY, beams * -(-(len(prompt) + most) // block_size), block_size)
    for cache in (pool, Contiguous(TOY, 30)):
        found, _ = beam_search(model, prompt, beams=beams, max_tokens=most, stop=stop, cache=cache)
        assert [(list(beam.ids), beam.score) for beam in found] == expected
    assert pool.num_free_blocks() == pool.num_blocks


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 30), st.lists(st.integers(0, 63), min_size=1, max_size=5), st.integers(1, 6))
def test_the_best_is_never_worse_than_greedy(seed: int, prompt: list[int], beams: int) -> None:
    model = toy(seed)
    found, _ = beam_search(model, prompt, beams=beams, max_tokens=12)
    [greedy] = [beam for beam in found if beam.greedy]
    assert list(greedy.ids) == generate(model, prompt, max_tokens=12).outputs[0].ids
    assert found[0].score >= greedy.score
    assert [beam.score for beam in found[:-1]] == sorted((beam.score for beam in found[:-1]), reverse=True)


def test_a_plain_search_would_lose_greedy() -> None:
    """Otherwise the place that is kept for it would be for nothing."""
    lost = 0
    for seed in range(20):
        found, _ = beam_search(toy(seed), PROMPT, beams=2, max_tokens=12)
        lost += found[-1].greedy
    assert lost


def test_beams_share_what_they_have_in_common() -> None:
    pool = new_pool(TOY, 40, 2)
    found, figures = beam_search(MODEL, PROMPT, beams=4, max_tokens=6, cache=pool)
    assert len({beam.ids for beam in found}) == 4
    assert figures.shared_blocks >= 3  # the prompt, at least
    block = 2 * 2 * 2 * TOY.n_layers * TOY.n_kv_heads * TOY.d_head
    assert figures.held_bytes < 4 * 6 * block
    assert figures.contiguous_bytes == 4 * 11 * block // 2
    assert figures.prompt_tokens == 6


def test_finished_beams_keep_their_place_and_free_their_blocks() -> None:
    plain, _ = beam_search(MODEL, PROMPT, beams=3, max_tokens=8)
    stop = plain[0].ids[2]
    pool = new_pool(TOY, 40, 2)
    found, _ = beam_search(MODEL, PROMPT, beams=3, max_tokens=8, stop=[stop], cache=pool)
    over = [beam for beam in found if beam.finish == "stop"]
    assert over
    for beam in found:
        assert (beam.ids[-1] == stop) == (beam.finish == "stop")
        assert stop not in beam.ids[:-1]
        assert beam.finish in ("stop", "length")
    assert pool.num_free_blocks() == 40


def test_a_pool_that_runs_dry_gets_everything_back() -> None:
    pool = new_pool(TOY, 6, 2)
    with pytest.raises(OutOfBlocks):
        beam_search(MODEL, PROMPT, beams=4, max_tokens=10, cache=pool)
    assert pool.num_free_blocks() == 6
    kept = Paged(pool)
    with pytest.raises(OutOfBlocks):
        beam_search(MODEL, PROMPT * 3, beams=4, max_tokens=10, cache=kept)
    assert kept.held() == 0


@pytest.mark.parametrize(
    ("beams", "most", "message"),
    [
        (0, 5, "beams is 0; it must be at least 1"),
        (65, 5, "beams is 65; it must be at most 64"),
        (2, 0, "max_tokens is 0; it must be at least 1"),
    ],
)
def test_bounds_are_named(beams: int, most: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        beam_search(MODEL, PROMPT, beams=beams, max_tokens=most)


def test_the_context_ends_a_beam() -> None:
    found, _ = beam_search(MODEL, [1] * (TOY.max_context - 2), beams=2, max_tokens=50)
    assert {len(beam.ids) for beam in found} == {3}
    assert isinstance(found[0], Beam)
    assert found[0].finish == "length"
