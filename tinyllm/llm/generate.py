"""Generate one output or several from a prompt, token by token, on either cache.

`generate` returns the finished outputs, `stream` yields each token. The prompt is computed once; further
outputs are forks, which share its blocks in a pool. Every output is decoded by itself, a token a pass, so its
tokens do not depend on the number of outputs.

With `lookup`, a greedy output drafts its next tokens from its own text: the tokens that followed an earlier
occurrence of the last few. One pass checks a whole draft, and `truncate` removes the tokens that the model
rejects. The source is Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", with
the text so far in the place of a drafting model.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, ParamSpec

import numpy as np

from tinyllm.infer.arguments import as_size
from tinyllm.infer.paged import PagedKVCache
from tinyllm.infer.planning import blocks_for_lengths, bytes_per_token
from tinyllm.llm.llama import Llama
from tinyllm.llm.sampling import Logits, Sampling
from tinyllm.llm.sequences import Paged, Sequences, new_pool

BLOCK = 16  # positions in a block of a new pool
DRAFT = 8  # most tokens of a draft
LONGEST, SHORTEST = 4, 2  # length of the repeated tokens that start a draft; the longest match wins
TIE = 1e-4  # lead of the best logit within which a pass over several tokens may pick another token

P = ParamSpec("P")
Until = Callable[[Sequence[int]], bool]
"""Says whether the ids of an output end it."""


def never(_: Sequence[int]) -> bool:
    """End no output."""
    return False


class Step(NamedTuple):
    """A token, and the number of its output."""

    output: int
    id: int


@dataclass
class Output:
    """The ids of an output so far, and its end: `stop`, `length`, or empty."""

    ids: list[int] = field(default_factory=list)
    finish: str = ""


@dataclass
class Figures:
    """The cost of a generation: seconds spent computing, without the caller's time, and bytes of K and V."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0  # without the first of each output, which prefill gives
    decode_seconds: float = 0.0
    held_bytes: int = 0  # at the peak
    contiguous_bytes: int = 0  # of contiguous caches of the longest length for the same outputs
    shared_blocks: int = 0  # held by more than one output, at the peak
    drafted: int = 0  # tokens
    accepted: int = 0
    ties: int = 0  # tokens that led by at most 1e-4
    single_seconds: float = 0.0  # median pass over one token, with `lookup`

    def observe(self, sequences: Sequences) -> None:
        """Update the peaks of bytes and shared blocks."""
        self.held_bytes = max(self.held_bytes, sequences.held())
        self.shared_blocks = max(self.shared_blocks, sequences.shared())

    @property
    def speed_up(self) -> float:
        """The speed relative to a pass a token; 1 if no such pass was measured."""
        plain = self.single_seconds * self.decode_tokens
        return plain / self.decode_seconds if plain and self.decode_seconds else 1.0


class Result(NamedTuple):
    """The result of `generate`."""

    outputs: list[Output]
    figures: Figures


class Generation(Iterator[Step]):
    """An iterator of tokens that fills `outputs` and `figures`; its end, or `close`, frees the cache."""

    def __init__(self, n: int, steps: "Callable[[Generation], Iterator[Step]]") -> None:
        self.outputs = [Output() for _ in range(n)]
        self.figures = Figures()
        self._steps = steps(self)

    def __next__(self) -> Step:
        """The next token of any output."""
        return next(self._steps)

    def close(self) -> None:
        """Stop early, and free the sequences."""
        getattr(self._steps, "close", lambda: None)()


@dataclass(frozen=True)
class _Job:
    model: Llama
    ids: list[int]
    sequences: Sequences
    most: int  # most tokens of an output
    sampling: Sampling
    stop: frozenset[int]
    until: Until

    def begin(self, made: Generation) -> tuple[int, Logits]:
        """Compute the prompt; returns its sequence and the logits after it."""
        handle = self.sequences.add()
        try:
            start = perf_counter()
            logits = self.model.forward(self.ids, self.sequences.layers(handle), last_only=True)[0]
            made.figures.prefill_seconds = perf_counter() - start
        except BaseException:
            self.sequences.free(handle)
            raise
        config = self.model.config
        token = bytes_per_token(config.n_layers, config.n_kv_heads, config.d_head)
        made.figures.prompt_tokens = len(self.ids)
        made.figures.contiguous_bytes = len(made.outputs) * (len(self.ids) + self.most - 1) * token
        return handle, logits

    def take(self, output: Output, token: int) -> bool:
        """Add a token; returns whether the output continues."""
        output.ids.append(token)
        if token in self.stop or self.until(output.ids):
            output.finish = "stop"
        elif len(output.ids) == self.most:
            output.finish = "length"
        return not output.finish


