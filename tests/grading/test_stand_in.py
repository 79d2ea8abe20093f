"""Bugs planted where the tests look: in place of a cache class of their own, wherever it is defined."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyllm.grading import bugs, stand_in
from tinyllm.grading.grade import Grader
from tinyllm.grading.locate import located
from tinyllm.grading.plant import PlantError
from tinyllm.grading.verdict import GradeError

PASS, WEAK, USAGE, BASELINE = range(4)
CACHE = """
from tinyllm.infer import paged

class OutOfBlocks(MemoryError):
    def __init__(self, seq):
        super().__init__(f"no block for {seq}")

class Cache:
    '''A cache of one's own, whatever it is made of.'''
    def __init__(self, *sizes): self.inner = paged.PagedKVCache(*sizes)
    def __getattr__(self, name): return getattr(self.inner, name)
    def append(self, seq, *rest):
        try:
            self.inner.append(seq, *rest)
        except paged.OutOfBlocks:
            raise OutOfBlocks(seq) from None
"""
TESTS = """
import numpy as np
import pytest
IMPORT

def cache_of_one():
    cache = Cache(1, 2, 1, 1, 1)
    cache.add_seq(0)
    cache.append(0, 0, np.ones((1, 1, 1)), np.ones((1, 1, 1)))
    return cache

def test_gather():
    assert cache_of_one().gather(0, 0)[0].shape == (1, 1, 1)

def test_refused():
    cache = cache_of_one()
    cache.append(0, 0, np.ones((1, 1, 1)), np.ones((1, 1, 1)))
    with pytest.raises(OutOfBlocks):
        cache.append(0, 0, np.ones((1, 1, 1)), np.ones((1, 1, 1)))
    assert cache.seq_len(0) == 2
"""
ROOT = "[pytest]\npythonpath = . lib\n"
BUGS = {bug.id: bug for bug in bugs.load_set("course") if bug.id in {"s02", "s10", "s03"}}
SHAPES = {
    "a file": ("mine.py:Cache", "from mine import Cache, OutOfBlocks", {"mine.py": CACHE}),
    "a file by its path": (
        "lib/mine.py:Cache",
        "import sys\nfrom tinyllm.testing import load\nCache = load('lib/mine.py:Cache')\n"
        "OutOfBlocks = sys.modules[Cache.__module__].OutOfBlocks",
        {"lib/mine.py": CACHE},
    ),
    "a package": (
        "engine.cache:Cache",
        "from engine.cache import Cache, OutOfBlocks",
        {"engine/__init__.py": "", "engine/cache.py": CACHE},
    ),
    "exported again": (
        "engine:Cache",
        "from engine import Cache, OutOfBlocks",
        {"engine/__init__.py": "from ._impl import Cache, OutOfBlocks", "engine/_impl.py": CACHE},
    ),
    "under another name": (
        "engine:Cache",
        "from engine import Cache\nfrom engine._impl import OutOfBlocks",
        {"engine/__init__.py": "from ._impl import K as Cache", "engine/_impl.py": CACHE + "K = Cache"},
    ),
    "a package's own file": (
        "engine:Cache",
        "from engine import Cache, OutOfBlocks",
        {"engine/__init__.py": CACHE},
    ),
    "src": (
        "engine.cache:Cache",
        "import sys; sys.path.insert(0, 'src')\nfrom engine.cache import Cache, OutOfBlocks",
        {"src/engine/__init__.py": "", "src/engine/cache.py": CACHE},
    ),
    "pytest's pythonpath": (
        "engine.cache:Cache",
        "from engine.cache import Cache, OutOfBlocks",
        {"lib/engine/__init__.py": "", "lib/engine/cache.py": CACHE},
    ),
    "a folder of its name that is no package": (
        "engine.cache:Cache",
        "from engine.cache import Cache, OutOfBlocks",
        {"engine/notes.txt": "", "lib/engine/__init__.py": "", "lib/engine/cache.py": CACHE},
    ),
    "a class within a class, its error elsewhere": (
        "engine.cache:Outer.Cache",
        "from engine.cache import Outer\nfrom engine.errors import OutOfBlocks\nCache = Outer.Cache",
        {
            "engine/__init__.py": "",
            "engine/errors.py": "class OutOfBlocks(OSError): pass",
            "engine/cache.py": CACHE.replace("class OutOfBlocks(MemoryError)", "class Unused(MemoryError)")
            .replace("    def __init__(self, seq):\n", "    def __init__(self, seq):  # of Unused\n")
            .replace("from tinyllm.infer ", "from .errors import OutOfBlocks\nfrom tinyllm.infer ")
            + "class Outer: Cache = Cache\nCache.__qualname__ = 'Outer.Cache'\n",
        },
    ),
    "the reference's own error": (
        "mine.py:Cache",
        "from mine import Cache\nfrom tinyllm.infer.paged import OutOfBlocks",
        {"mine.py": "from tinyllm.infer.paged import PagedKVCache\nclass Cache(PagedKVCache): pass\n"},
    ),
    "the reference": (
        "engine:PagedKVCache",
        "from engine import PagedKVCache as Cache, OutOfBlocks",
        {"engine.py": "from tinyllm.infer.paged import PagedKVCache, OutOfBlocks"},
    ),
}
Write = Callable[..., Path]


@pytest.fixture
def project(suite: Write, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Writes a project with tests, and is in it; `sys.path` is as it was in the end."""
    path = list(sys.path)

    def write(imports: str, files: dict[str, str], tests: str = TESTS) -> Path:
        own = {"pytest.ini": ROOT, "tests/test_it.py": tests.replace("IMPORT", imports)}
        root = suite({**own, **files}, "project")
        monkeypatch.chdir(root)
        return root

    yield write
    sys.path[:] = path


