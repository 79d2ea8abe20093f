"""The contract that the kit holds a cache to, as a Protocol. Law numbers are those of docs/laws.md.

An implementation need not inherit from anything here: ten methods of these names are enough, and a factory
that takes the five sizes of `Config` in order (a class is one).
"""

import contextlib
import inspect
import reprlib
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray


class Config(NamedTuple):
    """The five sizes a cache is made with, in the order that a factory takes them."""

    num_blocks: int
    block_size: int
    n_layers: int
    n_kv_heads: int
    d_head: int


class PagedCache(Protocol):
    """A paged KV cache. A call that raises, for any reason, changes nothing that can be observed (law 10)."""

    def add_seq(self, seq_id: int, /) -> None:
        """Start an empty sequence; a freed id can be used again (law 13).

        Raises: ValueError when the id is live; TypeError when it is no integer (law 15).
        """

    def fork(self, parent: int, child: int, /) -> None:
        """Start `child` as an equal of `parent` in every layer; allocates nothing (laws 7, 13).

        Raises: KeyError for an unknown parent, ValueError for a live child, TypeError (law 15).
        """

    def append(self, seq_id: int, layer: int, k: Any, v: Any, /) -> None:
        """Add `T >= 1` positions, `k` and `v` of shape `[H, T, D]`, to one layer (laws 1-4, 8, 11, 12).

        Values are rounded once to float16; shared blocks that are written into are copied (law 8).

        Raises: an error named OutOfBlocks if and only if the append costs more blocks than are free
        (law 9); KeyError, IndexError, ValueError, TypeError for bad arguments (law 15).
        """

    def block_table(self, seq_id: int, /) -> NDArray[Any]:
        """Block ids in position order, int32, a copy; as many as the longest layer needs (laws 1, 2, 12).

        Raises: KeyError for an unknown id, TypeError (law 15).
        """

    def seq_len(self, seq_id: int, layer: int = 0, /) -> int:
        """Positions that one layer holds (law 4).

        Raises: KeyError for an unknown id, IndexError for a layer outside `[0, L)`, TypeError (law 15).
        """

    def gather(self, seq_id: int, layer: int, /) -> tuple[NDArray[Any], NDArray[Any]]:
        """All K and V of one layer, float16 `[H, seq_len, D]`, copies (laws 3, 12).

        Raises: KeyError for an unknown id, IndexError for a layer outside `[0, L)`, TypeError (law 15).
        """

    def free(self, seq_id: int, /) -> None:
        """Drop a sequence; a block is free again when no table holds it (law 6).

        Raises: KeyError for an unknown id, TypeError (law 15).
        """

    def stats(self) -> dict[str, int]:
        """Counts of blocks: free, used, cached; and evictions so far (law 5)."""

    def num_free_blocks(self) -> int:
        """`free + cached`: how many blocks the next append can take (laws 5, 9)."""

    def close(self) -> None:
        """Give the memory back; twice is fine; any other use afterwards is a ValueError (law 14)."""


Factory = Callable[[int, int, int, int, int], PagedCache]


class Capability(StrEnum):
    """What an implementation may lack; each stands for a promise in `CAPABILITIES`."""

    INDEPENDENT_LAYERS = "independent-layers"
    LAZY_COPY = "lazy-copy"
    EXACT_COST = "exact-cost"
    BLOCK_TABLES = "block-tables"
    COUNTS = "counts"
    FORK = "fork"
    CONTENTS = "contents"
    EXACT_ERRORS = "exact-errors"


CAPABILITIES: dict[str, str] = {
    Capability.INDEPENDENT_LAYERS: "a layer may lead or lag (law 4); else layers 0..L-1 grow together",
    Capability.LAZY_COPY: "a fork shares a partial block until a write (law 7); else it copies it at once",
    Capability.EXACT_COST: "OutOfBlocks if and only if the blocks do not suffice (law 9); else when it likes",
    Capability.BLOCK_TABLES: "block_table says which blocks hold a sequence, so who shares (laws 1, 2, 8)",
    Capability.COUNTS: "stats and num_free_blocks count blocks (laws 5, 6, 9)",
    Capability.FORK: "fork (laws 7, 8)",
    Capability.CONTENTS: "it stores K and V itself (law 3); else the kit does, through the block tables",
    Capability.EXACT_ERRORS: "a bad argument raises the very class that law 15 names, not just any error",
}
"""The promises. An implementation that does not make all of them declares `capabilities`, a set of names on
the class or factory; without a declaration everything is promised, and so everything is checked."""

EXTENSIONS = {
    "blocks_needed": "what an append would cost (law 16)",
    "truncate": "cut a sequence back to a length (law 17)",
    "page_table": "the tables of several sequences as one CSR matrix (law 18)",
    "check": "hold the books against each other (law 19)",
    "gather_runs": "what gather copies, in place (law 20)",
}
"""Methods beyond the ten, as `PagedKVCache` has them. One that is there is held to its law."""


def stated(thing: object, name: str, default: Any = None) -> Any:
    """An attribute that somebody has written down.

    Of an object that answers any name (a mock, a stub), what stands in it or in its class; a proxy that
    forwards what is there, and refuses the rest, is asked as any other.
    """
    made_up = object()
    with contextlib.suppress(AttributeError):
        if getattr(thing, "a_name_that_nobody_has_written_down", made_up) is not made_up:
            inspect.getattr_static(thing, name)
        return getattr(thing, name, default)
    return default


def extensions(cache: object) -> frozenset[str]:
    """Which of `EXTENSIONS` a cache has."""
    return frozenset(name for name in EXTENSIONS if callable(stated(cache, name)))


def capabilities(factory: Factory) -> frozenset[Capability]:
    """What `factory` (or the object it is a method of) declares, or everything.

    Raises:
        ValueError: what is declared is no set, list or tuple of names in `CAPABILITIES`.
    """
    known = f"a set of names, of {', '.join(sorted(CAPABILITIES))}"
    owner = stated(factory, "__self__", factory)
    try:
        declared = stated(owner, "capabilities", frozenset(CAPABILITIES))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"capabilities cannot be read ({what}); it must be {known}") from error
    if not isinstance(declared, (set, frozenset, list, tuple)):
        what = f"{reprlib.repr(declared)} ({type(declared).__name__})"
        raise ValueError(f"capabilities is {what}; it must be {known}")  # noqa: TRY004 - one class for all
    for name in declared:
        if not isinstance(name, str) or name not in CAPABILITIES:
            raise ValueError(f"capabilities has {reprlib.repr(name)}; it must be {known}")
    return frozenset(map(Capability, declared))
