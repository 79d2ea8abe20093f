"""A second paged KV cache. It shares no code with `tinyllm.infer.paged`, and no design: engines are built so.

What engines have and the first one has not, and where their faults sit: writes that wait in a stage, blocks
that come back by a short list, a bitmap searched by windows from where the last search ended, plans and page
tables that are kept until something changes, a slow path for tables in many pieces, and *warm* blocks: a
freed block keeps its contents, and an append of the very same contents takes that block and writes nothing.

None of it can be seen: every law of docs/laws.md holds (numbers in brackets). The faults of field.toml are
planted here.
"""

import functools
import hashlib
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Half = NDArray[np.float16]
Ints = NDArray[np.int32]
Slots = slice | NDArray[np.int64]

STAGE = 64  # positions of a layer that wait to be written, at most
WINDOW = 1024  # blocks that a search looks at in one go
SLICES = 16  # pieces of a table that are read and written one by one; more of them by one array of slots


class OutOfBlocks(RuntimeError):  # noqa: N818 - the contract's name
    """An append needs more blocks (`needed`) than are free (`free`); nothing has changed [9, 10]."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)
        self.needed, self.free = needed, free

    def __str__(self) -> str:
        return f"the append needs {self.needed} blocks; {self.free} are free"


class _Plan(NamedTuple):
    """What an append does to a table."""

    shared: list[int]  # places in the table whose blocks it copies
    fresh: int  # blocks past the end of the table
    need: int  # both


class _Sequence:
    """A sequence: its blocks, how long its layers are, and what of them waits to be written.

    What waits lies in blocks that nobody else holds: a fork writes it out first.
    """

    __slots__ = ("lens", "row", "stage", "table")

    def __init__(self, table: list[int], lens: list[int]) -> None:
        self.table = table
        self.lens = lens  # what waits is counted
        self.stage: list[list[Half]] = [[] for _ in lens]  # of each layer, chunks [T, 2, H, D]
        self.row: Ints | None = None  # the table as an array, until it changes

    def waiting(self, layer: int) -> int:
        """Positions of the layer that are not written yet."""
        return sum(map(len, self.stage[layer]))


class PagedKVCache:
    """Keys and values of many sequences, float16, in blocks of B positions. Not thread-safe.

    Args:
        num_blocks: blocks in the pool, at most `2**31 - 1`.
        block_size: positions in a block (B).
        n_layers: layers (L).
        n_kv_heads: key/value heads (H).
        d_head: dimension of a head (D).

    Raises:
        ValueError: a size below 1 [15]. TypeError: one that is no integer [15]. MemoryError: no room.
    """

    _closed = True

    def __init__(self, num_blocks: int, block_size: int, n_layers: int, n_kv_heads: int, d_head: int) -> None:
        self.num_blocks = _size("num_blocks", num_blocks)
        self.block_size = _size("block_size", block_size)
        self.n_layers = _size("n_layers", n_layers)
        self.n_kv_heads = _size("n_kv_heads", n_kv_heads)
        self.d_head = _size("d_head", d_head)
        if self.num_blocks >= 2**31:
            raise ValueError(f"num_blocks is {self.num_blocks}; it must be at most {2**31 - 1}")
        # A slab a layer, token by token, K beside V: block b is rows [b * B, (b + 1) * B).
        shape = (self.num_blocks * self.block_size, 2, self.n_kv_heads, self.d_head)
        try:
            self._slabs = [np.zeros(shape, np.float16) for _ in range(self.n_layers)]
        except ValueError as error:  # what no array can have
            raise MemoryError(f"a slab of shape {shape} is too large") from error
        self._shown = [np.asarray(slab.data.toreadonly()) for slab in self._slabs]
        self._refs = np.zeros(self.num_blocks, np.int32)  # tables that hold each block [6]
        self._open = np.ones(self.num_blocks, np.bool_)  # free, and known to the search
        self._n_open = self.num_blocks
        self._returned: dict[int, None] = {}  # free, and not yet known to the search, so that they stay warm
        self._cursor = 0  # where the next search starts
        self._warm: dict[bytes, int] = {}  # the block last filled with what the key names
        self._keys: dict[int, bytes] = {}  # the other way round
        self._seqs: dict[int, _Sequence] = {}
        self._epoch = 0  # goes up when a plan may be no longer right
        self._planned: tuple[Any, ...] = ()  # the last plan, and what it was made for
        self._closed = False

    def add_seq(self, seq_id: int) -> None:
        """Start an empty sequence [13]. Raises ValueError: the id is live. TypeError: it is no integer."""
        self._seqs[self._unused(seq_id)] = _Sequence([], [0] * self.n_layers)

    def fork(self, parent: int, child: int) -> None:
        """Start `child` as an equal of `parent` that shares its blocks; takes none [7].

        Raises KeyError: `parent` is not live. ValueError: `child` is. TypeError: one is no integer.
        """
        parent, child = _integer("parent", parent), _integer("child", child)
        seq = self._live(parent)
        child = self._unused(child)
        for layer in range(self.n_layers):
            self._write_out(seq, layer)
        equal = _Sequence(seq.table.copy(), seq.lens.copy())
        equal.row = seq.row  # no row is ever written into
        self._refs[seq.table] += 1
        self._seqs[child] = equal
        self._epoch += 1

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        """Add T positions `[H, T, D]` to one layer, all or nothing [1-4, 8-12].

        What fills blocks of its own is written at once, or found warm; what does not waits in the stage.

        Raises:
            OutOfBlocks: it needs more blocks than are free [9]. KeyError: `seq_id` is not live.
            IndexError: there is no such layer. ValueError: an empty chunk, a wrong or a different shape.
            TypeError: an id or a layer that is no integer, values that are neither integers nor floats.
        """
        k, v = self._arrays(k, v)
        seq_id, layer = _integer("seq_id", seq_id), self._layer(layer)
        seq = self._live(seq_id)
        tokens, size = k.shape[1], self.block_size
        plan = self._plan(seq, layer, tokens)
        if plan.need > self.num_free_blocks():
            raise OutOfBlocks(plan.need, self.num_free_blocks())
        chunk = self._rounded(k, v)
        start, old = seq.lens[layer], len(seq.table)
        whole = range(max(old, -(-start // size)), (start + tokens) // size)  # new blocks that it fills
        keys = {i: self._key(layer, chunk[i * size - start : (i + 1) * size - start]) for i in whole}
        found = self._find_warm(keys)
        claimed = iter(self._claim(plan.need, found))
        table = seq.table.copy()
        for i in plan.shared:
            table[i] = next(claimed)
        for i in range(old, old + plan.fresh):
            table.append(found[i] if i in found else next(claimed))
        self._copy([seq.table[i] for i in plan.shared], [table[i] for i in plan.shared])
        if keys:
            self._write_out(seq, layer)
            self._write_but(table, layer, start, chunk, found)
            for i, key in keys.items():
                self._warm[key], self._keys[table[i]] = table[i], key
        else:
            seq.stage[layer].append(chunk)
        if plan.need:
            self._release([seq.table[i] for i in plan.shared])
            for block in [table[i] for i in plan.shared] + table[old:]:
                self._take(block)
            seq.table, seq.row = table, None
        seq.lens[layer] = start + tokens
        self._epoch += 1
        if seq.waiting(layer) > STAGE:
            self._write_out(seq, layer)

    def blocks_needed(self, seq_id: int, layer: int, tokens: int) -> int:
        """How many blocks an append of `tokens` positions takes now [16]; raises as `append` does."""
        tokens, seq_id = _size("tokens", tokens), _integer("seq_id", seq_id)
        layer = self._layer(layer)
        return self._plan(self._live(seq_id), layer, tokens).need

    def truncate(self, seq_id: int, length: int) -> None:
        """Cut every layer to at most `length` positions; blocks that no layer reaches are dropped [17].

        Raises ValueError: `length` is negative, or beyond the longest layer. KeyError, TypeError: as `free`.
        """
        seq_id, length = _integer("seq_id", seq_id), _integer("length", length)
        seq = self._live(seq_id)
        longest = max(seq.lens)
        if not 0 <= length <= longest:
            raise ValueError(f"length is {length}; it must be in [0, {longest}]")
        for layer in range(self.n_layers):
            self._write_out(seq, layer)
        kept = -(-length // self.block_size)
        if length % self.block_size:
            self._forget(seq.table[kept - 1])  # it may be written again, past the cut
        self._release(seq.table[kept:])
        seq.table, seq.row = seq.table[:kept], None
        seq.lens = [min(n, length) for n in seq.lens]
        self._epoch += 1

    def block_table(self, seq_id: int) -> Ints:
        """The ids of the blocks in position order, a fresh array [1, 2, 12]. Raises as `free`."""
        return np.array(self._live(_integer("seq_id", seq_id)).table, np.int32)

    def seq_len(self, seq_id: int, layer: int = 0) -> int:
        """Positions that the layer holds [4]. Raises as `gather`."""
        seq_id, layer = _integer("seq_id", seq_id), self._layer(layer)
        return self._live(seq_id).lens[layer]

    def gather(self, seq_id: int, layer: int) -> tuple[Half, Half]:
        """K and V of the layer, fresh float16 arrays `[H, len, D]` [3, 12].

        Raises KeyError: the id is not live. IndexError: there is no such layer. TypeError: no integers.
        """
        seq_id, layer = _integer("seq_id", seq_id), self._layer(layer)
        seq = self._live(seq_id)
        self._write_out(seq, layer)
        # Zeros, not `empty`: what a fault leaves out is the same in every run.
        rows = np.zeros((seq.lens[layer], 2, self.n_kv_heads, self.d_head), np.float16)
        done = 0
        for place in self._places(seq.table, 0, seq.lens[layer]):
            piece = self._slabs[layer][place]
            rows[done : done + len(piece)] = piece
            done += len(piece)
        return _by_head(rows[:, 0]).copy(), _by_head(rows[:, 1]).copy()

    def gather_runs(self, seq_id: int, layer: int) -> list[tuple[Half, Half]]:
        """What `gather` copies, in place: read-only views `[H, n, D]`, valid until the next change [20]."""
        seq_id, layer = _integer("seq_id", seq_id), self._layer(layer)
        seq = self._live(seq_id)
        self._write_out(seq, layer)
        slab = self._shown[layer]
        runs = self._runs(seq.table, 0, seq.lens[layer])
        return [(_by_head(slab[run, 0]), _by_head(slab[run, 1])) for run in runs]

    def page_table(self, seq_ids: Iterable[int], layer: int) -> tuple[Ints, Ints, Ints]:
        """`indptr`, `indices` and `last_page_len` of several sequences, fresh int32 arrays [18].

        Raises as `gather`.
        """
        layer = self._layer(layer)
        seqs = [self._live(_integer("seq_id", seq_id)) for seq_id in seq_ids]
        self._ready()
        rows, last = [np.zeros(0, np.int32)], []
        for seq in seqs:
            if seq.row is None:
                seq.row = np.array(seq.table, np.int32)
            n = seq.lens[layer]
            rows.append(seq.row[: -(-n // self.block_size)])
            last.append((n - 1) % self.block_size + 1 if n else 0)
        indptr = np.cumsum([len(row) for row in rows], dtype=np.int32)
        return indptr, np.concatenate(rows), np.array(last, np.int32)

    def free(self, seq_id: int) -> None:
        """Drop a sequence [6, 13]. Raises KeyError: the id is not live. TypeError: it is no integer."""
        seq_id = _integer("seq_id", seq_id)
        self._release(self._live(seq_id).table)
        del self._seqs[seq_id]
        self._epoch += 1

    def stats(self) -> dict[str, int]:
        """Counts of blocks [5]. A warm block is free: nobody finds it by a name of its own."""
        free = self.num_free_blocks()
        return {"free": free, "used": self.num_blocks - free, "cached": 0, "evictions": 0}

    def num_free_blocks(self) -> int:
        """How many blocks the next append can take [5, 9]."""
        self._ready()
        return self._n_open + len(self._returned)

    def check(self) -> None:
        """Raise AssertionError, `law N: ...`, if bitmap, counts and tables disagree [19]."""
        self._ready()
        held = np.zeros(self.num_blocks, np.int64)
        for seq_id, seq in self._seqs.items():
            if len(seq.table) != -(-max(seq.lens) // self.block_size):
                raise AssertionError(f"law 2: sequence {seq_id} has {len(seq.table)} blocks for {seq.lens}")
            if len(set(seq.table)) < len(seq.table):
                raise AssertionError(f"law 6: sequence {seq_id} holds a block twice")
            held[seq.table] += 1
        if (held != self._refs).any():
            raise AssertionError(f"law 6: block {int((held != self._refs).argmax())} is counted wrongly")
        free = self._open.copy()
        free[list(self._returned)] = True
        if (wrong := free != (held == 0)).any():
            raise AssertionError(f"law 6: block {int(wrong.argmax())} is free and held, or neither")
        n_open = int(self._open.sum())
        if n_open != self._n_open or self._open[list(self._returned)].any():
            raise AssertionError(f"law 5: {n_open} blocks are open, and {self._n_open} are counted")

    def close(self) -> None:
        """Give the memory back; closing twice is fine [14]."""
        self._closed = True
        self._slabs, self._shown, self._seqs = [], [], {}
        self._warm, self._keys, self._planned = {}, {}, ()

    def __enter__(self) -> Self:
        self._ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._closed:
            return f"<{name}: closed>"
        return f"<{name}: {len(self._seqs)} sequences, {self.num_free_blocks()} free blocks>"

    # Arguments

    def _ready(self) -> None:
        if self._closed:
            raise ValueError("the cache is closed")

    def _live(self, seq_id: int) -> _Sequence:
        self._ready()
        if seq_id not in self._seqs:
            raise KeyError(f"sequence {seq_id} is not one of the {len(self._seqs)} live ones")
        return self._seqs[seq_id]

    def _unused(self, seq_id: int) -> int:
        seq_id = _integer("seq_id", seq_id)
        self._ready()
        if seq_id in self._seqs:
            raise ValueError(f"sequence {seq_id} is live already")
        return seq_id

    def _layer(self, layer: int) -> int:
        layer = _integer("layer", layer)
        if not 0 <= layer < self.n_layers:
            self._ready()
            raise IndexError(f"layer {layer} is outside [0, {self.n_layers})")
        return layer

    def _arrays(self, k: Any, v: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V as arrays of one right shape; their values are looked at later."""
        k, v = np.asarray(k), np.asarray(v)
        for name, array in (("k", k), ("v", v)):
            if array.dtype.kind not in "iuf":
                raise TypeError(f"{name} must hold integers or floats, not {array.dtype}")
            if array.ndim != 3 or (array.shape[0], array.shape[2]) != (self.n_kv_heads, self.d_head):
                raise ValueError(f"{name} is {array.shape}; it must be [{self.n_kv_heads}, T, {self.d_head}]")
        if k.shape != v.shape or k.shape[1] < 1:
            raise ValueError(f"k is {k.shape} and v {v.shape}; they must be equal, and T at least 1")
        return k, v

    def _rounded(self, k: NDArray[Any], v: NDArray[Any]) -> Half:
        """A chunk `[T, 2, H, D]` of our own, each value rounded once [3, 12]."""
        chunk = np.empty((k.shape[1], 2, self.n_kv_heads, self.d_head), np.float16)
        with np.errstate(all="ignore"):
            chunk[:, 0] = k.swapaxes(0, 1)
            chunk[:, 1] = v.swapaxes(0, 1)
        return chunk

    # Slots

    def _runs(self, table: list[int], start: int, stop: int) -> list[slice]:
        """The slots of positions `[start, stop)`, a slice for each run of neighbouring blocks."""
        size, at = self.block_size, start
        runs: list[slice] = []
        ids = np.array(table[start // size : -(-stop // size)], np.int64)
        cuts = np.flatnonzero(np.diff(ids) != 1) + 1
        for run in np.split(ids, cuts) if start < stop else []:
            first = int(run[0]) * size + at % size
            last = min((int(run[-1]) + 1) * size, first + stop - at)
            runs.append(slice(first, last))
            at += last - first
        return runs

    def _places(self, table: list[int], start: int, stop: int) -> list[Slots]:
        """The same, or one array of slots where the runs are many."""
        size = self.block_size
        ids = np.array(table[start // size : -(-stop // size)], np.int64)
        if np.count_nonzero(np.diff(ids) != 1) < SLICES:
            return [*self._runs(table, start, stop)]
        slots = (ids[:, None] * size + _ramp(size)).ravel()
        return [slots[start % size :][: stop - start]]

    def _write(self, table: list[int], layer: int, start: int, chunk: Half) -> None:
        """Store `chunk` at the positions from `start` on."""
        done = 0
        for place in self._places(table, start, start + len(chunk)):
            n = place.stop - place.start if isinstance(place, slice) else len(place)
            self._slabs[layer][place] = chunk[done : done + n]
            done += n

    def _write_but(
        self, table: list[int], layer: int, start: int, chunk: Half, found: dict[int, int]
    ) -> None:
        """The same, but for the blocks at the places `found`, which hold it already."""
        size, at = self.block_size, start
        for i in found:
            self._write(table, layer, at, chunk[at - start : i * size - start])
            at = (i + 1) * size
        self._write(table, layer, at, chunk[at - start :])

    def _write_out(self, seq: _Sequence, layer: int) -> None:
        """Store what waits; a reader, a fork and a cut come after it."""
        if chunks := seq.stage[layer]:
            chunk = np.concatenate(chunks)
            self._write(seq.table, layer, seq.lens[layer] - len(chunk), chunk)
            seq.stage[layer] = []

    def _copy(self, sources: list[int], copies: list[int]) -> None:
        """Copy whole blocks: all layers, K and V [8]."""
        if not sources:
            return
        for slab in self._slabs:
            blocks = slab.reshape(self.num_blocks, self.block_size, 2, self.n_kv_heads, self.d_head)
            blocks[copies] = blocks[sources]

    # Blocks

    def _plan(self, seq: _Sequence, layer: int, tokens: int) -> _Plan:
        """What an append costs [9]; admission and the append that follows it plan once."""
        asked = (seq, layer, tokens, self._epoch)
        if self._planned[:4] == asked:
            kept: _Plan = self._planned[4]
            return kept
        start, size = seq.lens[layer], self.block_size
        first, last = start // size, -(-(start + tokens) // size)
        counts = self._refs[seq.table[first:last]].tolist()
        shared = [first + i for i, count in enumerate(counts) if count > 1]
        fresh = max(0, last - len(seq.table))
        plan = _Plan(shared, fresh, len(shared) + fresh)
        self._planned = (*asked, plan)
        return plan

    def _key(self, layer: int, rows: Half) -> bytes:
        """What names the contents of a block in a layer: every bit of K and V."""
        return hashlib.blake2b(rows.tobytes(), digest_size=16, salt=layer.to_bytes(8, "little")).digest()

    def _find_warm(self, keys: dict[int, bytes]) -> dict[int, int]:
        """By place in the table, free blocks that hold already what is to be written there, each once."""
        found: dict[int, int] = {}
        used: set[int] = set()
        for i, key in keys.items():
            block = self._warm.get(key)
            if block is not None and not self._refs[block] and block not in used:
                found[i] = block
                used.add(block)
        return found

    def _claim(self, need: int, found: dict[int, int]) -> list[int]:
        """Free blocks for what was not found warm. They are about to be written, and so warm no more."""
        if need > self._n_open:
            self._settle()
        claimed = self._search(need - len(found), set(found.values()))
        for block in claimed:
            self._forget(block)
        return claimed

    def _search(self, count: int, but: set[int]) -> list[int]:
        """The next `count` open blocks, from the cursor on and around; there are so many."""
        blocks: list[int] = []
        for low, high in ((self._cursor, self.num_blocks), (0, self._cursor)):
            for at in range(low, high, WINDOW):
                if len(blocks) == count:
                    break
                window = at + np.flatnonzero(self._open[at : min(at + WINDOW, high)])
                blocks += [block for block in window.tolist() if block not in but][: count - len(blocks)]
        return blocks

    def _take(self, block: int) -> None:
        """A free block is held by one table."""
        if block in self._returned:
            del self._returned[block]
        else:
            self._open[block] = False
            self._n_open -= 1
            self._cursor = (block + 1) % self.num_blocks
        self._refs[block] = 1

    def _release(self, blocks: list[int]) -> None:
        """One table fewer holds each of these."""
        self._refs[blocks] -= 1
        self._returned.update(dict.fromkeys(block for block in blocks if not self._refs[block]))

    def _settle(self) -> None:
        """Make the blocks that came back known to the search."""
        self._open[list(self._returned)] = True
        self._n_open += len(self._returned)
        self._returned.clear()

    def _forget(self, block: int) -> None:
        """The block is no longer found by its contents."""
        key = self._keys.pop(block, None)
        if key is not None and self._warm.get(key) == block:
            del self._warm[key]


def _integer(name: str, value: Any) -> int:
    """`value` as an int; anything with `__index__` is one. Raises TypeError."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be an integer") from None


def _size(name: str, value: Any) -> int:
    """`value` as an int of at least 1. Raises TypeError, ValueError."""
    if (size := _integer(name, value)) < 1:
        raise ValueError(f"{name} is {size}; it must be at least 1")
    return size


def _by_head(rows: Half) -> Half:
    """`[n, H, D]` as a view `[H, n, D]`."""
    return rows.swapaxes(0, 1)


@functools.lru_cache(64)
def _ramp(size: int) -> NDArray[np.int64]:
    """0 to size - 1, to be read only."""
    return np.arange(size)
