"""How soon the machine finds a fault is counted, and what it never finds is left to the directed cases."""

from collections.abc import Callable

from hypothesis import settings

from tinyllm.grading import bugs
from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.contract import Factory
from tinyllm.testing.power import directed, factory_of, measure
from tinyllm.testing.profiles import profile

FEW = settings(profile("ci"), max_examples=10)


def test_a_plain_fault_is_found_at_once_and_the_same_seed_counts_the_same(
    named: Callable[[str], Factory],
) -> None:
    found = measure(named("s09"), 3, FEW)
    assert found is not None
    assert (found.law, found.programs) == (6, 1)
    assert found.lines >= 2
    assert measure(named("s09"), 3, FEW) == found


def test_nothing_is_found_in_a_right_cache() -> None:
    assert measure(PagedKVCache, 0, FEW) is None


def test_a_fault_that_comes_late_is_counted_with_all_programs_before_it() -> None:
    made = 0

    class LateFault(PagedKVCache):
        """Right for its first four lives."""

        def __init__(self, *sizes: int) -> None:
            nonlocal made
            made += 1
            super().__init__(*sizes)

        def num_free_blocks(self) -> int:
            return super().num_free_blocks() + (made > 4)

    found = measure(LateFault, 0, FEW)
    assert found is not None
    assert found.law == 5
    assert 1 < found.programs <= 5  # some programs run twice


def test_a_directed_case_is_named(named: Callable[[str], Factory]) -> None:
    byte = named("wrong_caches:CountsReferencesInAByte")
    assert measure(byte, 0, FEW) is None
    assert directed(byte) == "70,000 forks of one block"
    assert directed(named("wrong_caches:CallsItSomethingElse"))


def test_the_class_of_a_text_is_its_own() -> None:
    target = bugs.reference()
    assert factory_of(target.source, target.path, target.module) is not PagedKVCache
