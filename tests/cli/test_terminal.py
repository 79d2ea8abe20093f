"""On a terminal there are colours and progress; in a pipe there is text alone."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ESCAPE = "\x1b"
OnTerminal = Callable[..., tuple[int, str]]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Kills s02, and leaves s06 alive."""
    (tmp_path / "test_it.py").write_text(
        "import numpy as np\nfrom tinyllm.infer.paged import PagedKVCache\n\n"
        "def test_a_whole_block_is_gathered_only_when_it_is_full():\n"
        "    cache = PagedKVCache(4, 2, 1, 1, 1)\n    cache.add_seq(0)\n    one = np.ones((1, 1, 1))\n"
        "    cache.append(0, 0, one, one)\n    assert cache.gather(0, 0)[0].shape == one.shape\n",
        encoding="utf-8",
    )
    return tmp_path / "test_it.py"


def plain(text: str) -> str:
    """What is read: without colours, and without what the cursor went back over."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_grade_on_a_terminal(on_terminal: OnTerminal, suite: Path) -> None:
    code, shown = on_terminal("grade", suite, "--bug", "s02", "--bug", "s06")
    assert code == 1
    assert f"{ESCAPE}[1;31mFAIL{ESCAPE}[0m" in shown
    assert "clean runs" in shown  # the progress, which goes
    last = plain(shown)
    assert "1 of 2 planted bugs killed: 50%" in last
    assert "s06 is required, and survives" in last
    assert shown.count(f"{ESCAPE}[?25l") == shown.count(f"{ESCAPE}[?25h"), "the cursor is shown again"


def test_the_same_in_a_pipe(invoke: Callable[..., Any], suite: Path) -> None:
    done = invoke("grade", suite, "--bug", "s02", "--bug", "s06")
    assert (done.exit_code, done.stderr) == (1, "")
    assert ESCAPE not in done.stdout
    assert "clean runs" not in done.stdout
    assert "FAIL  1 of 2 planted bugs killed: 50%  (1 tests, seed 0)" in done.stdout
    assert "s06 SURVIVES  a user would see: " in done.stdout
    for word in ("without taking references", "refs[block] for block"):
        assert word not in done.stdout, "what it does is to be found out"


def test_what_a_survivor_does_is_revealed_if_asked(invoke: Callable[..., Any], suite: Path) -> None:
    done = invoke("grade", suite, "--bug", "s06", "--reveal")
    assert "what the code does wrong: a fork copies the table without taking references" in done.stdout
    assert "\n+        new_refs = zip(table, [refs[block] for block in table])\n" in done.stdout


def test_no_colour_where_none_is_wanted(on_terminal: OnTerminal) -> None:
    _, shown = on_terminal("bugs", "s06", NO_COLOR="1")
    assert ESCAPE in shown
    colours = re.findall(r"\x1b\[([0-9;]*)m", shown)
    assert {number for one in colours for number in one.split(";")} <= {"", "0", "1", "2", "3"}  # bold, dim
    _, shown = on_terminal("bugs", "s06", TERM="dumb")
    assert ESCAPE not in shown


@pytest.mark.parametrize("arguments", [["bugs"], ["tests"], ["bugs", "s06"], ["--help"]], ids=" ".join)
def test_a_terminal_of_this_width(
    on_terminal: OnTerminal, here: Callable[..., Any], arguments: list[str]
) -> None:
    """Nothing is cut off that a person needs: identifiers are there, whole or folded."""
    code, shown = on_terminal(*arguments, columns=40)
    narrow = [here(*arguments, env={"COLUMNS": str(columns)}) for columns in (20, 80, 200)]
    assert [code, *(done.returncode for done in narrow)] == [0] * 4
    for text in (shown, *(done.stdout.decode() for done in narrow)):
        together = re.sub(r"\s", "", plain(text))
        if arguments == ["tests"]:
            assert "test_gather_preserves_head_token_dimension_order" in together
        if arguments == ["bugs", "s06"]:
            assert "test_random_ops_conserve_blocks" in together
        assert "Traceback" not in text


@pytest.mark.long
def test_a_narrow_terminal_shows_a_grade(on_terminal: OnTerminal, suite: Path) -> None:
    code, shown = on_terminal("grade", suite, "--bug", "s02", columns=40)
    assert code == 0
    assert "1 of 1 planted bugs killed" in " ".join(plain(shown).split())


def test_check_on_a_terminal(on_terminal: OnTerminal, tmp_path: Path) -> None:
    (tmp_path / "paged.py").write_text("class PagedKVCache:\n    pass\n", encoding="utf-8")
    code, shown = on_terminal("check", "paged.py")
    assert code == 1
    assert "Is the cache right?" in plain(shown)
    assert shown.count(f"{ESCAPE}[?25l") == shown.count(f"{ESCAPE}[?25h")
