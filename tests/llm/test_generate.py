"""Generation with the toy: the same on both caches, whatever shares it, and what it held is given back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.infer.attention import in_place
from tinyllm.infer.kvcache import CacheFull, KVCache
from tinyllm.infer.paged import OutOfBlocks, PagedKVCache
from tinyllm.llm.generate import DRAFT, TIE, Generation, Step, draft, generate, stream
from tinyllm.llm.llama import TOY, LayerCache, Llama, PagedSequence, toy
from tinyllm.llm.sampling import Sampling
from tinyllm.llm.sequences import Contiguous, Paged, Sequences, new_pool

PROMPT = [5, 9, 33, 2, 61, 7, 7, 30, 12]
MODEL = toy()


def contiguous(longest: int = 100) -> KVCache:
    return KVCache(longest, TOY.n_layers, TOY.n_kv_heads, TOY.d_head)


@pytest.mark.parametrize("block_size", [1, 3, 4, 9, 16])
def test_logits_of_both_caches_are_equal_bit_for_bit_at_every_step(block_size: int) -> None:
    pool = new_pool(TOY, 100, block_size)
    pool.add_seq(0)
    caches: list[LayerCache] = [PagedSequence(pool, 0), contiguous()]
    near = toy()
    near.attention = in_place
    pool.add_seq(1)
    ids = PROMPT
    for _ in range(40):
        one, two = (MODEL.forward(ids, cache) for cache in caches)
        assert one.tobytes() == two.tobytes()
        np.testing.assert_allclose(near.forward(ids, PagedSequence(pool, 1)), one, rtol=0, atol=1e-4)
        ids = [int(one[-1].argmax())]


@pytest.mark.parametrize("where", [lambda: new_pool(TOY, 30, 4), lambda: Contiguous(TOY, 100), lambda: None])
def test_greedy_is_what_the_decoder_says(where: Callable[[], Any], greedy: Callable[..., list[int]]) -> None:
    made = generate(MODEL, PROMPT, cache=where(), max_tokens=30)
    assert made.outputs[0].ids == greedy(MODEL, contiguous(), PROMPT, 30)
    assert made.outputs[0].finish == "length"


def test_steps_come_as_they_are_made() -> None:
    going = stream(MODEL, PROMPT, max_tokens=5, n=2)
    first = next(going)
    assert first == Step(0, going.outputs[0].ids[0])
    assert [len(output.ids) for output in going.outputs] == [1, 0]
    steps = [first, *going]
    assert [step.output for step in steps] == [0, 1] * 5
    for i, output in enumerate(going.outputs):
        assert [step.id for step in steps if step.output == i] == output.ids
    assert list(going) == []


@pytest.mark.parametrize("cache", [new_pool(TOY, 40, 4), Contiguous(TOY, 40)])
def test_an_output_does_not_depend_on_how_many_others_there_are(cache: PagedKVCache | Sequences) -> None:
    sampling = Sampling(0.9, 0.95, seed=4)
    many = generate(MODEL, PROMPT, cache=cache, max_tokens=12, n=5, sampling=sampling)
    assert len({tuple(output.ids) for output in many.outputs}) == 5
    few = generate(MODEL, PROMPT, cache=cache, max_tokens=12, n=2, sampling=sampling)
    assert many.outputs[:2] == few.outputs


def test_an_output_ends_with_its_first_stop_token_and_frees_its_blocks() -> None:
    plain = generate(MODEL, PROMPT, max_tokens=20).outputs[0].ids
    stop = plain[7]
    pool = new_pool(TOY, 20, 4)
    going = stream(MODEL, PROMPT, cache=pool, max_tokens=20, stop=[stop])
    list(going)
    assert going.outputs[0].ids == plain[: plain.index(stop) + 1]
    assert going.outputs[0].finish == "stop"
    assert pool.num_free_blocks() == 20


def test_the_first_token_can_be_the_last() -> None:
    [first] = generate(MODEL, PROMPT, max_tokens=1).outputs[0].ids
    for lookup in (False, True):
        made = generate(MODEL, PROMPT, max_tokens=9, stop=[first], lookup=lookup)
        assert (made.outputs[0].ids, made.outputs[0].finish) == ([first], "stop")


def test_a_fork_shares_the_prompt() -> None:
    pool = new_pool(TOY, 40, 4)
    prompt = PROMPT[:8]  # two blocks
    figures = generate(MODEL, prompt, cache=pool, max_tokens=5, n=6, sampling=Sampling(1.0)).figures
    block = 4 * 2 * 2 * TOY.n_layers * TOY.n_kv_heads * TOY.d_head
    assert figures.held_bytes == (2 + 6) * block
    assert figures.shared_blocks == 2
    assert figures.contiguous_bytes == 6 * (8 + 5 - 1) * block // 4
    assert (figures.prompt_tokens, figures.decode_tokens) == (8, 6 * 4)
    assert figures.prefill_seconds > 0 < figures.decode_seconds


def test_the_context_ends_an_output() -> None:
    ids = [1] * (TOY.max_context - 3)
    for lookup in (False, True):
        made = generate(MODEL, ids, max_tokens=100, lookup=lookup).outputs[0]
        assert (len(made.ids), made.finish) == (4, "length")
    with pytest.raises(ValueError, match="at most 256"):
        generate(MODEL, [1] * 257)


def held(pool: PagedKVCache) -> int:
    return pool.num_blocks - pool.num_free_blocks()


def test_a_pool_with_others_in_it_is_left_as_it_was() -> None:
    pool = new_pool(TOY, 30, 4)
    pool.add_seq(0)
    MODEL.forward([3, 4, 5], PagedSequence(pool, 0))
    before = pool.block_table(0).tolist(), pool.gather(0, 1)[0].tobytes()
    generate(MODEL, PROMPT, cache=pool, max_tokens=6, n=3)
    generate(MODEL, PROMPT, cache=pool, max_tokens=6, lookup=True)
    assert before == (pool.block_table(0).tolist(), pool.gather(0, 1)[0].tobytes())
    assert held(pool) == 1


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_what_was_held_is_freed_when_the_pool_runs_dry(blocks: int, lookup: bool) -> None:
    pool = new_pool(TOY, blocks, 4)
    n = 1 if lookup else 2
    with pytest.raises(OutOfBlocks):
        generate(MODEL, PROMPT, cache=pool, max_tokens=20, n=n, lookup=lookup)
    assert held(pool) == 0
    with pytest.raises(CacheFull):
        generate(MODEL, PROMPT, cache=Contiguous(TOY, 4 * blocks), max_tokens=20, n=n, lookup=lookup)


@pytest.mark.parametrize("lookup", [False, True])
def test_what_was_held_is_freed_when_one_stops_listening(lookup: bool) -> None:
    pool = new_pool(TOY, 20, 4)
    going: Generation = stream(MODEL, PROMPT, cache=pool, max_tokens=20, lookup=lookup)
    next(going)
    assert held(pool) == 3
    going.close()
    assert held(pool) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"n": 0}, "n is 0; it must be at least 1"),
        ({"lookup": True, "n": 2}, "lookup is for one greedy output, not for 2"),
        ({"lookup": True, "sampling": Sampling(0.5)}, r"lookup is .* at temperature 0.5"),
    ],
)
def test_numbers_out_of_bounds_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(MODEL, PROMPT, **arguments)


def test_a_prompt_that_the_model_refuses() -> None:
    pool = new_pool(TOY, 4)
    for ids, message in (([], "one row"), ([64], "id 64 is outside the vocabulary")):
        with pytest.raises(ValueError, match=message):
            generate(MODEL, ids, cache=pool)
    assert held(pool) == 0


# Drafts


def test_a_draft_is_what_followed_the_longest_match_last() -> None:
    assert draft([1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]
    assert draft([1, 2, 8, 1, 2, 9, 1, 2], 1) == [9]  # the last of two matches
    assert draft([5, 1, 2, 7, 4, 1, 2, 8, 5, 1, 2], 1) == [7]  # the longer one, though it is further back
    assert draft([1, 2, 9, 1, 2], 0) == []
    assert draft([1, 2, 3, 4, 5], 4) == []
    assert draft([7], 4) == draft([], 4) == []
    assert draft([7, 7, 7, 7], 4) == [7, 7, 7, 7]
    assert draft([5, 3, 4, 3, 4], 5) == [3, 4, 3, 4, 3]


class Periodic(Llama):
    """A decoder that says 1, 2, 3, 4, 1, ... whatever it is told, and 9 at the positions of `breaks`."""

    def __init__(self, breaks: tuple[int, ...] = ()) -> None:
        super().__init__(MODEL.config, MODEL.weights)
        self.breaks = breaks
        self.passes: list[int] = []

    def forward(self, ids: Any, cache: LayerCache, *, last_only: bool = False) -> Any:
        start = cache.seq_len()
        self.passes.append(len(ids))
        shape = super().forward(ids, cache, last_only=last_only).shape
        logits = np.zeros(shape, np.float32)
        positions = range(start, start + len(ids))[-shape[0] :]
        for row, position in zip(logits, positions):
            row[9 if position in self.breaks else position % 4 + 1] = 1
        return logits


def test_drafts_save_passes_and_are_cut_where_they_are_wrong() -> None:
    model = Periodic(breaks=(21,))
    plain = generate(model, [1, 2, 3, 4, 1], max_tokens=40).outputs[0].ids
    assert 9 in plain
    model.passes = []
    pool = new_pool(TOY, 20, 4)
    made = generate(model, [1, 2, 3, 4, 1], cache=pool, max_tokens=40, lookup=True)
    assert made.outputs[0].ids == plain
    assert len(model.passes) < 12
    assert max(model.passes) == DRAFT + 1
    assert 0 < made.figures.accepted < made.figures.drafted
    assert made.figures.decode_tokens == 39
    assert held(pool) == 0


def test_ties_are_counted() -> None:
    class Undecided(Periodic):
        def forward(self, *arguments: Any, **options: Any) -> Any:
            return np.zeros_like(super().forward(*arguments, **options))

    assert generate(Periodic(), [1], max_tokens=12, lookup=True).figures.ties == 0
    made = generate(Undecided(), [1], max_tokens=12, lookup=True)
    assert made.outputs[0].ids == [0] * 12
    assert made.figures.ties == 11  # the first is the prompt's, not a draft's


def leads(ids: list[int], prompt: list[int]) -> list[float]:
    """How far each id led over the next best, a pass a token."""
    cache = contiguous(200)
    rows = [MODEL.forward(prompt, cache)[-1], *(MODEL.forward([i], cache)[0] for i in ids[:-1])]
    return [float(best - second) for second, best in (np.partition(row, -2)[-2:] for row in rows)]


def lookup_says_what_greedy_says(unit: list[int], times: int, block_size: int, paged: bool) -> None:
    prompt = unit * times
    cache: Any = new_pool(TOY, 150, block_size) if paged else Contiguous(TOY, 150)
    plain = generate(MODEL, prompt, max_tokens=30).outputs[0].ids
    found = generate(MODEL, prompt, cache=cache, max_tokens=30, lookup=True).outputs[0].ids
    for a, b, lead in zip(plain, found, leads(plain, prompt)):
        if lead <= TIE:
            return
        assert a == b
    assert len(found) == 30


REPEATS = given(
    st.lists(st.integers(0, 63), min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 9), st.booleans()
)
test_lookup_says_what_greedy_says = settings(max_examples=25)(REPEATS(lookup_says_what_greedy_says))
test_lookup_says_what_greedy_says_at_length = pytest.mark.long(REPEATS(lookup_says_what_greedy_says))


# Where sequences are kept


@pytest.mark.parametrize("make", [lambda: Paged(new_pool(TOY, 20, 4)), lambda: Contiguous(TOY, 30)])
def test_a_fork_is_an_equal_that_goes_its_own_way(make: Callable[[], Sequences]) -> None:
    kept = make()
    one = kept.add()
    MODEL.forward(PROMPT, kept.layers(one))
    two = kept.fork(one)
    MODEL.forward([1], kept.layers(one))
    MODEL.forward([2], kept.layers(two))
    for handle, last in ((one, 1), (two, 2)):
        cache = contiguous()
        MODEL.forward(PROMPT, cache)
        MODEL.forward([last], cache)
        for layer in range(TOY.n_layers):
            for a, b in zip(kept.layers(handle).gather(layer), cache.gather(layer)):
                assert a.tobytes() == b.tobytes()
    kept.truncate(two, 3)
    assert (kept.layers(one).seq_len(), kept.layers(two).seq_len(1)) == (10, 3)
    kept.free(one)
    assert kept.held() > 0
    kept.free(two)
    assert kept.held() == kept.shared() == 0
