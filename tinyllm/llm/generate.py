"""Generate from a prompt: one output or several that share it, token by token, on either cache.

`generate` returns when it is through, `stream` hands out each token as it comes. The prompt is computed once;
further outputs are forks of it, which in a pool share its blocks. Every output is decoded by itself, a token
a pass, so what it says does not depend on how many others there are.

With `lookup`, a greedy output drafts its next tokens from its own text: what followed the last few tokens
when they came up before. One pass checks a whole draft, and `truncate` takes back what the model would not
have said. The source is Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", with
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

BLOCK = 16  # positions in a block of a pool of its own
DRAFT = 8  # tokens of a draft at most
LONGEST, SHORTEST = 4, 2  # tokens that have to have come up before: as many as did
TIE = 1e-4  # a lead of the best logit up to which a pass over several tokens may pick another

P = ParamSpec("P")
Until = Callable[[Sequence[int]], bool]
"""Whether the ids of an output end it."""


def never(_: Sequence[int]) -> bool:
    """No ids end an output."""
    return False


class Step(NamedTuple):
    """A token, and which output it belongs to."""

    output: int
    id: int


@dataclass
class Output:
    """What one output says so far, and why it ended: `stop`, with its last token, or `length`."""

    ids: list[int] = field(default_factory=list)
    finish: str = ""


@dataclass
class Figures:
    """The cost of a generation: seconds spent computing, without the caller's time, and bytes of K and V."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0  # all but the first of each output, which the prompt's pass gives
    decode_seconds: float = 0.0
    held_bytes: int = 0  # at the peak
    contiguous_bytes: int = 0  # what contiguous caches of the longest lengths hold for the same outputs
    shared_blocks: int = 0  # held by more than one output, at the peak
    drafted: int = 0  # tokens
    accepted: int = 0
    ties: int = 0  # tokens that led by at most 1e-4
    single_seconds: float = 0.0  # of a pass over one token, the middle of those with `lookup`

    def look(self, sequences: Sequences) -> None:
        """Note what is held now, if it is the most so far."""
        self.held_bytes = max(self.held_bytes, sequences.held())
        self.shared_blocks = max(self.shared_blocks, sequences.shared())

    @property
    def speed_up(self) -> float:
        """How much faster than a pass a token drafts made it; 1 if there was nothing to compare."""
        plain = self.single_seconds * self.decode_tokens
        return plain / self.decode_seconds if plain and self.decode_seconds else 1.0


class Result(NamedTuple):
    """What `generate` returns."""

    outputs: list[Output]
    figures: Figures


class Generation(Iterator[Step]):
    """The tokens as they come; `outputs` and `figures` grow along. Its end, or `close`, frees the cache."""

    def __init__(self, n: int, steps: "Callable[[Generation], Iterator[Step]]") -> None:
        self.outputs = [Output() for _ in range(n)]
        self.figures = Figures()
        self._steps = steps(self)

    def __next__(self) -> Step:
        """The next token of any output."""
        return next(self._steps)

    def close(self) -> None:
        """End it here: what the sequences hold goes back."""
        getattr(self._steps, "close", lambda: None)()


@dataclass(frozen=True)
class _Job:
    model: Llama
    ids: list[int]
    sequences: Sequences
    most: int  # tokens an output
    sampling: Sampling
    stop: frozenset[int]
    until: Until

    def begin(self, made: Generation) -> tuple[int, Logits]:
        """The prompt in a sequence, and the logits after it."""
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
        """Add a token; whether the output goes on."""
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
        cache: a pool, which may hold other sequences too, or `Contiguous` caches; a pool of its own if None.
        max_tokens: tokens an output at most, at least 1; fewer where the model's context ends.
        sampling: how to choose tokens; the most likely one if None.
        n: outputs, at least 1. The prompt is computed once for all of them.
        stop: ids that end an output; the one that does is its last.
        until: asked after each token, with the ids of its output so far, whether they end it; see `stops`.
        lookup: draft tokens from the text so far. Greedy alone, and one output. The ids are those of a pass
            a token, unless one leads by no more than 1e-4: sums are rounded differently.

    Returns:
        An iterator of `Step`, whose `outputs` and `figures` are to be read at any time.

    Raises:
        ValueError: a number out of bounds; from the first step, a prompt that `Llama.forward` refuses, or
            logits that are NaN.
        OutOfBlocks, CacheFull: from a step, where the cache is too small; what it held is freed.
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
    """Where to keep n sequences of up to `longest` positions: what is given, or a new pool with room."""
    if cache is None:
        cache = new_pool(model.config, blocks_for_lengths([longest] * n, BLOCK), BLOCK)
    return Paged(cache) if isinstance(cache, PagedKVCache) else cache


def _plain(job: _Job, made: Generation) -> Iterator[Step]:
    """A pass a token; outputs take turns."""
    first, logits = job.begin(made)
    live = {0: first}  # handles of outputs that go on
    streams = [job.sampling.stream(i) for i in range(len(made.outputs))]
    try:
        live |= {i: job.sequences.fork(first) for i in range(1, len(made.outputs))}
        for i in list(live):
            yield from _step(job, made, live, i, job.sampling.pick(logits, streams[i]))
        while live:
            made.figures.look(job.sequences)
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
        made.figures.look(job.sequences)
        job.sequences.free(live.pop(i))
    yield Step(i, token)


def _drafted(job: _Job, made: Generation) -> Iterator[Step]:
    """A pass a draft; what the model would not have said is cut off again."""
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
            room = job.most - len(output.ids) - 1  # the pass itself gives one more token
            guess = draft(text, min(DRAFT, room)) if single else []  # one pass without, to compare with
            rows = job.model.forward([text[-1], *guess], cache)
            chosen = [job.sampling.pick(row, none) for row in rows]
            right = next((i for i, (a, b) in enumerate(zip(guess, chosen)) if a != b), len(guess))
            figures.look(job.sequences)
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
    """What followed the last few tokens where they last came up before: up to `most` ids, or none."""
    row = np.asarray(ids)
    for n in range(min(LONGEST, len(row) - 1), SHORTEST - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(row[:-1], n)
        found = np.flatnonzero((windows == row[-n:]).all(axis=1))
        if len(found):
            after = int(found[-1]) + n
            period = len(row) - after  # what runs into the end of the text goes on in the draft itself
            return [int(row[after + i % period]) for i in range(most)]
    return []
