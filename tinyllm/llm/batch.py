"""Many requests on one pool: continuous batching, with preemption when blocks run out.

In every step each running request decodes a token by itself; then waiting requests are admitted while their
tokens so far fit. If an append finds no block, the youngest running request is preempted: it frees its blocks
and waits. When it is admitted again it is replayed in its first chunks, the prompt and then single tokens, so
that its logits are equal bit for bit: a small pool costs time and changes no token.

The oldest request is never preempted by another, so it ends, and then the next: if the pool holds the longest
request, all end. The source is Kwon et al., "Efficient Memory Management for Large Language Model
Serving with PagedAttention", section 4.5, whose recovery by recomputation this is.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from tinyllm.infer.arguments import as_integer, as_size
from tinyllm.infer.paged import OutOfBlocks, PagedKVCache
from tinyllm.infer.planning import blocks_for_lengths, waste
from tinyllm.llm.generate import Until, never
from tinyllm.llm.llama import Llama, LlamaConfig
from tinyllm.llm.sampling import Sampling
from tinyllm.llm.sequences import Paged


class PoolTooSmall(ValueError):  # noqa: N818 - a sibling of OutOfBlocks
    """A request does not fit into the pool even alone: it needs `needed` of `num_blocks` blocks."""

    def __init__(self, needed: int, num_blocks: int) -> None:
        super().__init__(needed, num_blocks)
        self.needed, self.num_blocks = needed, num_blocks

    def __str__(self) -> str:
        return f"the request may need {self.needed} blocks, but the pool has {self.num_blocks} in all"


@dataclass(frozen=True)
class Request:
    """A prompt and the options of its output.

    Args:
        ids: the prompt, at least one id.
        max_tokens: most tokens to generate, at least 1.
        sampling: how to choose tokens.
        stop: ids that end the output, each as its last id.
        until: as for `generate`.
    """

    ids: Sequence[int]
    max_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    stop: Collection[int] = ()
    until: Until = never


@dataclass
class Finished:
    """A finished request: its number in the order of submission, its ids, and `stop` or `length`."""

    number: int
    ids: list[int]
    finish: str
    preemptions: int


@dataclass
class BatchFigures:
    """The figures of a batch so far; tokens are computed positions."""

    requests: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    preemptions: int = 0
    replayed_tokens: int = 0  # recomputed after a preemption
    peak_blocks: int = 0  # in use at once
    peak_waste: float = 0.0  # share of empty slots in those blocks
    used: list[int] = field(default_factory=list)  # blocks in use after each step


def checked(config: LlamaConfig, request: Request) -> tuple[list[int], int]:
    """The prompt's ids, and the most tokens to generate within the model's context.

    The cache of the request holds up to `len(ids) + most - 1` positions.

    Raises:
        ValueError: the prompt is empty or exceeds the context, an id is outside the vocabulary, or
            max_tokens is below 1. TypeError: an id or max_tokens is no integer.
    """
    prompt = [as_integer("id", i) for i in request.ids]
    most = as_size("max_tokens", request.max_tokens)
    if not 1 <= len(prompt) <= config.max_context:
        raise ValueError(f"the prompt has {len(prompt):,} tokens; it must have 1 to {config.max_context:,}")
    for i in prompt:
        if not 0 <= i < config.vocab:
            raise ValueError(f"id {i} is outside the vocabulary, [0, {config.vocab})")
    return prompt, min(most, config.max_context - len(prompt) + 1)


@dataclass(eq=False)
class _Active:
    number: int
    prompt: list[int]
    request: Request
    most: int  # tokens to generate
    random: np.random.Generator
    ids: list[int] = field(default_factory=list)  # generated; the last one is not cached yet
    handle: int = -1  # its sequence, while it runs
    preemptions: int = 0

    @property
    def chunks(self) -> list[list[int]]:
        """The chunks of its passes, replayed in the same way; the last is the next to compute."""
        return [self.prompt, *([token] for token in self.ids)]


class Batch:
    """A pool, and the requests that share it.

    `submit` at any time; `step` until `idle`. The ids of a request depend on it alone, not on other requests
    or the size of the pool. After an error from `step`, only `close` may follow; `finished` has the requests
    that this step finished.

    Args:
        model: the decoder.
        cache: a pool with the sizes of the model; blocks of other sequences are not available.
    """

    def __init__(self, model: Llama, cache: PagedKVCache) -> None:
        self.model, self.cache = model, cache
        self.figures = BatchFigures()
        self.finished: list[Finished] = []  # by the last step
        self._sequences = Paged(cache)
        self._waiting: list[_Active] = []  # the oldest first
        self._running: list[_Active] = []  # likewise; all are older than any that waits

    @property
    def idle(self) -> bool:
        """Whether every request is finished."""
        return not (self._waiting or self._running)

    def submit(self, request: Request) -> int:
        """Add a request and return its number, from 0; `step` computes it.

        Raises:
            PoolTooSmall: the pool cannot hold the request alone to its end.
            ValueError, TypeError: as `checked`.
        """
        prompt, most = checked(self.model.config, request)
        needed = blocks_for_lengths([len(prompt) + most - 1], self.cache.block_size)
        if needed > self.cache.num_blocks:
            raise PoolTooSmall(needed, self.cache.num_blocks)
        number = self.figures.requests
        self._waiting.append(_Active(number, prompt, request, most, request.sampling.stream()))
        self.figures.requests += 1
        self.figures.prompt_tokens += len(prompt)
        return number

    def step(self) -> list[Finished]:
        """Decode a token of every running request, then admit waiting ones; returns the finished requests.

        Raises OutOfBlocks: other sequences hold so many blocks that no request can begin.
        """
        self.finished = []
        for active in list(self._running):
            if active in self._running:  # not preempted meanwhile
                self._advance(active)
        while self._waiting and self._admit():
            self._advance(self._running[-1])
        self._note()
        return self.finished

    def close(self) -> None:
        """Free the blocks of running requests, and drop all unfinished requests."""
        for active in self._running:
            self._sequences.free(active.handle)
        self._running, self._waiting = [], []

    def _admit(self) -> bool:
        """Admit and replay the oldest waiting request, if its blocks and its next chunk fit."""
        active, free = self._waiting[0], self.cache.num_free_blocks()
        active.handle = self._sequences.add()
        needed = self.cache.blocks_needed(active.handle, 0, sum(map(len, active.chunks)))
        if needed > free:
            self._sequences.free(active.handle)
            if not self._running:
                raise OutOfBlocks(needed, free)
            return False
        self._running.append(self._waiting.pop(0))
        for chunk in active.chunks[:-1]:
            self.model.forward(chunk, self._sequences.layers(active.handle), last_only=True)
            self.figures.replayed_tokens += len(chunk)
        return True

    def _advance(self, active: _Active) -> None:
        """Compute a request's next chunk and choose the token after it, which may finish the request."""
        while active in self._running:
            try:
                layers = self._sequences.layers(active.handle)
                logits = self.model.forward(active.chunks[-1], layers, last_only=True)[0]
                break
            except OutOfBlocks:
                youngest = self._running.pop()
                self._sequences.free(youngest.handle)
                self._waiting.insert(0, youngest)
                youngest.preemptions += 1
                self.figures.preemptions += 1
        else:
            return
        active.ids.append(active.request.sampling.pick(logits, active.random))
        self.figures.new_tokens += 1
        stopped = active.ids[-1] in active.request.stop or active.request.until(active.ids)
        if not stopped and len(active.ids) < active.most:
            return
        finish = "stop" if stopped else "length"
        self.finished.append(Finished(active.number, active.ids, finish, active.preemptions))
        self._note_peak()
        self._running.remove(active)
        self._sequences.free(active.handle)

    def _note(self) -> None:
        self._note_peak()
        self.figures.used.append(self.cache.stats()["used"])

    def _note_peak(self) -> None:
        used = self.cache.stats()["used"]
        if used > self.figures.peak_blocks:
            self.figures.peak_blocks = used
            self.figures.peak_waste = waste(self.cache, [active.handle for active in self._running]).share
