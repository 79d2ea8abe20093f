"""A paged KV cache: block tables, reference counts, copy on write, all-or-nothing appends.

Memory is a pool of blocks of B positions. A sequence owns no memory, only a block table: its position p
lives in slot `p % B` of block `table[p // B]`. A fork copies the table and shares the blocks; the first write
into a shared block copies that block for the writer. A block holds all layers, each with its own length.

Numbers in brackets are the laws of docs/laws.md. Nothing changes before a `# Commit`, of which only the first
statement can want memory [10]. The source is the chapter "Paged KV cache in Python", after Kwon et al.,
"Efficient Memory Management for Large Language Model Serving with PagedAttention", section 4.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from tinyllm.infer import bookkeeping
from tinyllm.infer.arguments import as_chunk, as_integer, as_layer, as_size, told_tokens
from tinyllm.infer.bookkeeping import Ints
from tinyllm.infer.memory import Half, copied, read_only, runs, views, zeros


class OutOfBlocks(RuntimeError):  # noqa: N818 - the chapter's name
    """An append needs more blocks (`needed`) than are free (`free`); nothing has changed [9, 10]."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)
        self.needed, self.free = needed, free

    def __str__(self) -> str:
        return f"the append needs {self.needed} blocks, but only {self.free} are free"


class _Sequence(NamedTuple):
    table: list[int]  # block ids, in position order
    lens: list[int]  # positions that each layer holds


