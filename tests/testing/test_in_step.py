"""Engines whose layers move together get the twins of the directed cases, and are found wrong by them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.adapters.loading import load
from tinyllm.testing.contract import CAPABILITIES, Factory
from tinyllm.testing.directed import DIRECTED, TRACES
from tinyllm.testing.in_step import follow, steps
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.run import replay
from tinyllm.testing.trace import NotOffered, program

Named = Callable[[str], Factory]
EXAMPLES = Path(__file__).parents[2] / "examples"
SLOW = "70,000 forks of one block"


def lacking(cls: Any, *names: str) -> Any:
    return type(cls.__name__, (cls,), {"capabilities": frozenset(CAPABILITIES) - set(names)})


def not_run(factory: Any) -> list[str]:
    """The directed cases that a right cache does not get."""
    missing = []
    for name, case in DIRECTED.items():
        try:
            if name != SLOW:
                case(factory)
        except NotOffered:
            missing.append(name)
    return missing


LACKS = [
    ("independent-layers",),
    ("exact-cost",),
    ("block-tables",),
    ("counts",),
    ("independent-layers", "exact-cost", "counts"),
]


@pytest.mark.parametrize("names", LACKS, ids="-".join)
def test_no_case_is_lost_to_a_right_cache(names: tuple[str, ...]) -> None:
    assert not_run(lacking(PagedKVCache, *names)) == []


@pytest.mark.parametrize("example", ["block_manager.py:make", "cells.py:CellCache"])
@pytest.mark.long
def test_no_case_is_lost_to_an_example(example: str) -> None:
    assert not_run(load(str(EXAMPLES / example))) == []


def test_nothing_stands_for_a_fork_and_the_programs_without_one_are_run() -> None:
    assert {"300 appends", "uneven layers"} <= {*not_run(lacking(PagedKVCache, "fork"))}
    made: list[Any] = []

    class Counts(lacking(PagedKVCache, "fork")):  # type: ignore[misc]
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            made.append(sizes)

    with pytest.raises(NotOffered, match="fork"):
        DIRECTED["large sizes"](Counts)
    assert len(made) == TRACES["large sizes"].count("new ")


FOUND = {
    "wrong_caches:NumbersBlocksInAShort": ("32,776 blocks", 7),
    "wrong_caches:EvictsAnother": ("refused appends", 10),
    "wrong_caches:SwapsBytes": ("forms of arrays", 3),
    "wrong_caches:StretchesV": ("forms of arrays", 15),
    "wrong_caches:ThirtyLayers": ("large sizes", 3),
    "wrong_manners:KeepsLengthsAfterFree": ("ids used again", 13),
    "wrong_manners:TakesWholeFloats": ("wrong arguments", 15),
    "wrong_manners:WithoutFork": ("uneven layers", 7),
    "wrong_manners:RollsBackTooFar": ("rollback", 15),
    "wrong_sizes:LosesThe129thAppend": ("300 appends", 3),
    "wrong_sizes:PositionsInAShort": ("70,000 positions", 3),
    "wrong_sizes:WritesNinePieces": ("160 pieces", 3),
    "wrong_sizes:AdoptsLongHalves": ("long chunks", 12),
    "wrong_sizes:CopiesGroupsOfEight": ("large sizes", 3),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_wrong_cache_is_found_in_step(name: str, named: Named) -> None:
    case, law = FOUND[name]
    factory = lacking(named(name), "independent-layers")
    with pytest.raises(LawBroken) as caught:
        DIRECTED[case](factory)
    assert caught.value.law == law, str(caught.value)
    with pytest.raises(LawBroken) as again:
        replay(factory, caught.value.trace)
    assert again.value.law == law


class Lines(lacking(PagedKVCache, "independent-layers")):  # type: ignore[misc]
    """Writes down what is appended, and whether it is refused."""

    seen: list[tuple[Any, ...]]

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        Lines.seen.append((seq_id, layer, k.shape[1]))
        super().append(seq_id, layer, k, v)


def test_a_twin_moves_all_layers_by_the_longest_of_neighbouring_lines_and_refuses_anew() -> None:
    Lines.seen = []
    text = "new 5 2 2 1 1\nadd 0\nappend 0 1 3\nappend 0 0 4 quiet\nappend 0 0 1\nfork 0 1\nappend 1 1 1\n"
    follow(Lines, text + "append 0 0 4\nappend 0 5 1 ! IndexError\nappend 0 0 2 ! OutOfBlocks")
    assert Lines.seen == [
        *((seq, layer, n) for seq, n in [(0, 4), (0, 1), (1, 1)] for layer in (0, 1)),
        (0, 0, 4),  # refused, though the program was not
        (0, 5, 1),
        *((0, 0, 2), (0, 1, 2)),  # the other way round
    ]


def test_lines_side_by_side_are_a_step_if_their_layers_differ() -> None:
    lines = program(
        "append 0 0 1\nappend 0 1 2\nappend 0 1 1\nappend 1 0 1\nappend 1 1 1 as bool ! TypeError\n"
    )
    assert [len(step) for step in steps(lines)] == [2, 1, 1, 1]


def test_a_cache_that_lacks_nothing_runs_the_program_as_it_is() -> None:
    with pytest.raises(ValueError, match="expects OutOfBlocks, but a right cache would succeed"):
        follow(PagedKVCache, "new 1 1 1 1 1\nadd 0\nappend 0 0 1 ! OutOfBlocks")
