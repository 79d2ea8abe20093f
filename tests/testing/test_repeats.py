"""Data that repeat: what a cache that finds blocks by their contents may overlook."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinyllm.grading.bugs import FOLDER, load
from tinyllm.testing.contract import Config
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.power import factory_of
from tinyllm.testing.repeats import CHANGES, LONGEST, changed, known
from tinyllm.testing.scenes import Start
from tinyllm.testing.trace import Op, parse, values

SECOND = (FOLDER / "second.py").read_text(encoding="utf-8")
FAULTS = {bug.id: bug for bug in load(FOLDER / "field.toml")}
CONFIG = Config(4, 2, 1, 2, 1)
FOUND = {
    "f39": ["V"],
    "f40": ["last head"],
    "f41": ["last position"],
    "f43": ["none"],
    "f45": ["one position", "none"],
    "f46": ["zeros", "zeros"],
}
"""Faults that show only where data repeat, and the changes with which the machine finds them."""


@pytest.mark.parametrize("bug", FOUND)
def test_a_key_that_overlooks_something_is_found(bug: str, breaks: Callable[..., LawBroken]) -> None:
    planted = factory_of(FAULTS[bug].apply(SECOND), "second.py", "second")

    def walk(factory: Any) -> None:
        machine = shard(CacheMachine, 0, factory)()
        machine.new(Start(CONFIG, (Op("add", (0,)), Op("append", (0, 0, 4))), silent=False), forked=False)
        machine.run.hold()
        if bug == "f43":
            machine.line("truncate", 0, 3)
            machine.append(0, 0, 1)
        for change in FOUND[bug]:
            machine.append_again(0, True, change, True)
            machine.run.hold()

    walk(factory_of(SECOND, "second.py", "second"))
    assert breaks(lambda: walk(planted)).law in FAULTS[bug].laws


def again(line: str, change: str, scalars: int = 100) -> tuple[Op, Any, Any]:
    """An append that comes again with a change; its K and V as lists."""
    (op,) = parse(line)
    made = changed(known(op, 0), change, scalars, CONFIG)
    (read,) = parse(str(made))
    k, v = values(read, scalars, CONFIG)
    return made, k.tolist(), v.tolist()


def test_the_same_again_is_told_by_its_place() -> None:
    op, k, v = again("append 0 0 2 as list", "none")
    assert str(op) == "append 0 0 2 @0/0"
    assert k == [[[1], [2]], [[3], [4]]]
    assert v == [[[-1], [-2]], [[-3], [-4]]]


def test_another_v_is_that_of_the_next_values() -> None:
    op, k, v = again("append 0 0 2", "V")
    assert str(op) == "append 0 0 2 @0/100"
    op, k, v = again("append 0 0 1 0000803f00000040 000080bf000000c0", "V")
    assert (k, v) == ([[[1]], [[2]]], [[[-101]], [[-102]]])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("last position", [[[1], [-2]], [[3], [-4]]]),
        ("last head", [[[1], [2]], [[-3], [-4]]]),
        ("one position", [[[1], [1]], [[3], [3]]]),
        ("zeros", [[[1], [0]], [[3], [0]]]),
    ],
)
def test_a_change_is_made_in_k_and_in_v(change: str, expected: Any) -> None:
    op, k, v = again("append 0 0 2", change)
    assert k == expected
    assert np.array_equal(v, -np.array(expected))
    assert op.places is None


def test_zeros_change_their_sign() -> None:
    zeros = again("append 0 0 2", "zeros")[0]
    _, k, v = again(str(zeros), "zeros")
    assert np.signbit(k).tolist() == [[[False], [True]], [[False], [True]]]
    assert np.array_equal(v, -np.array(k))


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_too_long_to_spell_out_comes_again_as_it_was(change: str) -> None:
    op = again(f"append 0 0 {LONGEST}", change)[0]
    assert str(op) == f"append 0 0 {LONGEST} @0/0"
