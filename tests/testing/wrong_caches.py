"""Caches that are wrong, each in one way, for the tests of the kit; `load("...wrong_caches.py:Name")`.

Most are a line or two that people really wrote (docs/laws.md names the law). They are made from the
reference, so that the one way is all that is wrong.
"""

from typing import Any, ClassVar

import numpy as np

from tinyllm.infer.paged import OutOfBlocks, PagedKVCache


class TableAsList(PagedKVCache):
    def block_table(self, seq_id: int) -> Any:
        return super().block_table(seq_id).tolist()


class TableOfInt64(PagedKVCache):
    def block_table(self, seq_id: int) -> Any:
        return super().block_table(seq_id).astype(np.int64)


class IdsFromOne(PagedKVCache):
    def block_table(self, seq_id: int) -> Any:
        return super().block_table(seq_id) + np.int32(1)


class BlockBeforeItIsNeeded(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        super().append(seq_id, layer, k, v)
        table, lens = self._seqs[seq_id]
        if max(lens) == len(table) * self.block_size and self._free:
            table.append(self._free.pop())
            self._refs[table[-1]] += 1


class GathersFloat32(PagedKVCache):
    def gather(self, seq_id: int, layer: int) -> Any:
        k, v = super().gather(seq_id, layer)
        return k.astype(np.float32), v.astype(np.float32)


class GathersAList(PagedKVCache):
    def gather(self, seq_id: int, layer: int) -> Any:
        return list(super().gather(seq_id, layer))


class GathersListsOfNumbers(PagedKVCache):
    def gather(self, seq_id: int, layer: int) -> Any:
        return tuple(array.tolist() for array in super().gather(seq_id, layer))


class _Rounds(PagedKVCache):
    change: ClassVar[Any]  # a function of an array

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        k, v = np.asarray(k), np.asarray(v)
        if k.dtype.kind == v.dtype.kind == "f":
            with np.errstate(all="ignore"):
                k, v = type(self).change(k), type(self).change(v)
        super().append(seq_id, layer, k, v)


class ClipsOverflow(_Rounds):
    change: ClassVar[Any] = lambda a: np.where(np.isfinite(a), np.clip(a, -65504, 65504), a)


class FlushesSubnormals(_Rounds):
    change: ClassVar[Any] = lambda a: np.where(abs(a) < 2.0**-14, np.copysign(0, a), a)


class DropsTheSignOfZero(_Rounds):
    change: ClassVar[Any] = lambda a: a + 0.0


class DropsNaN(_Rounds):
    change: ClassVar[Any] = np.nan_to_num


class RoundsUp(_Rounds):
    change: ClassVar[Any] = lambda a: np.nextafter(a, np.where(np.isfinite(a), np.copysign(np.inf, a), a))


class WarnsOnOverflow(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        for array in (k, v):
            if isinstance(array, np.ndarray) and array.dtype == np.float32:
                with np.errstate(under="ignore"):
                    array.astype(np.float16)
        super().append(seq_id, layer, k, v)


class LayerZeroWritesAll(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        super().append(seq_id, layer, k, v)
        if layer == 0 and self.n_layers > 1 and self.seq_len(seq_id, 1):
            self._k[1, :, int(self.block_table(seq_id)[0]) * self.block_size] = 5


class WritesIntoItsNeighbour(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        super().append(seq_id, layer, k, v)
        for other, (table, lens) in self._seqs.items():
            if other != seq_id and lens[0] and self._refs[table[0]] == 1:
                self._v[0, 0, table[0] * self.block_size] = 3


class CountsSharedTwice(PagedKVCache):
    def stats(self) -> dict[str, int]:
        return super().stats() | {"used": sum(len(seq.table) for seq in self._seqs.values())}


class CountsDisagree(PagedKVCache):
    def num_free_blocks(self) -> int:
        return super().num_free_blocks() - (1 if len(self._seqs) > 1 else 0)

    def stats(self) -> dict[str, int]:
        free = len(self._free) + 0 * super().num_free_blocks()
        return {"free": free, "used": self.num_blocks - free, "cached": 0, "evictions": 0}


class StatsWithoutCached(PagedKVCache):
    def stats(self) -> dict[str, int]:
        return {key: value for key, value in super().stats().items() if key != "cached"}


class StatsOfFloats(PagedKVCache):
    def stats(self) -> Any:
        return {key: float(value) for key, value in super().stats().items()}


class StatsOfNone(PagedKVCache):
    def stats(self) -> Any:
        return dict.fromkeys(super().stats())


class LengthAsArray(PagedKVCache):
    def seq_len(self, seq_id: int, layer: int = 0) -> Any:
        return np.full(2, super().seq_len(seq_id, layer))


class CountsReferencesInAByte(PagedKVCache):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._refs = np.zeros(self.num_blocks, np.int8)  # type: ignore[assignment]

    def fork(self, parent: int, child: int) -> None:
        with np.errstate(all="ignore"):
            super().fork(parent, child)


class NumbersBlocksInAShort(PagedKVCache):
    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        table = self._seqs[child].table
        table[:] = [abs(int(block)) for block in np.array(table).astype(np.int16)]


class ForkCopies(PagedKVCache):
    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        table = self._seqs[child].table
        if table and self._free:
            old, table[-1] = table[-1], self._free.pop()
            self._k[:, :, self._slots(table[-1])] = self._k[:, :, self._slots(old)]
            self._v[:, :, self._slots(table[-1])] = self._v[:, :, self._slots(old)]
            self._refs[old] -= 1
            self._refs[table[-1]] = 1


class ForkKeepsTheLengths(PagedKVCache):
    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        self._seqs[child] = self._seqs[child]._replace(lens=self._seqs[parent].lens)


class CopiesEveryBlock(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        super().append(seq_id, layer, k, v)
        table = self._seqs[seq_id].table
        if self._refs[table[0]] > 1 and self._free:
            old, table[0] = table[0], self._free.pop()
            self._k[:, :, self._slots(table[0])] = self._k[:, :, self._slots(old)]
            self._v[:, :, self._slots(table[0])] = self._v[:, :, self._slots(old)]
            self._refs[old] -= 1
            self._refs[table[0]] = 1


class KeepsABlockInReserve(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        free = len(self._free)
        super().append(seq_id, layer, k, v)
        if self.num_blocks > 4 and free and not self._free:
            raise OutOfBlocks(free, free - 1)


class CallsItSomethingElse(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        try:
            super().append(seq_id, layer, k, v)
        except OutOfBlocks as error:
            raise MemoryError(str(error)) from None


class LeaksWhenRefused(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        try:
            super().append(seq_id, layer, k, v)
        except OutOfBlocks:
            self._free = self._free[1:]
            raise


class DropsTheSequenceWhenRefused(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        try:
            super().append(seq_id, layer, k, v)
        except OutOfBlocks:
            self.free(seq_id)
            self.add_seq(seq_id)
            raise


class ForgetsWhatItRefused(PagedKVCache):
    """A bad argument undoes the last good append."""

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        try:
            super().append(seq_id, layer, k, v)
        except TypeError:
            lens = self._seqs[seq_id].lens
            lens[0] = max(0, lens[0] - 1)
            raise


class WritesBeforeItCounts(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        try:
            super().append(seq_id, layer, k, v)
        except OutOfBlocks:
            for block in self._seqs[seq_id].table[:1]:
                self._k[layer, :, block * self.block_size] = 99
            raise


class LiveTable(PagedKVCache):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._shown: dict[int, Any] = {}

    def block_table(self, seq_id: int) -> Any:
        right = super().block_table(seq_id)
        shown = self._shown.get(seq_id)
        if shown is None or len(shown) != len(right):
            shown = self._shown[seq_id] = right
        return shown


class GathersAView(PagedKVCache):
    def gather(self, seq_id: int, layer: int) -> Any:
        n, table = self.seq_len(seq_id, layer), self._seqs[seq_id].table
        if len(table) != 1:
            return super().gather(seq_id, layer)
        slots = slice(table[0] * self.block_size, table[0] * self.block_size + n)
        return self._k[layer][:, slots], self._v[layer][:, slots]


class KeepsTheArrays(PagedKVCache):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._kept: dict[tuple[int, int], tuple[Any, Any]] = {}

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        super().append(seq_id, layer, k, v)
        first = self.seq_len(seq_id, layer) == k.shape[1] if isinstance(k, np.ndarray) else False
        self._kept.pop((seq_id, layer), None)
        if first:
            self._kept[seq_id, layer] = (k, v)

    def free(self, seq_id: int) -> None:
        super().free(seq_id)
        self._kept = {key: pair for key, pair in self._kept.items() if key[0] != seq_id}

    def gather(self, seq_id: int, layer: int) -> Any:
        pair = super().gather(seq_id, layer)
        kept = self._kept.get((seq_id, layer), pair)
        return tuple(np.array(array, np.float16) for array in kept)


class ReusesItsAnswers(PagedKVCache):
    """What it returned last is overwritten by what it returns next."""

    _buffer = np.zeros((2, 1 << 18), np.float16)

    def gather(self, seq_id: int, layer: int) -> Any:
        pair = super().gather(seq_id, layer)
        for flat, array in zip(self._buffer, pair, strict=True):
            flat[: array.size] = array.ravel()
        return tuple(flat[: pair[0].size].reshape(pair[0].shape) for flat in self._buffer)


class ReadOnlyTableOfItsOwn(PagedKVCache):
    """Nobody can write into it, but it changes under its reader."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._shown: dict[int, Any] = {}

    def block_table(self, seq_id: int) -> Any:
        right = super().block_table(seq_id)
        whole = self._shown.setdefault(seq_id, np.zeros(self.num_blocks, np.int32))
        whole[: len(right)] = right
        shown = whole[: len(right)]
        shown.flags.writeable = False
        return shown


class CountsHandedOut(PagedKVCache):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._counts = super().stats()

    def stats(self) -> dict[str, int]:
        right = super().stats()
        self._counts["free"], self._counts["used"] = right["free"], right["used"]
        return self._counts


class NegativeCounts(PagedKVCache):
    def stats(self) -> dict[str, int]:
        right = super().stats()
        return right | {"free": right["free"] + 1, "cached": -1}


class WritesIntoItsArguments(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        super().append(seq_id, layer, k, v)
        if isinstance(k, np.ndarray) and k.flags.writeable:
            k *= 2


class SwapsBytes(PagedKVCache):
    """Takes every byte order for its own."""

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        if isinstance(k, np.ndarray) and k.dtype.byteorder == ">":
            k = k.view(k.dtype.newbyteorder("<"))
        super().append(seq_id, layer, k, v)


class RoundsTwice(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        if getattr(k, "dtype", None) == np.float64:
            with np.errstate(all="ignore"):
                k = k.astype(np.float32)
        super().append(seq_id, layer, k, v)


class StretchesV(PagedKVCache):
    """One position of V for all of K: what NumPy would do by itself."""

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        if np.ndim(k) == np.ndim(v) == 3 and np.shape(v)[1] == 1:
            v = np.repeat(v, np.shape(k)[1], axis=1)
        super().append(seq_id, layer, k, v)


class TellsKFromVByName(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        super().append(seq_id, layer, k, -v if k is v and isinstance(v, np.ndarray) and v.ndim == 3 else v)


class ThirtyLayers(PagedKVCache):
    def gather(self, seq_id: int, layer: int) -> Any:
        k, v = super().gather(seq_id, layer)
        return (k, v) if layer < 30 else (v, k)


class SixtyFourHeads(PagedKVCache):
    def gather(self, seq_id: int, layer: int) -> Any:
        k, v = super().gather(seq_id, layer)
        k[64:] = 0
        return k, v


class NumbersSlotsInAByte(PagedKVCache):
    def gather(self, seq_id: int, layer: int) -> Any:
        k, v = super().gather(seq_id, layer)
        slots = np.arange(k.shape[1]) % self.block_size
        return k[:, np.arange(k.shape[1]) - slots + slots % 256], v


class LengthInHalf(PagedKVCache):
    def seq_len(self, seq_id: int, layer: int = 0) -> int:
        return int(np.float16(super().seq_len(seq_id, layer)))


class CountsReferencesInAShort(PagedKVCache):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._refs = np.zeros(self.num_blocks, np.uint16)  # type: ignore[assignment]


class ForksOfForks(PagedKVCache):
    """A fork of a fork of a fork... is empty."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._depth: dict[int, int] = {}

    def add_seq(self, seq_id: int) -> None:
        super().add_seq(seq_id)
        self._depth[seq_id] = 0

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        self._depth[child] = self._depth[parent] + 1
        if self._depth[child] > 5:
            self._seqs[child].lens[:] = [0] * self.n_layers


class EvictsAnother(PagedKVCache):
    """Makes room for the next attempt."""

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        try:
            super().append(seq_id, layer, k, v)
        except OutOfBlocks:
            others = [other for other in self._seqs if other != seq_id]
            if others:
                self.free(others[0])
            raise


class FourHoldersAreNone(PagedKVCache):
    """Shares a block with three others, and writes into it all the same."""

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        table = self._seqs[seq_id].table if seq_id in self._seqs else []
        four = [block for block in table if self._refs[block] == 4]
        for block in four:
            self._refs[block] = 1
        try:
            super().append(seq_id, layer, k, v)
        finally:
            for block in four:
                self._refs[block] = 4


class OnePoolForAll(PagedKVCache):
    _pools: ClassVar[dict[tuple[int, ...], Any]] = {}

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        mine = self._k, self._v, self._read_k, self._read_v
        self._k, self._v, self._read_k, self._read_v = self._pools.setdefault(tuple(map(int, sizes)), mine)


class RoundsLate(PagedKVCache):
    """Rounds when it is asked, and then warns."""

    def gather(self, seq_id: int, layer: int) -> Any:
        k, v = super().gather(seq_id, layer)
        if np.isinf(k).any():
            np.full(1, 1e9, np.float32).astype(np.float16)
        return k, v
