"""`tinyllm replay`: which line breaks which law."""

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
