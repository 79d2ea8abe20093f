"""A Hypothesis state machine that looks for a program of cache operations that breaks a law.

To hold a cache of your own to it, override one method:

    class Mine(CacheMachine):
        def make_cache(self, config):
            return MyCache(*config)

    TestMine = state_machine_test(Mine)

Every step is a line of a trace, run and checked by `Run`. The numbers below were chosen by measuring which
planted bugs a random program finds: layers must be appended to unevenly, and forked while they are uneven.
"""

import itertools
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tinyllm.testing import trace
from tinyllm.testing.contract import CAPABILITIES, Capability, Config, PagedCache
from tinyllm.testing.forms import FORMS, SPECIAL
from tinyllm.testing.laws import Findings, LawBroken, Place
from tinyllm.testing.operations import OPERATIONS, READS_BEYOND
from tinyllm.testing.profiles import current_profile
from tinyllm.testing.repeats import DRAWN, changed, known
from tinyllm.testing.run import Observer, Run
from tinyllm.testing.scenes import Start, now_and_then, starts
from tinyllm.testing.time_limit import CutShort, NotReturned
from tinyllm.testing.trace import Op

IDS = range(4)  # few, so that ids are used again
BLOCKS = (2, 9)  # tiny pools fill up, and what is freed is soon used again
SIZES = (1, 4)  # of a block: position arithmetic shows its faults at small B
READ, QUIET, BEYOND = "read", "quiet", "beyond"
LOOKS = [(READ,), (READ, BEYOND), (QUIET, READ), (QUIET, QUIET, BEYOND), (QUIET,) * 5 + (READ,)]
"""Which lines of a program are looked at, in turns: what a read mends shows only where nobody reads.

After those of BEYOND the methods beyond the ten are asked first: they may be what a read mends.
"""
BOXES = [(False,), (False,), (False,), (False, True)]  # whether the numbers of a line are boxed, in turns
AGAIN = [False, False, True]  # whether a program is run once more, and looked at once at its end
WORD = 2**32  # a layer or a length that half a machine word takes for 0
LIFE = 24  # appends of one sequence that are made again
LAYERS = [2, 2, 3, 3, 1]  # mostly several: many faults need a layer that lags
WIDE = st.sampled_from([2, 2, 2, 3, 1])  # heads and dims: a swapped axis hides where a size is 1

VALID_FORMS = sorted(name for name, form in FORMS.items() if form.drawn and not form.refusal)
WRONG_FORMS = sorted(name for name, form in FORMS.items() if form.drawn and form.refusal)


