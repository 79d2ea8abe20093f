"""The cost of attention on the paged cache, against the contiguous one: `python -m benchmarks.attention`.

One step of decoding appends a position to each layer and attends to all positions. Both sides use the same
attention; only the cache differs. Shapes are those of `benchmarks/cache.py`, with 9 query heads. A round has
sixteen steps, so that it includes one new block.

The two sides alternate, step by step. A figure is the processor time of one thread, for each step the fastest
of all rounds: on a busy machine the slower rounds measure other programs. Needs the extra `check`. Exit code:
0 every target is met, 1 one is missed.
"""

# ruff: noqa: E402
import os

for library in ("OPENBLAS", "MKL", "OMP"):  # before NumPy is loaded: only one thread is measured
    os.environ[f"{library}_NUM_THREADS"] = "1"

import argparse
import gc
import sys
from collections.abc import Callable
from functools import partial
from time import thread_time_ns

import numpy as np

from benchmarks.cache import (
    BLOCK,
    DIMS,
    HEADS,
    LAYERS,
    WARM_UP,
    Row,
    chunk,
    copied,
    keep_freed_memory,
    new_contiguous,
    new_pool,
    refill,
    tell,
)
from tinyllm.infer.attention import Attention, as_float32, gathered, in_place
from tinyllm.llm.llama import LayerCache, PagedSequence

QUERY_HEADS = 9
STEPS = BLOCK  # decoded in a row


def paired(
    baseline: Callable[[], object],
    subject: Callable[[], object],
    rounds: int,
    reset: Callable[[], object] = lambda: None,
) -> float:
    """The ratio `subject / baseline` of one step; `reset`, untimed, returns to the first step."""
    sides = (baseline, subject)
    best = np.full((2, STEPS), np.inf)
    for turn in range(rounds + WARM_UP):
        reset()
        spare = np.empty((1 << 18) + 16 * (37 * turn % 256), np.uint8)  # see `paired` in cache.py
        for step in range(STEPS):
            for side in (0, 1) if (turn + step) % 2 else (1, 0):
                start = thread_time_ns()
                sides[side]()
                took = thread_time_ns() - start
                if turn >= WARM_UP:
                    best[side, step] = min(best[side, step], took)
        del spare
    total = best.sum(axis=1)
    return float(total[1] / total[0])


def decode(
    positions: int,
    attend: Attention,
    rounds: int,
    scattered: bool = False,
    against: Attention | None = None,
) -> float:
    """The ratio of append and attention after some positions to the same on the contiguous cache."""
    pool, contiguous = new_pool(positions + STEPS, scattered), new_contiguous(positions + STEPS)
    sequence = PagedSequence(pool, 0)
    k, v = chunk(1), -chunk(1)
    q = np.random.default_rng(0).standard_normal((QUERY_HEADS, 1, DIMS)).astype(np.float32)

    def step(cache: LayerCache, attend: Attention) -> None:
        for layer in range(LAYERS):
            cache.append(layer, k, v)
            attend(q, cache, layer)

    baseline, subject = partial(step, contiguous, against or attend), partial(step, sequence, attend)
    return paired(baseline, subject, rounds, lambda: refill(pool, contiguous, positions))


def gather(positions: int, rounds: int) -> float:
    """The ratio of append and gather to append and copy."""
    pool, contiguous = new_pool(positions + STEPS), new_contiguous(positions + STEPS)
    k, v = chunk(1), -chunk(1)

    def baseline() -> None:
        for layer in range(LAYERS):
            contiguous.append(layer, k, v)
            copied(contiguous, layer)

    def subject() -> None:
        for layer in range(LAYERS):
            pool.append(0, layer, k, v)
            pool.gather(0, layer)

    return paired(baseline, subject, rounds, lambda: refill(pool, contiguous, positions))


def cast(positions: int, rounds: int) -> float:
    """The ratio of float16 to float32 by shifting bits to NumPy's cast."""
    x = chunk(positions, np.float16)
    return paired(partial(x.astype, np.float32), partial(as_float32, x), rounds)


def measure(rounds: int) -> list[Row]:
    """All rows, in the order of the table."""
    same = "contiguous cache"
    rows = []
    for n in (128, 512, 2048):
        for what, attend, target in (("in place", in_place, 1.1), ("gathered", gathered, None)):
            here = f"at {n:,}, {what}"
            rows += [
                Row(here, same, decode(n, attend, rounds), target),
                Row(f"{here}, scattered blocks", same, decode(n, attend, rounds, scattered=True)),
            ]
        mixed = decode(n, in_place, rounds, against=gathered)
        rows.append(Row(f"at {n:,}, in place", "contiguous, gathered", mixed))
    rows.append(Row("append and gather at 2,048", "append and copy", gather(2048, rounds), 1.25))
    rows.append(Row("2,048 positions to float32", "astype", cast(2048, rounds)))
    return rows


def main() -> int:
    """Print the table; 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="of 16 steps, for a row (default: %(default)s)"
    )
    arguments = parser.parse_args()
    gc.disable()  # a collection in one half of a pair would count against it
    keep_freed_memory()
    rows = measure(max(1, arguments.rounds))
    heads = f"{QUERY_HEADS} query heads on {HEADS}"
    return tell(rows, "step of decoding", f"{LAYERS} layers, {heads}, {DIMS} dims, B = {BLOCK}")


if __name__ == "__main__":
    sys.exit(main())
