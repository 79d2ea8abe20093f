"""A broken law is told on one screen, in the words of the golden files, and its program really runs."""

import functools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.check import check_cache
from tinyllm.testing.contract import Factory
from tinyllm.testing.laws import LAWS, LawBroken
from tinyllm.testing.run import replay

Named = Callable[[str], Factory]
Breaks = Callable[[Callable[[], object]], LawBroken]
RunStory = Callable[[str], subprocess.CompletedProcess[str]]

HERE = Path(__file__).parent
GOLDEN = {"s07": "a shared block written in place", "s08": "a leak", "s10": "a wrong length"}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_story_is_the_golden_text(name: str, named: Named, breaks: Breaks) -> None:
    factory = named(name)
    told, _, also = str(breaks(lambda: check_cache(factory))).rpartition("\n\n")
    golden = (HERE / f"story-{name}.txt").read_text(encoding="utf-8")
    assert re.sub(r"load\('.*/", "load('FOLDER/", told) + "\n" == golden
    assert also.startswith("The catalogue fails as well: test_")  # the rest is pytest's, where it runs this
    assert len(golden.splitlines()) < 40  # a screen
    assert max(map(len, golden.splitlines())) <= 110


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "name", ["s07", "s10", "wrong_caches:LiveTable", "wrong_manners:Panics", "wrong_caches:FlushesSubnormals"]
)
def test_the_program_of_a_story_runs_where_it_is_pasted(
    name: str, named: Named, breaks: Breaks, run_story: RunStory
) -> None:
    broken = breaks(lambda: check_cache(named(name)))
    done = run_story(str(broken))
    assert done.returncode == 1
    last = done.stderr[done.stderr.index("tinyllm.testing.laws.LawBroken: ") :]
    assert last.startswith(f"tinyllm.testing.laws.LawBroken: law {broken.law}, {LAWS[broken.law][0]}: ")
    assert broken.expected in last
    assert broken.found in last


def test_the_program_of_an_installed_class_is_an_import(
    breaks: Breaks, run_story: RunStory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tinyllm.testing.adapters.loading._loaded", []
    )  # nobody has named it on a command line
    monkeypatch.setattr(PagedKVCache, "append", None)
    broken = breaks(lambda: replay(PagedKVCache, "new 1 1 1 1 1\nadd 0\nappend 0 0 1\n"))
    assert "\n  from tinyllm.infer.paged import PagedKVCache\n" in str(broken)
    done = run_story(str(broken))  # the real class: nothing is wrong with it
    assert (done.returncode, done.stderr) == (0, "")


class _Nine(PagedKVCache):
    """Its lengths are wrong once a sequence is called 9."""

    def seq_len(self, seq_id: int, layer: int = 0) -> int:
        return super().seq_len(seq_id, layer) + 5 * (seq_id == 9)


def make(*sizes: int) -> PagedKVCache:
    return _Nine(*sizes)


nameless = functools.partial(make)


def test_a_factory_without_a_name_of_its_own_is_called_factory(breaks: Breaks) -> None:
    story = str(breaks(lambda: replay(nameless, "new 1 1 1 1 1\nadd 9\n")))
    assert "\n  factory = ...  # the cache under test\n" in story
    assert "\n  replay(factory, " in story


def test_a_class_that_cannot_be_imported_keeps_its_name(breaks: Breaks) -> None:
    class Local(PagedKVCache):
        def seq_len(self, *_: Any, **__: Any) -> int:
            return 7

    story = str(breaks(lambda: replay(Local, "new 1 1 1 1 1\nadd 0\n")))
    assert "\n  Local = ...  # the cache under test\n" in story
    assert "\n  replay(Local, " in story


def test_tables_are_drawn_with_lengths_marks_and_wide_ids(breaks: Breaks) -> None:
    lines = ["new 120 2 2 1 1", "add 0", "append 0 0 202", "add 1", "append 1 1 5", "fork 1 2"]
    lines += ["append 1 0 2", "add 9"]
    story = str(breaks(lambda: replay(nameless, "\n".join(lines))))
    drawn = story[story.index("The block tables") :].splitlines()[2:]
    assert drawn == [
        "  sequence 0   b0   b1   b2   b3   b4   b5   b6   b7   ... 93 more",
        "    layer 0    [##] [##] [##] [##] [##] [##] [##] [##] 202 long",
        "    layer 1    [..] [..] [..] [..] [..] [..] [..] [..] 0 long",
        "  sequence 1   b104  b102* b103*",
        "    layer 0    [##]  [..]  [..]  2 long",
        "    layer 1    [##]  [##]  [#.]  5 long",
        "  sequence 2   b101  b102* b103*",
        "    layer 0    [..]  [..]  [..]  0 long",
        "    layer 1    [##]  [##]  [#.]  5 long",
        "  sequence 9",
        "    layer 0    5 long",
        "    layer 1    5 long",
        "  15 of 120 blocks free",
    ]


@pytest.mark.parametrize("pairs", [19, 20, 30])
def test_a_long_program_shows_its_end_and_says_where_the_rest_is(pairs: int, breaks: Breaks) -> None:
    lines = ["new 2 1 1 1 1", *["add 1", "free 1"] * pairs, "add 9"]
    broken = breaks(lambda: replay(nameless, "\n".join(lines)))
    assert broken.trace.splitlines() == lines
    shown = [line.strip() for line in str(broken).split('"""')[1].splitlines()[1:-1]]
    if len(lines) <= 40:
        assert shown == lines
    else:
        assert shown == [f"# ... {len(lines) - 40} lines, all of them in .trace", *lines[-40:]]


def test_a_broken_law_without_a_program_is_one_line() -> None:
    broken = LawBroken(14, "garbage collection", "this", "that")
    assert str(broken) == "law 14 (close): expected this; found that"
    assert isinstance(broken, AssertionError)
    assert (broken.law, broken.name, broken.trace) == (14, "garbage collection", "")
