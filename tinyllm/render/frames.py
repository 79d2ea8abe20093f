"""The effect of each line of a trace: the holders of every block, the blocks taken, copied and freed."""

from collections.abc import Iterator
from typing import NamedTuple

from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.contract import Capability, Config, Factory
from tinyllm.testing.laws import LawBroken, View
from tinyllm.testing.run import Run
from tinyllm.testing.trace import NotOffered, Op, TraceError, parse, program


class Block(NamedTuple):
    """A block that a table holds."""

    holders: tuple[int, ...]
    """The sequences, in ascending order; two or more share it."""
    filled: int
    """Slots written, in the longest layer of any holder."""
    copy_of: int | None = None
    """The block that this line copied into it."""
    new: bool = False
    """Whether this line took it as an empty block."""


class Held(NamedTuple):
    """A sequence: its block table, and the length of each layer."""

    table: tuple[int, ...]
    lens: tuple[int, ...]


class Frame(NamedTuple):
    """A cache after one line of a trace, and the effect of the line."""

    number: int
    """The number of the line, from 1."""
    line: str
    """The line without its comment, in canonical spelling."""
    note: str
    """The comment."""
    error: str
    """The name of the error, if the line was refused; else empty."""
    law: int
    """The law that breaks at this line, which is then the last; else 0."""
    open: bool
    """Whether the cache is open: after `new`, before `close`."""
    config: Config
    blocks: dict[int, Block]
    """The blocks in any table; all others are free."""
    sequences: dict[int, Held]
    named: tuple[int | float, ...]
    """The sequences that the line names, live or not."""
    freed: tuple[int, ...]
    """The blocks that this line freed."""

    @property
    def taken(self) -> int:
        """The number of empty blocks that the line took."""
        return sum(block.new for block in self.blocks.values())

    @property
    def copied(self) -> int:
        """The number of blocks that the line copied; with `taken`, its cost (law 9)."""
        return sum(block.copy_of is not None for block in self.blocks.values())

    @property
    def free(self) -> int:
        """The number of blocks in no table."""
        return self.config.num_blocks - len(self.blocks)


def frames(text: str, factory: Factory = PagedKVCache) -> list[Frame]:
    """The frames of a trace, a list; raises as `roll` does."""
    return list(roll(text, factory))


def roll(text: str, factory: Factory = PagedKVCache) -> Iterator[Frame]:
    """Run a trace on a new cache with every law checked; yields a frame after each line.

    Raises:
        LawBroken: the cache breaks a law; the frame of that line comes first.
        TraceError: the text cannot be read or has no line (before any frame); a line expects what no correct
            cache does, or is too large.
        NotOffered: the implementation lacks a capability of the trace, or block tables.
    """
    program(text)
    run, opened = Run(factory), False
    if Capability.BLOCK_TABLES not in run.offers:
        raise NotOffered("the implementation does not offer block-tables, so nothing can be drawn")
    for number, line in enumerate(text.splitlines(), 1):
        note = line.partition("#")[2].strip()
        for op in parse(line):
            old = run.view
            law = _step(run, op, number)
            before = old.tables
            if op.name == "new" and run.view is not old:
                before, opened = {}, True
            yield Frame(
                number,
                str(op._replace(refusal="")),
                note,
                (op.refusal or "OutOfBlocks") if run.refused and not law else "",
                law.law if law else 0,
                opened and not run.closed,
                run.config,
                *_facts(op, before, run.view, run.config.block_size),
            )
            if law:
                raise law
    run.finish()


def _step(run: Run, op: Op, number: int) -> LawBroken | None:
    """Run one line; returns the law that it breaks. Raises TraceError with the line's number."""
    try:
        run.step(op)
    except LawBroken as broken:
        return broken
    except NotOffered as needed:
        raise NotOffered(f"line {number}: the implementation does not offer {needed}") from None
    except TraceError as error:
        raise type(error)(f"line {number}: {error}") from None
    return None


def _facts(
    op: Op, before: dict[int, list[int]], view: View, size: int
) -> tuple[dict[int, Block], dict[int, Held], tuple[int | float, ...], tuple[int, ...]]:
    """The blocks in tables, the sequences, the named sequences, and the freed blocks."""
    holders: dict[int, set[int]] = {}
    filled: dict[int, int] = {}
    copy_of: dict[int, int] = {}
    was_held = {block for table in before.values() for block in table}
    for seq, table in view.tables.items():
        longest = max(view.lens[seq], default=0)
        parent = int(op.args[0]) if op.name == "fork" and seq == op.args[1] else seq
        old = before.get(seq, before.get(parent, []))
        for i, block in enumerate(table):
            holders.setdefault(block, set()).add(seq)
            filled[block] = max(filled.get(block, 0), min(max(longest - i * size, 0), size))
            if i < len(old) and old[i] != block and block not in was_held:
                copy_of[block] = old[i]
    blocks = {
        block: Block(
            tuple(sorted(holders[block])),
            filled[block],
            copy_of.get(block),
            block not in was_held and block not in copy_of,
        )
        for block in sorted(holders)
    }
    named = op.args[: {"fork": 2, "new": 0, "pages": 0}.get(op.name, 1)]
    sequences = {seq: Held(tuple(table), tuple(view.lens[seq])) for seq, table in view.tables.items()}
    return blocks, sequences, named, tuple(sorted(was_held - blocks.keys()))
