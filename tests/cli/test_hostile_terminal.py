"""Streams as one finds them: few characters, few columns, nobody at the other end, full, or closed."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyllm.cli import streams
from tinyllm.cli.screen import terminal

PASS, WEAK, USAGE, UNREAD = 0, 1, 2, 141
SUITE = (
    "import numpy as np\nfrom tinyllm.infer.paged import PagedKVCache\n\n"
    "def test_it():\n    cache = PagedKVCache(4, 2, 1, 1, 1)\n    cache.add_seq(0)\n"
    "    one = np.ones((1, 1, 1))\n    cache.append(0, 0, one, one)\n"
    "    assert cache.gather(0, 0)[0].shape == one.shape\n"
)
COMMANDS = {
    # a command: its exit code
    "laws 8": PASS,
    "bugs": PASS,
    "show --example": PASS,
    "show no.trace": USAGE,
    "replay x.trace paged.py": WEAK,
    "check paged.py": WEAK,
    "grade test_it.py --bug s02": PASS,
    "power --trials 1 --bug s01": PASS,
    "model path": PASS,
    "generate --model no.gguf x": USAGE,
    "diff paged.py": PASS,
    "--help": PASS,
}
FEW = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
Run = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the commands find what they name."""
    (tmp_path / "test_it.py").write_text(SUITE, encoding="utf-8")
    (tmp_path / "paged.py").write_text("class PagedKVCache:\n    '''A caché. ✓'''\n", encoding="utf-8")
    (tmp_path / "x.trace").write_text("new 4 2 1 1 1\nadd 0\nappend 0 0 1\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def run(command: str, folder: Path, environment: Callable[..., dict[str, str]]) -> Run:
    """Runs a command line, by default with its output in pipes."""

    def one(
        line: str, *, env: dict[str, str] | None = None, **how: Any
    ) -> subprocess.CompletedProcess[bytes]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.run(
            [command, *line.split()],
            cwd=folder,
            env=environment(**env or {}),
            timeout=300,
            check=False,
            **{**pipes, **how},
        )

    return one


def untimed(text: str) -> str:
    return re.sub(r"\d+\.\d\d", "0.00", text)


SLOW = ["check paged.py", "soak --for 1s"]
LOOKED_AT = ["check paged.py", "power --trials 1 --bug s01", "diff paged.py"]


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=() if line in {"bugs", "--help"} else pytest.mark.long) for line in COMMANDS],
)
def test_an_encoding_with_few_characters(run: Run, line: str) -> None:
    done = run(line, env=FEW)
    assert done.returncode == COMMANDS[line]
    assert b"Traceback" not in done.stdout + done.stderr
    assert (done.stdout + done.stderr).isascii()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", [line for line in COMMANDS if line != "--help"])  # which has other boxes
def test_only_what_is_lacking_is_replaced(here: Run, line: str) -> None:
    streams.prepare()
    usual, few = here(*line.split()), here(*line.split(), encoding="ascii")
    assert few.returncode == usual.returncode == COMMANDS[line]
    assert usual.stdout.isascii() is (line not in LOOKED_AT)
    for told, expected in ((few.stdout, usual.stdout), (few.stderr, usual.stderr)):
        plain = expected.decode("utf-8").encode("ascii", streams.HANDLER)
        assert untimed(told.decode()) == untimed(plain.decode())


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16"])
def test_other_encodings(here: Run, encoding: str) -> None:
    done = here("diff", "paged.py", encoding=encoding)
    assert done.returncode == PASS
    assert "A caché. ✓".replace("✓", "✓" if encoding == "utf-16" else "+") in done.stdout.decode(encoding)


def test_what_stands_for_what() -> None:
    streams.prepare()
    shown = "✓ ✗ █ ⠋ \u2026 \u201cé\u201d \u6f22 \udcff \U0001f600".encode("ascii", streams.HANDLER)
    assert shown == b'+ x # * ... "e" ? ? ?'
    with pytest.raises(UnicodeDecodeError):
        b"\xff".decode("ascii", streams.HANDLER)


