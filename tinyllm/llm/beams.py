"""Beam search on either cache: beams are forks, and losing beams are freed.

A beam is a sequence and the sum of the log probabilities of its tokens. In every pass each beam offers its
most likely continuations, and the best of all offers are kept. One place is reserved for the greedy path,
which a plain beam search can lose: the best beam is never worse than greedy decoding.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from tinyllm.infer.arguments import as_size
from tinyllm.infer.paged import PagedKVCache
from tinyllm.infer.planning import bytes_per_token
from tinyllm.llm.generate import Figures, Until, as_sequences, never
from tinyllm.llm.llama import Llama
from tinyllm.llm.sampling import log_probabilities
from tinyllm.llm.sequences import Sequences


@dataclass(frozen=True)
class Beam:
    """A continuation: its ids, their log probability, and whether it is the greedy path."""

    ids: tuple[int, ...]
    score: float
    greedy: bool
    finish: str = ""  # `stop`, with its last id; `length`; empty while it goes on


def beam_search(
    model: Llama,
    ids: Sequence[int],
    *,
    beams: int,
    cache: PagedKVCache | Sequences | None = None,
    max_tokens: int = 64,
    stop: Collection[int] = (),
    until: Until = never,
) -> tuple[list[Beam], Figures]:
    """The most likely continuations that a beam search finds, the best first.

    Args:
        model: the decoder.
        ids: the prompt.
        beams: the number of beams K, 1 to the size of the vocabulary.
        cache: as for `generate`.
        max_tokens: most tokens of a beam, at least 1; fewer at the end of the context.
        stop: ids that end a beam; it keeps its place and its score.
        until: as for `generate`.

    Returns:
        K beams, the best first, and the figures; equal scores keep the order of discovery.

    Raises:
        ValueError: a number is out of bounds, or `Llama.forward` refuses the prompt.
        OutOfBlocks, CacheFull: the cache is too small; its sequences are freed.
    """
    ids = [int(i) for i in ids]
    beams, most = as_size("beams", beams, model.config.vocab), as_size("max_tokens", max_tokens)
    most = max(1, min(most, model.config.max_context - len(ids) + 1))
    sequences = as_sequences(cache, model, len(ids) + most, beams)
    config, figures, stops = model.config, Figures(prompt_tokens=len(ids)), frozenset(stop)

    def finish(said: tuple[int, ...]) -> str:
        if said[-1] in stops or until(said):
            return "stop"
        return "length" if len(said) == most else ""

    token_bytes = bytes_per_token(config.n_layers, config.n_kv_heads, config.d_head)
    figures.contiguous_bytes = beams * (len(ids) + most - 1) * token_bytes

    handles = [sequences.add()]
    found = [Beam((), 0.0, greedy=True)]
    try:
        start = perf_counter()
        rows = [model.forward(ids, sequences.layers(handles[0]), last_only=True)[0]]
        figures.prefill_seconds = perf_counter() - start
        while True:
            found, parents = _best(found, rows, beams, finish)
            handles = _follow(sequences, handles, parents)
            figures.observe(sequences)
            if not handles:
                return found, figures
            start = perf_counter()
            going = [beam for beam in found if not beam.finish]
            rows = [model.forward([b.ids[-1]], sequences.layers(h))[0] for b, h in zip(going, handles)]
            figures.decode_seconds += perf_counter() - start
            figures.decode_tokens += len(going)
    finally:
        for handle in handles:
            sequences.free(handle)


def _best(
    found: list[Beam], rows: list[NDArray[np.float32]], beams: int, finish: Callable[[tuple[int, ...]], str]
) -> tuple[list[Beam], list[int]]:
    """The beams to keep, the best first, and the row that each unfinished one continues."""
    offers = [(beam, -1) for beam in found if beam.finish]
    going = [beam for beam in found if not beam.finish]
    for i, (beam, row) in enumerate(zip(going, rows)):
        scores = log_probabilities(row)
        leader = int(row.argmax())
        for token in _top(scores, beams):
            said, score = (*beam.ids, token), beam.score + float(scores[token])
            offers.append((Beam(said, score, beam.greedy and token == leader, finish(said)), i))
    offers.sort(key=lambda offer: -offer[0].score)  # stable: equal offers keep their order
    kept = offers[:beams]
    if not any(beam.greedy for beam, _ in kept):
        kept[-1] = next(offer for offer in offers if offer[0].greedy)
    return [beam for beam, _ in kept], [i for beam, i in kept if not beam.finish]


def _top(scores: NDArray[np.float64], count: int) -> list[int]:
    """The ids of the highest scores, the highest first and the lowest id of equal ones first."""
    least = np.partition(scores, -count)[-count]
    ids = np.flatnonzero(scores >= least)
    return [int(i) for i in ids[np.argsort(-scores[ids], kind="stable")][:count]]


def _follow(sequences: Sequences, handles: list[int], parents: list[int]) -> list[int]:
    """Free sequences without a successor, and fork those with several."""
    used: set[int] = set()
    kept = []
    for i, handle in enumerate(handles):
        if i not in parents:
            sequences.free(handle)
    for i in parents:
        kept.append(sequences.fork(handles[i]) if i in used else handles[i])
        used.add(i)
    return kept
