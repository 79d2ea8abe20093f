"""What both caches require of their arguments (law 15), in one place, so that both refuse alike.

Each function returns its argument in the form that the caches work with, or raises an error that names the
value and the bound. None of them looks at a cache, so a refused call has changed nothing (law 10).
"""

import operator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Chunk = tuple[NDArray[Any], NDArray[Any]]


def as_integer(name: str, value: Any) -> int:
    """`value` as an int; anything with `__index__` is one. Raises TypeError."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r} ({type(value).__name__})") from None


def as_size(name: str, value: Any, most: int | None = None) -> int:
    """`value` as an int in `[1, most]`. Raises TypeError or ValueError."""
    size = as_integer(name, value)
    if size < 1:
        raise ValueError(f"{name} is {size}; it must be at least 1")
    if most is not None and size > most:
        raise ValueError(f"{name} is {size}; it must be at most {most}")
    return size


def as_layer(layer: Any, n_layers: int) -> int:
    """`layer` as an int in `[0, n_layers)`. Raises TypeError or IndexError."""
    index = as_integer("layer", layer)
    if not 0 <= index < n_layers:
        raise IndexError(f"layer {index} is outside [0, {n_layers})")
    return index


def tokens_in_lists(k: Any, v: Any, n_kv_heads: int, d_head: int) -> int:
    """T, if the lengths of nested lists give it; 0 if they do not, and for arrays.

    A list can hold one object many times, so the array of a small list may be huge. So an append of lists is
    priced before they become arrays. An object with `__array__` has no price yet, and gives 0.
    """
    if isinstance(k, np.ndarray) and isinstance(v, np.ndarray):
        return 0  # their shapes cost nothing
    if not (isinstance(k, list | tuple | np.ndarray) and isinstance(v, list | tuple | np.ndarray)):
        return 0
    try:
        heads, tokens, dims = len(k), len(k[0]), len(k[0][0])
        same = (heads, tokens, dims) == (len(v), len(v[0]), len(v[0][0]))
    except (TypeError, LookupError):
        return 0
    return tokens if same and (heads, dims) == (n_kv_heads, d_head) else 0


def as_chunk(k: Any, v: Any, n_kv_heads: int, d_head: int, dtype: DTypeLike | None = None) -> Chunk:
    """K and V of one chunk as arrays `[n_kv_heads, T, d_head]`, integers or floats; T may be 0 here.

    With a `dtype`, a value is rounded once, by NumPy's cast, without a warning (law 3): overflow becomes an
    infinity. Without one, an array comes back as it is, uncopied.
    The arrays may share memory with the arguments: write them before control returns to the caller.

    Raises:
        TypeError: the arrays are neither integer nor floating (bool, complex, object, str...).
        ValueError: wrong rank or shape, K and V that differ, or ragged lists.
        Exception: whatever converting a foreign object to an array raises.
    """
    arrays = []
    for name, given in (("k", k), ("v", v)):
        array = np.asarray(given)
        if array.dtype.kind not in "iuf":
            raise TypeError(f"{name} must hold integers or floats, not {array.dtype}")
        shape = array.shape
        if len(shape) != 3 or shape[0] != n_kv_heads or shape[2] != d_head:
            raise ValueError(f"{name} has shape {shape}; it must be [{n_kv_heads}, T, {d_head}]")
        arrays.append(array)
    if arrays[0].shape != arrays[1].shape:
        raise ValueError(f"k has shape {arrays[0].shape} but v has {arrays[1].shape}; they must be equal")
    if dtype is None:
        return arrays[0], arrays[1]
    with np.errstate(all="ignore"):
        return arrays[0].astype(dtype, copy=False), arrays[1].astype(dtype, copy=False)
