"""Hold a cache to everything the kit has: the catalogue, the directed cases, the machine."""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from hypothesis import Verbosity
from hypothesis import settings as Settings  # noqa: N812 - a class, whatever its case
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from tinyllm.testing.catalogue import CATALOGUE
from tinyllm.testing.contract import CAPABILITIES, Factory, capabilities
from tinyllm.testing.directed import DIRECTED
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.machine import CacheMachine, Stopped, shard
from tinyllm.testing.observe import named, warnings_heard
from tinyllm.testing.profiles import profile
from tinyllm.testing.shrink import shorten
from tinyllm.testing.time_limit import CutShort, Watch, Watched, left, limited, watch_over, watched
from tinyllm.testing.trace import NotOffered

SECONDS = 20.0  # that the calls of one check may take; those of a quick cache take two
PROGRAM = 0.5  # the same for each program of the machine, of which most take a hundredth


@dataclass(frozen=True)
class Report:
    """What was held against a cache that broke no law, and what was not because it does not offer it."""

    checked: tuple[str, ...]
    not_checked: tuple[str, ...]
    programs: int
    lines: int
    seconds: float


class Check(NamedTuple):
    """One named check of a factory.

    `run` raises AssertionError, of which LawBroken is one; NotOffered when the check needs more than the
    implementation promises; CutShort when all was right until its calls had taken long enough.
    """

    kind: str  # catalogue, directed or machine
    name: str
    run: Callable[[], None]


def checks(factory: Factory, machine: type[CacheMachine], settings: Settings) -> list[Check]:
    """All checks in order, to be run one by one; `machine` counts its programs in its `tally`.

    Raises:
        RuntimeError: Python ignores assertions, which are how the catalogue objects.
    """
    if sys.flags.optimize:
        raise RuntimeError("Python ignores assertions here (-O, PYTHONOPTIMIZE): nothing would be checked")
    watch = watch_over(factory)
    beyond: list[LawBroken] = []

    def check(kind: str, name: str, act: Callable[[], None], seconds: float = SECONDS) -> Check:
        return Check(kind, name, lambda: in_time(act, seconds))

    def search() -> None:
        run_machine(factory, machine, settings, watch, beyond)

    return [
        *(check("catalogue", name, partial(run_entry, factory, name, watch)) for name in CATALOGUE),
        *(check("directed", name, partial(run_directed, factory, name, watch, beyond)) for name in DIRECTED),
        check("machine", "random programs", search, search_seconds(settings)),
    ]


def in_time(act: Callable[[], None], seconds: float) -> None:
    """Run one check. Raises CutShort when its calls take longer than so many seconds together."""
    with limited(seconds):
        act()


def search_seconds(settings: Settings) -> float:
    """What the programs of the machine may take together."""
    return max(SECONDS, PROGRAM * settings.max_examples)


def run_entry(factory: Factory, name: str, watch: Watch | None = None) -> None:
    """One test of the catalogue, which fails in any way it likes. Raises NotOffered."""
    if missing := CATALOGUE[name].needs - capabilities(factory):
        raise NotOffered(", ".join(sorted(missing)))

    def make(*sizes: int) -> Any:
        return Watched(watched(lambda: factory(*sizes)))

    make.capabilities = capabilities(factory)  # type: ignore[attr-defined]
    with watch or watch_over(factory), warnings_heard():
        CATALOGUE[name].test(make)


def run_directed(
    factory: Factory, name: str, watch: Watch | None = None, beyond: list[LawBroken] | None = None
) -> None:
    """One directed case. Raises LawBroken with the shortest program found, or NotOffered.

    `beyond` receives what only the methods beyond the ten show; the first of it alone is shortened and told.
    """
    with watch or watch_over(factory), warnings_heard():
        try:
            DIRECTED[name](factory)
        except LawBroken as broken:
            raise shortest(factory, broken, beyond) from None


