"""Caches behind a pipe: what goes over the wire, engines that speak badly, and that no process is left.

The engine in Python is always there; the one in Rust wherever there is a compiler for it.
"""

import contextlib
import functools
import gc
import math
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from tinyllm.grading.bugs import load_set
from tinyllm.infer import paged
from tinyllm.testing.adapters import subprocess_cache
from tinyllm.testing.adapters.loading import ImplementationError, load
from tinyllm.testing.adapters.subprocess_cache import CARRIED, Engine, EngineError, _Cache
from tinyllm.testing.catalogue import CATALOGUE
from tinyllm.testing.check import check_cache
from tinyllm.testing.contract import CAPABILITIES, extensions
from tinyllm.testing.directed import DIRECTED
from tinyllm.testing.forms import SPECIAL
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.profiles import profile
from tinyllm.testing.run import replay
from tinyllm.testing.trace import NotOffered

Breaks = Callable[[Callable[[], object]], LawBroken]
Command = Callable[..., list[str]]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NAMES = ["python", *(["rust"] if shutil.which("rustc") else [])]
ONE = [pytest.param("python", marks=pytest.mark.long) if "rust" in NAMES else "python", *NAMES[1:]]
"""One engine is enough for every day, where it takes long."""
FEW = settings(profile("ci"), max_examples=10)
LATE = 1.0  # seconds for an answer, where none will come

SMALL = "new 4 2 2 1 1\nadd 0\nappend 0 0 3\nfork 0 1\nappend 1 1 1\nfree 0\nappend 1 0 2\nfree 1\n"

LAWS_BROKEN = {  # switch of the Rust engine: the same bug in the reference, and the laws that say so
    "no-refs": ("s06", {6, 7, 8}),
    "in-place": ("s07", {7, 8}),
    "tail-only": ("w01", {7, 8}),
    "leak": ("s09", {6}),
    "eager": ("s01", {2}),
    "partial": ("s11", {10}),
    "whole-blocks": ("s02", {3}),
    "k-into-v": ("s04", {3}),
}
BEYOND = {"copies-free": ("e08", 16), "kept-tail": ("e02", 17), "full-pages": ("e06", 18)}
"""The same beyond the ten methods."""


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The words that start an engine, `python` or `rust`; `bug` is one of LAWS_BROKEN or BEYOND."""

    @functools.cache
    def built() -> str:
        path = tmp_path_factory.mktemp("rust") / "engine"
        source = ROOT / "examples" / "rust" / "engine.rs"
        subprocess.run(["rustc", "-D", "warnings", "-O", str(source), "-o", str(path)], check=True)
        return str(path)

    @functools.cache
    def planted(bug: str) -> str:
        (found,) = [one for one in load_set("all") if one.id == {**LAWS_BROKEN, **BEYOND}[bug][0]]
        path = tmp_path_factory.mktemp("planted") / f"{found.id}.py"
        path.write_text(found.apply(Path(paged.__file__).read_text(encoding="utf-8")), encoding="utf-8")
        return str(path)

    def words(name: str, *options: str, bug: str = "") -> list[str]:
        if name == "rust":
            return [built(), *(["--bug", bug] if bug else []), *options]
        return [
            sys.executable,
            str(HERE / "pipe_engine.py"),
            *(["--cache", planted(bug)] if bug else []),
            *options,
        ]

    return words


@pytest.fixture(autouse=True)
def _none_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every process that was started is gone when its engine is."""
    started: list[int] = []
    loaded: list[Any] = []  # `load` keeps what it returned, to name it in stories
    start = subprocess_cache._Process.__init__

    def noted(self: Any, words: Any) -> None:
        start(self, words)
        started.extend((self._popen.pid, self._guard.pid))

    monkeypatch.setattr(subprocess_cache._Process, "__init__", noted)
    monkeypatch.setattr("tinyllm.testing.adapters.loading._loaded", loaded)
    yield
    loaded.clear()
    if any(map(is_there, started)):
        gc.collect()  # tracebacks
    assert [pid for pid in started if is_there(pid)] == []


