"""Run a program of cache operations, and hold the cache to every law after each of them.

Everything in the kit that touches a cache does it here: the machine, the directed cases, a witness of a
planted bug, a counterexample that is replayed. So whatever fails anywhere is a trace, and fails again.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from tinyllm.testing import laws, trace
from tinyllm.testing.contract import Config, Factory, PagedCache, capabilities, extensions
from tinyllm.testing.explain import tell
from tinyllm.testing.extensions import check_extensions, check_need
from tinyllm.testing.laws import JUNK, LawBroken, Step, View
from tinyllm.testing.observe import (
    ROUNDS,
    Answer,
    attempt,
    failed,
    image,
    look,
    named,
    rounding_told,
    scribble,
    warnings_heard,
)
from tinyllm.testing.oracle import Oracle
from tinyllm.testing.time_limit import NotReturned
from tinyllm.testing.trace import (
    FORMS,
    NotOffered,
    Op,
    TooLarge,
    TraceError,
    check_sizes,
    pool_bytes,
    program,
)

CHECKS: dict[Callable[[Step, Oracle], None], frozenset[str]] = {
    laws.check_lengths: frozenset(),
    laws.check_table_lengths: frozenset({"block-tables"}),
    laws.check_conservation: frozenset({"counts"}),
    laws.check_sharing: frozenset({"block-tables"}),
    laws.check_references: frozenset({"counts"}),
    laws.check_cost: frozenset({"counts", "exact-cost"}),
}
"""The checks of what can be counted, in order, and the capabilities that each needs."""
SMALL = 1 << 26  # bytes of a pool that any machine has room for
CONTENTS = [partial(laws.check_contents, own=False), partial(laws.check_contents, own=True)]


class Run:
    """A cache, the oracle beside it, and the program so far. `step` runs one line and checks every law."""

    def __init__(self, factory: Factory, broken: list[LawBroken] | None = None) -> None:
        """`broken` receives the law that breaks, if one does, in place of what it held."""
        self.factory = factory
        self.broken = broken if broken is not None else []
        self.offers = capabilities(factory)
        self._counts = [check for check, needed in CHECKS.items() if needed <= self.offers]
        self.extends: frozenset[str] = frozenset()
        self.ops: list[Op] = []
        self.closed = False
        self.refused = False  # the last line was
        self._cache: PagedCache | None = None
        self._step: Step | None = None
        self._wrong_need: LawBroken | None = None  # the first time that blocks_needed was wrong
        self._answers: list[Answer] = []
        self._scalars = 0
        self._values: tuple[trace.Values, trace.Values]  # K and V of the last append
        self._cost = 0  # of what was done since the cache was last looked at
        self.start(Config(1, 1, 1, 1, 1))

    def start(self, config: Config) -> None:
        """The empty state of `new`, as the oracle has it."""
        self.config = config
        self.oracle = Oracle(config, lazy_copy="lazy-copy" in self.offers)
        self._tables: dict[int, list[int]] = {}  # the oracle's, when the cache was last looked at
        self.view = View({}, {}, {}, {"free": config.num_blocks}, config.num_blocks)

    def step(self, op: Op) -> None:
        """Run one line, then the invariants. Raises LawBroken with its trace and story, or TraceError."""
        self.do(op)
        self.hold()

    def hold(self) -> None:
        """Both invariants, in order."""
        self.block_conservation()
        self.parent_immutability()

    def do(self, op: Op) -> None:
        """Run one line; what it must do by itself (be refused, or not) is checked here."""
        self._offered(op)
        expected, price = self._due(op)
        if bool(op.refusal) != bool(expected) or (expected and op.refusal not in expected):
            if lacking := {"lazy-copy", "exact-cost"} - self.offers:  # the program was written for more
                raise NotOffered(", ".join(sorted(lacking)))
            said = f"expects {op.refusal}" if op.refusal else "expects success"
            due = f"would be refused with {' or '.join(sorted(expected))}" if expected else "would succeed"
            raise TraceError(f"'{op}' {said}, but a right cache {due} here")
        self._line(op, expected, price)

    def draw(self, op: Op) -> None:
        """Run one line; whether it must be refused, and how, is the oracle's to say."""
        expected, price = self._due(op)
        if expected:
            op = op._replace(refusal=min(expected))
        self._offered(op)
        self._line(op, expected, price)

    def _line(self, op: Op, expected: frozenset[str], price: int) -> None:
        self._step, self.refused = None, False
        self.ops.append(op)
        self._told(lambda: self._do(op, expected, price))

    def block_conservation(self) -> None:
        """Lengths, tables, counts and sharing are the oracle's (laws 2, 4, 5, 6, 7, 8, 9)."""
        self._check(self._counts)

    def parent_immutability(self) -> None:
        """Every other sequence is as it was (law 7), and the one acted on is as the oracle has it (3, 4)."""
        self._check(CONTENTS)

    def finish(self) -> None:
        """Hold what goes beyond the ten methods to its laws (16 to 20), as the cache is now.

        At the end of a program, so that a fault of the ten methods is told as theirs.
        """
        if self._cache is None or self.closed or any(map(self._lags, self.oracle.tables)):
            return
        self._told(self._finish)

    def _lags(self, seq: int) -> bool:
        """Whether a step is under way: more layers have to follow."""
        return "independent-layers" not in self.offers and len(set(self.oracle.lens(seq))) > 1

    def _finish(self) -> None:
        broken = self._wrong_need or self._beyond()
        if broken is None:
            return
        before, self.view = self.view, look(self._cache, self.oracle, self.offers, self._answers)
        self._step = Step("stats", None, None, 0, before, self.view, dict(self.oracle.tables))
        self.hold()  # what its caller wrote into an answer (12), say, broke the ten methods as well
        broken.beyond = True
        raise broken

    def _beyond(self) -> LawBroken | None:
        try:
            check_extensions(self._cache, self.extends, self.view, self.config.block_size)
        except LawBroken as broken:
            return broken
        return None

    def refusals(self, op: Op) -> frozenset[str]:
        """The errors of which a right cache must raise one, by the oracle; empty when it must succeed."""
        return self._due(op)[0]

    def _due(self, op: Op) -> tuple[frozenset[str], int]:
        """The errors, and the blocks that the line takes if its arguments are right."""
        check_sizes(op, self.config)
        if op.name == "new":
            return frozenset(_wrong_sizes(op.args)), 0
        if self._cache is None:
            raise TraceError(f"'{op}' comes before 'new'")
        if op.name == "close":
            return frozenset(), 0
        if self.closed:
            return frozenset({"ValueError", *self._wrong_arguments(op)}), 0
        if wrong := frozenset(self._wrong_arguments(op)):
            return wrong, 0
        price = self._price(op)
        return frozenset({"OutOfBlocks"} if price and price > self.oracle.free_blocks() else ()), price

    def _price(self, op: Op) -> int:
        """Blocks that a line with right arguments takes."""
        if op.name == "append":
            return self.oracle.cost(*(int(a) for a in op.args))
        return self.oracle.fork_cost(int(op.args[0])) if op.name == "fork" else 0

    def _offered(self, op: Op) -> None:
        """Raises NotOffered for a line that the cache does not promise to answer."""
        if op.name == "fork" and "fork" not in self.offers:
            raise NotOffered("fork")
        if op.name == "truncate" and self._cache is not None and "truncate" not in self.extends:
            raise NotOffered("truncate")
        if op.name == "table" and "block-tables" not in self.offers:
            raise NotOffered("block-tables")
        if op.name == "stats" and "counts" not in self.offers:
            raise NotOffered("counts")
        if "independent-layers" in self.offers or self.closed or self._cache is None:
            return
        behind = {seq: lens for seq in self.oracle.tables if len(set(lens := self.oracle.lens(seq))) > 1}
        for seq, lens in behind.items():  # a step is under way: its next layer is all that may come
            layer = lens.index(min(lens))
            if op.name != "append" or op.args[:2] != (seq, layer) or op.args[2] != lens[0] - lens[layer]:
                raise NotOffered("independent-layers")
        first = op.name == "append" and not op.refusal and not behind
        if first and op.args[0] in self.oracle.tables and op.args[1] != 0:
            raise NotOffered("independent-layers")

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
        if op.name == "truncate" and op.args[0] in live:
            longest = max(self.oracle.lens(int(op.args[0])))
            yield from [] if 0 <= op.args[1] <= longest else ["ValueError"]
        if op.name == "append" and op.args[2] < 1:
            yield "ValueError"
        if op.form and FORMS[op.form].refusal:
            yield FORMS[op.form].refusal

    def _check(self, checks: Sequence[Callable[[Step, Oracle], None]]) -> None:
        if (step := self._step) is not None:
            self._told(lambda: _each(checks, step, self.oracle))

    def _told(self, act: Callable[[], None]) -> None:
        """Let a broken law out with its program and its story."""
        try:
            with warnings_heard():
                act()
        except LawBroken as broken:
            broken.trace = "".join(f"{op}\n" for op in self.ops)
            broken.story = tell(broken, self.factory, self.oracle, self.view)
            self.broken[:] = [broken]
            raise

    def _do(self, op: Op, expected: frozenset[str], price: int) -> None:
        if op.name == "append" and expected <= {"OutOfBlocks"} and self._wrong_need is None:
            self._wrong_need = self._ask_need(op, price)
        raised = self._call(op)
        out_of_blocks = raised is not None and "OutOfBlocks" in _names(raised)
        may_refuse = "exact-cost" not in self.offers and op.name in {"append", "fork"}
        if out_of_blocks and may_refuse and not self._in_step(op):
            self._refused(op, frozenset({"OutOfBlocks"}), raised)
            self._leaked(op)
            return
        unforeseen = raised is None and expected == {"OutOfBlocks"} and may_refuse
        if expected and not unforeseen:
            self._refused(op, expected, raised)
            return
        if raised is not None:
            if self._too_large(op, raised):
                raise TooLarge(f"'{op}' needs more memory than this machine has: {named(raised)}") from raised
            raise failed(op.name, f"'{op}'", raised) from raised
        if op.name == "new":
            self._cost = 0
        self._tell_oracle(op)
        self._cost += 0 if expected else price
        if self.closed or self._in_step(op):
            return
        before, self.view = self.view, look(self._cache, self.oracle, self.offers, self._answers)
        seq = None
        if op.name not in {"new", "stats"}:
            seq = int(op.args[-1] if op.name == "fork" else op.args[0])
        layer = int(op.args[1]) if op.name in {"append", "len", "gather"} else None
        if "independent-layers" not in self.offers and op.name == "append":
            layer = None  # all of them were appended to
        self._step = Step(op.name, seq, layer, self._cost, before, self.view, self._tables)
        self._cost, self._tables = 0, dict(self.oracle.tables)  # it replaces a table, and changes none

    def _too_large(self, op: Op, raised: BaseException) -> bool:
        """Whether memory may well be wanting; for a small pool there is enough, and the cache is wrong."""
        sizes = op if op.name == "new" else Op("new", self.config)
        names = _names(raised)
        return "MemoryError" in names and "OutOfBlocks" not in names and pool_bytes(sizes) > SMALL

    def _ask_need(self, op: Op, price: int) -> LawBroken | None:
        """What is wrong with what `blocks_needed` says of the line, if anything."""
        if "blocks_needed" in self.extends and "exact-cost" in self.offers:
            try:
                check_need(self._cache, op.args, price)
            except LawBroken as broken:
                return broken
        return None

    def _in_step(self, op: Op) -> bool:
        """Whether more layers have to follow before the cache says again what it holds."""
        return op.name == "append" and self._lags(int(op.args[0]))

    def _leaked(self, op: Op) -> None:
        """Law 6 without counts: what a new cache takes, one in which nothing is held takes as well."""
        if op.name != "append" or any(max(self.oracle.lens(seq)) for seq in self.oracle.tables):
            return
        fresh = Run(self.factory)
        for again in (Op("new", self.config), Op("add", op.args[:1])):
            fresh.do(again)
        fresh._scalars = self._scalars
        if fresh._call(op) is None:
            raise LawBroken(
                6, "leak", f"'{op}' succeeds as in a new cache, since nothing is held", "OutOfBlocks"
            )

    def _refused(self, op: Op, expected: frozenset[str], raised: BaseException | None) -> None:
        self.refused = True
        law = 9 if "OutOfBlocks" in expected else 14 if self.closed else 15
        if raised is None:
            raise LawBroken(law, op.name, f"'{op}'", "it was accepted")
        if isinstance(raised, RuntimeWarning) and op.name in ROUNDS:
            raise failed(op.name, f"'{op}'", raised) from raised
        names = _names(raised)
        exact = "exact-errors" in self.offers or law == 9 or "OutOfBlocks" in names
        if isinstance(raised, NotReturned) or (exact and not names & expected):
            raise LawBroken(law, op.name, f"'{op}'", named(raised)) from raised
        if self.closed or op.name == "new":
            return
        before = self.view
        try:
            self.view = look(self._cache, self.oracle, self.offers, self._answers)
        except LawBroken as broken:
            if broken.law == 12 or isinstance(broken.__cause__, NotReturned):
                raise
            due = f"{broken.expected} after the refused '{op}'"
            raise LawBroken(10, "unchanged", due, broken.found) from broken.__cause__
        laws.check_unchanged(before, self.view, f"'{op}'")

    def _call(self, op: Op) -> BaseException | None:
        """Make the call; afterwards overwrite every array that was passed (law 12)."""
        if op.name == "append":
            k, v = trace.values(op, self._scalars, self.config)
            self._values = k.copy(), v.copy()  # what becomes of the others is the cache's doing
            given = FORMS[op.form].make(k, v) if op.form else (k, v)
            left = image(given[0]), image(given[1])
            with rounding_told("append"):
                _, error = attempt(lambda cache: cache.append(op.args[0], op.args[1], *given), self._cache)
            if (image(given[0]), image(given[1])) != left:
                raise LawBroken(12, "arguments", f"'{op}' leaves K and V as they were", "it wrote into them")
            for array in given:
                scribble(array, JUNK)
            return error
        if op.name == "new":
            return self._new(op)
        method = {"add": "add_seq", "table": "block_table", "len": "seq_len"}.get(op.name, op.name)
        with rounding_told(op.name):
            return attempt(lambda cache: getattr(cache, method)(*op.args), self._cache)[1]

    def _new(self, op: Op) -> BaseException | None:
        cache, error = attempt(lambda: self.factory(*op.args))  # type: ignore[arg-type]
        if error is None and not self.refusals(op):
            self._cache, self.closed, self.extends = cache, False, extensions(cache)
            self._wrong_need = None
        return error

    def _tell_oracle(self, op: Op) -> None:
        args = tuple(int(a) for a in op.args)
        if op.name == "new":
            self.start(Config(*args))
            self._scalars = 0
        elif op.name == "append":
            k, v = self._values
            self.oracle.append(args[0], args[1], k, v)
            self._scalars += k.size if op.data is None else 0
        elif op.name in {"add", "fork", "free", "truncate"}:
            getattr(self.oracle, op.name)(*args)
        elif op.name == "close":
            self.closed = True
            self.start(self.config)


def replay(factory: Factory, text: str) -> Run:
    """Run a trace on a new cache, checking every law after each line.

    Raises:
        LawBroken: with the program up to the line that breaks it.
        TraceError: there is nothing to run, or the trace cannot be read, or lies; or it is TooLarge.
    """
    run = Run(factory)
    for op in program(text):
        run.step(op)
    run.finish()
    return run


def _each(checks: Sequence[Callable[[Step, Oracle], None]], step: Step, oracle: Oracle) -> None:
    for check in checks:
        check(step, oracle)


def _wrong_sizes(sizes: tuple[int | float, ...]) -> Iterable[str]:
    if any(isinstance(size, float) for size in sizes):
        yield "TypeError"
    if any(size < 1 for size in sizes):
        yield "ValueError"


def _names(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}
