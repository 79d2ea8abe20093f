"""A flat pool of cells, one position each, and with each the set of sequences that use it: llama.cpp's idea.

    tinyllm check examples/cells.py:CellCache

There are no blocks, so a fork only enters a name, nothing is ever copied on write, and no count of blocks has
a meaning. `CellCache` puts the contract's ten methods on top, and says what it lacks.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyllm.infer.arguments import as_chunk, as_integer, as_layer, as_size


class OutOfBlocks(RuntimeError):
    """There are fewer free cells than the step needs; nothing has changed."""


class Cells:
    """The pool: K and V `[L, cells, H, D]`, and for each cell its position and who uses it."""

    def __init__(self, count: int, n_layers: int, n_kv_heads: int, d_head: int) -> None:
        shape = (n_layers, count, n_kv_heads, d_head)
        self.k, self.v = np.zeros(shape, np.float16), np.zeros(shape, np.float16)
        self.position = [0] * count
        self.users: list[set[int]] = [set() for _ in range(count)]

    def of(self, seq: int) -> list[int]:
        """The cells of a sequence, in position order."""
        return sorted(
            (c for c, users in enumerate(self.users) if seq in users), key=self.position.__getitem__
        )

    def take(self, seq: int, first: int, count: int) -> None:
        """Cells for `count` positions from `first` on."""
        free = [c for c, users in enumerate(self.users) if not users][:count]
        if len(free) < count:
            raise OutOfBlocks(f"{count} cells needed, {len(free)} free")
        for i, cell in enumerate(free):
            self.users[cell].add(seq)
            self.position[cell] = first + i


class CellCache:
    """The contract on a pool of cells. Layers grow together: cells are taken at layer 0."""

    capabilities = frozenset({"fork", "lazy-copy", "contents", "exact-errors"})

    def __init__(self, num_blocks: int, block_size: int, n_layers: int, n_kv_heads: int, d_head: int) -> None:
        sizes = [as_size("a size", s) for s in (num_blocks, block_size, n_layers, n_kv_heads, d_head)]
        self.shape = (sizes[2], sizes[3], sizes[4])
        self.cells: Cells | None = Cells(sizes[0] * sizes[1], *self.shape)
        self.lens: dict[int, list[int]] = {}

    def _open(self) -> Cells:
        if self.cells is None:
            raise ValueError("the cache is closed")
        return self.cells

    def _live(self, seq: int) -> tuple[Cells, int]:
        cells, seq = self._open(), as_integer("seq_id", seq)
        if seq not in self.lens:
            raise KeyError(f"sequence {seq} is not live")
        return cells, seq

    def add_seq(self, seq_id: int) -> None:
        self._open()
        seq_id = as_integer("seq_id", seq_id)
        if seq_id in self.lens:
            raise ValueError(f"sequence {seq_id} is live")
        self.lens[seq_id] = [0] * self.shape[0]

    def fork(self, parent: int, child: int) -> None:
        (cells, parent), child = self._live(parent), as_integer("child", child)
        self.add_seq(child)
        self.lens[child] = list(self.lens[parent])
        for cell in cells.of(parent):
            cells.users[cell].add(child)

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        k, v = as_chunk(k, v, *self.shape[1:], np.float16)
        tokens, layer = as_size("T", k.shape[1]), as_layer(layer, self.shape[0])
        cells, seq_id = self._live(seq_id)
        lens = self.lens[seq_id]
        if layer == 0:
            cells.take(seq_id, lens[0], tokens)
        mine = cells.of(seq_id)[lens[layer] : lens[layer] + tokens]
        cells.k[layer, mine], cells.v[layer, mine] = k.swapaxes(0, 1), v.swapaxes(0, 1)
        lens[layer] += tokens

    def seq_len(self, seq_id: int, layer: int = 0) -> int:
        _, seq_id = self._live(seq_id)
        return self.lens[seq_id][as_layer(layer, self.shape[0])]

    def gather(self, seq_id: int, layer: int) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
        cells, seq_id = self._live(seq_id)
        mine = cells.of(seq_id)[: self.seq_len(seq_id, layer)]
        return cells.k[layer, mine].swapaxes(0, 1), cells.v[layer, mine].swapaxes(0, 1)

    def free(self, seq_id: int) -> None:
        cells, seq_id = self._live(seq_id)
        for users in cells.users:
            users.discard(seq_id)
        del self.lens[seq_id]

    def block_table(self, seq_id: int) -> NDArray[np.int32]:
        raise NotImplementedError("cells have no blocks")

    def stats(self) -> dict[str, int]:
        raise NotImplementedError("cells have no blocks")

    def num_free_blocks(self) -> int:
        raise NotImplementedError("cells have no blocks")

    def close(self) -> None:
        self.cells = None
