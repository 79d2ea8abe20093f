"""Programs for what a random walk seldom reaches.

Counts that overflow a byte or a short, many shared blocks at once, every wrong argument, every form of array,
the edges of float16, use after close.
"""

import gc
import weakref
from collections.abc import Callable

import numpy as np

from tinyllm.testing.contract import Factory
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.machine import SPECIAL
from tinyllm.testing.run import replay
from tinyllm.testing.trace import FORMS, encode

UNEVEN = """
new 12 2 3 2 2
add 0
append 0 0 7           # four blocks; layers 1 and 2 lag
append 0 1 1
fork 0 1
append 1 1 4           # touches three shared blocks, the first one in its middle
append 0 2 2           # a shared block from its start: its own offset is 0
append 1 0 1           # the tail
append 0 0 1           # the last holder writes in place
fork 1 2
free 1
append 2 2 8
append 2 0 9 ! OutOfBlocks
free 0
append 2 0 9
free 2
"""
REFUSED = """
new 5 2 2 1 2
add 0
append 0 0 5
fork 0 1
append 1 1 5 ! OutOfBlocks   # three copies, two free
append 1 0 5 ! OutOfBlocks   # one copy and two new
append 1 0 3                 # one copy and one new: exactly what is free
append 0 0 2 ! OutOfBlocks
append 0 0 1                 # in place, and free
append 0 1 5 ! OutOfBlocks
free 1
append 0 1 5
"""
REUSED = """
new 4 2 2 1 2
add 7
append 7 0 3
append 7 1 2
free 7
add 7                  # starts empty in every layer
append 7 1 1
fork 7 8
free 7
fork 8 7
append 7 0 1
free 8
append 7 0 4
"""
CLOSED = """
new 4 2 1 1 2
add 0
append 0 0 3
close
close
add 1 ! ValueError
fork 0 1 ! ValueError
append 0 0 1 ! ValueError
table 0 ! ValueError
len 0 0 ! ValueError
gather 0 0 ! ValueError
free 0 ! ValueError
stats ! ValueError
"""
NEW = "".join(
    f"new {' '.join(map(str, [*sizes[:i], bad, *sizes[i + 1 :]]))} ! {error}\n"
    for sizes in [[4, 2, 2, 1, 2]]
    for i in range(5)
    for bad, error in ((0, "ValueError"), (-1, "ValueError"), (1.5, "TypeError"))
)
WRONG = """
new 4 2 2 2 2
add 0
append 0 0 3
add 0 ! ValueError
add 0.5 ! TypeError
fork 0 0 ! ValueError
fork 1 2 ! KeyError
fork 0 1.5 ! TypeError
append 1 0 1 ! KeyError
append 0 2 1 ! IndexError
append 0 -1 1 ! IndexError
append 0 0.5 1 ! TypeError
append 0 0 0 ! ValueError
table 1 ! KeyError
len 1 0 ! KeyError
len 0 2 ! IndexError
len 0 -1 ! IndexError
gather 1 0 ! KeyError
gather 0 2 ! IndexError
gather 0 -1 ! IndexError
free 1 ! KeyError
free 0.5 ! TypeError
"""


def _forms() -> str:
    lines = ["new 40 2 2 2 3", "add 0", "append 0 1 1"]
    for name, form in FORMS.items():
        lines.append(f"append 0 0 3 as {name}" + (f" ! {form.refusal}" if form.refusal else ""))
    return "\n".join(lines)


def _special_values() -> str:
    values = np.array(SPECIAL, np.float32)
    lines = ["new 12 2 1 1 1", "add 0"]
    lines += [f"append 0 0 1 {encode(k)} {encode(v)}" for k, v in zip(values, values[::-1], strict=True)]
    return "\n".join([*lines, "fork 0 1", "append 1 0 1"])


def _many_holders() -> str:
    """One block held by 257 tables: more than a byte counts."""
    forks = [f"fork 0 {i}" for i in range(1, 257)]
    frees = [f"free {i}" for i in range(255)]
    return "\n".join(
        ["new 4 2 1 1 1", "add 0", "append 0 0 1", *forks, "append 9 0 1", *frees, "append 256 0 2"]
    )


def _many_blocks() -> str:
    """More blocks than a signed byte, and than a signed short, can number, used, shared and copied."""
    n = 2**15 + 8
    lines = [f"new {2 * n} 1 2 1 1", "add 0", f"append 0 0 {n}", "fork 0 1", f"append 1 1 {n}"]
    return "\n".join([*lines, "append 0 0 1 ! OutOfBlocks", "free 0", "append 1 0 100", "free 1"])


def _collected(factory: Factory) -> None:
    """Law 14: nothing but the caller keeps a cache alive."""
    cache = factory(4, 2, 1, 1, 2)
    cache.add_seq(0)
    ones = np.ones((1, 3, 2), np.float32)
    cache.append(0, 0, ones, ones)
    try:
        alive = weakref.ref(cache)
    except TypeError:  # slots without __weakref__: it cannot be seen from outside
        return
    del cache
    gc.collect()
    if alive() is not None:
        raise LawBroken(
            14, "garbage collection", "a cache that nobody holds is collected", "something keeps it"
        )


def _program(text: str) -> Callable[[Factory], None]:
    def case(factory: Factory) -> None:
        replay(factory, text)

    return case


TRACES = {
    "wrong sizes": NEW,
    "wrong arguments": WRONG,
    "forms of arrays": _forms(),
    "special values": _special_values(),
    "uneven layers": UNEVEN,
    "refused appends": REFUSED,
    "ids used again": REUSED,
    "256 forks of one block": _many_holders(),
    "32,776 blocks": _many_blocks(),
    "use after close": CLOSED,
}
"""Name of a directed case that is a program, and the program."""

DIRECTED: dict[str, Callable[[Factory], None]] = {
    **{name: _program(text) for name, text in TRACES.items()},
    "garbage collection": _collected,
}
"""Name of a directed case, and the case as a function of a factory; raises LawBroken."""
