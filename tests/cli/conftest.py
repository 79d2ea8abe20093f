"""The command in a process of its own (`tinyllm`), on a terminal (`on_terminal`), here (`invoke`, `here`)."""

import fcntl
import io
import os
import pty
import signal
import struct
import subprocess
import sys
import sysconfig
import termios
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tinyllm.cli import ENDING, main
from tinyllm.cli.app import app
from tinyllm.grading import bugs
from tinyllm.llm.llama import TOY, LlamaConfig, toy

REFERENCE = Path(__file__).parents[2] / "tinyllm" / "infer" / "paged.py"


@pytest.fixture(scope="session")
def command() -> str:
    """The path of the installed `tinyllm`."""
    return str(Path(sysconfig.get_path("scripts"), "tinyllm"))


def plain_environment(**more: str) -> dict[str, str]:
    """The environment without what pytest, CI or the terminal put there."""
    ours = ("PYTEST_", "CI", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TERM", "GITHUB_ACTIONS")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | more


@pytest.fixture
def environment() -> Callable[..., dict[str, str]]:
    """The environment without what pytest, CI or the terminal put there, and with more."""
    return plain_environment


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told to the GitHub Actions that may run these tests."""
    for name in ("GITHUB_ACTIONS", "GITHUB_WORKSPACE", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tinyllm(command: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `tinyllm`, its output in pipes, in the test's own folder."""

    def run(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command, *map(str, arguments)],
            cwd=tmp_path,
            env=plain_environment(**env),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture
def on_terminal(command: str, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs `tinyllm` on a terminal so many columns wide: its exit code, and all that it wrote there."""

    def run(*arguments: object, columns: int = 80, **env: str) -> tuple[int, str]:
        controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        process = subprocess.Popen(
            [command, *map(str, arguments)],
            cwd=tmp_path,
            env=plain_environment(**{"TERM": "xterm-256color", **env}),
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        shown = b""
        while True:
            try:
                more = os.read(controller, 65536)
            except OSError:  # nobody is at the other end any more
                break
            shown += more
        os.close(controller)
        return process.wait(timeout=300), shown.decode().replace("\r\n", "\n")

    return run


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `tinyllm` in this process, in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Runs `tinyllm` in this process, as the installed command does, with streams of an encoding."""

    def run(
        *arguments: object, encoding: str = "utf-8", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        raw = [io.BytesIO(), io.BytesIO()]
        before = {number: signal.getsignal(number) for number in ENDING}
        with monkeypatch.context() as patched:
            patched.chdir(tmp_path)
            for name in set(os.environ) - set(plain_environment()):
                patched.delenv(name)
            for name, value in (env or {}).items():
                patched.setenv(name, value)
            for name, file in zip(("stdout", "stderr"), raw):
                patched.setattr(sys, name, io.TextIOWrapper(file, encoding, write_through=True, newline="\n"))
            code: Any = None
            try:
                main([str(argument) for argument in arguments])
            except SystemExit as ended:
                code = ended.code
            finally:
                sys.stderr.flush()
                for number, handler in before.items():
                    signal.signal(number, handler)
            out, err = (file.getvalue() for file in raw)
        return subprocess.CompletedProcess(["tinyllm", *map(str, arguments)], code, out, err)

    return run


@pytest.fixture
def few_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The course is four bugs, and the one that must survive."""
    few = [bug for bug in bugs.load_set("course") if bug.id in {"s02", "s06", "s07", "s08", "order"}]
    monkeypatch.setattr(bugs, "load_set", lambda _: few)


@pytest.fixture
def reference() -> str:
    """The text of the reference cache."""
    return REFERENCE.read_text(encoding="utf-8")


spec = spec_from_file_location("gguf_fixtures", Path(__file__).parents[1] / "llm" / "conftest.py")
assert spec is not None
assert spec.loader is not None
files = module_from_spec(spec)
spec.loader.exec_module(files)
write, words = files.write, files.words


@pytest.fixture
def model(write: Callable[..., Path], words: dict[str, Any]) -> Path:
    """The toy, with as many tokens as its tokenizer has."""
    vocab = len(words["tokenizer.ggml.tokens"])
    weights = toy(1, LlamaConfig(**{**vars(TOY), "vocab": vocab})).weights
    tensors = {"token_embd.weight": weights.embedding, "output.weight": weights.head}
    path: Path = write(words, tensors)
    return path
