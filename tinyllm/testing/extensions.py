"""What a cache offers beyond the ten methods, held to its laws in every look."""

import re
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyllm.testing.contract import Config
from tinyllm.testing.laws import JUNK_BLOCK, LAWS, LawBroken, View, bits
from tinyllm.testing.observe import attempt, named, scribble, shown


def check_need(cache: Any, args: tuple[int | float, ...], cost: int) -> None:
    """Law 16: `blocks_needed` of an append that is about to come is its cost, be there as many or not."""
    call = f"blocks_needed({', '.join(map(str, args))})"
    found = _ask(16, lambda: cache.blocks_needed(*args), call)
    if isinstance(found, bool) or not isinstance(found, (int, np.integer)) or found != cost:
        raise LawBroken(16, "blocks needed", f"{call} == {cost}", shown(found))


class Pages(NamedTuple):
    """A call of `page_table`, and what it returned."""

    seqs: list[int]
    layer: int
    arrays: tuple[Any, ...]
    found: tuple[list[int], ...]
    junk: int  # what was written over it; earlier answers have a number nearer to JUNK_BLOCK

    @property
    def call(self) -> str:
        """The call in words."""
        return f"page_table({self.seqs}, {self.layer})"


class Asked(NamedTuple):
    """What the methods beyond the ten said; `runs` are K and V of each (sequence, layer), joined."""

    pages: list[Pages]
    runs: dict[tuple[int, int], tuple[NDArray[np.float16], NDArray[np.float16]]]


def ask_extensions(cache: Any, offers: frozenset[str], live: list[int], config: Config, junk: int) -> Asked:
    """Ask them, copy what they say, and write `junk` over it: JUNK_BLOCK or less, another each time.

    Raises LawBroken for what is wrong whatever the cache holds.
    """
    if "check" in offers:
        _check_books(cache)
    layers = range(config.n_layers)
    pages = []
    if "page_table" in offers and live:
        rows = [*live, min(live)]  # everybody, one of them twice
        pages = [_pages(cache, seqs, layer, junk) for seqs, layer in [([], 0), *((rows, i) for i in layers)]]
        _check_own(pages)
    runs = {}
    if "gather_runs" in offers:
        runs = {(seq, layer): _runs(cache, seq, layer, config) for seq in live for layer in layers}
    return Asked(pages, runs)


def check_extensions(asked: Asked, view: View, block_size: int) -> None:
    """Laws 18 and 20, against what the other methods show."""
    for pages in asked.pages if view.tables else ():
        _check_pages(pages, view, block_size)
    for (seq, layer), joined in asked.runs.items():
        for name, array, seen in zip("KV", joined, view.contents[seq][layer], strict=True):
            if not np.array_equal(array.view(np.uint16), bits(seen)):
                what = f"{name} of gather_runs({seq}, {layer}), joined, is that of gather"
                raise LawBroken(20, "runs", what, f"{array.tolist()}")


def _check_books(cache: Any) -> None:
    """The law that `check` itself names is the one that is broken; 19 when it names none, or fails."""
    _, error = attempt(cache.check)
    if error is not None:
        says = re.match(r"\w+: law (\d+)\b", named(error)) if isinstance(error, AssertionError) else None
        law = int(says[1]) if says and int(says[1]) in LAWS else 19
        raise LawBroken(law, "books", "check() passes", named(error)) from error


def _ask(law: int, call: Any, words: str) -> Any:
    answer, error = attempt(call)
    if error is not None:
        raise LawBroken(law, words.partition("(")[0], f"{words} succeeds", named(error)) from error
    return answer


def _check_own(pages: list[Pages]) -> None:
    """Law 12: page tables are their caller's own, who overwrites them."""
    for one in pages:
        if (now := tuple(array.tolist() for array in one.arrays)) != one.found:
            raise LawBroken(12, "page table", f"what {one.call} returned stays {one.found}", f"{now}")
    for one in pages:
        scribble(one.arrays, one.junk)


def _pages(cache: Any, seqs: list[int], layer: int, junk: int) -> Pages:
    call = f"page_table({seqs}, {layer})"
    arrays = _ask(18, lambda: cache.page_table(seqs, layer), call)
    if not isinstance(arrays, tuple) or len(arrays) != 3:
        raise LawBroken(18, "page table", f"{call} is indptr, indices and last_page_len", shown(arrays))
    for array in arrays:
        if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != 1:
            raise LawBroken(18, "page table", f"{call} gives flat int32 arrays", shown(array))
    return Pages(seqs, layer, arrays, tuple(array.tolist() for array in arrays), junk)


def _check_pages(pages: Pages, view: View, block_size: int) -> None:
    """A row a sequence: the blocks that its layer covers, and how many positions the last of them holds."""
    lens = [view.lens[seq][pages.layer] for seq in pages.seqs]
    rows = [view.tables[seq][: -(-n // block_size)] for seq, n in zip(pages.seqs, lens, strict=True)]
    indptr = [0]
    for row in rows:
        indptr.append(indptr[-1] + len(row))
    last = [n - (len(row) - 1) * block_size if row else 0 for n, row in zip(lens, rows, strict=True)]
    expected = (indptr, [block for row in rows for block in row], last)
    if pages.found != expected:
        overwritten = any(pages.junk <= n <= JUNK_BLOCK for part in pages.found for n in part)
        raise LawBroken(
            12 if overwritten else 18, "page table", f"{pages.call} == {expected}", f"{pages.found}"
        )


def _runs(cache: Any, seq: int, layer: int, config: Config) -> Any:
    """K and V in place, joined to a copy; nobody can write into the pieces, which are no copies."""
    call = f"gather_runs({seq}, {layer})"
    runs = _asked_runs(cache, seq, layer, call)
    again = _asked_runs(cache, seq, layer, call) if layer == 0 else runs
    if len(again) != len(runs):
        raise LawBroken(12, "runs", f"the list of {call} is its caller's", "another one after it was cleared")
    joined = []
    for i, name in enumerate("KV"):
        pieces = [pair[i] for pair in runs]
        if not all(isinstance(a, np.ndarray) and a.dtype == np.float16 and a.ndim == 3 for a in pieces):
            raise LawBroken(20, "runs", f"{name} of {call} is float16 [H, n, D]", shown(pieces))
        if any(piece.flags.writeable for piece in pieces):
            raise LawBroken(20, "runs", f"{name} of {call} is read-only", "it can be written")
        if not all(np.may_share_memory(a, pair[i]) for a, pair in zip(pieces, again, strict=True) if a.size):
            raise LawBroken(20, "runs", f"{name} of {call} is a view of the blocks", "another copy each time")
        empty = np.zeros((config.n_kv_heads, 0, config.d_head), np.float16)
        whole = _ask(20, partial(np.concatenate, [empty, *pieces], axis=1), call)
        whole[np.isnan(whole)] = np.nan
        joined.append(whole)
    return tuple(joined)


def _asked_runs(cache: Any, seq: int, layer: int, call: str) -> list[tuple[Any, Any]]:
    """The pairs; the list itself is its caller's, who clears it (law 12)."""

    def ask() -> list[tuple[Any, Any]]:
        runs = cache.gather_runs(seq, layer)
        pairs = [(k, v) for k, v in runs]
        if isinstance(runs, list):
            runs.clear()
        return pairs

    answer: list[tuple[Any, Any]] = _ask(20, ask, call)
    return answer
