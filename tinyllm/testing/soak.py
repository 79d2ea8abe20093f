"""The machine for many hours: longer programs, larger pools, and an account of how far they get."""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import settings as Settings  # noqa: N812 - a class, whatever its case
from hypothesis import strategies as st

from tinyllm.testing.check import search, shortest
from tinyllm.testing.contract import Config, Factory
from tinyllm.testing.laws import Findings, LawBroken
from tinyllm.testing.machine import LAYERS, WIDE, CacheMachine, Search, configs, shard
from tinyllm.testing.profiles import profile
from tinyllm.testing.reach import Meter, Reached, Tables
from tinyllm.testing.run import Observer, Run
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


class Recorder(Observer):
    """Records, measures and counts the run of one program."""

    def __init__(self, search: "SoakSearch") -> None:
        self.meter = Meter()
        self._search = search
        self._before: Tables = {}

    def before(self, run: Run, op: Op) -> None:
        """The line is on record before it runs."""
        if self._search.flight:
            self._search.flight.note(op)
        self._search.pulse()
        self._before = dict(run.oracle.tables)

    def after(self, run: Run, op: Op) -> None:
        """What it reached."""
        self.meter.note(op, self._before, run)

    def broke(self, run: Run, broken: LawBroken) -> None:
        """The search keeps it."""
        self._search.broke(run, broken)


class SoakSearch(Search):
    """A search that tells of its progress, of each law when it first breaks, and ends with its time."""

    def __init__(self, seconds: float, send: Callable[[Any], None], flight: Flight | None) -> None:
        super().__init__(goes_on=True)
        self.soaked = Soaked()
        self.flight = flight
        self._up = time.monotonic() + seconds
        self._send = send
        self._sent = time.monotonic()
        self._heard: set[str] = set()

    def pulse(self) -> None:
        """Tell of the progress, about once a second."""
        now = time.monotonic()
        if now - self._sent >= EVERY:
            self._sent, did = now, self.soaked
            self._send(Soaked(did.programs, did.lines, Counter(did.reached), did.offers))

    def ended(self, run: Run, meter: Meter) -> None:
        """A program is through. Raises TimeUp."""
        if self.core is None:
            self.soaked.add(Soaked(1, len(run.ops), meter.reached(), run.offers))
        for name, broken in self.findings._asdict().items():
            if broken and not self._heard & {name, "core"}:
                self._heard.add(name)
                self._send(broken)
        if time.monotonic() >= self._up and "core" not in self._heard:
            raise TimeUp


class SoakMachine(CacheMachine):
    """Random programs in tiny pools and in larger ones, on more sequences."""

    ids = range(8)
    sizes = st.one_of(configs, large)
    search: SoakSearch  # type: ignore[misc]

    def observer(self) -> Observer:
        """A recorder of this program alone."""
        made = Recorder(self.search)
        self._recorder: Recorder = vars(self).setdefault("_recorder", made)  # of the program as it was drawn
        return made

    def teardown(self) -> None:
        """Count the program, if it broke nothing; then leave, if the time is up."""
        super().teardown()
        self.search.ended(self.run, self._recorder.meter)


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
    looking = SoakSearch(seconds, send, Flight(flight) if flight else None)
    machine = shard(SoakMachine, seed, factory)
    settings = Settings(profile("deep"), max_examples=10**6)
    found = Findings()
    with beating(looking.pulse):
        with contextlib.suppress(TimeUp):
            found = search(factory, machine, settings, looking=looking)
        if looking.extensions and not found.worst:
            with watch_over(factory):
                found = Findings(extensions=shortest(factory, looking.extensions))
    looking.soaked.broken = found.worst
    return looking.soaked
