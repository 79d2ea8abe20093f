"""Look at a cache: everything that a caller can observe of it, with every answer checked for its kind."""

import contextlib
import copy
import marshal
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyllm.testing.contract import Capability
from tinyllm.testing.laws import JUNK, JUNK_BLOCK, LawBroken, Seen, View
from tinyllm.testing.operations import OPERATIONS
from tinyllm.testing.oracle import Oracle
from tinyllm.testing.time_limit import CutShort, asked, watched

OVERWRITTEN = "what its caller wrote into an earlier one"
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

    @property
    def size(self) -> int:
        """Bytes of an array."""
        return self.value.nbytes if isinstance(self.value, np.ndarray) else 0


class Held:
    """Answers that are held for long, as the caller left them: the newest, so many and of so many bytes."""

    MOST = 1000
    BYTES = 1 << 22

    def __init__(self) -> None:
        self._answers: deque[Answer] = deque()
        self._bytes = 0

    def hold(self, answers: list[Answer]) -> None:
        """Hold these as well. Raises LawBroken where one that is let go has changed."""
        for answer in answers:
            self._answers.append(answer)
            self._bytes += answer.size
            while len(self._answers) > self.MOST or self._bytes > self.BYTES:
                oldest = self._answers.popleft()
                self._bytes -= oldest.size
                _check([oldest])

    def check(self) -> None:
        """Raise LawBroken where one has changed (law 12)."""
        _check(self._answers)


class Answers:
    """What a cache returned in its last look, and how the kit left it; earlier ones are held for long."""

    def __init__(self) -> None:
        self._held = Held()
        self._earlier: list[Answer] = []
        self._latest: list[Answer] = []
        self._looks = 0

    def begin(self) -> None:
        """A look begins: those of the last one are as they were left."""
        _check(self._latest)
        self._held.hold(self._earlier)
        self._earlier, self._latest = self._latest, []

    def keep(self, call: str, value: Any, left: Any) -> None:
        """An answer that must not change from now on."""
        self._latest.append(Answer(call, value, left))

    def keep_table(self, call: str, table: Any) -> None:
        """The same of a table, which is overwritten at once, each differently."""
        self._looks += 1
        scribble(table, JUNK_BLOCK - self._looks)
        self.keep(call, table, image(table))

    def end(self) -> None:
        """The look is over: none has changed; those of this look are overwritten."""
        _check(self._earlier)
        _check(self._latest)
        for answer in self._latest:
            if not answer.call.startswith("block_table"):
                scribble(answer.value, JUNK)
        for answer in self._latest:
            answer.left = image(answer.value)

    def check(self) -> None:
        """Raise LawBroken where one of any look has changed."""
        self._held.check()
        _check(self._earlier)
        _check(self._latest)


def _check(answers: Sequence[Answer]) -> None:
    """Law 12: what was returned earlier is the caller's own."""
    if [image(answer.value) for answer in answers] == [answer.left for answer in answers]:
        return
    for answer in answers:
        if image(answer.value) != answer.left:
            due = f"what {answer.call} returned stays as its caller left it"
            raise LawBroken(12, "answers", due, "it changed")


def look_at_counts(cache: Any, oracle: Oracle, offers: frozenset[str], answers: Answers) -> View:
    """Tables, lengths and counts of the live sequences, copied, as far as the cache offers them; no contents.

    Raises LawBroken for an answer of the wrong kind, and where one of the last look has changed.
    """
    answers.begin()
    live = list(oracle.tables)
    layers = range(oracle.config.n_layers)
    with _overwriting_told(cache, oracle, offers):
        tables = {}
        if Capability.BLOCK_TABLES in offers:
            tables = {seq: _table(cache, seq, oracle, answers) for seq in live}
        lens = {seq: [_count(cache, "len", "seq_len", seq, layer) for layer in layers] for seq in live}
        if Capability.COUNTS not in offers:
            return View(tables, lens, {}, {}, 0)
        counts = _stats(cache, answers)
        return View(tables, lens, {}, counts, _count(cache, "stats", "num_free_blocks"))


