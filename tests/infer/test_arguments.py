"""What both caches ask of their arguments (law 15), and in which words they refuse."""

import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinyllm.infer.arguments import as_chunk, as_integer, as_layer, as_size, tokens_in_lists
from tinyllm.infer.kvcache import CacheFull, KVCache
from tinyllm.infer.paged import OutOfBlocks, PagedKVCache


class Index:
    """An integer by `__index__` alone."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __repr__(self) -> str:  # a test's name, which must not change from process to process
        return f"Index({self.value})"


INTEGERS = [7, Index(7), np.int8(7), np.uint64(7), np.array(7)]
NOT_INTEGERS = [0.5, 7.0, "7", None, np.float32(7), [7], np.array([7, 7]), 7j]


@pytest.mark.parametrize("value", INTEGERS, ids=repr)
def test_anything_with_an_index_is_an_integer(value: Any) -> None:
    for found in (as_integer("x", value), as_size("x", value), as_layer(value, 8)):
        assert found == 7
        assert type(found) is int


def test_a_bool_has_an_index() -> None:
    assert as_integer("x", True) == 1
    assert type(as_integer("x", True)) is int


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
def test_what_is_no_integer_is_a_type_error_that_names_it(value: Any) -> None:
    with pytest.raises(TypeError, match="size must be an integer, not ") as caught:
        as_integer("size", value)
    assert type(value).__name__ in str(caught.value)
    with pytest.raises(TypeError, match="size must be an integer, not "):
        as_size("size", value)
    with pytest.raises(TypeError, match="layer must be an integer"):
        as_layer(value, 8)


def test_an_error_of_a_foreign_index_comes_through() -> None:
    class Broken:
        def __index__(self) -> int:
            raise OSError("no index today")

    with pytest.raises(OSError, match="no index today"):
        as_integer("x", Broken())


@pytest.mark.parametrize("value", [0, -1, -(2**70)])
def test_a_size_is_at_least_one(value: int) -> None:
    with pytest.raises(ValueError, match=f"^block_size is {value}; it must be at least 1$"):
        as_size("block_size", value)


def test_a_size_may_have_an_upper_bound() -> None:
    assert as_size("n", 5, 5) == 5
    assert as_size("n", 2**70) == 2**70
    with pytest.raises(ValueError, match=r"^n is 6; it must be at most 5$"):
        as_size("n", 6, 5)


@pytest.mark.parametrize("layer", [3, -1, 2**70])
def test_a_layer_outside_the_range_is_an_index_error(layer: int) -> None:
    with pytest.raises(IndexError, match=rf"^layer {layer} is outside \[0, 3\)$"):
        as_layer(layer, 3)


def test_both_ends_of_the_layers_are_inside() -> None:
    assert [as_layer(layer, 3) for layer in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["i1", "i8", "u2", "f2", ">f2", "f4", ">f4", "f8", "g"])
def test_integers_and_floats_are_converted(dtype: str) -> None:
    k = np.arange(12).reshape(2, 3, 2).astype(dtype)
    found_k, found_v = as_chunk(k, k + k.dtype.type(1), 2, 2, np.float16)
    for found, expected in ((found_k, np.arange(12)), (found_v, np.arange(1, 13))):
        assert found.dtype == np.float16
        assert found.dtype.isnative
        np.testing.assert_array_equal(found.ravel(), expected)


@pytest.mark.parametrize("dtype", ["?", "c8", "O", "U5", "S5", "M8[s]", "m8[s]", "V2", "f4,f4"])
def test_other_dtypes_are_type_errors_that_name_them(dtype: str) -> None:
    good, bad = np.ones((1, 1, 1)), np.zeros((1, 1, 1), dtype)
    with pytest.raises(TypeError, match=r"^k must hold integers or floats, not ") as caught:
        as_chunk(bad, good, 1, 1, np.float16)
    assert str(np.dtype(dtype)) in str(caught.value)
    with pytest.raises(TypeError, match=r"^v must hold integers or floats, not "):
        as_chunk(good, bad, 1, 1, np.float16)


SHAPES = [(), (2,), (2, 3), (1, 2, 4, 3), (1, 4, 3), (3, 4, 3), (2, 4, 2), (2, 4, 4), (3, 4, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_wrong_shape_is_a_value_error_that_names_it_and_the_bound(shape: tuple[int, ...]) -> None:
    good, bad = np.ones((2, 4, 3)), np.ones(shape)
    for name, k, v in (("k", bad, good), ("v", good, bad)):
        with pytest.raises(ValueError, match=rf"^{name} has shape .*; it must be \[2, T, 3\]$") as caught:
            as_chunk(k, v, 2, 3, np.float16)
        assert str(shape) in str(caught.value)


def test_k_and_v_are_equally_long() -> None:
    with pytest.raises(ValueError, match=r"k has shape \(1, 2, 1\) but v has \(1, 3, 1\)"):
        as_chunk(np.ones((1, 2, 1)), np.ones((1, 3, 1)), 1, 1, np.float16)


def test_an_empty_chunk_is_for_the_cache_to_judge() -> None:
    k, v = as_chunk(np.ones((2, 0, 3)), np.ones((2, 0, 3)), 2, 3, np.float16)
    assert k.shape == v.shape == (2, 0, 3)


def test_lists_and_ragged_lists() -> None:
    k, _ = as_chunk([[[1, 2]]], [[[3.5, 4]]], 1, 2, np.float16)
    assert k.tolist() == [[[1, 2]]]
    with pytest.raises(ValueError, match="inhomogeneous"):
        as_chunk([[[1, 2], [3]]], [[[1, 2], [3, 4]]], 1, 2, np.float16)


class Foreign:
    """An array by `__array__` alone."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("its values are asked for")


