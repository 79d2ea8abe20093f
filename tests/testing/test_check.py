"""check_cache: which law a wrong cache is found to break, and that right caches break none."""

import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.errors import FailedHealthCheck, Flaky

from tinyllm.grading.bugs import Bug, load_set
from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing import check as check_module
from tinyllm.testing.catalogue import CATALOGUE
from tinyllm.testing.check import check_cache, checks, run_directed, run_machine
from tinyllm.testing.contract import CAPABILITIES, Factory, capabilities
from tinyllm.testing.directed import DIRECTED
from tinyllm.testing.laws import LAWS, LawBroken
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.profiles import profile

Named = Callable[[str], Factory]
Breaks = Callable[[Callable[[], object]], LawBroken]
Again = Callable[[Factory, LawBroken], None]

FEW = settings(profile("ci"), max_examples=3)
EVERY = CATALOGUE, DIRECTED
QUICK = (
    {name: entry for name, entry in CATALOGUE.items() if name != "test_random_ops_conserve_blocks"},
    {name: case for name, case in DIRECTED.items() if not name[0].isdigit()},
)
"""Both without those that take a second."""
BUGS = [bug for bug in load_set("all") if not (bug.survives or bug.implementation)]
FIRST = {law: bug.id for bug in reversed(BUGS) for law in bug.laws}.values()
"""A bug for each law; the others take long."""


@pytest.fixture(autouse=True)
def hold_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any], None]:
    """Which catalogue and which directed cases `check_cache` has: the quick ones, unless a test says so."""

    def hold(catalogue: Any, directed: Any) -> None:
        monkeypatch.setattr(check_module, "CATALOGUE", catalogue)
        monkeypatch.setattr(check_module, "DIRECTED", directed)

    hold(*QUICK)
    return hold


WRONG = {
    "wrong_caches:TableAsList": 1,
    "wrong_caches:TableOfInt64": 1,
    "wrong_caches:IdsFromOne": 1,
    "wrong_caches:BlockBeforeItIsNeeded": 2,
    "wrong_caches:GathersFloat32": 3,
    "wrong_caches:GathersAList": 3,
    "wrong_caches:GathersListsOfNumbers": 3,
    "wrong_caches:ClipsOverflow": 3,
    "wrong_caches:FlushesSubnormals": 3,
    "wrong_caches:DropsTheSignOfZero": 3,
    "wrong_caches:DropsNaN": 3,
    "wrong_caches:RoundsUp": 3,
    "wrong_caches:WarnsOnOverflow": 3,
    "wrong_caches:LayerZeroWritesAll": 4,
    "wrong_caches:LengthAsArray": 4,
    "wrong_caches:CountsSharedTwice": 5,
    "wrong_caches:CountsDisagree": 5,
    "wrong_caches:StatsWithoutCached": 5,
    "wrong_caches:StatsOfFloats": 5,
    "wrong_caches:StatsOfNone": 5,
    "wrong_caches:ForkCopies": 7,
    "wrong_caches:WritesIntoItsNeighbour": 7,
    "wrong_caches:ForkKeepsTheLengths": 7,
    "wrong_caches:CopiesEveryBlock": 8,
    "wrong_caches:KeepsABlockInReserve": 9,
    "wrong_caches:CallsItSomethingElse": 9,
    "wrong_caches:LeaksWhenRefused": 10,
    "wrong_caches:DropsTheSequenceWhenRefused": 10,
    "wrong_caches:ForgetsWhatItRefused": 10,
    "wrong_manners:TurnsATableRoundWhenRefused": 10,
    "wrong_caches:WritesBeforeItCounts": 10,
    "wrong_caches:LiveTable": 12,
    "wrong_caches:GathersAView": 12,
    "wrong_caches:KeepsTheArrays": 12,
    "wrong_manners:KeepsLengthsAfterFree": 13,
    "wrong_manners:AcceptsALiveId": 15,
    "wrong_manners:ForksOntoALiveId": 15,
    "wrong_manners:TakesBools": 15,
    "wrong_manners:CountsLayersFromTheEnd": 15,
    "wrong_manners:TruncatesIds": 15,
    "wrong_manners:TakesSizesOfZero": 15,
    "wrong_manners:WrongClass": 15,
    "wrong_manners:AcceptsAnything": 15,
    "wrong_manners:Panics": 9,
    "wrong_manners:PanicsWhenRead": 3,
    "wrong_manners:PanicsAtBirth": 15,
    "wrong_manners:Exits": 6,
    "wrong_manners:NeedsOneMore": 16,
    "wrong_manners:RollsBackTooFar": 15,
    "wrong_manners:PagesOfInt64": 18,
    "wrong_manners:PagesAsAList": 18,
    "wrong_manners:PagesOfNobody": 18,
    "wrong_manners:PagesOfEachOnce": 18,
    "wrong_manners:ChecksTooMuch": 19,
    "wrong_manners:RunsCanBeWritten": 20,
    "wrong_manners:RunsOutOfOrder": 20,
    "wrong_manners:RunsRaise": 20,
    "wrong_manners:WithoutAppend": 9,
    "wrong_manners:WithoutStats": 5,
    "wrong_manners:WithoutGather": 3,
    "wrong_manners:WithoutTable": 1,
    "wrong_caches:ReusesItsAnswers": 12,
    "wrong_caches:ReadOnlyTableOfItsOwn": 12,
    "wrong_caches:CountsHandedOut": 12,
    "wrong_caches:WritesIntoItsArguments": 12,
    "wrong_caches:NegativeCounts": 5,
    "wrong_manners:FailsWithoutWords": 9,
}


