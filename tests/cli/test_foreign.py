"""What others wrote is text: it gives a terminal no orders, and GitHub Actions no commands."""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyllm.cli import streams

ORDERS = "\x1b]0;title\x07 \x1b[2J"
FORGED = f"{ORDERS}\n  ::warning::forged\r::error::too ##[group]three"
SHOWN = r"\x1b]0;title\x07 \x1b[2J"
BUG = f"""
[[bug]]
id = "b1"
title = {json.dumps(FORGED)}
symptom = {json.dumps(FORGED)}
[[bug.edits]]
find = "return 1"
replace = "return 2  # ##[group]four"
"""
CACHE = f"class PagedKVCache:\n    def __init__(self, *sizes): raise RuntimeError({FORGED!r})\n"
ENGINE = f"import sys\nsys.stderr.write({FORGED!r})\nprint('nonsense' + {ORDERS!r})\n"
IDS = (
    f"import mod, pytest\n\n@pytest.mark.parametrize('a', [1], ids=[{ORDERS!r}])\n"
    "def test_it(a): assert mod.f() == 2, '\\n::error::by pytest'\n"
)
COMMANDS = {
    "grade --bugs bugs.toml --module mod weak.py": SHOWN,
    "grade --bugs bugs.toml --module mod red.py": "no verdict",
    "check paged.py": SHOWN,
    "check --exec 'python engine.py'": SHOWN,
    "replay x.trace": SHOWN,
    "show x.trace": "is no operation",
    f"replay {ORDERS}": SHOWN,
    f"bugs {ORDERS}": SHOWN,
    "diff paged.py": "the reference",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files that mean to do harm."""
    texts = {
        "bugs.toml": BUG,
        "mod.py": "def f():\n    return 1\n",
        "weak.py": "import mod\n\ndef test_it(): mod.f()\n",
        "red.py": IDS,
        "paged.py": CACHE,
        "engine.py": ENGINE,
        "x.trace": f"new 4 2 1 1 1\n{ORDERS}\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def arguments(line: str) -> list[str]:
    """The words; what stands in quotes is one."""
    name, *words = re.findall(r"'([^']*)'|(\x1b.*)|(\S+)", line)
    return ["".join(one).replace("python ", f"{sys.executable} ") for one in (name, *words)]


@pytest.mark.usefixtures("folder")
def test_no_orders_on_a_terminal(on_terminal: Callable[..., tuple[int, str]]) -> None:
    """Without colours, so that every escape is one of theirs."""
    line = next(iter(COMMANDS))
    _, shown = on_terminal(*arguments(line), columns=500, TERM="dumb", GITHUB_ACTIONS="true")
    harmless_to_all(line, shown)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", COMMANDS)
def test_no_orders_and_no_commands(here: Callable[..., Any], line: str) -> None:
    done = here(*arguments(line), env={"COLUMNS": "500", "GITHUB_ACTIONS": "true"})
    harmless_to_all(line, (done.stdout + done.stderr).decode())


def harmless_to_all(line: str, shown: str) -> None:
    assert COMMANDS[line] in shown
    assert not re.search("[\x1b\x07]", shown)
    begun = [one for one in re.split("[\n\r]", shown) if one.lstrip().startswith("::")]
    assert all(re.match("::error (file=[a-z.]+,(line=[0-9]+,)?)?title=", one) for one in begun), "ours"
    assert all("##[" not in one for one in re.split("[\n\r]", shown) if one not in begun)


def harmless(*texts: str) -> str:
    raw = io.BytesIO()
    streams.prepare()
    stream = streams.Harmless(io.TextIOWrapper(raw, "utf-8", newline="\n"))
    for text in texts:
        assert stream.write(text) == len(text)
    stream.flush()
    return raw.getvalue().decode()


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("::error::x\n", ":\\u003aerror::x\n"),
        ("a\n\n \t\x0b\u2003::error::x", "a\n\n \t\x0b\u2003:\\u003aerror::x"),
        ("a\r::error::x", "a\r:\\u003aerror::x"),
        ("a ##[error]x ##[group]", "a ##\\u005berror]x ##\\u005bgroup]"),
        (":::", ":\\u003a:"),
        ("a ::error::x: b[::2] # [c] #[d]\n", "a ::error::x: b[::2] # [c] #[d]\n"),
        ("\n:a\n: :\n", "\n:a\n: :\n"),
    ],
)
def test_what_would_begin_a_command(text: str, written: str) -> None:
    """As the runner reads it: after blanks at the start of a line, or in the old form anywhere."""
    assert harmless(text) == written
    assert harmless(*text) == written, "a character at a time, as a model speaks"


def test_json_stays_what_it_was() -> None:
    said: dict[str, Any] = {"text": "##[group]\n::error::"}
    assert json.loads(harmless(json.dumps(said))) == said


def test_a_command_of_ours() -> None:
    raw = io.BytesIO()
    stream = streams.Harmless(io.TextIOWrapper(raw, "utf-8"))
    stream.command("::error::x")
    stream.write("::error::y")
    stream.flush()
    assert raw.getvalue() == b"::error::x\n:\\u003aerror::y"
