"""A cache of this project behind the protocol of docs/protocol.md, and the ways to speak it badly."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tinyllm.testing.contract import CAPABILITIES
from tinyllm.testing.implementation import load


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
        if name == "hello":
            return self.offers.split()
        if name == "close" and self.cache is None:
            return []
        if name == "new":
            self.sizes = tuple(map(number, words))
            self.cache = self.factory(*self.sizes)
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


def number(word: str) -> Any:
    try:
        return int(word)
    except ValueError:
        return float(word)


def forever(act: Callable[[], object]) -> None:
    while True:
        act()


def sleep() -> None:
    forever(lambda: time.sleep(60))


def say(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def complain() -> None:
    sys.stderr.write("so much to say " * 10_000)
    sys.stderr.flush()


def part_of(text: bytes) -> None:
    say(text)
    sleep()


def close_output() -> None:
    os.close(1)
    sleep()


def close_input() -> None:
    os.close(0)
    say(b"ok\n")
    sleep()


def crash() -> None:
    raise RuntimeError("last words")


MISBEHAVIOUR: dict[str, Callable[[], object]] = {
    "garbage": lambda: say(b"lorem ipsum\n"),
    "nothing": lambda: say(b"\n"),
    "nameless": lambda: say(b"error\n"),
    "misnamed": lambda: say(b"error 7up is no name\n"),
    "twice": lambda: say(b"ok\nok\n"),
    "binary": lambda: say(b"ok \xff\xfe\n"),
    "endless": lambda: forever(lambda: say(b"ok " * 10_000)),
    "part": lambda: part_of(b"ok 1"),
    "hang": sleep,
    "complains": lambda: forever(complain),
    "crash": crash,
    "exit": lambda: os._exit(3),
    "killed": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "mute": close_output,
    "deaf": close_input,
}


def serve(server: Server, source: BinaryIO, options: argparse.Namespace) -> None:
    answers = dict(one.split("=", 1) for one in options.answer)
    for request, line in enumerate(source):
        if request >= options.after and options.bug:
            MISBEHAVIOUR[options.bug]()
            continue
        if options.noisy:
            complain()
        text = line.decode()
        name = text.split(" ")[0].strip()
        say(f"{answers[name] if name in answers else server.answer(text)}\n".encode())
        if options.unasked and request >= options.after:
            time.sleep(0.1)
            say(b"by the way\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", default="tinyllm.infer.paged")
    parser.add_argument("--offers", default=" ".join(sorted(CAPABILITIES)))
    parser.add_argument("--bug", choices=MISBEHAVIOUR)
    parser.add_argument("--after", type=int, default=100, help="requests before it begins")
    parser.add_argument("--noisy", action="store_true", help="much on standard error, and right answers")
    parser.add_argument("--unasked", action="store_true", help="another line, a little later")
    parser.add_argument("--answer", action="append", default=[], help="NAME=LINE")
    parser.add_argument("--alive", help="a named pipe to hold open: it ends with the process")
    options = parser.parse_args()
    held = Path(options.alive).open("wb", buffering=0) if options.alive else None  # noqa: SIM115
    serve(Server(load(options.cache), options.offers), sys.stdin.buffer, options)
    if held:
        held.close()


if __name__ == "__main__":
    main()
