"""The contiguous cache of one sequence: contents, lengths, views, refusals."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tinyllm
from tinyllm.infer.kvcache import CacheFull, KVCache

H, D = 2, 3
Pair = tuple[NDArray[Any], NDArray[Any]]


def chunk(tokens: int, first: int = 1) -> Pair:
    """K and V `[H, T, D]` of distinct small integers, exact in float16; V is never K."""
    k = np.arange(first, first + H * tokens * D, dtype=np.float32).reshape(H, tokens, D)
    return k, -k


def state(cache: KVCache) -> list[tuple[int, bytes, bytes]]:
    """All that can be seen of a cache, copied."""
    pairs = [cache.gather(layer) for layer in range(cache.n_layers)]
    return [(cache.seq_len(layer), k.tobytes(), v.tobytes()) for layer, (k, v) in enumerate(pairs)]


def test_chunks_come_back_in_order() -> None:
    cache = KVCache(9, 2, H, D)
    k, v = chunk(9)
    at = 0
    for tokens in (1, 3, 4, 1):
        cache.append(1, k[:, at : at + tokens], v[:, at : at + tokens])
        at += tokens
        assert cache.seq_len(1) == at
        got_k, got_v = cache.gather(1)
        assert got_k.shape == got_v.shape == (H, at, D)
        np.testing.assert_array_equal(got_k, k[:, :at])
        np.testing.assert_array_equal(got_v, v[:, :at])


def test_starts_empty_in_every_layer() -> None:
    cache = KVCache(4, 2, H, D)
    assert cache.seq_len() == cache.seq_len(1) == 0
    for layer in range(2):
        k, v = cache.gather(layer)
        assert k.shape == v.shape == (H, 0, D)
        assert k.dtype == v.dtype == np.float16


def test_layers_may_lag() -> None:
    cache = KVCache(6, 3, H, D)
    wide, narrow = chunk(5), chunk(2, first=100)
    cache.append(2, *wide)
    cache.append(0, *narrow)
    assert [cache.seq_len(layer) for layer in range(3)] == [2, 0, 5]
    assert cache.seq_len() == 2
    for layer, (k, v) in ((0, narrow), (2, wide)):
        np.testing.assert_array_equal(cache.gather(layer)[0], k)
        np.testing.assert_array_equal(cache.gather(layer)[1], v)


def test_rounds_once_to_float16_without_a_warning() -> None:
    odd = np.array(
        [1 / 3, 65519.0, 65520.0, -1e9, np.inf, -np.inf, np.nan, -0.0, 2.0**-24, 2.0**-26, 2049.0, 1.0]
    )
    k = odd.reshape(H, 2, D)
    cache = KVCache(2, 1, H, D)
    cache.append(0, k, k[:, ::-1])
    with np.errstate(all="ignore"):
        expected = k.astype(np.float16)
    got_k, got_v = cache.gather(0)
    np.testing.assert_array_equal(got_k.view(np.uint16), expected.view(np.uint16))
    np.testing.assert_array_equal(got_v.view(np.uint16), expected[:, ::-1].view(np.uint16))
    assert np.isposinf(got_k.reshape(-1)[2]) and np.signbit(got_k.reshape(-1)[7])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, "float16"])
def test_keeps_the_dtype_asked_for(dtype: Any) -> None:
    cache = KVCache(2, 1, H, D, dtype=dtype)
    k = np.full((H, 1, D), 1 / 3)
    cache.append(0, k, -k)
    got_k, got_v = cache.gather(0)
    assert cache.dtype == got_k.dtype == got_v.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(got_k, k.astype(dtype))
    np.testing.assert_array_equal(got_v, -k.astype(dtype))


@pytest.mark.parametrize(
    "form",
    [
        np.asfortranarray,
        lambda a: np.repeat(a, 2, axis=1)[:, ::2],
        lambda a: a.astype(np.int8),
        lambda a: a.astype(np.uint64),
        lambda a: a.tolist(),
        lambda a: a.astype(">f8"),
    ],
    ids=["fortran", "strided", "int8", "uint64", "list", "big-endian"],
)
def test_takes_any_form_of_numbers(form: Callable[[NDArray[Any]], Any]) -> None:
    k, _ = chunk(4)
    cache = KVCache(4, 1, H, D)
    cache.append(0, form(k), form(k + 50))
    np.testing.assert_array_equal(cache.gather(0)[0], k)
    np.testing.assert_array_equal(cache.gather(0)[1], k + 50)


def test_takes_its_own_views() -> None:
    cache = KVCache(4, 1, H, D)
    k, v = chunk(2)
    cache.append(0, k, v)
    cache.append(0, *cache.gather(0))
    np.testing.assert_array_equal(cache.gather(0)[0], np.concatenate([k, k], axis=1))
    np.testing.assert_array_equal(cache.gather(0)[1], np.concatenate([v, v], axis=1))


def test_arguments_are_copied_in() -> None:
    cache = KVCache(2, 1, H, D)
    k = np.ones((H, 2, D), np.float16)
    v = k.copy()
    cache.append(0, k, v)
    k[:], v[:] = 7, 8
    assert (cache.gather(0)[0] == 1).all() and (cache.gather(0)[1] == 1).all()


def test_gathers_are_read_only_views_that_stay_valid() -> None:
    cache = KVCache(4, 1, H, D)
    k, v = chunk(4)
    cache.append(0, k[:, :2], v[:, :2])
    early = cache.gather(0)
    for array in early:
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0, 0] = 9
        for link in (array, array.base):
            with pytest.raises((ValueError, AttributeError)):
                link.flags.writeable = True  # type: ignore[union-attr]
    cache.append(0, k[:, 2:], v[:, 2:])  # the cache itself still writes
    np.testing.assert_array_equal(early[0], k[:, :2])
    np.testing.assert_array_equal(early[1], v[:, :2])
    for first, again in zip(early, cache.gather(0), strict=True):
        assert np.shares_memory(first, again)


def test_holds_exactly_max_len_and_refuses_one_more() -> None:
    cache = KVCache(5, 2, H, D)
    cache.append(0, *chunk(3))
    cache.append(1, *chunk(5, first=200))
    before = state(cache)
    for layer, tokens, needed in ((0, 3, 6), (0, 100, 103), (1, 1, 6)):
        with pytest.raises(CacheFull, match=rf"{needed} positions.* at most 5$") as caught:
            cache.append(layer, *chunk(tokens, first=300))
        assert (caught.value.needed, caught.value.max_len) == (needed, 5)
        assert state(cache) == before
    cache.append(0, *chunk(2, first=400))
    assert cache.seq_len(0) == 5
    np.testing.assert_array_equal(cache.gather(0)[0][:, 3:], chunk(2, first=400)[0])


def test_cache_full_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(CacheFull(6, 5)))
    assert isinstance(again, CacheFull) and isinstance(again, RuntimeError)
    assert (again.needed, again.max_len, str(again)) == (6, 5, str(CacheFull(6, 5)))


GOOD = np.ones((H, 1, D))
BAD_APPENDS: list[tuple[type[Exception], str, Any, Any, Any]] = [
    (IndexError, r"layer 2 is outside \[0, 2\)", 2, GOOD, GOOD),
    (IndexError, r"layer -1 ", -1, GOOD, GOOD),
    (TypeError, r"layer must be an integer, not 0\.0", 0.0, GOOD, GOOD),
    (TypeError, r"layer .*None", None, GOOD, GOOD),
    (ValueError, r"T is 0; it must be at least 1", 0, np.ones((H, 0, D)), np.ones((H, 0, D))),
    (ValueError, r"k has shape \(2, 3\)", 0, np.ones((H, D)), np.ones((H, D))),
    (ValueError, r"k has shape \(1, 2, 1, 3\)", 0, GOOD[None], GOOD[None]),
    (ValueError, r"k has shape \(3, 1, 3\).*\[2, T, 3\]", 0, np.ones((H + 1, 1, D)), GOOD),
    (ValueError, r"v has shape \(2, 1, 4\).*\[2, T, 3\]", 0, GOOD, np.ones((H, 1, D + 1))),
    (ValueError, r"k has shape \(2, 1, 3\) but v has \(2, 2, 3\)", 0, GOOD, np.ones((H, 2, D))),
    (ValueError, r"inhomogeneous", 0, [[[1, 2, 3]], [[1, 2]]], GOOD),
    (TypeError, r"k must hold integers or floats, not bool", 0, GOOD.astype(bool), GOOD),
    (TypeError, r"v must hold .* complex", 0, GOOD, GOOD.astype(complex)),
    (TypeError, r"k must hold .* object", 0, GOOD.astype(object), GOOD),
    (TypeError, r"k must hold .*<U", 0, GOOD.astype(str), GOOD),
]


@pytest.mark.parametrize(("error", "message", "layer", "k", "v"), BAD_APPENDS)
def test_a_bad_append_changes_nothing(
    error: type[Exception], message: str, layer: Any, k: Any, v: Any
) -> None:
    cache = KVCache(4, 2, H, D)
    cache.append(0, *chunk(2))
    before = state(cache)
    with pytest.raises(error, match=message):
        cache.append(layer, k, v)
    assert state(cache) == before


@pytest.mark.parametrize(
    ("layer", "error"), [(2, IndexError), (-1, IndexError), (0.0, TypeError), ("0", TypeError)]
)
def test_a_bad_layer_is_refused_by_reads(layer: Any, error: type[Exception]) -> None:
    cache = KVCache(4, 2, H, D)
    with pytest.raises(error, match="layer"):
        cache.gather(layer)
    with pytest.raises(error, match="layer"):
        cache.seq_len(layer)


@pytest.mark.parametrize("name", ["max_len", "n_layers", "n_kv_heads", "d_head"])
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-3, ValueError), (2.0, TypeError), ("2", TypeError)]
)
def test_a_bad_size_is_refused_by_name(name: str, value: Any, error: type[Exception]) -> None:
    sizes: dict[str, Any] = {"max_len": 4, "n_layers": 2, "n_kv_heads": H, "d_head": D, name: value}
    with pytest.raises(error, match=rf"^{name} .*{value}"):
        KVCache(**sizes)


@pytest.mark.parametrize("dtype", [np.int32, bool, complex, object, "U4"])
def test_a_dtype_must_be_floating(dtype: Any) -> None:
    with pytest.raises(TypeError, match="dtype must be floating"):
        KVCache(4, 2, H, D, dtype=dtype)


def test_anything_with_an_index_is_an_integer() -> None:
    cache = KVCache(np.int64(4), np.uint8(2), np.int8(H), np.int16(D))  # type: ignore[arg-type]
    cache.append(np.int64(1), *chunk(1))  # type: ignore[arg-type]
    assert cache.seq_len(np.uint8(1)) == 1  # type: ignore[arg-type]
    assert type(cache.max_len) is int


def test_the_package_offers_it() -> None:
    assert tinyllm.KVCache is KVCache and tinyllm.CacheFull is CacheFull


def filled(*lens: int) -> KVCache:
    cache = KVCache(8, len(lens), 2, 3)
    for layer, n in enumerate(lens):
        for i in range(n):
            one = np.full((2, 1, 3), i + 10 * layer)
            cache.append(layer, one, -one)
    return cache


def test_truncate_cuts_the_layers_that_are_longer() -> None:
    cache = filled(5, 2, 0)
    cache.truncate(3)
    assert [cache.seq_len(layer) for layer in range(3)] == [3, 2, 0]
    cache.append(0, np.full((2, 1, 3), 99), np.full((2, 1, 3), 98))
    k, v = cache.gather(0)
    assert k[0, :, 0].tolist() == [0, 1, 2, 99]
    assert v[1, :, 2].tolist() == [0, -1, -2, 98]
    cache.truncate(0)
    assert [cache.seq_len(layer) for layer in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("length", [-1, 6])
def test_truncate_out_of_bounds_changes_nothing(length: int) -> None:
    cache = filled(5, 2)
    with pytest.raises(ValueError, match=rf"length {length} is outside \[0, 5\], the longest layer's length"):
        cache.truncate(length)
    with pytest.raises(TypeError, match="length must be an integer"):
        cache.truncate(1.0)  # type: ignore[arg-type]
    assert [cache.seq_len(layer) for layer in range(2)] == [5, 2]


def test_a_copy_is_an_equal_in_memory_of_its_own() -> None:
    cache = filled(5, 2)
    twin = cache.copy()
    assert (twin.max_len, twin.n_layers, twin.n_kv_heads, twin.d_head) == (8, 2, 2, 3)
    assert twin.dtype == cache.dtype
    for one in (cache, twin):
        one.append(1, np.full((2, 1, 3), 50), np.full((2, 1, 3), 51))
    twin.append(1, np.full((2, 1, 3), 60), np.full((2, 1, 3), 61))
    cache.append(1, np.full((2, 1, 3), 70), np.full((2, 1, 3), 71))
    assert cache.gather(1)[0][0, :, 0].tolist() == [10, 11, 50, 70]
    assert twin.gather(1)[0][0, :, 0].tolist() == [10, 11, 50, 60]
    assert twin.gather(1)[1][1, :, 1].tolist() == [-10, -11, 51, 61]
    assert KVCache(4, 1, 1, 1, np.float32).copy().dtype == np.float32


@pytest.mark.parametrize(
    "how", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["copy", "deep", "pickle"]
)
def test_every_way_to_copy_gives_memory_of_its_own(how: Callable[[KVCache], KVCache]) -> None:
    cache = filled(5, 2)
    before = state(cache)
    twin = how(cache)
    assert state(twin) == before
    twin.append(1, np.full((2, 1, 3), 60), np.full((2, 1, 3), 61))
    twin.truncate(3)
    assert state(cache) == before
    assert twin.gather(1)[0][0, :, 0].tolist() == [10, 11, 60]


class Named(KVCache):
    """A subclass with another constructor."""

    def __init__(self, name: str) -> None:
        super().__init__(4, 1, H, D)
        self.name = name


@pytest.mark.parametrize("how", [KVCache.copy, copy.copy, copy.deepcopy], ids=lambda how: how.__name__)
def test_a_copy_is_of_the_same_class(how: Callable[[Named], Named]) -> None:
    twin = how(Named("mine"))
    assert (type(twin), twin.name) == (Named, "mine")


def test_bytes_are_of_k_and_v() -> None:
    assert KVCache(8, 2, 3, 5).nbytes == 2 * 8 * 2 * 3 * 5 * 2
    assert KVCache(8, 2, 3, 5, np.float64).nbytes == 2 * 8 * 2 * 3 * 5 * 8
