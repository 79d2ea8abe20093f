"""Caches that keep every law and are built in another way: the kit must have nothing against them."""

import operator
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tinyllm.grading.bugs import load_set
from tinyllm.infer import paged
from tinyllm.infer.paged import PagedKVCache


class OutOfBlocks(MemoryError):  # noqa: N818 - the contract's name
    """Of no kin to ours: it is known by its name alone."""


class UnknownError(KeyError):
    """An error of its own that is a KeyError."""


class Naive:
    """A dict of blocks made when needed; ids come in a scattered order; freed blocks count as cached."""

    __slots__ = ("blocks", "evicted", "is_closed", "lens", "order", "shape", "size", "tables", "total")

    def __init__(self, num_blocks: int, block_size: int, n_layers: int, n_kv_heads: int, d_head: int) -> None:
        for size in (num_blocks, block_size, n_layers, n_kv_heads, d_head):
            if operator.index(size) < 1:
                raise ValueError(f"{size} is too small")
        self.total, self.size = num_blocks, block_size
        self.shape = (n_layers, block_size, n_kv_heads, d_head, 2)  # token-major, K and V together
        self.blocks: dict[int, Any] = {}
        self.order = [*range(1, num_blocks, 2), *range(0, num_blocks, 2)]  # never handed out before
        self.evicted = 0
        self.tables: dict[int, list[int]] = {}
        self.lens: dict[int, list[int]] = {}
        self.is_closed = False

    def open(self, seq: Any = 0, layer: Any = 0) -> int:
        if self.is_closed:
            raise ValueError("closed")
        if not 0 <= operator.index(layer) < self.shape[0]:
            raise IndexError(layer)
        return operator.index(seq)

    def known(self, seq: Any, layer: Any = 0) -> int:
        seq = self.open(seq, layer)
        if seq not in self.tables:
            raise UnknownError(seq)
        return operator.index(seq)

    def add_seq(self, seq: int) -> None:
        seq = self.open(seq)
        if seq in self.tables:
            raise ValueError("taken")
        self.tables[seq], self.lens[seq] = [], [0] * self.shape[0]

    def fork(self, parent: int, child: int) -> None:
        parent, child = self.known(parent), self.open(child)
        self.add_seq(child)
        self.tables[child], self.lens[child] = list(self.tables[parent]), list(self.lens[parent])

    def held(self) -> Counter[int]:
        return Counter(block for table in self.tables.values() for block in table)

    def append(self, seq: int, layer: int, k: Any, v: Any) -> None:
        seq = self.known(seq, layer)
        pair = [np.array(a) for a in (k, v)]
        heads, dims = self.shape[2:4]
        if any(a.dtype.kind not in "iuf" for a in pair):
            raise TypeError("no numbers")
        if pair[0].ndim != 3 or pair[0].shape != pair[1].shape or pair[0].shape[::2] != (heads, dims):
            raise ValueError("wrong shape")
        with np.errstate(all="ignore"):
            values = np.stack(pair, axis=-1).swapaxes(0, 1).astype(np.float16)  # [T, H, D, 2]
        if not len(values):
            raise ValueError("nothing")
        start = self.lens[seq][layer]
        table, held = self.tables[seq], self.held()
        touched = range(start // self.size, (start + len(values) - 1) // self.size + 1)
        fresh = [i for i in touched if i >= len(table) or held[table[i]] > 1]
        unused = [block for block in reversed(self.order) if block not in held]
        if len(fresh) > len(unused):
            raise OutOfBlocks("full")
        for i, block in zip(fresh, unused, strict=False):
            self.evicted += block in self.blocks
            self.blocks[block] = (
                self.blocks[table[i]].copy() if i < len(table) else np.zeros(self.shape, np.float16)
            )
            table[i : i + 1] = [block]
        for at, value in enumerate(values, start):
            self.blocks[table[at // self.size]][layer, at % self.size] = value
        self.lens[seq][layer] = start + len(values)

    def block_table(self, seq: int) -> Any:
        seq = self.known(seq)
        return np.array(self.tables[seq], np.int32)

    def seq_len(self, seq: int, layer: int = 0) -> Any:
        seq = self.known(seq, layer)
        return np.int64(self.lens[seq][layer])

    def gather(self, seq: int, layer: int) -> Any:
        seq = self.known(seq, layer)
        n, parts = self.lens[seq][layer], [self.blocks[b][layer] for b in self.tables[seq]]
        whole = np.concatenate([np.empty((0, *self.shape[2:]), np.float16), *parts])[:n].swapaxes(0, 1)
        return whole[..., 0], whole[..., 1]  # strided views, of memory that nobody else has

    def free(self, seq: int) -> None:
        seq = self.known(seq)
        del self.tables[seq], self.lens[seq]

    def stats(self) -> dict[str, int]:
        self.open()
        used = len(self.held())
        cached = len(self.blocks) - used
        free = self.total - used - cached
        return {"free": free, "used": used, "cached": cached, "evictions": self.evicted, "hits": id(self)}

    def num_free_blocks(self) -> int:
        stats = self.stats()
        return stats["free"] + stats["cached"]

    def close(self) -> None:
        self.is_closed = True


class CountsItsCalls(PagedKVCache):
    """Its counts hold more than the contract asks for, and a refused call is counted there."""

    calls = 0

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        self.calls += 1
        super().append(seq_id, layer, k, v)

    def stats(self) -> dict[str, int]:
        return super().stats() | {"calls": self.calls}


class Renumbers(PagedKVCache):
    """Gives each block the next id after every append, and after a refused one: what is held stays shared."""

    gather_runs: Any = None  # its views would show the ids as they were

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        try:
            super().append(seq_id, layer, k, v)
        finally:
            if not self._closed:
                self._renumber()

    def _renumber(self) -> None:
        for pool in (self._k, self._v):
            pool[:] = np.roll(pool, self.block_size, axis=2)
        self._refs = [self._refs[-1], *self._refs[:-1]]
        for blocks in (self._free, *(seq.table for seq in self._seqs.values())):
            blocks[:] = [(block + 1) % self.num_blocks for block in blocks]


def make(num_blocks: int, block_size: int, n_layers: int, n_kv_heads: int, d_head: int) -> PagedKVCache:
    """A factory that is a function."""
    return PagedKVCache(num_blocks, block_size, n_layers, n_kv_heads, d_head)


class Maker:
    """A factory that is an object, and cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __call__(self, *sizes: int) -> PagedKVCache:
        return PagedKVCache(*sizes)


maker = Maker()
another = lambda *sizes: PagedKVCache(*sizes)  # noqa: E731, PLW0108 - a name that is none


def _queue() -> Any:
    """The reference with a queue of free blocks, not a stack: which id comes next is nobody's business."""
    (order,) = [bug for bug in load_set("course") if bug.survives]
    space: dict[str, Any] = {"__name__": "queue"}
    exec(order.apply(Path(paged.__file__).read_text(encoding="utf-8")), space)
    return space["PagedKVCache"]


Queue = _queue()
