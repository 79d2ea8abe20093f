"""What the README says is so."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tinyllm import __version__
from tinyllm.grading import bugs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [text for language, text in BLOCKS if language == "sh" and "python3 -m venv .venv" in text]


def test_the_worked_example_prints_what_it_says() -> None:
    at = next(
        i for i, (language, text) in enumerate(BLOCKS) if language == "python" and "PagedKVCache(" in text
    )
    done = subprocess.run([sys.executable, "-c", BLOCKS[at][1]], capture_output=True, text=True, check=True)
    assert done.stdout == BLOCKS[at + 1][1]


def test_the_verdict_shown_names_every_bug_of_the_course() -> None:
    shown = next(text for language, text in BLOCKS if not language and "Is the cache right?" in text)
    course = bugs.load_set("course")
    counted = [bug for bug in course if not bug.survives]
    assert re.findall(r"^(\w+) +(?:killed|survives) ", shown, re.MULTILINE) == [bug.id for bug in course]
    assert f"PASS  {len(counted)} of {len(counted)} planted bugs killed: 100%" in shown


def test_its_two_commands_set_everything_up() -> None:
    assert len(COMMANDS) == 2
    assert COMMANDS[0].strip().endswith(".venv/bin/tinyllm check")
    # .ci/run takes the lines of the second one from here, by these patterns.
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for pattern in (r"s/^\(python3 -c .*\) &&$/\1/p", r"s/^\(python3 -m venv .* pytest .*\)$/\1/p"):
        assert pattern in script
        sed = ["sed", "-n", pattern, str(ROOT / "README.md")]
        found = subprocess.run(sed, capture_output=True, text=True, check=True).stdout.splitlines()
        assert {*found} <= {line.removesuffix(" &&") for line in COMMANDS[1].splitlines()}
        assert found


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("version", "new"), [("3.10.13", False), ("3.11.0", True), ("4.0.0", True)])
def test_they_end_at_once_where_python_is_too_old(
    tmp_path: Path, command: str, version: str, new: bool
) -> None:
    """An older pip on an older Python looks for minutes, in silence, for what is not there."""
    code = f"import sys; sys.version, sys.version_info = '{version} (main)', ({version.replace('.', ', ')})"
    run = f'exec "{sys.executable}" -c "{code}; exec(sys.argv[1])" "$2"'
    python = tmp_path / "python3"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] || {{ echo "$@"; exit 1; }}\n{run}\n'
    )  # so nothing is installed
    python.chmod(0o755)
    env = {**os.environ, "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]])}
    shell = ["sh", "-c", command]
    done = subprocess.run(shell, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    told = f"tinyllm needs Python 3.11 or newer, not {version}\n"
    expected = (1, "-m venv .venv\n", "") if new else (1, "", told)
    assert (done.returncode, done.stdout, done.stderr) == expected


@pytest.mark.parametrize(("long", "more"), [("", ""), ("1", " -m long or not long")])
def test_ci_run_installs_once_and_ends_with_the_tests(tmp_path: Path, long: str, more: str) -> None:
    """And with their exit code."""
    for name in (".ci/run", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    ours = [f".venv/bin/{name}" for name in ("python", "tinyllm", "lint-imports")]
    for name in ("python3", "chromium", "chromedriver", *ours):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('#!/bin/sh\necho "= ${0##*/} $*"\ncase "$*" in *pytest*) exit 5; esac\n')
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]]), "CI_LONG": long}
    done = subprocess.run(
        [str(tmp_path / ".ci" / "run")], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (5, "")
    ran = [line for line in done.stdout.splitlines() if line[0] == "=" and " -c " not in line]
    assert ran == [
        "= python3 -m venv .venv",
        "= python -m pip install -q -e .[dev]",
        "= python -m ruff check",
        "= python -m ruff format --check",
        "= python -m mypy",
        "= lint-imports ",
        "= tinyllm model fetch",
        f"= python -m pytest -n auto --dist worksteal{more}",
    ]
    assert done.stdout.splitlines()[-1] == ran[-1]


def test_the_action_ends_at_once_too() -> None:
    check = COMMANDS[0].partition(" &&\n")[0].removeprefix("python3")
    assert f"        python{check}\n        python -m pip install" in (ROOT / "action.yml").read_text(
        encoding="utf-8"
    )


def test_getting_it_names_every_extra_and_the_wheel() -> None:
    section = README.partition("\n## Getting it\n")[2].partition("\n## ")[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)} == project["optional-dependencies"].keys()
    name = project["name"].replace("-", "_")
    assert re.findall(r"dist/(\S+)\[", section) == [f"{name}-{__version__}-py3-none-any.whl"]


def test_nothing_is_asked_of_an_index_that_does_not_have_it() -> None:
    """Only `Getting it` says how the project is had; elsewhere its name stands with an address."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "action.yml"]
    pages += [
        path for top in ("docs", "tinyllm", ".github") for path in (ROOT / top).rglob("*") if path.is_file()
    ]
    found = {}
    for path in pages:
        if path.suffix != ".pyc":
            text = path.read_text(encoding="utf-8")
            found[path] = re.findall(r"install.*tinyllm-paged(?:\[[\w,]+\])?(?! @ git)(?![\w\[-]).*", text)
    assert not {path: lines for path, lines in found.items() if lines}


def test_no_path_of_a_machine_is_shown() -> None:
    paths = re.findall(r"(?<![\w./:])/(?:home|root|tmp|work|Users|opt)\b\S*", README)
    assert not paths, paths
