"""Directed cases in plain calls: what no trace can say, and what would take too long as one.

Each is a function of a factory that raises LawBroken. It looks only where it says, so that 70,000 sequences
cost a second, and asks nothing of a cache that lacks the capability for it.
"""

import contextlib
import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyllm.testing.contract import Capability, Factory, extensions
from tinyllm.testing.in_step import follow, steps, take
from tinyllm.testing.laws import JUNK, LawBroken
from tinyllm.testing.observe import attempt, failed, named, rounding_told, shown
from tinyllm.testing.operations import METHODS
from tinyllm.testing.oracle import half
from tinyllm.testing.run import Run
from tinyllm.testing.subject import Subject
from tinyllm.testing.time_limit import CutShort
from tinyllm.testing.trace import parse

MEGABYTE = 1 << 20


class _Asked:
    """A cache, and calls of it that must succeed."""

    def __init__(self, factory: Factory, *sizes: Any) -> None:
        self.offers = Subject.of(factory).capabilities
        cache, error = attempt(lambda: factory(*sizes))
        if error is not None:
            raise LawBroken(15, "new", f"a cache of the sizes {sizes}", named(error)) from error
        self.cache: Any = cache

    def __call__(self, method: str, *args: Any) -> Any:
        with rounding_told(method):
            answer, error = attempt(lambda: getattr(self.cache, method)(*args))
        if error is not None:
            raise failed(METHODS.get(method, method), _call(method, args), error) from error
        return answer

    def append(self, seq: Any, first: int, tokens: int, layer: Any = 0) -> None:
        """Values `first`, `first + 1`..., in a cache of one head and one dimension."""
        k = np.arange(first, first + tokens, dtype=np.float32).reshape(1, tokens, 1)
        self("append", seq, layer, k, -k)

    def holds(self, law: int, seq: Any, values: list[int], layer: Any = 0) -> None:
        k, v = (np.asarray(array).ravel().tolist() for array in self("gather", seq, layer))
        if k != values or v != [-value for value in values]:
            raise LawBroken(
                law, "contents", f"K of gather({seq}, {layer}) == {values}, and V == -K", f"{k}, {v}"
            )
        if self("seq_len", seq, layer) != len(values):
            raise LawBroken(4, "lengths", f"seq_len({seq}, {layer}) == {len(values)}", "another number")

    def is_free(self, law: int, blocks: int, when: str) -> None:
        if Capability.COUNTS in self.offers and (found := self("num_free_blocks")) != blocks:
            raise LawBroken(law, "free blocks", f"num_free_blocks() == {blocks} {when}", shown(found))


def _call(method: str, args: tuple[Any, ...]) -> str:
    arrays = [f"{a.dtype} {a.shape}" if isinstance(a, np.ndarray) and a.ndim else repr(a)[:80] for a in args]
    return f"{method}({', '.join(arrays)})"


def many_forks(factory: Factory, count: int, tell: Callable[[], object] | None = None) -> None:
    """Laws 6-8 with one block in very many tables, and very many sequences. `tell` may say it better."""
    if not {Capability.FORK, Capability.LAZY_COPY} <= Subject.of(factory).capabilities:
        return
    cache = _Asked(factory, 8, 2, 1, 1, 1)
    cache("add_seq", 0)
    cache.append(0, 1, 1)
    try:
        for seq in range(1, count):
            cache("fork", 0, seq)
        cache.is_free(7, 7, f"after {count - 1:,} forks of one block")
        cache.append(9, 2, 1)
        cache.holds(8, 9, [1, 2])
        for seq in (0, 1, count - 1):
            cache.holds(7, seq, [1])
        cache.is_free(8, 6, f"after an append to one of {count:,} holders of a block")
        for seq in range(count - 1):
            cache("free", seq)
        cache.is_free(6, 7, f"when one of {count:,} holders of a block is left")
        cache.append(count - 1, 3, 2)
        cache.holds(3, count - 1, [1, 3, 4])
        cache.is_free(8, 6, f"after the last of {count:,} holders wrote in place")
        cache("free", count - 1)
        cache.is_free(6, 8, f"when all of {count:,} sequences are freed")
        for seq in range(500):
            cache("add_seq", seq)
        cache.append(499, 5, 3)
        cache.holds(3, 499, [5, 6, 7])
        cache.holds(13, 250, [])
    except LawBroken:
        if tell is not None:
            with contextlib.suppress(CutShort):
                tell()
        raise


TWO = """
new 6 2 1 1 2
add 0
append 0 0 3
fork 0 1
append 1 0 2
free 0
add 2
append 2 0 1
free 1
append 2 0 4
"""


