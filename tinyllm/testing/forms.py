"""Arrays as callers hand them over: every form of K and V, and the values at the edges of float16."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
SPECIAL = [
    *(np.nan, np.inf, -np.inf, -0.0, 0.0),
    *(65504.0, 65519.9, 65520.0, -1e30),  # float16's largest value, and the edge of overflow
    *(2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 6.1e-5),  # its subnormals, and ties between them
    *(1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, 0.1, 2049.0),  # ties to even, and plain rounding
]
"""Values that rounding to float16 may get wrong."""


class _Unconvertible:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("this object refuses to become an array")


def _ragged(values: Values) -> Any:
    rows = values.tolist()
    rows[-1][-1:] = [[]]
    return rows


def _near(values: Values) -> Any:
    """float64 values next to the middle of two float16: those that are rounded to float32 first go astray."""
    away = np.nextafter(values.astype(np.float16), np.float16(np.inf)).astype(np.float64)
    return values + (away - values) * (0.5 - 2.0**-20)


def _tuples(given: Any) -> Any:
    return tuple(map(_tuples, given)) if isinstance(given, list) else given


class Form(NamedTuple):
    """A way to hand K and V over, and the error that must come, if one must.

    Those that are not `drawn` are left to a directed case: the machine has others of their kind.
    """

    make: Callable[[Values, Values], tuple[Any, Any]]
    refusal: str = ""
    drawn: bool = True


def _each(change: Callable[[Values], Any], refusal: str = "", *, drawn: bool = True) -> Form:
    return Form(lambda k, v: (change(k), change(v)), refusal, drawn)


def _read_only(values: Values) -> Values:
    values.flags.writeable = False
    return values


FORMS = {
    "strided": _each(lambda a: np.repeat(a, 2, axis=2)[:, :, ::2]),
    "reversed": _each(lambda a: np.ascontiguousarray(a[:, ::-1])[:, ::-1]),
    "flipped": _each(lambda a: np.ascontiguousarray(a[::-1, ::-1, ::-1])[::-1, ::-1, ::-1], drawn=False),
    "transposed": _each(lambda a: np.ascontiguousarray(a.transpose(1, 2, 0)).transpose(2, 0, 1), drawn=False),
    "fortran": _each(np.asfortranarray),
    "readonly": _each(_read_only),
    "list": _each(lambda a: a.tolist()),
    "tuple": _each(lambda a: _tuples(a.tolist()), drawn=False),
    "float16": _each(lambda a: a.astype(np.float16)),
    "float64": _each(lambda a: a.astype(np.float64)),
    "float64-near": _each(_near, drawn=False),
    "int16": _each(lambda a: a.astype(np.int16), drawn=False),
    "int64": _each(lambda a: a.astype(np.int64)),
    "big-endian": _each(lambda a: a.astype(">f4"), drawn=False),
    "mixed": Form(lambda k, v: (k.astype(np.float64), v.astype(np.int32)), drawn=False),
    "rank2": _each(lambda a: a[0], "ValueError"),
    "rank4": _each(lambda a: a[None], "ValueError"),
    "heads": _each(lambda a: np.concatenate([a, a]), "ValueError"),
    "dims": _each(lambda a: np.concatenate([a, a], axis=2), "ValueError"),
    "fewer-heads": _each(lambda a: a[:-1], "ValueError", drawn=False),
    "fewer-dims": _each(lambda a: a[:, :, :-1], "ValueError", drawn=False),
    "scalar": _each(lambda _: 1.0, "ValueError", drawn=False),
    "ragged": _each(_ragged, "ValueError", drawn=False),
    "rank2-v": Form(lambda k, v: (k, v[0]), "ValueError", drawn=False),
    "heads-v": Form(lambda k, v: (k, np.concatenate([v, v])), "ValueError", drawn=False),
    "dims-v": Form(lambda k, v: (k, np.concatenate([v, v], axis=2)), "ValueError", drawn=False),
    "longer-k": Form(lambda k, v: (np.concatenate([k, k], axis=1), v), "ValueError", drawn=False),
    "unequal": Form(lambda k, v: (k, np.concatenate([v, v], axis=1)), "ValueError"),
    "bool": _each(lambda a: a.astype(np.bool_), "TypeError"),
    "complex": _each(lambda a: a.astype(np.complex64), "TypeError"),
    "object": _each(lambda a: a.astype(object), "TypeError"),
    "str": _each(lambda a: a.astype(str), "TypeError"),
    "none": _each(lambda _: None, "TypeError", drawn=False),
    "bool-v": Form(lambda k, v: (k, v.astype(np.bool_)), "TypeError", drawn=False),
    "none-v": Form(lambda k, _: (k, None), "TypeError", drawn=False),
    "broken-k": Form(lambda _, v: (_Unconvertible(), v), "Exception"),
    "broken-v": Form(lambda k, _: (k, _Unconvertible()), "Exception"),
}