def test_a_name_that_is_not_utf8(run: Run, folder: Path) -> None:
    """It comes as half a character, which no encoding has, and is shown as its number."""
    name = b"paged\xff.py"
    (folder / os.fsdecode(name)).write_bytes((folder / "paged.py").read_bytes())
    done = run("check " + os.fsdecode(name) + " --json out.json --junit out.xml")
    assert done.returncode == WEAK
    assert b"Is the cache right?  paged\\udcff.py\n" in done.stdout
    assert b"paged\\udcff.py" in (folder / "out.json").read_bytes()


@pytest.mark.parametrize(
    "line",
    ["laws", "model path", "--help", *(pytest.param(line, marks=pytest.mark.long) for line in SLOW)],
)
def test_nobody_reads_on(run: Run, line: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run(line, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (UNREAD, b"")


@pytest.mark.parametrize(
    "line",
    ["laws", "model path", "--help", pytest.param("check paged.py", marks=pytest.mark.long)],
)
def test_the_output_is_full(run: Run, line: str) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = run(line, stdout=full)
        assert done.returncode == USAGE
        assert done.stderr == b"tinyllm: the output cannot be written: No space left on device\n"
        if line == "laws":
            assert run(line, stdout=full, stderr=full).returncode == USAGE


@pytest.mark.parametrize(
    "line", ["laws 8", pytest.param("grade test_it.py --bug s02", marks=pytest.mark.long)]
)
def test_streams_are_closed(run: Run, folder: Path, line: str) -> None:
    """Whichever are: what is opened next would get their numbers."""
    several = [["<&-"], [">&-"], ["2>&-"], ["<&-", ">&-", "2>&-"]]
    for closed in several if line == "laws 8" else several[3:]:
        command, *arguments = run("--version").args[:1] + line.split()
        script = f'exec "$0" "$@" {" ".join(closed)}'
        done = subprocess.run(
            ["/bin/sh", "-c", script, command, *arguments],
            cwd=folder,
            capture_output=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == COMMANDS[line]
        assert done.stderr == b""
        assert bool(done.stdout) is (">&-" not in closed)
    assert sorted(path.name for path in folder.iterdir()) == ["paged.py", "test_it.py", "x.trace"]


@pytest.mark.usefixtures("folder")
def test_a_narrow_grade_loses_no_word(here: Run) -> None:
    """Narrower than a table; a word that is broken is read together."""
    line = "grade test_it.py --bug s02 --bug s06 --reveal"
    done = here(*line.split(), env={"COLUMNS": "1"})
    assert done.returncode == WEAK
    text = "".join(done.stdout.decode().split())
    for word in ("s02", "killedby:test_it", "wholeblocksaregathered", "examples:1", "SURVIVES", "50%"):
        assert word in text
    assert "…" not in text


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", ["check paged.py", "bugs"])
def test_other_narrow_screens(here: Run, line: str) -> None:
    wide, narrow = (here(*line.split(), env={"COLUMNS": str(number)}) for number in (150, 20))
    assert narrow.returncode == wide.returncode == COMMANDS[line]
    assert "…" not in narrow.stdout.decode()
    together = "".join(narrow.stdout.decode().split())
    assert {word for word in re.findall(r"[a-z_]{4,}", wide.stdout.decode()) if word not in together} == set()


def test_a_table_as_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table  # noqa: PLC0415

    table = Table("id", "", "title", box=None)
    table.add_row("[bold]a[/bold]\nb", "first", "one\ntwo")
    table.add_row("c", "", "")
    monkeypatch.setenv("COLUMNS", "59")
    terminal().print(table)
    assert capsys.readouterr().out == "a  b\n  first\n  title: one, two\nc\n"
    monkeypatch.setenv("COLUMNS", "60")
    terminal().print(table)
    assert capsys.readouterr().out.split("\n")[0].split() == ["id", "title"]


@pytest.mark.parametrize("line", ["grade test_it.py --bug s02", "start"])
def test_the_folder_is_gone(run: Run, folder: Path, line: str) -> None:
    gone = folder / "gone"
    gone.mkdir()
    arguments = [folder / word if (folder / word).exists() else word for word in line.split()]
    command = run("--version").args[0]
    done = subprocess.run(
        ["/bin/sh", "-c", 'rmdir "$PWD" && exec "$0" "$@"', command, *map(str, arguments)],
        cwd=gone,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == USAGE
    if line == "start":
        assert done.stderr == "tinyllm: paged.py cannot be written: No such file or directory\n"
    else:
        assert done.stderr == "tinyllm: the current folder is gone, or cannot be entered\n"
