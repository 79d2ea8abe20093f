"""How much memory a KV cache takes, how many blocks a pool needs, and what a pool in use wastes.

Sizes are those of `PagedKVCache`: B positions in a block, L layers, H key/value heads of D dimensions. Memory
is counted in bytes of K and V together. A pool's bookkeeping takes 48 bytes a block more, held or free, and 8
for each entry of a table. As for the caches, a size below 1 raises ValueError, and one that is not an integer
TypeError.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tinyllm.infer.arguments import as_integer, as_size
from tinyllm.infer.memory import blocks_for
from tinyllm.infer.paged import PagedKVCache

FLOAT16 = 2  # bytes of a value


class Waste(NamedTuple):
    """Memory of the slots in held blocks that no position fills."""

    bytes: int
    share: float  # of the memory of all held blocks, in [0, 1]; 0 if no block is held


def bytes_per_token(n_layers: int, n_kv_heads: int, d_head: int, itemsize: int = FLOAT16) -> int:
    """Bytes of one position in all layers, `2 * L * H * D * itemsize`; `itemsize` is the bytes of a value."""
    sizes = {"n_layers": n_layers, "n_kv_heads": n_kv_heads, "d_head": d_head, "itemsize": itemsize}
    token = 2  # K and V
    for name, size in sizes.items():
        token *= as_size(name, size)
    return token


def bytes_per_block(
    block_size: int, n_layers: int, n_kv_heads: int, d_head: int, itemsize: int = FLOAT16
) -> int:
    """Bytes of a block, which holds B positions in all layers."""
    return as_size("block_size", block_size) * bytes_per_token(n_layers, n_kv_heads, d_head, itemsize)


def blocks_for_budget(
    budget: int, block_size: int, n_layers: int, n_kv_heads: int, d_head: int, itemsize: int = FLOAT16
) -> int:
    """How many blocks fit into `budget` bytes, which is at least 1; 0 if not one fits."""
    return as_size("budget", budget) // bytes_per_block(block_size, n_layers, n_kv_heads, d_head, itemsize)


def blocks_for_lengths(lengths: Iterable[int], block_size: int) -> int:
    """How many blocks hold sequences of these lengths, in positions, that share no block.

    Raises:
        ValueError: a length is below 0. TypeError: a length is not an integer.
    """
    block_size = as_size("block_size", block_size)
    blocks = 0
    for length in lengths:
        n = as_integer("length", length)
        if n < 0:
            raise ValueError(f"length is {n}; it must be at least 0")
        blocks += blocks_for(n, block_size)
    return blocks


def waste(cache: PagedKVCache, seq_ids: Iterable[int]) -> Waste:
    """What the blocks of these sequences leave unfilled: the ends of last blocks, and layers that lag.

    A slot counts once for each layer. A block that several of the sequences share counts once, and a slot in
    it is filled if any of them fills it. Blocks that only other sequences hold do not count.

    Args:
        cache: the pool; the call only reads it.
        seq_ids: live sequences; one named twice counts once.

    Raises:
        KeyError: an id is not live. TypeError: it is not an integer. ValueError: the cache is closed.
    """
    size, layers = cache.block_size, cache.n_layers
    filled: dict[int, list[int]] = {}  # of each block held: slots filled, by layer
    for seq_id in seq_ids:
        lens = [cache.seq_len(seq_id, layer) for layer in range(layers)]
        for i, block in enumerate(cache.block_table(seq_id).tolist()):
            here = [min(max(n - i * size, 0), size) for n in lens]
            filled[block] = [max(pair) for pair in zip(here, filled.get(block, here))]
    held = len(filled) * size * layers
    empty = held - sum(map(sum, filled.values()))
    slot = bytes_per_token(1, cache.n_kv_heads, cache.d_head)
    return Waste(empty * slot, empty / held if held else 0.0)
