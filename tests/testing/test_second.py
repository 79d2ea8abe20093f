"""The second cache holds every law; faults planted in it show by their witnesses."""

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
    with pytest.raises(LawBroken) as caught:
        replay(second(bug), fault.witness)
    assert caught.value.law in fault.laws
