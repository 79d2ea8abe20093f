"""One named check a law: what the cache shows, against what the oracle holds.

A check raises `LawBroken` with the number of the law, in words that name what was expected and what was
found. The texts of `LAWS` are the short form of docs/laws.md.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyllm.testing.oracle import Oracle

LAWS = {
    1: ("mapping", "Position p lives in slot p mod B of block table[p // B]."),
    2: ("table length", "A table has ceil(longest layer / B) blocks: none early, none kept."),
    3: ("contents", "gather returns everything appended, in order, rounded once to float16."),
    4: ("layers", "Appending to one layer changes that layer alone."),
    5: ("conservation", "free + used + cached == num_blocks, and used counts each held block once."),
    6: ("references", "A block is free exactly when no table holds it."),
    7: ("fork", "A fork allocates nothing; from then on neither side changes the other."),
    8: ("copy on write", "An append copies every shared block it writes into, whole, and no other block."),
    9: ("cost", "OutOfBlocks if and only if an append costs more blocks than are free."),
    10: ("atomicity", "A call that raises leaves everything observable as it was."),
    11: ("zero", "A slot no layer has appended to reads zero inside the pool."),
    12: ("isolation", "Arguments are copied in and results are copied out."),
    13: ("identity", "A freed id starts empty when it is used again; a live id cannot be taken."),
    14: ("close", "close() and garbage collection give the memory back; later use is a ValueError."),
    15: ("arguments", "A bad argument is refused: ValueError, KeyError, IndexError or TypeError."),
    16: ("admission", "blocks_needed says exactly what an append costs, and asking changes nothing."),
    17: ("rollback", "truncate cuts every layer to a length and drops the blocks past it; no more happens."),
    18: ("page table", "page_table lists the blocks that a layer covers, and how full the last one is."),
    19: ("books", "check passes whenever every other law holds."),
    20: ("in place", "gather_runs shows what gather returns, in place and read-only."),
}

JUNK = -1.5
"""The kit overwrites with this every array it passed or received. No pattern value is equal to it, so where
it turns up inside the cache, the cache has kept a reference (law 12)."""
JUNK_BLOCK = -7


class LawBroken(AssertionError):  # noqa: N818 - a verdict, not an accident
    """A cache broke a law.

    Attributes:
        law: its number in `LAWS`.
        name: the check that saw it.
        expected: what a right cache shows.
        found: what this one shows.
        trace: the program that shows it, in the trace language; replaying it breaks the same law.
        story: law, program, tables, expected and found, for a person; also `str()` of the error.
        beyond: only the methods beyond the ten show it.
    """

    def __init__(
        self,
        law: int,
        name: str,
        expected: str,
        found: str,
        *,
        trace: str = "",
        story: str = "",
        beyond: bool = False,
    ) -> None:
        super().__init__(law, name, expected, found)
        self.law = law
        self.name = name
        self.expected = expected
        self.found = found
        self.trace = trace
        self.story = story
        self.beyond = beyond

    def but(self, **changes: Any) -> "LawBroken":
        """The same with other words, program or story; its cause goes along."""
        fields = {name: getattr(self, name) for name in (*SAID, *TOLD)}
        made = LawBroken(**(fields | changes))
        made.__cause__ = self.__cause__
        return made

    def __str__(self) -> str:
        title = LAWS[self.law][0]
        return self.story or f"law {self.law} ({title}): expected {self.expected}; found {self.found}"


SAID = ("law", "name", "expected", "found")
TOLD = ("trace", "story", "beyond")


class Findings(NamedTuple):
    """What a search found: the law that the ten methods break, and the one that only others show."""

    core: LawBroken | None = None
    extensions: LawBroken | None = None

    @property
    def worst(self) -> LawBroken | None:
        """The one to be told: the ten methods come first."""
        return self.core or self.extensions


Place = tuple[int, int]  # (sequence, index into its table)
Sharing = dict[Place, frozenset[Place]]


Seen = tuple[tuple[int, ...], bytes]
"""A float16 array as it was seen: its shape, and its bytes in C order. Arrays are equal where these are."""


def bits(seen: Seen) -> NDArray[np.uint16]:
    """The array that was seen, as bits, every NaN the same."""
    shape, raw = seen
    own = np.frombuffer(raw, np.float16).reshape(shape).copy()
    own[np.isnan(own)] = np.nan
    return own.view(np.uint16)


class View(NamedTuple):
    """Everything a caller can observe of a cache, as copies. `contents` are read last."""

    tables: dict[int, list[int]]
    lens: dict[int, list[int]]
    contents: dict[int, list[tuple[Seen, Seen]]]
    stats: dict[str, int]
    free: int


class Acted(NamedTuple):
    """What was done to a sequence since the last look: the operation, and its layer (None: any of them)."""

    name: str
    layer: int | None = None


class Step(NamedTuple):
    """What happened between two looks at a cache: one line, or several of which only the last is looked at.

    Attributes:
        line: the last line.
        acted: what was done to each sequence that a line named.
        before: the earlier look.
        after: the later one.
        tables: those of the earlier look, by the oracle.
    """

    line: str
    acted: dict[int, Acted]
    before: View
    after: View
    tables: dict[int, list[int]]

    def blame(self, seq: int, layer: int | None, own: int, oracle: Oracle) -> int:
        """The law that a difference in `seq` and `layer` breaks: `own` where the call acted."""
        if seq not in self.acted:
            return 7 if any(oracle.related(seq, other) for other in self.acted) else 4
        name, acted_layer = self.acted[seq]
        if name in OF_SEQUENCE:
            return OF_SEQUENCE[name]
        return own if acted_layer in {None, layer} or layer is None else 4


OF_SEQUENCE = {"fork": 7, "add": 13, "truncate": 17}
"""The law that a wrong sequence breaks after an operation that is about the sequence as a whole."""


def check_lengths(step: Step, oracle: Oracle) -> None:
    """Law 4 (13 after add, 7 for a relative): `seq_len` of every layer."""
    for seq in oracle.tables:
        lens = oracle.lens(seq)
        if step.after.lens[seq] == lens:
            continue
        for layer, expected in enumerate(lens):
            found = step.after.lens[seq][layer]
            if found != expected:
                law = step.blame(seq, layer, 4, oracle)
                raise LawBroken(
                    law,
                    "lengths",
                    f"seq_len({seq}, {layer}) == {expected}",
                    f"seq_len({seq}, {layer}) == {found}",
                )


def check_table_lengths(step: Step, oracle: Oracle) -> None:
    """Law 2: a table covers its longest layer, with no block more."""
    for seq, table in step.after.tables.items():
        expected = len(oracle.tables[seq])
        if len(table) != expected:
            longest = max(oracle.lens(seq))
            raise LawBroken(
                17 if step.acted.get(seq, Acted("")).name == "truncate" else 2,
                "table length",
                f"{expected} blocks in the table of sequence {seq}, whose longest layer holds {longest}",
                f"{len(table)} blocks",
            )


def check_conservation(step: Step, oracle: Oracle) -> None:
    """Law 5: the counts add up, and the two ways to ask for them agree."""
    stats, total = step.after.stats, oracle.config.num_blocks
    if stats["free"] + stats["used"] + stats["cached"] != total:
        raise LawBroken(5, "conservation", f"free + used + cached == {total}", f"stats() == {stats}")
    if step.after.free != stats["free"] + stats["cached"]:
        raise LawBroken(
            5, "conservation", f"num_free_blocks() == free + cached of {stats}", f"{step.after.free}"
        )


def check_references(step: Step, oracle: Oracle) -> None:
    """Law 6: used blocks are the blocks in tables. More used is a leak; fewer, and a held block is free."""
    tables = step.after.tables or oracle.tables  # where there are none to see, what they would be
    held = len({block for table in tables.values() for block in table})
    used = step.after.stats["used"]
    if used != held:
        what = "leaked" if used > held else "free although a table holds it"
        many = f"{abs(used - held)} {what}, of {oracle.config.num_blocks}"
        raise LawBroken(
            6, "references", f"{held} used: the distinct blocks in all tables", f"{used} used ({many})"
        )


def sharing(tables: dict[int, list[int]]) -> Sharing:
    """For each place in a table, the places that hold the same block."""
    holders: dict[int, list[Place]] = {}
    for seq, table in tables.items():
        for i, block in enumerate(table):
            holders.setdefault(block, []).append((seq, i))
    return {place: together for together in map(frozenset, holders.values()) for place in together}


def _shared_alike(expected: dict[int, list[int]], found: dict[int, list[int]]) -> bool:
    """Whether tables of the same lengths differ in the names of blocks alone; quick, since most do."""
    pairs = {pair for seq, table in expected.items() for pair in zip(table, found[seq], strict=True)}
    return len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs})


def check_sharing(step: Step, oracle: Oracle) -> None:
    """Laws 6, 7, 8: two tables hold the same block exactly where the oracle says so. Ids do not matter."""
    if _shared_alike(oracle.tables, step.after.tables):
        return
    expected, found, shared = (sharing(t) for t in (oracle.tables, step.after.tables, step.tables))
    for place in sorted(expected):
        if expected[place] == found[place]:
            continue
        for other in sorted(found[place] - expected[place]):
            forked = _forked(step, place, other)
            law = 7 if forked else 8 if other in shared.get(place, ()) else 6
            raise LawBroken(
                law, "sharing", f"{_holds(place)} not shared with {_holds(other)}", "one block in both"
            )
        other = min(expected[place] - found[place])
        law = 7 if _forked(step, place, other) else 8
        raise LawBroken(
            law, "sharing", f"{_holds(place)} shared with {_holds(other)}", "two different blocks"
        )


def _forked(step: Step, *places: Place) -> bool:
    return any(step.acted.get(seq, Acted("")).name == "fork" for seq, _ in places)


def _holds(place: Place) -> str:
    return f"block {place[1]} of sequence {place[0]}"


def check_contents(step: Step, oracle: Oracle, *, own: bool) -> None:
    """Laws 3, 4, 7, 13 and 17, for the sequences that were acted on (`own`), or for all others."""
    for seq, layers in oracle.contents.items():
        if (seq in step.acted) != own:
            continue
        acted = step.acted[seq].layer if own else None
        order = sorted(range(len(layers)), key=lambda layer: layer != acted)
        for layer in order:
            for name, right, seen in zip("KV", layers[layer], step.after.contents[seq][layer], strict=True):
                if seen == (right.shape, right.tobytes()):
                    continue
                law = step.blame(seq, layer, 3, oracle)
                where = f"{name} of gather({seq}, {layer})"
                if seen[0] != right.shape:
                    raise LawBroken(law, "contents", f"{where} has shape {right.shape}", f"{seen[0]}")
                found = bits(seen)
                wrong = found != right.view(np.uint16)
                if wrong.any():  # or they differ in the bits of a NaN, which law 3 leaves open
                    at = tuple(int(i) for i in np.argwhere(wrong)[0])
                    value = found.view(np.float16)[at]
                    law = 12 if value == JUNK else law
                    raise LawBroken(law, "contents", f"{where}{list(at)} == {right[at]!s}", f"{value!s}")


def check_counts_unchanged(step: Step, oracle: Oracle) -> None:
    """Law 10: a refused call changed no count, no length, and not which places share (ids do not matter)."""
    del oracle
    before, after = step.before, step.after
    if before.stats != after.stats or before.free != after.free:
        raise _changed(step, "stats()", before.stats, after.stats)
    for seq in before.lens:
        if before.lens[seq] != after.lens[seq]:
            raise _changed(step, f"lengths of sequence {seq}", before.lens[seq], after.lens[seq])
        if (old := len(before.tables.get(seq, ()))) != (new := len(after.tables.get(seq, ()))):
            raise _changed(step, f"blocks in block_table({seq})", old, new)
    if before.tables != after.tables and not _shared_alike(before.tables, after.tables):
        then, now = sharing(before.tables), sharing(after.tables)
        place = min(place for place in then if then[place] != now[place])
        raise _changed(step, f"holders of {_holds(place)}", *(sorted(each[place]) for each in (then, now)))


def check_contents_unchanged(step: Step, oracle: Oracle) -> None:
    """Law 10: a refused call changed no content."""
    del oracle
    for seq, layers in step.before.contents.items():
        if layers == step.after.contents[seq]:
            continue
        for layer, pair in enumerate(layers):
            for name, then, now in zip("KV", pair, step.after.contents[seq][layer], strict=True):
                if then != now and not np.array_equal(old := bits(then), new := bits(now)):
                    where = f"{name} of gather({seq}, {layer})"
                    old, new = old.view(np.float16), new.view(np.float16)
                    raise _changed(step, where, old.tolist(), new.tolist())


def _changed(step: Step, what: str, old: object, new: object) -> LawBroken:
    return LawBroken(10, "unchanged", f"{what} == {old} after the refused '{step.line}'", f"{new}")
