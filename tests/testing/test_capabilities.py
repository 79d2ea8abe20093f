"""Caches that promise less pass for what they are, and are still caught where they are wrong."""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import Phase, settings

from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing import check as check_module
from tinyllm.testing.adapters.block_manager import shadow
from tinyllm.testing.catalogue import CATALOGUE
from tinyllm.testing.check import check_cache
from tinyllm.testing.contract import CAPABILITIES, EXTENSIONS, capabilities, extensions, stated
from tinyllm.testing.directed import DIRECTED
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.profiles import profile
from tinyllm.testing.run import replay
from tinyllm.testing.trace import NotOffered

EXAMPLES = Path(__file__).parents[2] / "examples"
MANAGER, CELLS = ("block_manager.py", "make"), ("cells.py", "CellCache")
FEW = settings(profile("ci"), max_examples=8, phases=[Phase.generate])
MANY = settings(FEW, max_examples=600)  # what is found late in one process may be found early in another
HOW_MANY = pytest.mark.parametrize(
    "how", [FEW, pytest.param(settings(FEW, max_examples=60), marks=pytest.mark.long)], ids=["few", "many"]
)


@pytest.fixture(autouse=True)
def _without_the_slowest_cases(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if not request.node.get_closest_marker("long"):
        request.getfixturevalue("quick")
    monkeypatch.setattr(check_module, "shorten", lambda _, broken: broken)  # elsewhere it is tested


def planted(file: str, name: str, *edits: tuple[str, str]) -> Any:
    """The example with each text replaced, which must stand there once."""
    source = (EXAMPLES / file).read_text(encoding="utf-8")
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    module = types.ModuleType(file.partition(".")[0])
    exec(compile(source, file, "exec"), module.__dict__)
    return getattr(module, name)


@HOW_MANY
@pytest.mark.parametrize(
    ("example", "lacks"),
    [
        (MANAGER, {"contents", "independent-layers", "exact-errors"}),
        (CELLS, {"independent-layers", "exact-cost", "block-tables", "counts"}),
    ],
    ids=["block_manager", "cells"],
)
def test_an_example_passes_and_what_it_lacks_is_reported(
    example: tuple[str, str], lacks: set[str], how: settings
) -> None:
    report = check_cache(planted(*example), settings=how)
    assert {line.partition(":")[0] for line in report.not_checked} >= lacks
    missing = [line for line in report.not_checked if line.partition(":")[0] in CAPABILITIES]
    assert len(missing) == len(lacks)
    assert len(report.checked) + len(report.not_checked) == len(CATALOGUE) + len(DIRECTED) + 1 + len(lacks)
    assert "machine: random programs" in report.checked


MANAGER_BUGS = {
    "a fork takes no references": ("            self.holders[block] += 1\n", "            pass\n"),
    "a shared block is written in place": ("copy = partial and self.holders[table[-1]] > 1", "copy = False"),
    "it copies a block that is its own": ("partial and self.holders[table[-1]] > 1", "partial"),
    "copies are not reported": ("return copies", "return []"),
    "the old block keeps its holder": (
        "            self.holders[table[-1]] -= 1\n            table",
        "            table",
    ),
    "free ignores other holders": (
        "            self.holders[block] -= 1\n            if",
        "            self.holders[block] = 0\n            if",
    ),
    "free leaks": ("                self.free_ids.append(block)", "                pass"),
    "copies are not counted": ("if copy + new > len(self.free_ids)", "if new > len(self.free_ids)"),
    "a refused append keeps what it took": (
        "            raise OutOfBlocks(f",
        "            table.extend(self.free_ids)\n            raise OutOfBlocks(f",
    ),
    "a block too early": (
        "-(-(start + tokens) // self.block_size) - len",
        "-(-(start + tokens + 1) // self.block_size) - len",
    ),
    "the length stays": ("        self.lens[seq_id] += tokens\n", ""),
    "a live id is taken": ("        if seq_id in self.tables:\n", "        if False:\n"),
}
CELL_BUGS = {
    "a fork misses the last cell": ("cells.of(parent):", "cells.of(parent)[:-1]:"),
    "free leaves the cells in use": ("            users.discard(seq_id)\n", "            pass\n"),
    "free empties cells that others use": ("users.discard(seq_id)", "users.clear()"),
    "positions start over": ("self.position[cell] = first + i", "self.position[cell] = i"),
    "a refused step keeps what it took": (
        "            raise OutOfBlocks(f",
        "            [self.users[c].add(seq) for c in free]\n            raise OutOfBlocks(f",
    ),
    "a view goes out": (
        "return cells.k[layer, mine].swapaxes(0, 1)",
        "return cells.k[layer, :len(mine)].swapaxes(0, 1)",
    ),
    "V is K": (
        "k.swapaxes(0, 1), v.swapaxes(0, 1)\n        lens",
        "k.swapaxes(0, 1), k.swapaxes(0, 1)\n        lens",
    ),
}


@pytest.mark.parametrize("bug", MANAGER_BUGS)
def test_a_bug_in_a_manager_of_ids_is_caught(bug: str) -> None:
    with pytest.raises(LawBroken) as caught:
        check_cache(planted(*MANAGER, MANAGER_BUGS[bug]), settings=MANY)
    assert caught.value.trace


@pytest.mark.parametrize("bug", CELL_BUGS)
def test_a_bug_in_a_pool_of_cells_is_caught(bug: str) -> None:
    with pytest.raises(LawBroken) as caught:
        check_cache(planted(*CELLS, CELL_BUGS[bug]), settings=MANY)
    assert caught.value.trace


EAGER = [
    (
        "self.tables[child], self.lens[child] = table, self.lens[parent]\n",
        """if self.lens[parent] % self.block_size and not self.free_ids:
            del self.tables[child], self.lens[child]
            raise OutOfBlocks
        self.tables[child], self.lens[child] = table, self.lens[parent]
        if self.lens[parent] % self.block_size:
            table[-1] = self._take()
            self.holders[table[-1]] = 0
""",
    )
]


def test_a_fork_that_copies_at_once_passes_only_if_it_says_so() -> None:
    manager = planted("block_manager.py", "BlockManager", *EAGER)
    check_cache(shadow(manager, lacks=frozenset({"lazy-copy"})), settings=FEW)
    with pytest.raises(LawBroken) as caught:
        check_cache(shadow(manager), settings=MANY)
    assert caught.value.law == 7


class Cautious(PagedKVCache):
    """Keeps a block back, as engines do that fear to preempt."""

    def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
        kept = self._free.pop(0) if not self._closed and len(self._free) > 1 else None
        try:
            super().append(seq_id, layer, k, v)
        finally:
            if kept is not None:
                self._free.insert(0, kept)


def test_appends_refused_as_it_likes_pass_only_if_it_says_so() -> None:
    class Honest(Cautious):
        capabilities = frozenset(CAPABILITIES) - {"exact-cost"}

    check_cache(Honest, settings=FEW)
    with pytest.raises(LawBroken) as caught:
        check_cache(Cautious, settings=MANY)
    assert caught.value.law == 9


@HOW_MANY
@pytest.mark.parametrize("lacking", CAPABILITIES)
def test_the_reference_passes_whatever_it_is_said_to_lack(lacking: str, how: settings) -> None:
    class Less(PagedKVCache):
        capabilities = frozenset(CAPABILITIES) - {lacking}

    if lacking == "lazy-copy":  # which is no lack, but another behaviour
        with pytest.raises(LawBroken):
            check_cache(Less, settings=MANY)
    else:
        assert check_cache(Less, settings=how).not_checked[0].startswith(lacking)


def test_a_step_is_refused_at_its_first_layer_or_not_at_all() -> None:
    class Late(PagedKVCache):
        capabilities = frozenset(CAPABILITIES) - {"independent-layers", "exact-cost"}

        def append(self, seq_id: int, layer: int, k: Any, v: Any) -> None:
            if layer == 1 and self.seq_len(seq_id, 0) > 2:
                raise type("OutOfBlocks", (RuntimeError,), {})("too late")
            super().append(seq_id, layer, k, v)

    with pytest.raises(LawBroken) as caught:
        check_cache(Late, settings=MANY)
    assert caught.value.law == 9


@pytest.mark.parametrize(
    ("program", "lacking"),
    [
        ("new 4 2 2 1 1\nadd 0\nappend 0 1 1", "independent-layers"),
        ("new 4 2 2 1 1\nadd 0\nappend 0 0 1\nadd 1", "independent-layers"),
        ("new 4 2 2 1 1\nadd 0\nappend 0 0 1\nappend 0 1 2", "independent-layers"),
        ("new 4 2 2 1 1\nadd 0\nfork 0 1", "fork"),
        ("new 4 2 2 1 1\nadd 0\ntable 0", "block-tables"),
        ("new 4 2 2 1 1\nstats", "counts"),
    ],
)
def test_a_program_that_needs_more_is_not_run(program: str, lacking: str) -> None:
    class Less(PagedKVCache):
        capabilities = frozenset(CAPABILITIES) - {lacking}

    with pytest.raises(NotOffered, match=f"^{lacking}$"):
        replay(Less, program)


class Refuses(type):
    @property
    def capabilities(cls) -> Any:
        raise RuntimeError("not now")


class Unread(PagedKVCache, metaclass=Refuses):
    pass


def declaring(value: Any) -> Any:
    return type("Declares", (PagedKVCache,), {"capabilities": value})


WRONG: dict[str, tuple[Any, str]] = {
    "a str": (declaring("fork"), "capabilities is 'fork' (str); it must be a set of names, of "),
    "None": (declaring(None), "capabilities is None (NoneType); it must be a set of names, of "),
    "a number": (declaring(3), "capabilities is 3 (int); "),
    "a dict": (declaring({"fork": True}), "capabilities is {'fork': True} (dict); "),
    "a generator": (declaring(name for name in ["fork"]), "(generator); "),
    "a property": (declaring(property(lambda _: {"fork"})), "(property); "),
    "a method": (declaring(lambda _: {"fork"}), "(function); "),
    "an unknown name": (declaring({"nope"}), "capabilities has 'nope'; it must be a set of names, of "),
    "no name": (declaring(["fork", 3, None]), "capabilities has 3; "),
    "a list in a list": (declaring([["fork"]]), "capabilities has ['fork']; "),
    "one that raises": (Unread, "capabilities cannot be read (RuntimeError: not now); "),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_set_of_names_is_named(name: str) -> None:
    factory, said = WRONG[name]
    with pytest.raises(ValueError, match="block-tables, contents, counts, exact-cost") as caught:
        capabilities(factory)
    assert said in str(caught.value)
    with pytest.raises(ValueError, match=r"^capabilities "):
        replay(factory, "new 1 1 1 1 1\n")


@pytest.mark.parametrize("kind", [set, frozenset, list, tuple])
def test_names_in_any_collection_will_do(kind: Any) -> None:
    assert capabilities(declaring(kind(["fork", "counts"]))) == {"fork", "counts"}


TEN = (
    "add_seq",
    "fork",
    "append",
    "block_table",
    "seq_len",
    "gather",
    "free",
    "stats",
    "num_free_blocks",
    "close",
)


class Forwards:
    def __init__(self, *sizes: int) -> None:
        self._right = PagedKVCache(*sizes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)


class AnswersAnyName(Forwards):
    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name) if name in TEN else lambda *_: None


class AnswersAnyNameAndNeeds(AnswersAnyName):
    def blocks_needed(self, *args: int) -> int:
        return self._right.blocks_needed(*args)


def mocked(*sizes: int) -> Any:
    return Mock(wraps=PagedKVCache(*sizes))


STUBS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "any name": (AnswersAnyName, set()),
    "any name, and one of its own": (AnswersAnyNameAndNeeds, {"blocks_needed"}),
    "a proxy": (Forwards, set(EXTENSIONS)),
    "a mock around a cache": (mocked, set(EXTENSIONS)),
    "a factory that answers any name": (Mock(side_effect=AnswersAnyName), set()),
}


@pytest.mark.parametrize("name", STUBS)
def test_a_method_counts_as_offered_when_somebody_wrote_it(name: str) -> None:
    factory, offered = STUBS[name]
    assert extensions(factory(4, 2, 1, 1, 1)) == offered
    assert capabilities(factory) == set(CAPABILITIES)
    run = replay(factory, "new 4 2 1 1 1\nadd 0\nappend 0 0 3\nfork 0 1\nappend 1 0 1\n")
    assert run.offers == offered | set(CAPABILITIES)


def test_an_attribute_is_stated_or_it_is_not() -> None:
    mock = Mock()
    assert stated(mock, "patience", 3) == 3
    mock.patience = 9
    assert stated(mock, "patience", 3) == 9
    assert stated(mock.method, "__self__", None) is None
