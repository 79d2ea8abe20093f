"""The second cache holds every law; faults planted in it show by their witnesses, but for those listed."""

from typing import Any

import pytest
from hypothesis import settings

from tinyllm.grading.bugs import FOLDER, load
from tinyllm.testing.check import run_directed, run_machine
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.power import factory_of
from tinyllm.testing.profiles import profile
from tinyllm.testing.run import replay
from tinyllm.testing.trace import TraceError

SOURCE = (FOLDER / "second.py").read_text(encoding="utf-8")
FAULTS = {bug.id: bug for bug in load(FOLDER / "field.toml")}
NOT_SHOWN = {
    "f06": "gather, which is read first, repairs it",
    "f07": "block_table, which is read first, repairs it",
    "f10": "the page tables of one look need not share the buffer",
    "f15": "a copy in place of a view is not told from one",
    "f18": "the plan is asked for in the look of blocks_needed alone",
    "f21": "a page table of several sequences cannot be written as a line",
    "f59": "an answer is compared for one look alone",
}
"""Witnesses that replay as if nothing were wrong, and why the kit does not see it yet."""
NO_WITNESS = {"f16", "f48", "f52", "f54", "f56", "f57", "f60"}
"""What no trace can say."""


def second(bug: str = "") -> Any:
    source = FAULTS[bug].apply(SOURCE) if bug else SOURCE
    return factory_of(source, "second.py", "second")


def test_the_second_cache_is_right() -> None:
    factory = second()
    some = settings(profile("ci"), max_examples=15)
    run_machine(factory, shard(CacheMachine, 0, factory), some)
    for case in ("uneven layers", "a chain of forks", "rollback", "every call after close", "other integers"):
        run_directed(factory, case)


@pytest.mark.parametrize("bug", FAULTS)
def test_a_fault_is_shown_by_its_witness(bug: str) -> None:
    fault = FAULTS[bug]
    assert bool(fault.witness) == (bug not in NO_WITNESS)
    if bug in NO_WITNESS or bug == "f21":
        assert fault.apply(SOURCE) != SOURCE
        return
    replay(second(), fault.witness)
    if bug in NOT_SHOWN:
        replay(second(bug), fault.witness)
        return
    with pytest.raises(LawBroken) as caught:
        replay(second(bug), fault.witness)
    assert caught.value.law in fault.laws


def test_the_line_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(TraceError, match="pages takes layer, sequence"):
        replay(second(), FAULTS["f21"].witness)