def is_there(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that were sent, as they come."""
    requests: list[str] = []
    ask = subprocess_cache._Process.ask

    def noted(self: Any, request: str, timeout: float) -> str:
        requests.append(request)
        return ask(self, request, timeout)

    monkeypatch.setattr(subprocess_cache._Process, "ask", noted)
    return requests


def exec_of(words: list[str]) -> str:
    return f"exec:{shlex.join(words)}"


def hostile(bug: str, *options: str) -> list[str]:
    return [sys.executable, "-S", "-E", str(HERE / "hostile_engine.py"), bug, *options]


def saying(answer: str) -> list[str]:
    """An engine that answers its third request, the first after `hello` and `new`, with that line."""
    return ["sh", "-c", 'read a; echo ok; read b; echo ok; read c; echo "$0"; cat >/dev/null', answer]


def pid_of(cache: Any) -> int:
    return int(cache._process._popen.pid)


# Right engines, and engines with a bug.


@pytest.mark.usefixtures("quick")  # the others ask some 100,000 times
@pytest.mark.parametrize("name", ONE)
def test_a_right_engine_passes(name: str, command: Command) -> None:
    factory: Any = load(exec_of(command(name)))
    report = check_cache(factory, settings=FEW)
    factory.close()  # Hypothesis keeps the machine
    assert report.not_checked == ()
    assert len(report.checked) == len(CATALOGUE) + len(DIRECTED) + 1
    assert report.programs >= 10


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("bug", LAWS_BROKEN)
@pytest.mark.parametrize("name", ONE)
def test_an_engine_with_a_bug_is_caught(name: str, bug: str, command: Command, breaks: Breaks) -> None:
    factory = load(exec_of(command(name, bug=bug)))
    broken = breaks(lambda: check_cache(factory, settings=profile("ci")))
    assert broken.law in LAWS_BROKEN[bug][1], str(broken)
    assert "EngineError" not in str(broken)
    breaks(lambda: replay(factory, broken.trace))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("bug", ["garbage", "hang", "crash", "twice"])
@pytest.mark.parametrize("name", ONE)
def test_an_engine_that_breaks_the_protocol_is_caught(
    name: str, bug: str, command: Command, breaks: Breaks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyllm.testing.shrink.WORK", 0)  # each program would cost a process
    factory = Engine(command(name, "--bug", bug, "--after", "30"), timeout=LATE)
    broken = breaks(lambda: check_cache(factory, settings=FEW))
    assert re.search(r"EngineError: (this cache is gone: )?to '", broken.found)
    assert broken.trace


def test_a_story_can_be_pasted(
    command: Command, breaks: Breaks, run_story: Callable[[str], subprocess.CompletedProcess[str]]
) -> None:
    impl = exec_of(command("python", bug="whole-blocks"))
    broken = breaks(lambda: replay(load(impl), "new 4 2 1 1 1\nadd 0\nappend 0 0 1\n"))
    assert f"factory = load({impl!r})" in str(broken)
    ran = run_story(str(broken))
    assert ran.returncode == 1
    assert "LawBroken: law 3, contents" in ran.stderr


def test_an_engine_offers_what_it_says(command: Command) -> None:
    for offers in ("", "exact-errors", "counts exact-errors"):
        factory = Engine(command("python", "--offers", offers))
        assert factory.capabilities == frozenset(offers.split())
        replay(factory, "new 4 2 1 1 1\nadd 0\nappend 0 0 3\n")
    for name in NAMES:
        engine = Engine(command(name))
        assert engine.capabilities == frozenset(CAPABILITIES)
        assert extensions(engine(1, 1, 1, 1, 1)) == engine.extends == CARRIED


@pytest.mark.parametrize("bug", BEYOND)
@pytest.mark.parametrize("name", ONE)
def test_an_engine_with_a_bug_beyond_the_ten_methods(
    name: str, bug: str, command: Command, breaks: Breaks
) -> None:
    text = "new 8 2 1 1 1\nadd 0\nappend 0 0 3\nadd 1\nappend 1 0 2\nfork 0 2\nappend 2 0 1\ntruncate 1 0\n"
    replay(load(exec_of(command(name))), text)
    assert breaks(lambda: replay(load(exec_of(command(name, bug=bug))), text)).law == BEYOND[bug][1]


def test_an_engine_is_held_to_the_extensions_that_it_names(
    command: Command, breaks: Breaks, sent: list[str]
) -> None:
    """A wrong page table is law 18 for who names `page_table`, and is not asked for otherwise."""
    wrong = command("python", bug="full-pages")
    text = "new 4 2 1 1 1\nadd 0\nappend 0 0 2\n"
    assert breaks(lambda: replay(load(exec_of(wrong)), text)).law == 18
    sent.clear()
    offers = " ".join({*CAPABILITIES, "check"})
    replay(load(exec_of([*wrong, "--offers", offers])), text)
    assert {request.split()[0] for request in sent} >= {"check", "gather"}
    assert not {"pages", "needed", "truncate"} & {request.split()[0] for request in sent}
    with pytest.raises(NotOffered, match="truncate"):
        replay(load(exec_of([*wrong, "--offers", offers])), f"{text}truncate 0 1\n")


@pytest.mark.parametrize("answer", ["ok 0 1", "ok 0 1 0 x", "ok", "ok 0 1 0 9999999999 1"])
def test_an_answer_that_is_no_page_table(answer: str) -> None:
    cache = Engine(saying(answer))(4, 2, 1, 1, 1)
    with pytest.raises(EngineError, match=f"to 'pages 0 5' the engine answered 'ok' and .*{answer[3:]}"):
        _Cache.page_table(cache, [5], 0)


def test_what_check_says_names_the_law(breaks: Breaks, tmp_path: Path) -> None:
    """An engine whose books disagree, and that says so: the law that it names is the one broken."""
    says = tmp_path / "says.py"
    says.write_text(
        "from tinyllm.infer.paged import PagedKVCache as Right\n"
        "class PagedKVCache(Right):\n"
        "    def check(self): raise AssertionError('law 5: one block is missing')\n"
    )
    engine = [sys.executable, str(HERE / "pipe_engine.py"), "--cache", str(says)]
    broken = breaks(lambda: replay(load(exec_of(engine)), "new 1 1 1 1 1\nadd 0\n"))
    assert (broken.law, broken.name) == (5, "books")


# The protocol, without the kit.


def converse(words: list[str], requests: list[str]) -> list[str]:
    text = "".join(f"{one}\n" for one in requests)
    ran = subprocess.run(words, input=text, capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    return ran.stdout.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_the_session_of_the_docs(name: str, command: Command) -> None:
    docs = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    requests, answers = (re.findall(rf"^{mark} (.*)$", docs, re.MULTILINE) for mark in "><")
    assert len(requests) == len(answers) > 10

    def without_text(lines: list[str]) -> list[str]:
        return [" ".join(line.split()[:2]) if line.startswith("error") else line for line in lines]

    assert without_text(converse(command(name), requests)) == without_text(answers)


@pytest.mark.parametrize("name", NAMES)
def test_one_line_for_each_line_whatever_it_says(name: str, command: Command) -> None:
    odd = ["", "  ", "hum", "add", "add 1 2", "new", "new 1 1 1 1", "append 0 0 1", "hello you", "stats 1"]
    odd += ["append 0 0 1 zz 00", "append 0 0 1 0 0", "append 0 0 1 000000 -", "add x", "add 1e3", "ä 1"]
    odd += ["append 0 0 99999999999999999999 - -", "new 99999999999999999999 1 1 1 1", "len 0 9999999999"]
    odd += ["new 2000000000 2000000000 2000000000 2000000000 2"]
    before = ["new 4 2 1 1 1", "add 0", "append 0 0 1 0000803f 00000040"]
    answers = converse(command(name), [*before, *odd, "gather 0 0", "stats"])
    assert answers[:3] == ["ok"] * 3
    assert all(re.match(r"error \w+", answer) for answer in answers[3:-2]), answers
    assert answers[-2:] == ["ok 1 003c 0040", "ok 3 1 0 0"]
    assert len(answers) == len(before) + len(odd) + 2


@pytest.mark.parametrize("name", NAMES)
def test_values_are_rounded_once_to_the_nearest_even(name: str, command: Command) -> None:
    """Each float16, what lies half-way to the next one, and the float32 on either side of that."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = ((halves[:-1].astype(np.float64) + halves[1:]) / 2).astype(np.float32)
    edge = np.array([65504, 65519.996, 65520, 65536, 3e38, 1e-45, 2**-25, np.inf, np.nan, 0], np.float32)
    up, down = (np.nextafter(middles, np.float32(to)) for to in (np.inf, 0))
    k = np.concatenate([halves, middles, up, down, edge])[None, :, None]
    cache = Engine(command(name))(1, k.size, 1, 1, 1)
    cache.add_seq(0)
    cache.append(0, 0, k, -k)
    with np.errstate(over="ignore"):
        expected = k.astype(np.float16)
    for found, right in zip(cache.gather(0, 0), (expected, -expected), strict=True):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(right))
        same = found.view(np.uint16) == right.view(np.uint16)
        assert (same | np.isnan(right)).all()


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_ends_with_its_input(name: str, command: Command) -> None:
    assert converse(command(name), []) == []


