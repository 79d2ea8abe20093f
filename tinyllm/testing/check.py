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
from tinyllm.testing.contract import CAPABILITIES, Factory
from tinyllm.testing.directed import DIRECTED
from tinyllm.testing.laws import Findings, LawBroken
from tinyllm.testing.machine import CacheMachine, Search, Stopped, shard
from tinyllm.testing.observe import named, warnings_heard
from tinyllm.testing.profiles import profile
from tinyllm.testing.shrink import shorten
from tinyllm.testing.subject import Subject
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

    `run` returns the laws that are broken, each by a program as short as can be found; it is told whether a
    law is known already that only extensions show, of which one is enough. A test of the catalogue raises, as
    it likes. All raise NotOffered when the check needs more than the implementation promises, and CutShort
    when all was right until its calls had taken long enough.
    """

    kind: str  # catalogue, directed or machine
    name: str
    run: Callable[..., Findings]


def checks(factory: Factory, machine: type[CacheMachine], settings: Settings) -> list[Check]:
    """All checks in order, to be run one by one; `machine.search` counts its programs.

    Raises:
        RuntimeError: Python ignores assertions, which are how the catalogue objects.
        ValueError: what `factory` declares as its capabilities is none.
    """
    if sys.flags.optimize:
        raise RuntimeError("Python ignores assertions here (-O, PYTHONOPTIMIZE): nothing would be checked")
    subject = Subject.of(factory)
    watch = watch_over(subject)

    def check(kind: str, name: str, act: Callable[[bool], Findings], seconds: float = SECONDS) -> Check:
        def run(known: bool = False) -> Findings:
            with limited(seconds):
                return act(known)

        return Check(kind, name, run)

    def entry(name: str, known: bool) -> Findings:
        del known
        run_entry(subject, name, watch)
        return Findings()

    return [
        *(check("catalogue", name, partial(entry, name)) for name in CATALOGUE),
        *(check("directed", name, partial(direct, subject, name, watch)) for name in DIRECTED),
        check(
            "machine",
            "random programs",
            partial(search, subject, machine, settings, watch),
            search_seconds(settings),
        ),
    ]


def search_seconds(settings: Settings) -> float:
    """What the programs of the machine may take together."""
    return max(SECONDS, PROGRAM * settings.max_examples)


def run_entry(factory: Factory, name: str, watch: Watch | None = None) -> None:
    """One test of the catalogue, which fails in any way it likes. Raises NotOffered."""
    subject = Subject.of(factory)
    if missing := CATALOGUE[name].needs - subject.capabilities:
        raise NotOffered(", ".join(sorted(missing)))

    def make(*sizes: int) -> Any:
        return Watched(watched(lambda: subject(*sizes)))

    make.capabilities = subject.capabilities  # type: ignore[attr-defined]
    with watch or watch_over(factory), warnings_heard():
        CATALOGUE[name].test(make)


def direct(factory: Factory, name: str, watch: Watch | None = None, known: bool = False) -> Findings:
    """One directed case: what it found, shortened. Raises NotOffered. `known` as `Check` has it."""
    with watch or watch_over(factory), warnings_heard():
        try:
            DIRECTED[name](factory)
        except LawBroken as broken:
            return _findings(factory, broken, known)
    return Findings()


def search(
    factory: Factory,
    machine: type[CacheMachine],
    settings: Settings,
    watch: Watch | None = None,
    known: bool = False,
    *,
    looking: Search | None = None,
) -> Findings:
    """The machine under `settings`: what it found, shortened. `known` as `Check` has it.

    `looking` takes the place of the search that counts and keeps what the programs did.
    """
    quiet = Settings(settings, verbosity=Verbosity.quiet, report_multiple_bugs=False)
    with watch or watch_over(factory):
        machine.search = looking or Search(goes_on=True, ends=time.monotonic() + left(), known=known)
        try:
            found = _searched(machine, quiet)
        except Stopped as stopped:
            found = stopped.broken
        except Flaky:  # a cache that fails now and then
            if (flaky := machine.search.core) is None:
                raise
            more = "The same program does not fail every time: the cache is not deterministic."
            return Findings(flaky.but(story=f"{flaky.story}\n\n{more}"))
        return Findings() if found is None else _findings(factory, found, known)


def _searched(machine: type[CacheMachine], settings: Settings) -> LawBroken | None:
    """The law that breaks. Raises CutShort, after the program under way, if none does in time."""
    started, search = time.monotonic(), machine.search
    try:
        with limited(math.inf):
            run_state_machine_as_test(machine, settings=settings)
    except LawBroken as broken:
        return broken
    except (CutShort, Flaky):  # which it seems to be that was cut short while it was made shorter
        if time.monotonic() < search.ends:
            raise
        if (known := search.findings.worst) is None:
            took = time.monotonic() - started
            raise CutShort(f"cut short after {search.programs:,} programs in {took:.0f} s") from None
        return known
    return search.extensions


def _findings(factory: Factory, broken: LawBroken, known: bool) -> Findings:
    if broken.beyond:
        return Findings(extensions=None if known else shortest(factory, broken))
    return Findings(shortest(factory, broken))


def run_directed(factory: Factory, name: str, watch: Watch | None = None) -> None:
    """One directed case. Raises LawBroken with the shortest program found, or NotOffered."""
    if worst := direct(factory, name, watch).worst:
        raise worst


def run_machine(
    factory: Factory, machine: type[CacheMachine], settings: Settings, watch: Watch | None = None
) -> None:
    """The machine under `settings`. Raises LawBroken alone, with the shortest program."""
    if worst := search(factory, machine, settings, watch).worst:
        raise worst


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
    subject = Subject.of(factory)
    machine = shard(CacheMachine, seed, subject)
    done, failed = [], ""
    beyond: LawBroken | None = None
    missing = [f"{name}: {CAPABILITIES[name]}" for name in sorted(CAPABILITIES.keys() - subject.capabilities)]
    for check in checks(subject, machine, settings or profile("ci")):
        try:
            found = check.run(beyond is not None)
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
        else:
            if found.core:
                raise found.core.but(story=found.core.story + failed)
            beyond = beyond or found.extensions  # to be raised if the ten methods are right
        done.append(f"{check.kind}: {check.name}")
    if beyond:
        raise beyond.but(story=beyond.story + failed)
    if failed:
        raise LawBroken(first.laws[0], first.name, first.checks, failed.strip())
    programs, lines = machine.search.programs, machine.search.lines
    return Report(tuple(done), tuple(missing), programs, lines, time.monotonic() - started)


def shortest(factory: Factory, broken: LawBroken) -> LawBroken:
    """The law broken by a program as short as can be found."""
    return shorten(factory, broken).but()  # without Hypothesis' own retelling: the story is ours
