"""The contiguous KV cache of one sequence, preallocated to the longest length it may reach.

It is what a paged cache saves memory against, and the contiguous half of the promise that paging changes no
logit. All of its arrays are made at once, so a sequence of 20 positions holds as much address space as one of
`max_len`. Position p of a layer lies at index p of the position axis; there is nothing else to know.

The source is module L8.2, the contiguous KV cache, as the chapter "Paged KV cache in Python" describes it.
"""

from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tinyllm.infer.arguments import as_chunk, as_integer, as_layer, as_size, tokens_in_lists
from tinyllm.infer.memory import read_only


class CacheFull(RuntimeError):  # noqa: N818 - a sibling of OutOfBlocks
    """An append would make `needed` positions where `max_len` fit; nothing has changed."""

    def __init__(self, needed: int, max_len: int) -> None:
        super().__init__(needed, max_len)
        self.needed = needed
        self.max_len = max_len

    def __str__(self) -> str:
        return f"the append would make {self.needed} positions, but the cache holds at most {self.max_len}"


class KVCache:
    """Keys and values of one sequence, `[n_layers, n_kv_heads, max_len, d_head]` each.

    A call that raises has changed nothing. Not for use by several threads at once.

    Args:
        max_len: positions that each layer can hold.
        n_layers: layers (L), each with a length of its own.
        n_kv_heads: key/value heads (H).
        d_head: dimension of a head (D).
        dtype: what values are rounded to and kept as, a floating dtype.

    Raises:
        ValueError: a size below 1, or sizes beyond what NumPy can index.
        TypeError: a size that is no integer, or a dtype that is not floating.
        MemoryError: the system refuses the memory.
    """

    def __init__(
        self, max_len: int, n_layers: int, n_kv_heads: int, d_head: int, dtype: DTypeLike = np.float16
    ) -> None:
        self.max_len = as_size("max_len", max_len)
        self.n_layers = as_size("n_layers", n_layers)
        self.n_kv_heads = as_size("n_kv_heads", n_kv_heads)
        self.d_head = as_size("d_head", d_head)
        self.dtype = np.dtype(dtype)
        if self.dtype.kind != "f":
            raise TypeError(f"dtype must be floating, not {self.dtype}")
        shape = (self.n_layers, self.n_kv_heads, self.max_len, self.d_head)
        self._k: NDArray[np.floating[Any]] = np.zeros(shape, self.dtype)
        self._v: NDArray[np.floating[Any]] = np.zeros(shape, self.dtype)
        self._lens = [0] * self.n_layers

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Add T positions to one layer, all or nothing.

        Args:
            layer: in `[0, n_layers)`; layers need not keep step with each other.
            k: array-like `[n_kv_heads, T, d_head]`, T >= 1, integers or floats; rounded once to `dtype`.
            v: like `k`.

        Raises:
            CacheFull: the layer would grow past `max_len`; no value has been rounded by then.
            IndexError: `layer` is out of range.
            ValueError: an empty chunk, a wrong shape, or K and V that differ.
            TypeError: a layer that is no integer; values that are neither integers nor floats.
        """
        if tokens := tokens_in_lists(k, v, self.n_kv_heads, self.d_head):
            self._stop(layer, tokens)  # refuse before lists become arrays
        k, v = as_chunk(k, v, self.n_kv_heads, self.d_head)
        tokens = as_size("T", k.shape[1])
        layer = as_layer(layer, self.n_layers)
        start, stop = self._lens[layer], self._stop(layer, tokens)
        with np.errstate(all="ignore"):  # the assignments round
            self._k[layer, :, start:stop] = k
            self._v[layer, :, start:stop] = v
        self._lens[layer] = stop

    def gather(self, layer: int) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]:
        """All K and V of the layer, in position order: read-only views `[H, seq_len, D]` of `dtype`.

        Nothing is copied. A position, once written, never changes until it is cut off, so a view stays valid
        through later appends and shows the positions it was made with; it keeps the cache's memory alive.

        Raises IndexError: no such layer. TypeError: the layer is not an integer.
        """
        layer = as_layer(layer, self.n_layers)
        stop = self._lens[layer]
        return read_only(self._k[layer, :, :stop]), read_only(self._v[layer, :, :stop])

    def truncate(self, length: int) -> None:
        """Cut every layer to at most `length` positions.

        Raises ValueError: `length` is negative, or beyond the longest layer. TypeError: it is no integer.
        """
        length = as_integer("length", length)
        if not 0 <= length <= max(self._lens):
            raise ValueError(f"length {length} is outside [0, {max(self._lens)}], the longest layer's length")
        self._lens = [min(n, length) for n in self._lens]

    def copy(self) -> Self:
        """An equal of this cache in memory of its own; it costs as much. Raises MemoryError.

        `copy.copy` does the same. A subclass's other attributes are shared.
        """
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        twin._k, twin._v = np.zeros(self._k.shape, self.dtype), np.zeros(self._v.shape, self.dtype)
        for layer, n in enumerate(self._lens):
            twin._k[layer, :, :n], twin._v[layer, :, :n] = self._k[layer, :, :n], self._v[layer, :, :n]
        twin._lens = self._lens.copy()
        return twin

    def __copy__(self) -> Self:
        return self.copy()

    @property
    def nbytes(self) -> int:
        """Bytes of K and V, filled or not."""
        return self._k.nbytes + self._v.nbytes

    def seq_len(self, layer: int = 0) -> int:
        """How many positions the layer holds.

        Raises IndexError: no such layer. TypeError: the layer is not an integer.
        """
        return self._lens[as_layer(layer, self.n_layers)]

    def _stop(self, layer: int, tokens: int) -> int:
        """The layer's length after an append of `tokens` positions. Raises CacheFull."""
        stop = self.seq_len(layer) + tokens
        if stop > self.max_len:
            raise CacheFull(stop, self.max_len)
        return stop
