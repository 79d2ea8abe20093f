"""Make the program of a broken law smaller, whatever found it.

Hypothesis shrinks what the machine draws; this finishes the job, and does it for directed cases as well.
"""

import contextlib
from collections.abc import Iterator, Set
from itertools import pairwise

from tinyllm.testing.contract import Factory
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.operations import OPERATIONS, SEQUENCES
from tinyllm.testing.run import Run
from tinyllm.testing.time_limit import CutShort, NotReturned, limited
from tinyllm.testing.trace import Op, TraceError, parse

WORK = 100_000
"""What a search may cost, in looks at a sequence: seconds. A program of a few lines costs a tenth of it, but
one that needs 128 forks is looked at so often that it stays a little longer than it could be. A call that has
to be stopped counts for an eighth."""
SECONDS = 60.0  # the same for a slow cache


def shorten(factory: Factory, broken: LawBroken) -> LawBroken:
    """The same law broken by a smaller program: no line of it can go, and no number in it can be lower.

    What must be refused is derived anew. The search ends early where it costs more than `WORK`, or takes
    longer than `SECONDS`; then something of it might.
    """
    left = WORK
    candidates = _smaller(parse(broken.trace))
    with contextlib.suppress(CutShort), limited(SECONDS):
        while (ops := next(candidates, None)) is not None and left > 0:
            left -= _work(ops)
            smaller = _breaks(factory, ops)
            if smaller is not None and isinstance(smaller.__cause__, NotReturned):
                left -= WORK // 8
            if smaller is not None and (smaller.law, smaller.beyond) == (broken.law, broken.beyond):
                broken = smaller
                candidates = _smaller(parse(broken.trace))
    return broken


