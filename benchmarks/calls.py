"""Pools of every size and the calls on them that `growth.py` times; each call restores its pool."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from tinyllm.infer.paged import OutOfBlocks, PagedKVCache

BLOCK, LAYERS, HEADS, DIMS = 16, 2, 2, 4  # a kilobyte a block, so that a million fit into a gigabyte
SUBJECT, SCATTERED, LAGGING, CHILD, FILLER = -1, -2, -3, -4, -5  # sequences; the others count from 0
SHORT = 200  # positions of SUBJECT unless it grows; like all its lengths it ends within a block
ROOMY = 2**15  # blocks unless the pool grows: enough for the largest size
MANY = 64  # calls timed together if one is too short for the clock


class Place(NamedTuple):
    """A pool, and the size that grows in it."""

    pool: PagedKVCache
    size: int


class Timed(NamedTuple):
    """A timed function of several `calls`, and two untimed ones: `reset` before each time, `end` at last."""

    act: Callable[[], object]
    reset: Callable[[], object] = lambda: None
    calls: int = 1
    end: Callable[[], object] = lambda: None


Operation = Callable[[Place], Timed]


def extend(pool: PagedKVCache, seq_id: int, tokens: int, layers: Sequence[int] = range(LAYERS)) -> None:
    """Append positions to some layers of a sequence."""
    same = np.broadcast_to(np.float16(1), (HEADS, tokens, DIMS))  # takes no memory
    for layer in layers:
        pool.append(seq_id, layer, same, same)


def add(pool: PagedKVCache, others: int) -> None:
    """Start sequences of a full block; every other one is a fork of the one before."""
    for i in range(others):
        if i % 2:
            pool.fork(i - 1, i)
        else:
            pool.add_seq(i)
            extend(pool, i, BLOCK)


def half_full(blocks: int, length: int = SHORT, others: int = 0) -> PagedKVCache:
    """A half-used pool: SUBJECT and SCATTERED of `length` positions, others, and FILLER for the rest.

    The blocks of SUBJECT are neighbours; no two of SCATTERED are.
    """
    pool = PagedKVCache(blocks, BLOCK, LAYERS, HEADS, DIMS)
    for seq_id in (SUBJECT, SCATTERED, FILLER):
        pool.add_seq(seq_id)
    extend(pool, SUBJECT, length)
    for at in range(0, length, BLOCK):
        extend(pool, SCATTERED, min(BLOCK, length - at))
        extend(pool, FILLER, BLOCK)
    add(pool, others)
    if (more := pool.num_free_blocks() - blocks // 2) > 0:
        extend(pool, FILLER, more * BLOCK)
    return pool


def pool_of(blocks: int) -> Place:
    """A pool of so many blocks."""
    return Place(half_full(blocks), blocks)


def pool_of_many(others: int) -> Place:
    """A pool with so many sequences."""
    return Place(half_full(ROOMY, others=others), others)


def pool_of_long(positions: int) -> Place:
    """A pool with two sequences of about so many positions."""
    length = positions // BLOCK * BLOCK + SHORT % BLOCK
    return Place(half_full(ROOMY, length), length)


def pool_for(tokens: int) -> Place:
    """A pool with room for so many positions three times, and LAGGING: one of its layers is as far ahead."""
    pool = PagedKVCache(3 * (tokens // BLOCK + 2) + 2 * SHORT // BLOCK, BLOCK, LAYERS, HEADS, DIMS)
    for seq_id in (SUBJECT, LAGGING, FILLER):
        pool.add_seq(seq_id)
    extend(pool, SUBJECT, SHORT)
    extend(pool, LAGGING, SHORT)
    extend(pool, LAGGING, tokens, range(1, LAYERS))
    return Place(pool, tokens)


# The calls.


def append(at: Place, tokens: int = 1) -> Timed:
    """Append to one layer; one of sixteen single appends takes a block."""
    pool, length, k = at.pool, at.pool.seq_len(SUBJECT), np.ones((HEADS, tokens, DIMS), np.float32)
    calls = BLOCK if tokens == 1 else 1
    back = partial(pool.truncate, SUBJECT, length)
    return Timed(times(calls, lambda: pool.append(SUBJECT, 0, k, k)), back, calls, back)


def append_copying(at: Place, parent: int = SUBJECT, tokens: int = 1) -> Timed:
    """Append to a fork, into shared blocks."""
    pool, k = at.pool, np.ones((HEADS, tokens, DIMS), np.float32)

    def again() -> None:
        pool.free(CHILD)
        pool.fork(parent, CHILD)

    pool.add_seq(CHILD)
    return Timed(lambda: pool.append(CHILD, 0, k, k), again, end=lambda: pool.free(CHILD))


def append_refused(at: Place, tokens: int = BLOCK) -> Timed:
    """Append to a shared block while no block is free."""
    pool, before, k = at.pool, at.pool.seq_len(FILLER), np.ones((HEADS, tokens, DIMS), np.float32)
    pool.fork(SUBJECT, CHILD)
    extend(pool, FILLER, pool.num_free_blocks() * BLOCK)

    def refused() -> None:
        try:
            pool.append(SUBJECT, 0, k, k)
        except OutOfBlocks:
            return
        raise AssertionError("an append passed, though no block is free")

    def end() -> None:
        pool.truncate(FILLER, before)
        pool.free(CHILD)

    return Timed(times(MANY, refused), calls=MANY, end=end)


def fork(at: Place) -> Timed:
    """Fork an unshared sequence."""
    free = partial(at.pool.free, CHILD)
    at.pool.fork(SUBJECT, CHILD)
    return Timed(lambda: at.pool.fork(SUBJECT, CHILD), free, end=free)


def free_fork(at: Place) -> Timed:
    """Free a sequence that shares all its blocks."""
    return Timed(lambda: at.pool.free(CHILD), lambda: at.pool.fork(SUBJECT, CHILD))


def free(at: Place) -> Timed:
    """Free a sequence that shares none of its blocks."""

    def again() -> None:
        at.pool.add_seq(CHILD)
        extend(at.pool, CHILD, at.pool.seq_len(SUBJECT))

    return Timed(lambda: at.pool.free(CHILD), again)


def add_and_free(at: Place) -> Timed:
    """Start a sequence, and free it empty."""

    def act() -> None:
        at.pool.add_seq(CHILD)
        at.pool.free(CHILD)

    return Timed(times(MANY, act), calls=MANY)


def truncate(at: Place, tokens: int = 1) -> Timed:
    """Take the last positions back."""
    length = at.pool.seq_len(SUBJECT)
    return Timed(lambda: at.pool.truncate(SUBJECT, length), lambda: extend(at.pool, SUBJECT, tokens))


def asked(call: Callable[[Place], object], calls: int = 1) -> Operation:
    """An operation that changes nothing."""
    return lambda at: Timed(times(calls, lambda: call(at)), calls=calls)


def one_by_one(at: Place) -> Timed:
    """Grow a sequence from nothing, a position at a time."""
    pool, k = at.pool, np.ones((HEADS, 1, DIMS), np.float32)

    def again() -> None:
        pool.free(CHILD)
        pool.add_seq(CHILD)

    pool.add_seq(CHILD)
    act = times(at.size, lambda: pool.append(CHILD, 0, k, k))
    return Timed(act, again, end=lambda: pool.free(CHILD))


def append_to_each(at: Place) -> Timed:
    """Append a position to every sequence, one after the other."""
    k = np.ones((HEADS, 1, DIMS), np.float32)

    def act() -> None:
        for i in range(at.size):
            at.pool.append(i, 0, k, k)

    def back() -> None:
        for i in range(at.size):
            at.pool.truncate(i, BLOCK)

    return Timed(act, back, end=back)


def free_each(at: Place) -> Timed:
    """Free every sequence, one after the other."""

    def act() -> None:
        for i in range(at.size):
            at.pool.free(i)

    def again() -> None:
        add(at.pool, at.size)

    act()
    return Timed(act, again, end=again)


def close(build: Callable[[int], PagedKVCache]) -> Operation:
    """Close a pool in use."""

    def timed(at: Place) -> Timed:
        made: list[PagedKVCache] = []
        return Timed(lambda: made.pop().close(), lambda: made.append(build(at.size)))

    return timed


def crowded(others: int) -> PagedKVCache:
    """A pool of about as many blocks as sequences."""
    pool = PagedKVCache(others, BLOCK, LAYERS, HEADS, DIMS)
    add(pool, others)
    return pool


def new(at: Place) -> Timed:
    """Make a pool."""
    made: list[PagedKVCache] = []
    return Timed(lambda: made.append(PagedKVCache(at.size, BLOCK, LAYERS, HEADS, DIMS)), made.clear)


def times(count: int, act: Callable[[], object]) -> Callable[[], None]:
    """A function that calls `act` `count` times."""

    def run() -> None:
        for _ in range(count):
            act()

    return run


def copy(at: Place) -> Timed:
    """The yardstick of `gather`: copy as much from contiguous arrays."""
    k, v = np.ones((2, HEADS, at.pool.seq_len(SUBJECT), DIMS), np.float16)
    return Timed(lambda: (k.copy(), v.copy()))


def write(at: Place) -> Timed:
    """The yardstick of `append`: round, zero and write as much in contiguous arrays."""
    k = np.ones((HEADS, at.size, DIMS), np.float32)
    kept = np.ones((2, LAYERS, *k.shape), np.float16)

    def act() -> None:
        rounded = k.astype(np.float16), k.astype(np.float16)
        kept[:] = 0
        kept[0, 0], kept[1, 0] = rounded

    return Timed(act)


def integers(at: Place) -> Timed:
    """The yardstick of a new pool: make a list of as many integers."""
    made: list[list[int]] = []
    return Timed(lambda: made.append(list(range(at.size))), made.clear)
