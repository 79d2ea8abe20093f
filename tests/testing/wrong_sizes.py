"""Caches that are right until something is large: long, deep, wide, in pieces. Made from the reference."""

from typing import Any

import numpy as np

from tinyllm.infer.arguments import as_integer
from tinyllm.infer.paged import PagedKVCache


class LosesThe129thAppend(PagedKVCache):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._appends: dict[int, int] = {}

    def add_seq(self, seq_id: int) -> None:
        super().add_seq(seq_id)
        self._appends[as_integer("seq_id", seq_id)] = 0

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        super().append(seq_id, layer, k, v)
        seq_id = as_integer("seq_id", seq_id)
        self._appends[seq_id] = self._appends.get(seq_id, 0) + 1
        if self._appends[seq_id] == 129:
            table, lens = self._seqs[seq_id]
            slot = table[(lens[layer] - 1) // self.block_size] * self.block_size
            self._k[layer, :, slot + (lens[layer] - 1) % self.block_size] = 0


class CopiesGroupsOfEight(PagedKVCache):
    """Moves eight positions of a block at a time, and no rest."""

    def _claim(self, plan: Any) -> list[int]:
        blocks = super()._claim(plan)
        for old, new in zip(plan.blocks, blocks, strict=False):
            if old != new and self.block_size > 8:
                self._v[:, :, self._slots(new)][:, :, self.block_size // 8 * 8 :] = 0
        return blocks


class OffsetsInAShort(PagedKVCache):
    """Where a value lies in its block is a number of 16 bits."""

    def gather(self, seq_id: int, layer: int) -> Any:
        k, v = super().gather(seq_id, layer)
        ends = (np.arange(k.shape[1]) % self.block_size + 1) * self.n_kv_heads * self.d_head
        k[:, ends > 2**15] = 0
        return k, v


class PositionsInAShort(PagedKVCache):
    def gather(self, seq_id: int, layer: int) -> Any:
        k, v = super().gather(seq_id, layer)
        return k[:, np.arange(k.shape[1]) % 2**16], v


class LongChunksDropNaN(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        if isinstance(k, np.ndarray) and k.dtype.kind == "f" and k.ndim == 3 and k.shape[1] >= 16:
            k = np.where(np.isnan(k), 0, k)
        super().append(seq_id, layer, k, v)


class AdoptsLongHalves(PagedKVCache):
    """A float16 chunk of 16 positions and more is kept, not copied."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._kept: dict[tuple[int, int], list[tuple[int, Any]]] = {}

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        start = self.seq_len(seq_id, layer)
        super().append(seq_id, layer, k, v)
        if isinstance(k, np.ndarray) and k.dtype == np.float16 and k.shape[1] >= 16:
            self._kept.setdefault((seq_id, layer), []).append((start, k))

    def free(self, seq_id: int) -> None:
        super().free(seq_id)
        self._kept = {at: kept for at, kept in self._kept.items() if at[0] != seq_id}

    def gather(self, seq_id: int, layer: int) -> Any:
        k, v = super().gather(seq_id, layer)
        for start, chunk in self._kept.get((seq_id, layer), []):
            k[:, start : start + chunk.shape[1]] = chunk
        return k, v


class ForksThreeLayers(PagedKVCache):
    """The layers of a child beyond the third are as long as the third."""

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        lens = self._seqs[as_integer("child", child)].lens
        lens[3:] = [min(n, lens[2]) for n in lens[3:]]


class CutsForFive(PagedKVCache):
    """A cut clears what is past it, in a block that five hold."""

    def truncate(self, seq_id: int, length: int) -> None:
        super().truncate(seq_id, length)
        table = self._seqs[as_integer("seq_id", seq_id)].table
        if length % self.block_size and length and self._refs[table[-1]] >= 5:
            self._k[:, :, self._slots(table[-1])][:, :, length % self.block_size :] = 0


class GathersTwentyFourPieces(PagedKVCache):
    def gather(self, seq_id: int, layer: int) -> Any:
        k, v = super().gather(seq_id, layer)
        ends = np.flatnonzero(np.diff(self.block_table(seq_id)) != 1)
        if len(ends) >= 24:
            v[:, (int(ends[23]) + 1) * self.block_size :] = 0
        return k, v


class WritesNinePieces(PagedKVCache):
    """An append whose blocks lie in more pieces loses the last of them."""

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        length = self._seqs[seq_id].lens[layer] if not self._closed and seq_id in self._seqs else 0
        super().append(seq_id, layer, k, v)
        table = self._seqs[as_integer("seq_id", seq_id)].table[length // self.block_size :]
        if np.count_nonzero(np.diff(table) != 1) > 8:
            self._k[layer, :, self._slots(table[-1])] = 0
