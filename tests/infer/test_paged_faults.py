"""Law 10 where it is hard: memory that runs out inside a call, arguments that fail or call back; and law 3
at the edges of float16.
"""

import struct
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tinyllm.infer.arguments
import tinyllm.infer.paged
from tinyllm.infer.paged import OutOfBlocks, PagedKVCache

Array = NDArray[Any]


def tokens(count: int, first: float = 1) -> Array:
    return first + np.arange(2 * count * 2, dtype=np.float32).reshape(2, count, 2)


def forked(cls: type[PagedKVCache] = PagedKVCache) -> PagedKVCache:
    """A parent with layers of 5 and 2 positions, and its fork, in ten blocks of two."""
    cache = cls(10, 2, 2, 2, 2)
    cache.add_seq(0)
    cache.append(0, 0, tokens(5), -tokens(5))
    cache.append(0, 1, tokens(2, 50), -tokens(2, 50))
    cache.fork(0, 1)
    return cache


def view(cache: PagedKVCache, *live: int) -> tuple[object, ...]:
    """Everything that a caller can observe."""
    arrays = [a for seq in live for layer in (0, 1) for a in cache.gather(seq, layer)]
    lens = [cache.seq_len(seq, layer) for seq in live for layer in (0, 1)]
    tables = [cache.block_table(seq).tolist() for seq in live]
    return cache.stats(), lens, tables, [(a.shape, a.tobytes()) for a in arrays]


