"""Caches whose contents are right and whose manners are wrong: ids, close, arguments, errors."""

from typing import Any, ClassVar

import numpy as np

from tinyllm.infer.paged import OutOfBlocks, PagedKVCache
from tinyllm.testing.contract import CAPABILITIES


class KeepsLengthsAfterFree(PagedKVCache):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._old: dict[int, list[int]] = {}

    def free(self, seq_id: int) -> None:
        lens = self._live(seq_id).lens
        super().free(seq_id)
        self._old[seq_id] = lens

    def seq_len(self, seq_id: int, layer: int = 0) -> int:
        right = super().seq_len(seq_id, layer)
        return right or self._old.get(seq_id, [0] * self.n_layers)[layer]


class TurnsATableRoundWhenRefused(PagedKVCache):
    """Contents stay, and counts; but a block is no longer where a fork has it."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._turned: set[int] = set()

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        try:
            super().append(seq_id, layer, k, v)
        except OutOfBlocks:
            self._turned.add(seq_id)
            raise
        self._turned.clear()

    def block_table(self, seq_id: int) -> Any:
        table = super().block_table(seq_id)
        return table[::-1].copy() if seq_id in self._turned else table


class AcceptsALiveId(PagedKVCache):
    def add_seq(self, seq_id: int) -> None:
        if seq_id not in self._seqs or self._closed:
            super().add_seq(seq_id)


class ForksOntoALiveId(PagedKVCache):
    def fork(self, parent: int, child: int) -> None:
        if parent in self._seqs and child in self._seqs and parent != child:
            self.free(child)
        if parent != child or parent not in self._seqs:
            super().fork(parent, child)


class UsableAfterClose(PagedKVCache):
    def close(self) -> None:
        pass


class EmptyAfterClose(PagedKVCache):
    """Closed means empty here, not closed: ids are unknown then, and counts can be read."""

    def close(self) -> None:
        super().close()
        self._closed = False
        self._refs, self._free, self._seqs = [], [], {}


class ClosesOnce(PagedKVCache):
    def close(self) -> None:
        if self._closed:
            raise ValueError("closed already")
        super().close()


class Immortal(PagedKVCache):
    all: ClassVar[list[PagedKVCache]] = []

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.all.append(self)


class TakesBools(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        k, v = (np.asarray(a) for a in (k, v))
        super().append(seq_id, layer, *(a.astype(int) if a.dtype == bool else a for a in (k, v)))


class CountsLayersFromTheEnd(PagedKVCache):
    def gather(self, seq_id: int, layer: int) -> Any:
        return super().gather(seq_id, layer % self.n_layers if layer < 0 else layer)


class TruncatesIds(PagedKVCache):
    def add_seq(self, seq_id: int) -> None:
        super().add_seq(int(seq_id))


class TakesSizesOfZero(PagedKVCache):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*(size or 1 for size in sizes))


class WrongClass(PagedKVCache):
    """Refuses what it must, always as a RuntimeError."""

    def __init__(self, *sizes: int) -> None:
        try:
            super().__init__(*sizes)
        except (TypeError, ValueError) as error:
            raise RuntimeError(str(error)) from None

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found

        def call(*args: Any) -> Any:
            try:
                return found(*args)
            except (TypeError, ValueError, LookupError) as error:
                raise RuntimeError(str(error)) from None

        return call


class WrongClassDeclared(WrongClass):
    capabilities = frozenset(CAPABILITIES) - {"exact-errors"}


class AcceptsAnything(WrongClassDeclared):
    """Declares no exact errors, and raises none."""

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        if np.shape(k)[1:2] != (0,):
            super().append(seq_id, layer, k, v)


class Panic(BaseException):
    """What a Rust engine raises: no Exception."""


class Panics(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        if len(self._seqs) > 1 and self.seq_len(seq_id, layer):
            raise Panic("index out of bounds")
        super().append(seq_id, layer, k, v)


class Exits(PagedKVCache):
    def free(self, seq_id: int) -> None:
        super().free(seq_id)
        raise SystemExit(3)


class PanicsWhenRead(PagedKVCache):
    def gather(self, seq_id: int, layer: int) -> Any:
        if self.seq_len(seq_id, layer) > 3:
            raise Panic("slice out of range")
        return super().gather(seq_id, layer)


class ChecksTooMuch(PagedKVCache):
    def check(self) -> None:
        assert not self._seqs, "there are sequences"


class NeedsOneMore(PagedKVCache):
    def blocks_needed(self, seq_id: int, layer: int, tokens: int) -> int:
        return super().blocks_needed(seq_id, layer, tokens) + (tokens > 2)


class PagesOfInt64(PagedKVCache):
    def page_table(self, seq_ids: Any, layer: int) -> Any:
        return tuple(array.astype(np.int64) for array in super().page_table(seq_ids, layer))


class PagesAsAList(PagedKVCache):
    def page_table(self, seq_ids: Any, layer: int) -> Any:
        return list(super().page_table(seq_ids, layer))


class PagesOfNobody(PagedKVCache):
    def page_table(self, seq_ids: Any, layer: int) -> Any:
        return super().page_table([*seq_ids] or list(self._seqs), layer)


class PagesOfEachOnce(PagedKVCache):
    def page_table(self, seq_ids: Any, layer: int) -> Any:
        return super().page_table(dict.fromkeys(seq_ids), layer)


class RunsCanBeWritten(PagedKVCache):
    def gather_runs(self, seq_id: int, layer: int) -> Any:
        return [self.gather(seq_id, layer)]


class RunsOutOfOrder(PagedKVCache):
    def gather_runs(self, seq_id: int, layer: int) -> Any:
        return super().gather_runs(seq_id, layer)[::-1]


class RunsRaise(PagedKVCache):
    def gather_runs(self, seq_id: int, layer: int) -> Any:
        super().gather_runs(seq_id, layer)
        raise NotImplementedError("later")


class RollsBackTooFar(PagedKVCache):
    def truncate(self, seq_id: int, length: int) -> None:
        super().truncate(
            seq_id, min(length, max(self._seqs[seq_id].lens)) if seq_id in self._seqs else length
        )


class PanicsAtBirth(PagedKVCache):
    def __init__(self, *_: int) -> None:
        raise Panic("no memory")


def _without(name: str) -> type[PagedKVCache]:
    def missing(self: Any, *_: Any) -> Any:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    return type(f"Without_{name}", (PagedKVCache,), {name: property(missing)})


WithoutAppend = _without("append")
WithoutStats = _without("stats")
WithoutGather = _without("gather")
WithoutTable = _without("block_table")
WithoutFork = _without("fork")
WithoutClose = _without("close")


class RefusesNegativeIds(PagedKVCache):
    def add_seq(self, seq_id: int) -> None:
        if isinstance(seq_id, int) and seq_id < 0:
            raise ValueError("negative")
        super().add_seq(seq_id)


class WrapsIds(PagedKVCache):
    def add_seq(self, seq_id: int) -> None:
        super().add_seq((seq_id + 2**63) % 2**64 - 2**63 if isinstance(seq_id, int) else seq_id)


class RefusesNumpyIds(PagedKVCache):
    def gather(self, seq_id: int, layer: int) -> Any:
        if not isinstance(seq_id, int):
            raise TypeError("no int")
        return super().gather(seq_id, layer)


class TakesWholeFloats(PagedKVCache):
    def seq_len(self, seq_id: int, layer: int = 0) -> int:
        return super().seq_len(seq_id, int(layer) if layer == int(layer) else layer)


class LengthOfTheLongest(PagedKVCache):
    """What `seq_len` says where no layer is named."""

    def seq_len(self, seq_id: int, layer: int = 99) -> int:
        if layer == 99:
            return max(self._live(seq_id).lens)
        return super().seq_len(seq_id, layer)


class CannotTellOnceClosed(PagedKVCache):
    def __repr__(self) -> str:
        return f"<{len(self._seqs)} sequences>"


class LeavesItselfOpen(PagedKVCache):
    def __exit__(self, *_: object) -> None:
        pass


class SwallowsErrors(PagedKVCache):
    def __exit__(self, *_: object) -> Any:
        self.close()
        return True


class EntersNothing(PagedKVCache):
    def __enter__(self) -> Any:
        return None


class EntersWhenClosed(PagedKVCache):
    def __enter__(self) -> Any:
        return self


class ClosesOnceInWith(PagedKVCache):
    def __exit__(self, *_: object) -> None:
        self._check_open()
        self.close()


class HalfAWith(PagedKVCache):
    __exit__ = None  # type: ignore[assignment]


class KeepsItsPool(PagedKVCache):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._kept = np.ones(self._k.shape, np.float32)


class CountsAfterClose(PagedKVCache):
    def num_free_blocks(self) -> int:
        return 0 if self._closed else super().num_free_blocks()

    def stats(self) -> dict[str, int]:
        self._check_open()
        return super().stats()


class InACycle(PagedKVCache):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._self = self


class KeepsItsLastError(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        try:
            super().append(seq_id, layer, k, v)
        except OutOfBlocks as error:
            self._last = error
            raise


class Unspeakable(Exception):  # noqa: N818 - no error can be worse
    def __str__(self) -> str:
        raise RuntimeError("not even that")


class FailsWithoutWords(PagedKVCache):
    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        super().append(seq_id, layer, k, v)
        if self.seq_len(seq_id, layer) == 6:
            raise Unspeakable
