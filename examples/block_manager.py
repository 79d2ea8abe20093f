"""A manager of block ids, as engines have it: the books alone, and the data elsewhere.

    tinyllm check examples/block_manager.py:make

Its shape is nano-vllm's, with a fork; `shadow` gives it a pool, so that its books are held to contents too.
"""

from collections import deque

from tinyllm.testing.adapters.block_manager import shadow


class OutOfBlocks(RuntimeError):
    """Nothing has changed."""


class BlockManager:
    """Block tables, a count of holders for each block, and a queue of free ids."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_ids = deque(range(num_blocks))
        self.holders = [0] * num_blocks
        self.tables: dict[int, list[int]] = {}
        self.lens: dict[int, int] = {}

    def add_seq(self, seq_id: int) -> None:
        if seq_id in self.tables:
            raise ValueError(f"sequence {seq_id} is live")
        self.tables[seq_id], self.lens[seq_id] = [], 0

    def fork(self, parent: int, child: int) -> None:
        table = list(self.tables[parent])
        self.add_seq(child)
        self.tables[child], self.lens[child] = table, self.lens[parent]
        for block in table:
            self.holders[block] += 1

    def append(self, seq_id: int, tokens: int) -> list[tuple[int, int]]:
        table, start = self.tables[seq_id], self.lens[seq_id]
        partial = start % self.block_size > 0
        copy = partial and self.holders[table[-1]] > 1
        new = -(-(start + tokens) // self.block_size) - len(table)
        if copy + new > len(self.free_ids):
            raise OutOfBlocks(f"{copy + new} needed, {len(self.free_ids)} free")
        copies = []
        if copy:  # layers grow together: only the last block can be shared and partly filled
            copies = [(table[-1], self._take())]
            self.holders[table[-1]] -= 1
            table[-1] = copies[0][1]
        table += [self._take() for _ in range(new)]
        self.lens[seq_id] += tokens
        return copies

    def block_table(self, seq_id: int) -> list[int]:
        return self.tables[seq_id]

    def free(self, seq_id: int) -> None:
        for block in self.tables.pop(seq_id):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free_ids.append(block)
        del self.lens[seq_id]

    def num_free_blocks(self) -> int:
        return len(self.free_ids)

    def _take(self) -> int:
        block = self.free_ids.popleft()
        self.holders[block] = 1
        return block


make = shadow(BlockManager)
