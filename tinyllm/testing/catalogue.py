"""The ten tests of the chapter as plain functions of a factory, and what they are for as data.

They are written to be read: each says one thing about a cache in plain calls. The directed cases and the
machine are stronger; these come first, because they fail in words.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tinyllm.testing.contract import Config, Factory, PagedCache, capabilities
from tinyllm.testing.laws import sharing
from tinyllm.testing.oracle import Oracle


class Entry(NamedTuple):
    """A test of the catalogue.

    `kind` is unit, differential, fault, boundary or property; `needs` are the capabilities without which the
    test says nothing.
    """

    name: str
    kind: str
    checks: str
    matters: str
    laws: tuple[int, ...]
    needs: frozenset[str]
    test: Callable[[Factory], None]


CATALOGUE: dict[str, Entry] = {}
"""The ten entries by name, in the order in which a cache is best built."""


def _entry(
    kind: str, checks: str, matters: str, *laws: int, needs: str = ""
) -> Callable[[Callable[[Factory], None]], Any]:
    def put(test: Callable[[Factory], None]) -> Callable[[Factory], None]:
        name = test.__name__
        CATALOGUE[name] = Entry(name, kind, checks, matters, laws, frozenset(needs.split()), test)
        return test

    return put


def _tokens(first: int, count: int, heads: int = 1, dims: int = 2) -> np.ndarray[Any, Any]:
    """K of tokens `first`, `first + 1`...: every scalar differs. V is its negative."""
    t = np.arange(first, first + count)[None, :, None]
    head, dim = np.arange(heads)[:, None, None], np.arange(dims)[None, None, :]
    return np.asarray(1 + (t * heads + head) * dims + dim, np.float32)


def _append(cache: PagedCache, seq: int, k: np.ndarray[Any, Any], layer: int = 0) -> None:
    cache.append(seq, layer, k, -k)


def _counts(cache: PagedCache) -> tuple[int, int]:
    stats = cache.stats()
    assert cache.num_free_blocks() == stats["free"] + stats["cached"]
    return stats["free"] + stats["cached"], stats["used"]


def _holds(cache: PagedCache, seq: int, k: np.ndarray[Any, Any], layer: int = 0) -> None:
    assert cache.seq_len(seq, layer) == k.shape[1], "seq_len"
    for name, found, expected in zip("KV", cache.gather(seq, layer), (k, -k), strict=True):
        assert found.dtype == np.float16, f"{name} is {found.dtype}"
        np.testing.assert_array_equal(found, expected.astype(np.float16), f"{name} of sequence {seq}")


def _out_of_blocks(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        if "OutOfBlocks" in {cls.__name__ for cls in type(error).__mro__}:
            return
        raise
    raise AssertionError("the append was accepted; it must raise OutOfBlocks")


@_entry(
    "unit",
    "a block only when a position needs it; the gathered token values; allocation counts",
    "you and the tests agree on the mapping",
    *(1, 2, 5),
    needs="block-tables counts exact-cost fork lazy-copy",
)
def test_hand_example_block_table(factory: Factory) -> None:
    """Section 3 of the chapter: B = 2, five tokens one at a time, in a pool of four blocks."""
    cache = factory(4, 2, 1, 1, 2)
    cache.add_seq(0)
    for t, counts in enumerate([(3, 1), (3, 1), (2, 2), (2, 2), (1, 3)]):
        _append(cache, 0, np.array([[[t + 0.5, -t]]], np.float32))
        assert cache.seq_len(0) == t + 1
        assert len(cache.block_table(0)) == t // 2 + 1, f"table length after token {t}"
        assert _counts(cache) == counts, f"free and used blocks after token {t}"
    k, v = cache.gather(0, 0)
    assert k.shape == (1, 5, 2)
    assert k[0, :, 0].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert k[0, :, 1].tolist() == [0, -1, -2, -3, -4]
    assert (v == -k).all()
    table = cache.block_table(0)
    assert table.dtype == np.int32
    assert len(set(table.tolist())) == 3

    cache.fork(0, 1)
    assert _counts(cache) == (1, 3)
    _append(cache, 1, np.array([[[5.5, -5]]], np.float32))
    assert _counts(cache) == (0, 4)
    parent, child = (cache.block_table(seq).tolist() for seq in (0, 1))
    assert child[:2] == parent[:2]
    assert child[2] != parent[2]
    assert cache.gather(0, 0)[0].shape == (1, 5, 2)


@_entry(
    "unit",
    "gathered arrays use [heads, tokens, dimensions] order",
    "attention receives the expected layout",
    *(1, 3),
    needs="independent-layers",
)
def test_gather_preserves_head_token_dimension_order(factory: Factory) -> None:
    """Three heads, five dimensions, seven tokens: no two sizes alike."""
    cache = factory(4, 4, 2, 3, 5)
    cache.add_seq(0)
    k = _tokens(0, 7, heads=3, dims=5)
    _append(cache, 0, k, layer=1)
    found = cache.gather(0, 1)[0]
    assert found.shape == (3, 7, 5)
    assert found[2, 6, 4] == k[2, 6, 4]
    assert found[0, 1, 0] == k[0, 1, 0]
    _holds(cache, 0, k, layer=1)


@_entry(
    "unit",
    "each layer can append independently while sharing the sequence block table",
    "transformer layers advance in order",
    *(4, 2, 3),
    needs="independent-layers block-tables",
)
def test_layers_keep_independent_lengths(factory: Factory) -> None:
    """The layers of one sequence lead and lag; the table is as long as the longest needs."""
    cache = factory(8, 2, 3, 1, 2)
    cache.add_seq(0)
    first, second = _tokens(0, 5), _tokens(100, 2)
    _append(cache, 0, first, layer=1)
    assert [cache.seq_len(0, layer) for layer in range(3)] == [0, 5, 0]
    assert len(cache.block_table(0)) == 3
    _holds(cache, 0, _tokens(0, 0), layer=0)
    _append(cache, 0, second, layer=0)
    assert len(cache.block_table(0)) == 3, "a lagging layer writes into blocks that are there"
    _holds(cache, 0, second, layer=0)
    _holds(cache, 0, first, layer=1)
    _holds(cache, 0, _tokens(0, 0), layer=2)
    more = _tokens(200, 5)
    _append(cache, 0, more, layer=0)
    assert len(cache.block_table(0)) == 4
    _holds(cache, 0, np.concatenate([second, more], axis=1), layer=0)
    _holds(cache, 0, first, layer=1)


@_entry(
    "differential",
    "chunks of 1 to 7 tokens, 3 layers, 2 interleaved sequences equal a contiguous float16 cache exactly",
    "positions in order across block boundaries",
    *(3, 1, 4),
    needs="independent-layers",
)
def test_gather_matches_contiguous_float16(factory: Factory) -> None:
    """Random float32 values; the oracle rounds them to float16 and concatenates."""
    rng = np.random.default_rng(0)
    config = Config(64, 4, 3, 2, 3)
    cache, oracle = factory(*config), Oracle(config)
    for seq in (0, 1):
        cache.add_seq(seq)
        oracle.add(seq)
    for step in range(24):
        for layer in range(3):
            for seq in (0, 1):
                shape = (2, 1 + (step + seq + layer) % 7, 3)
                k, v = (rng.standard_normal(shape, np.float32) * 100 for _ in "kv")
                cache.append(seq, layer, k, v)
                oracle.append(seq, layer, k, v)
    _equal(cache, oracle)


def _equal(cache: PagedCache, oracle: Oracle) -> None:
    for seq, layers in oracle.contents.items():
        for layer, pair in enumerate(layers):
            assert cache.seq_len(seq, layer) == pair[0].shape[1]
            for name, found, expected in zip("KV", cache.gather(seq, layer), pair, strict=True):
                assert found.dtype == np.float16
                np.testing.assert_array_equal(found, expected, f"{name} of sequence {seq}, layer {layer}")


@_entry(
    "unit",
    "a fork allocates nothing; the first write into the shared partial block copies it; "
    "full blocks stay shared",
    "beam search and parallel sampling",
    *(7, 8),
    needs="independent-layers block-tables counts exact-cost fork lazy-copy",
)
def test_fork_shares_until_a_write(factory: Factory) -> None:
    """A parent of two and a half blocks, forked; the child writes, then the parent."""
    cache = factory(8, 2, 2, 1, 2)
    cache.add_seq(0)
    prompt = _tokens(0, 5)
    _append(cache, 0, prompt)
    _append(cache, 0, prompt, layer=1)
    before = _counts(cache)
    cache.fork(0, 1)
    assert _counts(cache) == before, "a fork allocates nothing"
    assert cache.block_table(1).tolist() == cache.block_table(0).tolist()
    mine, theirs = _tokens(50, 1), _tokens(70, 1)
    _append(cache, 1, mine)
    assert _counts(cache) == (before[0] - 1, before[1] + 1), "the shared partial block is copied"
    parent, child = cache.block_table(0).tolist(), cache.block_table(1).tolist()
    assert parent[:2] == child[:2], "full blocks stay shared"
    assert parent[2] != child[2]
    _holds(cache, 0, prompt)
    _holds(cache, 1, np.concatenate([prompt, mine], axis=1))
    _holds(cache, 1, prompt, layer=1)  # the copy took all layers along
    _append(cache, 0, theirs)
    assert _counts(cache) == (before[0] - 1, before[1] + 1), "the last holder writes in place"
    _holds(cache, 0, np.concatenate([prompt, theirs], axis=1))
    _holds(cache, 1, np.concatenate([prompt, mine], axis=1))
    cache.free(0)
    _append(cache, 1, theirs, layer=1)
    cache.add_seq(2)
    _append(cache, 2, _tokens(300, 8))  # reuses what the parent gave back
    _holds(cache, 1, np.concatenate([prompt, mine], axis=1))
    _holds(cache, 1, np.concatenate([prompt, theirs], axis=1), layer=1)


@_entry(
    "unit",
    "a forked block returns only when both holders free it; freeing all restores every block",
    "KV usage back to baseline after each request",
    *(6, 5),
    needs="counts exact-cost fork lazy-copy",
)
def test_free_restores_the_pool(factory: Factory) -> None:
    """A parent, its fork and a stranger are freed one after another."""
    cache = factory(8, 2, 1, 1, 2)
    for seq in (0, 2):
        cache.add_seq(seq)
        _append(cache, seq, _tokens(0, 5))
    cache.fork(0, 1)
    assert _counts(cache) == (2, 6)
    cache.free(0)
    assert _counts(cache) == (2, 6), "the fork still holds every block"
    _holds(cache, 1, _tokens(0, 5))
    cache.free(2)
    assert _counts(cache) == (5, 3)
    cache.free(1)
    assert _counts(cache) == (8, 0)
    cache.add_seq(0)
    assert cache.seq_len(0) == 0
    _append(cache, 0, _tokens(9, 16))  # the whole pool, once more
    _holds(cache, 0, _tokens(9, 16))


@_entry(
    "fault",
    "a multi-block append that cannot be satisfied leaves length, values, and allocation counts as they were",
    "the scheduler preempts and retries safely",
    *(10, 9),
    needs="independent-layers block-tables counts exact-cost fork lazy-copy",
)
def test_out_of_blocks_changes_nothing(factory: Factory) -> None:
    """Refused for want of new blocks, then for want of a copy; then the retry succeeds."""
    cache = factory(4, 2, 2, 1, 2)
    cache.add_seq(0)
    cache.add_seq(1)
    prompt, other = _tokens(0, 3), _tokens(40, 1)
    _append(cache, 0, prompt)
    _append(cache, 1, other)

    def state() -> tuple[object, ...]:
        shared = sharing({seq: cache.block_table(seq).tolist() for seq in (0, 1)})  # whatever the ids
        return _counts(cache), shared, [cache.seq_len(seq, layer) for seq in (0, 1) for layer in (0, 1)]

    before = state()
    _out_of_blocks(lambda: _append(cache, 0, _tokens(10, 4)))  # two blocks more, one is free
    assert state() == before
    _holds(cache, 0, prompt)
    _holds(cache, 1, other)

    cache.fork(0, 2)
    _append(cache, 1, _tokens(41, 2))  # takes the last free block
    _out_of_blocks(lambda: _append(cache, 2, _tokens(10, 1)))  # the tail is shared: a copy is needed
    _out_of_blocks(lambda: _append(cache, 2, _tokens(10, 1), layer=1))  # a shared block, from its start
    assert cache.block_table(2).tolist() == cache.block_table(0).tolist()
    assert [cache.seq_len(2, 0), cache.seq_len(2, 1)] == [3, 0]
    _holds(cache, 2, prompt)

    cache.free(1)
    _append(cache, 2, _tokens(10, 3))  # one copy and one new block: exactly what is free
    assert _counts(cache) == (0, 4)
    _holds(cache, 2, np.concatenate([prompt, _tokens(10, 3)], axis=1))
    _holds(cache, 0, prompt)


@_entry(
    "boundary",
    "bad shapes, empty chunks, unknown or reused ids, bad layers, sizes below 1",
    "engine bugs fail loudly",
    *(15, 10),
    needs="block-tables counts fork",
)
def test_bad_arguments(factory: Factory) -> None:
    """Each is refused, and what was stored before is still there."""
    exact = "exact-errors" in capabilities(factory)

    def refused(error: type[Exception], call: Callable[..., object], *args: object) -> None:
        accepted = error if exact else Exception
        try:
            call(*args)
        except accepted:
            return
        name = getattr(call, "__name__", "the factory")
        raise AssertionError(f"{name}{args} was accepted; it must raise {error.__name__}")

    for i in range(5):
        sizes = [4, 2, 2, 2, 3]
        sizes[i] = 0
        refused(ValueError, factory, *sizes)
    cache = factory(4, 2, 2, 2, 3)
    cache.add_seq(0)
    k = _tokens(0, 3, heads=2, dims=3)
    _append(cache, 0, k)
    before = _counts(cache)
    for bad in (k[0], k[None], k[:1], k[:, :, :2], k[:, :0]):
        refused(ValueError, cache.append, 0, 0, bad, bad)
    refused(ValueError, cache.append, 0, 0, k, k[:, :2])
    refused(ValueError, cache.add_seq, 0)
    refused(ValueError, cache.fork, 0, 0)
    for call, *args in (
        (cache.append, 9, 0, k, k),
        (cache.fork, 9, 1),
        (cache.free, 9),
        (cache.block_table, 9),
        (cache.seq_len, 9),
        (cache.gather, 9, 0),
    ):
        refused(KeyError, call, *args)
    for layer in (2, -1):
        refused(IndexError, cache.append, 0, layer, k, k)
        refused(IndexError, cache.seq_len, 0, layer)
        refused(IndexError, cache.gather, 0, layer)
    assert _counts(cache) == before
    _holds(cache, 0, k)


@_entry(
    "differential",
    "a 2-layer toy decoder: logits within 1e-5 and the same greedy ids from the paged cache and from the "
    "contiguous KVCache(dtype=float16), through a prompt and two forked branches",
    "the equivalence generate --cache paged relies on",
    *(3, 7, 8),
    needs="fork",
)
def test_paged_matches_contiguous_decoding(factory: Factory) -> None:
    """A prompt that ends inside a block; two branches, decoded in turns, each against its own cache."""
    from tinyllm.infer.kvcache import KVCache  # noqa: PLC0415 - instruments of this test alone
    from tinyllm.llm.llama import PagedSequence, toy  # noqa: PLC0415

    model, steps = toy(0), 12
    sizes = model.config.n_layers, model.config.n_kv_heads, model.config.d_head
    prompt = [3, 14, 15, 9, 26, 5, 35]
    paged = factory(32, 4, *sizes)
    paged.add_seq(0)
    mine = [PagedSequence(paged, seq) for seq in range(2)]
    theirs = [KVCache(64, *sizes, dtype=np.float16) for _ in range(2)]
    expected = [model.forward(prompt, cache)[-1] for cache in theirs]
    found = [model.forward(prompt, mine[0])[-1]] * 2
    paged.fork(0, 1)
    for step in range(steps):
        for branch in (0, 1):
            np.testing.assert_allclose(found[branch], expected[branch], rtol=0, atol=1e-5)
            best, other = int(found[branch].argmax()), int(expected[branch].argmax())
            assert best == other, f"greedy id of branch {branch} at step {step}"
            # The branches part at once: the second one starts with its second choice.
            token = int(np.argsort(expected[branch])[-2]) if branch and not step else best
            found[branch] = model.forward([token], mine[branch])[-1]
            expected[branch] = model.forward([token], theirs[branch])[-1]


@_entry(
    "property",
    "10^4 seeded add, fork, append, free operations against a numpy oracle; allocated and free block counts "
    "add up after each; freeing all restores every block",
    "no refcount drifts or leaks over a long run",
    *(5, 6, 7),
    needs="independent-layers counts exact-cost fork lazy-copy",
)
def test_random_ops_conserve_blocks(factory: Factory) -> None:
    """Uneven layers, full pools, forks of forks; contents are compared every fiftieth operation."""
    rng = np.random.default_rng(0)
    config = Config(24, 3, 2, 1, 2)
    cache, oracle = factory(*config), Oracle(config)
    moves = ["add", "fork", "append", "append", "append", "free"]
    for step in range(10_000):
        live = sorted(oracle.tables)
        unused = [seq for seq in range(8) if seq not in oracle.tables]
        move = moves[rng.integers(len(moves))]
        seq = live[rng.integers(len(live))] if live else 0
        if move == "add" and unused:
            cache.add_seq(unused[0])
            oracle.add(unused[0])
        elif move == "fork" and unused and live:
            cache.fork(seq, unused[-1])
            oracle.fork(seq, unused[-1])
        elif move == "append" and live:
            _random_append(cache, oracle, seq, step, rng)
        elif move == "free" and live:
            cache.free(seq)
            oracle.free(seq)
        assert _counts(cache) == (oracle.free_blocks(), oracle.used()), (
            f"free and used after operation {step}"
        )
        if step % 50 == 0:
            _equal(cache, oracle)
    for seq in list(oracle.tables):
        cache.free(seq)
    assert _counts(cache) == (config.num_blocks, 0)


def _random_append(cache: PagedCache, oracle: Oracle, seq: int, step: int, rng: np.random.Generator) -> None:
    layer, count = int(rng.integers(2)), int(rng.integers(1, 8))
    k = _tokens(step % 900, count)
    if oracle.cost(seq, layer, count) > oracle.free_blocks():
        _out_of_blocks(lambda: _append(cache, seq, k, layer))
    else:
        _append(cache, seq, k, layer)
        oracle.append(seq, layer, k, -k)
