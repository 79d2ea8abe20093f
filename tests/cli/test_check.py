"""What a learner is told of a file that is not right yet: what is wrong, and where, and in time."""

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyllm.jobs.process import call

PASS, WEAK, USAGE, BASELINE = range(4)

Invoke = Callable[..., Any]
APPEND = (
    "        layer = as_layer(layer, self.n_layers)\n        table, lens = self._live(seq_id)\n        start"
)
INIT = '        self.num_blocks = as_size("num_blocks", num_blocks, 2**31 - 1)\n'
WAITS = "import time\n        while True: time.sleep(1)\n"
SUITE = (
    "import numpy as np\nfrom paged import PagedKVCache\n\n"
    "def test():\n    cache = PagedKVCache(4, 2, 1, 1, 1)\n"
    "    cache.add_seq(0)\n    one = np.ones((1, 1, 1))\n    cache.append(0, 0, one, one)\n"
    "    assert cache.gather(0, 0)[0].shape == one.shape\n"
)


@pytest.fixture
def paged(tmp_path: Path, reference: str) -> Callable[..., None]:
    """Writes paged.py: a text, or the reference with one thing replaced."""

    def write(text: str = "", *, old: str = "", new: str = "") -> None:
        if old:
            assert reference.count(old) == 1
            text = reference.replace(old, new)
        (tmp_path / "paged.py").write_text(text, encoding="utf-8")

    return write


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 +", "paged.py, line 1: invalid syntax"),
        ("import nothing_there", "paged.py imports 'nothing_there', which is not installed"),
        (
            "from math import nothing",
            "paged.py cannot be imported: ImportError: cannot import name 'nothing'",
        ),
        ("1 / 0", "paged.py cannot be imported: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)", "paged.py cannot be imported: SystemExit: 3"),
        ("", "paged.py defines no PagedKVCache; write paged.py:NAME if yours has another name"),
        ("PagedKVCache = 3", "PagedKVCache of paged.py is not callable"),
    ],
)
def test_a_file_that_cannot_be_used(invoke: Invoke, paged: Any, text: str, said: str) -> None:
    paged(text)
    done = invoke("check", "paged.py")
    assert done.exit_code == USAGE
    assert said in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (INIT, "        raise NotImplementedError\n", "Next: write __init__."),
        (
            "        parent, child = as_integer(",
            "        raise NotImplementedError\n        (",
            "Next: write fork.",
        ),
        (APPEND, "        raise NotImplementedError\n        refs", "Next: write append."),
        ("[refs[block] + 1 for block in table]", "[refs[block] for block in table]", "law 8, copy on write"),
        ("len(shared) + new", "len(sharde) + new", "NameError: name 'sharde' is not defined"),
        (APPEND, "        import sys; sys.exit(3)\n        refs", "SystemExit: 3"),
        (
            APPEND,
            "        import os; os._exit(0)\n        refs",
            "test_hand_example_block_table ended the process it ran in.",
        ),
    ],
    ids=["nothing yet", "half done", "another half", "a law broken", "a typo", "sys.exit", "os._exit"],
)
def test_a_cache_that_is_not_right(invoke: Invoke, paged: Any, old: str, new: str, said: str) -> None:
    paged(old=old, new=new)
    done = invoke("check", "paged.py")
    assert done.exit_code == WEAK
    assert said in done.stdout
    assert "Step 2, grading the tests, waits until step 1 passes." in done.stdout
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("", WAITS.replace("        ", ""), "loading paged.py"),
        (APPEND, f"        {WAITS}        refs", "test_hand_example_block_table"),
    ],
    ids=["when imported", "in append"],
)
def test_an_endless_loop(
    invoke: Invoke, paged: Any, monkeypatch: pytest.MonkeyPatch, old: str, new: str, what: str
) -> None:
    call(print, timeout=60)  # the fork server is there before any second counts
    monkeypatch.setattr(importlib.import_module("tinyllm.cli.check"), "SILENCE", 6.0)
    paged(new, old=old, new=new)
    done = invoke("check", "paged.py")
    assert done.exit_code == WEAK
    assert f"{what} has not ended within 6 s: an endless loop?" in done.stdout


def test_a_process_that_ends_when_imported(invoke: Invoke, paged: Any) -> None:
    paged("import os\nprint('last words', flush=True)\nos._exit(0)")
    done = invoke("check", "paged.py")
    assert done.exit_code == WEAK
    assert "loading paged.py ended the process it ran in.\nlast words\n" in done.stdout


def test_megabytes_of_output_do_not_show(invoke: Invoke, paged: Any) -> None:
    """They go to a file, and with it; what the checks say is read as ever."""
    paged(
        old="[refs[block] + 1 for block in table])",
        new="[refs[block] for block in table])\n        print('noise ' * 200_000)",
    )
    done = invoke("check", "paged.py")
    assert done.exit_code == WEAK
    assert "noise" not in done.stdout
    assert "law 8, copy on write" in done.stdout


