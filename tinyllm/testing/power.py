"""How soon the machine alone finds what is wrong with a cache: its power, counted in programs and lines."""

from collections import Counter
from typing import Any, ClassVar, NamedTuple

from hypothesis import Phase, Verbosity
from hypothesis import settings as Settings  # noqa: N812 - a class, whatever its case
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from tinyllm.testing.contract import Factory
from tinyllm.testing.directed import DIRECTED
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.machine import CacheMachine, shard


class Found(NamedTuple):
    """A law broken, and what it took: programs (Hypothesis' examples), the last one included, and lines."""

    law: int
    programs: int
    lines: int


class _Measured(CacheMachine):
    found: ClassVar[list[Found]] = []
    tally: ClassVar[Counter[str]] = Counter()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if self.broken and not self.found:
                self.found.append(Found(self.broken[0].law, self.tally["programs"], self.tally["lines"]))


def measure(factory: Factory, seed: int, settings: Settings) -> Found | None:
    """Run the machine until it finds a broken law, nothing shrunk; None when `settings` are through first."""

    class Fresh(_Measured):
        found: ClassVar[list[Found]] = []

    plain = Settings(settings, phases=(Phase.generate,), verbosity=Verbosity.quiet, database=None)
    try:
        run_state_machine_as_test(shard(Fresh, seed, factory), settings=plain)
    except (LawBroken, Flaky):
        return Fresh.found[0]
    return None


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
