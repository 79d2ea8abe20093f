"""What generation promises, on real weights: equal bits on both caches, shared blocks, no token lost."""

from typing import Any

import numpy as np
import pytest

from tinyllm.infer.attention import in_place
from tinyllm.llm.batch import Batch, Finished, Request
from tinyllm.llm.beams import beam_search
from tinyllm.llm.generate import TIE, generate
from tinyllm.llm.llama import Llama
from tinyllm.llm.sampling import Sampling
from tinyllm.llm.sequences import Contiguous, Paged, new_pool
from tinyllm.llm.tokenizer import Tokenizer

STORY = "Once upon a time, in a small village at the edge of the forest, there lived"  # 18 tokens


def prompt(tokenizer: Tokenizer, text: str = STORY) -> list[int]:
    return tokenizer.encode(text)


@pytest.mark.long  # with the toy, and on the model's prompts in test_golden.py, in every commit
@pytest.mark.parametrize("block_size", [9, 16])  # the first divides the prompt
def test_logits_of_both_caches_are_equal_bit_for_bit_at_every_step(
    llama: Llama, tokenizer: Tokenizer, block_size: int
) -> None:
    ids = prompt(tokenizer)
    assert len(ids) == 18
    pool, other = Paged(new_pool(llama.config, 20, block_size)), Contiguous(llama.config, 60)
    caches = [place.layers(place.add()) for place in (pool, other)]
    near = Llama(llama.config, llama.weights, in_place)
    beside = pool.layers(pool.add())
    for _ in range(12):
        one, two = (llama.forward(ids, cache) for cache in caches)
        assert one.tobytes() == two.tobytes()
        np.testing.assert_allclose(near.forward(ids, beside), one, rtol=0, atol=1e-4)
        ids = [int(one[-1].argmax())]


def test_outputs_share_the_prompt(llama: Llama, tokenizer: Tokenizer) -> None:
    ids = prompt(tokenizer) * 3
    sampling = Sampling(0.8, seed=1)
    many = generate(llama, ids, max_tokens=3, n=4, sampling=sampling)
    copies = generate(llama, ids, max_tokens=3, n=4, sampling=sampling, cache=Contiguous(llama.config, 60))
    assert many.outputs == copies.outputs
    assert len({tuple(output.ids) for output in many.outputs}) == 4
    assert many.figures.shared_blocks == 4  # before the first of them writes into the last one
    assert many.figures.held_bytes < copies.figures.held_bytes / 2


@pytest.mark.long
def test_beams_are_those_of_copied_caches_and_no_worse_than_greedy(
    llama: Llama, tokenizer: Tokenizer
) -> None:
    ids = prompt(tokenizer)
    found, figures = beam_search(llama, ids, beams=4, max_tokens=10, stop=[tokenizer.eos])
    copied, _ = beam_search(
        llama, ids, beams=4, max_tokens=10, stop=[tokenizer.eos], cache=Contiguous(llama.config, 40)
    )
    assert found == copied
    [greedy] = [beam for beam in found if beam.greedy]
    assert list(greedy.ids) == generate(llama, ids, max_tokens=10, stop=[tokenizer.eos]).outputs[0].ids
    assert found[0].score > greedy.score
    assert figures.shared_blocks >= 1


@pytest.mark.long
def test_lookup_says_what_greedy_says(llama: Llama, tokenizer: Tokenizer) -> None:
    ids = prompt(tokenizer, "one two three four five six, one two three four five six, one two")
    plain = generate(llama, ids, max_tokens=24).outputs[0].ids
    found = generate(llama, ids, max_tokens=24, lookup=True)
    assert found.figures.accepted > 4
    cache: Any = Contiguous(llama.config, 100)
    layers = cache.layers(cache.add())
    row = llama.forward(ids, layers, last_only=True)[0]
    for a, b in zip(plain, found.outputs[0].ids):
        second, best = np.partition(row, -2)[-2:]
        if best - second <= TIE:
            return
        assert a == b
        row = llama.forward([a], layers)[0]


@pytest.mark.long
def test_a_quarter_of_the_blocks_changes_no_token(llama: Llama, tokenizer: Tokenizer) -> None:
    texts = ["The capital of France is", "Two plus two is", "Water boils at", "The sky is"]
    requests = [
        Request(prompt(tokenizer, text), 8 + 3 * i, Sampling(0.7 * (i % 2), seed=i), [tokenizer.eos])
        for i, text in enumerate(texts)
    ]
    need = [-(-(len(r.ids) + r.max_tokens - 1) // 4) for r in requests]
    blocks = max(*need, sum(need) // 4)  # each takes about a quarter of what all need
    batch = Batch(llama, new_pool(llama.config, blocks, 4))
    for request in requests:
        batch.submit(request)
    found: dict[int, Finished] = {}
    while not batch.idle:
        found |= {finished.number: finished for finished in batch.step()}
    assert batch.figures.preemptions > 0
    for i, r in enumerate(requests):
        alone = generate(llama, r.ids, max_tokens=r.max_tokens, sampling=r.sampling, stop=r.stop)
        assert found[i].ids == alone.outputs[0].ids
