"""Run a program of cache operations, and hold the cache to every law after each of them.

Everything in the kit that touches a cache does it here: the machine, the directed cases, a witness of a
planted bug, a counterexample that is replayed. So whatever fails anywhere is a trace, and fails again.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyllm.testing import laws, trace
from tinyllm.testing.contract import Config, Factory, PagedCache, capabilities
from tinyllm.testing.laws import JUNK, JUNK_BLOCK, LawBroken, Sharing, Step, View
from tinyllm.testing.oracle import Oracle
from tinyllm.testing.story import tell
from tinyllm.testing.trace import FORMS, Op, TraceError, parse

LAW_OF = {
    "new": 15,
    "add": 13,
    "fork": 7,
    "append": 9,
    "free": 6,
    "table": 1,
    "len": 4,
    "gather": 3,
    "stats": 5,
    "close": 14,
}
"""The law that a call breaks when it raises although nothing is wrong with it."""


class Run:
    """A cache, the oracle beside it, and the program so far. `step` runs one line and checks every law."""

    def __init__(self, factory: Factory, broken: list[LawBroken] | None = None) -> None:
        """`broken` receives the law that breaks, if one does, in place of what it held."""
        self.factory = factory
        self.broken = broken if broken is not None else []
        self.exact_errors = "exact-errors" in capabilities(factory)
        self.ops: list[Op] = []
        self.closed = False
        self._cache: PagedCache | None = None
        self._step: Step | None = None
        self._scalars = 0
        self.start(Config(1, 1, 1, 1, 1))

    def start(self, config: Config) -> None:
        """The empty state of `new`, as the oracle has it."""
        self.config = config
        self.oracle = Oracle(config)
        self.view = View({}, {}, {}, {"free": config.num_blocks}, config.num_blocks)

    def step(self, op: Op) -> None:
        """Run one line, then both invariants. Raises LawBroken with its trace and story, or TraceError."""
        self.do(op)
        self.block_conservation()
        self.parent_immutability()

    def do(self, op: Op) -> None:
        """Run one line; what it must do by itself (be refused, or not) is checked here."""
        self._step = None
        expected = self.refusals(op)
        if bool(op.refusal) != bool(expected) or (expected and op.refusal not in expected):
            said = f"expects {op.refusal}" if op.refusal else "expects success"
            due = f"would be refused with {' or '.join(sorted(expected))}" if expected else "would succeed"
            raise TraceError(f"'{op}' {said}, but a right cache {due} here")
        self.ops.append(op)
        self._told(lambda: self._do(op, expected))

    def block_conservation(self) -> None:
        """Lengths, tables, counts and sharing are the oracle's (laws 2, 4, 5, 6, 7, 8, 9)."""
        checks = (
            laws.check_lengths,
            laws.check_table_lengths,
            laws.check_conservation,
            laws.check_sharing,
            laws.check_references,
            laws.check_cost,
        )
        for check in checks:
            self._check(check)

    def parent_immutability(self) -> None:
        """Every other sequence is as it was (law 7), and the one acted on is as the oracle has it (3, 4)."""
        self._check(lambda step, oracle: laws.check_contents(step, oracle, own=False))
        self._check(lambda step, oracle: laws.check_contents(step, oracle, own=True))

    def refusals(self, op: Op) -> frozenset[str]:
        """The errors of which a right cache must raise one, by the oracle; empty when it must succeed."""
        if op.name == "new":
            return frozenset(_wrong_sizes(op.args))
        if self._cache is None:
            raise TraceError(f"'{op}' comes before 'new'")
        if op.name == "close":
            return frozenset()
        if self.closed:
            return frozenset({"ValueError", *self._wrong_arguments(op)})
        wrong = frozenset(self._wrong_arguments(op))
        if op.name == "append" and not wrong:
            seq, layer, tokens = (int(a) for a in op.args)
            if self.oracle.cost(seq, layer, tokens) > self.oracle.free_blocks():
                return frozenset({"OutOfBlocks"})
        return wrong

    def _wrong_arguments(self, op: Op) -> Iterable[str]:
        if any(isinstance(a, float) for a in op.args):
            yield "TypeError"
        live = self.oracle.tables
        if op.name == "add" and op.args[0] in live:
            yield "ValueError"
        if op.name == "fork" and op.args[1] in live:
            yield "ValueError"
        if op.name not in {"add", "stats"} and op.args[0] not in live:
            yield "KeyError"
        if op.name in {"append", "len", "gather"} and not 0 <= op.args[1] < self.config.n_layers:
            yield "IndexError"
        if op.name == "append":
            if op.args[2] < 1:
                yield "ValueError"
            if op.form and FORMS[op.form].refusal:
                yield FORMS[op.form].refusal

    def _check(self, check: Callable[[Step, Oracle], None]) -> None:
        if self._step is not None:
            step = self._step
            self._told(lambda: check(step, self.oracle))

    def _told(self, act: Callable[[], None]) -> None:
        """Let a broken law out with its program and its story."""
        try:
            act()
        except LawBroken as broken:
            broken.trace = "".join(f"{op}\n" for op in self.ops)
            broken.story = tell(broken, self.factory, self.oracle, self.view)
            self.broken[:] = [broken]
            raise

    def _do(self, op: Op, expected: frozenset[str]) -> None:
        cost = 0
        if op.name == "append" and not expected:
            cost = self.oracle.cost(*(int(a) for a in op.args))
        shared: Sharing = laws.sharing(self.oracle.tables)
        raised = self._call(op)
        if expected:
            self._refused(op, expected, raised)
            return
        if raised is not None:
            law = 3 if isinstance(raised, Warning) else LAW_OF[op.name]
            raise LawBroken(law, op.name, f"'{op}' succeeds", _named(raised)) from raised
        self._tell_oracle(op)
        if self.closed:
            return
        before, self.view = self.view, self._look()
        seq = (
            int(op.args[-1] if op.name == "fork" else op.args[0]) if op.name not in {"new", "stats"} else None
        )
        layer = int(op.args[1]) if op.name in {"append", "len", "gather"} else None
        self._step = Step(op.name, seq, layer, cost, before, self.view, shared)

    def _refused(self, op: Op, expected: frozenset[str], raised: BaseException | None) -> None:
        law = 9 if "OutOfBlocks" in expected else 14 if self.closed else 15
        names = {cls.__name__ for cls in type(raised).__mro__}
        if raised is None:
            raise LawBroken(law, op.name, f"'{op}'", "it was accepted")
        if not names & expected and (self.exact_errors or law == 9 or "OutOfBlocks" in names):
            raise LawBroken(law, op.name, f"'{op}'", _named(raised)) from raised
        if self.closed or op.name == "new":
            return
        before, self.view = self.view, self._look()
        laws.check_unchanged(before, self.view, f"'{op}'")

    def _call(self, op: Op) -> BaseException | None:
        """Make the call; afterwards overwrite every array that was passed (law 12)."""
        if op.name == "append":
            k, v = trace.values(op, self._scalars, self.config)
            given = FORMS[op.form].make(k, v) if op.form else (k, v)
            try:
                return self._raises(
                    lambda cache: cache.append(op.args[0], op.args[1], *given), op.data is not None
                )
            finally:
                for array in given:
                    _scribble(array, JUNK)
        if op.name == "new":
            return self._new(op)
        method = {"add": "add_seq", "table": "block_table", "len": "seq_len"}.get(op.name, op.name)
        return self._raises(lambda cache: getattr(cache, method)(*op.args))

    def _new(self, op: Op) -> BaseException | None:
        cache, error = _attempt(lambda: self.factory(*op.args))  # type: ignore[arg-type]
        if error is None and not self.refusals(op):
            self._cache, self.closed = cache, False
        return error

    def _raises(self, call: Callable[[Any], Any], strict: bool = False) -> BaseException | None:
        """The error of a call; with `strict` a warning is one too, since rounding never warns (law 3)."""
        with warnings.catch_warnings():
            if strict:
                warnings.simplefilter("error")
            return _attempt(lambda: call(self._cache))[1]

    def _tell_oracle(self, op: Op) -> None:
        args = tuple(int(a) for a in op.args)
        if op.name == "new":
            self.start(Config(*args))
            self._scalars = 0
        elif op.name == "append":
            k, v = trace.values(op, self._scalars, self.config)
            self.oracle.append(args[0], args[1], k, v)
            self._scalars += k.size if op.data is None else 0
        elif op.name in {"add", "fork", "free"}:
            getattr(self.oracle, op.name)(*args)
        elif op.name == "close":
            self.closed = True
            self.start(self.config)

    def _look(self) -> View:
        """Everything observable, copied; the arrays that came back are overwritten (law 12)."""
        live = list(self.oracle.tables)
        layers = range(self.config.n_layers)
        tables = {seq: self._table(seq) for seq in live}
        lens = {seq: [self._count("len", "seq_len", seq, layer) for layer in layers] for seq in live}
        contents = {seq: [self._gather(seq, layer) for layer in layers] for seq in live}
        stats, keys = self._ask("stats", "stats"), ("free", "used", "cached", "evictions")
        if not isinstance(stats, dict) or any(not _is_count(stats.get(key)) for key in keys):
            raise LawBroken(5, "stats", f"stats() counts {', '.join(keys)}", repr(stats))
        counts = {key: int(stats[key]) for key in keys}
        return View(tables, lens, contents, counts, self._count("stats", "num_free_blocks"))

    def _ask(self, name: str, method: str, *args: int) -> Any:
        answer, error = _attempt(lambda: getattr(self._cache, method)(*args))
        if error is not None:
            call = f"{method}({', '.join(map(str, args))})"
            raise LawBroken(LAW_OF[name], name, f"{call} succeeds", _named(error)) from error
        return answer

    def _count(self, name: str, method: str, *args: int) -> int:
        answer = self._ask(name, method, *args)
        if not _is_count(answer):
            call = f"{method}({', '.join(map(str, args))})"
            raise LawBroken(LAW_OF[name], name, f"{call} is an integer", repr(answer))
        return int(answer)

    def _table(self, seq: int) -> list[int]:
        table = self._ask("table", "block_table", seq)
        if not isinstance(table, np.ndarray) or table.dtype != np.int32 or table.ndim != 1:
            raise LawBroken(1, "table", f"block_table({seq}) is a one-dimensional int32 array", repr(table))
        ids: list[int] = table.tolist()
        if JUNK_BLOCK in ids:
            raise LawBroken(
                12, "table", f"block_table({seq}) is a copy", "what its caller wrote into an earlier one"
            )
        if any(not 0 <= block < self.config.num_blocks for block in ids):
            raise LawBroken(
                1, "table", f"block ids in [0, {self.config.num_blocks})", f"block_table({seq}) == {ids}"
            )
        _scribble(table, JUNK_BLOCK)
        return ids

    def _gather(self, seq: int, layer: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
        pair = self._ask("gather", "gather", seq, layer)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise LawBroken(3, "gather", f"gather({seq}, {layer}) is a pair of arrays", repr(type(pair)))
        return self._bits(pair[0], seq, layer), self._bits(pair[1], seq, layer)

    def _bits(self, array: Any, seq: int, layer: int) -> NDArray[np.uint16]:
        if not isinstance(array, np.ndarray) or array.dtype != np.float16 or array.ndim != 3:
            what = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else repr(type(array))
            raise LawBroken(3, "gather", f"gather({seq}, {layer}) gives float16 [H, len, D]", what)
        copy = np.ascontiguousarray(array).copy()
        copy[np.isnan(copy)] = np.nan
        _scribble(array, JUNK)
        return copy.view(np.uint16)


def replay(factory: Factory, text: str) -> Run:
    """Run a trace on a new cache, checking every law after each line. Raises LawBroken or TraceError."""
    run = Run(factory)
    for op in parse(text):
        run.step(op)
    return run


def _wrong_sizes(sizes: tuple[int | float, ...]) -> Iterable[str]:
    if any(isinstance(size, float) for size in sizes):
        yield "TypeError"
    if any(size < 1 for size in sizes):
        yield "ValueError"


def _attempt(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What a call returns, or what it raises: the panic of a Rust engine is no Exception, but a finding."""
    try:
        return call(), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, error


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _scribble(given: Any, junk: float) -> None:
    """Overwrite an array or a nested list in place, also through a read-only flag that we set ourselves."""
    if isinstance(given, list):
        for inner in given:
            _scribble(inner, junk)
        given[:] = [junk] * len(given)
    elif isinstance(given, np.ndarray) and given.dtype.kind in "iuf":
        try:
            given.flags.writeable = True
        except ValueError:  # the memory belongs to an implementation that keeps it read-only
            return
        given[...] = junk
