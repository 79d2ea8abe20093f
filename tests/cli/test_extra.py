"""Without the extra `check` the cache works, and the command says what is missing."""

import subprocess
import sys

import pytest

BLOCK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run(missing: set[str], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(missing=missing) + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_names_the_extra(missing: str) -> None:
    done = run({missing}, "from tinyllm.cli import main\nmain(['--help'])")
    assert (done.returncode, done.stdout) == (2, "")
    extra = "it is in the extra: pip install 'tinyllm-paged[check]'"
    assert done.stderr == f"tinyllm: {missing} is missing; {extra}\n"


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("hypothesis", ["check"]),
        ("hypothesis", ["grade", __file__]),
        ("pytest", ["grade", __file__]),
        ("jinja2", ["start", "/nowhere"]),
        ("hypothesis", ["tests"]),
    ],
)
def test_so_does_a_command_that_needs_more(missing: str, arguments: list[str]) -> None:
    done = run({missing}, f"from tinyllm.cli import main\nmain({arguments})")
    assert done.returncode == 2
    assert done.stderr == (
        f"tinyllm: {missing} is missing; it is in the extra: pip install 'tinyllm-paged[check]'\n"
    )


def test_a_module_of_ours_that_is_missing_is_a_mistake_of_ours() -> None:
    done = run(set(), "sys.modules['tinyllm.cli.app'] = None\nfrom tinyllm.cli import main\nmain(['--help'])")
    assert "Traceback" in done.stderr


def test_the_cache_needs_numpy_alone() -> None:
    missing = {"typer", "rich", "hypothesis", "pytest", "jinja2", "xdist"}
    done = run(missing, "import tinyllm.infer, tinyllm\nprint(tinyllm.PagedKVCache(1, 1, 1, 1, 1))")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "<PagedKVCache: 1 of 1 blocks free, 0 sequences>\n"