class Countdown:
    """Raises MemoryError at the operation of the given number."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("injected")


class Failing(np.ndarray[Any, Any]):
    """A pool whose reads and writes count down; a write that fails has been half done."""

    countdown: Countdown

    def __getitem__(self, key: Any) -> Any:
        self.countdown()
        return np.asarray(self)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        part = np.asarray(self)[key]
        part[: len(part) // 2 + 1] = 99
        self.countdown()
        part[...] = value


def test_a_memory_error_at_any_access_to_the_pool_changes_nothing() -> None:
    at = 0
    while True:
        at += 1
        cache = forked()
        before = view(cache, 0, 1)
        pools = cache._k, cache._v
        countdown = Countdown(at)
        for name, pool in zip(("_k", "_v"), pools, strict=True):
            failing = pool.view(Failing)
            failing.countdown = countdown
            setattr(cache, name, failing)
        try:
            cache.append(1, 1, tokens(7, 9), -tokens(7, 9))  # two shared blocks are copied, two are new
        except MemoryError:
            cache._k, cache._v = pools
            assert view(cache, 0, 1) == before, f"after access {at}"
            cache.append(1, 1, tokens(7, 9), -tokens(7, 9))  # and it works the next time
            continue
        break
    assert at > 12  # two pools: copies read and written, fresh blocks cleared, pieces written


@pytest.mark.parametrize("owner", [tinyllm.infer.paged, tinyllm.infer.arguments], ids=lambda m: m.__name__)
@pytest.mark.parametrize("call", ["append", "block_table"])
def test_a_memory_error_inside_numpy_changes_nothing(
    owner: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Numpy:
        def __getattr__(self, name: str) -> Any:
            if name in {"array", "asarray"}:
                raise MemoryError(f"injected into {name}")
            return getattr(np, name)

    cache = forked()
    cache.fork(0, 2)
    before = view(cache, 0, 1, 2)
    calls: dict[str, Callable[[], object]] = {
        "append": lambda: cache.append(2, 0, tokens(1), tokens(1)),
        "block_table": lambda: cache.block_table(2),
    }
    with monkeypatch.context() as patch:
        patch.setattr(owner, "np", Numpy())
        if (call == "append") == (owner is tinyllm.infer.arguments):
            with pytest.raises(MemoryError, match="injected"):
                calls[call]()
            patch.undo()
            assert view(cache, 0, 1, 2) == before
        else:
            calls[call]()  # the others need no such memory


def broken(error: Exception) -> Any:
    class Broken:
        def __array__(self, *_: Any, **__: Any) -> Array:
            raise error

        def __index__(self) -> int:
            raise error

    return Broken()


REFUSED: dict[str, Callable[[PagedKVCache, Any], object]] = {
    "append k": lambda c, bad: c.append(0, 0, bad, tokens(1)),
    "append v": lambda c, bad: c.append(0, 0, tokens(1), bad),
    "append layer": lambda c, bad: c.append(0, bad, tokens(1), tokens(1)),
    "append id": lambda c, bad: c.append(bad, 0, tokens(1), tokens(1)),
    "add id": lambda c, bad: c.add_seq(bad),
    "fork parent": lambda c, bad: c.fork(bad, 2),
    "fork child": lambda c, bad: c.fork(0, bad),
    "free id": lambda c, bad: c.free(bad),
    "gather id": lambda c, bad: c.gather(bad, 0),
    "gather layer": lambda c, bad: c.gather(0, bad),
    "len id": lambda c, bad: c.seq_len(bad, 0),
    "len layer": lambda c, bad: c.seq_len(0, bad),
    "table id": lambda c, bad: c.block_table(bad),
}


@pytest.mark.parametrize("error", [MemoryError("mine"), OSError("mine"), KeyError("mine")], ids=repr)
@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_fails_lets_its_error_through_and_changes_nothing(
    name: str, error: Exception
) -> None:
    cache = forked()
    before = view(cache, 0, 1)
    with pytest.raises(type(error), match="mine"):
        REFUSED[name](cache, broken(error))
    assert view(cache, 0, 1) == before


class CallsBack:
    """An id, a layer or a chunk whose conversion uses the cache it is meant for."""

    def __init__(self, act: Callable[[], object], value: Any) -> None:
        self.act = act
        self.value = value

    def __index__(self) -> int:
        self.act()
        return int(self.value)

    def __array__(self, *_: Any, **__: Any) -> Array:
        self.act()
        return np.asarray(self.value)


def test_a_chunk_that_appends_is_appended_after_its_own_append() -> None:
    cache = forked()
    inner, outer = tokens(3, 70), tokens(2, 90)
    cache.append(1, 0, CallsBack(lambda: cache.append(1, 0, inner, inner), outer), outer)
    expected = np.concatenate([tokens(5), inner, outer], axis=1)
    np.testing.assert_array_equal(cache.gather(1, 0)[0], expected)
    np.testing.assert_array_equal(cache.gather(0, 0)[0], tokens(5))
    assert cache.num_free_blocks() == 10 - 3 - 3


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_frees_everything_finds_no_sequence_left(name: str) -> None:
    cache = forked()
    value = tokens(1) if name in {"append k", "append v"} else 7 if name in {"add id", "fork child"} else 0

    def act() -> None:
        for seq in (0, 1):
            cache.free(seq)

    if name == "add id":
        REFUSED[name](cache, CallsBack(act, value))
        cache.free(7)
    else:
        with pytest.raises(KeyError, match="is not one of the 0 live ones"):
            REFUSED[name](cache, CallsBack(act, value))
    assert cache.stats() == {"free": 10, "used": 0, "cached": 0, "evictions": 0}
    cache.add_seq(0)
    cache.append(0, 0, tokens(20), tokens(20))  # every block once: none is lost, none is there twice
    assert len(set(cache.block_table(0).tolist())) == 10


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_closes_the_cache_finds_it_closed(name: str) -> None:
    cache = forked()
    value = tokens(1) if name in {"append k", "append v"} else 7 if name in {"add id", "fork child"} else 0
    with pytest.raises(ValueError, match="closed"):
        REFUSED[name](cache, CallsBack(cache.close, value))


def test_a_parent_whose_id_takes_the_child_is_refused() -> None:
    cache = forked()
    with pytest.raises(ValueError, match="sequence 2 is live"):
        cache.fork(CallsBack(lambda: cache.add_seq(2), 0), 2)  # type: ignore[arg-type]
    assert cache.seq_len(2, 0) == 0


def edges() -> Array:
    """Every float16, the middle between it and the next, and both sides of the middle, as float64."""
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middle = (finite + np.append(finite[1:], 65536.0)) / 2
    near = [middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)]  # beyond float32's digits
    return np.concatenate([side * part for part in (finite, *near) for side in (1, -1)])


def rounded(value: float) -> float:
    """`value` as float16 by the struct module, which rounds to even as well, but refuses an overflow."""
    try:
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    except OverflowError:
        return float(np.copysign(np.inf, value))


def test_values_are_rounded_once_to_the_nearest_float16_without_a_warning() -> None:
    values = edges()
    expected = np.array([rounded(value) for value in values.tolist()], np.float16)
    cache = PagedKVCache(3, 100_000, 1, 1, 1)
    cache.add_seq(0)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        cache.append(0, 0, values[None, :, None], -values[None, :, None])
    k, v = cache.gather(0, 0)
    np.testing.assert_array_equal(k.ravel().view(np.uint16), expected.view(np.uint16))
    np.testing.assert_array_equal(v.ravel().view(np.uint16), (-expected).view(np.uint16))


def test_every_nan_stays_a_nan() -> None:
    nans = np.array([0x7C01, 0x7DFF, 0x7E00, 0x7FFF, 0xFC01, 0xFE00], np.uint16).view(np.float16)
    doubles = np.array([0x7FF0000000000001, 0x7FF8000000000001], np.uint64).view(np.float64)
    cache = PagedKVCache(8, 2, 1, 1, 1)
    cache.add_seq(0)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for values in (nans, doubles, nans.astype(">f2")):
            cache.append(0, 0, values[None, :, None], values[None, :, None])
    k, v = cache.gather(0, 0)
    assert np.isnan(k).all()
    assert np.isnan(v).all()
    assert k.shape == (1, 14, 1)


def test_a_refused_append_can_be_retried_after_a_free() -> None:
    cache = forked()
    with pytest.raises(OutOfBlocks):
        cache.append(1, 0, tokens(18), tokens(18))
    cache.free(0)
    cache.append(1, 0, tokens(15), tokens(15))
    assert cache.num_free_blocks() == 0
