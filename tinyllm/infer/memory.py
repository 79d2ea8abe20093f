"""The memory of a block pool, and runs of neighbouring blocks in it.

A pool is far larger than its use, and is touched a block here and a block there. NumPy asks the kernel for
huge pages behind a large array, so touching one block of 2 KiB makes 2 MiB resident: measured, a lazily
filled `np.zeros` pool held 14 times the bytes stored in it. A private anonymous mapping that declines huge
pages holds what was touched, and goes back to the system the moment the last array on it is dropped.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Half = NDArray[np.float16]


def zeros(shape: tuple[int, ...]) -> Half:
    """A float16 array of zeros whose memory becomes resident a small page at a time.

    Args:
        shape: the array's shape; the product of its entries is at least 1.

    Raises:
        MemoryError: the system refuses that much address space.
    """
    size = math.prod(shape) * np.dtype(np.float16).itemsize
    try:
        if not hasattr(mmap, "MADV_NOHUGEPAGE"):  # no advice to give here, so nothing to gain
            return np.zeros(shape, np.float16)
        # Private: a shared mapping, Python's default, would let a forked process write into ours.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (MemoryError, OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"cannot map {size:,} bytes for an array of shape {shape}") from error
    with contextlib.suppress(OSError):  # a kernel built without huge pages refuses the advice
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float16).reshape(shape)


def copied(window: Half) -> Half:
    """A contiguous copy of part of a pool, `[H, n, D]`.

    Small pages have a price: the copy waits for the address of each, one after the other. Reading one value
    of every page first lets those waits overlap: measured at 768 KiB, 1.3 times a plain copy becomes 1.1.
    """
    if window.nbytes > 2**19:
        window[:, :: max(1, mmap.PAGESIZE // window.strides[1]), 0].copy()
    return window.copy()


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view of `array` that cannot be written through, and neither can views of it.

    An array's own flag could be set again, here or at the view's `base`; a read-only buffer refuses that.
    """
    return np.asarray(array.data.toreadonly())


def blocks_for(length: int, block_size: int) -> int:
    """How many blocks of `block_size` positions hold `length` positions: `ceil(length / block_size)`."""
    return -(-length // block_size)


def consecutive(blocks: Sequence[int]) -> bool:
    """Whether each block id is the one before it plus 1; true of no blocks."""
    return not blocks or blocks == [*range(blocks[0], blocks[0] + len(blocks))]


def runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Split block ids, in order, into runs of consecutive ids: `[4, 5, 6, 2]` gives `[(4, 7), (2, 3)]`."""
    if not blocks:
        return []
    if consecutive(blocks):  # the usual case, and the quicker test
        return [(blocks[0], blocks[0] + len(blocks))]
    starts = [i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1]
    return [(blocks[a], blocks[b - 1] + 1) for a, b in pairwise([0, *starts, len(blocks)])]


def views(
    k: Half, v: Half, layer: int, blocks: Sequence[int], length: int, block_size: int
) -> list[tuple[Half, Half]]:
    """The first `length` positions that `blocks` hold, in place: a pair of views for each run.

    Args:
        k: the pool's K `[L, H, slots, D]`; read-only, so that its views are.
        v: the pool's V, likewise.
        layer: in `[0, L)`.
        blocks: block ids in position order; blocks past the length are ignored.
        length: positions, at least 0.
        block_size: positions in a block.

    Returns:
        Pairs of K and V, `[H, n, D]`, in position order.
    """
    pairs = []
    for first_block, stop_block in runs(blocks[: blocks_for(length, block_size)]):
        first_slot = first_block * block_size
        stop_slot = min(stop_block * block_size, first_slot + length)
        pairs.append((k[layer, :, first_slot:stop_slot], v[layer, :, first_slot:stop_slot]))
        length -= stop_slot - first_slot
    return pairs
