"""Every command: its help, what it prints, and what it says to arguments that make no sense."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tinyllm as package
from tinyllm.grading.bugs import load_set, reference
from tinyllm.testing.catalogue import CATALOGUE
from tinyllm.testing.laws import LAWS

Invoke = Callable[..., Any]
COMMANDS = ["check", "grade", "power", "soak", "reach", "replay", "show", "generate", "batch"]
COMMANDS += ["laws", "bugs", "tests", "start", "diff", "model"]


def words(text: str) -> str:
    """The text without boxes and line ends."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def test_help_lists_the_commands(invoke: Invoke) -> None:
    done = invoke("--help")
    assert done.exit_code == 0
    assert re.findall(r"^│ ([a-z]+) ", done.stdout, re.MULTILINE) == COMMANDS
    assert "Exit codes of check and grade: 0 pass" in words(done.stdout)
    assert invoke("-h").stdout == done.stdout
    alone = invoke()
    assert alone.exit_code == 2
    assert "Usage" in alone.output


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each(invoke: Invoke, name: str) -> None:
    done = invoke(name, "--help")
    assert done.exit_code == 0
    assert f"Usage: tinyllm {name}" in words(done.stdout)
    assert invoke(name, "-h").stdout == done.stdout


def test_version(invoke: Invoke) -> None:
    done = invoke("--version")
    assert (done.exit_code, done.stdout) == (0, f"tinyllm {package.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("nope", "No such command 'nope'"),
        ("grade", "Missing argument 'PATH...'"),
        ("grade . --nope", "No such option: --nope"),
        ("grade none", "there are no tests at none"),
        (
            "replay x.trace mine.py --exec engine",
            "mine.py and --exec say which cache it is: name one of the two",
        ),
        ("grade none.py::test", "there are no tests at none.py::test"),
        ("grade . --trials 0", "0 is no whole number of at least 1"),
        ("grade . --trials two", "two is no whole number of at least 1"),
        ("grade . --trials 1.5", "1.5 is no whole number of at least 1"),
        ("grade . -j 0", "0 is no whole number of at least 1"),
        ("grade . --jobs -3", "-3 is no whole number of at least 1"),
        ("grade . --seed -1", "-1 is no whole number of at least 0"),
        ("grade . --timeout 0", "0 is no number of at least 0.1"),
        ("grade . --timeout nan", "nan is no number of at least 0.1"),
        ("grade . --timeout soon", "soon is no number of at least 0.1"),
        ("grade . --bug nope", "there is no bug nope; expected one of s01, "),
        ("grade . --bug s06 --bug nope --bug no", "there is no bug nope, no; expected one of s01, "),
        ("grade . --set nope", "--set nope: expected one of course, wild, engine, field, all"),
        ("grade . --json none/out.json", "none/out.json cannot be written: its folder is not there"),
        ("grade . --matrix .", ". cannot be written: it is a folder"),
        ("grade . --html none/out.html", "none/out.html cannot be written: its folder is not there"),
        ("check none.py", "there is no file none.py"),
        ("check none.such", "there is no module 'none.such' here; a file is named with its .py"),
        ("check os", "os defines no PagedKVCache; write os:NAME if yours has another name"),
        ("check os:sep", "sep of os is not callable"),
        ("check --profile fast", "--profile fast: expected one of dev, ci, deep"),
        ("check --tests none", "there are no tests at none"),
        ("check --seed x", "x is no whole number of at least 0"),
        ("check --json none/out.json", "none/out.json cannot be written: its folder is not there"),
        ("check --html .", ". cannot be written: it is a folder"),
        ("bugs nope", "there is no bug 'nope'; expected one of s01, "),
        ("diff none.py", "none.py cannot be read: No such file or directory"),
        ("diff .", ". cannot be read: Is a directory"),
        ("diff", "Missing argument 'FILE'"),
        ("tests more", "unexpected extra argument"),
    ],
)
def test_arguments_that_make_no_sense(invoke: Invoke, arguments: str, said: str) -> None:
    done = invoke(*arguments.split())
    assert done.exit_code == 2
    assert said in words(done.stderr)
    assert "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)


