"""The second cache holds every law; faults planted in it show by their witnesses, but for those listed."""

from typing import Any

import pytest
from hypothesis import settings

from tinyllm.grading.bugs import load_set, reference
from tinyllm.testing.check import run_directed, run_machine
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.power import factory_of
from tinyllm.testing.profiles import profile
from tinyllm.testing.run import replay

FAULTS = {bug.id: bug for bug in load_set("field")}
SECOND = FAULTS["f01"].clean(reference())
NOT_SHOWN = {
    "f06": "gather, which is read first, repairs it",
    "f07": "block_table, which is read first, repairs it",
    "f10": "the page tables of one look need not share the buffer",
    "f15": "a copy in place of a view is not told from one",
    "f18": "the plan is asked for in the look of blocks_needed alone",
    "f59": "an answer is compared for one look alone",
}
"""Witnesses that replay as if nothing were wrong, and why the kit does not see it yet."""
NO_WITNESS = {"f16", "f21", "f48", "f52", "f54", "f56", "f57"}
"""What no trace can say."""


def second(bug: str = "") -> Any:
    target = FAULTS[bug].planted(SECOND) if bug else SECOND
    return factory_of(target.source, target.path, "second")


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
    if bug in NO_WITNESS:
        return
    replay(second(), fault.witness)
    if bug in NOT_SHOWN:
        replay(second(bug), fault.witness)
        return
    with pytest.raises(LawBroken) as caught:
        replay(second(bug), fault.witness)
    assert caught.value.law in fault.laws