@pytest.mark.parametrize(("name", "law"), WRONG.items())
def test_a_wrong_cache_breaks_its_law(
    name: str, law: int, named: Named, breaks: Breaks, again: Again
) -> None:
    factory = named(name)
    # Beyond the ten methods only at the end, since these come first.
    broken = breaks(lambda: check_cache(factory, settings=FEW if law > 15 else None))
    assert broken.law == law, str(broken)
    assert str(broken).startswith(f"law {law}, {LAWS[law][0]}: ")
    assert not getattr(broken, "__notes__", [])
    again(factory, broken)


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, id=bug.id, marks=[] if bug.id in FIRST else pytest.mark.long) for bug in BUGS],
)
def test_a_planted_bug_breaks_its_law(bug: Bug, named: Named, breaks: Breaks, again: Again) -> None:
    factory = named(bug.id)
    broken = breaks(lambda: check_cache(factory, settings=FEW if bug.id.startswith("e") else None))
    assert broken.law in bug.laws, str(broken)
    again(factory, broken)


CASES = {
    "wrong_manners:UsableAfterClose": ("use after close", 14),
    "wrong_manners:EmptyAfterClose": ("use after close", 14),
    "wrong_manners:ClosesOnce": ("use after close", 14),
    "wrong_manners:WithoutClose": ("use after close", 14),
    "wrong_manners:WithoutFork": ("uneven layers", 7),
    "wrong_caches:CountsReferencesInAByte": ("70,000 forks of one block", 8),
    "wrong_caches:NumbersBlocksInAShort": ("32,776 blocks", 7),
    "wrong_caches:SwapsBytes": ("forms of arrays", 3),
    "wrong_caches:RoundsTwice": ("forms of arrays", 3),
    "wrong_caches:StretchesV": ("forms of arrays", 15),
    "wrong_caches:RoundsLate": ("special values", 3),
    "wrong_caches:ForksOfForks": ("a chain of forks", 7),
    "wrong_caches:EvictsAnother": ("refused appends", 10),
    "wrong_caches:FourHoldersAreNone": ("a chain of forks", 8),
    "wrong_caches:ThirtyLayers": ("large sizes", 3),
    "wrong_caches:SixtyFourHeads": ("large sizes", 3),
    "wrong_caches:NumbersSlotsInAByte": ("large sizes", 3),
    "wrong_caches:LengthInHalf": ("large sizes", 4),
    "wrong_manners:RefusesNegativeIds": ("strange ids", 13),
    "wrong_manners:WrapsIds": ("strange ids", 1),
    "wrong_manners:TakesWholeFloats": ("wrong arguments", 15),
}

