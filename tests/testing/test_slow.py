"""A right cache that is slow passes, and the report says how far its checks came; no time goes by here."""

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from tinyllm.cli.check import SILENCE
from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing import check, directed, machine, test_contract, time_limit
from tinyllm.testing.check import check_cache, checks, run_directed, run_machine
from tinyllm.testing.contract import Factory
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.profiles import profile
from tinyllm.testing.run import replay
from tinyllm.testing.shrink import shorten
from tinyllm.testing.time_limit import CutShort, beating, limited

FEW = settings(profile("ci"), max_examples=10)
CALL = 0.01
METHODS = (
    "add_seq",
    "fork",
    "append",
    "block_table",
    "seq_len",
    "gather",
    "free",
    "stats",
    "num_free_blocks",
)


class Clock:
    """Tells a time that goes on when a slow cache is called."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    for module in (time_limit, check, machine, directed):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    yield clock
    assert time_limit._due == float("inf"), "nothing is left to be minded"


@pytest.fixture
def slow(clock: Clock) -> Callable[[Any], Any]:
    """The same cache, slow: each of its calls takes ten milliseconds."""

    def slowed(right: Any) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            clock.now += CALL
            return right(*args, **more)

        return call

    def make(cls: Any) -> Any:
        body = {name: slowed(getattr(cls, name)) for name in METHODS}
        return type("Slow", (cls,), body)

    return make


def test_a_slow_cache_passes_and_is_never_silent(slow: Callable[[Any], Any], clock: Clock) -> None:
    heard = [0.0]
    with beating(lambda: heard.append(clock.now)):
        report = check_cache(slow(PagedKVCache), settings=FEW)
    cut = {
        line.partition(" cut short after ")[0] for line in report.not_checked if " cut short after " in line
    }
    assert {
        "catalogue: test_random_ops_conserve_blocks",
        "directed: 70,000 forks of one block",
        "machine: random programs",
    } <= cut
    assert "catalogue: test_hand_example_block_table" in report.checked
    assert 0 < report.programs < 10
    assert max(b - a for a, b in zip(heard, [*heard[1:], clock.now], strict=True)) < SILENCE
    assert clock.now < 600


def test_what_was_cut_is_told_with_what_a_call_costs(slow: Callable[[Any], Any]) -> None:
    told = {}
    for one in checks(slow(PagedKVCache), shard(CacheMachine, 0, slow(PagedKVCache)), FEW):
        if one.name in {"test_random_ops_conserve_blocks", "70,000 forks of one block"}:
            with pytest.raises(CutShort) as caught:
                one.run()
            told[one.name] = str(caught.value)
    assert re.fullmatch(
        r"cut short after 1,\d{3} calls in 20 s, 1\d\.\d ms each", told["test_random_ops_conserve_blocks"]
    ), told
    assert told["70,000 forks of one block"].endswith(" ms each")
    assert told["70,000 forks of one block"].startswith("cut short after ")


def test_forks_are_as_many_as_there_is_time_for(slow: Callable[[Any], Any]) -> None:
    made: list[int] = []

    class Counts(PagedKVCache):
        def fork(self, parent: int, child: int) -> None:
            made.append(child)
            super().fork(parent, child)

    with pytest.raises(CutShort, match=r"cut short after \d+ forks in \d+ s, "), limited(40.0):
        run_directed(slow(Counts), "70,000 forks of one block")
    assert 300 < max(made) < 2000
    made.clear()
    run_directed(Counts, "70,000 forks of one block")
    assert max(made) == 69_999


def test_a_wrong_cache_is_wrong_however_slow(
    slow: Callable[[Any], Any], named: Callable[[str], Factory]
) -> None:
    wrong = slow(named("s07"))
    with pytest.raises(LawBroken):
        check_cache(wrong, settings=FEW)


def test_what_is_found_late_is_told_as_short_as_there_is_time_for(
    slow: Callable[[Any], Any], named: Callable[[str], Factory], clock: Clock
) -> None:
    """Time is up while the program is made shorter, by Hypothesis and by us: it is told all the same."""
    wrong = slow(named("s07"))
    with pytest.raises(LawBroken) as caught, limited(60.0):
        run_machine(wrong, shard(CacheMachine, 1, wrong), FEW)
    assert caught.value.trace
    long = "new 4 2 1 1 1\nadd 0\n" + "add 1\nfree 1\n" * 400 + caught.value.trace
    with pytest.raises(LawBroken) as found:
        replay(wrong, long)
    before = clock.now
    assert shorten(wrong, found.value).law == found.value.law
    assert clock.now - before < 100


def test_the_kit_under_pytest_skips_what_it_cut(slow: Callable[[Any], Any]) -> None:
    with pytest.raises(pytest.skip.Exception, match="cut short after"):
        test_contract.test_catalogue("test_random_ops_conserve_blocks", slow(PagedKVCache))
