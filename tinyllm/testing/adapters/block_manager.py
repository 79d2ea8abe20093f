"""Hold a manager that deals in block ids, and stores no data, to the laws of contents all the same.

Engines such as vLLM and SGLang keep the books in one place and the data in another: a block manager says
which blocks a sequence has and which must be copied, and kernels write and read. `shadow` puts a small pool
where the kernels would be. It writes through the manager's block tables, carries out the copies it orders and
gathers, so that a wrong table, a copy forgotten or a block handed out twice shows as wrong contents.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tinyllm.infer.arguments import as_chunk, as_integer, as_layer, as_size
from tinyllm.testing.contract import CAPABILITIES, Capability, Factory

LACKING = frozenset({Capability.CONTENTS, Capability.INDEPENDENT_LAYERS, Capability.EXACT_ERRORS})
"""What no manager of ids has: data; layers (it counts positions); errors of its own for arrays."""


class Manager(Protocol):
    """A block manager: ids alone. Errors are those of `PagedCache`; a call that raises changes nothing."""

    def add_seq(self, seq_id: int, /) -> None:
        """Start an empty sequence."""

    def fork(self, parent: int, child: int, /) -> None:
        """Start `child` with the parent's blocks."""

    def append(self, seq_id: int, tokens: int, /) -> Sequence[tuple[int, int]]:
        """Make room for so many positions; the copies (from, to) to be made before they are written."""

    def block_table(self, seq_id: int, /) -> Sequence[int]:
        """Block ids in position order."""

    def free(self, seq_id: int, /) -> None:
        """Drop a sequence."""

    def num_free_blocks(self) -> int:
        """How many blocks are free."""


class _Shadow:
    """A manager and the pool `[L, blocks, H, B, D]` that it manages, as a `PagedCache`."""

    def __init__(self, manager: Manager, sizes: tuple[int, int, int, int, int]) -> None:
        self._manager: Manager | None = manager
        self._blocks, self._size, self._layers, self._heads, self._dims = sizes
        shape = (self._layers, self._blocks, self._heads, self._size, self._dims)
        self._pools: tuple[NDArray[np.float16], ...] = (
            np.zeros(shape, np.float16),
            np.zeros(shape, np.float16),
        )
        self._lens: dict[int, list[int]] = {}

    def _open(self, *ids: int) -> Manager:
        for seq_id in ids:
            as_integer("seq_id", seq_id)
        if self._manager is None:
            raise ValueError("the cache is closed")
        return self._manager

    def add_seq(self, seq_id: int) -> None:
        self._open(seq_id).add_seq(seq_id)
        self._lens[seq_id] = [0] * self._layers

    def fork(self, parent: int, child: int) -> None:
        manager = self._open(parent, child)
        manager.fork(parent, child)
        self._lens[child] = list(self._lens[parent])
        # A manager that does not share a partial block has given the child one of its own: data go along.
        for old, new in zip(manager.block_table(parent), manager.block_table(child), strict=True):
            self._copy(old, new)

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        manager = self._open(seq_id)
        arrays = as_chunk(k, v, self._heads, self._dims, np.float16)
        tokens = as_size("T", arrays[0].shape[1])
        layer = as_layer(layer, self._layers)
        manager.block_table(seq_id)  # refuses an unknown id, at every layer
        if layer == 0:
            for old, new in manager.append(seq_id, tokens):
                self._copy(old, new)
        table, start = manager.block_table(seq_id), self._lens[seq_id][layer]
        for i in range(tokens):
            block, slot = table[(start + i) // self._size], (start + i) % self._size
            for pool, array in zip(self._pools, arrays, strict=True):
                pool[layer, block, :, slot] = array[:, i]
        self._lens[seq_id][layer] += tokens

    def block_table(self, seq_id: int) -> NDArray[np.int32]:
        return np.array(self._open(seq_id).block_table(seq_id), np.int32)

    def seq_len(self, seq_id: int, layer: int = 0) -> int:
        self._open(seq_id).block_table(seq_id)
        return self._lens[seq_id][as_layer(layer, self._layers)]

    def gather(self, seq_id: int, layer: int) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
        table, length = self._open(seq_id).block_table(seq_id), self.seq_len(seq_id, layer)
        k, v = (
            np.array(
                [pool[layer, table[p // self._size], :, p % self._size] for p in range(length)], np.float16
            )
            for pool in self._pools
        )
        shape = (length, self._heads, self._dims)
        return k.reshape(shape).swapaxes(0, 1), v.reshape(shape).swapaxes(0, 1)

    def free(self, seq_id: int) -> None:
        self._open(seq_id).free(seq_id)
        del self._lens[seq_id]

    def stats(self) -> dict[str, int]:
        free = self.num_free_blocks()
        return {"free": free, "used": self._blocks - free, "cached": 0, "evictions": 0}

    def num_free_blocks(self) -> int:
        return self._open().num_free_blocks()

    def close(self) -> None:
        self._manager = None
        self._pools = ()

    def _copy(self, old: int, new: int) -> None:
        for pool in self._pools:
            pool[:, new] = pool[:, old]


def shadow(make: Callable[[int, int], Manager], *, lacks: frozenset[str] = frozenset()) -> Factory:
    """A factory for the kit, of a manager that is made as `make(num_blocks, block_size)`.

    Args:
        make: the manager's class, or a function.
        lacks: capabilities that this manager lacks, besides `LACKING`.
    """

    class Shadow(_Shadow):
        capabilities = frozenset(CAPABILITIES) - LACKING - lacks

        def __init__(self, *sizes: int) -> None:
            blocks, size, layers, heads, dims = (as_size("a size", one) for one in sizes)
            super().__init__(make(blocks, size), (blocks, size, layers, heads, dims))

    Shadow.__name__ = Shadow.__qualname__ = getattr(make, "__name__", "Shadow")
    return Shadow
