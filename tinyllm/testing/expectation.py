"""What the laws say must happen to an operation, by the oracle: pure functions, which touch no cache."""

from collections.abc import Iterator
from typing import NamedTuple

from tinyllm.testing.contract import Capability
from tinyllm.testing.forms import FORMS
from tinyllm.testing.operations import OPERATIONS
from tinyllm.testing.oracle import Oracle
from tinyllm.testing.trace import NotOffered, Op, TraceError

OUT_OF_BLOCKS = frozenset({"OutOfBlocks"})


class Due(NamedTuple):
    """What is due to an operation.

    Attributes:
        errors: the errors of which a right cache raises one; empty where it must succeed.
        price: the blocks that the operation takes if its arguments are right.
    """

    errors: frozenset[str] = frozenset()
    price: int = 0


def due(op: Op, oracle: Oracle, *, closed: bool) -> Due:
    """What is due to an operation on a cache that holds what the oracle does (laws 9, 14, 15)."""
    if op.name == "new":
        return Due(frozenset(_wrong_sizes(op.args)))
    if op.name == "close":
        return Due()
    wrong = frozenset(_wrong_arguments(op, oracle))
    if closed:
        return Due(wrong | {"ValueError"})
    if wrong:
        return Due(wrong)
    price = _price(op, oracle)
    return Due(OUT_OF_BLOCKS if price and price > oracle.free_blocks() else frozenset(), price)


def _price(op: Op, oracle: Oracle) -> int:
    if op.name == "append":
        return oracle.cost(*(int(a) for a in op.args))
    return oracle.fork_cost(int(op.args[0])) if op.name == "fork" else 0


def _wrong_sizes(sizes: tuple[int | float, ...]) -> Iterator[str]:
    if any(isinstance(size, float) for size in sizes):
        yield "TypeError"
    if any(size < 1 for size in sizes):
        yield "ValueError"


def _wrong_arguments(op: Op, oracle: Oracle) -> Iterator[str]:
    """The errors of law 15 that the arguments deserve."""
    live = oracle.tables
    given = dict(zip(OPERATIONS[op.name].arguments, op.args, strict=True))
    if any(isinstance(a, float) for a in op.args):
        yield "TypeError"
    if op.name == "add" and op.args[0] in live:
        yield "ValueError"
    if op.name == "fork" and op.args[1] in live:
        yield "ValueError"
    if op.name != "add" and any(given[name] not in live for name in ("sequence", "parent") if name in given):
        yield "KeyError"
    if not 0 <= given.get("layer", 0) < oracle.config.n_layers:
        yield "IndexError"
    if op.name == "truncate" and op.args[0] in live:
        longest = max(oracle.lens(int(op.args[0])))
        yield from [] if 0 <= op.args[1] <= longest else ["ValueError"]
    if given.get("tokens", 1) < 1:
        yield "ValueError"
    if op.form and FORMS[op.form].refusal:
        yield FORMS[op.form].refusal


def in_step(seq: int, oracle: Oracle, offers: frozenset[str]) -> bool:
    """Whether more layers of a sequence have to follow before the cache says again what it holds."""
    return Capability.INDEPENDENT_LAYERS not in offers and len(set(oracle.lens(seq))) > 1


def check_offered(op: Op, oracle: Oracle, offers: frozenset[str]) -> None:
    """Raises NotOffered for a line that the cache does not promise to answer; `offers` has its extensions."""
    needs = OPERATIONS[op.name].needs
    if needs and needs not in offers:
        raise NotOffered(needs)
    if Capability.INDEPENDENT_LAYERS in offers:
        return
    behind = {seq: lens for seq in oracle.tables if len(set(lens := oracle.lens(seq))) > 1}
    for seq, lens in behind.items():  # a step is under way: its next layer is all that may come
        layer = lens.index(min(lens))
        if op.name != "append" or op.args[:2] != (seq, layer) or op.args[2] != lens[0] - lens[layer]:
            raise NotOffered(Capability.INDEPENDENT_LAYERS)
    first = op.name == "append" and not op.refusal and not behind
    if first and op.args[0] in oracle.tables and op.args[1] != 0:
        raise NotOffered(Capability.INDEPENDENT_LAYERS)


def check_claim(op: Op, errors: frozenset[str], offers: frozenset[str]) -> None:
    """Raises TraceError where a line expects what no right cache does, NotOffered where this one need not."""
    if bool(op.refusal) == bool(errors) and (not errors or op.refusal in errors):
        return
    if lacking := {Capability.LAZY_COPY, Capability.EXACT_COST} - offers:  # written for a cache with more
        raise NotOffered(", ".join(sorted(lacking)))
    said = f"expects {op.refusal}" if op.refusal else "expects success"
    right = f"would be refused with {' or '.join(sorted(errors))}" if errors else "would succeed"
    raise TraceError(f"'{op}' {said}, but a right cache {right} here")


def refusal(
    op: Op, errors: frozenset[str], raised: frozenset[str] | None, offers: frozenset[str]
) -> frozenset[str]:
    """The errors of which the call must have raised one, now that it is known what it `raised`.

    They are `errors`, but for a cache that promises no exact cost: what it refuses or accepts is its own.
    """
    if Capability.EXACT_COST in offers or op.name not in {"append", "fork"}:
        return errors
    if raised is not None and raised >= OUT_OF_BLOCKS:
        return OUT_OF_BLOCKS
    return frozenset() if raised is None and errors == OUT_OF_BLOCKS else errors