def test_the_story_can_be_run(invoke: Invoke, paged: Any) -> None:
    """The program that a failure shows fails when it is pasted, and says the same."""
    paged(old="[refs[block] + 1 for block in table]", new="[refs[block] for block in table]")
    shown = invoke("check", "paged.py").stdout
    start, end = shown.index("  from tinyllm.testing import"), shown.index('  """)')
    program = "\n".join(line[2:] for line in shown[start : end + 6].splitlines())
    with pytest.raises(AssertionError, match="law 8, copy on write"):
        exec(program, {})


def test_json_of_a_failure(invoke: Invoke, paged: Any, tmp_path: Path) -> None:
    paged(old="[refs[block] + 1 for block in table]", new="[refs[block] for block in table]")
    assert invoke("check", "paged.py", "--json", "out.json").exit_code == WEAK
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (found["implementation"], found["exitCode"], found["grade"]) == ("paged.py", WEAK, None)
    step = found["check"]
    assert (step["passed"], step["law"], step["unwritten"]) == (False, 8, "")
    assert step["story"].startswith("law 8, copy on write")
    assert "fork 0 1" in step["trace"]
    assert step["failed"][-1]["problem"]


@pytest.mark.usefixtures("few_bugs")
def test_a_right_one_with_weak_tests(invoke: Invoke, paged: Any, tmp_path: Path) -> None:
    """Both steps; tests that import it by its own name are graded with the bugs under that name."""
    paged(old="ceil(longest layer / B)", new="ceil(longest layer / B)")
    (tmp_path / "test_it.py").write_text(SUITE, encoding="utf-8")
    arguments = ("--tests", "test_it.py", "--profile", "dev", "--json", "out.json", "--html", "out.html")
    done = invoke("check", "paged.py:PagedKVCache", *arguments)
    assert done.exit_code == WEAK
    assert done.stdout.endswith("\nThe page: out.html\n")
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert " ".join(("check paged.py:PagedKVCache", *arguments)) in page
    assert "pytest --plant s06:paged.py:PagedKVCache test_it.py" in page
    assert re.search(r"every law holds over \d+ programs of [\d,]+ lines", done.stdout)
    assert "s06 is required, and survives" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (found["check"]["passed"], found["exitCode"]) == (True, WEAK)
    ((file),) = found["grade"]["files"].values()
    statuses = {mutant["id"]: mutant["status"] for mutant in file["mutants"]}
    assert (statuses["s02"], statuses["s06"], statuses["order"]) == ("Killed", "Survived", "Ignored")


@pytest.mark.long
def test_tests_that_fail_on_it_are_no_baseline(invoke: Invoke, paged: Any, tmp_path: Path) -> None:
    paged(old="ceil(longest layer / B)", new="ceil(longest layer / B)")
    text = SUITE + "    import paged\n    assert not hasattr(paged, 'MINE')\n"
    with (tmp_path / "paged.py").open("a", encoding="utf-8") as file:
        file.write("\nMINE = 1\n")
    (tmp_path / "test_it.py").write_text(text, encoding="utf-8")
    done = invoke("check", "paged.py", "--tests", "test_it.py", "--profile", "dev")
    assert done.exit_code == BASELINE
    assert re.search(r"the clean tests fail: .*; on paged\.py as it is \(seed \d\)", done.stderr)


def test_what_an_implementation_does_not_offer_is_said(invoke: Invoke, paged: Any, tmp_path: Path) -> None:
    paged(old="    _closed = True  #", new="    capabilities = frozenset()\n    _closed = True  #")
    done = invoke("check", "paged.py", "--profile", "dev", "--html", "none.html")
    assert done.exit_code == PASS
    assert "not checked: " in done.stdout
    assert "2  Are the tests any good?  skipped: name them with --tests" in done.stdout
    assert done.stdout.endswith("\nNo HTML page was written: there is no grade.\n")
    assert not (tmp_path / "none.html").exists()


def test_the_reference_is_graded_by_our_own_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which are a folder of the repository, or the kit's where there is only the wheel."""
    check = importlib.import_module("tinyllm.cli.check")
    assert check.own_tests().parts[-2:] == ("tests", "own")
    monkeypatch.setattr("tinyllm.__path__", [str(tmp_path / "tinyllm")])
    assert check.own_tests().name == "test_contract.py"
    assert check.own_tests().is_file()


def test_check_tells_each_step(invoke: Invoke, paged: Any) -> None:
    paged(old="[refs[block] + 1 for block in table]", new="[refs[block] for block in table]")
    done = invoke("check", "paged.py")
    assert (done.exit_code, done.stderr) == (WEAK, "")
    assert "✓ catalogue  test_layers_keep_independent_lengths\n" in done.stdout
    assert "✗ catalogue  test_fork_shares_until_a_write\n" in done.stdout
    assert "\x1b" not in done.stdout
