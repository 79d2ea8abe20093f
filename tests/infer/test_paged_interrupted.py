"""Law 10 at every line: a MemoryError or a Ctrl-C inside a method changes nothing before its `# Commit`.

After it there is a window of a few statements, listed here, in which a Ctrl-C can leave a call half done.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import tinyllm.infer.paged as module
from tinyllm.infer.paged import PagedKVCache

FILES = {str(path) for path in Path(str(module.__file__)).parent.glob("*.py")}

WINDOWS = {
    "fork": ["self._seqs[child] = equal", "for block, count in new_refs:", "refs[block] = count"],
    "append": ["if plan.need:", "self._take(table, plan, blocks)", "lens[layer] = stop"],
    "_take": [
        "table[plan.first_block : plan.first_block + len(blocks)] = blocks",
        "for _ in pops:",
        "refs[free.pop()] = 1",
        "for block, count in new_refs:",
        "refs[block] = count",
    ],
    "truncate": ["self._release(table[kept:])", "self._seqs[seq_id] = shorter"],
    "free": ["self._release(table)", "del self._seqs[seq_id]"],
    "_release": ["self._free += freed", "for block, count in new_refs:", "refs[block] = count"],
}
"""The statements of every commit: the only lines at which an interrupt can leave something half done."""


def windows() -> dict[str, tuple[range, list[str]]]:
    """Line numbers and statements after each `# Commit`, by method, as the source has them."""
    found = {}
    for name, method in inspect.getmembers(PagedKVCache, inspect.isfunction):
        lines, first = inspect.getsourcelines(method)
        texts = [line.strip() for line in lines]
        if "# Commit" in texts:
            at = texts.index("# Commit") + 1
            while not texts[-1]:
                texts.pop()
            found[name] = (range(first + at, first + len(texts)), texts[at:])
    return found


def values(count: int, first: float) -> Any:
    return first + np.arange(2 * count * 2, dtype=np.float64).reshape(2, count, 2)


def busy() -> PagedKVCache:
    """Parent and fork with uneven layers, a third sequence, blocks on the free list in no order."""
    cache = PagedKVCache(16, 2, 2, 2, 2)
    for seq in (0, 3):
        cache.add_seq(seq)
        cache.append(seq, 0, values(5, seq), -values(5, seq))
        cache.append(seq, 1, values(1, 50), -values(1, 50))
    cache.fork(0, 1)
    cache.free(3)
    return cache


Act = Callable[[PagedKVCache], object]
CALLS: dict[str, tuple[Act, Act]] = {
    "add": (repr, lambda c: c.add_seq(7)),
    "fork": (repr, lambda c: c.fork(0, 7)),
    "append in place": (lambda c: c.free(1), lambda c: c.append(0, 0, values(1, 9), values(1, 9))),
    "append with copies": (repr, lambda c: c.append(1, 1, values(6, 9), values(6, 9))),
    "append new blocks": (repr, lambda c: c.append(0, 0, values(4, 9), values(4, 9))),
    "free a fork": (repr, lambda c: c.free(1)),
    "free the last holder": (lambda c: c.free(1), lambda c: c.free(0)),
    "truncate a fork": (repr, lambda c: c.truncate(1, 1)),
    "truncate the last holder": (lambda c: c.free(1), lambda c: c.truncate(0, 2)),
    "gather": (repr, lambda c: c.gather(0, 0)),
    "runs": (repr, lambda c: c.gather_runs(1, 1)),
    "page table": (repr, lambda c: c.page_table([0, 1], 0)),
    "check": (repr, lambda c: c.check()),
}
"""What is done before, and the call that is interrupted."""


def view(cache: PagedKVCache) -> object:
    """Everything that a caller can observe."""
    live = [seq for seq in range(10) if _live(cache, seq)]
    lens = {seq: [cache.seq_len(seq, layer) for layer in (0, 1)] for seq in live}
    arrays = {seq: [a.tobytes() for layer in (0, 1) for a in cache.gather(seq, layer)] for seq in live}
    return cache.stats(), lens, {seq: cache.block_table(seq).tolist() for seq in live}, arrays


def _live(cache: PagedKVCache, seq: int) -> bool:
    try:
        cache.seq_len(seq)
    except KeyError:
        return False
    return True


class Injected:
    """Raises at the line event of a given number within the caches' own files, and says where that was."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.left, self.error = at, error
        self.where: list[tuple[str, int]] = []  # the frames of ours, the innermost last

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                inner: FrameType | None = frame
                while inner is not None and inner.f_code.co_filename in FILES:
                    self.where.insert(0, (inner.f_code.co_name, inner.f_lineno))
                    inner = inner.f_back
                raise self.error("injected")
        return self

    def run(self, call: Callable[[], object]) -> bool:
        """Whether the error came out of the call."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            with np.errstate():  # an error on the way out of a `with` leaves what that one has set
                call()
        except self.error:
            return True
        finally:
            sys.settrace(before)
        return False


def injections(prepare: Act, act: Act, error: type[BaseException]) -> Iterator[tuple[PagedKVCache, Injected]]:
    """The cache after an error at each line of the call in turn, and where it came."""
    for at in range(1, 10_000):
        cache = busy()
        prepare(cache)
        injected = Injected(at, error)
        if not injected.run(lambda cache=cache: act(cache)):  # type: ignore[misc]
            assert at > 3
            return
        yield cache, injected


def test_the_windows_are_those_listed() -> None:
    assert {name: texts for name, (_, texts) in windows().items()} == WINDOWS


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("name", CALLS)
def test_an_error_at_any_line_but_in_a_window_changes_nothing(name: str, error: type[BaseException]) -> None:
    """The first statement of a window is still before any change, and so is one behind an `if`."""
    prepare, act = CALLS[name]
    before = busy()
    prepare(before)
    expected, within = view(before), {}
    for method, (lines, texts) in windows().items():
        within[method] = lines[2 if texts[0].startswith("if ") else 1 :]
    strict = 0
    for cache, injected in injections(prepare, act, error):
        if any(line in within.get(method, ()) for method, line in injected.where):
            continue
        strict += 1
        assert view(cache) == expected, injected.where
        cache.check()
        act(cache)  # and it works the next time
        cache.check()
    assert strict > 3


def test_that_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `fork` counts before it plans the child, an interrupt leaves the counts too high."""

    def fork(self: PagedKVCache, parent: int, child: int) -> None:
        for block in self._seqs[parent].table:
            self._refs[block] += 1
        self._seqs[child] = self._seqs[parent]

    monkeypatch.setattr(PagedKVCache, "fork", fork)
    monkeypatch.setattr(f"{__name__}.FILES", FILES | {__file__})
    with pytest.raises(AssertionError):
        test_an_error_at_any_line_but_in_a_window_changes_nothing("fork", KeyboardInterrupt)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_close_can_be_called_again_after_an_interrupt(error: type[BaseException]) -> None:
    for cache, _ in injections(repr, lambda c: c.close(), error):
        cache.close()
        assert vars(cache).keys() == {
            "num_blocks",
            "block_size",
            "n_layers",
            "n_kv_heads",
            "d_head",
            "_closed",
        }


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_constructor_that_fails_leaves_something_that_can_be_shown_and_dropped(
    error: type[BaseException],
) -> None:
    for at in range(1, 10_000):
        cache = PagedKVCache.__new__(PagedKVCache)
        if not Injected(at, error).run(lambda cache=cache: cache.__init__(4, 2, 1, 1, 1)):  # type: ignore[misc]
            break
        assert repr(cache) == "<PagedKVCache: closed>"
        cache.close()
    assert at > 10
