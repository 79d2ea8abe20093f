"""The calls of a program, made on the cache under test, and the looks between them."""

from typing import Any

import numpy as np

from tinyllm.testing import trace
from tinyllm.testing.contract import Capability, Config, extensions
from tinyllm.testing.extensions import Asked, ask_extensions, check_extensions, check_need
from tinyllm.testing.forms import FORMS, Values
from tinyllm.testing.laws import JUNK, JUNK_BLOCK, LawBroken, View
from tinyllm.testing.observe import (
    Answer,
    Answers,
    Held,
    attempt,
    image,
    look_at_contents,
    look_at_counts,
    rounding_told,
    scribble,
)
from tinyllm.testing.operations import OPERATIONS, SEQUENCES
from tinyllm.testing.oracle import Oracle
from tinyllm.testing.subject import Subject
from tinyllm.testing.trace import Op


class Boxed:
    """An integer by `__index__` alone: as a key it is equal to nothing but itself."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __index__(self) -> int:
        return self._number

    def __repr__(self) -> str:
        return f"<{self._number}>"


def _as_given(op: Op) -> list[Any]:
    """The numbers of a line as they are handed over: where it says so, ids boxed and others as 0-d arrays."""
    if not op.boxed:
        return [*op.args]
    given: list[Any] = []
    for kind, number in zip(OPERATIONS[op.name].arguments, op.args, strict=True):
        if isinstance(number, float):
            given.append(number)
        else:
            given.append(Boxed(number) if kind in SEQUENCES else np.array(number))
    return given


class Caller:
    """Makes the calls, overwrites every array that was passed or returned, and looks at the cache (law 12).

    Attributes:
        subject: what is called.
        cache: the one that the last `new` made.
        offers: the subject's capabilities, and the extensions of this cache.
        passed: K and V `[H, T, D]` of the last append.
        scalars: how many values of the pattern have been stored since `new`.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.cache: Any = None
        self.offers: frozenset[str] = frozenset(subject.capabilities)
        self.passed: tuple[Values, Values]
        self.scalars = 0
        self._answers = Answers()
        self._pages = Held()
        self._junk = JUNK_BLOCK
        self._asked: Asked | LawBroken | None = None

    def new(self, sizes: tuple[int | float, ...], *, keep: bool) -> BaseException | None:
        """Make a cache; what was raised. One that should have been refused is not kept."""
        cache, error = attempt(lambda: self.subject(*sizes))
        if error is None and keep:
            self.cache, self.scalars = cache, 0
            self.offers = self.subject.capabilities | extensions(cache)
        return error

    def call(self, op: Op, config: Config) -> BaseException | None:
        """Make any other call; what was raised."""
        if op.name == "append":
            return self._append(op, config)
        method, numbers = OPERATIONS[op.name].method, _as_given(op)
        args = [[numbers[1]], numbers[0]] if op.name == "pages" else numbers
        with rounding_told(op.name):
            answer, error = attempt(lambda cache: getattr(cache, method)(*args), self.cache)
            if op.name == "runs" and error is None:  # it may be a generator
                _, error = attempt(lambda: [*answer])
        scribble(numbers, JUNK_BLOCK)
        return error

    def _append(self, op: Op, config: Config) -> BaseException | None:
        k, v = trace.values(op, self.scalars, config)
        self.passed = k.copy(), v.copy()  # what becomes of the others is the cache's doing
        given = FORMS[op.form].make(k, v) if op.form else (k, v)
        left, numbers = (image(given[0]), image(given[1])), _as_given(op)[:2]
        with rounding_told("append"):
            _, error = attempt(lambda cache: cache.append(*numbers, *given), self.cache)
        if (image(given[0]), image(given[1])) != left:
            raise LawBroken(12, "arguments", f"'{op}' leaves K and V as they were", "it wrote into them")
        for array in given:
            scribble(array, JUNK)
        scribble(numbers, JUNK_BLOCK)
        return error

    def stored(self, op: Op) -> None:
        """The values of an append have been stored: the pattern goes on after them."""
        self.scalars += self.passed[0].size if op.data is None and op.places is None else 0

    def counts(self, oracle: Oracle) -> View:
        """A look at tables, lengths and counts. Raises LawBroken for an answer of the wrong kind."""
        return look_at_counts(self.cache, oracle, self.offers, self._answers)

    def contents(self, oracle: Oracle, counts: View) -> View:
        """The rest of that look. Raises LawBroken as well."""
        return look_at_contents(self.cache, oracle, self.offers, self._answers, counts)

    def wrong_need(self, op: Op, price: int) -> LawBroken | None:
        """What is wrong with what `blocks_needed` says of an append that is about to come, if anything."""
        if {"blocks_needed", Capability.EXACT_COST} <= self.offers:
            try:
                check_need(self.cache, op.args, price)
            except LawBroken as broken:
                return broken
        return None

    def ask_extensions(self, oracle: Oracle) -> None:
        """Ask what goes beyond the ten; `wrong_extension` judges it."""
        self._junk -= 1
        try:
            live = list(oracle.tables)
            self._asked = ask_extensions(self.cache, self.offers, live, oracle.config, self._junk)
            arrays = [(one.call, array) for one in self._asked.pages for array in one.arrays]
            self._pages.hold([Answer(call, array, image(array)) for call, array in arrays])
        except LawBroken as broken:
            self._asked = broken

    def wrong_extension(self, view: View, oracle: Oracle) -> LawBroken | None:
        """What is wrong with what the other extensions said or, if they were not asked, say."""
        if self._asked is None:
            self.ask_extensions(oracle)
        asked, self._asked = self._asked, None
        try:
            if isinstance(asked, Asked):
                check_extensions(asked, view, oracle.config.block_size)
        except LawBroken as broken:
            return broken
        return asked if isinstance(asked, LawBroken) else None

    def check_answers(self) -> None:
        """Raise LawBroken where an answer of any look has changed (law 12)."""
        self._answers.check()

    def wrong_answer(self) -> LawBroken | None:
        """The same of the extensions' answers."""
        try:
            self._pages.check()
        except LawBroken as broken:
            return broken
        return None
