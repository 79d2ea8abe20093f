"""`tinyllm show`: a trace line by line, on a terminal and in a pipe, and as a picture."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tinyllm.cli.app import app
from tinyllm.cli.drawing import BLOCKS, drawn
from tinyllm.render import EXAMPLE, frames, svg

ROOT = Path(__file__).parents[2]
Invoke = Callable[..., Any]
COPY = """\
  9 append 1 0 1
    b2 is copied first
    [b0 ## 2x s0 s1] [b1 ## 2x s0 s1] [b2 #. s0] [b3 ## s1 copy of b2]
    s0  b0 b1 b2  5 long
    s1  b0 b1 b3  6 long
    cost 1 (1 copied); 0 of 4 blocks free
"""
REFUSED = """\
 11 append 0 0 1
    refused: OutOfBlocks
    [b0 ## 2x s0 s1] [b1 ## 2x s0 s1] [b2 ## s0] [b3 ## s1]
    s0  b0 b1 b2  6 long
    s1  b0 b1 b3  6 long
    cost 0; 0 of 4 blocks free

 12 free 0
    [b0 ## s1] [b1 ## s1] [b2 freed] [b3 ## s1]
    s1  b0 b1 b3  6 long
    cost 0, 1 freed; 1 of 4 blocks free
"""
HOSTILE = f"""\
new 4096 16 40 1 1 # {"a comment that does not end " * 50}\x1b[31m\x07
add {2**63}
append {2**63} 0 700
append {2**63} 1 650
append {2**63} 3 17
fork {2**63} {10**100}
append {10**100} 39 5000
append -1 0 1 as rank2 ! KeyError
{"".join(f"add {seq}{chr(10)}" for seq in range(12))}close
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "x.trace"
    path.write_text(EXAMPLE, encoding="utf-8")
    return path


def test_the_example_in_a_pipe(invoke: Invoke) -> None:
    done = invoke("show", "--example")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert COPY in done.stdout
    assert REFUSED in done.stdout
    assert done.stdout.endswith("every law holds after each of 14 lines\n")
    assert not re.search(r"[ \t]\n", done.stdout)


def test_a_file_and_stdin_show_the_same(invoke: Invoke, trace: Path) -> None:
    example = invoke("show", "--example").stdout
    assert invoke("show", trace).stdout == example
    assert CliRunner().invoke(app, ["show", "-"], input=EXAMPLE).stdout == example


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_the_example_on_a_terminal(on_terminal: Callable[..., tuple[int, str]]) -> None:
    """In colour; without the colours it is what a pipe gets, where there is as much room."""
    code, shown = on_terminal("show", "--example", columns=110)
    assert code == 0
    assert "\x1b[33m[b0 ## 2x s0 s1" in shown
    assert "\x1b[1;7;36mcopy of b2" in shown
    assert COPY in plain(shown)
    assert REFUSED in plain(shown)


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("text", [EXAMPLE, HOSTILE], ids=["example", "hostile"])
def test_no_line_is_wider_than_the_screen(text: str, columns: int) -> None:
    for frame in frames(text):
        lines = list(drawn(frame, columns))
        assert max(line.cell_len for line in lines) <= columns
        assert len(lines) <= BLOCKS + 25
        for line in lines:
            assert line.plain.isprintable()
            assert line.plain.count("[b") == line.plain.count("]"), "a block is on one line"


@pytest.mark.parametrize(
    "columns", [40, *(pytest.param(width, marks=pytest.mark.long) for width in (80, 120))]
)
def test_a_terminal_of_this_width(
    on_terminal: Callable[..., tuple[int, str]], tmp_path: Path, columns: int
) -> None:
    (tmp_path / "x.trace").write_text(HOSTILE, encoding="utf-8")
    code, shown = on_terminal("show", "x.trace", columns=columns)
    assert code == 0
    assert max(map(len, plain(shown).split("\n"))) <= columns
    assert "refused: KeyError" in plain(shown)
    assert "\x07" not in shown
    assert "\x1b[31ma" not in shown


def test_a_large_pool_is_drawn_in_part(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "x.trace").write_text(HOSTILE, encoding="utf-8")
    shown = invoke("show", "x.trace").stdout
    for text in (
        "and 4,072 more blocks, 20 of them held",
        "cost 313 (269 new, 44 copied); 3,739 of 4,096 blocks free",
        "0 in each of 40 layers",
        "layers 0: 700, 1: 650, 2: 0, 3: 17, 4-39: 0",
        "and 6 more sequences",
        "    no cache\n",
    ):
        assert text in shown


def test_the_picture(invoke: Invoke, trace: Path, tmp_path: Path) -> None:
    done = invoke("show", trace, "--svg", "x.svg")
    assert done.exit_code == 0
    assert COPY in done.stdout
    assert "x.svg has 14 lines drawn\n" in done.stdout
    assert (tmp_path / "x.svg").read_text(encoding="utf-8") == svg(frames(EXAMPLE), title="x.trace")
    assert invoke("show", "--example", "--svg", "y.svg").exit_code == 0
    assert (tmp_path / "y.svg").read_bytes() == (ROOT / "docs" / "example.svg").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"x.trace", "x.svg", "y.svg"}  # nothing aside
    long = "new 4 2 1 1 1\n" + "stats\n" * 40
    done = CliRunner().invoke(app, ["show", "-", "--svg", "z.svg"], input=long)
    assert "z.svg has 23 of 41 lines drawn\n" in done.stdout
    assert "<title>stdin</title>" in (tmp_path / "z.svg").read_text(encoding="utf-8")


def test_a_picture_that_cannot_be_written(invoke: Invoke) -> None:
    for path, why in (("none/x.svg", "its folder is not there"), (".", "it is a folder")):
        done = invoke("show", "--example", "--svg", path)
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"{path} cannot be written: {why}" in done.stderr


def test_a_broken_law_is_shown_to_its_line(
    invoke: Invoke, trace: Path, reference: str, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(reference.replace("if refs[block] > 1]", "if refs[block] > 9]"), encoding="utf-8")
    for arguments, name in (((trace, wrong), str(trace)), (("--example", wrong), "the example")):
        done = invoke("show", *arguments, "--svg", "x.svg")
        assert done.exit_code == 1
        assert "  9 append 1 0 1\n    b2 is copied first\n    law 8 breaks here\n" in done.stdout
        assert f"\nline 9 of {name} breaks law 8: append 1 0 1\n" in done.stdout
        assert "block 2 of sequence 0 not shared with block 2 of sequence 1" in done.stdout
        assert "in place: the last holder" not in done.stdout
        assert "law 8 breaks here" in (tmp_path / "x.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("jump 0", "x.trace", "x.trace: line 1: 'jump' is no operation"),
        ("new 4 2 1 1 1\nadd 0\nadd 0", "x.trace", "x.trace: line 3: 'add 0' expects success"),
        ("new 4 2 1 1 1", "x.trace nothing.here", "there is no module 'nothing.here'"),
        ("new 4 2 1 1 1", f"x.trace {ROOT}/examples/cells.py:CellCache", "does not offer block-tables"),
        ("", "none.trace", "none.trace cannot be read: No such file or directory"),
        ("", ".", ". cannot be read: Is a directory"),
        ("", "", "nothing to show: give a FILE.trace, - for stdin, or --example"),
        ("", "--example x.trace paged.py", "--example replaces FILE.trace"),
        ("", "- --step", "--step waits for Enter on stdin"),
        ("", "x.trace --nope", "No such option: --nope"),
    ],
)
def test_what_cannot_be_shown_says_why(
    invoke: Invoke, tmp_path: Path, text: str, arguments: str, said: str
) -> None:
    (tmp_path / "x.trace").write_text(text, encoding="utf-8")
    done = invoke("show", *arguments.split())
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


def test_a_file_that_is_no_text(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "x.trace").write_bytes(b"\xff\xfe")
    done = invoke("show", "x.trace")
    assert done.exit_code == 2
    assert "x.trace cannot be read: " in done.stderr


def test_a_long_message_is_cut(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "x.trace").write_text("jump \x1b[31m" + "0" * 9999, encoding="utf-8")
    said = invoke("show", "x.trace").stderr
    assert "\x1b" not in said
    assert len(said) < 500


def test_help(invoke: Invoke) -> None:
    shown = invoke("show", "--help").stdout
    for name in ("--example", "--step", "--svg", "--exec", "FILE.trace", "IMPL"):
        assert name in shown


def test_an_engine_behind_a_pipe(invoke: Invoke, trace: Path) -> None:
    engine = ROOT / "tests" / "testing" / "pipe_engine.py"
    done = invoke("show", trace, "--exec", f"{sys.executable} {engine}")
    assert COPY in done.stdout, done.stderr


def stepping(command: str) -> tuple[subprocess.Popen[bytes], int]:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [command, "show", "--example", "--step"],
        env={**os.environ, "TERM": "xterm-256color"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    os.close(terminal)
    return process, controller


def until(controller: int, wanted: str) -> str:
    shown = ""
    while wanted not in shown:
        shown += plain(os.read(controller, 65536).decode())
    return shown


def test_step_waits_for_enter_and_leaves_at_ctrl_c(command: str) -> None:
    process, controller = stepping(command)
    shown = until(controller, "Enter: the next line")
    assert "1 new 4 2 1 1 2" in shown
    assert "2 add 0" not in shown
    os.write(controller, b"\n")
    shown = until(controller, "Enter: the next line")
    assert "2 add 0" in shown
    assert "3 append" not in shown
    for _ in range(6):  # one that comes between the prompt and the wait is seen at the next one
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
            break
    assert process.returncode == 130
    rest = os.read(controller, 65536).decode()
    os.close(controller)
    assert rest.strip() == ""  # neither a traceback nor a word


def test_step_asks_between_the_lines_alone(command: str) -> None:
    process, controller = stepping(command)
    os.write(controller, b"\n" * 13)
    shown = until(controller, "every law holds")
    assert process.wait(timeout=60) == 0
    os.close(controller)
    assert shown.count("Enter: the next line") == 13


def test_step_where_nobody_is_asked(invoke: Invoke, command: str) -> None:
    done = subprocess.run(
        [command, "show", "--example", "--step"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == invoke("show", "--example").stdout
