"""What a right cache holds, told without paging: contiguous arrays, and who shares what.

The oracle stores contents as `{seq: [(K, V) of each layer]}`, so it cannot share a mistake about slots or
blocks with the cache it judges. Of paging it knows only names: `tables` gives each block a number that is
never used again, which is enough to say how long a table is, which tables share, and what an append costs.
"""

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyllm.testing.contract import Config

Half = NDArray[np.float16]


def half(values: Any) -> Half:
    """Values rounded once to float16 by NumPy's cast, without a warning; every NaN the same NaN (law 3)."""
    with np.errstate(all="ignore"):
        rounded = np.asarray(values).astype(np.float16)
    rounded[np.isnan(rounded)] = np.nan
    return rounded


class Oracle:
    """The state that a right cache of these sizes has. Operations here never fail: ask `cost` first.

    With `lazy_copy` false a fork copies a partial last block at once, instead of at the first write.
    """

    def __init__(self, config: Config, *, lazy_copy: bool = True) -> None:
        self.config = config
        self.lazy_copy = lazy_copy
        self.contents: dict[int, list[tuple[Half, Half]]] = {}
        self.tables: dict[int, list[int]] = {}
        self._next = 0
        self._family: dict[int, int] = {}  # also of those that are gone
        self._families = 0

    def related(self, one: int, other: int) -> bool:
        """Whether both descend from one sequence by forks."""
        return self._family.get(one) == self._family.get(other)

    def lens(self, seq: int) -> list[int]:
        """Positions in each layer."""
        return [k.shape[1] for k, _ in self.contents[seq]]

    def used(self) -> int:
        """Distinct blocks in all tables (law 5)."""
        return len({block for table in self.tables.values() for block in table})

    def free_blocks(self) -> int:
        """Blocks in no table (law 6)."""
        return self.config.num_blocks - self.used()

    def add(self, seq: int) -> None:
        """An empty sequence (law 13)."""
        empty = np.zeros((self.config.n_kv_heads, 0, self.config.d_head), np.float16)
        self.contents[seq] = [(empty, empty)] * self.config.n_layers
        self.tables[seq] = []
        self._families += 1
        self._family[seq] = self._families

    def fork(self, parent: int, child: int) -> None:
        """An equal, which shares every block (law 7), or all but a partial last one."""
        self.contents[child] = list(self.contents[parent])
        self.tables[child] = list(self.tables[parent])
        self._family[child] = self._family[parent]
        if self.fork_cost(parent):
            self.tables[child][-1] = self._next
            self._next += 1

    def fork_cost(self, parent: int) -> int:
        """Blocks that a fork takes: none, unless it copies at once."""
        return int(not self.lazy_copy and max(self.lens(parent)) % self.config.block_size > 0)

    def free(self, seq: int) -> None:
        """Gone, with its references (law 6)."""
        del self.contents[seq], self.tables[seq]

    def truncate(self, seq: int, length: int) -> None:
        """Every layer at most so long, and no block that none of them reaches (law 17)."""
        self.contents[seq] = [(k[:, :length], v[:, :length]) for k, v in self.contents[seq]]
        self.tables[seq] = self.tables[seq][: -(-max(self.lens(seq)) // self.config.block_size)]

    def append(self, seq: int, layer: int, k: Any, v: Any) -> None:
        """Contents grow at their end; blocks written into are the writer's alone afterwards (laws 3, 8)."""
        old_k, old_v = self.contents[seq][layer]
        new_k = np.concatenate([old_k, half(k)], axis=1)
        self.tables[seq] = self._written(seq, layer, new_k.shape[1] - old_k.shape[1])
        self.contents[seq][layer] = (new_k, np.concatenate([old_v, half(v)], axis=1))
        self._next = max(self._next, *self.tables[seq]) + 1

    def cost(self, seq: int, layer: int, tokens: int) -> int:
        """Blocks that appending `tokens` positions takes (law 9)."""
        table, (first, end) = self.tables[seq], self._touched(seq, layer, tokens)
        return len(self._shared(seq, table[first:end])) + max(0, end - len(table))

    def _written(self, seq: int, layer: int, tokens: int) -> list[int]:
        """The table after an append; new blocks are numbered from `_next`."""
        table, (first, end) = list(self.tables[seq]), self._touched(seq, layer, tokens)
        shared = self._shared(seq, table[first:end])
        fresh = itertools.count(self._next)
        table[first:end] = [next(fresh) if block in shared else block for block in table[first:end]]
        return table + [next(fresh) for _ in range(len(table), end)]

    def _touched(self, seq: int, layer: int, tokens: int) -> tuple[int, int]:
        """The first block that an append writes into, and the one after the last, there or not."""
        start, size = self.contents[seq][layer][0].shape[1], self.config.block_size
        return start // size, -(-(start + tokens) // size)

    def _shared(self, seq: int, blocks: list[int]) -> set[int]:
        """Those that another table holds as well."""
        others = {b for other, held in self.tables.items() if other != seq for b in held}
        return others.intersection(blocks)
