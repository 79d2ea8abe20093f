"""The paged cache against contiguous arrays, in time and in memory: `python benchmarks/cache.py`.

Every figure is a ratio to a baseline of the same process, measured in pairs, so that a busy machine slows
both. Shapes are those of SmolLM2-135M: 30 layers, 3 key/value heads, 64 dimensions; blocks of 16
positions. Needs the extra `check`. Exit code: 0 every target is met, 1 one is missed.
"""

import argparse
import gc
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from rich.console import Console
from rich.table import Table

from tinyllm.infer.kvcache import KVCache
from tinyllm.infer.paged import PagedKVCache

LAYERS, HEADS, DIMS, BLOCK = 30, 3, 64, 16
POSITION_BYTES = LAYERS * 2 * HEADS * DIMS * 2  # K and V of one position, float16
POOL = 20_000  # blocks, 7.4 GB of address space, most of it never touched
WARM_UP = 3  # rounds that fill caches and settle the allocator
SMAPS = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True)
class Row:
    """One measurement: both sides in words, the ratio, and its limit."""

    what: str
    baseline: str
    ratio: float
    target: float | None = None
    unit: str = "x"

    def verdict(self) -> str:
        """`met` or `missed`; empty without a target."""
        if self.target is None:
            return ""
        return "met" if self.ratio <= self.target else "missed"


