"""What a cache offers beyond the ten methods, held to its laws in every look."""

import re
from typing import Any, NamedTuple

import numpy as np

from tinyllm.testing.laws import JUNK_BLOCK, LAWS, LawBroken, View, bits
from tinyllm.testing.observe import attempt, named, scribble, shown


def check_need(cache: Any, args: tuple[int | float, ...], cost: int) -> None:
    """Law 16: `blocks_needed` of an append that is about to come is its cost, be there as many or not."""
    call = f"blocks_needed({', '.join(map(str, args))})"
    found = _ask(16, lambda: cache.blocks_needed(*args), call)
    if isinstance(found, bool) or not isinstance(found, (int, np.integer)) or found != cost:
        raise LawBroken(16, "blocks needed", f"{call} == {cost}", shown(found))


def check_extensions(cache: Any, offers: frozenset[str], view: View, block_size: int) -> None:
    """Laws 18, 19 and 20, against what the other methods have just shown."""
    if "check" in offers:
        _check_books(cache)
    layers = range(len(next(iter(view.lens.values()), [])))
    if "page_table" in offers and view.tables:
        rows = [*view.tables, min(view.tables)]  # everybody, one of them twice
        asked = [([], 0), *((rows, layer) for layer in layers)]
        _check_own([_check_page_table(cache, seqs, layer, view, block_size) for seqs, layer in asked])
    if "gather_runs" in offers:
        for seq in view.contents:
            for layer in layers:
                _check_runs(cache, seq, layer, view)


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


class _Pages(NamedTuple):
    """What a call of `page_table` returned, and what stood there then."""

    call: str
    arrays: tuple[Any, ...]
    expected: tuple[list[int], ...]


def _check_own(pages: list[_Pages]) -> None:
    """Law 12: page tables are their caller's own, who overwrites them."""
    for call, arrays, expected in pages:
        if (found := tuple(array.tolist() for array in arrays)) != expected:
            raise LawBroken(12, "page table", f"what {call} returned stays {expected}", f"{found}")
    for _, arrays, _ in pages:
        scribble(arrays, JUNK_BLOCK)


def _check_page_table(cache: Any, seqs: list[int], layer: int, view: View, block_size: int) -> _Pages:
    """A row a sequence: the blocks that its layer covers, and how many positions the last of them holds."""
    call = f"page_table({seqs}, {layer})"
    arrays = _ask(18, lambda: cache.page_table(seqs, layer), call)
    if not isinstance(arrays, tuple) or len(arrays) != 3:
        raise LawBroken(18, "page table", f"{call} is indptr, indices and last_page_len", shown(arrays))
    for array in arrays:
        if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != 1:
            raise LawBroken(18, "page table", f"{call} gives flat int32 arrays", shown(array))
    lens = [view.lens[seq][layer] for seq in seqs]
    rows = [view.tables[seq][: -(-n // block_size)] for seq, n in zip(seqs, lens, strict=True)]
    indptr = [0]
    for row in rows:
        indptr.append(indptr[-1] + len(row))
    last = [n - (len(row) - 1) * block_size if row else 0 for n, row in zip(lens, rows, strict=True)]
    expected = (indptr, [block for row in rows for block in row], last)
    found = tuple(array.tolist() for array in arrays)
    if found != expected:
        overwritten = any(JUNK_BLOCK in part for part in found)
        raise LawBroken(12 if overwritten else 18, "page table", f"{call} == {expected}", f"{found}")
    return _Pages(call, arrays, expected)


def _check_runs(cache: Any, seq: int, layer: int, view: View) -> None:
    """The pieces, one after the other, are what `gather` returned; nobody can write into them."""
    call = f"gather_runs({seq}, {layer})"
    runs = _ask(20, lambda: [(k, v) for k, v in cache.gather_runs(seq, layer)], call)
    for i, (name, seen) in enumerate(zip("KV", view.contents[seq][layer], strict=True)):
        whole = bits(seen)
        pieces = [pair[i] for pair in runs]
        if not all(isinstance(a, np.ndarray) and a.dtype == np.float16 and a.ndim == 3 for a in pieces):
            raise LawBroken(20, "runs", f"{name} of {call} is float16 [H, n, D]", shown(pieces))
        if any(piece.flags.writeable for piece in pieces):
            raise LawBroken(20, "runs", f"{name} of {call} is read-only", "it can be written")
        joined = _ask(
            20,
            lambda pieces=pieces, whole=whole: np.concatenate(
                [whole[:, :0].view(np.float16), *pieces], axis=1
            ),
            call,
        )
        joined[np.isnan(joined)] = np.nan
        if not np.array_equal(joined.view(np.uint16), whole):
            raise LawBroken(20, "runs", f"{name} of {call}, joined, is that of gather", f"{joined.tolist()}")
