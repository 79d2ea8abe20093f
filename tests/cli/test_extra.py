"""Without the extra `check` the cache works, and the command says what is missing."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BLOCK = """
import sys

class Blocker:
    missing = {missing}
    def find_spec(self, name, path=None, target=None):
        if {{name, name.partition(".")[0]}} & self.missing:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs code in a Python, and in all that it starts, where some modules are missing."""

    def call(missing: set[str], code: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "sitecustomize.py").write_text(BLOCK.format(missing=missing or "set()"), encoding="utf-8")
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "TINYLLM_CACHE": ""},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return call


EACH = """
import contextlib, io, json, sys
from tinyllm.cli import main
said = []
for missing, arguments in CASES:
    sys.meta_path[0].missing = {missing}
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code
    said.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(said))
"""


def test_the_command_names_the_extra(run: Run, tmp_path: Path) -> None:
    """Each in its turn: what is missing is not imported, and so is missing again."""
    cases = [
        ("typer", ["--help"]),
        ("rich", ["--help"]),
        ("hypothesis", ["check"]),
        ("pytest", ["check"]),
        ("hypothesis", ["grade", "."]),
        ("pytest", ["grade", "."]),
        ("jinja2", ["start", "folder"]),
        ("platformdirs", ["model", "path"]),
        ("platformdirs", ["model", "fetch"]),
        ("gguf", ["model", "info", "--model", "tiny.gguf"]),
    ]
    tiny = struct.pack("<4sIQQQ", b"GGUF", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 1, 0, 0) + bytes(64)
    (tmp_path / "tiny.gguf").write_bytes(tiny)  # one tensor, t
    done = run(set(), EACH.replace("CASES", repr(cases)))
    assert (done.returncode, done.stderr) == (0, "")
    for (missing, arguments), told in zip(cases, json.loads(done.stdout), strict=True):
        extra = "model" if arguments[0] == "model" else "check"
        line = f"tinyllm: {missing} is missing; it is in the extra `{extra}`: see Getting it in README.md\n"
        assert told == [2, "", line], (missing, arguments)


def test_what_works_without_works(run: Run) -> None:
    done = run({"hypothesis", "pytest", "jinja2"}, "from tinyllm.cli import main\nmain(['bugs', 's06'])")
    assert (done.returncode, done.stderr) == (0, "")


def test_another_module_that_is_missing_is_a_mistake_of_ours(run: Run) -> None:
    """And no reason to install anything."""
    done = run({"tinyllm.grading"}, "from tinyllm.cli import main\nmain(['bugs'])")
    assert "Traceback" in done.stderr
    assert "it is in the extra" not in done.stderr


def test_the_cache_needs_numpy_alone(run: Run) -> None:
    missing = {"typer", "rich", "hypothesis", "pytest", "jinja2", "xdist"}
    done = run(missing, "import tinyllm.infer, tinyllm\nprint(tinyllm.PagedKVCache(1, 1, 1, 1, 1))")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "<PagedKVCache: 1 of 1 blocks free, 0 sequences>\n"
