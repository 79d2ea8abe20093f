"""The books of a paged cache in other forms: held against each other, drawn, as arrays for a kernel."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

WIDTH = 64  # blocks in a line of the drawing


def check(
    num_blocks: int,
    block_size: int,
    refs: Sequence[int],
    free: Sequence[int],
    seqs: Mapping[int, tuple[Sequence[int], Sequence[int]]],
) -> None:
    """Hold the free list, the counts of holders and the tables against each other.

    Args:
        num_blocks: blocks in the pool.
        block_size: positions in a block.
        refs: how many tables hold each block; 0 for a free one.
        free: the ids of the free blocks.
        seqs: by sequence id, its table and the lengths of its layers.

    Raises:
        AssertionError: `law N: ...`, which names the first disagreement (laws 2, 5, 6).
    """
    held: Counter[int] = Counter()
    for seq_id, (table, lens) in seqs.items():
        if len(table) != -(-max(lens) // block_size):
            raise AssertionError(f"law 2: sequence {seq_id} of {max(lens)} positions has {len(table)} blocks")
        held.update(set(table))
        if len(set(table)) < len(table):
            raise AssertionError(f"law 6: the table of sequence {seq_id} holds a block twice: {[*table]}")
    if len(free) + len(held) != num_blocks:
        raise AssertionError(f"law 5: {len(free)} free and {len(held)} held of {num_blocks} blocks")
    if len({*free, *held}) != num_blocks or any(not 0 <= block < num_blocks for block in (*free, *held)):
        raise AssertionError("law 6: a block is free twice, or free and held, or not of this pool")
    for block, count in enumerate(refs):
        if count != held[block]:
            raise AssertionError(f"law 6: block {block} is counted {count} times, and held by {held[block]}")


def draw(refs: Sequence[int]) -> str:
    """A character a block, by how many tables hold it: `.` none, `#` one, `2` to `9`, `+` more."""
    text = "".join(".#23456789"[count] if count < 10 else "+" for count in refs)
    lines = (f"{at:>8}  {text[at : at + WIDTH]}\n" for at in range(0, len(text), WIDTH))
    return "".join(lines)


def csr(rows: Sequence[tuple[Sequence[int], int]], block_size: int) -> tuple[Ints, Ints, Ints]:
    """`indptr`, `indices` and `last_page_len`, int32, of rows that are a table and a length in positions.

    FlashInfer's C++ and Python disagree on the last page of an empty sequence; here it has no page, and 0.
    """
    pages = [table[: -(-n // block_size)] for table, n in rows]
    indptr = np.cumsum([0, *map(len, pages)], dtype=np.int32)
    indices = np.array([block for row in pages for block in row], np.int32)
    return indptr, indices, np.array([(n - 1) % block_size + 1 if n else 0 for _, n in rows], np.int32)
