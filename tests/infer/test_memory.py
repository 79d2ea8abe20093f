"""The memory of a pool: zeros that become resident page by page, and runs of blocks."""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.infer.memory import copied, read_only, runs, zeros
from tinyllm.infer.paged import PagedKVCache

MIB = 2**20
STATM = Path("/proc/self/statm")
can_advise = pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="nothing to advise here")
shows_resident = pytest.mark.skipif(not STATM.exists(), reason="no /proc to read resident memory from")


def resident() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(params=["advice", "no advice"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of platform; the one that takes no advice is at hand everywhere."""
    if request.param == "no advice":
        monkeypatch.delattr(mmap, "MADV_NOHUGEPAGE", raising=False)
    elif not hasattr(mmap, "MADV_NOHUGEPAGE"):
        pytest.skip("this platform takes no advice")
    return str(request.param)


@pytest.mark.usefixtures("platform")
def test_an_array_of_zeros_that_can_be_written() -> None:
    array = zeros((2, 3, 5, 7))
    assert array.dtype == np.float16
    assert array.shape == (2, 3, 5, 7)
    assert array.flags.c_contiguous
    assert not array.any()
    array[1, 2, 4, 6] = -2
    assert array.sum() == -2


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("shape", [(2**62, 1), (2**70, 2), (2**40, 2**40)], ids=str)
def test_more_than_there_can_be_is_a_memory_error_that_names_it(shape: tuple[int, ...]) -> None:
    with pytest.raises(MemoryError, match="bytes for an array of shape") as caught:
        zeros(shape)
    assert str(shape) in str(caught.value)


@pytest.mark.usefixtures("platform")
def test_a_cache_larger_than_memory_says_so() -> None:
    with pytest.raises(MemoryError, match="bytes for an array of shape"):
        PagedKVCache(4, 2**40, 2**20, 1, 1)


@can_advise
@pytest.mark.parametrize("refusal", [OSError(12, "no"), ValueError("no"), OverflowError("no")], ids=repr)
def test_a_refused_mapping_is_a_memory_error(refusal: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise refusal

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match=r"cannot map 24 bytes for an array of shape \(3, 4\)") as caught:
        zeros((3, 4))
    assert caught.value.__cause__ is refusal


@can_advise
def test_a_kernel_that_refuses_the_advice_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(22, "no such advice")

    monkeypatch.setattr(mmap, "mmap", Stubborn)
    assert zeros((3, 4)).sum() == 0


@can_advise
@shows_resident
def test_what_is_touched_becomes_resident_and_no_more() -> None:
    before = resident()
    array = zeros((64, MIB // 2))
    array[:, :64] = 1  # a small page of each MiB; with huge pages behind it all 64 MiB would come
    assert resident() - before < 8 * MIB
    assert array.sum(dtype=np.float32) == 64 * 64


@can_advise
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_writes_into_a_copy() -> None:
    array = zeros((4, 4))
    if (child := os.fork()) == 0:  # pragma: no cover - no coverage is recorded there
        array[:] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert not array.any()


@pytest.mark.usefixtures("platform")
def test_nothing_makes_a_read_only_view_writable_again() -> None:
    array = zeros((2, 5, 3))
    view = read_only(array)[1, :4]
    array[1] = 7
    assert (view == 7).all()
    chain = [view]
    while isinstance(chain[-1].base, np.ndarray):
        chain.append(chain[-1].base)
    assert len(chain) > 1
    for link in chain:
        with pytest.raises(ValueError, match="WRITEABLE"):
            link.flags.writeable = True
        with pytest.raises(ValueError, match="read-only"):
            link[...] = 1
    assert not isinstance(chain[-1].base, memoryview) or chain[-1].base.readonly


@pytest.mark.parametrize("dtype", ["f2", ">f2", "f4", ">f8", "g"])
def test_a_read_only_view_is_of_the_same_values(dtype: str) -> None:
    window = np.arange(30).reshape(2, 5, 3).astype(dtype)[:, 1:4]
    for part in (window, window[:, :0]):
        view = read_only(part)
        assert (view.dtype, view.shape) == (part.dtype, part.shape)
        assert view.tobytes() == part.tobytes()
    assert np.shares_memory(read_only(window), window)


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 2**14, 8), (2, 40, 2**13)], ids=str)
def test_a_window_is_copied_whole_whatever_its_size(shape: tuple[int, ...]) -> None:
    pool = np.arange(shape[0] * (shape[1] + 9) * shape[2], dtype=np.uint16).view(np.float16)
    window = pool.reshape(shape[0], shape[1] + 9, shape[2])[:, 4:-5]
    made = copied(window)
    assert made.flags.c_contiguous
    assert not np.shares_memory(made, pool)
    assert made.tobytes() == window.tobytes()


def naive(blocks: Sequence[int]) -> list[list[int]]:
    parts: list[list[int]] = []
    for block in blocks:
        if parts and parts[-1][-1] + 1 == block:
            parts[-1].append(block)
        else:
            parts.append([block])
    return parts


@given(st.lists(st.integers(0, 6)))
def test_runs_are_the_longest_stretches_of_neighbours(blocks: list[int]) -> None:
    assert [list(range(a, b)) for a, b in runs(blocks)] == naive(blocks)


def test_runs_by_example() -> None:
    assert list(runs([])) == []
    assert list(runs([4, 5, 6, 2])) == [(4, 7), (2, 3)]
    assert list(runs([2, 1, 0])) == [(2, 3), (1, 2), (0, 1)]