LISTS = [[[1, 2]] * 7] * 3


@pytest.mark.parametrize(
    ("k", "v", "told"),
    [
        (LISTS, LISTS, 7),
        (tuple(LISTS), np.ones((3, 7, 2)), 7),
        (np.ones((3, 7, 2)), [np.ones((7, 2))] * 3, 7),
        (np.ones((3, 7, 2)), np.ones((3, 7, 2)), 0),  # to be asked for its shape
        (LISTS, LISTS[:2], 0),
        (LISTS, [[[1, 2]] * 8] * 3, 0),
        (LISTS[0], LISTS[0], 0),
        ([LISTS], [LISTS], 0),
        ([], [], 0),
        ([[], [], []], LISTS, 0),
        (np.array(1), LISTS, 0),
        ([{"a": 1}] * 3, LISTS, 0),
        (Foreign(), LISTS, 0),
        ([Foreign()] * 3, LISTS, 0),
    ],
)
def test_the_length_of_lists_is_told_before_they_are_arrays(k: Any, v: Any, told: int) -> None:
    assert tokens_in_lists(k, v, 3, 2) == told


MANY = 2**18
ONE = np.broadcast_to(np.float32(0.1), (2, MANY, 64))  # a value, which would be 64 MiB of float16


class Lazy:
    """An array by `__array__`, which costs nothing to make."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        return ONE


UNPAID: dict[str, Any] = {
    "float32": ONE,
    "strided": np.broadcast_to(np.float32(0.1), (2, 2 * MANY, 64))[:, ::-2],
    "int8": np.broadcast_to(np.int8(1), ONE.shape),
    "big-endian": np.broadcast_to(np.array(1, ">f8"), ONE.shape),
    "lists": [[[0.1] * 64] * MANY] * 2,
    "list of arrays": [ONE[0], ONE[1]],
    "__array__": Lazy(),
}


@pytest.mark.parametrize("v", ["the same", "float32"])
@pytest.mark.parametrize("form", UNPAID)
def test_an_append_that_does_not_fit_is_refused_before_its_values_are_converted(form: str, v: str) -> None:
    """Law 9. Memory tells: a list or a value is there already, an array of so many is not."""
    paged, contiguous = PagedKVCache(6, 2, 2, 2, 64), KVCache(6, 2, 2, 64)
    paged.add_seq(0)
    chunk = UNPAID[form], UNPAID[form if v == "the same" else v]
    appends: dict[Any, Callable[[], None]] = {
        OutOfBlocks: lambda: paged.append(0, 1, *chunk),
        CacheFull: lambda: contiguous.append(1, *chunk),
    }
    for error, append in appends.items():
        tracemalloc.start()
        try:
            with pytest.raises(error) as caught:
                append()
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()
        assert caught.value.needed == (MANY // 2 if error is OutOfBlocks else MANY)
    assert (paged.num_free_blocks(), paged.seq_len(0, 1), contiguous.seq_len(1)) == (6, 0, 0)


def test_lists_that_fit_to_the_last_position_are_appended() -> None:
    paged, contiguous = PagedKVCache(3, 2, 1, 2, 1), KVCache(6, 1, 2, 1)
    paged.add_seq(0)
    k, v = [[[1]] * 6] * 2, [[[2]] * 6] * 2
    paged.append(0, 0, k, v)
    contiguous.append(0, k, v)
    for found, expected in zip(paged.gather(0, 0), contiguous.gather(0), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert paged.num_free_blocks() == 0


def test_without_a_dtype_arrays_stay_as_they_came() -> None:
    k, v = np.ones((1, 2, 3), ">f8"), np.ones((1, 2, 3), np.int8)
    found = as_chunk(k, v, 1, 3)
    assert found[0] is k and found[1] is v


def test_a_subclass_of_ndarray_is_taken_as_plain_values() -> None:
    class Loud(np.ndarray[Any, Any]):
        def __getitem__(self, key: Any) -> Any:
            raise AssertionError("a chunk is a plain array")

    given = np.ones((1, 2, 1), np.float16).view(Loud)
    for found in as_chunk(given, given, 1, 1, np.float16):
        assert type(found) is np.ndarray


@pytest.mark.parametrize("dtype", ["f4", "f8", "g", "i8", "u8"])
def test_the_cast_is_numpys_and_silent(dtype: str) -> None:
    if np.dtype(dtype).kind == "f":
        values = np.array([[[65504, 65520, -1e30, 1e-8, 1e-30, np.nan, -0.0, np.inf]]], dtype)
    else:
        values = np.array([[[0, 2049, 2051, 65519, 65520, np.iinfo(dtype).max]]], dtype)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        found, _ = as_chunk(values, values, 1, values.shape[2], np.float16)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))
