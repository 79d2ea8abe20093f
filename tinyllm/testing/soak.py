"""The machine for many hours: longer programs, larger pools, and an account of how far they get."""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import settings as Settings  # noqa: N812 - a class, whatever its case
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tinyllm.testing.check import run_machine, shortest
from tinyllm.testing.contract import Config, Factory
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.machine import LAYERS, WIDE, CacheMachine, MachineRun, configs, shard, starts
from tinyllm.testing.profiles import profile
from tinyllm.testing.reach import Meter, Reached
from tinyllm.testing.time_limit import beating, watch_over
from tinyllm.testing.trace import Op

BLOCKS = (2, 64)
SIZES = (1, 8)
large = st.builds(
    Config, st.integers(*BLOCKS), st.integers(*SIZES), st.sampled_from([*LAYERS, 5]), WIDE, WIDE
)
EVERY = 1.0  # seconds between two reports of progress


class TimeUp(BaseException):
    """The search has had its seconds."""


@dataclass
class Soaked:
    """What a search did: programs, their lines, what they reached, and the law that broke, if one did.

    `offers` are the capabilities and the extensions of the cache.
    """

    programs: int = 0
    lines: int = 0
    reached: Reached = field(default_factory=Counter)
    offers: frozenset[str] = frozenset()
    broken: LawBroken | None = None

    def add(self, more: "Soaked") -> None:
        """Count what another search did as well."""
        self.programs += more.programs
        self.lines += more.lines
        self.reached += more.reached
        self.offers |= more.offers
        self.broken = self.broken or more.broken


class Flight:
    """The program that is being run, in a file: what is known of it if it takes the process with it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, op: Op) -> None:
        """A line is about to be run."""
        with contextlib.suppress(OSError):  # a full disk is no fault of the cache
            if op.name == "new":
                os.ftruncate(self._file, 0)
            os.write(self._file, f"{op}\n".encode())


class SoakRun(MachineRun):
    """A run that is recorded and measured."""

    flight: ClassVar[Flight | None] = None
    pulse: ClassVar[Any] = staticmethod(lambda: None)

    def __init__(self, factory: Factory, broken: list[LawBroken] | None = None) -> None:
        super().__init__(factory, broken)
        self.meter = Meter()

    def _line(self, op: Op, expected: frozenset[str], price: int) -> None:
        if self.flight:
            self.flight.note(op)
        self.pulse()
        before = dict(self.oracle.tables)
        super()._line(op, expected, price)
        self.meter.note(op, before, self)


class SoakMachine(CacheMachine):
    """Random programs in tiny pools and in larger ones, on more sequences."""

    ids = range(8)
    runner = SoakRun
    soaked: ClassVar[Soaked]
    told: ClassVar[Any]
    run: SoakRun

    @initialize(start=st.one_of(configs, large).flatmap(starts), forked=st.sampled_from([True, True, False]))
    def new(self, start: tuple[Config, tuple[int, ...]], forked: bool) -> None:
        """As ever, but half of the pools are larger."""
        super().new(start, forked)

    def teardown(self) -> None:
        """Count the program, if it broke nothing; then leave, if the time is up."""
        super().teardown()
        if self.broken and self.broken[-1].beyond:  # `self.beyond` has it: the ten methods are searched on
            self.broken.clear()
        if not self.broken:
            run = self.run
            self.soaked.add(Soaked(1, len(run.ops), run.meter.reached(), run.offers | run.extends))
        self.told()


def soak(
    factory: Factory,
    seed: int,
    seconds: float,
    send: Callable[[Any], None] = lambda _: None,
    flight: Path | None = None,
) -> Soaked:
    """Run the machine for so many seconds, or until a law breaks.

    Args:
        factory: makes the cache.
        seed: which programs are drawn; the same ones in the same order, as far as the time allows.
        seconds: when to stop; a law that is broken is still shrunk then.
        send: told of progress about once a second with a `Soaked`, however slow the cache is, and of a
            `LawBroken` before it is shrunk; of a second one where the first showed in extensions alone.
        flight: a file that has, at every moment, the program that is being run.
    """
    ends = time.monotonic() + seconds
    last = [time.monotonic()]
    soaked = Soaked()

    class Recorded(SoakRun):
        pass

    def pulse() -> None:
        now = time.monotonic()
        if now - last[0] >= EVERY:
            last[0] = now
            send(Soaked(soaked.programs, soaked.lines, Counter(soaked.reached), soaked.offers))

    Recorded.flight = Flight(flight) if flight else None
    Recorded.pulse = staticmethod(pulse)

    def told() -> None:
        for name in ("beyond", "broken"):
            if (found := getattr(machine, name)) and name not in heard:
                heard.add(name)
                send(found[0])
        if time.monotonic() >= ends and "broken" not in heard:
            raise TimeUp

    heard: set[str] = set()
    body = {"runner": Recorded, "soaked": soaked, "told": staticmethod(told)}
    machine: Any = shard(type("SoakMachine", (SoakMachine,), body), seed, factory)
    settings = Settings(profile("deep"), max_examples=10**6)
    with beating(pulse):
        with contextlib.suppress(TimeUp):
            try:
                run_machine(factory, machine, settings)
            except LawBroken as broken:
                soaked.broken = broken
        if machine.beyond and not soaked.broken:
            with watch_over(factory):
                soaked.broken = shortest(factory, machine.beyond[0])
    return soaked
