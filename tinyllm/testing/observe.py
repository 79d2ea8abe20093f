"""Look at a cache: everything that a caller can observe of it, with every answer checked for its kind."""

import contextlib
import copy
import marshal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyllm.testing.laws import JUNK, JUNK_BLOCK, LawBroken, Seen, View
from tinyllm.testing.oracle import Oracle
from tinyllm.testing.time_limit import CutShort, asked, watched

OVERWRITTEN = "what its caller wrote into an earlier one"
LAW_OF = {
    "new": 15,
    "add": 13,
    "fork": 7,
    "append": 9,
    "free": 6,
    "truncate": 17,
    "table": 1,
    "len": 4,
    "gather": 3,
    "stats": 5,
    "close": 14,
}
"""The law that a call breaks when it raises although nothing is wrong with it."""


COUNTS = ("free", "used", "cached", "evictions")
PLAIN = frozenset({int, float})
HALF = np.dtype(np.float16)
INT32 = np.dtype(np.int32)


@dataclass(slots=True)
class Answer:
    """What a call returned, and how the kit left it: nobody else may change it (law 12)."""

    call: str
    value: Any
    left: Any  # its `image`


def look(cache: Any, oracle: Oracle, offers: frozenset[str], answers: list[Answer]) -> View:
    """Everything observable of the live sequences, copied, as far as the cache offers it.

    `answers` are those of the last look, which must be as they were left; they make room for those of this
    look, which are overwritten at its end. Raises LawBroken for an answer of the wrong kind.
    """
    check_answers(answers)
    earlier = answers.copy()
    answers.clear()
    try:
        view = _view(cache, oracle, offers, answers)
    except LawBroken as broken:
        raise _overwritten(cache, oracle, offers) or broken from broken.__cause__
    check_answers(earlier)
    check_answers(answers)
    for answer in answers:
        if not answer.call.startswith("block_table"):
            scribble(answer.value, JUNK)
    for answer in answers:
        answer.left = image(answer.value)
    return view


def check_answers(answers: list[Answer]) -> None:
    """Law 12: what was returned earlier is the caller's own."""
    if [image(answer.value) for answer in answers] == [answer.left for answer in answers]:
        return
    for answer in answers:
        if image(answer.value) != answer.left:
            due = f"what {answer.call} returned stays as its caller left it"
            raise LawBroken(12, "answers", due, "it changed")


def _overwritten(cache: Any, oracle: Oracle, offers: frozenset[str]) -> LawBroken | None:
    """Law 12, where a table that its caller has overwritten is what made another call fail."""
    for seq in oracle.tables if "block-tables" in offers else ():
        table, _ = attempt(asked, cache, "block_table", (seq,))
        if isinstance(table, np.ndarray) and table.dtype == np.int32 and (table <= JUNK_BLOCK).any():
            return LawBroken(12, "table", f"block_table({seq}) is a copy", OVERWRITTEN)
    return None


def _view(cache: Any, oracle: Oracle, offers: frozenset[str], answers: list[Answer]) -> View:
    live = list(oracle.tables)
    layers = range(oracle.config.n_layers)
    tables = {seq: _table(cache, seq, oracle, answers) for seq in live} if "block-tables" in offers else {}
    lens = {seq: [_count(cache, "len", "seq_len", seq, layer) for layer in layers] for seq in live}
    with rounding_told():
        contents = {seq: [_gather(cache, seq, layer, answers) for layer in layers] for seq in live}
    if "counts" not in offers:
        return View(tables, lens, contents, {}, 0)
    stats = _ask(cache, "stats", "stats")
    found = _counted(stats)
    if any(value is JUNK for value in found):
        raise LawBroken(12, "stats", "stats() is a copy", OVERWRITTEN)
    if not all(map(_is_count, found)):
        raise LawBroken(5, "stats", f"stats() counts {', '.join(COUNTS)}", shown(stats))
    counts = dict(zip(COUNTS, map(int, found), strict=True))
    if min(counts.values()) < 0:
        raise LawBroken(5, "stats", "counts of 0 or more", f"stats() == {shown(stats)}")
    answers.append(Answer("stats()", stats, image(stats)))
    return View(tables, lens, contents, counts, _count(cache, "stats", "num_free_blocks"))


def _ask(cache: Any, name: str, method: str, *args: int) -> Any:
    try:
        return asked(cache, method, args)
    except (KeyboardInterrupt, CutShort):
        raise
    except BaseException as error:
        raise failed(name, f"{method}({', '.join(map(str, args))})", error) from error


ROUNDS = frozenset({"append", "gather"})
"""The calls that handle values."""


def failed(name: str, call: str, error: BaseException) -> LawBroken:
    """The law that a call breaks by an error that it must not raise."""
    if isinstance(error, RuntimeWarning) and name in ROUNDS:
        return LawBroken(3, name, f"{call} gives no warning: rounding never does", named(error))
    return LawBroken(LAW_OF[name], name, f"{call} succeeds", named(error))