def chunk(tokens: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """K or V of `tokens` positions, `[HEADS, tokens, DIMS]`."""
    return np.random.default_rng(tokens).standard_normal((HEADS, tokens, DIMS)).astype(dtype)


def new_pool(positions: int, scattered: bool = False) -> PagedKVCache:
    """A warm pool with room for `positions`, whose next blocks are neighbours or scattered."""
    blocks = 2 * -(-positions // BLOCK)
    pool = PagedKVCache(blocks, BLOCK, LAYERS, HEADS, DIMS)
    one = chunk(BLOCK)
    pool.add_seq(-1)
    pool.add_seq(-2)
    for i in range(blocks):
        for layer in range(LAYERS):  # every layer, so that all memory is touched
            pool.append(-1 - i % 2 if scattered else -1, layer, one, one)
    pool.free(-1)
    pool.add_seq(0)
    return pool


def new_contiguous(positions: int) -> KVCache:
    """A full cache of `positions`, whose memory is touched."""
    cache = KVCache(positions, LAYERS, HEADS, DIMS)
    one = chunk(positions)
    for layer in range(LAYERS):
        cache.append(layer, one, one)
    return cache


def rewind(cache: KVCache, length: int = 0) -> None:
    """Shorten a cache and keep its warm memory, which a new one would not have."""
    cache._lens[:] = [length] * LAYERS


def paired(
    baseline: Callable[[], object],
    subject: Callable[[], object],
    rounds: int,
    reset: Callable[[], object] = lambda: None,
) -> float:
    """The median of `subject / baseline`, timed alternately; `reset` runs before each pair, untimed.

    Some processors copy three times as slowly to an address whose offset in its page is just past the
    source's. A spare array of varying size moves the copies between rounds, so that no row is slow by chance.
    """
    ratios = []
    for turn in range(rounds + WARM_UP):
        reset()
        spare = np.empty((1 << 18) + 16 * (37 * turn % 256), np.uint8)
        times = []
        for run in (baseline, subject):
            start = perf_counter_ns()
            run()
            times.append(perf_counter_ns() - start)
        del spare
        if turn >= WARM_UP:
            ratios.append(times[1] / times[0])
    return statistics.median(ratios)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, as it does once a model is loaded.

    Until an array of tens of megabytes has been freed, glibc returns the memory of each copy to the system.
    Both sides would then measure page faults, which take ten times as long as the copy.
    """
    np.ones(30 << 20, np.uint8)


def each_layer(act: Callable[[int], object], times: int = 1) -> Callable[[], None]:
    """A function that calls `act` for every layer: the same loop for both sides."""

    def run() -> None:
        for _ in range(times):
            for layer in range(LAYERS):
                act(layer)

    return run


def copied(cache: KVCache, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Copies of K and V of a layer, the baseline of `gather`."""
    k, v = cache.gather(layer)
    return k.copy(), v.copy()


def refill(pool: PagedKVCache, contiguous: KVCache, positions: int) -> None:
    """Reset sequence 0 of the pool, and the contiguous cache, to `positions`."""
    rewind(contiguous, positions)
    pool.free(0)
    pool.add_seq(0)
    if positions:
        prompt = chunk(positions)
        each_layer(lambda layer: pool.append(0, layer, prompt, prompt))()


def gather(positions: int, scattered: bool, rounds: int) -> float:
    """The ratio of gathering every layer to copying the same positions of contiguous arrays."""
    pool, contiguous = new_pool(positions, scattered), new_contiguous(positions)
    refill(pool, contiguous, positions)
    baseline = each_layer(lambda layer: copied(contiguous, layer))
    return paired(baseline, each_layer(lambda layer: pool.gather(0, layer)), rounds)


def prefill(positions: int, dtype: DTypeLike, scattered: bool, rounds: int) -> float:
    """The ratio of one chunk appended to every layer to the contiguous cache."""
    pool, contiguous = new_pool(positions, scattered), new_contiguous(positions)
    k, v = chunk(positions, dtype), -chunk(positions, dtype)
    baseline = each_layer(lambda layer: contiguous.append(layer, k, v))
    subject = each_layer(lambda layer: pool.append(0, layer, k, v))
    return paired(baseline, subject, rounds, lambda: refill(pool, contiguous, 0))


def decode(bare: bool, rounds: int) -> float:
    """The ratio of 64 single appends after 512 positions to the contiguous cache or bare array writes."""
    first, steps = 512, 64
    pool, contiguous = new_pool(first + steps), new_contiguous(first + steps)
    k, v = chunk(1), -chunk(1)
    shape = (LAYERS, HEADS, first + steps, DIMS)
    array_k, array_v = np.ones(shape, np.float16), np.ones(shape, np.float16)

    def write(layer: int) -> None:
        array_k[layer, :, first : first + 1] = k
        array_v[layer, :, first : first + 1] = v

    baseline = each_layer(write if bare else lambda layer: contiguous.append(layer, k, v), steps)
    subject = each_layer(lambda layer: pool.append(0, layer, k, v), steps)
    return paired(baseline, subject, rounds, lambda: refill(pool, contiguous, first))


def fork(positions: int, rounds: int) -> float:
    """The ratio of a fork and a free to copying both contiguous arrays."""
    pool, contiguous = new_pool(positions), new_contiguous(positions)
    refill(pool, contiguous, positions)
    array_k, array_v = (np.ones((LAYERS, HEADS, positions, DIMS), np.float16) for _ in range(2))

    times = (
        10  # at a time: one takes microseconds, most of them to fetch what the copy drove out of the caches
    )

    def subject() -> None:
        for _ in range(times):
            pool.fork(0, 1)
            pool.free(1)

    return paired(lambda: (array_k.copy(), array_v.copy()), subject, rounds) / times


def resident() -> int:
    """Resident bytes of this process."""
    lines = SMAPS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


def memory(case: str) -> int:
    """Resident bytes of a pool, idle or with two sequences; for a fresh process."""
    positions = 600
    one = chunk(1)
    blocks = 2 * -(-positions // BLOCK) if case == "tight" else POOL
    PagedKVCache(1, 1, 1, 1, 1).close()  # imports of a first use are not the pool's
    before = resident()
    pool = PagedKVCache(blocks, BLOCK, LAYERS, HEADS, DIMS)
    if case != "idle":
        pool.add_seq(0)
        pool.add_seq(1)
        for i in range(2 * positions):
            for layer in range(LAYERS):
                pool.append(i % 2, layer, one, one)
    return resident() - before


def memory_of(case: str) -> int:
    """`memory` in a fresh process, which has no freed memory to reuse."""
    command = [sys.executable, os.fspath(Path(__file__)), "--memory", case]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(rounds: int) -> list[Row]:
    """All rows, in the order of the table."""
    copying, cache = "copying contiguous arrays", "KVCache.append"
    rows = [
        Row("gather 512, neighbouring blocks", copying, gather(512, False, 4 * rounds), 1.25),
        Row("gather 512, scattered blocks", copying, gather(512, True, 4 * rounds)),
        Row("gather 2,048, neighbouring blocks", copying, gather(2048, False, rounds), 1.25),
        Row("gather 2,048, scattered blocks", copying, gather(2048, True, rounds)),
        Row("append 1 float32, decoding", cache, decode(False, rounds), 2.0),
        Row("append 1 float32, decoding", "bare slice writes", decode(True, rounds)),
        Row("append 512 float32, neighbouring blocks", cache, prefill(512, np.float32, False, rounds), 1.4),
        Row("append 512 float32, scattered blocks", cache, prefill(512, np.float32, True, rounds)),
        Row("append 512 float16, neighbouring blocks", cache, prefill(512, np.float16, False, rounds)),
        Row("append 512 float16, scattered blocks", cache, prefill(512, np.float16, True, rounds)),
        Row("fork and free 2,048", copying, fork(2048, rounds), 0.01),
    ]
    if SMAPS.exists():
        stored = 2 * 600 * POSITION_BYTES
        roomy, tight = (memory_of(case) / stored for case in ("roomy", "tight"))
        rows += [
            Row(f"memory of an idle pool of {POOL:,} blocks", "", memory_of("idle") / 1e6, 20, " MB"),
            Row(f"memory of 2 x 600 positions, {POOL:,} blocks", "bytes stored", roomy, 1.1),
            Row("memory of 2 x 600 positions, as few blocks as fit", "bytes stored", tight, 1.1),
        ]
    return rows


def tell(rows: Sequence[Row], what: str, title: str) -> int:
    """Print the rows as a table; 1 if a target is missed."""
    table = Table(what, "against", title=title)
    for column in ("measured", "at most"):
        table.add_column(column, justify="right")
    table.add_column("target")
    for row in rows:
        most = "" if row.target is None else f"{row.target:g}{row.unit}"
        style = {"met": "green", "missed": "bold red"}.get(row.verdict())
        table.add_row(row.what, row.baseline, f"{row.ratio:.3g}{row.unit}", most, row.verdict(), style=style)
    Console().print(table)
    return int(any(row.verdict() == "missed" for row in rows))


def main() -> int:
    """Print the table; 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="pairs timed for a row (default: %(default)s)")
    parser.add_argument("--memory", choices=("idle", "roomy", "tight"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(memory(arguments.memory))
        return 0
    gc.disable()  # a collection in one half of a pair would count against it
    keep_freed_memory()
    rows = measure(max(1, arguments.rounds))
    code = tell(rows, "paged cache", f"{LAYERS} layers, {HEADS} heads, {DIMS} dims, B = {BLOCK}")
    if not SMAPS.exists():
        print(f"memory was not measured: there is no {SMAPS} here")
    return code


if __name__ == "__main__":
    sys.exit(main())
