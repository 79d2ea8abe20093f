"""How programs begin: what a walk in a tiny pool never comes to is reached, and shows faults."""

import pytest

from tinyllm.grading.bugs import FOLDER, load
from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.power import factory_of
from tinyllm.testing.reach import Meter
from tinyllm.testing.run import Run
from tinyllm.testing.scenes import SCENES, Start
from tinyllm.testing.trace import Op

SECOND = (FOLDER / "second.py").read_text(encoding="utf-8")
FAULTS = {bug.id: bug for bug in load(FOLDER / "field.toml")}
FOUND = ["f25", "f27", "f28", "f29", "f33", "f34", "f36", "f37", "f38"]
"""Faults of long lives, of large sizes and of pools in pieces."""


@pytest.mark.parametrize("start", SCENES, ids=lambda start: str(tuple(start.config)))
def test_a_right_cache_refuses_nothing_of_a_scene(start: Start) -> None:
    run = Run(PagedKVCache)
    for op in (Op("new", start.config), *start.lines):
        run.step(op._replace(quiet=True))
    run.finish()


def test_a_pool_in_pieces_is_one() -> None:
    run, meter = Run(PagedKVCache), Meter()
    for op in (Op("new", SCENES[0].config), *SCENES[0].lines, Op("stats")):
        before = dict(run.oracle.tables)
        run.step(op._replace(quiet=op.name != "stats"))
        meter.note(op, before, run)
    assert meter.most["pieces"] > 32


@pytest.mark.parametrize("bug", FOUND)
def test_a_fault_that_a_small_pool_hides_shows_where_a_program_begins(bug: str) -> None:
    factory = factory_of(FAULTS[bug].apply(SECOND), "second.py", "second")
    laws = set()
    for start in SCENES:
        machine = shard(CacheMachine, 0, factory)()
        try:
            machine.new(start, forked=True)
            machine.append(machine.run.ops[-1].args[1], 0, 1)
            machine.run.finish()
        except LawBroken as broken:
            laws.add(broken.law)
    assert laws & set(FAULTS[bug].laws)