PLAIN = {
    "wrong_caches:CountsReferencesInAShort": ("70,000 forks of one block", 6),
    "wrong_caches:OnePoolForAll": ("two caches at once", 12),
    "wrong_caches:TellsKFromVByName": ("other arrays", 3),
    "wrong_manners:RefusesNumpyIds": ("other integers", 3),
    "wrong_manners:LengthOfTheLongest": ("other integers", 4),
    "wrong_manners:CannotTellOnceClosed": ("representation", 14),
    "wrong_manners:LeavesItselfOpen": ("with", 14),
    "wrong_manners:SwallowsErrors": ("with", 14),
    "wrong_manners:EntersNothing": ("with", 14),
    "wrong_manners:EntersWhenClosed": ("with", 14),
    "wrong_manners:ClosesOnceInWith": ("with", 14),
    "wrong_manners:HalfAWith": ("with", 14),
    "wrong_manners:CountsAfterClose": ("every call after close", 14),
    "wrong_manners:KeepsItsPool": ("memory after close", 14),
    "wrong_manners:InACycle": ("garbage collection", 14),
    "wrong_manners:KeepsItsLastError": ("garbage collection", 14),
}


@pytest.mark.parametrize(("name", "case", "law"), [(name, *rest) for name, rest in PLAIN.items()])
def test_a_case_in_plain_calls_finds_what_it_is_for(
    name: str, case: str, law: int, named: Named, breaks: Breaks, hold_to: Callable[[Any, Any], None]
) -> None:
    hold_to(*EVERY)
    broken = breaks(lambda: run_directed(named(name), case))
    assert (broken.law, broken.trace) == (law, ""), str(broken)
    assert str(broken).startswith(f"law {law} ({LAWS[law][0]}): expected ")


