"""`tinyllm start` writes files that are good Python, and overwrites none."""

import ast
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyllm.testing.contract import Config, PagedCache

Invoke = Callable[..., Any]
WRITTEN = {"paged.py", "pyproject.toml", "tests/test_paged.py"}


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_it_writes_here_or_into_a_new_folder(invoke: Invoke, tmp_path: Path) -> None:
    assert invoke("start").exit_code == 0
    assert files(tmp_path) == WRITTEN
    done = invoke("start", "a/b")
    assert done.exit_code == 0
    assert files(tmp_path / "a" / "b") == WRITTEN


def test_it_overwrites_nothing(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "paged.py").write_text("mine", encoding="utf-8")
    assert invoke("start").exit_code == 0
    assert (tmp_path / "paged.py").read_text(encoding="utf-8") == "mine"
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    done = invoke("start")
    assert done.exit_code == 2
    assert "all files exist already" in done.stderr
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


@pytest.mark.parametrize("folder", ["file", "file/more"])
def test_where_nothing_can_be_written(invoke: Invoke, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    done = invoke("start", folder)
    assert done.exit_code == 2
    assert "cannot be written: " in done.stderr
    assert "Traceback" not in done.output


def test_what_it_writes_is_clean_python(invoke: Invoke, tmp_path: Path) -> None:
    invoke("start")
    ruff = str(Path(sysconfig.get_path("scripts"), "ruff"))
    for command in (["check"], ["format", "--check"]):
        subprocess.run([ruff, *command, "--no-cache", "."], cwd=tmp_path, check=True, timeout=60)


def test_the_stub_has_the_methods_of_the_contract(invoke: Invoke, tmp_path: Path) -> None:
    invoke("start")
    tree = ast.parse((tmp_path / "paged.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert classes.keys() == {"OutOfBlocks", "PagedKVCache"}
    methods = {node.name: node for node in classes["PagedKVCache"].body if isinstance(node, ast.FunctionDef)}
    assert [arg.arg for arg in methods["__init__"].args.args] == ["self", *Config._fields]
    promised = {name for name in vars(PagedCache) if not name.startswith("_")}
    assert promised <= methods.keys()
    for name in promised:
        docstring = ast.get_docstring(methods[name])
        assert docstring
        assert docstring.split() == (getattr(PagedCache, name).__doc__ or "").split()


def test_check_says_what_to_write_first(invoke: Invoke) -> None:
    invoke("start")
    done = invoke("check", "paged.py")
    assert done.exit_code == 1
    assert "Next: write __init__." in done.stdout