def test_the_rust_engine_lists_its_bugs(command: Command) -> None:
    for name in NAMES[1:]:
        ran = subprocess.run([*command(name), "--help"], capture_output=True, text=True, check=True)
        listed = re.findall(r"^ {6}([a-z-]+) ", ran.stdout, re.MULTILINE)
        assert listed == [*LAWS_BROKEN, *BEYOND, "garbage", "hang", "crash", "twice"]
        wrong = subprocess.run([*command(name), "--bug", "none"], capture_output=True, check=False)
        assert wrong.returncode == 2


# What the proxy sends, and what it makes of an answer.


def test_each_method_is_a_request(command: Command, sent: list[str]) -> None:
    cache = Engine(command("python"))(4, np.int8(2), 1, 1, 1)
    k = np.array([[[1.0], [2.0]]], np.float32)
    cache.add_seq(np.int64(5))  # type: ignore[arg-type]
    cache.append(5, 0, k, -k)
    cache.fork(5, 6)
    assert cache.seq_len(5) == 2
    table = cache.block_table(6)
    assert table.dtype == np.int32
    assert table.shape == (1,)
    for one in cache.gather(6, 0):
        assert one.dtype == np.float16
        assert one.shape == (1, 2, 1)
        assert one.flags.writeable
    assert cache.stats() == {"free": 3, "used": 1, "cached": 0, "evictions": 0}
    assert cache.num_free_blocks() == 3
    cache.free(5)
    cache.close()
    assert sent == [
        *("hello", "new 4 2 1 1 1", "add 5", "append 5 0 2 0000803f00000040 000080bf000000c0", "fork 5 6"),
        *("len 5 0", "table 6", "gather 6 0", "stats", "freeblocks", "free 5", "close"),
    ]