class PagedKVCache:
    """Keys and values of many sequences, float16, in one pool of fixed-size blocks. Not thread-safe.

    A call that raises has changed nothing [10]; after `close` every call raises ValueError [14]. To copy or
    pickle a cache is a TypeError: `fork` copies a sequence. The books take 48 bytes a block beside the pool.

    Args:
        num_blocks: blocks in the pool, at most `2**31 - 1`, since block tables are int32.
        block_size: positions in a block (B).
        n_layers: layers (L); a block has room for all of them.
        n_kv_heads: key/value heads (H).
        d_head: dimension of a head (D).

    Raises:
        ValueError: a size below 1 [15]. TypeError: a size that is no integer [15].
        MemoryError: the system refuses the `4 * num_blocks * B * L * H * D` bytes of the pool.
    """

    _closed = True  # until the constructor is through, so that `repr` never raises [14]

    def __init__(self, num_blocks: int, block_size: int, n_layers: int, n_kv_heads: int, d_head: int) -> None:
        self.num_blocks = as_size("num_blocks", num_blocks, 2**31 - 1)
        self.block_size = as_size("block_size", block_size)
        self.n_layers = as_size("n_layers", n_layers)
        self.n_kv_heads = as_size("n_kv_heads", n_kv_heads)
        self.d_head = as_size("d_head", d_head)
        # [L, H, slots, D]: block b is slots [b * B, (b + 1) * B), so neighbouring blocks are one slice.
        shape = (self.n_layers, self.n_kv_heads, self.num_blocks * self.block_size, self.d_head)
        self._k, self._v = zeros(shape), zeros(shape)
        self._read_k, self._read_v = read_only(self._k), read_only(self._v)
        self._refs = [0] * self.num_blocks  # how many tables hold each block [6]
        self._free = list(range(self.num_blocks - 1, -1, -1))  # a stack: what was freed last goes out next
        self._seqs: dict[int, _Sequence] = {}
        self._closed = False

    def add_seq(self, seq_id: int) -> None:
        """Start an empty sequence; takes no block [13].

        Raises ValueError: `seq_id` is live. TypeError: it is not an integer.
        """
        seq_id = self._unused(seq_id)
        self._seqs[seq_id] = _Sequence([], [0] * self.n_layers)

    def fork(self, parent: int, child: int) -> None:
        """Start `child` as an equal of `parent` in every layer, sharing its blocks; takes no block [7, 13].

        Raises KeyError: `parent` is not live. ValueError: `child` is. TypeError: an id is not an integer.
        """
        parent, child = as_integer("parent", parent), as_integer("child", child)
        table, lens = self._live(parent)
        child, equal, refs = self._unused(child), _Sequence(table.copy(), lens.copy()), self._refs
        counts = zip(table, [refs[block] + 1 for block in table])
        # Commit
        self._seqs[child] = equal
        for block, count in counts:
            refs[block] = count

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        """Add T positions to one layer of one sequence, all or nothing [1-4, 8-12].

        A block that the positions fall into and another table also holds is copied first, whole; a block
        past the end of the table is taken only when a position needs it.

        Args:
            seq_id: a live sequence.
            layer: in `[0, n_layers)`; layers need not keep step with each other.
            k: array-like `[n_kv_heads, T, d_head]`, T >= 1, integers or floats; rounded once to float16.
            v: like `k`.

        Raises:
            OutOfBlocks: the append needs more blocks than are free [9]; no value has been rounded by then.
            KeyError: `seq_id` is not live. IndexError: `layer` is out of range.
            ValueError: an empty chunk, a wrong shape, or K and V that differ [15].
            TypeError: an id or layer that is no integer; values that are neither integers nor floats [15].
        """
        if told := told_tokens(k, v, self.n_kv_heads, self.d_head):
            self._afford(seq_id, layer, told)  # refused before lists become arrays
        k, v = as_chunk(k, v, self.n_kv_heads, self.d_head)
        tokens = as_size("T", k.shape[1])
        layer = as_layer(layer, self.n_layers)
        table, lens = self._live(seq_id)
        refs, free, size = self._refs, self._free, self.block_size
        # Plan: `blocks` are those that the new positions fall into, as far as there are any: table[first:].
        start, stop = lens[layer], lens[layer] + tokens
        first, blocks, shared, need = self._plan(table, start, stop)
        if need > len(free):
            raise OutOfBlocks(need, len(free))
        # Write: into claimed blocks, and into slots past this layer's length in blocks held by no one else.
        taken, counts = self._claim(blocks, shared, need) if need else ((), ())
        slot, done = start % size, 0
        with np.errstate(all="ignore"):  # the assignments round [3]
            for a, b in runs(blocks):
                at = a * size + slot
                n = min(b * size - at, tokens - done)
                self._k[layer, :, at : at + n] = k[:, done : done + n]
                self._v[layer, :, at : at + n] = v[:, done : done + n]
                slot, done = 0, done + n
        # Commit
        table[first : first + len(blocks)] = blocks
        for block, count in counts:
            refs[block] = count
        for _ in taken:
            free.pop()
        lens[layer] = stop

    def blocks_needed(self, seq_id: int, layer: int, tokens: int) -> int:
        """How many blocks an append of `tokens` positions takes now, copies of shared ones included [16].

        Raises ValueError: tokens < 1. KeyError, IndexError, TypeError: as `append`.
        """
        tokens = as_size("tokens", tokens)
        layer = as_layer(layer, self.n_layers)
        table, lens = self._live(seq_id)
        return self._plan(table, lens[layer], lens[layer] + tokens)[3]

    def truncate(self, seq_id: int, length: int) -> None:
        """Cut every layer to at most `length` positions, and drop the blocks that no layer reaches then [17].

        Takes no block and writes none, so other holders see nothing. Raises ValueError: `length` is negative,
        or beyond the longest layer. KeyError: `seq_id` is not live. TypeError: not integers.
        """
        seq_id, length = as_integer("seq_id", seq_id), as_integer("length", length)
        table, lens = self._live(seq_id)
        if not 0 <= length <= max(lens):
            raise ValueError(f"length {length} is outside [0, {max(lens)}], the longest layer's length")
        kept = -(-length // self.block_size)
        shorter = _Sequence(table[:kept], [min(n, length) for n in lens])
        # Commit
        self._release(table[kept:])
        self._seqs[seq_id] = shorter

    def block_table(self, seq_id: int) -> NDArray[np.int32]:
        """The `ceil(longest layer / B)` block ids in position order, fresh [1, 2, 12]. Raises as `free`."""
        return np.array(self._live(seq_id).table, np.int32)

    def seq_len(self, seq_id: int, layer: int = 0) -> int:
        """How many positions the layer holds [4]. Raises KeyError, IndexError, TypeError: as `gather`."""
        layer = as_layer(layer, self.n_layers)
        return self._live(seq_id).lens[layer]

    def gather(self, seq_id: int, layer: int) -> tuple[Half, Half]:
        """All K and V of the layer, in position order: fresh float16 arrays `[H, seq_len, D]` [3, 12].

        Raises KeyError: `seq_id` is not live. IndexError: no such layer. TypeError: not integers.
        """
        layer = as_layer(layer, self.n_layers)
        table, lens = self._live(seq_id)
        n = lens[layer]
        blocks = table[: -(-n // self.block_size)]
        return self._read(self._k[layer], blocks, n), self._read(self._v[layer], blocks, n)

    def gather_runs(self, seq_id: int, layer: int) -> list[tuple[Half, Half]]:
        """What `gather` copies, in place: read-only views `[H, n, D]`, until the next change [20]."""
        layer = as_layer(layer, self.n_layers)
        table, lens = self._live(seq_id)
        return views(self._read_k, self._read_v, layer, table, lens[layer], self.block_size)

    def page_table(self, seq_ids: Iterable[int], layer: int) -> tuple[Ints, Ints, Ints]:
        """The blocks of several sequences as attention kernels take them, by FlashInfer's convention [18].

        Three fresh int32 arrays: row i of a CSR matrix, `indices[indptr[i]:indptr[i + 1]]`, has the blocks
        that the layer's length covers; the last of them holds `last_page_len[i]` positions, 1 to B. An empty
        layer has no block, and 0. Raises KeyError, IndexError, TypeError: as `gather`.
        """
        layer = as_layer(layer, self.n_layers)
        seqs = [self._live(seq_id) for seq_id in seq_ids]
        self._check_open()
        return bookkeeping.csr([(table, lens[layer]) for table, lens in seqs], self.block_size)

    def free(self, seq_id: int) -> None:
        """Drop a sequence: blocks that no other table holds are free again, and so is its id [6, 13].

        Raises KeyError: `seq_id` is not live. TypeError: it is not an integer.
        """
        seq_id = as_integer("seq_id", seq_id)
        table, _ = self._live(seq_id)
        # Commit
        self._release(table)
        del self._seqs[seq_id]

    def stats(self) -> dict[str, int]:
        """Counts of blocks, `free + used + cached == num_blocks` [5].

        `cached` and `evictions` are 0: an append sees no token ids, so nothing is found again once freed.
        """
        free = self.num_free_blocks()
        return {"free": free, "used": self.num_blocks - free, "cached": 0, "evictions": 0}

    def num_free_blocks(self) -> int:
        """How many blocks the next append can take [5, 9]."""
        self._check_open()
        return len(self._free)

    def check(self) -> None:
        """Raise AssertionError, `law N: ...`, if free list, counts and tables disagree [19]."""
        self._check_open()
        bookkeeping.check(self.num_blocks, self.block_size, self._refs, self._free, self._seqs)

    def describe(self) -> str:
        """The pool drawn, a character a block: `.` free, `#` held by one table, `2` to `9` by more, `+`."""
        self._check_open()
        return f"{self!r}\n{bookkeeping.draw(self._refs)}"

    def close(self) -> None:
        """Give the memory back, as dropping the last reference does; closing twice is fine [14]."""
        self._closed = True
        for name in ("_k", "_v", "_read_k", "_read_v", "_refs", "_free", "_seqs"):
            vars(self).pop(name, None)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"<{type(self).__name__}: closed>"
        free = f"{len(self._free)} of {self.num_blocks} blocks free"
        return f"<{type(self).__name__}: {free}, {len(self._seqs)} sequences>"

    def __reduce__(self) -> NoReturn:
        what = f"a {type(self).__name__} can be neither copied nor pickled, for its pool is its own"
        raise TypeError(f"{what}; fork a sequence, or append what gather returns to another cache")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the cache is closed")

    def _live(self, seq_id: int) -> _Sequence:
        seq_id = as_integer("seq_id", seq_id)  # first, since `__index__` may do anything, even close us
        self._check_open()
        if seq_id in self._seqs:
            return self._seqs[seq_id]
        raise KeyError(f"sequence {seq_id} is not one of the {len(self._seqs)} live ones")

    def _unused(self, seq_id: int) -> int:
        seq_id = as_integer("seq_id", seq_id)
        self._check_open()
        if seq_id in self._seqs:
            raise ValueError(f"sequence {seq_id} is live; an id can be used again once it is freed")
        return seq_id

    def _plan(self, table: list[int], start: int, stop: int) -> tuple[int, list[int], list[int], int]:
        """Of an append: its first block's index, the blocks that are there, which to copy, the cost [9]."""
        refs, size = self._refs, self.block_size
        first, last = start // size, -(-stop // size)
        blocks = table[first:last]
        shared = [i for i, block in enumerate(blocks) if refs[block] > 1]
        return first, blocks, shared, len(shared) + max(0, last - len(table))

    def _afford(self, seq_id: int, layer: int, tokens: int) -> None:
        """Raise OutOfBlocks if an append of `tokens` positions would [9]."""
        layer = as_layer(layer, self.n_layers)
        table, lens = self._live(seq_id)
        *_, need = self._plan(table, lens[layer], lens[layer] + tokens)
        if need > self.num_free_blocks():
            raise OutOfBlocks(need, self.num_free_blocks())

    def _claim(self, blocks: list[int], shared: list[int], need: int) -> tuple[Iterable[int], Iterable[Any]]:
        """Put free blocks into `blocks`, at `shared` copies of what is there; also the counts to come."""
        refs, claimed = self._refs, self._free[: -need - 1 : -1]  # in the order they will come off the stack
        copies, fresh = claimed[: len(shared)], claimed[len(shared) :]
        originals = [blocks[i] for i in shared]
        for i, copy in zip(shared, copies):
            blocks[i] = copy
        blocks += fresh
        for pool in (self._k, self._v):
            for original, copy in zip(originals, copies):
                pool[:, :, self._slots(copy)] = pool[:, :, self._slots(original)]
            for a, b in runs(fresh):
                pool[:, :, self._slots(a, b - a)] = 0  # slots that no layer has appended to read zero [11]
        return iter(claimed), zip(claimed + originals, [1] * need + [refs[block] - 1 for block in originals])

    def _release(self, blocks: list[int]) -> None:
        """Drop one reference to each block; those that no other table holds are free again [6]."""
        refs = self._refs
        last = [block for block in reversed(blocks) if refs[block] == 1]
        counts = zip(blocks, [refs[block] - 1 for block in blocks])
        # Commit
        self._free += last
        for block, count in counts:
            refs[block] = count

    def _slots(self, block: int, count: int = 1) -> slice:
        return slice(block * self.block_size, (block + count) * self.block_size)

    def _read(self, pool: Half, blocks: list[int], length: int) -> Half:
        """The first `length` positions held by `blocks` in one layer's pool `[H, slots, D]`, a new array."""
        first = blocks[0] if blocks else 0
        if blocks == [*range(first, first + len(blocks))]:  # neighbours: one slice, near a plain copy's speed
            return copied(pool[:, first * self.block_size :][:, :length])
        by_block = pool.reshape(self.n_kv_heads, self.num_blocks, self.block_size, self.d_head)
        taken = by_block.take(blocks, axis=1)
        return taken.reshape(self.n_kv_heads, len(blocks) * self.block_size, self.d_head)[:, :length]
