"""Bugs are planted in every Python that tests start, and where one cannot be, that is said."""

from collections.abc import Callable
from typing import Any

PASS, WEAK, USAGE, BASELINE = range(4)
CHILD = """
import numpy as np
from tinyllm.infer.paged import PagedKVCache

def shape(_=None):
    cache = PagedKVCache(4, 2, 1, 1, 1)
    cache.add_seq(0)
    cache.append(0, 0, np.ones((1, 1, 1)), np.ones((1, 1, 1)))
    return cache.gather(0, 0)[0].shape

if __name__ == "__main__":
    print(shape())
"""
RUN = "subprocess.run(COMMAND, check=True, capture_output=True, text=True, cwd=HERE).stdout.strip()"
POOL = (
    "import multiprocessing\nimport child\n"
    "def test():\n    with multiprocessing.get_context('METHOD').Pool(1) as pool:\n"
    "        assert pool.map(child.shape, [0]) == [(1, 1, 1)]\n"
)


def started(command: str, more: str = "") -> str:
    """A test of what the child prints."""
    text = "import os, subprocess, sys\nfrom pathlib import Path\nHERE = Path(__file__).parent\n"
    return text + f"{more}\ndef test(): assert {RUN.replace('COMMAND', command)} == '(1, 1, 1)'\n"


WAYS = {
    "a script": started("[sys.executable, 'child.py']"),
    "-m": started("[sys.executable, '-m', 'child']"),
    "a shell": started("f'{sys.executable} -m child', shell=True"),
    "a child of a child": started(
        "[sys.executable, '-c', 'import subprocess, sys; subprocess.run([sys.executable, \"child.py\"])']"
    ),
    "spawn": POOL.replace("METHOD", "spawn"),
    "forkserver": POOL.replace("METHOD", "forkserver"),
    "fork": POOL.replace("METHOD", "fork"),
}


def test_in_whichever_way_they_are_started(kills: Callable[..., Any]) -> None:
    files = {
        f"test_{number}.py": text.replace("test()", f"test_{number}()")
        for number, text in enumerate(WAYS.values())
    }
    settings = {"child.py": CHILD, "pytest.ini": "[pytest]\npythonpath = .\n"}
    missing = files.keys() - {f"{name}.py" for name in kills(files | settings)}
    assert [list(WAYS)[int(name[5:-3])] for name in missing] == []


def test_the_sitecustomize_that_ours_hides_is_run(kills: Callable[..., Any]) -> None:
    """It is the module of that name, and ours is not on the path."""
    text = started(
        "[sys.executable, '-c', 'import os, sitecustomize, sys; "
        'assert (os.environ["CUSTOM"], sitecustomize.value) == ("1", 2); '
        'assert not [one for one in sys.path if one.endswith("site")]; '
        "import child; print(child.shape())']"
    )
    hidden = "import os\nos.environ['CUSTOM'] = '1'\nvalue = 2\n"
    files = {"test_it.py": text, "child.py": CHILD, "hidden/sitecustomize.py": hidden}
    more = "os.environ['PYTHONPATH'] += os.pathsep + str(HERE / 'hidden')"
    files["test_it.py"] = text.replace("\ndef test()", f"{more}\ndef test()", 1)
    assert kills(files) == {"test"}


MISSED = {
    "-I": ("[sys.executable, '-I', '-c', CODE]", "-I keeps Python from it"),
    "-E": ("[sys.executable, '-BE', '-c', CODE]", "-E keeps Python from it"),
    "-S": ("[sys.executable, '-S', '-c', CODE]", "-S keeps Python from it"),
    "an environment of its own": (
        "[sys.executable, '-c', CODE], env={'PATH': os.environ['PATH']}",
        "its environment is without PYTHONPATH or TINYLLM_PLANT",
    ),
}


def test_a_process_without_it_is_named(grade: Callable[..., Any]) -> None:
    """What else the tests do kills nothing here: the bug seems to survive, and the report says why."""
    code = "CODE = 'print((1, 1, 1))  # a cache would be the clean one'"
    files = {
        f"test_{number}.py": started(command, code) for number, (command, _) in enumerate(MISSED.values())
    }
    here = "import sys; sys.path.insert(0, 'TMP/suite')\nimport child\ndef test_here(): child.shape()"
    verdict = grade({**files, "child.py": CHILD, "test_here.py": here}, "s02")
    assert verdict.statuses == {"s02": "survived"}
    missed = verdict.grade.missed
    assert sorted(one.rpartition(": ")[2] for one in missed) == sorted(
        reason for _, reason in MISSED.values()
    )
    assert all("a cache would be the clean one" in one for one in missed)


def test_where_every_use_is_in_such_a_process_there_is_no_verdict(grade: Callable[..., Any]) -> None:
    command = "[sys.executable, '-I', '-c', 'print((1, 1, 1))']"
    verdict = grade(started(command), "s02")
    assert verdict.code == USAGE
    assert (
        "no test constructs PagedKVCache of tinyllm.infer.paged, where the bugs are planted"
        in verdict.message
    )
    assert "no bug can be planted in " in verdict.message
    assert "-I keeps Python from it" in verdict.message