@contextlib.contextmanager
def rounding_told(name: str = "gather") -> Iterator[None]:
    """Make the RuntimeWarning as which NumPy's rounding warns an error, in a call that rounds (law 3)."""
    with warnings.catch_warnings() if name in ROUNDS else contextlib.nullcontext():
        if name in ROUNDS:
            warnings.simplefilter("error", RuntimeWarning)
        yield


@contextlib.contextmanager
def warnings_heard() -> Iterator[None]:
    """Let a cache say what it has to: also under `python -W error` that is its own business, and no error."""
    if not any(action == "error" for action, *_ in warnings.filters):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def _counted(stats: Any) -> list[Any]:
    """The values of the four counts; all else in `stats()` is the engine's own."""
    if not isinstance(stats, dict):
        return [None]
    try:
        return [dict.get(stats, key) for key in COUNTS]
    except Exception:  # of a key that cannot be compared
        return [None]


def _count(cache: Any, name: str, method: str, *args: int) -> int:
    answer = _ask(cache, name, method, *args)
    if type(answer) is int:
        return answer
    if not _is_count(answer):
        call = f"{method}({', '.join(map(str, args))})"
        raise LawBroken(LAW_OF[name], name, f"{call} is an integer", shown(answer))
    return int(answer)


def _table(cache: Any, seq: int, oracle: Oracle, answers: list[Answer]) -> list[int]:
    num_blocks = oracle.config.num_blocks
    table = _ask(cache, "table", "block_table", seq)
    if not isinstance(table, np.ndarray) or table.dtype != INT32 or table.ndim != 1:
        raise LawBroken(1, "table", f"block_table({seq}) is a one-dimensional int32 array", shown(table))
    ids: list[int] = table.tolist()
    low, high = (min(ids), max(ids)) if ids else (0, 0)
    if low <= JUNK_BLOCK:
        raise LawBroken(12, "table", f"block_table({seq}) is a copy", OVERWRITTEN)
    if low < 0 or high >= num_blocks:
        raise LawBroken(1, "table", f"block ids in [0, {num_blocks})", f"block_table({seq}) == {ids}")
    scribble(table, JUNK_BLOCK - oracle.look())  # at once, each differently
    answers.append(Answer(f"block_table({seq})", table, image(table)))
    return ids


def _gather(cache: Any, seq: int, layer: int, answers: list[Answer]) -> tuple[Seen, Seen]:
    pair = _ask(cache, "gather", "gather", seq, layer)
    call = f"gather({seq}, {layer})"
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise LawBroken(3, "gather", f"{call} is a pair of arrays", repr(type(pair)))
    k, v = pair
    _check_kind(k, call)
    _check_kind(v, call)
    left_k, left_v = image(k), image(v)
    answers += (Answer(call, k, left_k), Answer(call, v, left_v))
    return left_k[:2], left_v[:2]


def _check_kind(array: Any, call: str) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != HALF or array.ndim != 3:
        what = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else repr(type(array))
        raise LawBroken(3, "gather", f"{call} gives float16 [H, len, D]", what)


def attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
    """What a call returns, or what it raises: the panic of a Rust engine is no Exception, but a finding."""
    try:
        return watched(call, *args), None
    except (KeyboardInterrupt, CutShort):
        raise
    except BaseException as error:
        return None, error


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def named(error: BaseException) -> str:
    """An error in a few words."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose message cannot be read"


def shown(answer: Any) -> str:
    """The repr of an answer, of which all may be wrong."""
    try:
        return repr(answer)[:200]
    except Exception:
        return f"an object of {type(answer)} without a repr"


def image(given: Any) -> Any:
    """All of an array or a nested list, or the counts of a dict: what can be changed, to be compared."""
    if type(given) is np.ndarray:
        return given.shape, given.tobytes(), given.dtype, given.flags.writeable
    if isinstance(given, np.ndarray):
        return image(np.asarray(given))  # a subclass may answer as it likes
    if isinstance(given, dict):
        return [value if type(value) in PLAIN else shown(value) for value in _counted(given)]
    if not isinstance(given, (list, tuple)):
        return None
    try:
        return marshal.dumps(given, 2)  # of plain numbers: the bytes, many times as fast as a deep copy
    except ValueError:
        return copy.deepcopy(given)


def scribble(given: Any, junk: float) -> None:
    """Overwrite what can be overwritten in place, also through a read-only flag that we set ourselves."""
    if isinstance(given, np.ndarray):
        if given.dtype.kind in "iuf":
            flags = given.flags
            if not flags.writeable:
                try:
                    flags.writeable = True
                except ValueError:  # the memory belongs to an implementation that keeps it read-only
                    return
            given[...] = junk
    elif isinstance(given, dict):
        with contextlib.suppress(Exception):
            given.update(dict.fromkeys(COUNTS, junk))
    elif isinstance(given, tuple):
        for inner in given:
            scribble(inner, junk)
    elif isinstance(given, list):
        for inner in given:
            scribble(inner, junk)
        given[:] = [junk] * len(given)
