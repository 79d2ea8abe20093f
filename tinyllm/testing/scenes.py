"""How programs begin: mostly with a few positions in a tiny pool, now and then as engines run.

A pool in pieces, many single appends, one long layer, wide and deep caches: what a walk of forty steps in a
tiny pool never comes to. They are few, since all that a cache holds is read after each line.
"""

from typing import NamedTuple

from hypothesis import strategies as st

from tinyllm.testing.contract import Config
from tinyllm.testing.trace import Op

MOST_BLOCKS = 304  # of a pool: 300 single appends, a block each


class Start(NamedTuple):
    """A cache, and the first lines on it; `silent` where they are too many to be looked at."""

    config: Config
    lines: tuple[Op, ...]
    silent: bool = True


def starts(config: Config) -> st.SearchStrategy[Start]:
    """A first sequence of uneven layers that leaves half of the pool free."""
    most = max(1, min(3, config.num_blocks // 2) * config.block_size)
    lens = st.tuples(*[st.integers(0, most)] * config.n_layers)
    return lens.map(lambda lens: Start(config, (Op("add", (0,)), *_appends(0, lens)), silent=False))


def _appends(seq: int, lens: tuple[int, ...]) -> list[Op]:
    return [Op("append", (seq, layer, n)) for layer, n in enumerate(lens) if n]


def _in_pieces(count: int, size: int, layers: int, spare: int) -> Start:
    """So many sequences of a block, every second of them freed, and one append that takes all holes."""
    lines = [op for i in range(count) for op in (Op("add", (i,)), Op("append", (i, 0, size)))]
    lines += [Op("free", (i,)) for i in range(1, count, 2)]
    free = count // 2 + spare
    lines += [Op("add", (1,)), Op("append", (1, 0, 1)), Op("append", (1, 0, free * size - 1))]
    return Start(Config(count + spare, size, layers, 1, 1), tuple(lines))


def _single(count: int, size: int, layers: int) -> Start:
    """So many appends of one position."""
    return Start(
        Config(count // size + 4, size, layers, 1, 1),
        (Op("add", (0,)), *[Op("append", (0, layers - 1, 1))] * count),
    )


def _long(count: int) -> Start:
    """One append of very many positions."""
    return Start(Config(4 + count // 1024, 1024, 1, 1, 1), (Op("add", (0,)), Op("append", (0, 0, count))))


def _wide(blocks: int, size: int, layers: int, heads: int, dims: int) -> Start:
    """Layers that are uneven in a cache of the sizes that models have."""
    lens = tuple((3 * size // 4 + 7 * layer) % (2 * size) for layer in range(layers))
    return Start(Config(blocks, size, layers, heads, dims), (Op("add", (0,)), *_appends(0, lens)))


SCENES = [
    _in_pieces(72, 2, 1, 1),
    _in_pieces(72, 1, 2, 0),
    _in_pieces(72, 600, 1, 0),
    _in_pieces(140, 2, 1, 5),
    _single(300, 16, 2),
    _single(300, 1, 1),
    _single(130, 4, 1),
    _long(70_000),
    _wide(9, 16, 8, 8, 128),
    _wide(6, 16, 9, 1, 2),
    _wide(6, 8, 9, 2, 1),
    _wide(6, 1500, 2, 1, 1),
]
_STARTS = [None] * 7 * len(SCENES) + SCENES


def now_and_then(usual: st.SearchStrategy[Start]) -> st.SearchStrategy[Start]:
    """A usual start or, once in eight programs, a scene."""
    return st.sampled_from(_STARTS).flatmap(lambda scene: usual if scene is None else st.just(scene))