def test_what_is_not_float32_is_rounded_once_before_it_is_sent(command: Command, sent: list[str]) -> None:
    """Rounded to float32 first, the value lies half-way between two float16, and goes to the even one."""
    value = 1 + 2.0**-11 + 2.0**-40
    assert np.float16(np.float32(value)) != np.float16(value)
    cache = Engine(command("python"))(9, 2, 1, 1, 1)
    cache.add_seq(0)
    given = [
        [[[value]]],
        np.full((1, 1, 1), 70000),
        np.full((1, 1, 1), 1e300),
        np.full((1, 1, 1), 0.1, ">f4"),
    ]
    for chunk in given:
        cache.append(0, 0, chunk, chunk)
    with np.errstate(over="ignore"):
        expected = [np.float16(value), np.float16(70000.0), np.float16(1e300), np.float16(0.1)]
    assert cache.gather(0, 0)[0].ravel().tolist() == [float(one) for one in expected]
    assert sent[3] == "append 0 0 1 0020803f 0020803f"


def test_special_float32_values_are_sent_as_they_are(command: Command, sent: list[str]) -> None:
    cache = Engine(command("python"))(9, 20, 1, 1, 1)
    cache.add_seq(0)
    values = np.array(SPECIAL, np.float32)[None, :, None]
    cache.append(0, 0, values, values)
    assert sent[-1].split()[4] == values.astype("<f4").tobytes().hex()


SHAPES = {  # of K and V, where [2, T, 3] is due: what the engine is asked, or None
    ((2, 0, 3), (2, 0, 3)): "append 0 0 0 - -",
    ((4, 1, 3), (4, 1, 3)): "append 0 0 1",
    ((2, 1, 6), (2, 1, 6)): "append 0 0 1",
    ((1, 1, 3), (2, 1, 3)): "append 0 0 1",
    ((2, 1, 3), (2, 2, 3)): "append 0 0 1",
    ((0, 1, 3), (0, 1, 3)): "append 0 0 1 - -",
    ((3, 1, 2), (3, 1, 2)): None,
    ((2, 3, 3), (2, 3, 3)[::-1]): None,
    ((6, 1, 1), (2, 1, 3)): None,
    ((2, 3), (2, 3)): None,
    ((1, 2, 1, 3), (1, 2, 1, 3)): None,
    ((), ()): None,
}
SHAPES[(2, 2, 3), (3, 2, 2)] = None


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", ONE)
def test_a_wrong_shape_is_the_engine_s_to_refuse_where_it_can_see_it(
    name: str, shapes: tuple[Any, Any], command: Command, sent: list[str]
) -> None:
    cache = Engine(command(name))(4, 2, 1, 2, 3)
    cache.add_seq(0)
    with pytest.raises(ValueError, match=r"."):
        cache.append(0, 0, *(np.ones(shape, np.float32) for shape in shapes))
    asked = SHAPES[shapes]
    assert sent[-1].startswith(asked or "add 0")
    assert cache.stats()["free"] == 4


