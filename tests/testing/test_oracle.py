"""The oracle against the laws written out: it may be trusted where it agrees with them on every program."""

import math
import struct
import warnings
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.testing.contract import Config
from tinyllm.testing.oracle import Oracle, half

H, D = 2, 1
moves = st.lists(
    st.tuples(st.sampled_from("afffppppppx"), st.integers(0, 3), st.integers(0, 3), st.integers(1, 7)),
    max_size=30,
)


class Ledger:
    """Laws 1 to 9 written out, with block tables of plain numbers, references counted by looking."""

    def __init__(self, size: int, layers: int) -> None:
        self.size, self.layers, self.next = size, layers, 0
        self.tables: dict[int, list[int]] = {}
        self.values: dict[int, list[list[float]]] = {}

    def holders(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables.values())

    def touched(self, seq: int, layer: int, tokens: int) -> range:
        n = len(self.values[seq][layer])
        return range(n // self.size, math.ceil((n + tokens) / self.size))

    def cost(self, seq: int, layer: int, tokens: int) -> int:
        table, touched = self.tables[seq], self.touched(seq, layer, tokens)
        copied = [i for i in touched if i < len(table) and self.holders(table[i]) > 1]
        return len(copied) + max(0, touched.stop - len(table))

    def append(self, seq: int, layer: int, values: list[float]) -> None:
        table = self.tables[seq]
        for i in self.touched(seq, layer, len(values)):
            if i >= len(table) or self.holders(table[i]) > 1:
                table[i : i + 1] = [self.next]
                self.next += 1
        self.values[seq][layer] += values


def partition(tables: dict[int, list[int]]) -> set[frozenset[tuple[int, int]]]:
    """Which places hold the same block; the numbers of the blocks do not matter."""
    places: dict[int, set[tuple[int, int]]] = {}
    for seq, table in tables.items():
        for i, block in enumerate(table):
            places.setdefault(block, set()).add((seq, i))
    return {frozenset(together) for together in places.values()}


@given(st.integers(1, 3), st.integers(1, 3), moves)
def test_the_oracle_keeps_the_laws(size: int, layers: int, program: list[tuple[str, int, int, int]]) -> None:
    oracle, ledger = Oracle(Config(1000, size, layers, H, D)), Ledger(size, layers)
    scalar = 0
    for move, one, other, n in program:
        live = sorted(ledger.tables)
        if move == "a" and one not in live:
            oracle.add(one)
            ledger.tables[one], ledger.values[one] = [], [[] for _ in range(layers)]
        elif move == "f" and one in live and other not in live:
            oracle.fork(one, other)
            ledger.tables[other] = list(ledger.tables[one])
            ledger.values[other] = [list(values) for values in ledger.values[one]]
        elif move == "x" and one in live:
            oracle.free(one)
            del ledger.tables[one], ledger.values[one]
        elif move == "p" and one in live:
            layer = other % layers
            k: Any = np.tile(np.arange(scalar, scalar + n, dtype=np.float32)[None, :, None], (H, 1, D))
            assert oracle.cost(one, layer, n) == ledger.cost(one, layer, n)
            oracle.append(one, layer, k, -k)
            ledger.append(one, layer, k[0, :, 0].tolist())
            scalar += n
        assert partition(oracle.tables) == partition(ledger.tables)
        assert oracle.used() == len({block for table in ledger.tables.values() for block in table})
        assert oracle.free_blocks() == 1000 - oracle.used()
        for seq, all_values in ledger.values.items():
            assert oracle.lens(seq) == [len(values) for values in all_values]
            longest = max(map(len, all_values))
            assert len(oracle.tables[seq]) == math.ceil(longest / size)  # law 2
            for (found_k, found_v), values in zip(oracle.contents[seq], all_values, strict=True):
                assert found_k.dtype == found_v.dtype == np.float16
                assert found_k.shape == found_v.shape == (H, len(values), D)
                for head in range(H):
                    assert found_k[head, :, 0].tolist() == values
                    assert found_v[head, :, 0].tolist() == [-value for value in values]


def test_what_was_handed_over_is_copied() -> None:
    oracle = Oracle(Config(4, 2, 1, 1, 1))
    oracle.add(0)
    given_k: Any = np.ones((1, 2, 1), np.float16)
    oracle.append(0, 0, given_k, given_k)
    oracle.fork(0, 1)
    given_k[:] = 9
    oracle.append(1, 0, given_k, given_k)
    assert oracle.contents[0][0][0].ravel().tolist() == [1, 1]
    assert oracle.contents[1][0][0].ravel().tolist() == [1, 1, 9, 9]


@given(st.lists(st.floats(width=64), min_size=1))
def test_half_rounds_as_the_struct_module_does(values: list[float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = half(values)
    for value, one in zip(values, found, strict=True):
        try:
            expected = struct.unpack("<e", struct.pack("<e", value))[0]
        except OverflowError:
            expected = math.copysign(math.inf, value)
        assert one == expected or (math.isnan(one) and math.isnan(value))
        assert math.isnan(value) or math.copysign(1, one) == math.copysign(1, value)


def test_every_nan_is_the_same_nan() -> None:
    nans = np.array([0x7C01, 0x7E00, 0xFFFF], np.uint16).view(np.float16)
    assert len(set(half(nans).view(np.uint16).tolist())) == 1


def test_it_imports_nothing_of_what_it_judges() -> None:
    with open(Oracle.__init__.__code__.co_filename, encoding="utf-8") as source:  # noqa: PTH123
        assert "tinyllm.infer" not in source.read()