@pytest.mark.parametrize(("name", "case", "law"), [(name, *rest) for name, rest in CASES.items()])
def test_a_directed_case_finds_what_it_is_for(
    name: str,
    case: str,
    law: int,
    named: Named,
    breaks: Breaks,
    again: Again,
    hold_to: Callable[[Any, Any], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hold_to(*EVERY)
    monkeypatch.setattr("tinyllm.testing.shrink.WORK", 5_000)  # the programs of the last two are long
    factory = named(name)
    broken = breaks(lambda: run_directed(factory, case))
    assert broken.law == law, str(broken)
    again(factory, broken)


def test_a_cache_that_something_keeps_alive_has_no_program(named: Named, breaks: Breaks) -> None:
    broken = breaks(lambda: run_directed(named("wrong_manners:Immortal"), "garbage collection"))
    assert (broken.law, broken.trace) == (14, "")
    assert (
        "law 14 (close): expected a cache that nobody holds is given back at once; found something keeps it"
        in str(broken)
    )


def test_every_law_that_others_are_held_to_has_a_wrong_cache_here() -> None:
    seen = {*WRONG.values(), *(law for _, law in CASES.values()), *(law for bug in BUGS for law in bug.laws)}
    assert set(LAWS) - seen == {11}  # the reference's own: nobody can see it from outside


RIGHT = [
    "other_caches:Naive",
    "other_caches:Queue",
    "other_caches:Renumbers",
    "wrong_manners:WrongClassDeclared",
]


@pytest.mark.parametrize(
    ("name", "held", "programs"),
    [
        *((name, QUICK, 3) for name in RIGHT),
        *(pytest.param(name, EVERY, 10, marks=pytest.mark.long) for name in RIGHT),
    ],
)
def test_a_right_cache_built_in_another_way_passes(
    name: str, held: Any, programs: int, named: Named, hold_to: Callable[[Any, Any], None]
) -> None:
    hold_to(*held)
    catalogue, cases = held
    report = check_cache(named(name), settings=settings(FEW, max_examples=programs), seed=3)
    names = [*(f"catalogue: {one}" for one in catalogue), *(f"directed: {one}" for one in cases)]
    assert report.checked == (*names, "machine: random programs")
    assert report.programs >= programs
    assert report.lines > report.programs
    assert report.seconds > 0
    missing = ("exact-errors",) if name == "wrong_manners:WrongClassDeclared" else ()
    assert report.not_checked == tuple(f"{one}: {CAPABILITIES[one]}" for one in missing)


@pytest.mark.parametrize("name", ["CountsItsCalls", "make", "maker", "another"])
def test_other_factories_and_fuller_counts_pass(name: str, named: Named) -> None:
    factory = named(f"other_caches:{name}")
    for case in ("wrong sizes", "wrong arguments", "refused appends", "garbage collection"):
        run_directed(factory, case)
    run_machine(factory, shard(CacheMachine, 0, factory), FEW)


def test_unknown_capabilities_are_refused_by_name() -> None:
    class Boastful(PagedKVCache):
        capabilities = frozenset({"exact-errors", "teleports"})

    with pytest.raises(
        ValueError, match="capabilities has 'teleports'; it must be a set of names, of block-tables"
    ):
        check_cache(Boastful)


def test_capabilities_of_a_method_are_those_of_its_owner() -> None:
    class Maker:
        capabilities = frozenset[str]()

        def make(self, *sizes: int) -> PagedKVCache:
            return PagedKVCache(*sizes)

    assert capabilities(Maker().make) == frozenset()
    assert capabilities(functools.partial(PagedKVCache)) == frozenset(CAPABILITIES)


@pytest.mark.parametrize("odds", [0.004, 0.04])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_a_cache_that_fails_now_and_then_is_no_puzzle(seed: int, odds: float, breaks: Breaks) -> None:
    dice = random.Random(seed)

    class NowAndThen(PagedKVCache):
        def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
            super().append(seq_id, layer, k, v)
            if dice.random() < odds:
                self._k[layer, :, self._seqs[seq_id].table[0] * self.block_size] = 77

    machine = shard(CacheMachine, seed, NowAndThen)
    broken = breaks(lambda: run_machine(NowAndThen, machine, profile("ci")))
    assert broken.law in {3, 4, 7}
    assert "the cache is not deterministic" in str(broken)
    assert broken.trace.startswith("new ")
    assert not getattr(broken, "__notes__", [])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_two_broken_laws_under_foreign_settings_are_no_group(seed: int, breaks: Breaks) -> None:
    class TwiceWrong(PagedKVCache):
        def seq_len(self, seq_id: int, layer: int = 0) -> int:
            n = super().seq_len(seq_id, layer)
            return n + (n == 5)

        def gather(self, seq_id: int, layer: int) -> Any:
            k, v = super().gather(seq_id, layer)
            return (k[:, ::-1] if k.shape[1] == 7 else k), v

    plain = settings(max_examples=80, deadline=None, database=None, report_multiple_bugs=True)
    broken = breaks(lambda: run_machine(TwiceWrong, shard(CacheMachine, seed, TwiceWrong), plain))
    assert broken.law in {3, 4, 7}


def test_a_warning_is_a_broken_law_wherever_warnings_are_let_through(named: Named, breaks: Breaks) -> None:
    factory = named("wrong_caches:WarnsOnOverflow")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        broken = breaks(lambda: run_directed(factory, "special values"))
    assert broken.law == 3
    assert "RuntimeWarning: overflow" in broken.found


@pytest.mark.parametrize("error", [FailedHealthCheck("slow"), Flaky("odd"), KeyboardInterrupt()], ids=repr)
def test_what_is_no_finding_comes_through(
    error: BaseException, hold_to: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(check_module, "run_state_machine_as_test", fail)
    hold_to({}, {})
    with pytest.raises(type(error)):
        check_cache(PagedKVCache)


def test_an_interrupt_inside_the_cache_is_no_finding() -> None:
    class Interrupted(PagedKVCache):
        def fork(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    for check in checks(Interrupted, shard(CacheMachine, 0, Interrupted), FEW):
        if check.name in {"test_fork_shares_until_a_write", "uneven layers"}:
            with pytest.raises(KeyboardInterrupt):
                check.run()
    with pytest.raises(KeyboardInterrupt):
        check_cache(Interrupted)


def test_what_the_catalogue_alone_sees_is_a_broken_law_too(
    breaks: Breaks, hold_to: Callable[[Any, Any], None]
) -> None:
    class LongSequences(PagedKVCache):
        """Wrong beyond any length that the machine reaches."""

        def gather(self, seq_id: int, layer: int) -> Any:
            k, v = super().gather(seq_id, layer)
            return (k, v) if k.shape[1] < 90 else (k + np.float16(1), v)

    hold_to(QUICK[0], {})
    broken = breaks(lambda: check_cache(LongSequences, settings=FEW))
    assert (broken.law, broken.name) == (3, "test_gather_matches_contiguous_float16")
    assert broken.expected == CATALOGUE[broken.name].checks
    assert "test_gather_matches_contiguous_float16: AssertionError: " in broken.found
    assert broken.trace == ""


def test_the_story_names_what_the_catalogue_saw(breaks: Breaks, named: Named) -> None:
    broken = breaks(lambda: check_cache(named("s08"), settings=FEW))
    assert "The catalogue fails as well: test_free_restores_the_pool: AssertionError" in str(broken)
    assert str(broken).count("The catalogue fails as well") == 1