@pytest.mark.parametrize("dtype", ["bool", "complex64", "object", "str", "datetime64[s]"])
def test_arrays_that_no_line_can_carry_are_refused_here(
    dtype: str, command: Command, sent: list[str]
) -> None:
    cache = Engine(command("python"))(4, 2, 1, 1, 1)
    cache.add_seq(0)
    with pytest.raises(TypeError, match="must hold integers or floats"):
        cache.append(0, 0, np.ones((1, 1, 1)), np.zeros((1, 1, 1), dtype))
    assert sent[-1] == "add 0"


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_not_whole_are_the_engine_s_to_refuse(
    name: str, command: Command, sent: list[str]
) -> None:
    factory = Engine(command(name))
    cache = factory(4, 2, 1, 1, 1)
    for value in (0.5, 2.0, np.float32(1.5), math.nan, 1e30):
        with pytest.raises(TypeError):
            cache.add_seq(value)  # type: ignore[arg-type]
        assert sent[-1] == f"add {float(value)}"
    with pytest.raises(TypeError):
        factory(4, 2.5, 1, 1, 1)
    for other in (None, "0", "0 1", [1], np.ones(2)):
        with pytest.raises(TypeError, match="must be an integer"):
            cache.add_seq(other)  # type: ignore[arg-type]
    assert sent[-1] == "new 4 2.5 1 1 1"
    cache.add_seq(True)
    assert sent[-1] == "add 1"


ERRORS = {
    "error ValueError bad": (ValueError, r"^bad$"),
    "error KeyError bad": (KeyError, r"bad"),
    "error IndexError": (IndexError, r"^$"),
    "error TypeError a  b": (TypeError, r"^a b$"),
    "error OutOfBlocks none left": (RuntimeError, r"^none left$"),
}


@pytest.mark.parametrize("line", ERRORS)
def test_an_error_is_known_by_its_name(line: str) -> None:
    kind, text = ERRORS[line]
    factory = Engine(saying(line))
    classes = set()
    for _ in range(2):
        cache = factory(4, 2, 1, 1, 1)
        with pytest.raises(kind, match=text) as caught:
            cache.seq_len(0)
        classes.add(caught.type)
        assert not factory._alive[0].gone  # a refusal is an answer
        factory.close()
    (one,) = classes
    assert one.__name__ == line.split()[1]
    assert not issubclass(one, EngineError)


BAD_ANSWERS = {
    "add=ok 3": "where 0 integers are due",
    "add=okay": "neither 'ok ...' nor 'error NAME ...'",
    "add=error": "answered 'error': neither",
    "add=error 7up": "answered 'error 7up': neither",
    "add=": "answered '': neither",
    "len=ok": "where 1 integers are due",
    "len=ok 1.5": "where 1 integers are due",
    "len=ok 1_0": "where 1 integers are due",
    "len=ok 1 2": "where 1 integers are due",
    f"len=ok {'9' * 3000}": "where 1 integers are due",
    "freeblocks=ok many": "where 1 integers are due",
    "stats=ok 1 2 3": "where 4 integers are due",
    "table=ok 0 x": "where 2 integers are due",
    "table=ok 4294967296": "which int32 cannot hold",
    "gather=ok": "where 1 integers are due",
    "gather=ok 1": "which is not the hex of K and V, float16 [2, 1, 3]",
    "gather=ok 1 00 00": "which is not the hex",
    "gather=ok 1 zz zz": "which is not the hex",
    "gather=ok 0 -": "which is not the hex",
    "gather=ok 0 - - -": "which is not the hex",
    "gather=ok -1 - -": "which is not the hex",
    f"gather=ok 1 {'00' * 12} {'00' * 24}": "which is not the hex",
    f"gather=ok -1 {'00' * 12} {'00' * 12}": "which is not the hex",
}
ASK: dict[str, Callable[[Any], object]] = {
    "add": lambda cache: cache.add_seq(0),
    "len": lambda cache: cache.seq_len(0),
    "freeblocks": lambda cache: cache.num_free_blocks(),
    "stats": lambda cache: cache.stats(),
    "table": lambda cache: cache.block_table(0),
    "gather": lambda cache: cache.gather(0, 0),
}


