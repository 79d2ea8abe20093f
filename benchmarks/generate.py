"""A real model on the paged cache, against the contiguous one: `python -m benchmarks.generate`.

Time: a step of decoding and a prompt, at several lengths, with one and two threads of the linear algebra
library. The two caches alternate, and the fastest turn of each counts, so that a busy machine slows both.

Memory: the bytes of outputs, beams and mixed requests in a pool, against contiguous caches preallocated for
the longest sequence, their best case. `--svg FILE` draws the used blocks while mixed requests run, in a pool
that holds them all and in a quarter of it.

Needs the extra `bench`, and the model: `tinyllm model fetch`. Exit code: 0 every target is met, 1 one is
missed.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter_ns

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from threadpoolctl import threadpool_limits

from benchmarks.cache import Row, chunk, keep_freed_memory, tell
from tinyllm.infer.planning import blocks_for_lengths, bytes_per_token
from tinyllm.llm.batch import Batch, BatchFigures, Request
from tinyllm.llm.beams import beam_search
from tinyllm.llm.generate import generate
from tinyllm.llm.llama import LayerCache, Llama
from tinyllm.llm.model import find
from tinyllm.llm.sampling import Sampling
from tinyllm.llm.sequences import Contiguous, Paged, Sequences, new_pool
from tinyllm.llm.weights import load

BLOCK = 16
LENGTHS = {128: 1.05, 512: 1.05, 2048: 1.10}  # positions, and how much slower the pool may be
STEPS = 8  # of decoding in a row
MIXED = 50  # requests
WASTE, SAVED = 4.0, 60.0  # per cent


def prompt(length: int, seed: int = 0) -> list[int]:
    """Ids of ordinary tokens; the choice does not affect time."""
    return [int(i) for i in np.random.default_rng(seed).integers(1000, 40_000, length)]


def places(model: Llama, longest: int) -> list[Sequences]:
    """A pool and contiguous caches, in this order, with room for one sequence of `longest` positions."""
    blocks = -(-longest // BLOCK)
    return [Paged(new_pool(model.config, blocks, BLOCK)), Contiguous(model.config, longest)]


def filled(place: Sequences, model: Llama, length: int) -> tuple[int, LayerCache]:
    """A sequence of `length` positions with random keys and values."""
    handle = place.add()
    cache = place.layers(handle)
    values = chunk(length)
    for layer in range(model.config.n_layers):
        cache.append(layer, values, -values)
    return handle, cache


def fastest(acts: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of the fastest turn of each function; they alternate."""
    best = [float("inf")] * len(acts)
    for turn in range(rounds + 1):  # the first warms up
        for i in range(len(acts))[:: 1 if turn % 2 else -1]:
            start = perf_counter_ns()
            acts[i]()
            if turn:
                best[i] = min(best[i], (perf_counter_ns() - start) / 1e9)
    return best


def decode(model: Llama, length: int, rounds: int) -> list[float]:
    """Tokens a second of decoding after `length` positions, on the pool and on the contiguous cache."""
    kept = [(place, *filled(place, model, length)) for place in places(model, length + STEPS)]

    def step(place: Sequences, handle: int, cache: LayerCache) -> None:
        for token in range(STEPS):
            model.forward([1000 + token], cache)
        place.truncate(handle, length)

    acts = [partial(step, *each) for each in kept]
    return [STEPS / seconds for seconds in fastest(acts, rounds)]


def prefill(model: Llama, length: int, rounds: int) -> list[float]:
    """Tokens a second of a prompt, on the pool and on the contiguous cache."""
    ids = prompt(length)
    kept = [(place, place.add()) for place in places(model, length)]

    def read(place: Sequences, handle: int) -> None:
        model.forward(ids, place.layers(handle), last_only=True)
        place.truncate(handle, 0)

    acts = [partial(read, *each) for each in kept]
    return [length / seconds for seconds in fastest(acts, rounds)]


def mixed() -> tuple[list[Request], list[int]]:
    """Short and long requests, as on a server, and the final positions of each."""
    random = np.random.default_rng(0)
    longest = (100, 100, 100, 100, 700)  # one in five is long
    sizes = [(int(random.integers(8, longest[i % 5])), int(random.integers(4, 24))) for i in range(MIXED)]
    requests = [Request(prompt(n, i), new, Sampling(0.8, seed=i)) for i, (n, new) in enumerate(sizes)]
    return requests, [n + new - 1 for n, new in sizes]


def serve(model: Llama, requests: list[Request], blocks: int, tell: Callable[[], None]) -> BatchFigures:
    """Run all requests on a pool of `blocks` blocks."""
    batch = Batch(model, new_pool(model.config, blocks, BLOCK))
    for request in requests:
        batch.submit(request)
    while not batch.idle:
        for _ in batch.step():
            tell()
    return batch.figures


