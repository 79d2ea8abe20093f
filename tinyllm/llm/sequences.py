"""Sequences for generation: in the blocks of one pool, or in a contiguous cache each.

Both implement one protocol, so generation is the same on either. They differ in cost: a fork in a pool shares
blocks until a write, a fork of a contiguous cache is a copy.
"""

from itertools import count
from typing import Protocol

import numpy as np

from tinyllm.infer.kvcache import KVCache
from tinyllm.infer.paged import PagedKVCache
from tinyllm.infer.planning import bytes_per_block
from tinyllm.llm.llama import LayerCache, LlamaConfig, PagedSequence


class Sequences(Protocol):
    """The interface of generation to its sequences. A handle is an int."""

    def add(self) -> int:
        """Start an empty sequence; returns its handle."""

    def fork(self, handle: int) -> int:
        """Start a copy of a sequence; returns its handle."""

    def truncate(self, handle: int, length: int) -> None:
        """Cut a sequence to at most `length` positions."""

    def free(self, handle: int) -> None:
        """Drop a sequence."""

    def layers(self, handle: int) -> LayerCache:
        """The cache of a sequence, for the decoder."""

    def held(self) -> int:
        """Bytes of K and V that the sequences hold, filled or not."""

    def shared(self) -> int:
        """The number of blocks that more than one sequence holds."""


class Paged:
    """Sequences in a pool that may hold others; their ids are the first unused ones.

    Args:
        cache: the pool, with the sizes of the model.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self._ids = count()
        self._live: set[int] = set()

    def add(self) -> int:
        """An empty sequence takes no block."""
        handle = self._unused()
        self.cache.add_seq(handle)
        self._live.add(handle)
        return handle

    def fork(self, handle: int) -> int:
        """A fork takes no block."""
        child = self._unused()
        self.cache.fork(handle, child)
        self._live.add(child)
        return child

    def truncate(self, handle: int, length: int) -> None:
        """Free the blocks past the cut that no other sequence holds."""
        self.cache.truncate(handle, length)

    def free(self, handle: int) -> None:
        """Free the blocks that no other sequence holds."""
        self.cache.free(handle)
        self._live.discard(handle)

    def layers(self, handle: int) -> LayerCache:
        """A view of the pool."""
        return PagedSequence(self.cache, handle)

    def held(self) -> int:
        """Bytes of the blocks in use, each counted once."""
        cache = self.cache
        sizes = (cache.block_size, cache.n_layers, cache.n_kv_heads, cache.d_head)
        return len(self._holders()) * bytes_per_block(*sizes)

    def shared(self) -> int:
        """The number of blocks in more than one table."""
        return int((self._holders() > 1).sum())

    def _holders(self) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
        tables = [self.cache.block_table(handle) for handle in self._live]
        return np.unique(np.concatenate([*tables, []]), return_counts=True)[1]

    def _unused(self) -> int:
        while True:
            handle = next(self._ids)
            try:
                self.cache.seq_len(handle)
            except KeyError:
                return handle


class Contiguous:
    """Sequences in one contiguous cache each, preallocated for `max_len` positions; a fork is a copy.

    Args:
        config: the sizes of the model.
        max_len: positions that each sequence can hold.
    """

    def __init__(self, config: LlamaConfig, max_len: int) -> None:
        self.max_len = max_len
        self._sizes = (config.n_layers, config.n_kv_heads, config.d_head)
        self._ids = count()
        self._live: dict[int, KVCache] = {}

    def add(self) -> int:
        """An empty sequence takes as much memory as a full one."""
        return self._keep(KVCache(self.max_len, *self._sizes))

    def fork(self, handle: int) -> int:
        """A fork copies the cache of its parent."""
        return self._keep(self._live[handle].copy())

    def truncate(self, handle: int, length: int) -> None:
        """A cut frees no memory."""
        self._live[handle].truncate(length)

    def free(self, handle: int) -> None:
        """Free the memory of the cache."""
        del self._live[handle]

    def layers(self, handle: int) -> LayerCache:
        """The cache itself."""
        return self._live[handle]

    def held(self) -> int:
        """Bytes of all the caches, filled or not."""
        return sum(cache.nbytes for cache in self._live.values())

    def shared(self) -> int:
        """Always 0."""
        return 0

    def _keep(self, cache: KVCache) -> int:
        handle = next(self._ids)
        self._live[handle] = cache
        return handle


def new_pool(config: LlamaConfig, num_blocks: int, block_size: int = 16) -> PagedKVCache:
    """A pool for a model. Raises what `PagedKVCache` raises."""
    return PagedKVCache(num_blocks, block_size, config.n_layers, config.n_kv_heads, config.d_head)
