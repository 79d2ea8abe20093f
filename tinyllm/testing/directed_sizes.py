"""Programs of the sizes that engines have: long sequences, large blocks, many layers, pools in many pieces.

A fault here is one of width (a number that overflows), of a limit (the first 1,024, groups of eight) or of a
path that only large sizes take. Most lines are quiet: what is large is looked at a few times.
"""

import numpy as np

from tinyllm.testing.forms import FORMS, SPECIAL
from tinyllm.testing.trace import encode

COPIED = (
    ((12, 16, 1, 2, 3), (15, 1, 1, 30)),
    ((9, 100, 1, 1, 2), (100, 200, 1, 98)),
    ((6, 4096, 1, 1, 1), (4095, 1, 1, 4094)),
    ((30, 5, 1, 3, 5), (4, 2, 10, 8)),
    ((320, 1, 1, 1, 1), (1, 2, 300)),
    ((6, 4000, 1, 1, 1), (9000,)),
    ((3, 70000, 1, 1, 1), (69999,)),  # an offset in a block that 16 bits cannot say
    ((3, 16, 1, 32, 128), (15,)),  # the same, in values
    ((6, 2, 41, 1, 1), (3,)),  # beyond a power of two, and no multiple of one
    ((6, 12, 11, 1, 1), (23,)),
    ((6, 2, 1, 71, 2), (3,)),
    ((6, 2, 1, 2, 301), (3,)),
)
"""Sizes, of which one is large, and the lengths of appends, on both sides of an edge. Where a block has room
for more than one position, they end inside a block, so that a fork shares it and a write copies it."""


def copied() -> str:
    """Programs of a few lines for `COPIED`: parent and child write into the block that they share."""
    lines = []
    for sizes, lens in COPIED:
        blocks, size, layers, *_ = sizes
        last = layers - 1
        lines += [f"new {' '.join(map(str, sizes))}", "add 0"]
        for n in lens:
            lines += [f"append 0 {layer} {n} quiet" for layer in range(last)] + [f"append 0 {last} {n}"]
        lines += ["fork 0 1", *(f"append 1 {layer} 1" for layer in dict.fromkeys((0, last)))]
        lines += [f"append 0 {last} 1", "free 0", "free 1"]
        lines += ["add 2", f"append 2 0 {blocks * size}"]  # every block has come back
    return "\n".join(lines)


def of_an_engine() -> str:
    """Eight layers of eight heads of 128, in blocks of 16; no layer is as long as another."""
    lens = (33, 20, 16, 15, 1, 7, 40, 0)
    lines = ["new 16 16 8 8 128", "add 0"]
    lines += [f"append 0 {layer} {n} quiet" for layer, n in enumerate(lens[:6]) if n]
    lines += ["append 0 6 40", "fork 0 1", "append 1 7 1", "append 1 2 17 quiet", "append 1 0 1", "fork 1 2"]
    lines += ["append 0 6 1 quiet", "append 0 3 2", "append 2 4 20 quiet", "append 2 7 33", "free 1"]
    return "\n".join([*lines, "append 2 1 30", "free 0", "append 2 5 40"])


def appends() -> str:
    """300 appends of one position to one sequence: each of them looked at; none of them; of a fork too."""
    lines = ["new 40 16 2 1 1", "add 0"]
    for i in range(300):
        lines += ["append 0 0 1"] + (["append 0 1 1 quiet"] if i % 3 == 0 else [])
    lines += ["new 9 128 2 2 2", "add 0", "add 1"]
    for layer in (0, 1):
        for i in range(300):
            lines += [f"append 0 {layer} 1 quiet"] + ([f"append 1 {layer} 1 quiet"] if i < 70 else [])
    lines += ["append 0 0 1", "fork 0 2 quiet", *["append 2 1 1 quiet"] * 130, "append 2 0 1"]
    return "\n".join(lines)


def positions() -> str:
    """70,000 positions of one layer, past the edges of 15 and of 16 bits, while the other one lags."""
    lines = ["new 4400 16 2 1 1", "add 0", "append 0 0 32766 quiet"]
    lines += ["append 0 0 1 quiet", "append 0 0 1", "append 0 0 1", "append 0 0 32766 quiet"]
    lines += ["append 0 0 1", "append 0 0 1", "append 0 0 1", "append 0 1 65533 quiet", "append 0 0 4467"]
    return "\n".join([*lines, "fork 0 1", "append 1 0 1", "append 1 1 4", "append 0 0 1", "free 0"])