def test_the_path_is_left_as_it_was(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder one is in is searched last, wherever else it stands, and for the module alone."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.path)
    assert invoke("grade", ".", "--bug", "nope").exit_code == 2
    assert sys.path == before


def test_a_message_of_ours_is_one_line(tinyllm: Callable[..., Any]) -> None:
    done = tinyllm("grade", "none")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "tinyllm: there are no tests at none\n")


def test_brackets_are_no_markup(invoke: Invoke) -> None:
    assert "no tests at [red]x[/red]" in invoke("grade", "[red]x[/red]").stderr
    assert "no bug '[/x]'" in invoke("bugs", "[/x]").stderr


def test_bugs_lists_them_all(invoke: Invoke) -> None:
    done = invoke("bugs")
    assert done.exit_code == 0
    listed = re.findall(r"^(\w+) {2,}\S", done.stdout, re.MULTILINE)
    assert [name for name in listed if name not in {"id", "required"}] == [bug.id for bug in load_set("all")]
    required = [bug.id for bug in load_set("all") if bug.required]
    assert done.stdout.count("required") == len(required)


def test_one_bug_whole(invoke: Invoke) -> None:
    done = invoke("bugs", "s06")
    (bug,) = [bug for bug in load_set("course") if bug.id == "s06"]
    assert done.exit_code == 0
    for text in (bug.title, bug.symptom, "required", "law 6, law 8", bug.source, *bug.caught_by):
        assert text in done.stdout
    assert "pytest --plant s06 " in done.stdout
    for line in bug.witness.strip().splitlines():
        assert f"  {line}\n" in done.stdout
    assert "+        new_refs = zip(table, [refs[block] for block in table])\n" in done.stdout


@pytest.mark.parametrize("bug", load_set("all"), ids=lambda bug: bug.id)
def test_the_diff_of_a_bug_can_be_fed_to_patch(invoke: Invoke, tmp_path: Path, bug: Any) -> None:
    """Where the output is no terminal, not a character is added."""
    shown = invoke("bugs", bug.id).stdout
    clean = bug.clean(reference())
    (path := tmp_path / Path(clean.path).name).write_text(clean.source, encoding="utf-8")
    (tmp_path / "diff").write_text(shown[shown.index(f"--- a/{path.name}") :], encoding="utf-8")
    subprocess.run(["git", "apply", "diff"], cwd=tmp_path, check=True, timeout=60)
    assert path.read_text(encoding="utf-8") == bug.planted(clean).source


def test_tests_lists_the_catalogue(invoke: Invoke) -> None:
    done = invoke("tests")
    shown = words(done.stdout)
    assert done.exit_code == 0
    for entry in CATALOGUE.values():
        for text in (entry.name, entry.kind, entry.checks, entry.matters):
            assert text in shown


def test_diff(invoke: Invoke, tmp_path: Path) -> None:
    source = reference().source
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    assert invoke("diff", "mine.py").stdout == "The two are the same.\n"
    (tmp_path / "mine.py").write_text(source.replace("first_block, last", "one, two"), encoding="utf-8")
    shown = invoke("diff", "mine.py").stdout
    assert shown.startswith("--- mine.py\n+++ the reference\n@@ ")
    assert "\n-        one, two" in shown
    assert "\n+        first_block, last_block =" in shown


def test_diff_of_a_file_that_is_no_text(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(b"\xff\xfe")
    done = invoke("diff", "mine.py")
    assert done.exit_code == 2
    assert "mine.py cannot be read: " in done.stderr


def test_python_m_tinyllm_is_the_command(tinyllm: Callable[..., Any]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tinyllm", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == tinyllm("--version").stdout


def test_output_that_nobody_reads_to_the_end(command: str) -> None:
    """As with `| head -1`."""
    process = subprocess.Popen([command, "bugs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=60)
    assert "Traceback" not in err


def test_laws_are_those_of_the_kit(invoke: Invoke) -> None:
    shown = words(invoke("laws").stdout)
    for number, (title, text) in LAWS.items():
        assert words(f"{number} {title} {text}") in shown
    assert words(invoke("laws", "8").stdout) == words(f"8 {LAWS[8][0]} {LAWS[8][1]}")
    done = invoke("laws", "21")
    assert (done.exit_code, done.stderr) == (2, "tinyllm: there is no law 21; expected 1 to 20\n")
