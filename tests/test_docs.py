"""What README.md and the site say is so: every block is run, and what is shown is what comes out."""

import ast
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from hypothesis import settings
from typer.testing import CliRunner

from tinyllm.cli.app import app
from tinyllm.infer.paged import PagedKVCache
from tinyllm.llm.llama import TOY, LlamaConfig, toy
from tinyllm.testing.directed import DIRECTED
from tinyllm.testing.profiles import profile

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = (ROOT / "tinyllm" / "infer" / "paged.py").read_text(encoding="utf-8")

NOT_RUN = {
    "python3 -c 'import sys; sys.version_info": "the next line belongs to it; tests/test_readme.py runs it",
    "python3 -m venv ": "it installs; .ci/run runs this very line",
    "python -m pip ": "it installs",
    ". .venv/bin/activate": "there is no .venv where this runs",
    "tox": "it runs this",
    "rustc ": "it needs a Rust compiler; tests/testing/test_subprocess_cache.py uses it",
    "pytest --pyargs tinyllm.testing --cache-impl=paged.py": "README.md has it, with another path",
    "dask ": "it starts servers; tests/grading/test_cluster_processes.py does",
    "mutmut run": "it takes minutes; tests/grading/test_mutmut.py",
}
"""How commands begin that are not run here, and why."""

ONLY_READ = {
    "tinyllm model fetch": "it needs the network",
    "tinyllm generate ": "it needs the model; tests/model and tests/cli",
    "tinyllm batch ": "it needs the model; tests/model and tests/cli",
    "tinyllm grade path/to/tests --set ": "it is run without the option",
    "tinyllm grade path/to/tests --trials ": "it is run without the option",
    "tinyllm grade path/to/tests --bug ": "it is run without the option",
    "tinyllm grade path/to/tests --badge ": "it is run without the option; tests/cli/test_ci_reports.py",
    "tinyllm soak ": "it takes as long as it is told; tests/cli/test_soak.py",
    "tinyllm reach ": "it needs reports; tests/cli/test_reach.py",
    "tinyllm grade tests --set all --executor ": "it needs a cluster; tests/grading/test_cluster.py",
    "tinyllm check --exec ": "it needs the Rust engine; tests/testing/test_subprocess_cache.py",
    "tinyllm replay tests/golden/": "it needs the Rust engine; tests/testing/test_subprocess_cache.py",
}
"""How commands begin of which only the arguments are read, which must all be known, and why."""

SHORTER = {
    "pytest --pyargs tinyllm.testing ": "-q -k hand_example",
    "tinyllm grade path/to/tests": "--bug s06",
    "tinyllm check paged.py": "--profile dev",
}
"""How commands begin that would take long, and what is added to them."""

ONE = "from PACKAGE import PagedKVCache\n\ndef test():\n    PagedKVCache(1, 1, 1, 1, 1)\n"
STUB = "class PagedKVCache:\n    def __init__(self, *sizes):\n        raise NotImplementedError\n"
USUAL = {
    "paged.py": STUB,
    "x.trace": "new 1 1 1 1 1\nadd 0\n",
    "myengine/__init__.py": "",
    "myengine/cache.py": STUB.replace("PagedKVCache", "Cache"),
    "path/to/paged.py": REFERENCE,
    "path/to/tests/test_it.py": ONE.replace("PACKAGE", "tinyllm.infer.paged"),
    "pkg/__init__.py": "",
    "pkg/mod.py": "class Stack:\n    def __init__(self):\n        self.items = [1, 2]\n\n"
    "    def pop(self):\n        return self.items.pop()\n",
    "tests/test_mod.py": "from pkg.mod import Stack\n\ndef test():\n    stack = Stack()\n"
    "    assert stack.pop() != stack.pop()\n",
}
"""What lies in the folder where the commands of a page are run."""
ELSEWHERE = ("PYTEST_", "CI", "COLUMNS", "GITHUB_", "FORCE_COLOR")
"""How variables begin that the commands are not to see."""
FEW = (
    "from hypothesis import settings\n"
    "settings.register_profile('few', max_examples=6)\n"
    "settings.load_profile('few')\n"
)
"""For the tutorial's property: examples enough to kill what it kills."""
LEARNER = {"README.md": ("paged.py", "tests/test_mod.py"), "tutorial.md": tuple(USUAL)}
"""What of it is left out, where `tinyllm start` writes it or the page does."""


