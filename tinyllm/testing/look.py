"""Look at a cache: everything that a caller can observe of it, with every answer checked for its kind."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyllm.testing.laws import JUNK, JUNK_BLOCK, LawBroken, View
from tinyllm.testing.oracle import Oracle

LAW_OF = {
    "new": 15,
    "add": 13,
    "fork": 7,
    "append": 9,
    "free": 6,
    "truncate": 17,
    "table": 1,
    "len": 4,
    "gather": 3,
    "stats": 5,
    "close": 14,
}
"""The law that a call breaks when it raises although nothing is wrong with it."""


def look(cache: Any, oracle: Oracle, offers: frozenset[str]) -> View:
    """Everything observable of the live sequences, copied, as far as the cache offers it.

    The arrays that came back are overwritten (law 12). Raises LawBroken for an answer of the wrong kind.
    """
    live = list(oracle.tables)
    layers = range(oracle.config.n_layers)
    tables = (
        {seq: _table(cache, seq, oracle.config.num_blocks) for seq in live}
        if "block-tables" in offers
        else {}
    )
    lens = {seq: [_count(cache, "len", "seq_len", seq, layer) for layer in layers] for seq in live}
    contents = {seq: [_gather(cache, seq, layer) for layer in layers] for seq in live}
    if "counts" not in offers:
        return View(tables, lens, contents, {}, 0)
    stats, keys = _ask(cache, "stats", "stats"), ("free", "used", "cached", "evictions")
    if not isinstance(stats, dict) or any(not _is_count(stats.get(key)) for key in keys):
        raise LawBroken(5, "stats", f"stats() counts {', '.join(keys)}", repr(stats))
    counts = {key: int(stats[key]) for key in keys}
    return View(tables, lens, contents, counts, _count(cache, "stats", "num_free_blocks"))


def _ask(cache: Any, name: str, method: str, *args: int) -> Any:
    answer, error = attempt(lambda: getattr(cache, method)(*args))
    if error is not None:
        call = f"{method}({', '.join(map(str, args))})"
        raise LawBroken(LAW_OF[name], name, f"{call} succeeds", named(error)) from error
    return answer


def _count(cache: Any, name: str, method: str, *args: int) -> int:
    answer = _ask(cache, name, method, *args)
    if not _is_count(answer):
        call = f"{method}({', '.join(map(str, args))})"
        raise LawBroken(LAW_OF[name], name, f"{call} is an integer", repr(answer))
    return int(answer)


def _table(cache: Any, seq: int, num_blocks: int) -> list[int]:
    table = _ask(cache, "table", "block_table", seq)
    if not isinstance(table, np.ndarray) or table.dtype != np.int32 or table.ndim != 1:
        raise LawBroken(1, "table", f"block_table({seq}) is a one-dimensional int32 array", repr(table))
    ids: list[int] = table.tolist()
    if JUNK_BLOCK in ids:
        raise LawBroken(
            12, "table", f"block_table({seq}) is a copy", "what its caller wrote into an earlier one"
        )
    if any(not 0 <= block < num_blocks for block in ids):
        raise LawBroken(1, "table", f"block ids in [0, {num_blocks})", f"block_table({seq}) == {ids}")
    scribble(table, JUNK_BLOCK)
    return ids


def _gather(cache: Any, seq: int, layer: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    pair = _ask(cache, "gather", "gather", seq, layer)
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise LawBroken(3, "gather", f"gather({seq}, {layer}) is a pair of arrays", repr(type(pair)))
    return _bits(pair[0], seq, layer), _bits(pair[1], seq, layer)


def _bits(array: Any, seq: int, layer: int) -> NDArray[np.uint16]:
    if not isinstance(array, np.ndarray) or array.dtype != np.float16 or array.ndim != 3:
        what = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else repr(type(array))
        raise LawBroken(3, "gather", f"gather({seq}, {layer}) gives float16 [H, len, D]", what)
    copy = np.ascontiguousarray(array).copy()
    copy[np.isnan(copy)] = np.nan
    scribble(array, JUNK)
    return copy.view(np.uint16)


def attempt(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What a call returns, or what it raises: the panic of a Rust engine is no Exception, but a finding."""
    try:
        return call(), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, error


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def named(error: BaseException) -> str:
    """An error in a few words."""
    return f"{type(error).__name__}: {error}"


def scribble(given: Any, junk: float) -> None:
    """Overwrite an array or a nested list in place, also through a read-only flag that we set ourselves."""
    if isinstance(given, list):
        for inner in given:
            scribble(inner, junk)
        given[:] = [junk] * len(given)
    elif isinstance(given, np.ndarray) and given.dtype.kind in "iuf":
        try:
            given.flags.writeable = True
        except ValueError:  # the memory belongs to an implementation that keeps it read-only
            return
        given[...] = junk
