"""The laws in the kit are those of docs/laws.md, and each check names the law that its caller broke."""

import re
from pathlib import Path

import numpy as np
import pytest

import tinyllm
import tinyllm.testing
from tinyllm.testing import contract, laws
from tinyllm.testing.contract import Config
from tinyllm.testing.laws import JUNK, LAWS, Acted, LawBroken, Step, View
from tinyllm.testing.oracle import Oracle
from tinyllm.testing.trace import PATTERN, pattern

ROOT = Path(__file__).parents[2]


def test_numbers_and_titles_are_those_of_the_document() -> None:
    text = (ROOT / "docs" / "laws.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\d+)\. (.+)$", text, re.MULTILINE)
    assert {int(number): title.strip().lower() for number, title in headings} == {
        number: title.lower() for number, (title, _) in LAWS.items()
    }
    assert [int(number) for number, _ in headings] == list(LAWS)


def test_every_law_is_cited_by_the_contract_or_is_the_references_own() -> None:
    text = Path(contract.__file__).read_text(encoding="utf-8")
    cited = set()
    for group in re.findall(r"laws? (\d[\d, -]*)", text):
        for part in group.replace(" ", "").strip(",-").split(","):
            first, _, last = part.partition("-")
            cited |= set(range(int(first), int(last or first) + 1))
    assert set(LAWS) - cited <= {8}  # of forks, told with append
    assert cited <= set(LAWS)


def test_junk_is_no_value_of_the_pattern() -> None:
    k, v = pattern(0, Config(1, 1, 1, 1, 1), PATTERN)
    assert JUNK not in k
    assert JUNK not in v
    assert np.float16(JUNK) == JUNK


def seen(tables: dict[int, list[int]] | None = None, used: int = 0) -> View:
    return View(tables or {}, {}, {}, {"free": 4 - used, "used": used, "cached": 0}, 4 - used)


@pytest.mark.parametrize(
    ("name", "seq", "layer", "law"),
    [
        ("append", 0, 1, 3),
        ("append", 0, 0, 4),
        ("append", 9, 1, 4),
        ("fork", 0, None, 7),
        ("add", 0, None, 13),
    ],
)
def test_a_difference_is_blamed_on_what_the_call_did(
    name: str, seq: int, layer: int | None, law: int
) -> None:
    oracle = Oracle(Config(4, 1, 1, 1, 1))
    oracle.add(0)
    step = Step("a line", {seq: Acted(name, layer)}, seen(), seen(), {})
    assert step.blame(0, 1, 3, oracle) == law


def test_of_blocks_in_two_places_the_innocent_are_not_blamed() -> None:
    """A block that was not shared and now is, with none that shared it before, is a reference gone wrong."""
    oracle = Oracle(Config(4, 1, 1, 1, 1))
    one = np.ones((1, 1, 1))
    for seq in (0, 1):
        oracle.add(seq)
        oracle.append(seq, 0, one, one)
    after = seen({0: [2], 1: [2]})
    with pytest.raises(LawBroken) as caught:
        laws.check_sharing(Step("append 1 0 1", {1: Acted("append", 0)}, seen(), after, {}), oracle)
    assert caught.value.law == 6


def test_a_free_block_that_a_table_holds_is_told_from_a_leak() -> None:
    oracle = Oracle(Config(4, 1, 1, 1, 1))
    for used, word in ((0, "1 free although a table holds it, of 4"), (2, "1 leaked, of 4")):
        after = seen({0: [2]}, used)
        with pytest.raises(LawBroken, match=word) as caught:
            laws.check_references(Step("free 0", {0: Acted("free")}, seen(), after, {}), oracle)
        assert caught.value.law == 6


RELATIVES = {"a stranger": (4, False), "a relative by forks": (7, True)}


@pytest.mark.parametrize("name", RELATIVES)
def test_what_a_call_does_to_others_is_told_by_who_they_are(name: str) -> None:
    law, forked = RELATIVES[name]
    oracle = Oracle(Config(4, 1, 1, 1, 1))
    oracle.add(0)
    oracle.fork(0, 1) if forked else oracle.add(1)
    after = seen({0: [], 1: []})._replace(lens={0: [0], 1: [1]})
    step = Step("append 0 0 1", {0: Acted("append", 0)}, seen(), after, {})
    with pytest.raises(LawBroken) as caught:
        laws.check_lengths(step, oracle)
    assert caught.value.law == law


def test_the_public_names_are_there_whatever_was_imported_first() -> None:
    for name in tinyllm.testing.__all__:
        found = getattr(tinyllm.testing, name)
        assert not isinstance(found, type(tinyllm)), f"{name} is a module"
    assert dir(tinyllm.testing) == tinyllm.testing.__all__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        tinyllm.testing.nothing  # noqa: B018
