"""The commands on a Dask cluster in this process; one of processes: test_cluster_processes.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import verdicts

Call = Callable[..., Any]
USAGE = 2
BUGS = [word for name in ("s02", "s08", "s09", "s12", "order") for word in ("--bug", name)]


def test_grade_on_a_cluster(cluster: str, suite_project: Path, invoke: Call) -> None:
    """Tests with a conftest, a data file, a link and settings above them."""
    linked(suite_project)
    options = ("--bug", "s02", "--json", "there.json", "--executor", cluster)
    done = invoke("grade", "tests", *options, cwd=suite_project)
    assert done.exit_code == 0, done.output
    killed = ("Killed", ["tests/test_linked.py::test_gather"], "killed in 1 of 1 trials")
    assert verdicts(suite_project / "there.json") == {"bugs": {"s02": killed}, "score": 1.0, "code": 0}


def linked(project: Path) -> None:
    (project / "shared").mkdir()
    (project / "tests/test_it.py").rename(project / "shared/linked.py")
    (project / "tests/test_linked.py").symlink_to("../shared/linked.py")


@pytest.mark.long
def test_grade_decides_as_it_does_here(cluster: str, suite_project: Path, invoke: Call) -> None:
    """Tests with a conftest, a data file, a link and settings above them; kills, survivors, two seeds."""
    linked(suite_project)
    for name, on in (("here", []), ("there", ["--executor", cluster])):
        done = invoke(
            "grade", "tests", *BUGS, "--trials", 2, "--json", f"{name}.json", *on, cwd=suite_project
        )
        assert done.exit_code == 1, done.output
    here, there = verdicts(suite_project / "here.json"), verdicts(suite_project / "there.json")
    assert {status for status, *_ in here["bugs"].values()} == {"Killed", "Survived", "Ignored"}
    assert there == here
    with (suite_project / "tests/conftest.py").open("a") as conftest:
        conftest.write("\nimport random\ndef pytest_collection_modifyitems(items):\n")
        conftest.write("    random.SystemRandom().shuffle(items)\n")
    options = [*BUGS, "--trials", 2, "--json", "any.json", "--executor", cluster]
    assert invoke("grade", "tests", *options, cwd=suite_project).exit_code == 1
    shuffled = verdicts(suite_project / "any.json")
    assert {name: one[0] for name, one in shuffled.pop("bugs").items()} == {
        name: one[0] for name, one in here.pop("bugs").items()
    }
    assert shuffled == here


def test_as_many_tests_there_as_here(cluster: str, suite_project: Path, invoke: Call) -> None:
    """What they find in files that are not sent is missing there: the numbers say so, before any run."""
    (suite_project / "data").mkdir()
    for name in "abc":
        (suite_project / "data" / name).touch()
    text = (
        "import pathlib, pytest\n@pytest.mark.parametrize('path', pathlib.Path('data').glob('*'), ids=str)\n"
    )
    (suite_project / "tests/test_data.py").write_text(f"{text}def test_it(path): open('ran', 'w')\n")
    done = invoke("grade", "tests", *BUGS, "--executor", cluster, cwd=suite_project)
    assert (done.exit_code, done.stdout) == (USAGE, "")
    assert done.stderr.startswith("tinyllm: 5 tests are collected here, but 3 on the cluster: ")
    assert not (suite_project / "ran").exists()


@pytest.mark.long
def test_grade_of_another_module(cluster: str, tmp_path: Path, invoke: Call) -> None:
    """A package beside the tests comes along, in `src`, and is planted in."""
    files = {
        "pyproject.toml": "",
        "src/mine/__init__.py": "",
        "src/mine/other.py": "ONE = 1\n",
        "src/mine/sums.py": "from mine.other import ONE\n\ndef up(x):\n    return x + ONE\n",
        "tests/test_up.py": "from mine.sums import up\ndef test(): assert up(1) == 2\n",
        "bugs.toml": '[[bug]]\nid = "m1"\ntitle = "down"\nsymptom = "less"\n'
        'edits = [{find = "x + ONE", replace = "x - ONE"}]\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = invoke(*("grade", "tests", "--bugs", "bugs.toml", "--module", "mine.sums", "--executor", cluster))
    assert done.exit_code == 0, done.output
    assert "1 of 1 planted bugs killed" in done.stdout


@pytest.mark.long
def test_power_finds_what_it_finds_here(cluster: str, tmp_path: Path, invoke: Call) -> None:
    for name, on in (("here", []), ("there", ["--executor", cluster])):
        done = invoke("power", "--trials", 3, "--bug", "s09", "--bug", "w01", "--json", f"{name}.json", *on)
        assert done.exit_code == 0, done.output
    here, there = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("here", "there"))
    assert there == here
    assert "lost" not in json.dumps(here)


@pytest.mark.long
def test_soak(cluster: str, tmp_path: Path, invoke: Call) -> None:
    """A file with a neighbour that it imports; the trace it finds is written here."""
    (tmp_path / "beside.py").write_text("from tinyllm.infer.paged import PagedKVCache as Right\n")
    (tmp_path / "mine.py").write_text(
        "from beside import Right\nclass PagedKVCache(Right):\n    def truncate(self, seq, length): pass\n"
    )
    on = ("--executor", cluster)
    done = invoke("soak", "mine.py", "--for", "60s", "--seed", 1, *on)
    assert done.exit_code == 1, done.output
    assert "law 17, rollback" in done.stdout
    assert [path.name[:6] for path in (tmp_path / "tinyllm-traces").iterdir()] == ["law-17"]
    again = invoke("soak", "mine.py", "--for", "60s", "--seed", 1, *on)
    assert again.exit_code == 1
    assert "still fails" in again.stdout
    right = invoke("soak", "--for", "3s", "--json", "right.json", *on)
    assert right.exit_code == 0, right.stdout + right.stderr
    assert "1 known counterexamples hold" in right.stdout
    report = json.loads((tmp_path / "right.json").read_text())
    assert report["steps"] > report["programs"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--executor", "localhost:8786"), "localhost:8786: a cluster is named as dask://HOST:PORT"),
        (("--executor", "dask://localhost"), "dask://localhost: a cluster is named as dask://HOST:PORT"),
        (("--executor", "dask://127.0.0.1:1"), "no Dask scheduler answers at dask://127.0.0.1:1"),
        (("--executor", "dask://127.0.0.1:8786", "-j", 2), "-j is for this machine"),
    ],
)
def test_an_address_that_is_none(
    suite_project: Path, invoke: Call, monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...], said: str
) -> None:
    monkeypatch.setattr("tinyllm.jobs.cluster.WAIT", 0.5)
    done = invoke("grade", "tests", *arguments, cwd=suite_project)
    assert done.exit_code == USAGE
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
