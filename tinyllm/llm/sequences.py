"""Where generation keeps its sequences: the blocks of one pool, or a contiguous cache for each.

Both can start a sequence, fork it, cut it and drop it, so that what generates does not know which it runs on.
That is the comparison: in a pool a fork shares what it has in common, and costs nothing until it differs;
of a contiguous cache it is a copy.
"""

from itertools import count
from typing import Protocol

import numpy as np

from tinyllm.infer.kvcache import KVCache
from tinyllm.infer.paged import PagedKVCache
from tinyllm.infer.planning import bytes_per_block
from tinyllm.llm.llama import LayerCache, LlamaConfig, PagedSequence


class Sequences(Protocol):
    """What generation asks of the place that its sequences are kept in. A handle is an int."""

    def add(self) -> int:
        """Start an empty sequence; its handle."""

    def fork(self, handle: int) -> int:
        """Start an equal of a sequence; its handle."""

    def truncate(self, handle: int, length: int) -> None:
        """Cut a sequence to at most `length` positions."""

    def free(self, handle: int) -> None:
        """Drop a sequence."""

    def layers(self, handle: int) -> LayerCache:
        """A sequence as the decoder takes it."""

    def held(self) -> int:
        """Bytes of K and V that the sequences hold now, filled or not."""

    def shared(self) -> int:
        """Blocks that more than one of the sequences hold now."""


class Paged:
    """Sequences in a pool, which may have others as well; their ids are the first ones not in use.

    Args:
        cache: the pool, sized as the model is.
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
        """Blocks past the cut that no other sequence holds are free again."""
        self.cache.truncate(handle, length)

    def free(self, handle: int) -> None:
        """Blocks that no other sequence holds are free again."""
        self.cache.free(handle)
        self._live.discard(handle)

    def layers(self, handle: int) -> LayerCache:
        """A view of the pool."""
        return PagedSequence(self.cache, handle)

    def held(self) -> int:
        """Bytes of the blocks that these sequences hold, each counted once."""
        cache = self.cache
        sizes = (cache.block_size, cache.n_layers, cache.n_kv_heads, cache.d_head)
        return len(self._holders()) * bytes_per_block(*sizes)

    def shared(self) -> int:
        """Blocks that stand in more than one of these sequences' tables."""
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
    """Sequences in a contiguous cache each, preallocated to `max_len` positions; a fork is a copy.

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
        """A fork copies what its parent holds."""
        return self._keep(self._live[handle].copy())

    def truncate(self, handle: int, length: int) -> None:
        """A cut gives no memory back."""
        self._live[handle].truncate(length)

    def free(self, handle: int) -> None:
        """The memory goes back whole."""
        del self._live[handle]

    def layers(self, handle: int) -> LayerCache:
        """The cache itself."""
        return self._live[handle]

    def held(self) -> int:
        """Bytes of all the caches, filled or not."""
        return sum(cache.nbytes for cache in self._live.values())

    def shared(self) -> int:
        """None: 0."""
        return 0

    def _keep(self, cache: KVCache) -> int:
        handle = next(self._ids)
        self._live[handle] = cache
        return handle


def new_pool(config: LlamaConfig, num_blocks: int, block_size: int = 16) -> PagedKVCache:
    """A pool for a model. Raises what `PagedKVCache` raises."""
    return PagedKVCache(num_blocks, block_size, config.n_layers, config.n_kv_heads, config.d_head)