def run_machine(
    factory: Factory,
    machine: type[CacheMachine],
    settings: Settings,
    watch: Watch | None = None,
    beyond: list[LawBroken] | None = None,
) -> None:
    """The machine under `settings`. Raises LawBroken alone, with the shortest program; `beyond` as above."""
    quiet = Settings(settings, verbosity=Verbosity.quiet, report_multiple_bugs=False)
    with watch or watch_over(factory):
        found = list(beyond or [])
        machine.beyond = found
        try:
            _search(machine, quiet, found)
        except Stopped as stopped:
            raise shortest(factory, stopped.broken) from None
        except LawBroken as broken:
            raise shortest(factory, broken, beyond) from None
        except Flaky:  # a cache that fails now and then
            if not machine.broken:
                raise
            flaky = machine.broken[-1]
            flaky.story += "\n\nThe same program does not fail every time: the cache is not deterministic."
            raise _plain(flaky) from None


def _search(machine: type[CacheMachine], settings: Settings, found: list[LawBroken]) -> None:
    """Raises the law that breaks; CutShort, after the program under way, if none does in time."""
    started = time.monotonic()
    machine.ends = started + left()
    try:
        with limited(math.inf):
            run_state_machine_as_test(machine, settings=settings)
    except (CutShort, Flaky):  # which it seems to be that was cut short while it was made shorter
        if time.monotonic() < machine.ends:
            raise
        if known := machine.broken or found:
            raise known[-1] from None
        many, took = machine.tally["programs"], time.monotonic() - started
        raise CutShort(f"cut short after {many:,} programs in {took:.0f} s") from None
    if found:
        raise found[0]


def check_cache(factory: Factory, *, settings: Settings | None = None, seed: int = 0) -> Report:
    """Hold a cache to the catalogue, the directed cases and the machine; works outside pytest too.

    Args:
        factory: called as `factory(num_blocks, block_size, n_layers, n_kv_heads, d_head)`, positionally;
            a class is one. It may declare `capabilities` (see `contract.CAPABILITIES`).
        settings: Hypothesis settings of the machine; the `tinyllm-ci` profile by default.
        seed: which programs the machine draws.

    Returns:
        What was checked, and what was not, or not to its end because the cache is slow.

    Raises:
        LawBroken: with the law's number, the shortest program that shows it, and the story.
    """
    started = time.monotonic()
    offered = capabilities(factory)
    machine = shard(CacheMachine, seed, factory)
    done, failed = [], ""
    beyond: LawBroken | None = None
    missing = [f"{name}: {CAPABILITIES[name]}" for name in sorted(CAPABILITIES.keys() - offered)]
    for check in checks(factory, machine, settings or profile("ci")):
        try:
            check.run()
        except LawBroken as broken:
            broken.story += failed
            if not broken.beyond:
                raise
            beyond = beyond or broken  # to be told if the ten methods are right
        except (NotOffered, CutShort) as why:
            needs = "needs " if isinstance(why, NotOffered) else ""
            missing.append(f"{check.kind}: {check.name} {needs}{why}")
            continue
        except BaseException as error:  # the panic of a Rust engine is no Exception
            if check.kind != "catalogue" or isinstance(error, KeyboardInterrupt):
                raise
            if not failed:  # the checks that follow say why, with the law and the shortest program
                what = " ".join(named(error).split())[:200]
                failed = f"\n\nThe catalogue fails as well: {check.name}: {what}"
                first = CATALOGUE[check.name]
        done.append(f"{check.kind}: {check.name}")
    if beyond:
        raise beyond
    if failed:
        raise LawBroken(first.laws[0], first.name, first.checks, failed.strip())
    programs, lines = machine.tally["programs"], machine.tally["lines"]
    return Report(tuple(done), tuple(missing), programs, lines, time.monotonic() - started)


def shortest(factory: Factory, broken: LawBroken, beyond: list[LawBroken] | None = None) -> LawBroken:
    """The law broken by a program as short as can be found; `beyond` receives what only extensions show."""
    if not (broken.beyond and beyond):
        broken = shorten(factory, broken)
    if broken.beyond and beyond is not None:
        beyond.append(broken)
    return _plain(broken)


def _plain(broken: LawBroken) -> LawBroken:
    broken.__notes__ = []  # Hypothesis' own retelling: the story is ours
    return broken.with_traceback(None)