LARGER = """
new 9 3 2 2 1
add 0
append 0 0 4
append 0 1 4
fork 0 1
append 1 0 2
append 1 1 2
free 1
add 2
append 2 0 5
append 2 1 5
fork 0 1
append 0 0 1
append 0 1 1
"""
CLOSED_TWICE = """
new 6 2 1 1 2          # a pool that is to be given back once
add 0
append 0 0 3
close
close
"""


def two_caches(factory: Factory) -> None:
    """Law 12: another cache, of the same or of other sizes, used in turns with it, changes nothing."""
    if not {Capability.FORK, Capability.LAZY_COPY} <= Subject.of(factory).capabilities:
        return
    for alone in (TWO, LARGER, CLOSED_TWICE):
        follow(factory, alone)
    for what, one, other in (
        ("the same sizes", TWO, TWO),
        ("other sizes", LARGER, TWO),
        ("other sizes", TWO, LARGER),
    ):
        try:
            _in_turns(factory, one, other)
        except LawBroken as broken:
            due = f"{broken.expected}, while another cache of {what} is used in turns with this one"
            raise LawBroken(12, "two caches", due, broken.found) from broken.__cause__


def _in_turns(factory: Factory, one: str, other: str) -> None:
    runs = [Run(factory), Run(factory)]
    lines = [list(steps(parse(text))) for text in (one, other)]
    for i in range(max(map(len, lines)) + 3):
        for run, mine, at in zip(runs, lines, (i, i - 3), strict=True):  # the second lags behind
            for step in mine[max(0, at) : max(0, at + 1)]:
                take(run, step)
    runs[1].step(parse("close")[0])
    for step in steps(parse("append 2 0 1")):
        take(runs[0], step)


def other_integers(factory: Factory) -> None:
    """Law 15: what has `__index__` is an integer, and nothing else is; a layer left out is layer 0."""
    integers = np.int64, np.int32, np.uint8
    cache = _Asked(factory, *map(np.int64, (20, 2, 2, 1, 1)))
    alone = Capability.INDEPENDENT_LAYERS in cache.offers
    for i, kind in enumerate(integers):
        cache("add_seq", kind(i))
        for layer in (0, 1):
            cache.append(kind(i), 10 * i + 1, 3, kind(layer))
        cache.holds(3, i, [10 * i + 1, 10 * i + 2, 10 * i + 3], 1)
        cache.holds(3, kind(i), [10 * i + 1, 10 * i + 2, 10 * i + 3], kind(0))
    if alone:
        cache.append(1, 50, 2, 1)
    if (found := cache("seq_len", 1)) != 3:
        raise LawBroken(4, "lengths", "seq_len(1) == 3, the length of layer 0", shown(found))
    if Capability.BLOCK_TABLES in cache.offers and len(cache("block_table", np.int64(2))) != 2:
        raise LawBroken(2, "table length", "2 blocks in the table of sequence 2", "another number")
    cache("free", np.int64(0))
    if Capability.FORK in cache.offers:
        cache("fork", np.int64(1), np.int64(0))
        cache.holds(7, 0, [11, 12, 13])
    one = np.ones((1, 1, 1), np.float32)
    wrong: list[Any] = [None, "1", b"1", (1,), [1], {}, 1j, np.float64(1)]
    for bad in wrong:
        for method, args in (
            ("add_seq", (bad,)),
            ("free", (bad,)),
            ("append", (bad, 0, one, one)),
            ("append", (1, bad, one, one)),
            ("seq_len", (bad, 0)),
            ("seq_len", (1, bad)),
            ("gather", (bad, 0)),
            ("gather", (1, bad)),
            *([("fork", (1, bad)), ("fork", (bad, 7))] if Capability.FORK in cache.offers else []),
            *([("block_table", (bad,))] if Capability.BLOCK_TABLES in cache.offers else []),
        ):
            _refused(cache, method, args)
    cache.holds(10, 1, [11, 12, 13])


def _refused(cache: _Asked, method: str, args: tuple[Any, ...]) -> None:
    """By TypeError; as what is no integer is no live id either, a KeyError will do."""
    error = attempt(lambda: getattr(cache.cache, method)(*args))[1]
    right = (TypeError, KeyError) if Capability.EXACT_ERRORS in cache.offers else Exception
    if not isinstance(error, right):
        found = "it was accepted" if error is None else named(error)
        raise LawBroken(15, method, f"{_call(method, args)} is refused with TypeError", found) from error