def pieces() -> str:
    """Of many sequences of a block each every second one is freed: one append takes all the holes."""
    lines = []
    for sizes, count in (((160, 8, 2, 1, 1), 160), ((140, 512, 1, 1, 1), 140)):
        size = sizes[1]
        lines += [f"new {' '.join(map(str, sizes))}"]
        for seq in range(count):
            lines += [f"add {seq} quiet", f"append {seq} 0 {1 + seq % size} quiet"]
        lines += [f"free {seq} quiet" for seq in range(1, count, 2)]
        length = count // 2 * size
        lines += ["add 999 quiet", f"append 999 0 {size // 2 - 1} quiet", f"append 999 0 {length - size}"]
        lines += [f"append 999 0 {size // 2} quiet", "append 999 0 1", "append 999 0 1 ! OutOfBlocks"]
        if sizes[2] > 1:
            lines += [f"append 999 1 {length - size} quiet"]
        lines += ["free 0 quiet", "free 8 quiet", "fork 999 998", f"free {count - 2} quiet"]
        lines += [f"append 998 {sizes[2] - 1} {2 * size if sizes[2] == 1 else size}"]
        lines += [f"free {seq} quiet" for seq in range(2, count - 2, 2) if seq != 8]
        lines += ["free 999", "free 998", "add 1", f"append 1 0 {count * size}"]
    lines += ["new 71 1 2 1 1", "add 0", "append 0 0 70", "append 0 1 3", "fork 0 1"]
    return "\n".join([*lines, "append 0 1 1", "free 1", "append 0 1 66"])  # a copy in the middle


def blocks() -> str:
    """More blocks than a signed byte, and than a signed short, can number: used, shared, copied, found."""
    n = 2**15 + 8
    lines = [f"new {2 * n} 1 2 1 1", "add 0", f"append 0 0 {n}", "fork 0 1", f"append 1 1 {n}"]
    lines += ["append 0 0 1 ! OutOfBlocks", "free 0", "append 1 0 100", "free 1"]
    lines += ["new 5000 1 1 1 1"]
    for seq, length in enumerate((1, 2498, 1, 2499, 1)):
        lines += [f"add {seq} quiet", f"append {seq} 0 {length} quiet"]
    for seq in (0, 2, 2, 4, 4, 0):  # the one free block of a full pool is near, or once around
        lines += [f"free {seq}", f"add {seq} quiet", f"append {seq} 0 1"]
    return "\n".join([*lines, "append 0 0 1 ! OutOfBlocks", "free 1", "append 0 0 2498"])


def chunks() -> str:
    """Long chunks: special values, and every form of array, which fill whole blocks or do not."""
    lines = ["new 6 16 2 2 2", "add 0"]
    values = np.array(SPECIAL, np.float32)
    k = np.stack([np.roll(values, i) for i in range(4)], axis=-1).reshape(17, 2, 2).swapaxes(0, 1)
    lines += [f"append 0 0 17 {encode(k)} {encode(-k[::-1])}"]
    lines += [f"append 0 1 17 {encode(k[:, ::-1])} {encode(k)}"]
    lines += ["append 0 0 15", "fork 0 1", f"append 1 0 17 {encode(-k)} {encode(k)}"]
    lines += ["new 60 16 1 1 4", "add 0"]
    for name in (name for name, form in FORMS.items() if not form.refusal):
        lines += [f"append 0 0 {n} as {name}" for n in (32, 17, 15)]
    return "\n".join(lines)


ROLLBACK = """
new 12 16 2 1 2        # a block of five holders, cut inside by one after another
add 0
append 0 0 29
append 0 1 20
fork 0 1
fork 0 2
fork 0 3
fork 0 4
truncate 2 19
append 2 0 3
append 0 0 1
truncate 0 17
truncate 3 16
append 3 1 1
truncate 4 18
truncate 4 0
free 0
append 1 0 5
append 3 0 4
new 4200 16 1 1 1
add 0
append 0 0 67000 quiet
truncate 0 65537
append 0 0 2
truncate 0 32767
append 0 0 3
"""
"""Law 17 at such sizes."""
