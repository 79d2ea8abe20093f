"""The machine: seeds and shards, the subclass door, and how much its programs reach."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.contract import Config, Factory
from tinyllm.testing.forms import FORMS
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.machine import LIFE, WORD, CacheMachine, shard, state_machine_test
from tinyllm.testing.profiles import profile
from tinyllm.testing.scenes import SCENES, Start
from tinyllm.testing.trace import Op

Named = Callable[[str], Factory]
SOME = settings(profile("ci"), max_examples=8)
# A test that is to fail need not be shrunk, and how soon it fails is no matter.
MANY = settings(profile("ci"), max_examples=200, phases=[Phase.generate])


class Recorder(CacheMachine):
    """Keeps every program that it ran."""

    programs: list[str]

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.programs.append("".join(f"{op}\n" for op in self.run.ops))


def programs(seed: int, how: settings = SOME) -> list[str]:
    machine = shard(Recorder, seed)
    machine.programs = []
    run_state_machine_as_test(machine, settings=how)
    found: list[str] = machine.programs  # type: ignore[attr-defined]
    assert machine.search.programs == len(found)
    assert machine.search.lines == sum(program.count("\n") for program in found)
    return found


def test_shards_draw_other_programs_and_a_seed_the_same() -> None:
    one, other = programs(7), programs(8)
    assert one == programs(7)
    assert set(one) != set(other)
    assert len(set(one) & set(other)) < len(one) / 2


def test_the_seed_holds_where_settings_are_derandomized_as_under_ci() -> None:
    fixed = settings(SOME, derandomize=True, database=None)
    assert programs(7, fixed) == programs(7)
    assert programs(7, fixed) != programs(8, fixed)


def test_shards_count_and_fail_each_for_itself() -> None:
    one, other = shard(CacheMachine, 1), shard(CacheMachine, 2)
    assert one.search is not other.search
    assert CacheMachine.search not in {one.search, other.search}
    assert one.__name__ == "CacheMachine"


@pytest.fixture(scope="module")
def walked() -> list[list[str]]:
    return [program.splitlines() for program in programs(0, settings(profile("ci"), max_examples=160))]


def test_the_walk_reaches_every_move_form_and_refusal(walked: list[list[str]]) -> None:
    lines = [line for program in walked for line in program]
    words = Counter(line.split()[0] for line in lines)
    assert {"new", "add", "fork", "append", "free", "close", "table", "len", "gather"} <= words.keys()
    assert {line.split(" as ")[1].split()[0] for line in lines if " as " in line} == {
        name for name, form in FORMS.items() if form.drawn
    }
    refused = {line.split("! ")[1].split()[0] for line in lines if "! " in line}
    assert refused >= {"OutOfBlocks", "ValueError", "KeyError", "IndexError", "TypeError", "Exception"}
    assert any(len(line.split()) == 6 and "as" not in line.split() for line in lines)  # special values
    assert {word for line in lines for word in line.split() if word[0] not in "@-0123456789"} > {
        "boxed",
        "quiet",
    }
    long = [line.split() for line in lines if re.match("append [0-9]+ [0-9]+ 17 ", line)]
    assert any(max(map(len, words)) > 99 for words in long)  # of them, too
    assert any(str(WORD) in line.split() for line in lines)
    assert any("@" in line for line in lines)


def test_the_walk_is_what_faults_need(walked: list[list[str]]) -> None:
    """Several layers, sequences forked and ids used again in many programs, no program of nothing."""
    every = [Config(*map(int, program[0].split()[1:])) for program in walked if program]
    scenes = {start.config for start in SCENES}
    sizes = [size for size in every if size not in scenes]
    assert 0 < len(every) - len(sizes) < len(every) / 3
    assert sum(size.n_layers > 1 for size in sizes) > len(sizes) / 2
    assert sum(size.n_kv_heads > 1 and size.d_head > 1 for size in sizes) > len(sizes) / 3
    assert max(size.num_blocks for size in sizes) <= 9
    forked = [program for program in walked if any(line.startswith("fork") for line in program)]
    assert len(forked) > len(walked) / 3
    again = [program for program in walked if len([line for line in program if line == "add 0"]) > 1]
    assert again


def test_every_program_that_was_not_cut_short_ends_with_the_pool_used_again(walked: list[list[str]]) -> None:
    ended = [program for program in walked if program and program[-1] == "close"]
    assert len(ended) > len(walked) / 2
    for program in ended:
        blocks, size, layers = (int(word) for word in program[0].split()[1:4])
        assert program[-5:-1] == [
            "add 0",
            f"append 0 {layers - 1} {blocks * size}",
            f"append 0 0 {blocks * size + 1} ! OutOfBlocks",
            "free 0",
        ]


def test_a_subclass_overrides_one_method() -> None:
    made: list[Config] = []

    class Mine(CacheMachine):
        def make_cache(self, config: Config) -> Any:
            made.append(config)
            return PagedKVCache(*config)

    test = state_machine_test(Mine, settings(profile("ci"), max_examples=3))
    test("runTest").runTest()
    assert made
    assert all(type(config) is Config for config in made)
    assert test.settings.max_examples == 3


def test_a_subclass_with_a_wrong_cache_fails_with_the_story(named: Named) -> None:
    wrong: Any = named("s07")

    class Mine(CacheMachine):
        def make_cache(self, config: Config) -> Any:
            return wrong(*config)

    with pytest.raises(LawBroken) as caught:
        state_machine_test(shard(Mine, 0), MANY)("runTest").runTest()
    assert caught.value.law in {6, 7, 8, 9}  # written in place, seen at once or some lines later
    assert "  replay(factory, " in str(caught.value)


def test_the_capabilities_of_a_subclass_count(named: Named) -> None:
    inexact: Any = named("wrong_manners:WrongClass")

    class Strict(CacheMachine):
        def make_cache(self, config: Config) -> Any:
            return inexact(*config)

    class Lenient(Strict):
        capabilities = frozenset()

    state_machine_test(shard(Lenient, 0), SOME)("runTest").runTest()
    with pytest.raises(LawBroken, match="RuntimeError"):
        state_machine_test(shard(Strict, 0), MANY)("runTest").runTest()


def test_the_default_settings_are_the_profile_in_force() -> None:
    class Mine(CacheMachine):
        pass

    assert state_machine_test(Mine).settings.stateful_step_count >= 30


def test_an_invariant_alone_sees_what_its_step_did(named: Named) -> None:
    machine = shard(CacheMachine, 0, named("s07"))()
    machine.run.step(Op("new", (4, 2, 1, 1, 1)))
    machine.run.step(Op("add", (0,)))
    machine.run.step(Op("append", (0, 0, 1)))
    machine.fork(0, 1)
    machine.block_conservation()
    machine.parent_immutability()
    machine.append(1, 0, 1)
    with pytest.raises(LawBroken) as caught:
        machine.block_conservation()
    assert caught.value.law == 8
    assert machine.search.core is caught.value


def test_an_append_that_comes_again_on_top_is_one_line() -> None:
    machine = shard(CacheMachine, 0)()
    machine.new(Start(Config(99, 2, 1, 1, 1), (Op("add", (0,)), *[Op("append", (0, 0, 1))] * 40)), False)
    before = len(machine.run.ops)
    machine.append_again(0, False, "none", True)
    assert len(machine.run.ops) == before + 1
    machine.append_again(0, True, "none", True)
    assert len(machine.run.ops) == before + 1 + 2 + LIFE
