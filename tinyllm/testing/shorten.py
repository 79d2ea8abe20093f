"""Make the program of a broken law smaller, whatever found it.

Hypothesis shrinks what the machine draws; this finishes the job, and does it for directed cases as well.
"""

from collections.abc import Iterable

from tinyllm.testing.contract import Factory
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.run import replay
from tinyllm.testing.trace import Op, TraceError, parse


def shorten(factory: Factory, broken: LawBroken) -> LawBroken:
    """The same law broken by a smaller program: no line of it can go, and no number in it can be lower."""
    smaller: LawBroken | None = broken
    while smaller is not None:
        broken = smaller
        candidates = _smaller(parse(broken.trace))
        smaller = next(filter(None, (_breaks(factory, ops, broken.law) for ops in candidates)), None)
    return broken


def _breaks(factory: Factory, ops: list[Op], law: int) -> LawBroken | None:
    try:
        replay(factory, "".join(f"{op}\n" for op in ops))
    except LawBroken as broken:
        return broken if broken.law == law else None
    except TraceError:  # without the line left out, another makes no sense
        pass
    return None


def _smaller(ops: list[Op]) -> Iterable[list[Op]]:
    """Programs that are simpler in one way each; the boldest cuts come first."""
    size = len(ops) // 2
    while size:
        # Every window of a few lines, for lines that must go together; of many, only those side by side.
        step = 1 if size < 8 else size
        yield from (ops[:i] + ops[i + size :] for i in range(len(ops) - size, -1, -step))
        size = size // 2 if size >= 16 else size - 1
    for i, op in enumerate(ops):
        simpler = [op._replace(form=""), op._replace(data=None)]
        for at, number in enumerate(op.args):
            lower = {0, 1, int(number) // 2, int(number) - 1} if isinstance(number, int) else set()
            values = sorted(v for v in lower if 0 <= v < number)
            simpler += [op._replace(args=(*op.args[:at], value, *op.args[at + 1 :])) for value in values]
        yield from ([*ops[:i], one, *ops[i + 1 :]] for one in simpler if one != op)
