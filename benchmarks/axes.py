"""The axes of `growth.py`, and the growth that each call may have on them.

The time of a call may grow in proportion to the data it visits, and with nothing else. Calls that move much
memory are compared with a yardstick: even a plain copy grows faster than in proportion, since large sizes
miss the processor's caches.
"""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.calls import (
    LAGGING,
    MANY,
    SCATTERED,
    SUBJECT,
    Operation,
    Place,
    add_and_free,
    append,
    append_copying,
    append_refused,
    append_to_each,
    asked,
    close,
    copy,
    crowded,
    fork,
    free,
    free_each,
    free_fork,
    half_full,
    integers,
    new,
    one_by_one,
    pool_for,
    pool_of,
    pool_of_long,
    pool_of_many,
    truncate,
    write,
)

NONE, PROPORTION, YARDSTICK = "none", "in proportion", "measured"
"""The allowed growth of a call; any other string is the name of its yardstick."""

Calls = dict[str, tuple[str, Operation]]


class Axis(NamedTuple):
    """The name and label of a size, its range in powers of ten, its pools and its calls."""

    name: str
    label: str
    powers: tuple[int, int]
    build: Callable[[int], Place]
    calls: Calls

    def sizes(self, quick: bool = False) -> list[int]:
        """Three sizes a decade; if quick, those of the first decade."""
        first, last = self.powers
        last = first + 1 if quick else last
        return [round(10 ** (third / 3)) for third in range(3 * first, 3 * last + 1)]


def growing(right: str, calls: dict[str, Operation]) -> Calls:
    """Calls with the same allowed growth."""
    return {name: (right, operation) for name, operation in calls.items()}


ALWAYS: dict[str, Operation] = {
    "append": append,
    "append, copying": append_copying,
    "append, refused": append_refused,
    "blocks_needed": asked(lambda at: at.pool.blocks_needed(SUBJECT, 0, 1), MANY),
    "stats": asked(lambda at: at.pool.stats(), MANY),
    "num_free_blocks": asked(lambda at: at.pool.num_free_blocks(), MANY),
    "seq_len": asked(lambda at: at.pool.seq_len(SUBJECT), MANY),
    "add_seq and free": add_and_free,
}
"""Calls that grow with the blocks they touch, and with nothing else."""

WALKS: dict[str, Operation] = {
    "fork": fork,
    "free a fork": free_fork,
    "free": free,
    "truncate": truncate,
    "block_table": asked(lambda at: at.pool.block_table(SUBJECT)),
    "page_table": asked(lambda at: at.pool.page_table([SUBJECT], 0)),
    "gather_runs": asked(lambda at: at.pool.gather_runs(SCATTERED, 0)),
}
"""Calls that grow with the table of the sequence."""

GATHERS: dict[str, Operation] = {
    "gather": asked(lambda at: at.pool.gather(SUBJECT, 0)),
    "gather, scattered": asked(lambda at: at.pool.gather(SCATTERED, 0)),
}
"""Calls that grow with the positions of the sequence."""

POOL = {"check": asked(lambda at: at.pool.check()), "close": close(half_full)}
EACH: dict[str, Operation] = {
    "append to each": append_to_each,
    "page_table of all": asked(lambda at: at.pool.page_table(range(at.size), 0)),
    "free each": free_each,
    "close": close(crowded),
}
CHUNK: dict[str, Operation] = {
    "append, copying": lambda at: append_copying(at, LAGGING, at.size),
    "append, refused": lambda at: append_refused(at, at.size),
    "blocks_needed": asked(lambda at: at.pool.blocks_needed(LAGGING, 0, at.size), MANY),
    "truncate": lambda at: truncate(at, at.size),
}
"""Calls with a number of positions as their argument."""

NOTHING = growing(NONE, ALWAYS | WALKS | GATHERS)
NEW = growing(YARDSTICK, {"list of integers": integers}) | growing("list of integers", {"new": new})
WRITES = growing(YARDSTICK, {"plain write": write})
WRITES |= growing("plain write", {"append": lambda at: append(at, at.size)})
COPIES = growing(YARDSTICK, {"plain copy": copy}) | growing("plain copy", GATHERS)

AXES = (
    Axis("pool", "blocks in the pool", (2, 6), pool_of, NOTHING | NEW | growing(PROPORTION, POOL)),
    Axis("others", "sequences in the pool", (1, 4), pool_of_many, NOTHING | growing(PROPORTION, EACH)),
    Axis(
        "length",
        "positions in the sequence",
        (2, 5),
        pool_of_long,
        growing(NONE, ALWAYS) | growing(PROPORTION, WALKS | {"append one by one": one_by_one}) | COPIES,
    ),
    Axis("chunk", "positions that one call is about", (1, 5), pool_for, WRITES | growing(PROPORTION, CHUNK)),
)
