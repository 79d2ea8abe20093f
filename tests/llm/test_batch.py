"""Many requests on a small pool: each says what it says alone, and every block comes back."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.infer.paged import OutOfBlocks
from tinyllm.llm.batch import Batch, Finished, PoolTooSmall, Request
from tinyllm.llm.generate import generate
from tinyllm.llm.llama import TOY, LayerCache, PagedSequence, toy
from tinyllm.llm.sampling import Sampling
from tinyllm.llm.sequences import new_pool

MODEL = toy()


def alone(request: Request) -> tuple[list[int], str]:
    made = generate(
        MODEL, request.ids, max_tokens=request.max_tokens, sampling=request.sampling, stop=request.stop
    ).outputs[0]
    return made.ids, made.finish


def drain(batch: Batch) -> dict[int, Finished]:
    found: dict[int, Finished] = {}
    while not batch.idle:
        found |= {finished.number: finished for finished in batch.step()}
        batch.cache.check()
    return found


def need(requests: list[Request], block_size: int) -> int:
    return max(-(-(len(r.ids) + r.max_tokens - 1) // block_size) for r in requests)


REQUESTS = given(
    st.lists(
        st.builds(
            Request,
            ids=st.lists(st.integers(0, 63), min_size=1, max_size=20),
            max_tokens=st.integers(1, 12),
            sampling=st.builds(Sampling, st.sampled_from([0.0, 0.8]), st.just(0.9), st.integers(0, 9)),
            stop=st.sets(st.integers(0, 63), max_size=2),
        ),
        min_size=1,
        max_size=7,
    ),
    st.integers(1, 5),
    st.integers(0, 8),
    st.lists(st.integers(0, 4), min_size=7, max_size=7),
)


def each_request_says_what_it_says_alone(
    requests: list[Request], block_size: int, spare: int, pauses: list[int]
) -> None:
    """For every pool from the longest request's need on, and whenever the others arrive."""
    cache = new_pool(TOY, need(requests, block_size) + spare, block_size)
    batch = Batch(MODEL, cache)
    found: dict[int, Finished] = {}
    for request, pause in zip(requests, pauses):
        for _ in range(pause):
            found |= {finished.number: finished for finished in batch.step()}
            cache.check()
        batch.submit(request)
    found |= drain(batch)
    assert {n: (f.ids, f.finish) for n, f in found.items()} == dict(enumerate(map(alone, requests)))
    assert cache.num_free_blocks() == cache.num_blocks
    figures = batch.figures
    assert figures.requests == len(requests)
    assert figures.prompt_tokens == sum(len(r.ids) for r in requests)
    assert figures.new_tokens == sum(len(f.ids) for f in found.values())
    assert figures.preemptions == sum(f.preemptions for f in found.values())
    assert figures.peak_blocks <= cache.num_blocks
    assert max(figures.used) <= figures.peak_blocks
    assert 0 <= figures.peak_waste < 1


test_each_request_says_what_it_says_alone = settings(max_examples=40)(
    REQUESTS(each_request_says_what_it_says_alone)
)
test_each_request_says_what_it_says_alone_at_length = pytest.mark.long(
    REQUESTS(each_request_says_what_it_says_alone)
)


def test_a_pool_of_the_least_size_preempts_and_replays() -> None:
    requests = [Request([i, 1, 2], 9) for i in range(4)]
    batch = Batch(MODEL, new_pool(TOY, 6, 2))  # one request to its end takes 6
    for request in requests:
        batch.submit(request)
    found = drain(batch)
    assert list(found) == [0, 1, 2, 3]  # who gave way comes before those that have not begun
    assert [found[i].ids for i in range(4)] == [alone(r)[0] for r in requests]
    assert batch.figures.preemptions > 0 < batch.figures.replayed_tokens
    assert found[0].preemptions == 0  # the oldest never is


def test_a_large_pool_preempts_nobody_and_replays_nothing() -> None:
    batch = Batch(MODEL, new_pool(TOY, 100, 2))
    for i in range(4):
        batch.submit(Request([i, 1, 2], 9))
    assert len(batch.step()) == 0
    assert len(batch.figures.used) == 1
    drain(batch)
    assert (batch.figures.preemptions, batch.figures.replayed_tokens) == (0, 0)
    assert batch.figures.peak_blocks == 3 * 5 + 6  # the first one ends as the others take their last block
    assert len(batch.figures.used) == 9
    assert batch.figures.peak_waste == pytest.approx(1 / 42)