def stream(
    model: Llama,
    ids: Sequence[int],
    *,
    cache: PagedKVCache | Sequences | None = None,
    max_tokens: int = 64,
    sampling: Sampling | None = None,
    n: int = 1,
    stop: Collection[int] = (),
    until: Until = never,
    lookup: bool = False,
) -> Generation:
    """Generate token by token.

    Args:
        model: the decoder.
        ids: the prompt, at least one id; at most `max_context` of them.
        cache: a pool, which may hold other sequences, or `Contiguous` caches; None makes a new pool.
        max_tokens: most tokens of an output, at least 1; fewer at the end of the context.
        sampling: how to choose tokens; None takes the most likely one.
        n: the number of outputs, at least 1.
        stop: ids that end an output, each as its last id.
        until: called after each token with the ids of its output; True ends it. See `stops`.
        lookup: draft tokens from the text so far, for one greedy output. The ids equal those of a pass a
            token, except where the best logit leads by at most 1e-4: sums are rounded differently.

    Returns:
        An iterator of `Step`; its `outputs` and `figures` can be read at any time.

    Raises:
        ValueError: a number is out of bounds; from a step, `Llama.forward` refuses the prompt, or logits
            are NaN.
        OutOfBlocks, CacheFull: from a step, the cache is too small; its sequences are freed.
    """
    ids = [int(i) for i in ids]
    most, n = as_size("max_tokens", max_tokens), as_size("n", n)
    most = max(1, min(most, model.config.max_context - len(ids) + 1))
    sampling = Sampling() if sampling is None else sampling
    if lookup and (n > 1 or sampling.temperature > 0):
        raise ValueError(
            f"lookup is for one greedy output, not for {n} at temperature {sampling.temperature}"
        )
    place = as_sequences(cache, model, len(ids) + most, n)
    job = _Job(model, ids, place, most, sampling, frozenset(stop), until)
    return Generation(n, (lambda made: _drafted(job, made)) if lookup else (lambda made: _plain(job, made)))


def _run_to_end(start: Callable[P, Generation]) -> Callable[P, Result]:
    def generate(*args: P.args, **kwargs: P.kwargs) -> Result:
        made = start(*args, **kwargs)
        for _ in made:
            pass
        return Result(made.outputs, made.figures)

    return generate


generate = _run_to_end(stream)
"""Run `stream` to its end: the same arguments and errors, and the `Result`."""


def as_sequences(cache: PagedKVCache | Sequences | None, model: Llama, longest: int, n: int) -> Sequences:
    """The given cache as `Sequences`, or a new pool for n sequences of up to `longest` positions."""
    if cache is None:
        cache = new_pool(model.config, blocks_for_lengths([longest] * n, BLOCK), BLOCK)
    return Paged(cache) if isinstance(cache, PagedKVCache) else cache


def _plain(job: _Job, made: Generation) -> Iterator[Step]:
    """Decode a token a pass; outputs take turns."""
    first, logits = job.begin(made)
    live = {0: first}  # handles of unfinished outputs
    streams = [job.sampling.stream(i) for i in range(len(made.outputs))]
    try:
        live |= {i: job.sequences.fork(first) for i in range(1, len(made.outputs))}
        for i in list(live):
            yield from _step(job, made, live, i, job.sampling.pick(logits, streams[i]))
        while live:
            made.figures.observe(job.sequences)
            for i, handle in list(live.items()):
                start = perf_counter()
                token = made.outputs[i].ids[-1]
                logits = job.model.forward([token], job.sequences.layers(handle))[0]
                token = job.sampling.pick(logits, streams[i])
                made.figures.decode_seconds += perf_counter() - start
                made.figures.decode_tokens += 1
                yield from _step(job, made, live, i, token)
    finally:
        for handle in live.values():
            job.sequences.free(handle)


def _step(job: _Job, made: Generation, live: dict[int, int], i: int, token: int) -> Iterator[Step]:
    if not job.take(made.outputs[i], token):
        made.figures.observe(job.sequences)
        job.sequences.free(live.pop(i))
    yield Step(i, token)


def _drafted(job: _Job, made: Generation) -> Iterator[Step]:
    """Decode a draft a pass; rejected tokens are truncated."""
    handle, logits = job.begin(made)
    [output], figures, cache = made.outputs, made.figures, job.sequences.layers(handle)
    single: list[float] = []  # seconds of passes without a draft
    none = job.sampling.stream()
    try:
        going = job.take(output, job.sampling.pick(logits, none))
        yield Step(0, output.ids[-1])
        while going:
            start = perf_counter()
            text = job.ids + output.ids
            room = job.most - len(output.ids) - 1  # the pass gives one more token
            guess = draft(text, min(DRAFT, room)) if single else []  # the first pass has none, for comparison
            rows = job.model.forward([text[-1], *guess], cache)
            chosen = [job.sampling.pick(row, none) for row in rows]
            right = next((i for i, (a, b) in enumerate(zip(guess, chosen)) if a != b), len(guess))
            figures.observe(job.sequences)
            job.sequences.truncate(handle, len(text) + right)
            took = perf_counter() - start
            figures.decode_seconds += took
            if not guess:
                single.append(took)
                figures.single_seconds = sorted(single)[len(single) // 2]
            figures.drafted += len(guess)
            figures.accepted += right
            for token, row in zip(chosen[: right + 1], rows):
                second, best = np.partition(row, -2)[-2:]
                figures.ties += int(best - second <= TIE)
                figures.decode_tokens += 1
                going = job.take(output, token)
                yield Step(0, token)
                if not going:
                    break
    finally:
        job.sequences.free(handle)


def draft(ids: Sequence[int], most: int) -> list[int]:
    """The up to `most` ids that followed the last earlier occurrence of the last few tokens."""
    row = np.asarray(ids)
    for n in range(min(LONGEST, len(row) - 1), SHORTEST - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(row[:-1], n)
        found = np.flatnonzero((windows == row[-n:]).all(axis=1))
        if len(found):
            after = int(found[-1]) + n
            period = len(row) - after  # past the end of the text the draft repeats itself
            return [int(row[after + i % period]) for i in range(most)]
    return []
