"""Programs for what a random walk seldom reaches.

Counts that overflow a byte or a short, many shared blocks at once, large sizes, strange ids, every wrong
argument, every form of array, the edges of float16, use after close. What no program can say, and what would
take too long as one, is asked in plain calls by `directed_calls.py`.
"""

import re
import time
from collections.abc import Callable

import numpy as np

from tinyllm.testing import directed_calls, directed_sizes
from tinyllm.testing.contract import Factory
from tinyllm.testing.forms import FORMS, SPECIAL
from tinyllm.testing.in_step import follow
from tinyllm.testing.run import Run, replay
from tinyllm.testing.time_limit import CutShort, left
from tinyllm.testing.trace import NotOffered, Op, encode

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
fork 0.0 1 ! TypeError       # whole, and yet no integer
append 0.0 0 1 ! TypeError
append 0 1.0 1 ! TypeError
table 0.0 ! TypeError
len 0.0 0 ! TypeError
len 0 1.0 ! TypeError
gather 0.0 0 ! TypeError
gather 0 1.0 ! TypeError
free 0.0 ! TypeError
add 1.0 ! TypeError
"""
CHAIN = """
new 24 2 1 1 2
add 0
append 0 0 3
fork 0 1
fork 1 2
fork 2 3
fork 3 4
fork 4 5
fork 5 6
fork 6 7
append 7 0 1
append 3 0 2
free 4                 # in the middle of the chain
append 5 0 1
free 1
fork 7 1
free 0
free 7
append 1 0 3
add 7
add 4
append 4 0 5
append 6 0 2
append 2 0 1           # the last holder writes in place
free 2
free 6
free 3
free 5
free 1
append 4 0 38
new 12 2 1 1 1         # ten holders of a block, of which one after another writes
add 0
append 0 0 1
fork 0 1
fork 0 2
fork 0 3
fork 0 4
fork 0 5
fork 0 6
fork 0 7
fork 0 8
fork 0 9
append 3 0 1
append 0 0 1
append 9 0 1
append 5 0 1
append 1 0 1
append 2 0 1
append 4 0 1
append 8 0 1
append 7 0 1
append 6 0 1
"""
IDS = [-1, -2, 2**61 - 1, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 1024, 65536, 10**9]
"""Those that do not fit into a machine word, and those that wrap around, or hash, to others."""


def _forms() -> str:
    lines = [
        "new 170 2 2 2 2",
        "add 0",
        "append 0 1 262",
    ]  # so much that k is odd, and above 1024, now and then
    for name, form in FORMS.items():
        end = f" as {name}" + (f" ! {form.refusal}" if form.refusal else "")
        lines += [f"append 0 0 1{end}", f"append 0 0 3{end}"]
    lines += ["new 9 2 1 1 1", "add 0", "append 0 0 3"]  # of one head or dimension, one fewer is none
    lines += [f"append 0 0 3 as fewer-{what} ! ValueError" for what in ("heads", "dims")]
    return "\n".join(lines)


def _strange_ids() -> str:
    lines = ["new 50 2 1 1 1", "add 0", "append 0 0 1"]
    for i in IDS:
        lines += [f"add {i}", f"append {i} 0 3"]
    lines += [f"fork {IDS[i]} {IDS[i] + 5}" for i in (0, 5, 6)]
    lines += [f"append {IDS[i] + 5} 0 1" for i in (0, 5, 6)]
    return "\n".join([*lines, *(f"free {i}" for i in IDS), "add -1", "append -1 0 2", "append 0 0 2"])


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


def _forks(factory: Factory) -> None:
    """As many as overflow a short, if there is time; what a byte is enough for is told as a program."""
    few, many = 300, 70_000
    started = time.monotonic()
    directed_calls.many_forks(factory, few, lambda: replay(factory, TRACES["256 forks of one block"]))
    each = (time.monotonic() - started) / few
    count = int(min(many, left() / max(each, 1e-9)))
    if count > few:
        directed_calls.many_forks(factory, count)
    if count < many:
        took = time.monotonic() - started
        raise CutShort(
            f"cut short after {max(few, count):,} forks in {took:.0f} s, {1000 * each:.3g} ms each"
        )


def _program(text: str) -> Callable[[Factory], None]:
    def case(factory: Factory) -> None:
        lacking = None
        for part in re.split(r"^(?=new )", text, flags=re.MULTILINE):
            if part.strip():
                try:
                    follow(factory, part)  # a program of its own each, so that what is told is short
                except NotOffered as error:
                    lacking = error
        if lacking is not None:
            raise lacking

    return case


ONE_LAYER = """
new 4 2 1 1 2
add 0
append 0 0 3
fork 0 1
fork 1 2
add 3
append 3 0 3
append 1 0 1 ! OutOfBlocks
append 0 0 2 ! OutOfBlocks
append 3 0 1
append 3 0 1 ! OutOfBlocks
free 3
append 1 0 1
append 2 0 1
append 0 0 1
append 0 0 1 ! OutOfBlocks
free 2
append 0 0 2
free 0
append 1 0 4
free 1
"""
ROLLBACK = """
new 8 2 2 1 2
add 0
append 0 0 5
append 0 1 2
fork 0 1
truncate 1 3
append 1 0 2
append 1 1 3
truncate 0 4
truncate 0 4
append 0 1 1
truncate 1 6 ! ValueError
truncate 1 99 ! ValueError
truncate 1 -1 ! ValueError
truncate 7 0 ! KeyError
truncate 0 0.5 ! TypeError
truncate 0 0
free 1
append 0 1 16
truncate 0 1
append 0 0 16
append 0 1 15
append 0 1 1 ! OutOfBlocks
"""


def _rolled_back(factory: Factory) -> None:
    """Law 17, for a cache that has `truncate`: nobody else is asked for it."""
    run = Run(factory)
    run.step(Op("new", (1, 1, 1, 1, 1)))
    if "truncate" in run.offers:
        _program(ROLLBACK + directed_sizes.ROLLBACK)(factory)


TRACES = {
    "wrong sizes": NEW,
    "wrong arguments": WRONG,
    "forms of arrays": _forms(),
    "special values": _special_values(),
    "uneven layers": UNEVEN,
    "a chain of forks": CHAIN,
    "strange ids": _strange_ids(),
    "large sizes": directed_sizes.copied(),
    "sizes of an engine": directed_sizes.of_an_engine(),
    "long chunks": directed_sizes.chunks(),
    "refused appends": REFUSED,
    "ids used again": REUSED,
    "256 forks of one block": _many_holders(),
    "32,776 blocks": directed_sizes.blocks(),
    "160 pieces": directed_sizes.pieces(),
    "300 appends": directed_sizes.appends(),
    "70,000 positions": directed_sizes.positions(),
    "use after close": CLOSED,
    "one layer": ONE_LAYER,
}
"""Name of a directed case that is a program, and the program."""

DIRECTED: dict[str, Callable[[Factory], None]] = {
    **{name: _program(text) for name, text in TRACES.items() if not name.startswith("256")},
    "rollback": _rolled_back,
    "70,000 forks of one block": _forks,
    "two caches at once": directed_calls.two_caches,
    "other integers": directed_calls.other_integers,
    "other arrays": directed_calls.other_arrays,
    "every call after close": directed_calls.closed,
    "representation": directed_calls.representation,
    "with": directed_calls.context,
    "memory after close": directed_calls.memory,
    "garbage collection": directed_calls.collected,
}
"""Name of a directed case, and the case as a function of a factory; raises LawBroken."""
