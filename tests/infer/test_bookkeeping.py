"""The drawing of a pool, rows of page tables."""

import numpy as np

from tinyllm.infer.bookkeeping import csr, draw
from tinyllm.infer.paged import PagedKVCache


def test_a_character_a_block_and_64_a_line() -> None:
    assert draw([0, 1, 2, 9, 10, 300, *[0] * 60]) == f"       0  .#29++{'.' * 58}\n      64  ..\n"


def test_rows_are_covered_and_no_more() -> None:
    indptr, indices, last = csr([([5, 3, 4], 5), ([5, 3, 4], 4), ([], 0), ([7], 0), ([7], 2)], 2)
    assert indptr.tolist() == [0, 3, 5, 5, 5, 6]
    assert indices.tolist() == [5, 3, 4, 5, 3, 7]
    assert last.tolist() == [1, 2, 0, 0, 2]


def test_blocks_of_a_sequence_that_grows_alone_are_one_run() -> None:
    """The reference hands out new blocks in their order; other caches may do as they like."""
    cache = PagedKVCache(8, 2, 1, 2, 3)
    cache.add_seq(0)
    cache.append(0, 0, np.ones((2, 7, 3)), np.ones((2, 7, 3)))
    assert [k.shape for k, _ in cache.gather_runs(0, 0)] == [(2, 7, 3)]