def _arrays() -> Iterator[tuple[str, Any, Any]]:
    """K and V `[2, 2, 2]` in all sorts of types, at the edges of float16."""
    shape = (2, 2, 2)
    halves = np.array([np.nan, -0.0, np.inf, 2.0**-24, -6e-5, 65504, -(2.0**-24), 1 + 2.0**-10], np.float16)
    doubles = np.array(
        [
            1 + 2.0**-11 + 2.0**-40,
            3 + 2.0**-10 - 2.0**-40,
            2.0**-25 + 2.0**-70,
            65519.99999999,
            1e300,
            -1e-300,
            5e-324,
            0.1,
        ]
    )
    for kind in ("<f2", ">f2"):
        yield kind, halves.astype(kind).reshape(shape), halves[::-1].astype(kind).reshape(shape)
    for kind in ("<f8", ">f8", "longdouble"):
        yield kind, doubles.astype(kind).reshape(shape), doubles[::-1].astype(kind).reshape(shape)
    for kind in ("int8", "uint8", "int16", "uint16", ">i4", "uint32", "int64", "uint64"):
        ends = np.iinfo(kind)
        some = np.array([ends.min, ends.max, 1, 100, 0, 17, ends.max // 2, ends.max - 1], kind)
        yield kind, some.reshape(shape), some[::-1].reshape(shape)
    one = np.float32(3)
    yield "one value everywhere, of stride 0", np.broadcast_to(one, shape), np.broadcast_to(-one, shape)
    same = np.arange(8, dtype=np.float32).reshape(shape)
    yield "the same array as K and as V", same, same
    yield "V that is a view of K", same, same[::-1]
    yield "Fortran-ordered K, and V in C order", np.asfortranarray(same), -same
    for layout in (halves.reshape(shape), halves[::-1].reshape(shape).swapaxes(0, 1)):
        both = np.stack([layout, -layout])
        yield "the halves of one float16 array", both[0], both[1]


def other_arrays(factory: Factory) -> None:
    """Laws 3 and 12: every type of number is rounded once, by NumPy's cast, wherever its memory lies."""
    cache = _Asked(factory, 30, 3, 1, 2, 2)
    cache("add_seq", 0)
    due: list[NDArray[np.float16]] = [np.zeros((2, 0, 2), np.float16)] * 2
    for what, k, v in _arrays():
        left = k.tobytes(), v.tobytes()
        cache("append", 0, 0, k, v)
        if (k.tobytes(), v.tobytes()) != left:
            raise LawBroken(
                12, "arguments", f"an append of {what} leaves K and V as they were", "it wrote there"
            )
        due = [np.concatenate([old, half(new)], axis=1) for old, new in zip(due, (k, v))]
        for array in (k, v):
            if array.flags.writeable:
                array[...] = 1 if array.dtype.kind != "f" else JUNK
        for name, found, right in zip("KV", cache("gather", 0, 0), due):
            bits = half(found)
            if bits.shape != right.shape or bits.tobytes() != np.ascontiguousarray(right).tobytes():
                raise LawBroken(
                    12 if JUNK in bits else 3,
                    "contents",
                    f"{name} after an append of {what} ends with {right[:, -2:].tolist()}",
                    f"{bits[:, -2:].tolist()}",
                )


def closed(factory: Factory) -> None:
    """Law 14: every call of a closed cache is refused, whatever was in it."""
    cache = _Asked(factory, 4, 2, 1, 1, 1)
    cache("add_seq", 0)
    cache.append(0, 1, 3)
    cache("close")
    one = np.ones((1, 1, 1), np.float32)
    calls: dict[str, tuple[Any, ...]] = {
        "add_seq": (0,),
        "append": (0, 0, one, one),
        "seq_len": (0,),
        "gather": (0, 0),
        "free": (0,),
        **({"fork": (0, 1)} if Capability.FORK in cache.offers else {}),
        **({"block_table": (0,)} if Capability.BLOCK_TABLES in cache.offers else {}),
        **({"stats": (), "num_free_blocks": ()} if Capability.COUNTS in cache.offers else {}),
    }
    beyond = {
        "blocks_needed": (0, 0, 1),
        "truncate": (0, 0),
        "page_table": ([0], 0),
        "check": (),
        "gather_runs": (0, 0),
    }
    calls |= {name: beyond[name] for name in sorted(extensions(cache.cache))}
    right = ValueError if Capability.EXACT_ERRORS in cache.offers else Exception
    for method, args in calls.items():
        answer, error = attempt(lambda: getattr(cache.cache, method)(*args))  # noqa: B023 - called at once
        if error is None and method == "gather_runs":  # it may be a generator
            error = attempt(lambda: [*answer])[1]  # noqa: B023
        if not isinstance(error, right):
            found = "it was accepted" if error is None else named(error)
            due = f"{_call(method, args)} after close raises ValueError"
            raise LawBroken(14, method, due, found, beyond=method in beyond)


def representation(factory: Factory) -> None:
    """Law 14: `repr` never raises, whatever state the cache is in."""
    cache = _Asked(factory, 4, 2, 1, 1, 1)

    def check(when: str) -> None:
        text, error = attempt(lambda: repr(cache.cache))
        if error is not None or not isinstance(text, str):
            found = shown(text) if error is None else named(error)
            raise LawBroken(14, "repr", f"repr of a cache {when} is a string", found) from error

    check("that is new")
    cache("add_seq", 0)
    check("with an empty sequence")
    cache.append(0, 1, 3)
    check("that holds something")
    if Capability.EXACT_COST in cache.offers:
        cache.append(0, 1, 5)
        check("that is full")
    cache("close")
    check("that is closed")


def context(factory: Factory) -> None:
    """Law 14: leaving a `with` block closes, and lets errors through. For caches that have one at all."""
    cache = _Asked(factory, 4, 2, 1, 1, 1)
    if not any(hasattr(type(cache.cache), name) for name in ("__enter__", "__exit__")):
        return

    def fail(_: _Asked) -> None:
        raise _Inside

    for what, inside in (("leaving", _nothing), ("closing inside, and leaving,", lambda one: one("close"))):
        if (error := _inside(cache, inside)) is not None:
            raise LawBroken(14, "with", f"{what} a `with` block succeeds", named(error)) from error
        cache = _Asked(factory, 4, 2, 1, 1, 1)
    if not isinstance(error := _inside(cache, fail), _Inside):
        found = "it was swallowed" if error is None else named(error)
        raise LawBroken(14, "with", "an error inside a `with` block comes through", found)
    if _entered(cache, _nothing) is None:
        raise LawBroken(14, "with", "a closed cache is refused by `with`", "it was accepted")


def _entered(cache: _Asked, inside: Callable[[_Asked], object]) -> BaseException | None:
    """What comes out of a `with` block."""

    def enter() -> None:
        with cache.cache as entered:
            if entered is not cache.cache:
                raise LawBroken(14, "with", "`with cache as c` gives the cache itself", shown(entered))
            inside(cache)

    return attempt(enter)[1]


def _inside(cache: _Asked, inside: Callable[[_Asked], object]) -> BaseException | None:
    """The same for a cache in use, which must be closed afterwards."""

    def use(one: _Asked) -> None:
        one("add_seq", 0)
        one.append(0, 1, 1)
        inside(one)

    error = _entered(cache, use)
    if isinstance(error, LawBroken):
        raise error
    if attempt(lambda: cache.cache.seq_len(0, 0))[1] is None:
        raise LawBroken(14, "with", "a cache is closed once its `with` block is left", "it can be used")
    return error


def _nothing(_: _Asked) -> None:
    pass


class _Inside(Exception):  # noqa: N818 - raised to be seen again
    pass


def memory(factory: Factory) -> None:
    """Law 14: `close` gives the pool back, as far as Python's own accounting of memory sees it."""
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        cache = _Asked(factory, 64, 64, 4, 4, 32)  # 8 MiB of float16
        cache("add_seq", 0)
        ones = np.ones((4, 65, 32), np.float32)
        for layer in range(4):
            cache("append", 0, layer, ones, ones)
        cache("close")
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        if not tracing:
            tracemalloc.stop()
    if held > 4 * MEGABYTE:
        raise LawBroken(14, "memory", "a closed cache has given its pool back", f"it holds {held:,} bytes")


def collected(factory: Factory) -> None:
    """Law 14: nothing but the caller keeps a cache alive, not even a cycle of its own."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for closed in (False, True):
            alive = _used(factory, closed=closed)
            if alive is None or alive() is None:
                continue
            gc.collect()
            what = "something keeps it" if alive() is not None else "only the collector of cycles frees it"
            raise LawBroken(14, "garbage collection", "a cache that nobody holds is given back at once", what)
    finally:
        if enabled:
            gc.enable()


def _used(factory: Factory, *, closed: bool) -> weakref.ref[Any] | None:
    """A weak reference to a cache that was used and is held by nobody."""
    cache = _Asked(factory, 4, 2, 1, 1, 1)
    cache("add_seq", 0)
    cache.append(0, 1, 3)
    reads = {"gather": (0, 0), "seq_len": (0, 0), "block_table": (0,), "stats": (), "__repr__": ()}
    for method, args in reads.items():
        with contextlib.suppress(Exception):
            getattr(cache.cache, method)(*args)
    big = np.ones((1, 9, 1), np.float32)
    with contextlib.suppress(Exception):
        cache.cache.append(0, 0, big, big)
    with contextlib.suppress(Exception):
        cache.cache.append(0, 0, None, None)
    if Capability.FORK in cache.offers and Capability.LAZY_COPY in cache.offers:
        cache("fork", 0, 1)
        cache("free", 0)
    if closed:
        cache("close")
    try:
        return weakref.ref(cache.cache)
    except TypeError:  # slots without __weakref__: it cannot be seen from outside
        return None