@lru_cache(1000)
def one_of(values: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """One of these. To examine a new strategy takes Hypothesis as long as to draw from it a few times."""
    return st.sampled_from(values)


@lru_cache(1000)
def up_to(most: int) -> st.SearchStrategy[int]:
    """A number from 0 to `most`."""
    return st.integers(0, most)


@lru_cache(100)
def special(count: int) -> st.SearchStrategy[list[float]]:
    """So many of the values at the edges of float16."""
    return st.lists(st.sampled_from(SPECIAL), min_size=count, max_size=count)


configs = st.builds(Config, st.integers(*BLOCKS), st.integers(*SIZES), st.sampled_from(LAYERS), WIDE, WIDE)
live = st.runner().flatmap(lambda machine: one_of(tuple(sorted(machine.run.oracle.tables))))
behind = st.runner().flatmap(lambda machine: one_of(tuple(machine.lagging())))
grown = st.runner().flatmap(lambda machine: one_of(tuple(machine.written())))
unused = st.runner().flatmap(lambda m: one_of(tuple(i for i in m.ids if i not in m.run.oracle.tables)))
layers = st.runner().flatmap(lambda machine: up_to(machine.run.config.n_layers - 1))
few = st.sampled_from([1, 2, 3, 1, 2, 3, 17])  # of 16 positions and more engines make another case
most = st.sampled_from([True, True, False])
# Up to three blocks at once: an append that starts, fills and leaves blocks. None at all has to be refused.
tokens = st.runner().flatmap(lambda machine: up_to(3 * machine.run.config.block_size))


def _some_live(machine: "CacheMachine") -> bool:
    return bool(machine.run.oracle.tables)


def _some_unused(machine: "CacheMachine") -> bool:
    return not machine.run.oracle.tables.keys() >= set(machine.ids)


def _some_behind(machine: "CacheMachine") -> bool:
    return bool(machine.lagging())


def _can_fork(machine: "CacheMachine") -> bool:
    return _some_live(machine) and _some_unused(machine) and Capability.FORK in machine.run.offers


def _some_written(machine: "CacheMachine") -> bool:
    return bool(machine.written())


def _can_truncate(machine: "CacheMachine") -> bool:
    return _some_live(machine) and "truncate" in machine.run.offers


def _reads(seq: int) -> list[Op]:
    """The reads beyond the ten, of a sequence."""
    return [Op("runs", (seq, 0)), Op("pages", (0, seq)), Op("needed", (seq, 0, 1))]


class Stopped(BaseException):
    """A call had to be stopped: `broken` says so."""

    def __init__(self, broken: LawBroken) -> None:
        super().__init__(broken)
        self.broken = broken


class Search(Observer):
    """What the programs of a machine did and found; it observes their runs. Every subclass has its own.

    Attributes:
        programs: how many were run.
        lines: how many lines they had.
        core: the law that was broken last; Hypothesis drops it when the same program passes the next time.
        extensions: the first law that only the methods beyond the ten show to be broken.
        goes_on: whether such a one does not end the search, since the ten methods come first.
        ends: when no other program is to follow; then `teardown` raises CutShort.
    """

    def __init__(self, *, goes_on: bool = False, ends: float = math.inf, known: bool = False) -> None:
        """`known`: a law is known already that only extensions show, and no other is looked for."""
        self.programs = self.lines = 0
        self.core: LawBroken | None = None
        self.extensions: LawBroken | None = None
        self.goes_on = goes_on
        self.ends = ends
        self._known = known

    @property
    def findings(self) -> Findings:
        """What it found."""
        return Findings(self.core, self.extensions)

    @property
    def asks_extensions(self) -> bool:
        """Whether a law is still looked for that only extensions show."""
        return not (self.goes_on and (self._known or self.extensions))

    def broke(self, run: Run, broken: LawBroken) -> None:
        """Keep the law. Raises Stopped, which ends the search at once, when a call had to be stopped."""
        del run
        if broken.beyond:
            self.extensions = self.extensions or broken
        else:
            self.core = broken
        if isinstance(broken.__cause__, NotReturned):
            raise Stopped(broken)


class CacheMachine(RuleBasedStateMachine):
    """Random programs on one cache. Override `make_cache`; the reference is the default."""

    capabilities = frozenset(CAPABILITIES)
    ids: ClassVar[range] = IDS
    sizes: ClassVar[st.SearchStrategy[Config]] = configs
    """Of the usual caches, those that are no scene."""
    factory: Any = None
    """Set instead of overriding `make_cache` when a factory exists already; stories then name it."""
    search: ClassVar[Search] = Search()
    """What its programs did and found."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.search = Search()

    def __init__(self) -> None:
        super().__init__()
        self.run = Run(self.factory or self._made, self.observer())
        self._again = False
        self._raised = sys.exc_info()[1]
        self._looks: Iterator[str] = itertools.repeat(READ)
        self._boxes: Iterator[bool] = itertools.repeat(False)
        self._told: defaultdict[int, list[Op]] = defaultdict(list)  # the appends of each sequence

    def observer(self) -> Observer:
        """Who hears of the run of this program."""
        return self.search

    def _made(self, *sizes: int) -> PagedCache:
        return self.make_cache(Config(*sizes))

    def make_cache(self, config: Config) -> PagedCache:
        """The cache under test, new and empty."""
        from tinyllm.infer.paged import PagedKVCache  # noqa: PLC0415 - the default implementation

        return PagedKVCache(*config)

    def line(self, name: str, *args: int | float, **more: Any) -> bool:
        """Run one line of the program. Whether it is refused, and how, is the oracle's to say; it is told."""
        look, scalars = next(self._looks), self.run.scalars
        beyond = look == BEYOND and Capability.INDEPENDENT_LAYERS in self.run.offers
        boxed = next(self._boxes) and Capability.EXACT_ERRORS in self.run.offers and name != "new"
        self.run.draw(Op(name, args, quiet=look == QUIET or beyond, boxed=boxed, **more))
        refused = self.run.refused
        if not refused:
            self._tell(self.run.ops[-1], scalars)
        if beyond:
            self._read_beyond()
        return refused

    def _read_beyond(self) -> None:
        """A line that reads beyond the ten, of one kind after the other."""
        live = sorted(self.run.oracle.tables)[:1]
        reads = [Op("check"), *(op for seq in live for op in _reads(seq))]
        offered = [op for op in reads if OPERATIONS[op.name].needs in {"", *self.run.offers}]
        if offered:
            self.run.draw(offered[len(self.run.ops) % len(offered)])

    def _tell(self, op: Op, scalars: int) -> None:
        """Keep in mind which appends made a sequence what it is."""
        if op.name == "append":
            self._told[int(op.args[0])].append(known(op, scalars))
        elif op.name == "fork":
            self._told[int(op.args[1])] = list(self._told[int(op.args[0])])
        elif op.name == "add":
            self._told[int(op.args[0])] = []

    def extend(self, seq: int, layer: int, n: int, **more: Any) -> None:
        """An append to one layer; to all of them, where layers do not grow by themselves."""
        alone = Capability.INDEPENDENT_LAYERS in self.run.offers
        for each in [layer] if alone else range(self.run.config.n_layers):
            if self.line("append", seq, each, n, **more):
                break

    def written(self) -> list[int]:
        """The live sequences that were appended to."""
        return [seq for seq in sorted(self.run.oracle.tables) if self._told[seq]]

    def lagging(self, *seqs: int) -> list[Place]:
        """The layers that are shorter than the longest of their sequence; of all sequences by default."""
        lens = {seq: self.run.oracle.lens(seq) for seq in seqs or sorted(self.run.oracle.tables)}
        return [(seq, layer) for seq in lens for layer, n in enumerate(lens[seq]) if n < max(lens[seq])]

    @initialize(
        start=st.runner().flatmap(lambda machine: now_and_then(machine.sizes.flatmap(starts))),
        forked=most,
        looks=st.sampled_from(LOOKS),
        boxes=st.sampled_from(BOXES),
        again=st.sampled_from(AGAIN),
    )
    def new(
        self,
        start: Start,
        forked: bool,
        looks: tuple[str, ...] = (READ,),
        boxes: tuple[bool, ...] = (False,),
        again: bool = False,
    ) -> None:
        """A cache that already holds a sequence with uneven layers, often forked: most faults need one."""
        self.line("new", *start.config)
        self._looks = itertools.repeat(QUIET if start.silent else READ)
        alone = Capability.INDEPENDENT_LAYERS in self.run.offers
        for op in start.lines:
            if op.name != "append":
                self.line(op.name, *op.args)
            elif alone or op.args[1] == 0:
                self.extend(*map(int, op.args))
            self.run.hold()
        if forked and Capability.FORK in self.run.offers:
            self.line("fork", 0, next(i for i in self.ids if i not in self.run.oracle.tables))
        self._looks = itertools.cycle(LOOKS[-1] if start.silent else looks)
        self._boxes, self._again = itertools.cycle(boxes), again

    @precondition(_some_unused)
    @rule(seq=unused)
    def add(self, seq: int) -> None:
        """An empty sequence, often under an id that was freed."""
        self.line("add", seq)

    @precondition(_can_fork)
    @rule(parent=live, child=unused)
    def fork(self, parent: int, child: int) -> None:
        """A fork, at whatever unevenness the layers have."""
        self.line("fork", parent, child)

    @precondition(_some_live)
    @rule(seq=live, layer=layers, n=tokens)
    def append(self, seq: int, layer: int, n: int) -> None:
        """An append to one layer; refused if, and only if, the pool cannot pay for it."""
        self.extend(seq, layer, n)

    @precondition(_some_behind)
    @rule(place=behind)
    def catch_up(self, place: Place) -> None:
        """A layer gets as long as the longest: in a fork it writes into several shared blocks at once."""
        seq, layer = place
        lens = self.run.oracle.lens(seq)
        self.extend(seq, layer, max(lens) - lens[layer])

    @precondition(_some_live)
    @rule(seq=live, layer=layers, n=few, form=st.sampled_from(VALID_FORMS))
    def append_in_another_form(self, seq: int, layer: int, n: int, form: str) -> None:
        """Lists, strides, read-only arrays and other dtypes (law 12)."""
        self.extend(seq, layer, n, form=form)

    @precondition(_some_live)
    @rule(seq=live, layer=layers, n=few, data=st.data())
    def append_special_values(self, seq: int, layer: int, n: int, data: st.DataObject) -> None:
        """Values at the edges of float16 (law 3)."""
        config = self.run.config
        shape = (config.n_kv_heads, n if config.n_kv_heads * config.d_head < 10 else 1, config.d_head)
        count = math.prod(shape)
        drawn = min(count, 9)  # over and over, in chunks that are longer
        k, v = (np.resize(np.array(data.draw(special(drawn)), np.float32), count) for _ in "kv")
        self.extend(seq, layer, shape[1], data=(trace.encode(k), trace.encode(v)))

    @precondition(_some_written)
    @rule(seq=grown, anew=most, change=st.sampled_from(DRAWN), everywhere=st.booleans())
    def append_again(self, seq: int, anew: bool, change: str, everywhere: bool) -> None:
        """A sequence gets what it got before, or nearly so: in another life, or on top of it."""
        config = self.run.config
        step = 1 if Capability.INDEPENDENT_LAYERS in self.run.offers else config.n_layers
        told = self._told[seq][: LIFE // step * step]
        last = len(told) - step
        if anew:
            self.line("free", seq)
            self.line("add", seq)
        for i, op in enumerate(told):
            if i < last and not anew:
                continue
            again = changed(op, change, self.run.scalars, config) if everywhere or i >= last else op
            if self.line("append", seq, *again.args[1:], data=again.data, places=again.places):
                break

    @precondition(_can_truncate)
    @rule(seq=live, data=st.data())
    def truncate(self, seq: int, data: st.DataObject) -> None:
        """A sequence is cut back, as speculative decoding does (law 17)."""
        self.line("truncate", seq, data.draw(up_to(max(self.run.oracle.lens(seq)))))

    @precondition(_some_live)
    @rule(seq=live)
    def free(self, seq: int) -> None:
        """A sequence ends."""
        self.line("free", seq)

    @precondition(_some_live)
    @rule(seq=live, layer=layers, form=st.sampled_from(WRONG_FORMS))
    def append_wrong_arrays(self, seq: int, layer: int, form: str) -> None:
        """Arrays of a wrong shape or dtype are refused, and change nothing (laws 10, 15)."""
        self.line("append", seq, layer, 1, form=form)

    @precondition(_some_live)
    @rule(seq=live, data=st.data())
    def wrong_argument(self, seq: int, data: st.DataObject) -> None:
        """An id, a layer or a count that is out of bounds is refused, and changes nothing (laws 10, 15)."""
        unused = (i for i in itertools.count() if i not in self.run.oracle.tables)
        gone, child = itertools.islice(unused, 2)  # soon added, or forked onto
        end = self.run.config.n_layers
        longest = max(self.run.oracle.lens(seq))
        reads = [(gone, 0), *((seq, layer) for layer in (end, -1, -end, WORD))]
        calls: dict[str, Sequence[tuple[int | float, ...]]] = {
            "add": [(seq,), (0.5,)],
            "fork": [(gone, child), (child, gone), (seq, seq)],
            "append": [(seq, end, 1), (seq, -1, 1), (seq, 0.5, 1), (seq, WORD, 1), (gone, 0, 1)],
            "free": [(gone,)],
            "truncate": [(gone, 0), (seq, -1), (seq, longest + 1), (seq, 0.5), (seq, WORD)],
            "table": [(gone,)],
            "len": reads,
            "gather": reads,
            "needed": [*((*read, 1) for read in reads), (seq, 0, 0), (seq, 0.5, 1), (seq, 0, 1.5)],
            "pages": [*((layer, one) for one, layer in reads), (0, 0.5)],
            "runs": reads,
        }
        offered = [name for name in calls if OPERATIONS[name].needs in {"", *self.run.offers}]
        name = data.draw(one_of(tuple(offered)))
        args = data.draw(one_of(tuple(calls[name])))
        self.line(name, *args)

    @invariant()
    def block_conservation(self) -> None:
        """Every block is free or held, tables are as long as they must be, and sharing is as expected."""
        self.run.block_conservation()

    @invariant()
    def parent_immutability(self) -> None:
        """Every sequence but the one acted on equals the snapshot taken before the step."""
        self.run.parent_immutability()

    def teardown(self) -> None:
        """Level each sequence and free it; then find the pool whole, use the recycled blocks again."""
        try:
            if sys.exc_info()[1] is self._raised and self.run.ops:
                self._use_up()  # no law is broken, and the example was not cut short before its first step
        finally:
            self.search.programs += 1
            self.search.lines += len(self.run.ops)
        if time.monotonic() >= self.search.ends:  # not within a program: Hypothesis would call that flaky
            raise CutShort

    def _use_up(self) -> None:
        self._finish(self.run)
        if self._again and {Capability.EXACT_COST, Capability.INDEPENDENT_LAYERS} <= self.run.offers:
            again = Run(self.run.subject, self.observer())
            for op in self.run.ops:
                if op.refusal or op.name not in READS_BEYOND:
                    again.step(op._replace(quiet=True))
            self._finish(again)
        self._boxes = itertools.repeat(False)
        for seq in list(self.run.oracle.tables):
            self._looks = itertools.repeat(READ if seq in self.ids else QUIET)  # not each of very many
            for place in self.lagging(seq):
                self.catch_up(place)
                self.run.hold()
            self.line("free", seq)
            self.run.hold()
        self._looks = itertools.repeat(READ)
        blocks, size, *_ = self.run.config
        self.run.step(Op("add", (0,)))
        self.extend(0, self.run.config.n_layers - 1, blocks * size)
        self.run.hold()
        self.extend(0, 0, blocks * size + 1)
        self.run.step(Op("free", (0,)))
        self.run.step(Op("close"))
        self._finish(self.run)

    def _finish(self, run: Run) -> None:
        """Extensions are judged, if nothing is known of them yet."""
        try:
            if self.search.asks_extensions:
                run.finish()
        except LawBroken as broken:
            if not (broken.beyond and self.search.goes_on):
                raise


def shard(machine: type[CacheMachine], number: int, factory: Any = None) -> type[CacheMachine]:
    """A subclass that draws programs of its own: Hypothesis reads the seed from the class."""
    body = {} if factory is None else {"factory": staticmethod(factory)}
    made: type[CacheMachine] = seed(number)(type(machine.__name__, (machine,), body))
    return made


def state_machine_test(machine: type[CacheMachine], profile: settings | None = None) -> Any:
    """A unittest class for pytest to collect, under a name that starts with `Test`."""
    test = machine.TestCase
    test.settings = profile if profile is not None else current_profile()
    return test
