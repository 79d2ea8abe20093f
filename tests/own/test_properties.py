"""The chapter's properties in prose, turned into code; whatever else is here kills a bug they leave alive.

A program is a list of moves drawn by Hypothesis; `Model` is what the cache must hold after them: for each
sequence and layer everything that was appended, as one float16 array. Nothing here looks at block ids.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.infer.paged import OutOfBlocks, PagedKVCache

Array = np.ndarray[Any, Any]
Layers = list[tuple[Array, Array]]

HEADS, DIMS = 2, 3  # unlike each other, and unlike every block size below but one
SEQS = st.integers(0, 3)
LAYER = st.integers(0, 1)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), SEQS),
        st.tuples(st.just("fork"), SEQS, SEQS),
        st.tuples(st.just("append"), SEQS, LAYER, st.integers(1, 7)),
        st.tuples(st.just("append"), SEQS, LAYER, st.integers(1, 7)),
        st.tuples(st.just("free"), SEQS),
    ),
    max_size=25,
)
Moves = list[tuple[Any, ...]]


class Model:
    """A cache, and beside it what it must hold."""

    def __init__(self, blocks: int, size: int) -> None:
        self.cache = PagedKVCache(blocks, size, 2, HEADS, DIMS)
        self.blocks, self.size = blocks, size
        self.held: dict[int, Layers] = {}
        self.count = 0

    def play(self, moves: Moves) -> None:
        for name, *args in moves:
            getattr(self, name)(*args)

    def add(self, seq: int) -> None:
        if seq not in self.held:
            self.cache.add_seq(seq)
            self.held[seq] = [(empty(), empty())] * 2

    def fork(self, parent: int, child: int) -> None:
        if parent in self.held and child not in self.held:
            free = self.cache.num_free_blocks()
            self.cache.fork(parent, child)
            assert self.cache.num_free_blocks() == free
            assert self.cache.block_table(child).tolist() == self.cache.block_table(parent).tolist()
            self.held[child] = list(self.held[parent])

    def append(self, seq: int, layer: int, tokens: int) -> None:
        if seq not in self.held:
            return
        k, v = self.chunk(tokens)
        need, before = self.need(seq, layer, tokens), self.observe()
        if need > before["free"]:
            with pytest.raises(OutOfBlocks) as refused:
                self.cache.append(seq, layer, k, v)
            assert refused.value.args == (need, before["free"]) == (refused.value.needed, refused.value.free)
            assert str(refused.value) == f"the append needs {need} blocks, but only {before['free']} are free"
            assert self.observe() == before
            return
        self.cache.append(seq, layer, k, v)
        assert self.cache.num_free_blocks() == before["free"] - need
        old_k, old_v = self.held[seq][layer]
        k16, v16 = k.astype(np.float16), v.astype(np.float16)
        self.held[seq][layer] = np.concatenate([old_k, k16], 1), np.concatenate([old_v, v16], 1)

    def free(self, seq: int) -> None:
        if seq in self.held:
            self.cache.free(seq)
            del self.held[seq]

    def chunk(self, tokens: int) -> tuple[Array, Array]:
        """Values that nothing else in this program has, V unlike K; float16 has to round them."""
        n = HEADS * tokens * DIMS
        k = (self.count + np.arange(n, dtype=np.float32)).reshape(HEADS, tokens, DIMS) * np.float32(1.0003)
        self.count += n
        return k, -k - 0.25

    def need(self, seq: int, layer: int, tokens: int) -> int:
        """Blocks an append takes: a copy of each shared block it writes into, and those past the table."""
        tables = {other: self.cache.block_table(other).tolist() for other in self.held}
        others = {block for other, table in tables.items() if other != seq for block in table}
        start = int(self.held[seq][layer][0].shape[1])
        first, last = start // self.size, -(-(start + tokens) // self.size)
        copies = sum(block in others for block in tables[seq][first:last])
        return copies + max(0, last - len(tables[seq]))

    def observe(self) -> dict[str, Any]:
        """Everything a caller can see."""
        cache = self.cache
        state: dict[str, Any] = {"free": cache.num_free_blocks(), "stats": cache.stats()}
        for seq in self.held:
            pairs = [cache.gather(seq, layer) for layer in (0, 1)]
            lens = [cache.seq_len(seq, layer) for layer in (0, 1)]
            state[f"seq {seq}"] = (
                cache.block_table(seq).tolist(),
                lens,
                [(k.tolist(), v.tolist()) for k, v in pairs],
            )
        return state

    def check(self) -> None:
        """Contents, lengths, tables and counts are what they must be."""
        held: set[int] = set()
        for seq, layers in self.held.items():
            for layer, pair in enumerate(layers):
                assert self.cache.seq_len(seq, layer) == pair[0].shape[1]
                for found, expected in zip(self.cache.gather(seq, layer), pair, strict=True):
                    same(found, expected)
            table = self.cache.block_table(seq).tolist()
            assert len(table) == -(-max(k.shape[1] for k, _ in layers) // self.size)
            assert len(set(table)) == len(table)
            held |= set(table)
        free, used = self.blocks - len(held), len(held)
        assert self.cache.stats() == {"free": free, "used": used, "cached": 0, "evictions": 0}
        assert self.cache.num_free_blocks() == free


def empty() -> Array:
    return np.zeros((HEADS, 0, DIMS), np.float16)


def same(found: Array, expected: Array) -> None:
    """Equal to the bit, in dtype and in shape."""
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, expected, strict=True)


pools = st.builds(Model, st.integers(1, 9), st.integers(1, 4))


@given(pools, MOVES)
def test_gather_equals_the_concatenation_of_what_was_appended(model: Model, moves: Moves) -> None:
    """Gather after any sequence of appends equals the concatenation of what was appended, in float16."""
    model.add(0)
    for move in moves:
        model.play([move])
        model.check()


@given(st.integers(1, 4), MOVES, st.lists(st.tuples(LAYER, st.integers(1, 7)), min_size=1, max_size=4))
def test_an_append_to_the_child_never_changes_the_parent(size: int, moves: Moves, appends: Moves) -> None:
    """A fork then an append to the child never changes the parent, nor the other way round."""
    for writer, reader in ((8, 0), (0, 8)):
        model = Model(200, size)
        model.play([("add", 0), *moves, ("add", 0), ("append", 0, 1, size + 1), ("fork", 0, 8)])
        before = model.observe()[f"seq {reader}"]
        for layer, tokens in appends:
            model.append(writer, layer, tokens)
            assert model.observe()[f"seq {reader}"] == before
        model.check()


@given(pools, MOVES)
def test_freeing_every_sequence_returns_every_block(model: Model, moves: Moves) -> None:
    """Freeing every sequence returns every block, and what comes back can be used again."""
    model.play(moves)
    for seq in list(model.held):
        model.free(seq)
        model.check()
    assert model.cache.num_free_blocks() == model.blocks
    model.add(0)
    model.append(0, 1, model.blocks * model.size)
    model.append(0, 0, 1)
    model.check()


@given(pools, MOVES, SEQS, LAYER)
def test_an_out_of_blocks_append_changes_nothing(model: Model, moves: Moves, seq: int, layer: int) -> None:
    """An OutOfBlocks append changes nothing, by whatever it fails: one block, several, or a copy."""
    model.play([*moves, ("add", seq)])
    for tokens in range(1, model.blocks * model.size + 2):
        if model.need(seq, layer, tokens) > model.cache.num_free_blocks():
            model.append(seq, layer, tokens)  # refused; `append` compares all that can be seen
            break
    else:
        pytest.fail("an append of more positions than the pool has slots must need more blocks than are free")
    model.check()


WRONG: list[tuple[type[Exception], str, Callable[[PagedKVCache, Array], object]]] = [
    (ValueError, "T is 0; it must be at least 1", lambda cache, k: cache.append(0, 0, k[:, :0], k[:, :0])),
    (
        ValueError,
        "k has shape (2, 3); it must be [2, T, 3]",
        lambda cache, k: cache.append(0, 0, k[0, :, :], k),
    ),
    (
        ValueError,
        "v has shape (1, 2, 3); it must be [2, T, 3]",
        lambda cache, k: cache.append(0, 0, k, k[:1]),
    ),
    (ValueError, "k has shape (2, 2, 1)", lambda cache, k: cache.append(0, 0, k[:, :, :1], k[:, :, :1])),
    (ValueError, "v has (2, 1, 3); they must be equal", lambda cache, k: cache.append(0, 0, k, k[:, :1])),
    (
        TypeError,
        "k must hold integers or floats, not bool",
        lambda cache, k: cache.append(0, 0, k > 0, k > 0),
    ),
    (TypeError, "seq_id must be an integer, not 0.5", lambda cache, k: cache.append(0.5, 0, k, k)),  # type: ignore[arg-type]
    (TypeError, "layer must be an integer, not 0.5", lambda cache, k: cache.append(0, 0.5, k, k)),  # type: ignore[arg-type]
    (KeyError, "sequence 9 is not one of the ", lambda cache, k: cache.append(9, 0, k, k)),
    (IndexError, "layer 2 is outside [0, 2)", lambda cache, k: cache.append(0, 2, k, k)),
    (IndexError, "layer -1 is outside [0, 2)", lambda cache, k: cache.append(0, -1, k, k)),
    (ValueError, "sequence 0 is live", lambda cache, _: cache.add_seq(0)),
    (TypeError, "seq_id must be an integer, not None", lambda cache, _: cache.add_seq(None)),  # type: ignore[arg-type]
    (ValueError, "sequence 0 is live", lambda cache, _: cache.fork(0, 0)),
    (KeyError, "sequence 9 is not one of the ", lambda cache, _: cache.fork(9, 8)),
    (TypeError, "parent must be an integer, not '0'", lambda cache, _: cache.fork("0", 8)),  # type: ignore[arg-type]
    (TypeError, "child must be an integer, not 8.0", lambda cache, _: cache.fork(0, 8.0)),  # type: ignore[arg-type]
    (KeyError, "sequence 9 is not one of the ", lambda cache, _: cache.free(9)),
    (TypeError, "seq_id must be an integer, not 0.0", lambda cache, _: cache.free(0.0)),  # type: ignore[arg-type]
    (KeyError, "sequence 9 is not one of the ", lambda cache, _: cache.block_table(9)),
    (KeyError, "sequence 9 is not one of the ", lambda cache, _: cache.gather(9, 0)),
    (IndexError, "layer 2 is outside [0, 2)", lambda cache, _: cache.gather(0, 2)),
    (IndexError, "layer -1 is outside [0, 2)", lambda cache, _: cache.seq_len(0, -1)),
]


@pytest.mark.parametrize(("error", "message", "call"), WRONG)
@settings(max_examples=8)
@given(model=pools, moves=MOVES)
def test_a_bad_argument_is_refused_and_changes_nothing(
    error: type[Exception],
    message: str,
    call: Callable[[PagedKVCache, Array], object],
    model: Model,
    moves: Moves,
) -> None:
    """It is refused by an error that names the value and the bound."""
    model.play([*moves, ("add", 0)])
    before = model.observe()
    with pytest.raises(error, match=re.escape(message)):
        call(model.cache, model.chunk(2)[0])
    assert model.observe() == before


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "n_layers", "n_kv_heads", "d_head"])
def test_a_size_that_is_none_is_refused(name: str) -> None:
    sizes: dict[str, Any] = {"num_blocks": 4, "block_size": 2, "n_layers": 2, "n_kv_heads": 2, "d_head": 3}
    assert getattr(PagedKVCache(**sizes), name) == sizes[name]
    with pytest.raises(ValueError, match=f"^{name} is 0; it must be at least 1$"):
        PagedKVCache(**sizes | {name: 0})
    with pytest.raises(TypeError, match=f"^{name} must be an integer, not 2.0 "):
        PagedKVCache(**sizes | {name: 2.0})
    with pytest.raises(ValueError, match=f"^num_blocks is {2**31}; it must be at most {2**31 - 1}$"):
        PagedKVCache(2**31, 2**20, 2**10, 1, 1)  # more than any machine maps, were it tried


@given(pools, MOVES)
def test_a_slot_that_no_layer_has_appended_to_reads_zero(model: Model, moves: Moves) -> None:
    """Inside the pool, where no caller can see it; in blocks that were used before, too."""
    model.play([("add", 0), ("append", 0, 0, model.blocks * model.size), ("free", 0), *moves])
    for seq, layers in model.held.items():
        slots = [b * model.size + i for b in model.cache.block_table(seq).tolist() for i in range(model.size)]
        for layer, (k, _) in enumerate(layers):
            for pool in (model.cache._k, model.cache._v):
                assert not pool[layer][:, slots[k.shape[1] :]].any()


def test_the_length_of_layer_0_is_what_seq_len_gives() -> None:
    model = Model(4, 2)
    model.play([("add", 0), ("append", 0, 0, 3), ("append", 0, 1, 1)])
    assert model.cache.seq_len(0) == 3


def test_repr_says_how_full_the_cache_is() -> None:
    model = Model(4, 2)
    model.play([("add", 0), ("append", 0, 0, 3)])
    assert repr(model.cache) == "<PagedKVCache: 2 of 4 blocks free, 1 sequences>"
    model.cache.close()
    assert repr(model.cache) == "<PagedKVCache: closed>"


def test_what_goes_in_and_comes_out_is_copied() -> None:
    model = Model(4, 2)
    model.add(0)
    k, v = (np.ascontiguousarray(a, np.float16) for a in model.chunk(2))
    model.cache.append(0, 0, k, v)
    expected = k.copy(), v.copy()
    k[:], v[:] = 7, 7
    for array in (*model.cache.gather(0, 0), model.cache.block_table(0)):
        array[:] = 3
    for found, right in zip(model.cache.gather(0, 0), expected, strict=True):
        same(found, right)


def test_after_close_every_call_is_refused() -> None:
    with PagedKVCache(4, 2, 2, HEADS, DIMS) as cache:
        cache.add_seq(0)
    cache.close()
    for call in (lambda: cache.seq_len(0), lambda: cache.add_seq(1), cache.stats, cache.__enter__):
        with pytest.raises(ValueError, match=r"^the cache is closed$"):
            call()
