"""How far random programs get: what they reached, in how many programs, and what none of them reached.

A program that breaks no law says little if it never had the chance. So a long search counts, for each of some
features, in how many programs it came to at least so much; a step that no program came to is reported.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from tinyllm.testing.laws import View
from tinyllm.testing.run import Run
from tinyllm.testing.trace import Op

Reached = Counter[tuple[str, int]]
"""In how many programs a feature came to at least a step: `{("sharing", 4): 17}`."""
Tables = Mapping[int, list[int]]


class Feature(NamedTuple):
    """Something that a program does to a degree, the degrees that are counted, and what it needs."""

    title: str
    steps: tuple[int, ...]
    needs: str = ""  # a capability or an extension


FEATURES = {
    "lines": Feature("lines in the program", (20, 40, 80, 120)),
    "live": Feature("sequences at once", (2, 4, 6, 8)),
    "table": Feature("blocks in one table", (4, 8, 16, 32)),
    "pieces": Feature("pieces of one table, among others' blocks", (2, 8, 16, 32), "block-tables"),
    "lives": Feature("lives of one id", (2, 3, 5, 8)),
    "generations": Feature("generations of forks", (1, 2, 4, 6), "fork"),
    "sharing": Feature("tables that hold one block", (2, 4, 6, 8), "fork"),
    "ragged": Feature("blocks between longest and shortest layer", (1, 2, 4, 8), "independent-layers"),
    "ragged forks": Feature("forks of uneven layers", (1, 2, 4, 8), "fork"),
    "taken": Feature("new blocks that one append took", (1, 2, 4, 8)),
    "copied": Feature("shared blocks that one append copied", (1, 2, 4, 8), "fork"),
    "refused": Feature("appends refused for want of blocks", (1, 2, 5, 10)),
    "copies refused": Feature("of these, for want of copies alone", (1, 2, 4, 8), "fork"),
    "dropped": Feature("blocks that one truncate gave back", (1, 2, 4, 8), "truncate"),
    "cut": Feature("truncates that end inside a shared block", (1, 2, 4, 8), "truncate"),
    "wrong": Feature("wrong arguments refused", (1, 2, 5, 10)),
}
BEYOND = (
    "more than 8 tables to a block and more than 304 blocks to a pool (directed cases of `tinyllm check` "
    "do), a MemoryError or Ctrl-C inside a call, several threads"
)
"""What no program of the machine can reach."""


class Meter:
    """Follows one program by what the oracle has before and after each line."""

    def __init__(self) -> None:
        self.most: Counter[str] = Counter()
        self._lives: Counter[int] = Counter()
        self._generation: dict[int, int] = {}
        self._view: View | None = None  # the last one

    def note(self, op: Op, before: Tables, run: Run) -> None:
        """A line was run; `before` are the oracle's tables of before it."""
        self._add("lines")
        self._note_pieces(run.view)
        if run.refused:
            self._note_refusal(op, run)
        elif op.name in {"add", "fork", "append", "truncate"}:
            getattr(self, f"_note_{op.name}")(op, before, run)

    def _note_pieces(self, view: View) -> None:
        """Of the tables that were seen last: an append that fills holes leaves a table in pieces."""
        if view is not self._view:
            self._view = view
            for table in view.tables.values():
                cuts = sum(b != a + 1 for a, b in pairwise(table))
                self._max("pieces", cuts + 1 if cuts else 0)

    def reached(self) -> Reached:
        """Each step of each feature that the program came to, once."""
        return Counter(
            (name, step) for name, one in FEATURES.items() for step in one.steps if self.most[name] >= step
        )

    def _add(self, name: str) -> None:
        self.most[name] += 1

    def _max(self, name: str, value: int) -> None:
        self.most[name] = max(self.most[name], value)

    def _note_refusal(self, op: Op, run: Run) -> None:
        if op.refusal != "OutOfBlocks":
            self._add("wrong")
            return
        self._add("refused")
        config, (seq, layer, tokens) = run.config, map(int, op.args)
        end = run.oracle.lens(seq)[layer] + tokens
        if -(-end // config.block_size) - len(run.oracle.tables[seq]) <= run.oracle.free_blocks():
            self._add("copies refused")

    def _note_add(self, op: Op, before: Tables, run: Run) -> None:
        del before
        self._begin(int(op.args[0]), 0, run)

    def _note_fork(self, op: Op, before: Tables, run: Run) -> None:
        del before
        parent, child = map(int, op.args)
        self._begin(child, self._generation[parent] + 1, run)
        self._max("generations", self._generation[child])
        holders = Counter(block for table in run.oracle.tables.values() for block in table)
        self._max("sharing", max((holders[block] for block in run.oracle.tables[child]), default=0))
        lens = run.oracle.lens(parent)
        self.most["ragged forks"] += min(lens) < max(lens)

    def _begin(self, seq: int, generation: int, run: Run) -> None:
        self._lives[seq] += 1
        self._generation[seq] = generation
        self._max("lives", self._lives[seq])
        self._max("live", len(run.oracle.tables))

    def _note_append(self, op: Op, before: Tables, run: Run) -> None:
        seq, size = int(op.args[0]), run.config.block_size
        old, new, lens = before[seq], run.oracle.tables[seq], run.oracle.lens(seq)
        self._max("copied", sum(one != other for one, other in zip(old, new)))
        self._max("taken", len(new) - len(old))
        self._max("table", len(new))
        self._max("ragged", max(lens) // size - min(lens) // size)

    def _note_truncate(self, op: Op, before: Tables, run: Run) -> None:
        seq, length = map(int, op.args)
        table = run.oracle.tables[seq]
        self._max("dropped", len(before[seq]) - len(table))
        if length % run.config.block_size and length < len(before[seq]) * run.config.block_size:
            others = {block for other, held in run.oracle.tables.items() if other != seq for block in held}
            self.most["cut"] += bool(table) and table[-1] in others


def missed(reached: Reached, offers: frozenset[str]) -> list[str]:
    """What no program came to, in words: of each feature that the cache offers, the first such step."""
    steps = {
        one.title: [step for step in one.steps if not reached[name, step]]
        for name, one in FEATURES.items()
        if not one.needs or one.needs in offers
    }
    return [f"{title}: {never[0]} or more" for title, never in steps.items() if never]