class Block(NamedTuple):
    """A block of a page; `follows` if there is nothing between it and the block before."""

    language: str
    title: str
    text: str
    follows: bool = False


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fence = re.compile(r'^```(\w*)(?: title="(.*?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
    found, end = [], 0
    for one in fence.finditer(text):
        found.append(Block(one[1], one[2] or "", one[3], follows=not text[end : one.start()].strip()))
        end = one.end()
    return found


def script(path: Path) -> ModuleType:
    """A file that is in no package, as a module."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


files = script(ROOT / "tests" / "llm" / "conftest.py")
write, words = files.write, files.words


@pytest.fixture
def model(write: Callable[..., Path], words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy is what `find()` finds."""
    config = LlamaConfig(**{**vars(TOY), "vocab": len(words["tokenizer.ggml.tokens"])})
    weights = toy(1, config).weights
    path = write(words, {"token_embd.weight": weights.embedding, "output.weight": weights.head})
    monkeypatch.setattr("tinyllm.llm.model.find", lambda: path)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a page's commands are run."""
    page: Path = request.getfixturevalue("page")
    for name, text in {**USUAL, "tests/conftest.py": FEW}.items():
        if name not in LEARNER.get(page.name, ()):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(ELSEWHERE[1:]):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_is_run(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brief = settings(profile("dev"), max_examples=3)  # what takes long is run by tests/testing
    for module in ("check", "profiles"):
        monkeypatch.setattr(f"tinyllm.testing.{module}.profile", lambda _: brief)
    monkeypatch.setattr("tinyllm.testing.check.DIRECTED", dict(list(DIRECTED.items())[:3]))
    for block in blocks(page):
        if name := file_of(block):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(block.text, encoding="utf-8")
    namespace: dict[str, Any] = {"MyCache": PagedKVCache, "__name__": page.stem}
    for block, following in pairwise([*blocks(page), Block("", "", "")]):
        if block.language in {"", "text"} and not block.title:
            continue  # a picture, or what the block before printed
        printed = run(block, folder, namespace)
        shown = following.follows and following.language in {"", "text"} and not following.title
        if shown and printed is not None:
            same(following.text, printed)


def file_of(block: Block) -> str:
    """The file that a block is: its title, or its name in a comment on its first line."""
    named = re.match(r".*# ([\w/]+\.toml)\n", block.text)
    return "" if block.title.startswith("paged.py") else block.title or (named[1] if named else "")


def run(block: Block, folder: Path, namespace: dict[str, Any]) -> str | None:
    """Run a block, put it into paged.py, or see that it can be read; what it printed."""
    if block.title.startswith("paged.py"):
        path = folder / "paged.py"
        put = on_top if block.title.endswith(", on top") else into_class
        path.write_text(put(path.read_text(encoding="utf-8"), block.text), encoding="utf-8")
    if block.language == "sh":
        if all(line.startswith(tuple(NOT_RUN)) for line in block.text.splitlines()):
            return None
        return "".join(shell(line, folder) for line in block.text.splitlines() if line)
    if block.language == "python" and not block.title:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block.text, "a block", "exec"), namespace)
        return out.getvalue()
    if block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "yaml":
        read_yaml(block)
    else:
        assert block.language in {"python", "text"}, f"nothing is known of {block.language}"
    return None