@pytest.mark.parametrize("case", BAD_ANSWERS, ids=lambda case: case[:24])
def test_an_answer_to_another_question_is_none(case: str) -> None:
    name, _, answer = case.partition("=")
    factory = Engine(saying(answer))
    cache = factory(4, 2, 1, 2, 3)
    with pytest.raises(EngineError, match=re.escape(BAD_ANSWERS[case])) as caught:
        ASK[name](cache)
    assert len(str(caught.value)) < 1000
    factory(4, 2, 1, 2, 3)  # a fresh process makes it


def test_nothing_stored_is_an_empty_array(command: Command) -> None:
    cache = Engine(command("python"))(4, 2, 1, 2, 3)
    cache.add_seq(0)
    assert [one.shape for one in cache.gather(0, 0)] == [(2, 0, 3)] * 2
    assert cache.block_table(0).shape == (0,)


# Engines that speak badly.


HOSTILE = {
    "garbage": r"answered 'lorem ipsum': neither 'ok \.\.\.' nor 'error NAME \.\.\.'; it was still running",
    "nothing": r"answered '': neither",
    "nameless": r"answered 'error': neither",
    "misnamed": r"answered 'error 7up is no name': neither",
    "twice": r"answered with more than a line: b'ok\\nok\\n'; it was still running, and was killed",
    "binary": r"answered b'ok \\xff\\xfe', which is not UTF-8",
    "endless": r"does not end its answer; so far it said b'ok ok .*'\.\.\. \(\d+ long\); it was still",
    "part": r"gave no answer within 1 s; so far it said b'ok 1'; it was still running, and was killed",
    "hang": r"gave no answer within 1 s; it was still running, and was killed",
    "complains": r"gave no answer within 1 s; .*; its standard error ends:\n    .*so much to say so much",
    "crash": r"closed its output; it ended with status 1; its standard error ends:(\n.*)*Error: last words",
    "exit": r"closed its output; it ended with status 3$",
    "killed": r"closed its output; it ended by SIGKILL$",
    "mute": r"closed its output; it was still running, and was killed$",
}


@pytest.mark.parametrize("bug", HOSTILE)
def test_a_hostile_engine_is_told_in_words(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_cache, "HURRY", 1)
    factory = Engine(hostile(bug), timeout=LATE)
    for _ in range(2):  # the second time in a fresh process
        cache = factory(4, 2, 1, 1, 1)
        cache.add_seq(0)
        with pytest.raises(EngineError, match=f"^to 'stats' the engine {HOSTILE[bug]}") as first:
            cache.stats()
        assert len(str(first.value)) < 3000
        for call in (cache.stats, cache.close):
            with pytest.raises(EngineError, match=r"^this cache is gone: to 'stats' the engine "):
                call()


def test_what_was_not_asked_for_is_found_at_the_next_request() -> None:
    factory = Engine(hostile("unasked"))
    cache = factory(4, 2, 1, 1, 1)
    cache.add_seq(0)
    cache.add_seq(1)
    (process,) = factory._alive
    said = select.poll()
    said.register(process._out, select.POLLIN)
    assert said.poll(60_000)
    with pytest.raises(EngineError, match=r"^to 'add 2' the engine had already said, unasked, b'by the way"):
        cache.add_seq(2)


def test_an_engine_that_is_deaf() -> None:
    cache = Engine(hostile("deaf"))(4, 2, 1, 1, 1)
    cache.add_seq(0)
    cache.close()  # answered; but nothing is read any more
    with pytest.raises(EngineError, match=r"^to 'close' the engine closed its input; it was still running"):
        cache.close()


MANY_ONES = np.ones((1, 400_000, 1), np.float32)  # megabytes of hex: no pipe holds them


def test_an_engine_that_stops_reading_blocks_nobody() -> None:
    cache = Engine(hostile("hang"), timeout=LATE)(400_000, 1, 1, 1, 1)
    cache.add_seq(0)
    with pytest.raises(
        EngineError, match=r"^to 'append 0 0 .*'\.\.\. \(\d{7} long\) the engine gave no answer"
    ):
        cache.append(0, 0, MANY_ONES, MANY_ONES)