@pytest.mark.parametrize(("impl", "imports", "files"), SHAPES.values(), ids=SHAPES)
def test_bugs_are_planted_in_place_of_it(
    project: Callable[..., Path],
    kills: Callable[..., set[str]],
    impl: str,
    imports: str,
    files: dict[str, str],
) -> None:
    project(imports, files)
    assert kills(None, "s10", located(impl, ["tests"])) == {"test_refused"}


@pytest.mark.parametrize(
    ("impl", "imports", "files"),
    [
        pytest.param(*one, id=name, marks=() if name == "a file" else pytest.mark.long)
        for name, one in SHAPES.items()
    ],
)
def test_tests_of_it_are_graded(
    project: Callable[..., Path], impl: str, imports: str, files: dict[str, str]
) -> None:
    project(imports, files)
    target = located(impl, ["tests"])
    found = Grader(("tests",), target, list(BUGS.values()), jobs=2).grade(lambda *_: None)
    assert {result.bug.id: result.status for result in found.results} == {
        "s02": "killed",
        "s03": "survived",
        "s10": "killed",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def Cache(*sizes): pass", "Cache is a function that makes caches, not a class: "),
        (
            "def make():\n    class Cache: pass\n    return Cache\nCache = make()",
            "Cache is made as it runs: ",
        ),
        ("from array import array as Cache", "has no Python source, it is compiled: "),
        ("from builtins import dict as Cache", "has no Python source, it is built in builtins: "),
        ("1 / 0", "mine.py cannot be imported: ZeroDivisionError"),
        ("import os; os._exit(3)", "ended the process that imported it, saying "),
        ("a = 1", "mine.py defines no Cache; write mine.py:NAME if yours has another name"),
    ],
    ids=["a factory", "generated", "compiled", "built in", "broken", "ends", "nothing"],
)
def test_what_nothing_can_stand_in_for(project: Callable[..., Path], text: str, words: str) -> None:
    project("", {"mine.py": text})
    with pytest.raises(PlantError) as info:
        located("mine.py:Cache", ["tests"])
    assert words in str(info.value)


def refusal(project: Callable[..., Path], tests: str, cache: str = CACHE) -> GradeError:
    project("from mine import Cache, OutOfBlocks", {"mine.py": cache}, tests)
    with pytest.raises(GradeError) as info:
        Grader(("tests",), located("mine.py:Cache", ["tests"]), [BUGS["s02"]]).grade(lambda *_: None)
    return info.value


def test_tests_that_ask_for_more_than_the_contract(project: Callable[..., Path]) -> None:
    """They pass on the class as it is, so what they use beyond the contract is named."""
    more = TESTS + "\ndef test_more(): assert cache_of_one().inner\ndef test_no(): assert Cache.__getattr__"
    error = refusal(project, more)
    assert error.code == BASELINE
    said = str(error)
    assert "the tests pass on mine.py:Cache, but not on the reference in its place: they ask for more" in said
    assert "::test_more (call): AttributeError: 'Cache' object has no attribute 'inner'; " in said
    assert "::test_no (call): AttributeError: type object 'Cache' has no attribute '__getattr__'" in said


def test_tests_that_fail_on_the_class_as_it_is(project: Callable[..., Path]) -> None:
    error = refusal(project, TESTS + "\ndef test_red(): assert False")
    assert error.code == BASELINE
    assert "test_red (call): AssertionError; on mine.py:Cache as it is (seed " in str(error)


def test_tests_that_construct_another_class(project: Callable[..., Path]) -> None:
    error = refusal(project, "IMPORT\ndef test(): pass")
    assert error.code == USAGE
    assert str(error) == "no test constructs Cache of mine.py, where the bugs are planted"


def test_once_it_has_run_it_is_too_late(
    project: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = project("", {"sown_mine.py": "class Cache: pass"})
    target = located("sown_mine.py:Cache", [])
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setattr(stand_in, "_installed", [])
    importlib.import_module("sown_mine")
    try:
        with pytest.raises(PlantError, match="sown_mine was imported before its class could be replaced"):
            stand_in.install(target, lambda: None)
    finally:
        del sys.modules["sown_mine"]


def test_it_looks_like_the_class_that_it_stands_in_for(
    project: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And like itself after the first construction; a reload is replaced again; other files are not."""
    root = project("", {"sown_mine.py": CACHE, "other/sown_mine.py": "class Cache: pass"})
    target = located("sown_mine.py:Cache", [])
    told: list[int] = []
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setattr(stand_in, "_installed", [])
    stand_in.install(target, lambda: told.append(1))
    stand_in.install(target, lambda: told.append(2))
    mine: Any = importlib.import_module("sown_mine")
    try:
        cls = mine.Cache
        assert (cls.__module__, cls.__qualname__, cls.__doc__) == (
            "sown_mine",
            "Cache",
            "A cache of one's own, whatever it is made of.",
        )
        assert repr(cls(1, 1, 1, 1, 1)) == "<Cache: 1 of 1 blocks free, 0 sequences>"
        assert cls(1, 1, 1, 1, 1).describe()
        assert told == [1]
        assert importlib.reload(mine).Cache is not cls
    finally:
        del sys.modules["sown_mine"]
    monkeypatch.syspath_prepend(str(root / "other"))
    importlib.invalidate_caches()
    try:
        assert not hasattr(importlib.import_module("sown_mine").Cache, "describe")
    finally:
        del sys.modules["sown_mine"]