def _work(ops: list[Op]) -> int:
    """How often running a program looks at a sequence: each that is live, after each line; more if long."""
    live = held = total = 0
    for op in ops:
        live += {"add": 1, "fork": 1, "free": -1}.get(op.name, 0)
        held += int(op.args[2]) if op.name == "append" else 0
        total += (1 + max(0, live)) * (1 + max(0, held) // 50)
    return total


def _breaks(factory: Factory, ops: list[Op]) -> LawBroken | None:
    run = Run(factory)
    try:
        for op in ops:
            run.draw(op._replace(refusal=""))  # of another program something else is refused
            run.hold()
        run.finish()
    except LawBroken as broken:
        return broken
    except TraceError:  # without the line left out, another makes no sense
        pass
    return None


def _smaller(ops: list[Op]) -> Iterator[list[Op]]:
    """Programs that are simpler in one way each; the boldest cuts come first."""
    size = len(ops) // 2
    while size:
        # Every window of a few lines, for lines that must go together; of many, only those side by side.
        step = 1 if size < 8 else size
        yield from (ops[:i] + ops[i + size :] for i in range(len(ops) - size, -1, -step))
        size = size // 2 if size >= 16 else size - 1
    yield from _renumbered(ops)
    for i, (one, other) in enumerate(pairwise(ops)):
        if one == other._replace(args=(*other.args[:2], *one.args[2:])) and one.name == "append":
            both = one._replace(args=(*one.args[:2], one.args[2] + other.args[2]))
            yield [*ops[:i], both, *ops[i + 2 :]]
    for i, op in enumerate(ops):
        yield from ([*ops[:i], one, *ops[i + 1 :]] for one in _simpler(op) if one != op)
    yield from (fewer for fewer in _jointly(ops) if fewer != ops)


def _jointly(ops: list[Op]) -> Iterator[list[Op]]:
    """Several things less at once, since a pool may have to be full: blocks with lines, lengths or layers."""
    if not ops or ops[0].name != "new" or ops[0].refusal:
        return
    blocks, size, layers, *_ = map(int, ops[0].args)
    appends = {i: int(op.args[2]) for i, op in enumerate(ops) if op.name == "append"}
    for layer in range(layers if layers > 1 else 0):
        yield _resized(_without_layer(ops, layer), 2, layers - 1)
    if size > 1:
        yield _resized(_with_lengths(ops, {i: -(-n // size) for i, n in appends.items()}), 1, 1)
    for fewer in _halves(blocks):
        less = _resized(ops, 0, blocks - fewer)
        yield from ([*less[:i], *less[i + 1 :]] for i in range(len(ops) - 1, 0, -1))
        for n in dict.fromkeys((fewer * size, fewer)):
            yield from (_with_lengths(less, {i: old - n}) for i, old in appends.items() if old > n)
    for fewer in _halves(max(appends.values(), default=1)):
        shorter = _with_lengths(ops, {i: max(1, n - fewer) for i, n in appends.items()})
        for most in dict.fromkeys((blocks, blocks - 1, blocks - -(-fewer // size), -(-blocks // 2))):
            yield _resized(shorter, 0, max(1, most))


def _halves(number: int) -> list[int]:
    """By how much a number can be lowered, and stay 1 or more: first to 1, then as in a bisection."""
    return list(dict.fromkeys(n for n in (number - 1, *(number >> i for i in range(1, 32))) if n))


def _resized(ops: list[Op], at: int, size: int) -> list[Op]:
    sizes = (*ops[0].args[:at], size, *ops[0].args[at + 1 :])
    return [ops[0]._replace(args=sizes), *ops[1:]]


def _without_layer(ops: list[Op], layer: int) -> list[Op]:
    """Layers above it are one lower."""
    made = []
    for op in ops:
        kinds = OPERATIONS[op.name].arguments
        if "layer" in kinds:
            at = kinds.index("layer")
            if op.args[at] == layer:
                continue
            lower = op.args[at] - (op.args[at] > layer)
            op = op._replace(args=(*op.args[:at], lower, *op.args[at + 1 :]))  # noqa: PLW2901
        made.append(op)
    return made


def _with_lengths(ops: list[Op], lengths: dict[int, int]) -> list[Op]:
    """Other lengths of the appends at these places; data go where they do not fit any more."""
    made = list(ops)
    for i, n in lengths.items():
        if made[i].args[2] != n:
            made[i] = made[i]._replace(args=(*made[i].args[:2], n), data=None)
    return made


def _renumbered(ops: list[Op]) -> Iterator[list[Op]]:
    """Sequences numbered in the order they come; a layer, one lower: in all lines at once."""
    places = [place for op in ops for place in zip(OPERATIONS[op.name].arguments, op.args, strict=True)]
    ids = dict.fromkeys(arg for kind, arg in places if kind in SEQUENCES)
    yield from _changed(ops, SEQUENCES, {one: i for i, one in enumerate(ids)})
    for layer in sorted({arg for kind, arg in places if kind == "layer" and arg > 0}):
        yield from _changed(ops, {"layer"}, {layer: layer - 1})


def _changed(ops: list[Op], kinds: Set[str], to: dict[int | float, int | float]) -> Iterator[list[Op]]:
    def args(op: Op) -> tuple[int | float, ...]:
        places = zip(OPERATIONS[op.name].arguments, op.args, strict=True)
        return tuple(to.get(arg, arg) if kind in kinds else arg for kind, arg in places)

    made = [op._replace(args=args(op)) for op in ops]
    if made != ops:
        yield made


def _simpler(op: Op) -> Iterator[Op]:
    """The line without its form or data, or with one number lower: near 0 first, then as in a bisection."""
    yield op._replace(quiet=False)
    yield op._replace(boxed=False)
    yield op._replace(form="")
    yield op._replace(data=None)
    yield op._replace(places=None)
    for at, number in enumerate(op.args):
        halves = [number >> i for i in range(1, number.bit_length())] if isinstance(number, int) else []
        for value in sorted({0, 1, *(number - half for half in halves)}):
            if 0 <= value < number:
                yield op._replace(args=(*op.args[:at], value, *op.args[at + 1 :]))