def test_an_answer_before_the_end_of_the_request() -> None:
    words = "read a; echo ok; read b; echo ok; head -c 1 >/dev/null; echo early; sleep 600"
    cache = Engine(["sh", "-c", words])(400_000, 1, 1, 1, 1)
    with pytest.raises(EngineError, match=r"the engine answered before it was asked: b'early\\n'"):
        cache.append(0, 0, MANY_ONES, MANY_ONES)


@pytest.mark.parametrize("name", ONE)
def test_long_requests_and_answers_come_through(name: str, command: Command) -> None:
    cache = Engine(command(name))(400_000, 1, 1, 1, 1)
    cache.add_seq(0)
    cache.append(0, 0, MANY_ONES, -MANY_ONES)
    np.testing.assert_array_equal(cache.gather(0, 0)[1], -MANY_ONES)
    assert len(set(cache.block_table(0).tolist())) == 400_000


def test_an_engine_that_ends_between_two_caches(command: Command) -> None:
    factory = Engine(command("python"))
    factory(4, 2, 1, 1, 1)
    (process,) = factory._alive
    os.kill(process._popen.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process._popen.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(
        EngineError, match=r"^to 'new 4 2 1 1 1' the engine closed its .*; it ended by SIGKILL$"
    ):
        factory(4, 2, 1, 1, 1)
    assert factory(4, 2, 1, 1, 1).num_free_blocks() == 4


def test_much_on_standard_error_is_no_fault(command: Command) -> None:
    replay(Engine(command("python", "--noisy")), SMALL)


def test_after_a_wait_in_vain_the_kit_is_less_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_cache, "HURRY", 4)
    factory = Engine(hostile("hang", "--after", "2"), timeout=LATE)
    for seconds in ("1", r"0\.25"):
        cache = factory(4, 2, 1, 1, 1)
        with pytest.raises(EngineError, match=f"gave no answer within {seconds} s"):
            cache.add_seq(0)


