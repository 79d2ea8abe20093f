"""Bugs are planted in every Python that tests start, and where one cannot be, that is said."""

from collections.abc import Callable
from typing import Any

import pytest

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


@pytest.mark.parametrize("text", WAYS.values(), ids=WAYS)
def test_started_in_this_way(grade: Callable[..., Any], text: str) -> None:
    files = {"test_it.py": text, "child.py": CHILD, "pytest.ini": "[pytest]\npythonpath = .\n"}
    verdict = grade(files, "s02")
    assert (verdict.code, verdict.statuses) == (PASS, {"s02": "killed"}), verdict
    assert verdict.grade.missed == ()


def test_the_sitecustomize_that_ours_hides_is_run(grade: Callable[..., Any]) -> None:
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
    verdict = grade(files, "s02")
    assert (verdict.code, verdict.statuses) == (PASS, {"s02": "killed"}), verdict


MISSED = {
    "-I": ("[sys.executable, '-I', '-c', CODE]", "-I keeps Python from it"),
    "-E": ("[sys.executable, '-BE', '-c', CODE]", "-E keeps Python from it"),
    "-S": ("[sys.executable, '-S', '-c', CODE]", "-S keeps Python from it"),
    "an environment of its own": (
        "[sys.executable, '-c', CODE], env={'PATH': os.environ['PATH']}",
        "its environment is without PYTHONPATH or TINYLLM_PLANT",
    ),
}


@pytest.mark.parametrize(("command", "reason"), MISSED.values(), ids=MISSED)
def test_a_process_without_it_is_named(grade: Callable[..., Any], command: str, reason: str) -> None:
    """What else the tests do kills nothing here: the bug seems to survive, and the report says why."""
    code = "CODE = 'print((1, 1, 1))  # a cache would be the clean one'"
    files = {"test_it.py": started(command, code) + "\ndef test_here(): child.shape()", "child.py": CHILD}
    files["test_it.py"] = "import sys; sys.path.insert(0, 'TMP/suite')\nimport child\n" + files["test_it.py"]
    verdict = grade(files, "s02")
    assert verdict.statuses == {"s02": "survived"}
    (missed,) = verdict.grade.missed
    assert missed.endswith(f": {reason}")
    assert "a cache would be the clean one" in missed


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
