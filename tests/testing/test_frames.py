"""The film of a trace: the facts of each frame, and the words for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.infer.paged import PagedKVCache
from tinyllm.render import EXAMPLE, Frame, Held, frames, labels, roll
from tinyllm.testing.adapters.loading import load
from tinyllm.testing.contract import CAPABILITIES, Factory
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.trace import NotOffered, TraceError

ROOT = Path(__file__).parents[2]
TRACES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "golden").glob("*.trace")}


def only(text: str, number: int) -> Frame:
    (frame,) = [frame for frame in frames(text) if frame.number == number]
    return frame


def watched(text: str, factory: Factory) -> tuple[list[Frame], int]:
    """The frames until a law breaks, and its number."""
    film: list[Frame] = []
    try:
        film.extend(roll(text, factory))
    except LawBroken as broken:
        return film, broken.law
    return film, 0


def test_the_worked_example_by_hand() -> None:
    """Section 3: when a block is taken, how long the table is, what is free of four."""
    film = frames(EXAMPLE)
    assert [frame.number for frame in film] == list(range(1, 15))
    shown = [
        (len(frame.sequences[0].table), frame.sequences[0].lens, frame.taken, frame.free)
        for frame in film[1:7]
    ]
    assert shown == [
        (0, (0,), 0, 4),
        (1, (1,), 1, 3),
        (1, (2,), 0, 3),
        (2, (3,), 1, 2),
        (2, (4,), 0, 2),
        (3, (5,), 1, 1),
    ]
    b0, b1, b2 = film[6].sequences[0].table
    assert [film[6].blocks[b] for b in (b0, b1, b2)] == [((0,), 2, None, False)] * 2 + [((0,), 1, None, True)]
    fork, write = film[7], film[8]
    assert (fork.taken, fork.copied, fork.free) == (0, 0, 1)
    assert fork.sequences == {seq: Held((b0, b1, b2), (5,)) for seq in (0, 1)}
    assert {block.holders for block in fork.blocks.values()} == {(0, 1)}
    assert (write.taken, write.copied, write.free) == (0, 1, 0)
    (copy,) = [number for number, block in write.blocks.items() if block.copy_of is not None]
    assert write.sequences == {0: Held((b0, b1, b2), (5,)), 1: Held((b0, b1, copy), (6,))}
    assert write.blocks[copy] == ((1,), 2, b2, False)
    assert write.blocks[b2] == ((0,), 1, None, False)
    assert write.blocks[b0] == ((0, 1), 2, None, False)
    assert (write.line, write.note) == ("append 1 0 1", "b2 is copied first")


def test_what_follows_the_example() -> None:
    """The last holder writes in place; a refusal changes nothing; free gives back what nobody else holds."""
    film = frames(EXAMPLE)
    assert (film[9].taken, film[9].copied) == (0, 0)
    refused = film[10]
    assert refused.error == "OutOfBlocks"
    assert refused.line == "append 0 0 1"
    assert (refused.blocks, refused.sequences) == (film[9].blocks, film[9].sequences)
    assert not refused.freed
    (freed,) = film[11].freed
    assert freed == film[10].sequences[0].table[2]
    assert len(film[13].freed) == 4
    assert film[13].free == 4


def test_one_append_can_copy_several_blocks() -> None:
    text = "new 12 2 3 1 1\nadd 0\nappend 0 0 7\nfork 0 1\nappend 1 1 4\n"
    parent, child = only(text, 4).sequences[0].table, only(text, 5).sequences[1].table
    blocks = only(text, 5).blocks
    assert [blocks[block].copy_of for block in child] == [*parent[:2], None, None]
    assert only(text, 5).copied == 2


def test_filled_is_the_longest_layer_of_any_holder() -> None:
    frame = only("new 4 4 2 1 1\nadd 0\nappend 0 0 6\nappend 0 1 1\nfork 0 1\ntruncate 1 5", 6)
    assert [block.filled for block in frame.blocks.values()] == [4, 2]
    assert frame.sequences[1].lens == (5, 1)


@pytest.mark.parametrize("name", [name for name in TRACES if not name[0].isdigit()])
def test_the_cost_is_what_free_falls_by(name: str) -> None:
    """Law 9, on every golden trace; and a refused line has no cost."""
    before = None
    for frame in frames(TRACES[name]):
        if before and before.open and frame.open and not frame.line.startswith("new"):
            assert before.free - frame.free == frame.taken + frame.copied - len(frame.freed)
        if frame.error and before:
            assert (frame.sequences, frame.open) == (before.sequences, before.open)
            assert frame.blocks.keys() == before.blocks.keys()
            assert frame.taken + frame.copied + len(frame.freed) == 0
        before = frame


def test_before_new_and_after_close_there_is_no_cache() -> None:
    film = frames(
        "new 0 1 1 1 1 ! ValueError\nnew 2 1 1 1 1\nadd 0\nappend 0 0 1\nnew 0 1 1 1 1 ! ValueError\n"
        "close\nadd 0 ! ValueError\nnew 3 1 1 1 1"
    )
    assert [frame.open for frame in film] == [False, True, True, True, True, False, False, True]
    assert [len(frame.freed) for frame in film] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert film[4].taken == 0
    assert len(film[4].blocks) == 1
    assert film[7].config.num_blocks == 3


def test_a_second_new_takes_nothing_from_the_first() -> None:
    film = frames("new 4 2 1 1 1\nadd 0\nappend 0 0 3\nnew 4 2 1 1 1\nadd 0\nappend 0 0 1")
    assert [(frame.taken, len(frame.freed)) for frame in film[2:]] == [(2, 0), (0, 0), (0, 0), (1, 0)]


def test_a_fork_that_copies_at_once() -> None:
    class Eager(PagedKVCache):
        capabilities = frozenset(CAPABILITIES) - {"lazy-copy"}

        def fork(self, parent: int, child: int) -> None:
            super().fork(parent, child)
            one, length = np.ones((1, 1, 1)), self.seq_len(child)
            self.append(child, 0, one, one)
            self.truncate(child, length)

    film = frames("new 4 2 1 1 1\nadd 0\nappend 0 0 3\nfork 0 1", Eager)
    assert film[3].copied == 1
    assert film[3].blocks[film[3].sequences[1].table[1]].copy_of == film[3].sequences[0].table[1]


def test_layers_that_grow_together_are_seen_after_the_last_of_them() -> None:
    class Together(PagedKVCache):
        capabilities = frozenset(CAPABILITIES) - {"independent-layers"}

    film = frames("new 4 2 2 1 1\nadd 0\nappend 0 0 1\nappend 0 1 1", Together)
    assert [frame.taken for frame in film] == [0, 0, 0, 1]
    assert film[3].sequences[0].lens == (1, 1)


def test_a_broken_law_has_a_frame(named: Callable[[str], Factory]) -> None:
    film, law = watched(EXAMPLE, named("s07"))
    assert law == 8
    assert [frame.law for frame in film] == [0] * 8 + [8]
    assert film[8].sequences[0].table == film[8].sequences[1].table


def test_a_line_that_should_have_been_refused_has_no_error(named: Callable[[str], Factory]) -> None:
    film, law = watched("new 4 2 1 1 1\nadd 0\nappend 0 0 0 ! ValueError", named("s13"))
    assert (law, film[-1].law, film[-1].error) == (15, 15, "")


def test_a_table_that_turns_into_another_is_no_copy() -> None:
    class Confused(PagedKVCache):
        def block_table(self, seq_id: int) -> np.ndarray[Any, np.dtype[np.int32]]:
            return super().block_table(0 if self.seq_len(seq_id) == 2 else seq_id)

    film, law = watched("new 4 2 1 1 1\nadd 0\nappend 0 0 1\nadd 1\nappend 1 0 1\nappend 1 0 1", Confused)
    assert law
    assert film[-1].sequences[1].table == film[-1].sequences[0].table
    assert (film[-1].copied, film[-1].taken) == (0, 0)


def test_what_goes_beyond_the_ten_methods_is_held_too() -> None:
    class Dear(PagedKVCache):
        def blocks_needed(self, seq_id: int, layer: int, tokens: int) -> int:
            return super().blocks_needed(seq_id, layer, tokens) + 1

    film, law = watched(EXAMPLE, Dear)
    assert (len(film), film[-1].law, law) == (14, 0, 16)


def test_a_cache_that_cannot_be_made_has_a_frame() -> None:
    def factory(*_: int) -> PagedKVCache:
        raise RuntimeError("no")

    film, law = watched("new 4 2 1 1 1", factory)
    assert law == 15
    assert [(frame.law, frame.open) for frame in film] == [(15, False)]


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("new 4 2 1 1 1\njump 0", TraceError, "line 2: 'jump' is no operation"),
        ("new 4 2 1 1 1\n\nadd 0\nadd 0", TraceError, "line 4: 'add 0' expects success"),
        ("add 0", TraceError, "line 1: 'add 0' comes before 'new'"),
    ],
)
def test_a_trace_that_cannot_be_run(text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        frames(text)


def test_what_an_implementation_does_not_offer() -> None:
    with pytest.raises(NotOffered, match="does not offer block-tables"):
        frames(EXAMPLE, load(f"{ROOT}/examples/cells.py:CellCache"))


def test_the_sequence_that_a_line_names_is_drawn() -> None:
    frame = only("new 4 2 1 1 1\n" + "".join(f"add {seq}\n" for seq in range(9)), 10)
    assert labels.sequences(frame, 4) == [0, 1, 2, 8]


def test_the_blocks_that_a_line_changed_are_drawn() -> None:
    text = "new 99 1 1 1 1\nadd 0\nappend 0 0 50\nadd 1\nappend 1 0 1\nfree 1\nfree 0"
    assert [labels.chosen(frame, 4) for frame in frames(text)[1:]] == [
        [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 50], [0, 1, 2, 50], [0, 1, 2, 3],
    ]  # fmt: skip


@given(st.text(), st.integers(4, 60), st.integers(1, 4))
def test_texts_are_cut_to_their_room(text: str, most: int, rows: int) -> None:
    cut = labels.short(text, most)
    assert labels.width(cut) <= most
    assert cut.isprintable()
    lines = labels.folded(text, most, rows)
    assert len(lines) <= rows
    assert all(labels.width(line) <= most and line.strip() == line for line in lines)


@pytest.mark.parametrize(
    ("lens", "said"),
    [
        ((5,), "5 long"),
        ((5, 4, 3), "lens 5 4 3"),
        ((5,) * 40, "5 in each of 40 layers"),
        ((5,) * 39 + (1234,), "layers 0-38: 5, 39: 1,234"),
        (tuple(range(40)), "0 to 39 in 40 layers"),
    ],
)
def test_lengths(lens: tuple[int, ...], said: str) -> None:
    assert labels.lengths(lens, 40) == said


def test_words_that_do_not_fit_are_counted() -> None:
    assert labels.listed(["b0", "b1", "b2"], 3, 20) == "b0 b1 b2"
    assert labels.listed(["b0", "b1", "b2"], 2, 20) == "b0 b1 +1"
    assert labels.listed(["b0", "b1", "b2"], 3, 6) == "b0 +2"
    assert labels.listed(["b0", "b1", "b2"], 3, 3) == "3 of them"
    assert labels.listed([], 3, 3) == ""
