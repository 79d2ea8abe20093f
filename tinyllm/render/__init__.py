"""A trace as a film: the pool, the tables and the cost after each line.

`frames(text)` gives the facts, `svg(frames)` draws them as a film strip that is readable without colour.
"""

from tinyllm.render import labels
from tinyllm.render.frames import Block, Frame, Held, frames, roll
from tinyllm.render.svg import PANELS, svg

__all__ = ["EXAMPLE", "PANELS", "Block", "Frame", "Held", "frames", "labels", "roll", "svg"]

EXAMPLE = """\
new 4 2 1 1 2            # blocks of two positions, a pool of four
add 0
append 0 0 1             # b0 slot 0
append 0 0 1             # b0 slot 1
append 0 0 1             # b1 slot 0
append 0 0 1             # b1 slot 1
append 0 0 1             # b2 slot 0
fork 0 1                 # allocates nothing
append 1 0 1             # b2 is copied first
append 0 0 1             # in place: the last holder
append 0 0 1 ! OutOfBlocks
free 0
append 1 0 2
free 1
"""
"""The worked example: a fork shares blocks, and a write copies one."""
