"""`tinyllm replay`: which line breaks which law."""

import os
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tinyllm.cli.app import app

ROOT = Path(__file__).parents[2]
WITNESS = "# in place\nnew 2 2 1 1 1\nadd 0\n\nappend 0 0 1\nfork 0 1\nappend 0 0 1\n"


def replay(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    assert not isinstance(result.exception, (Exception,)) or isinstance(result.exception, SystemExit), (
        result.exception
    )
    return result.exit_code, result.output


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "x.trace"
    path.write_text(WITNESS, encoding="utf-8")
    return path


def test_the_reference_passes(trace: Path) -> None:
    assert replay(trace) == (0, "every law holds after each of 5 lines: tinyllm.infer.paged\n")


def test_a_broken_law_is_told_with_its_line(trace: Path, tmp_path: Path) -> None:
    source = (ROOT / "tinyllm" / "infer" / "paged.py").read_text(encoding="utf-8")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(source.replace("if refs[block] > 1]", "if refs[block] > 9]"), encoding="utf-8")
    code, output = replay(trace, wrong)
    assert code == 1
    assert f"line 7 of {trace} breaks law 8: append 0 0 1" in output.replace("\n", " ").replace("  ", " ")
    assert "block 0 of sequence 0 not shared with block 0 of sequence 1" in output


@pytest.mark.parametrize(
    ("text", "impl", "words"),
    [
        ("jump 0", "tinyllm.infer.paged", "line 1: 'jump' is no operation"),
        ("new 4 2 1 1 1\nadd 0\nadd 0", "tinyllm.infer.paged", "line 3: 'add 0' expects success"),
        (
            "new 4 2 2 1 1\nadd 0\nappend 0 1 1",
            "examples/cells.py:CellCache",
            "line 3: the implementation does not",
        ),
        ("new 4 2 1 1 1", "nothing.here", "there is no module 'nothing.here'"),
    ],
)
def test_what_cannot_be_run_says_why(
    text: str, impl: str, words: str, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    trace.write_text(text, encoding="utf-8")
    code, output = replay(trace, impl)
    assert code == 2
    assert words in " ".join(output.split())


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    code, output = replay(tmp_path / "none.trace")
    assert (code, "cannot be read: No such file" in " ".join(output.split())) == (2, True)


MINE = "from tinyllm.infer.paged import PagedKVCache as Right\nclass PagedKVCache(Right):\n"
NO_ROOM = (
    f"{MINE}    def __init__(self, *sizes):\n"
    "        if sizes[0] == 100_000: raise MemoryError('no room')\n"
    "        super().__init__(*sizes)\n"
)
NEVER = {
    "a pipe": ("pipe", "there is no line to run, and so nothing to check"),
    "a device": ("/dev/zero", "cannot be read: it has more than 67,108,864 bytes"),
    "no device": ("/dev/null", "there is no line to run, and so nothing to check"),
    "a folder": (".", "cannot be read: Is a directory"),
    "a link to nowhere": ("gone", "cannot be read: No such file or directory"),
    "comments": ("comments", "there is no line to run, and so nothing to check"),
    "too much at once": ("much", "line 3: 'append 0 0 4000000000 ! OutOfBlocks' hands over too much at once"),
    "a pool too large": ("pool", "line 1: 'new 100000 1024 8 8 128' needs more memory than this machine has"),
}


@pytest.mark.parametrize("command", ["replay", "show"])
@pytest.mark.parametrize("name", NEVER)
def test_what_cannot_be_run_ends_at_once(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("gone").symlink_to("nowhere")
    Path("comments").write_text("# nothing\n\n")
    Path("much").write_text("new 4 2 1 1 1\nadd 0\nappend 0 0 4000000000 ! OutOfBlocks\n")
    Path("pool").write_text("new 100000 1024 8 8 128\nadd 0\n")
    Path("mine.py").write_text(NO_ROOM)
    file, said = NEVER[name]
    done = CliRunner().invoke(app, [command, file, "mine.py"])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize("command", ["replay", "show"])
def test_a_pipe_that_somebody_writes_is_read(command: str) -> None:
    """As a shell's `<(...)` is: however late its writer is."""
    ours, theirs = os.pipe()

    def write() -> None:
        os.write(theirs, WITNESS.encode())
        os.close(theirs)

    writer = threading.Thread(target=write)
    writer.start()
    done = CliRunner().invoke(app, [command, f"/dev/fd/{ours}"])
    writer.join()
    os.close(ours)
    assert done.exit_code == 0, done.output
    assert "every law holds after each of 5 lines" in done.output


def test_capabilities_that_are_none_are_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{MINE}    capabilities = None\n")
    (tmp_path / "x.trace").write_text(WITNESS)
    for command in ("replay", "show"):
        done = CliRunner().invoke(app, [command, str(tmp_path / "x.trace"), str(tmp_path / "mine.py")])
        assert done.exit_code == 2
        assert "capabilities is None (NoneType); it must be a set of names" in " ".join(done.stderr.split())