def shell(line: str, folder: Path) -> str:
    """Run one line as it stands, or what the lists above say; its output."""
    if any(line.startswith(start) for start in NOT_RUN):
        return ""
    if any(line.startswith(start) for start in ONLY_READ):
        read_command(line)
        return ""
    command = line.partition("  #")[0]
    command += "".join(f" {more}" for start, more in SHORTER.items() if line.startswith(start))
    if re.fullmatch(r"tinyllm [^|<>;&$]*", command):
        return ours(command, folder)
    env = {name: value for name, value in os.environ.items() if not name.startswith(ELSEWHERE)}
    env["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), env["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in {0, 1}, f"{command}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def ours(line: str, folder: Path) -> str:
    """Run a command of ours, here; what it imports from the folder is forgotten."""
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    for name, module in list(sys.modules.items()):
        if str(folder) in str(getattr(module, "__file__", "") or ""):
            del sys.modules[name]
    assert done.exit_code in {0, 1}, f"{line}\n{done.output}"
    assert done.exception is None or isinstance(done.exception, SystemExit), f"{line}\n{done.output}"
    return done.stdout


def read_command(line: str) -> None:
    """See that a command of ours, its arguments and its options are there."""
    name, *arguments = shlex.split(line, comments=True)
    assert name == "tinyllm", line
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    command.make_context(line, arguments)


def read_yaml(block: Block) -> None:
    """See that a configuration is valid, and that it names what is there."""
    found = yaml.safe_load(block.text)
    if block.title == ".pre-commit-config.yaml":
        hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
        known = {hook["id"]: hook["entry"] for hook in hooks}
        for hook in found["repos"][0]["hooks"]:
            read_command(shlex.join([*shlex.split(known[hook["id"]]), *hook["args"]]))
        subprocess.run([sys.executable, "-m", "pre_commit", "validate-config", block.title], check=True)
        return
    if block.title == ".gitlab-ci.yml":
        validate("vendor.gitlab-ci", found)
        for line in found["cache"]["script"][1:]:
            read_command(line)
        return
    if isinstance(found, list):  # steps of a job
        found = {"on": "push", "jobs": {"cache": {"runs-on": "ubuntu-latest", "steps": found}}}
    elif True in found:  # `on`, as YAML reads it
        found["on"] = found.pop(True)
    validate("vendor.github-workflows", found)
    inputs = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"]
    step = found["jobs"]["cache"]["steps"][-1]
    assert step["with"].keys() <= inputs.keys()
    read_command(
        f"tinyllm {step['with']['what']} {step['with'].get('arguments', '')} {step['with']['target']}"
    )


def validate(schema: str, found: object) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, "-"]
    subprocess.run(command, input=json.dumps(found), text=True, check=True, timeout=60)


def on_top(source: str, text: str) -> str:
    return source.replace("class OutOfBlocks", f"{text}\n\nclass OutOfBlocks", 1)


def into_class(source: str, text: str) -> str:
    """Put methods into the class, in the place of those of the same names."""
    for method in ast.parse(text).body:
        assert isinstance(method, ast.FunctionDef)
        lines = source.splitlines()
        (owner,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == "PagedKVCache")
        assert isinstance(owner, ast.ClassDef)
        old = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == method.name]
        start, end = (old[0].lineno - 1, old[0].end_lineno) if old else (owner.end_lineno, owner.end_lineno)
        new = textwrap.indent(ast.get_source_segment(text, method) or "", "    ").splitlines()
        lines[start:end] = new if old else ["", *new]
        source = "\n".join(lines) + "\n"
    return source


def same(shown: str, printed: str) -> None:
    """See that it was printed so; a line `…` stands for any lines, and how long a thing took may differ."""
    pattern = "".join("(?:.*\n)*" if line == "…" else f"{re.escape(line)}\n" for line in plain(shown))
    text = "".join(f"{line}\n" for line in plain(printed))
    assert re.fullmatch(pattern, text), f"shown:\n{shown}\nprinted:\n{printed}"


def plain(text: str) -> Iterator[str]:
    for line in text.rstrip().splitlines():
        steady = re.sub(r"[\d,]+", "N", line) if "every law holds over" in line else line
        yield re.sub(r"\s+\d+\.\d\d\s+\d+$", "", steady.rstrip())