def test_an_interrupted_request_ends_the_process(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    factory = Engine(command("python"))
    cache = factory(4, 2, 1, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess_cache._Process, "_write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.add_seq(0)
    with pytest.raises(EngineError, match=r"^this cache is gone: 'add 0' was interrupted$"):
        cache.add_seq(0)
    factory(4, 2, 1, 1, 1).add_seq(0)


# What is no engine.


NO_ENGINE = {
    "exec:": r"^exec: is followed by the command that starts an engine$",
    "exec:  ": r"^exec: is followed by the command that starts an engine$",
    "exec:'": r"^exec:': No closing quotation$",
    "exec:./no/such --fast": r"^'./no/such --fast' is no engine: it cannot be started: No such file or",
    "exec:cat": r"^'cat' is no engine: to 'hello' the engine answered 'hello': neither 'ok \.\.\.' nor",
    "exec:false": r"^'false' is no engine: to 'hello' the engine closed its \w+; it ended with status 1$",
    "exec:sh -c 'read a; echo sorry >&2; exit 4'": r"it ended with status 4; its .* ends:\n    sorry$",
    "exec:sh -c 'read a; echo ok protocol-2'": r"the engine speaks 'protocol-2'; this kit speaks",
    "exec:sh -c 'read a; echo ok protocol-x'": r"the engine speaks 'protocol-x'; this kit speaks",
    "exec:sleep 600": r"^'sleep 600' is no engine: to 'hello' the engine gave no answer within 0\.5 s",
}


@pytest.mark.parametrize("impl", NO_ENGINE)
def test_what_is_no_engine_is_refused_when_it_is_loaded(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if impl == "exec:sleep 600":
        monkeypatch.setattr(subprocess_cache, "START", 0.5)
        monkeypatch.setattr(Engine.__init__, "__defaults__", (0.5,))
    with pytest.raises(ImplementationError, match=NO_ENGINE[impl]):
        load(impl)


def test_an_engine_may_say_which_version_it_speaks() -> None:
    factory = load("exec:sh -c 'read a; echo ok fork protocol-1'")
    assert factory.capabilities == {"fork"}  # type: ignore[attr-defined]


def test_one_right_answer_makes_no_engine() -> None:
    with pytest.raises((ImplementationError, EngineError), match=r"the engine closed its"):
        load("exec:sh -c 'read a; echo ok'")(1, 1, 1, 1, 1)


def test_a_system_without_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(select, "poll")
    with pytest.raises(ImplementationError, match=r"which this system cannot poll$"):
        Engine(["cat"])


def test_a_command_that_is_there_only_once(tmp_path: Path) -> None:
    script = tmp_path / "engine"
    script.write_text(f"#!/bin/sh\nexec {shlex.join(hostile('exit', '--after', '2'))}\n")
    script.chmod(0o755)
    factory = Engine([str(script)])
    cache = factory(4, 2, 1, 1, 1)
    with pytest.raises(EngineError, match=r"status 3$"):
        cache.add_seq(0)
    script.unlink()
    with pytest.raises(EngineError, match=r"^it cannot be started: No such file or directory$"):
        factory(4, 2, 1, 1, 1)


# Processes.


def test_a_process_serves_one_cache_after_the_other(command: Command) -> None:
    factory = Engine(command("python"))
    pids = set()
    for _ in range(3):
        cache = factory(4, 2, 1, 1, 1)
        cache.add_seq(0)
        pids.add(pid_of(cache))
        del cache
    with pytest.raises(ValueError, match=r"num_blocks is 0"):
        factory(0, 2, 1, 1, 1)
    assert pids == {pid_of(factory(4, 2, 1, 1, 1))}


def test_caches_that_live_at_the_same_time_do_not_meet(command: Command) -> None:
    factory = Engine(command("python"))
    caches = [factory(4, 2, 1, 1, 1) for _ in range(3)]
    for i, cache in enumerate(caches):
        cache.add_seq(i)
    for i, cache in enumerate(caches):
        assert cache.seq_len(i) == 0
        with pytest.raises(KeyError):
            cache.seq_len(i + 1)
    assert len({pid_of(cache) for cache in caches}) == 3


def test_garbage_in_cycles_does_not_add_up() -> None:
    factory = Engine(hostile("hang", "--after", "100"))
    gc.collect()
    gc.disable()
    try:
        for _ in range(subprocess_cache.MANY + 3):
            cycle: list[Any] = [factory(4, 2, 1, 1, 1)]
            cycle.append(cycle)
            del cycle
    finally:
        gc.enable()
    assert len(factory._alive) <= subprocess_cache.MANY


def test_a_closed_engine_says_so(command: Command) -> None:
    factory = Engine(command("python"))
    cache = factory(4, 2, 1, 1, 1)
    factory.close()
    factory.close()
    with pytest.raises(EngineError, match=r"^this cache is gone: its engine was closed$"):
        cache.add_seq(0)


def test_a_fork_of_the_kit_ends_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = Engine(hostile("hang"))
    cache = factory(4, 2, 1, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        assert factory._alive[0].end() == ""
    cache.add_seq(0)


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[tuple[str, Callable[[], bool]]]:
    """A named pipe for an engine to hold open, and a function that waits until nobody does."""
    path = tmp_path / "alive"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def ended() -> bool:
        end = select.poll()
        end.register(reader, select.POLLIN)
        return bool(end.poll(60_000)) and os.read(reader, 1) == b""

    yield str(path), ended
    os.close(reader)


def test_an_engine_ends_when_its_factory_and_caches_are_gone(alive: tuple[str, Callable[[], bool]]) -> None:
    factory = Engine(hostile("hang", "--alive", alive[0]))
    cache = factory(4, 2, 1, 1, 1)
    del factory
    cache.add_seq(0)
    del cache
    assert alive[1]()


def test_what_an_engine_has_started_ends_with_it(alive: tuple[str, Callable[[], bool]]) -> None:
    words = shlex.join(hostile("hang", "--after", "2", "--alive", alive[0]))
    cache = Engine(["sh", "-c", f"{words}; true"], timeout=LATE)(4, 2, 1, 1, 1)
    with pytest.raises(EngineError, match=r"gave no answer"):
        cache.add_seq(0)
    assert alive[1]()


ENDS = {"returns": "", "raises": "1 / 0", "is killed": "os.kill(os.getpid(), signal.SIGKILL)"}


@pytest.mark.parametrize("how", ENDS)
def test_an_engine_ends_when_the_kit_does(how: str, alive: tuple[str, Callable[[], bool]]) -> None:
    """Also when it no longer reads its input, so that it cannot see the end of it."""
    program = f"""
import os, signal
from tinyllm.testing.adapters.subprocess_cache import Engine
cache = Engine({hostile("hang", "--after", "2", "--alive", alive[0])!r})(4, 2, 1, 1, 1)
os.write(cache._process._in, b"stats\\n")
{ENDS[how]}
"""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, check=False)
    assert ran.returncode == {"returns": 0, "raises": 1, "is killed": -signal.SIGKILL}[how]
    assert alive[1]()