def test_a_replay_is_computed_in_the_chunks_of_the_first_time() -> None:
    seen: list[tuple[int, ...]] = []

    class Watched(type(MODEL)):  # type: ignore[misc]
        def forward(self, ids: Any, cache: LayerCache, **options: Any) -> Any:
            result = super().forward(ids, cache, **options)
            seen.append(tuple(ids))
            return result

    batch = Batch(Watched(MODEL.config, MODEL.weights), new_pool(TOY, 6, 2))
    for i in (40, 41):
        batch.submit(Request([i, 1, 2], 9))
    found = drain(batch)
    assert found[1].preemptions == 1
    second = found[1].ids
    prompt = (41, 1, 2)
    first, again = (i for i, chunk in enumerate(seen) if chunk == prompt)
    done = batch.figures.replayed_tokens - 3
    assert done > 0
    assert seen[again : again + done + 1] == [prompt, *((i,) for i in second[:done])]
    assert first < again


def test_the_youngest_gives_way() -> None:
    batch = Batch(MODEL, new_pool(TOY, 7, 2))
    for i in range(3):
        batch.submit(Request([i, 1], 8))
    gone = {finished.number: finished.preemptions for finished in drain(batch).values()}
    assert gone[0] == 0
    assert gone[2] >= gone[1]
    assert gone[2] > 0


def test_a_pool_that_cannot_hold_a_request_is_named_before_anything_is_computed() -> None:
    batch = Batch(MODEL, new_pool(TOY, 5, 2))
    batch.submit(Request([1, 2, 3], 8))
    with pytest.raises(
        PoolTooSmall, match="the request may need 6 blocks, but the pool has 5 in all"
    ) as caught:
        batch.submit(Request([1, 2, 3], 9))
    assert (caught.value.needed, caught.value.num_blocks) == (6, 5)
    assert batch.figures.requests == 1
    assert list(drain(batch)) == [0]


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (Request([]), ValueError, "the prompt has 0 tokens; it must have 1 to 256"),
        (Request([1] * 257), ValueError, "the prompt has 257 tokens"),
        (Request([1, 64]), ValueError, r"id 64 is outside the vocabulary, \[0, 64\)"),
        (Request([-1]), ValueError, "id -1 is outside"),
        (Request([1.5]), TypeError, "id must be an integer, not 1.5"),  # type: ignore[list-item]
        (Request([1], 0), ValueError, "max_tokens is 0; it must be at least 1"),
    ],
)
def test_a_request_out_of_bounds_is_refused(request_: Request, error: type[Exception], message: str) -> None:
    batch = Batch(MODEL, new_pool(TOY, 100))
    with pytest.raises(error, match=message):
        batch.submit(request_)
    assert batch.idle


def test_the_context_ends_a_request() -> None:
    batch = Batch(MODEL, new_pool(TOY, 16))
    batch.submit(Request([1] * 250, 100))
    [found] = drain(batch).values()
    assert (len(found.ids), found.finish) == (7, "length")


def test_others_in_the_pool_that_leave_no_room() -> None:
    cache = new_pool(TOY, 4, 2)
    cache.add_seq(0)
    MODEL.forward([1] * 6, PagedSequence(cache, 0))
    batch = Batch(MODEL, cache)
    batch.submit(Request([1, 2, 3], 2))
    with pytest.raises(OutOfBlocks, match="needs 2 blocks, but only 1 are free"):
        batch.step()
    cache.free(0)
    assert drain(batch)[0].ids == alone(Request([1, 2, 3], 2))[0]


def test_close_frees_what_runs() -> None:
    cache = new_pool(TOY, 20, 2)
    batch = Batch(MODEL, cache)
    for i in range(3):
        batch.submit(Request([i], 9))
    batch.step()
    assert cache.num_free_blocks() == 17
    batch.close()
    assert batch.idle
    assert cache.num_free_blocks() == 20


def test_what_a_step_finished_is_kept_when_it_is_interrupted() -> None:
    batch = Batch(MODEL, new_pool(TOY, 20, 2))
    for most in (2, 5):
        batch.submit(Request([1, 2], most))
    batch.step()
    passes = 0

    class Interrupted(type(MODEL)):  # type: ignore[misc]
        def forward(self, *arguments: Any, **options: Any) -> Any:
            nonlocal passes
            passes += 1
            if passes == 2:
                raise KeyboardInterrupt
            return super().forward(*arguments, **options)

    batch.model = Interrupted(MODEL.config, MODEL.weights)
    with pytest.raises(KeyboardInterrupt):
        batch.step()
    assert [(f.number, f.ids) for f in batch.finished] == [(0, alone(Request([1, 2], 2))[0])]
