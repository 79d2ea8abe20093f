"""Options that would be passed over, or overwrite each other, are refused before anything is done."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tinyllm.cli.app import app
from tinyllm.cli.clashes import CLASHES, REPORTS, Exact

Invoke = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A suite, bugs, and links."""
    for name in ("test_a.py", "bugs.toml", "x.trace", "paged.py", "plain"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    (tmp_path / "link").symlink_to("plain")
    (tmp_path / "link.json").symlink_to("test_a.py")
    os.link(tmp_path / "plain", tmp_path / "hard")
    (tmp_path / "sub").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("grade . --html x --json x", "--html x and --json x are one file: name two"),
        ("grade . --matrix x --junit sub/../x", "--matrix x and --junit sub/../x are one file"),
        ("grade . --json plain --html link", "--json plain and --html link are one file"),
        ("grade . --json hard --html link", "--json hard and --html link are one file"),
        ("grade . --junit x --badge x", "--junit x and --badge x are one file"),
        ("check --json x --html x", "--json x and --html x are one file"),
        ("grade plain --json plain", "--json plain would overwrite plain, which is read"),
        ("grade plain::test_a --json hard", "--json hard would overwrite plain, which is read"),
        ("grade . --bugs plain --module m --json link", "--json link would overwrite plain, which is read"),
        ("check --tests plain --json plain", "--json plain would overwrite plain, which is read"),
        ("show plain --svg plain", "--svg plain would overwrite plain, which is read"),
        ("soak plain --json plain", "--json plain would overwrite plain, which is read"),
        ("grade . --json test_a.py", "--json test_a.py: it writes .json, and this name ends in .py"),
        ("grade . --json link.json", "--json link.json: it writes .json, and this name ends in .py"),
        ("grade . --html paged.py", "--html paged.py: it writes .html, and this name ends in .py"),
        ("grade . --badge b.svg", "--badge b.svg: it writes .json, and this name ends in .svg"),
        ("grade . --html x.JSON", "--html x.JSON: it writes .html, and this name ends in .json"),
        ("grade . --json x.htm", "--json x.htm: it writes .json, and this name ends in .htm"),
        ("power --json x.toml", "--json x.toml: it writes .json, and this name ends in .toml"),
        ("grade . --bugs bugs.toml --module m --set all", "--bugs and --set say which bugs to plant"),
        ("grade . --bugs bugs.toml --module m --set course", "--bugs and --set say which bugs to plant"),
        ("grade . --bug s01 --set wild", "there is no bug s01 in --set wild; expected one of w01, "),
        ("power --bug w01 --set course", "there is no bug w01 in --set course; expected one of s01, "),
        ("show x.trace paged.py --exec engine", "paged.py and --exec say which cache to show"),
        ("show paged.py --example --exec engine", "--example and paged.py and --exec take FILE.trace"),
        ("replay x.trace tinyllm.infer.paged --exec engine", "tinyllm.infer.paged and --exec say which"),
        ("generate x --cache contiguous --block-size 4", "--block-size is for --cache paged"),
        ("generate x --cache contiguous --block-size 16", "--block-size is for --cache paged"),
        ("generate x --top-p 0.5", "--top-p is for random draws, and --temperature 0 draws nothing"),
        ("generate x --beams 2 --seed 3", "--seed is for random draws, and --temperature 0 draws nothing"),
        ("generate x -n 2 --temperature 0 --seed 3", "--seed is for random draws"),
        ("generate --prompt-ids 1 --chat", "--chat and --prompt-ids do not go together"),
    ],
)
def test_refused(invoke: Invoke, folder: Path, arguments: str, said: str) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    done = invoke(*shlex.split(arguments))
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.output
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("grade none --json /dev/null --html /dev/null", "no tests at none"),
        ("grade none --json x --html y.html --matrix z.txt --badge b.json --junit j.xml", "no tests at none"),
        ("grade none --html x.htm --bug s01 --bug s01 --set all", "no tests at none"),
        ("grade none --set wild --bug w01", "no tests at none"),
        ("generate x -n 2 --seed 3 --top-p 0.5 --model plain", "plain"),
        ("generate x --temperature 1 --seed 3 --model plain", "plain"),
        ("generate x --cache paged --block-size 4 --model plain", "plain"),
    ],
)
def test_not_refused(invoke: Invoke, arguments: str, said: str) -> None:
    """They come as far as to what is not there."""
    done = invoke(*shlex.split(arguments))
    assert done.exit_code == 2
    assert said in done.stderr
    assert "name two" not in done.stderr


def test_the_tables_know_what_there_is() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for name, clashes in CLASHES.items():
        assert isinstance(commands[name], Exact)
        there = {one.name for one in commands[name].params}
        assert all(there >= set(clash.names) for clash in clashes)
    written = {
        one.name
        for command in commands.values()
        for one in command.params
        if (getattr(one, "help", "") or "").startswith(("Write", "Draw it", "Run all"))
    }
    assert written == REPORTS.keys(), "each report is looked at"


@pytest.mark.parametrize("files", [[], ["conftest.py", "helper.py"]])
def test_a_folder_without_a_test_file(invoke: Callable[..., Any], tmp_path: Path, files: list[str]) -> None:
    (tmp_path / "suite").mkdir()
    for name in files:
        (tmp_path / "suite" / name).touch()
    done = invoke("grade", "suite", "--bug", "s01")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "tinyllm: there is no test file in suite\n"


def test_a_file_without_a_test(invoke: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "test_a.py").touch()
    done = invoke("grade", "suite", "--bug", "s01")
    assert done.exit_code == 1
    assert "there is no test to grade" in done.stdout
