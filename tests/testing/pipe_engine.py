"""A cache in Python behind the protocol of docs/protocol.md, and on demand a bad speaker of it."""

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tinyllm.testing.adapters.loading import load
from tinyllm.testing.adapters.subprocess_cache import CARRIED
from tinyllm.testing.contract import CAPABILITIES


class Server:
    """Answers one line at a time."""

    def __init__(self, factory: Any, offers: str) -> None:
        self.factory, self.offers, self.cache = factory, offers, None
        self.sizes: tuple[Any, ...] = ()

    def answer(self, line: str) -> str:
        try:
            return " ".join(["ok", *map(str, self.act(*line.split()))])
        except Exception as error:
            return f"error {type(error).__name__} {error}".replace("\n", " ")

    def act(self, name: str = "", *words: str) -> Any:
        if name in {"hello", "close", "new"} and len(words) != (5 if name == "new" else 0):
            raise TypeError(f"{name} does not take {len(words)} arguments")
        if name == "hello":
            return self.offers.split()
        if name == "close" and self.cache is None:
            return []
        if name == "new":
            sizes = tuple(map(number, words))
            self.cache, self.sizes = self.factory(*sizes), sizes
            return []
        if self.cache is None:
            raise ValueError("the cache is closed")
        return getattr(self, name)(self.cache, *words) or []

    def add(self, cache: Any, seq: str) -> None:
        cache.add_seq(number(seq))

    def fork(self, cache: Any, parent: str, child: str) -> None:
        cache.fork(number(parent), number(child))

    def append(self, cache: Any, seq: str, layer: str, tokens: str, *data: str) -> None:
        shape = self.sizes[3], number(tokens), self.sizes[4]
        k, v = (np.frombuffer(bytes.fromhex(word.strip("-")), "<f4").reshape(shape) for word in data)
        cache.append(number(seq), number(layer), k, v)

    def free(self, cache: Any, seq: str) -> None:
        cache.free(number(seq))

    def table(self, cache: Any, seq: str) -> Any:
        return cache.block_table(number(seq)).tolist()

    def len(self, cache: Any, seq: str, layer: str) -> Any:
        return [cache.seq_len(number(seq), number(layer))]

    def gather(self, cache: Any, seq: str, layer: str) -> Any:
        pair = cache.gather(number(seq), number(layer))
        return [pair[0].shape[1], *(array.astype("<f2").tobytes().hex() or "-" for array in pair)]

    def stats(self, cache: Any) -> Any:
        stats = cache.stats()
        return [stats[key] for key in ("free", "used", "cached", "evictions")]

    def freeblocks(self, cache: Any) -> Any:
        return [cache.num_free_blocks()]

    def close(self, cache: Any) -> None:
        cache.close()

    def needed(self, cache: Any, seq: str, layer: str, tokens: str) -> Any:
        return [cache.blocks_needed(number(seq), number(layer), number(tokens))]

    def truncate(self, cache: Any, seq: str, length: str) -> None:
        cache.truncate(number(seq), number(length))

    def pages(self, cache: Any, layer: str, *seqs: str) -> Any:
        return [
            n for array in cache.page_table(list(map(number, seqs)), number(layer)) for n in array.tolist()
        ]

    def check(self, cache: Any) -> None:
        cache.check()


def number(word: str) -> Any:
    try:
        return int(word)
    except ValueError:
        return float(word)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", default="tinyllm.infer.paged")
    parser.add_argument("--offers", default=" ".join(sorted({*CAPABILITIES, *CARRIED})))
    parser.add_argument("--bug", help="a name in hostile_engine.py")
    parser.add_argument("--after", type=int, default=100, help="requests before it begins")
    parser.add_argument("--noisy", action="store_true", help="much on standard error, and right answers")
    options = parser.parse_args()
    hostile = runpy.run_path(str(Path(__file__).with_name("hostile_engine.py")))
    server = Server(load(options.cache), options.offers)
    for request, line in enumerate(sys.stdin.buffer):
        if options.noisy:
            hostile["complain"]()
        if options.bug and request >= options.after:
            hostile["MISBEHAVIOUR"][options.bug]()
        else:
            hostile["say"](f"{server.answer(line.decode())}\n".encode())


if __name__ == "__main__":
    main()