def draw(path: Path, runs: dict[str, tuple[BatchFigures, int]]) -> None:
    """Draw the used blocks after each step as SVG, a panel a run."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "tinyllm", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(
        len(runs), 1, figsize=(7, 2.2 * len(runs)), sharex=True, layout="constrained"
    )
    for axis, (name, (figures, blocks)) in zip(axes, runs.items()):
        axis.fill_between(range(len(figures.used)), figures.used, step="post", color="#4477aa", alpha=0.5)
        axis.step(range(len(figures.used)), figures.used, where="post", color="#223355", linewidth=0.8)
        axis.axhline(blocks, color="black", linestyle="--", linewidth=0.8)
        axis.set_title(
            f"{name}: {blocks} blocks, {figures.preemptions} preemptions, "
            f"{figures.replayed_tokens:,} tokens replayed",
            loc="left",
        )
        axis.set_ylabel("blocks in use")
        axis.set_ylim(0, blocks * 1.08)
    axes[-1].set_xlabel(f"step ({MIXED} requests, {BLOCK} positions a block; the dashed line is the pool)")
    axes[-1].set_xlim(0)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> int:
    """Print the tables; 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side (default: %(default)s)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the use of the pool over time")
    arguments = parser.parse_args()
    gc.disable()
    keep_freed_memory()
    console = Console()
    model = load(find())
    speeds = Table(
        "", "threads", "paged, tokens/s", "contiguous", "slower by", "at most", "target", title="time"
    )
    rows: list[Row] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        total = bar.add_task("measuring", total=4 * len(LENGTHS) + 2 * MIXED + 2)
        for threads in (1, 2):
            with threadpool_limits(threads):
                for name, measure in (("decode", decode), ("prefill", prefill)):
                    for length, most in LENGTHS.items():
                        paged, contiguous = measure(model, length, max(1, arguments.rounds))
                        row = Row(f"{name} at {length:,}", f"{threads}", contiguous / paged, most)
                        rows.append(row)
                        speeds.add_row(
                            row.what, row.baseline, f"{paged:,.1f}", f"{contiguous:,.1f}",
                            f"{row.ratio:.3f}x", f"{most}x", row.verdict(),
                            style="bold red" if row.verdict() == "missed" else None,
                        )  # fmt: skip
                        bar.advance(total)
        console.print(speeds)
        memory, runs = _memory(model, lambda: bar.advance(total))
    missed = tell(memory, "memory", "memory")
    if arguments.svg:
        draw(arguments.svg, runs)
    return int(missed or any(row.verdict() == "missed" for row in rows))


def _memory(model: Llama, tell: Callable[[], None]) -> tuple[list[Row], dict[str, tuple[BatchFigures, int]]]:
    config = model.config
    token = bytes_per_token(config.n_layers, config.n_kv_heads, config.d_head)
    rows = []
    outputs = generate(model, prompt(512), max_tokens=32, n=8, sampling=Sampling(1.0)).figures
    stored = (512 + 8 * 31) * token  # the prompt once, and each output without its last token
    saved = 100 * outputs.held_bytes / outputs.contiguous_bytes
    rows.append(Row("-n 8 after 512 tokens: held", "contiguous", saved, 100 - SAVED, " %"))
    rows.append(Row("-n 8: slots empty", "held", 100 * (1 - stored / outputs.held_bytes), None, " %"))
    tell()
    _, beams = beam_search(model, prompt(512), beams=8, max_tokens=32)
    saved = 100 * beams.held_bytes / beams.contiguous_bytes
    rows.append(Row("8 beams after 512 tokens: held", "contiguous", saved, None, " %"))
    tell()
    one = generate(model, prompt(512), max_tokens=16).figures
    empty = 100 * (1 - (512 + 15) * token / one.held_bytes)
    rows.append(Row("one output of 527 positions: slots empty", "held", empty, WASTE, " %"))
    requests, lengths = mixed()
    need = blocks_for_lengths(lengths, BLOCK)
    runs = {}
    for name, blocks in (("a pool for all", need), ("a quarter", need // 4)):
        figures = serve(model, requests, blocks, tell)
        runs[name] = figures, blocks
        against = MIXED * max(lengths) * token
        held = figures.peak_blocks * BLOCK * token
        rows.append(Row(f"{MIXED} requests, {name}: held", "contiguous", 100 * held / against, None, " %"))
        rows.append(
            Row(f"{MIXED} requests, {name}: slots empty", "held", 100 * figures.peak_waste, None, " %")
        )
    long = [n for n in lengths if n >= 512]
    empty = 100 * (1 - sum(long) / (blocks_for_lengths(long, BLOCK) * BLOCK))
    rows.append(Row(f"the {len(long)} of them from 512 positions: slots empty", "held", empty, WASTE, " %"))
    return rows, runs


if __name__ == "__main__":
    sys.exit(main())
