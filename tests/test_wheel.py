"""What the wheel brings, without the repository: a learner's path, and the kit on a file of one's own."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tinyllm.grading.bugs import SETS

ROOT = Path(__file__).parents[1]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture
def run(wheel: Path, tmp_path: Path) -> Run:
    """Run a module in an empty folder, with the wheel alone for our packages."""
    installed = wheel.parent / "installed"
    if not installed.exists():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(installed)
    # Ahead of an editable installation, and with its own entry points.
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def call(*command: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-m", *command]
        return subprocess.run(
            arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return call


def test_it_holds_one_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"tinyllm", "tinyllm_paged"}
    page = {f"tinyllm/grading/templates/page.{end}" for end in ("html.jinja", "css", "js")}
    planted = {f"tinyllm/grading/planted/{name}" for name in ("second.py", *(f"{one}.toml" for one in SETS))}
    for needed in {"tinyllm/py.typed", "tinyllm/cli/learner/paged.py.jinja", *planted, *page}:
        assert needed in names


def test_in_the_repository_mutants_is_a_command() -> None:
    command = [sys.executable, "-m", "mutants", "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tinyllm: there are no tests at none\n"


def test_the_kit_checks_a_file_of_ones_own(run: Run, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tinyllm" / "infer" / "paged.py", tmp_path / "mine.py")
    command = ("pytest", "--pyargs", "tinyllm.testing", "--cache-impl=mine.py", "-k", "catalogue or wrong")
    done = run(*command)
    assert "12 passed" in done.stdout, done.stdout
    text = (
        (tmp_path / "mine.py")
        .read_text()
        .replace("[refs[block] + 1 for block in table]", "[refs[block] for block in table]")
    )
    (tmp_path / "mine.py").write_text(text)
    assert "failed" in run(*command).stdout


@pytest.mark.parametrize(
    "module",
    [
        "mutants",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("jobs.work", "tools.deep")),
    ],
)
def test_a_project_with_packages_of_such_names(run: Run, tmp_path: Path, module: str) -> None:
    """The wheel brings `tinyllm` alone, and imports nothing else of its own."""
    for name in ("mutants", "tools", "jobs", "grading", "tests", "testing", "cli", "infer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("def up(x):\n    return x + 1\n")
        for inner in ("work", "deep", "bugs", "process"):
            (tmp_path / name / f"{inner}.py").write_text("def up(x):\n    return x + 1\n")
    (tmp_path / "tests" / "test_up.py").write_text(
        f"from tools import up as other\nfrom {module} import up\n"
        "def test_up(): assert up(1) == other(1) == 2\n"
    )
    (tmp_path / "bugs.toml").write_text(
        '[[bug]]\nid = "m1"\ntitle = "down"\nsymptom = "less"\n'
        'edits = [{find = "x + 1", replace = "x - 1"}]\n'
    )
    done = run("tinyllm", "grade", "tests", "--bugs", "bugs.toml", "--module", module)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "1 of 1 planted bugs killed" in done.stdout


@pytest.mark.long
def test_a_learner_starts_tests_checks_and_mutates(run: Run, tmp_path: Path) -> None:
    started = run("tinyllm", "start")
    assert started.returncode == 0, started.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"paged.py", "tests", "pyproject.toml"}
    stub = run("tinyllm", "check", "paged.py", "--tests", "tests")
    assert stub.returncode == 1
    assert "Next: write __init__" in stub.stdout
    again = run("tinyllm", "start")
    assert again.returncode == 2
    assert "nothing was written" in again.stderr

    shutil.copy(ROOT / "tinyllm" / "infer" / "paged.py", tmp_path / "paged.py")  # written, at last
    assert "1 passed" in run("pytest").stdout
    checked = run("tinyllm", "check", "paged.py", "--tests", "tests", "--profile", "dev")
    assert checked.returncode == 1, checked.stdout + checked.stderr  # one property is not enough
    assert "s06 is required, and survives" in checked.stdout
    assert "s02    killed" in checked.stdout
    assert "pytest --plant s06:paged.py tests" in checked.stdout
    assert "1 failed" in run("pytest", "--plant", "s02:paged.py").stdout

    mutated = run("mutmut", "run", "paged.xǁPagedKVCacheǁ_read*")
    assert mutated.returncode == 0, mutated.stdout + mutated.stderr
    assert "survived" in run("mutmut", "results").stdout
    assert "1 passed" in run("pytest").stdout  # mutmut's folder is in nobody's way
