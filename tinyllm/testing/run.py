"""Run a program of cache operations, and hold the cache to every law after each of them.

Everything in the kit that touches a cache does it here: the machine, the directed cases, a witness of a
planted bug, a counterexample that is replayed. So whatever fails anywhere is a trace, and fails again.

A line is run in four steps, and each has a file: what is due (`expectation`), the call (`caller`), the look
(`observe`), the laws (`laws`).
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tinyllm.testing import expectation, laws
from tinyllm.testing.caller import Caller
from tinyllm.testing.contract import Capability, Config, Factory
from tinyllm.testing.expectation import OUT_OF_BLOCKS, Due
from tinyllm.testing.explain import tell
from tinyllm.testing.laws import Acted, LawBroken, Step, View
from tinyllm.testing.observe import ROUNDS, WARNINGS, failed, named, warnings_heard
from tinyllm.testing.operations import READS_BEYOND, WITH_LAYER
from tinyllm.testing.oracle import Oracle
from tinyllm.testing.subject import Subject
from tinyllm.testing.time_limit import NotReturned
from tinyllm.testing.trace import Op, TooLarge, TraceError, check_sizes, pool_bytes, program

Law = Callable[[Step, Oracle], None]
COUNTS: dict[Law, frozenset[Capability]] = {
    laws.check_lengths: frozenset(),
    laws.check_table_lengths: frozenset({Capability.BLOCK_TABLES}),
    laws.check_conservation: frozenset({Capability.COUNTS}),
    laws.check_sharing: frozenset({Capability.BLOCK_TABLES}),
    laws.check_references: frozenset({Capability.COUNTS}),
}
"""The checks of what can be counted, in order, and the capabilities that each needs."""
CONTENTS: list[Law] = [partial(laws.check_contents, own=False), partial(laws.check_contents, own=True)]
SMALL = 1 << 26  # bytes of a pool that any machine has room for


class Observer:
    """Hears of a run, line by line. Override what you want to hear."""

    @property
    def asks_extensions(self) -> bool:
        """Whether the methods beyond the ten are to be asked."""
        return True

    def before(self, run: "Run", op: Op) -> None:
        """A line is about to be run."""

    def after(self, run: "Run", op: Op) -> None:
        """It was run, or had to be refused and was."""

    def broke(self, run: "Run", broken: LawBroken) -> None:
        """A law is broken, and about to be raised."""


class Run:
    """A cache, the oracle beside it, and the program so far. `step` runs one line and checks every law.

    Attributes:
        subject: the cache under test.
        offers: its capabilities, and the extensions of the cache that runs.
        ops: the program so far.
        oracle: what a right cache holds.
        view: the last look.
        closed: whether the cache is.
        refused: whether the last line was.
    """

    def __init__(self, factory: Factory, observer: Observer | None = None) -> None:
        """Raises ValueError: what `factory` declares as its capabilities is none."""
        self.subject = Subject.of(factory)
        self.ops: list[Op] = []
        self.closed = False
        self.refused = False
        self._observer = observer or Observer()
        self._caller = Caller(self.subject)
        offers = self.subject.capabilities
        self._counts = [check for check, needed in COUNTS.items() if needed <= offers]
        self._beyond: LawBroken | None = None  # the first law that only extensions show to be broken
        self._start(Config(1, 1, 1, 1, 1))

    def _start(self, config: Config) -> None:
        """The empty state of `new`, as the oracle has it."""
        self.oracle = Oracle(config, lazy_copy=Capability.LAZY_COPY in self.subject.capabilities)
        self.view = View({}, {}, {}, {"free": config.num_blocks}, config.num_blocks)
        self._before, self._tables = self.view, dict(self.oracle.tables)
        self._acted: dict[int, Acted] = {}  # since the last look
        self._quiet = False  # whether a line since then was not to be looked at
        self._to_count = self._to_read = False

    @property
    def config(self) -> Config:
        """The sizes of the cache."""
        return self.oracle.config

    @property
    def cache(self) -> Any:
        """The cache that runs; None before `new`."""
        return self._caller.cache

    @property
    def offers(self) -> frozenset[str]:
        """The subject's capabilities, and the extensions of the cache that runs."""
        return self._caller.offers

    @property
    def scalars(self) -> int:
        """How many values of the pattern have been stored since `new`."""
        return self._caller.scalars

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
        due = self._admit(op)
        expectation.check_offered(op, self.oracle, self.offers)
        expectation.check_claim(op, due.errors, self.offers)
        self._line(op, due)

    def draw(self, op: Op) -> None:
        """Run one line; whether it must be refused, and how, is the oracle's to say."""
        due = self._admit(op)
        if due.errors:
            op = op._replace(refusal=min(due.errors))
        expectation.check_offered(op, self.oracle, self.offers)
        self._line(op, due)

    def block_conservation(self) -> None:
        """Lengths, tables, counts and sharing are the oracle's (laws 2, 4, 5, 6, 7, 8, 9)."""
        if self._to_count:
            self._to_count = False
            self._telling(self._look_at_counts)

    def parent_immutability(self) -> None:
        """Every other sequence is as it was (laws 4, 7), and the one acted on is as the oracle has it (3)."""
        if self._to_read:
            self._to_read = False
            self._telling(self._look_at_contents)

    def finish(self) -> None:
        """End the program: look once more if its last lines were quiet; raise what only extensions showed.

        That is raised here and not sooner, so that a fault of the ten methods comes first (laws 16 to 20).
        """
        self.hold()
        if self.cache is not None and not self.closed and not self._in_step():
            if self._quiet or self._beyond is not None:
                self._to_count = self._to_read = True
                self.hold()  # what an extension did (12, say) may have broken the ten methods as well
            self._telling(self._check_answers)
        if self._beyond is not None:
            self._telling(partial(_raise, self._beyond.but(beyond=True)))

    def _check_answers(self) -> None:
        """Law 12 for all that the cache returned so far, but for what was let go."""
        self._caller.check_answers()
        if self._asks():
            self._beyond = self._caller.wrong_answer()

    def _admit(self, op: Op) -> Due:
        """What is due to a line. Raises TraceError for one that cannot be run."""
        self.hold()
        check_sizes(op, self.config)
        if op.name != "new" and self.cache is None:
            raise TraceError(f"'{op}' comes before 'new'")
        return expectation.due(op, self.oracle, closed=self.closed)

    def _line(self, op: Op, due: Due) -> None:
        self.ops.append(op)
        self.refused = False
        self._observer.before(self, op)
        self._telling(lambda: self._perform(op, due))
        self._observer.after(self, op)

    def _telling(self, act: Callable[[], None]) -> None:
        """Let a broken law out with its program and its story."""
        try:
            with warnings_heard():
                act()
        except LawBroken as broken:
            text = "".join(f"{op}\n" for op in self.ops)
            told = broken.but(trace=text, story=tell(broken, text, self.subject, self.oracle, self.view))
            self._observer.broke(self, told)
            raise told from told.__cause__

    def _perform(self, op: Op, due: Due) -> None:
        """Make the call, and hold what it raises to what is due."""
        if op.name == "close" and not self.closed:
            self._check_answers()
        if op.name in {"append", "needed"} and due.errors <= OUT_OF_BLOCKS and self._asks():
            self._beyond = self._caller.wrong_need(op, self.oracle.cost(*(int(a) for a in op.args)))
        if op.name == "new":
            raised = self._caller.new(op.args, keep=not due.errors)
        else:
            raised = self._caller.call(op, self.config)
        names = None if raised is None else _names(raised)
        in_step = op.name == "append" and self._in_step(op.args[0])
        errors = due.errors if in_step else expectation.refusal(op, due.errors, names, self.offers)
        if errors:
            self._check_refusal(op, errors, raised)
            if errors == OUT_OF_BLOCKS and not due.errors:
                self._check_leak(op)
        elif raised is None:
            self._accept(op)
        elif op.name in READS_BEYOND and not isinstance(raised, NotReturned):
            self._beyond = self._beyond or failed(op.name, f"'{op}'", raised)
            self._accept(op)
        elif self._too_large(op, raised):
            raise TooLarge(f"'{op}' needs more memory than this machine has: {named(raised)}") from raised
        else:
            raise failed(op.name, f"'{op}'", raised) from raised

    def _accept(self, op: Op) -> None:
        """The call succeeded, as it had to: the oracle does the same."""
        args = tuple(int(a) for a in op.args)
        if op.name == "new":
            self.closed, self._beyond = False, None
            self._start(Config(*args))
        elif op.name == "append":
            self.oracle.append(args[0], args[1], *self._caller.passed)
            self._caller.stored(op)
        elif op.name in {"add", "fork", "free", "truncate"}:
            getattr(self.oracle, op.name)(*args)
        elif op.name == "close":
            self.closed = True
            self._start(self.config)
            return
        self._act(op, args)
        if not (op.name == "append" and self._in_step(args[0])):
            self._to_look(op)

    def _to_look(self, op: Op) -> None:
        """A look is due after the line, unless it is a quiet one."""
        self._quiet = self._quiet or op.quiet
        self._to_count = self._to_read = not op.quiet

    def _act(self, op: Op, args: tuple[int, ...]) -> None:
        """Note which sequence the line changed; of one that was forked, the child."""
        if op.name in {"new", "stats", *READS_BEYOND}:
            return
        layer = args[1] if op.name in WITH_LAYER else None
        if op.name == "append" and Capability.INDEPENDENT_LAYERS not in self.offers:
            layer = None  # all of them were appended to
        self._acted[args[1] if op.name == "fork" else args[0]] = Acted(op.name, layer)

    def _check_refusal(self, op: Op, errors: frozenset[str], raised: BaseException | None) -> None:
        """Laws 9, 14 and 15: the call raised one of these errors."""
        self.refused = True
        law = 9 if "OutOfBlocks" in errors else 14 if self.closed else 15
        if raised is None:
            raise LawBroken(law, op.name, f"'{op}'", "it was accepted")
        if isinstance(raised, WARNINGS) and op.name in ROUNDS:
            raise failed(op.name, f"'{op}'", raised) from raised
        names = _names(raised)
        exact = Capability.EXACT_ERRORS in self.offers or law == 9 or "OutOfBlocks" in names
        if isinstance(raised, NotReturned) or (exact and not names & errors):
            raise LawBroken(law, op.name, f"'{op}'", named(raised)) from raised
        if not self.closed and op.name != "new":
            self._to_look(op)

    def _check_leak(self, op: Op) -> None:
        """Law 6 without counts: what a new cache takes, one in which nothing is held takes as well."""
        if op.name != "append" or any(max(self.oracle.lens(seq)) for seq in self.oracle.tables):
            return
        fresh = Caller(self.subject)
        fresh.new(self.config, keep=True)
        fresh.call(Op("add", op.args[:1]), self.config)
        fresh.scalars = self.scalars
        if fresh.call(op, self.config) is None:
            due = f"'{op}' succeeds as in a new cache, since nothing is held"
            raise LawBroken(6, "leak", due, "OutOfBlocks")

    def _look_at_counts(self) -> None:
        """The first half of a look."""
        if self.ops[-1].name in READS_BEYOND and self._asks():  # before the ten, which may mend what they say
            self._caller.ask_extensions(self.oracle)
        self._before = self.view
        self.view = self._looked(lambda: self._caller.counts(self.oracle))
        self._check([laws.check_counts_unchanged] if self._nothing_done() else self._counts)

    def _look_at_contents(self) -> None:
        """The second half: it leaves nothing that was acted on."""
        self.view = self._looked(lambda: self._caller.contents(self.oracle, self.view))
        self._check([laws.check_contents_unchanged] if self._nothing_done() else CONTENTS)
        self._acted, self._tables = {}, dict(self.oracle.tables)  # it replaces a table, and changes none
        self._quiet = False
        if self._asks():
            self._beyond = self._caller.wrong_extension(self.view, self.oracle)

    def _asks(self) -> bool:
        """Whether a law is looked for that only extensions show: the first one is told, at the end."""
        return self._beyond is None and self._observer.asks_extensions

    def _nothing_done(self) -> bool:
        """Whether every line since the last look was refused."""
        return self.refused and not self._acted

    def _looked(self, look: Callable[[], View]) -> View:
        """Look; after a refusal, what cannot be seen any more was changed by it (law 10)."""
        try:
            return look()
        except LawBroken as broken:
            if not self._nothing_done() or broken.law == 12 or isinstance(broken.__cause__, NotReturned):
                raise
            due = f"{broken.expected} after the refused '{self.ops[-1]}'"
            raise LawBroken(10, "unchanged", due, broken.found) from broken.__cause__

    def _check(self, checks: Iterable[Law]) -> None:
        step = Step(str(self.ops[-1]), self._acted, self._before, self.view, self._tables)
        for check in checks:
            check(step, self.oracle)

    def _in_step(self, seq: int | float | None = None) -> bool:
        """Whether more layers of a sequence, or of any, have to follow."""
        live = self.oracle.tables if seq is None else self.oracle.tables.keys() & {seq}
        return any(expectation.in_step(int(each), self.oracle, self.offers) for each in live)

    def _too_large(self, op: Op, raised: BaseException) -> bool:
        """Whether memory may well be wanting; for a small pool there is enough, and the cache is wrong."""
        sizes = op if op.name == "new" else Op("new", self.config)
        names = _names(raised)
        return "MemoryError" in names and "OutOfBlocks" not in names and pool_bytes(sizes) > SMALL


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


def _raise(broken: LawBroken) -> None:
    raise broken


def _names(error: BaseException) -> frozenset[str]:
    return frozenset(cls.__name__ for cls in type(error).__mro__)
