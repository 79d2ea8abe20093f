"""What each line of a trace does to the pool: who holds which block, which were taken, copied, given back."""

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
    """The block that this line copied into this one, for a writer."""
    new: bool = False
    """Whether this line took it, empty."""


class Held(NamedTuple):
    """A sequence: its block table, and the length of each layer."""

    table: tuple[int, ...]
    lens: tuple[int, ...]


class Frame(NamedTuple):
    """A cache after one line of a trace, and what the line did."""

    number: int
    """Of the line in the text, from 1."""
    line: str
    """The line without its comment, in the spelling of the trace language."""
    note: str
    """The comment."""
    error: str
    """The name of the error when the line was refused, which changes nothing; else empty."""
    law: int
    """The law that breaks at this line, the last one then; else 0."""
    open: bool
    """Whether there is a cache: not before `new`, nor after `close`."""
    config: Config
    blocks: dict[int, Block]
    """Those in a table; all other blocks are free."""
    sequences: dict[int, Held]
    named: tuple[int | float, ...]
    """The sequences that the line names, there or not."""
    freed: tuple[int, ...]
    """The blocks that this line gave back."""

    @property
    def taken(self) -> int:
        """Blocks that the line took, empty."""
        return sum(block.new for block in self.blocks.values())

    @property
    def copied(self) -> int:
        """Blocks that the line took for a copy of a shared one; with `taken`, its cost (law 9)."""
        return sum(block.copy_of is not None for block in self.blocks.values())

    @property
    def free(self) -> int:
        """Blocks in no table."""
        return self.config.num_blocks - len(self.blocks)


def frames(text: str, factory: Factory = PagedKVCache) -> list[Frame]:
    """Run a trace on a new cache, every law checked: a frame for each line. Raises as `roll` does."""
    return list(roll(text, factory))


def roll(text: str, factory: Factory = PagedKVCache) -> Iterator[Frame]:
    """The frames of a trace, each as soon as its line has run.

    Raises:
        LawBroken: the cache breaks a law, as `replay` has it; the frame of that line comes first.
        TraceError: the text cannot be read, or has no line, before any frame; or a line expects what no right
            cache does, or is too large.
        NotOffered: the trace needs what the implementation does not offer, block tables above all.
    """
    program(text)
    run, opened = Run(factory), False
    if Capability.BLOCK_TABLES not in run.offers:
        raise NotOffered("the implementation does not offer block-tables, and so nothing to be drawn")
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
    """Run one line; the law that it breaks. Raises TraceError, with the number of the line."""
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
    """The blocks in tables, the sequences, those named, and the blocks that are in no table any more."""
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
    named = op.args[: {"fork": 2, "new": 0}.get(op.name, 1)]
    sequences = {seq: Held(tuple(table), tuple(view.lens[seq])) for seq, table in view.tables.items()}
    return blocks, sequences, named, tuple(sorted(was_held - blocks.keys()))
