"""A paged KV cache: block tables, reference counts, copy on write, all-or-nothing appends.

Memory is a pool of blocks of B positions. A sequence owns no memory, only a block table: its position p
lives in slot `p % B` of block `table[p // B]`. A fork copies the table and shares the blocks; the first write
into a shared block copies that block for the writer. A block holds all layers, each with its own length.

The ten methods come first, each above its private steps; then what engines ask beyond them. A method
that changes something prepares everything first: nothing changes before its `# Commit`, and only the first
statement after that needs memory [10]. So the iterators of a commit are made before it.

Numbers in brackets are the laws of docs/laws.md. The source is the chapter "Paged KV cache in Python", after
Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", section 4.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import repeat
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from tinyllm.infer.arguments import as_chunk, as_integer, as_layer, as_size, tokens_in_lists
from tinyllm.infer.memory import Half, blocks_for, consecutive, copied, read_only, runs, views, zeros

Ints = NDArray[np.int32]

LINE = 64  # blocks in a line of `describe`


class OutOfBlocks(RuntimeError):  # noqa: N818 - the name in its source
    """An append needs more blocks (`needed`) than are free (`free`); nothing has changed [9, 10]."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)
        self.needed, self.free = needed, free

    def __str__(self) -> str:
        return f"the append needs {self.needed} blocks, but only {self.free} are free"


class _Sequence(NamedTuple):
    table: list[int]  # block ids, in position order
    lens: list[int]  # positions that each layer holds


class _Plan(NamedTuple):
    """What an append needs, in blocks."""

    first_block: int  # index in the table of the first block that the new positions fall into
    blocks: list[int]  # the table's blocks that they fall into: some of `table[first_block:]`, or none
    shared: list[int]  # those of `blocks` that other tables hold too, so the append copies them
    need: int  # free blocks to claim: a copy of each shared block, and the new blocks past the table's end


