"""The directed cases reach the sizes at which engines go wrong: each finds a fault that no other shows."""

import re
from collections.abc import Callable

import pytest

from tinyllm.grading.bugs import FOLDER, load
from tinyllm.render import frames
from tinyllm.testing.contract import Factory
from tinyllm.testing.directed import DIRECTED, TRACES
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.power import factory_of

WRONG = {
    "LosesThe129thAppend": ("300 appends", 3),
    "CopiesGroupsOfEight": ("large sizes", 3),
    "OffsetsInAShort": ("large sizes", 3),
    "PositionsInAShort": ("70,000 positions", 3),
    "LongChunksDropNaN": ("long chunks", 3),
    "AdoptsLongHalves": ("long chunks", 12),
    "ForksThreeLayers": ("sizes of an engine", 7),
    "CutsForFive": ("rollback", 7),
    "GathersTwentyFourPieces": ("160 pieces", 3),
    "WritesNinePieces": ("160 pieces", 3),
}
FIELD = {
    "f25": "300 appends",
    "f27": "160 pieces",
    "f28": "large sizes",
    "f29": "large sizes",
    "f30": "long chunks",
    "f31": "32,776 blocks",
    "f32": "large sizes",
    "f33": "160 pieces",
    "f34": "160 pieces",
    "f35": "160 pieces",
    "f36": "160 pieces",
    "f37": "160 pieces",
    "f38": "160 pieces",
    "f54": "other arrays",
    "f56": "two caches at once",
    "f57": "two caches at once",
}
SOURCE = (FOLDER / "second.py").read_text(encoding="utf-8")
FAULTS = {bug.id: bug for bug in load(FOLDER / "field.toml")}


@pytest.mark.parametrize("name", WRONG)
def test_a_cache_that_is_wrong_when_large_is_found(name: str, named: Callable[[str], Factory]) -> None:
    case, law = WRONG[name]
    with pytest.raises(LawBroken) as caught:
        DIRECTED[case](named(f"wrong_sizes:{name}"))
    assert caught.value.law == law, str(caught.value)


@pytest.mark.parametrize("bug", FIELD)
def test_a_fault_of_an_engine_is_found(bug: str) -> None:
    with pytest.raises(LawBroken) as caught:
        DIRECTED[FIELD[bug]](factory_of(FAULTS[bug].apply(SOURCE), "second.py", "second"))
    assert caught.value.law in FAULTS[bug].laws, str(caught.value)


@pytest.mark.parametrize(
    "case", sorted({*FIELD.values(), "70,000 positions", "sizes of an engine", "rollback"})
)
def test_the_second_cache_passes(case: str) -> None:
    DIRECTED[case](factory_of(SOURCE, "second.py", "second"))


@pytest.mark.parametrize(
    "program", re.findall(r"^new.*(?:\n(?!new).*)*", TRACES["large sizes"], re.MULTILINE)
)
def test_a_large_size_is_really_copied(program: str) -> None:
    film = frames(program)
    assert sum(frame.copied for frame in film) == (film[0].config.block_size > 1)