def look_at_contents(
    cache: Any, oracle: Oracle, offers: frozenset[str], answers: Answers, counts: View
) -> View:
    """The same look, with the contents of each layer, and at its end. Raises LawBroken as above."""
    layers = range(oracle.config.n_layers)
    with _overwriting_told(cache, oracle, offers), rounding_told():
        contents = {seq: [_gather(cache, seq, layer, answers) for layer in layers] for seq in oracle.tables}
    answers.end()
    return counts._replace(contents=contents)


@contextlib.contextmanager
def _overwriting_told(cache: Any, oracle: Oracle, offers: frozenset[str]) -> Iterator[None]:
    try:
        yield
    except LawBroken as broken:
        raise _overwritten(cache, oracle, offers) or broken from broken.__cause__


def _overwritten(cache: Any, oracle: Oracle, offers: frozenset[str]) -> LawBroken | None:
    """Law 12, where a table that its caller has overwritten is what made another call fail."""
    for seq in oracle.tables if Capability.BLOCK_TABLES in offers else ():
        table, _ = attempt(asked, cache, "block_table", (seq,))
        if isinstance(table, np.ndarray) and table.dtype == np.int32 and (table <= JUNK_BLOCK).any():
            return LawBroken(12, "table", f"block_table({seq}) is a copy", OVERWRITTEN)
    return None


def _stats(cache: Any, answers: Answers) -> dict[str, int]:
    stats = _ask(cache, "stats", "stats")
    found = _counted(stats)
    if any(value is JUNK for value in found):
        raise LawBroken(12, "stats", "stats() is a copy", OVERWRITTEN)
    if not all(map(_is_count, found)):
        raise LawBroken(5, "stats", f"stats() counts {', '.join(COUNTS)}", shown(stats))
    counts = dict(zip(COUNTS, map(int, found), strict=True))
    if min(counts.values()) < 0:
        raise LawBroken(5, "stats", "counts of 0 or more", f"stats() == {shown(stats)}")
    answers.keep("stats()", stats, image(stats))
    return counts


def _ask(cache: Any, name: str, method: str, *args: int) -> Any:
    try:
        return asked(cache, method, args)
    except (KeyboardInterrupt, CutShort):
        raise
    except BaseException as error:
        raise failed(name, f"{method}({', '.join(map(str, args))})", error) from error


ROUNDS = frozenset({"append", "gather"})
"""The calls that handle values."""
WARNINGS = RuntimeWarning, FloatingPointError
"""As which NumPy tells what a cast did to a value."""


def failed(name: str, call: str, error: BaseException) -> LawBroken:
    """The law that a call breaks by an error that it must not raise."""
    if isinstance(error, WARNINGS) and name in ROUNDS:
        told = (
            "raises nothing under np.errstate(under='raise')"
            if isinstance(error, FloatingPointError)
            else "gives no warning"
        )
        return LawBroken(3, name, f"{call} {told}: rounding never does", named(error))
    return LawBroken(OPERATIONS[name].law, name, f"{call} succeeds", named(error))


@contextlib.contextmanager
def rounding_told(name: str = "gather") -> Iterator[None]:
    """Make all that NumPy may say of rounding an error, in a call that rounds (law 3)."""
    if name not in ROUNDS:
        yield
        return
    with warnings.catch_warnings(), np.errstate(under="raise"):  # the one that no warning tells
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
        raise LawBroken(OPERATIONS[name].law, name, f"{call} is an integer", shown(answer))
    return int(answer)


def _table(cache: Any, seq: int, oracle: Oracle, answers: Answers) -> list[int]:
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
    answers.keep_table(f"block_table({seq})", table)
    return ids


def _gather(cache: Any, seq: int, layer: int, answers: Answers) -> tuple[Seen, Seen]:
    pair = _ask(cache, "gather", "gather", seq, layer)
    call = f"gather({seq}, {layer})"
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise LawBroken(3, "gather", f"{call} is a pair of arrays", repr(type(pair)))
    k, v = pair
    _check_kind(k, call)
    _check_kind(v, call)
    left_k, left_v = image(k), image(v)
    answers.keep(call, k, left_k)
    answers.keep(call, v, left_v)
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