class PagedKVCache:
    """Keys and values of many sequences, float16, in one pool of fixed-size blocks. Not thread-safe.

    A call that raises has changed nothing [10]; after `close` every call raises ValueError [14]. A cache can
    be neither copied nor pickled (TypeError): `fork` copies a sequence. Beside the pool, the bookkeeping
    takes 48 bytes a block.

    Args:
        num_blocks: blocks in the pool, at most `2**31 - 1`, since block tables are int32.
        block_size: positions in a block (B).
        n_layers: layers (L); a block has room for all of them.
        n_kv_heads: key/value heads (H).
        d_head: dimension of a head (D).

    Raises:
        ValueError: a size is below 1 [15]. TypeError: a size is not an integer [15].
        MemoryError: the system refuses the `4 * num_blocks * B * L * H * D` bytes of the pool.
    """

    _closed = True  # until the constructor is done, so that `repr` never raises [14]

    def __init__(self, num_blocks: int, block_size: int, n_layers: int, n_kv_heads: int, d_head: int) -> None:
        self.num_blocks = as_size("num_blocks", num_blocks, 2**31 - 1)
        self.block_size = as_size("block_size", block_size)
        self.n_layers = as_size("n_layers", n_layers)
        self.n_kv_heads = as_size("n_kv_heads", n_kv_heads)
        self.d_head = as_size("d_head", d_head)
        # [L, H, slots, D]: block b is slots [b * B, (b + 1) * B), so consecutive blocks are one slice.
        shape = (self.n_layers, self.n_kv_heads, self.num_blocks * self.block_size, self.d_head)
        self._k, self._v = zeros(shape), zeros(shape)
        self._read_k, self._read_v = read_only(self._k), read_only(self._v)
        self._refs = [0] * self.num_blocks  # how many tables hold each block [6]
        self._free = list(range(self.num_blocks - 1, -1, -1))  # a stack: the block freed last is reused first
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
        new_refs = zip(table, [refs[block] + 1 for block in table])
        # Commit
        self._seqs[child] = equal
        for block, count in new_refs:
            refs[block] = count

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        """Add T positions to one layer of one sequence, all or nothing [1-4, 8-12].

        The append copies, whole, each shared block that the positions fall into, and takes a block past the
        end of the table only when a position needs it. With B = 2, five positions, d to h, follow a, b and c,
        which a fork shares:

            before  table [0, 1]           a b|c .
            plan    first_block 1, blocks [1], shared [1], need 3
            after   table [0, 2, 3, 4]     a b|c d|e f|g h

        Args:
            seq_id: a live sequence.
            layer: in `[0, n_layers)`; layers need not keep step with each other.
            k: array-like `[n_kv_heads, T, d_head]`, T >= 1, integers or floats; rounded once to float16.
            v: like `k`.

        Raises:
            OutOfBlocks: the append needs more blocks than are free [9]; no value has been rounded by then.
            KeyError: `seq_id` is not live. IndexError: `layer` is out of range.
            ValueError: the chunk is empty, has a wrong shape, or K and V differ in shape [15].
            TypeError: an id or layer is not an integer; values are neither integers nor floats [15].
        """
        if tokens := tokens_in_lists(k, v, self.n_kv_heads, self.d_head):
            self._check_room(seq_id, layer, tokens)  # before lists become arrays
        k, v = as_chunk(k, v, self.n_kv_heads, self.d_head)
        tokens = as_size("T", k.shape[1])
        layer = as_layer(layer, self.n_layers)
        table, lens = self._live(seq_id)
        start, stop = lens[layer], lens[layer] + tokens
        plan = self._plan(table, start, stop)
        if plan.need > len(self._free):
            raise OutOfBlocks(plan.need, len(self._free))
        # Unseen writes: into claimed blocks, and past this layer's length in blocks that nobody else holds.
        blocks = self._claim(plan) if plan.need else plan.blocks
        self._write(layer, blocks, start % self.block_size, k, v)
        # Commit
        if plan.need:
            self._take(table, plan, blocks)
        lens[layer] = stop

    def _plan(self, table: list[int], start: int, stop: int) -> _Plan:
        """Plan an append of the positions `[start, stop)` to a sequence with this table [2, 8, 9]."""
        refs, size = self._refs, self.block_size
        first_block, last_block = start // size, (stop - 1) // size
        blocks = table[first_block : last_block + 1]
        shared = [block for block in blocks if refs[block] > 1]
        new = max(0, last_block + 1 - len(table))
        return _Plan(first_block, blocks, shared, len(shared) + new)

    def _check_room(self, seq_id: int, layer: int, tokens: int) -> None:
        """Raise OutOfBlocks if an append of `tokens` positions would [9]."""
        layer = as_layer(layer, self.n_layers)
        table, lens = self._live(seq_id)
        plan = self._plan(table, lens[layer], lens[layer] + tokens)
        if plan.need > self.num_free_blocks():
            raise OutOfBlocks(plan.need, self.num_free_blocks())

    def _claim(self, plan: _Plan) -> list[int]:
        """The blocks that the new positions go into, in position order, with free ones prepared among them.

        A copy stands in the place of each shared block; zeroed blocks follow. `_take` makes them the table's.
        """
        claimed = self._free[: -plan.need - 1 : -1]  # in the order in which they leave the stack
        copies, fresh = claimed[: len(plan.shared)], claimed[len(plan.shared) :]
        copy_of = dict(zip(plan.shared, copies))
        for pool in (self._k, self._v):
            for original, copy in copy_of.items():
                pool[:, :, self._slots(copy)] = pool[:, :, self._slots(original)]
            for first, stop in runs(fresh):
                pool[:, :, self._slots(first, stop - first)] = 0  # until a layer writes there [11]
        return [copy_of.get(block, block) for block in plan.blocks] + fresh

    def _write(self, layer: int, blocks: list[int], slot: int, k: NDArray[Any], v: NDArray[Any]) -> None:
        """Write a chunk into one layer of `blocks`, from a slot of the first block on [3]."""
        size, tokens, first_token = self.block_size, k.shape[1], 0
        with np.errstate(all="ignore"):  # the assignments round
            for first_block, stop_block in runs(blocks):
                first_slot = first_block * size + slot
                stop_slot = min(stop_block * size, first_slot + tokens - first_token)
                stop_token = first_token + stop_slot - first_slot
                self._k[layer, :, first_slot:stop_slot] = k[:, first_token:stop_token]
                self._v[layer, :, first_slot:stop_slot] = v[:, first_token:stop_token]
                slot, first_token = 0, stop_token

    def _take(self, table: list[int], plan: _Plan, blocks: list[int]) -> None:
        """Put claimed blocks into the table, and take them off the free list; release the originals [6]."""
        refs, free = self._refs, self._free
        pops = repeat(None, plan.need)
        new_refs = zip(plan.shared, [refs[block] - 1 for block in plan.shared])
        # Commit
        table[plan.first_block : plan.first_block + len(blocks)] = blocks
        for _ in pops:
            refs[free.pop()] = 1
        for block, count in new_refs:
            refs[block] = count

    def _slots(self, block: int, count: int = 1) -> slice:
        """The slots of `count` consecutive blocks."""
        return slice(block * self.block_size, (block + count) * self.block_size)

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
        length = lens[layer]
        blocks = table[: blocks_for(length, self.block_size)]
        return self._read(self._k[layer], blocks, length), self._read(self._v[layer], blocks, length)

    def _read(self, pool: Half, blocks: list[int], length: int) -> Half:
        """The first `length` positions held by `blocks` in one layer's pool `[H, slots, D]`, a new array."""
        if consecutive(blocks):  # one slice, at nearly the speed of a plain copy
            first_slot = blocks[0] * self.block_size if blocks else 0
            return copied(pool[:, first_slot : first_slot + length])
        by_block = pool.reshape(self.n_kv_heads, self.num_blocks, self.block_size, self.d_head)
        taken = by_block.take(blocks, axis=1)
        return taken.reshape(self.n_kv_heads, len(blocks) * self.block_size, self.d_head)[:, :length]

    def free(self, seq_id: int) -> None:
        """Drop a sequence: blocks that no other table holds are free again, and so is its id [6, 13].

        Raises KeyError: `seq_id` is not live. TypeError: it is not an integer.
        """
        seq_id = as_integer("seq_id", seq_id)
        table, _ = self._live(seq_id)
        # Commit
        self._release(table)
        del self._seqs[seq_id]

    def _release(self, blocks: list[int]) -> None:
        """Drop one reference to each block; those that no other table holds are free again [6]."""
        refs = self._refs
        freed = [block for block in reversed(blocks) if refs[block] == 1]
        new_refs = zip(blocks, [refs[block] - 1 for block in blocks])
        # Commit
        self._free += freed
        for block, count in new_refs:
            refs[block] = count

    def stats(self) -> dict[str, int]:
        """Counts of blocks, `free + used + cached == num_blocks` [5].

        `cached` and `evictions` are 0: an append sees no token ids, so no freed block can be found again.
        """
        free = self.num_free_blocks()
        return {"free": free, "used": self.num_blocks - free, "cached": 0, "evictions": 0}

    def num_free_blocks(self) -> int:
        """How many blocks the next append can take [5, 9]."""
        self._check_open()
        return len(self._free)

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

    # What engines ask beyond the ten methods.

    def blocks_needed(self, seq_id: int, layer: int, tokens: int) -> int:
        """How many blocks an append of `tokens` positions takes now, copies of shared ones included [16].

        Raises ValueError: tokens < 1. KeyError, IndexError, TypeError: as `append`.
        """
        tokens = as_size("tokens", tokens)
        layer = as_layer(layer, self.n_layers)
        table, lens = self._live(seq_id)
        return self._plan(table, lens[layer], lens[layer] + tokens).need

    def truncate(self, seq_id: int, length: int) -> None:
        """Cut every layer to at most `length` positions, and drop the blocks that no layer then reaches [17].

        Takes no block and writes none, so other holders see nothing. Raises ValueError: `length` is negative,
        or beyond the longest layer. KeyError: `seq_id` is not live. TypeError: not integers.
        """
        seq_id, length = as_integer("seq_id", seq_id), as_integer("length", length)
        table, lens = self._live(seq_id)
        if not 0 <= length <= max(lens):
            raise ValueError(f"length {length} is outside [0, {max(lens)}], the longest layer's length")
        kept = blocks_for(length, self.block_size)
        shorter = _Sequence(table[:kept], [min(n, length) for n in lens])
        # Commit
        self._release(table[kept:])
        self._seqs[seq_id] = shorter

    def gather_runs(self, seq_id: int, layer: int) -> list[tuple[Half, Half]]:
        """What `gather` copies, in place: read-only views `[H, n, D]`, valid until the next change [20]."""
        layer = as_layer(layer, self.n_layers)
        table, lens = self._live(seq_id)
        return views(self._read_k, self._read_v, layer, table, lens[layer], self.block_size)

    def page_table(self, seq_ids: Iterable[int], layer: int) -> tuple[Ints, Ints, Ints]:
        """The blocks of several sequences as attention kernels take them, by FlashInfer's convention [18].

        Three fresh int32 arrays: `indptr`, `indices` and `last_page_len`. Row i of a CSR matrix,
        `indices[indptr[i]:indptr[i + 1]]`, has the blocks that the layer's length covers; the last of them
        holds `last_page_len[i]` positions, 1 to B. An empty layer has no block, and 0, where FlashInfer's C++
        and Python disagree. Raises KeyError, IndexError, TypeError: as `gather`.
        """
        layer = as_layer(layer, self.n_layers)
        seqs = [self._live(seq_id) for seq_id in seq_ids]
        self._check_open()  # there may be no sequence
        size, lengths = self.block_size, [lens[layer] for _, lens in seqs]
        pages = [table[: blocks_for(length, size)] for (table, _), length in zip(seqs, lengths)]
        indptr = np.cumsum([0, *map(len, pages)], dtype=np.int32)
        indices = np.array([block for row in pages for block in row], np.int32)
        return indptr, indices, np.array([(n - 1) % size + 1 if n else 0 for n in lengths], np.int32)

    def check(self) -> None:
        """Compare free list, reference counts and tables [19].

        Raises AssertionError, `law N: ...`: the first disagreement, with law 2, 5 or 6.
        """
        self._check_open()
        held: Counter[int] = Counter()
        for seq_id, (table, lens) in self._seqs.items():
            if len(table) != blocks_for(max(lens), self.block_size):
                what = f"sequence {seq_id} of {max(lens)} positions has {len(table)} blocks"
                raise AssertionError(f"law 2: {what}")
            if len(set(table)) < len(table):
                raise AssertionError(f"law 6: the table of sequence {seq_id} holds a block twice: {table}")
            held.update(table)
        free = self._free
        if len(free) + len(held) != self.num_blocks:
            raise AssertionError(f"law 5: {len(free)} free and {len(held)} held of {self.num_blocks} blocks")
        if {*free, *held} != {*range(self.num_blocks)}:
            raise AssertionError("law 6: a block is free twice, or free and held, or not of this pool")
        for block, count in enumerate(self._refs):
            if count != (holders := held[block]):
                raise AssertionError(f"law 6: block {block} is counted {count} times, and held by {holders}")

    def describe(self) -> str:
        """The pool drawn, a character a block: `.` free, `#` held by one table, `2` to `9` by more, `+`."""
        self._check_open()
        pool = "".join(".#23456789"[count] if count < 10 else "+" for count in self._refs)
        lines = [f"{at:>8}  {pool[at : at + LINE]}\n" for at in range(0, len(pool), LINE)]
        return f"{self!r}\n{''.join(lines)}"

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
