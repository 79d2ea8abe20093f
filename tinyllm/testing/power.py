"""How soon the machine alone finds what is wrong with a cache: its power, counted in programs and lines."""

import contextlib
from typing import Any, NamedTuple

from hypothesis import Phase, Verbosity
from hypothesis import settings as Settings  # noqa: N812 - a class, whatever its case
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from tinyllm.testing.contract import Factory
from tinyllm.testing.directed import DIRECTED
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.machine import CacheMachine, Search, shard
from tinyllm.testing.run import Run


class Found(NamedTuple):
    """A law broken, and what it took: programs (Hypothesis' examples), the last one included, and lines."""

    law: int
    programs: int
    lines: int


class _First(Search):
    """Keeps the first law that breaks, and what it took."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Found | None = None

    def broke(self, run: Run, broken: LawBroken) -> None:
        """The program under way counts, with its lines so far."""
        self.found = self.found or Found(broken.law, self.programs + 1, self.lines + len(run.ops))
        super().broke(run, broken)


def measure(factory: Factory, seed: int, settings: Settings) -> Found | None:
    """Run the machine until it finds a broken law, nothing shrunk; None when `settings` are through first."""
    machine, first = shard(CacheMachine, seed, factory), _First()
    machine.search = first
    plain = Settings(settings, phases=(Phase.generate,), verbosity=Verbosity.quiet, database=None)
    with contextlib.suppress(LawBroken, Flaky):
        run_state_machine_as_test(machine, settings=plain)
    return first.found


def directed(factory: Factory) -> str:
    """The name of the first directed case that finds a broken law; empty when none does."""
    for name, case in DIRECTED.items():
        try:
            case(factory)
        except LawBroken:
            return name
    return ""


def factory_of(source: str, path: str, module: str) -> Any:
    """The `PagedKVCache` of a module's text, run under that module's name and kept out of `sys.modules`."""
    scope: dict[str, Any] = {"__name__": module}
    exec(compile(source, path, "exec"), scope)  # noqa: S102 - the reference with a planted bug in it
    return scope["PagedKVCache"]
