"""Law 11 where it shows: a pool that starts as NaN, or as plausible numbers, instead of zeros."""

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from tinyllm.grading import bugs
from tinyllm.infer.memory import Half, zeros
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.power import factory_of
from tinyllm.testing.profiles import profile

FEW = settings(profile("ci"), max_examples=40, phases=(Phase.generate,))
CLEARS = "pool[:, :, self._slots(first, stop - first)] = 0"


class Zeroed(CacheMachine):
    """The machine, with the reference's own law besides."""

    @invariant()
    def unwritten_slots_read_zero(self) -> None:
        cache: Any = self.run.cache
        if self.run.closed or not self.run.ops:
            return
        for table, lens in cache._seqs.values():
            for layer, n in enumerate(lens):
                for pool in (cache._k, cache._v):
                    slots = [pool[layer, :, cache._slots(block)] for block in table]
                    assert not slots or not np.concatenate(slots, axis=1)[:, n:].any(), "law 11"


def poisoned(value: float, source: str) -> Any:
    """The reference by this source, its pool full of `value`; no rollback, which leaves what it cuts."""
    target = bugs.reference()

    def poison(shape: tuple[int, ...]) -> Half:
        pool = zeros(shape)
        pool[...] = value
        return pool

    cls = factory_of(source, target.path, target.module)
    cls.__init__.__globals__["zeros"] = poison
    cls.truncate = None
    return cls


@pytest.mark.parametrize(
    ("value", "seed"),
    [
        (np.nan, 0),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((np.nan, 1), (7.25, 0), (7.25, 1))),
    ],
)
def test_nothing_of_what_was_in_the_pool_is_ever_seen(value: float, seed: int) -> None:
    cls = poisoned(value, bugs.reference().source)
    run_state_machine_as_test(shard(Zeroed, seed, cls), settings=FEW)


@pytest.mark.parametrize("value", [np.nan, 7.25])
def test_that_test_can_fail(value: float) -> None:
    """Where claimed blocks are not cleared it does, though no caller could see a difference."""
    source = bugs.reference().source
    assert source.count(CLEARS) == 1
    cls = poisoned(value, source.replace(CLEARS, "pass"))
    with pytest.raises(AssertionError, match="law 11"):
        run_state_machine_as_test(shard(Zeroed, 0, cls), settings=FEW)
