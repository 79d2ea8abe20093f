"""Data that repeat: what was appended before, the same or with a change that a careless key overlooks.

A cache that finds blocks by their contents has to look at all of them: K and V, each head, each position.
"""

from collections.abc import Callable

import numpy as np

from tinyllm.testing import trace
from tinyllm.testing.contract import Config
from tinyllm.testing.forms import Values
from tinyllm.testing.trace import Op

LONGEST = 256  # values of a chunk that a line spells out


def _last_position(a: Values) -> Values:
    return np.concatenate([a[:, :-1], -a[:, -1:]], axis=1)


def _last_head(a: Values) -> Values:
    return np.concatenate([a[:-1], -a[-1:]])


def _zeros(a: Values) -> Values:
    """Zeros change their sign; where there is none, the last position gets some."""
    if (a == 0).any():
        return np.where(a == 0, -a, a)
    return np.concatenate([a[:, :-1], np.zeros_like(a[:, -1:])], axis=1)


def _one_position(a: Values) -> Values:
    return np.repeat(a[:, :1], a.shape[1], axis=1)


CHANGES: dict[str, Callable[[Values], Values]] = {
    "last position": _last_position,
    "last head": _last_head,
    "zeros": _zeros,
    "one position": _one_position,
}
"""What is changed of K and of V; the last one makes all positions of a chunk equal."""
DRAWN = ["none", "none", "V", "one position", *CHANGES]


def known(op: Op, scalars: int) -> Op:
    """An append, to be repeated later: where its values stand in the pattern is written down."""
    return op if op.data else op._replace(form="", refusal="", places=op.places or (scalars, scalars))


def changed(op: Op, change: str, scalars: int, config: Config) -> Op:
    """The append `op` again, with a change: another V is that of the pattern's next values."""
    if change == "V" and op.places:
        return op._replace(places=(op.places[0], scalars))
    k, v = trace.values(op, scalars, config)
    if change == "none" or k.size > LONGEST:
        return op
    if change == "V":
        v = trace.pattern(scalars, config, k.shape[1])[1]
    else:
        k, v = CHANGES[change](k), CHANGES[change](v)
    return op._replace(places=None, data=(trace.encode(k), trace.encode(v)))
