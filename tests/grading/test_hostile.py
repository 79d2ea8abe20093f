"""Suites that misbehave, and what each gets: the exit code, words of the message, the bug's status."""

from collections.abc import Callable
from typing import Any

import pytest

PASS, WEAK, USAGE, BASELINE, INVALID, TIMEOUT = range(6)

Grade = Callable[..., Any]

# fmt: off
NEVER_A_BASELINE = {
    # name: (suite, exit code, words)
    "always fails": (
        "def test(): assert False", BASELINE, "the clean tests fail"),
    "import error": (
        "import no_such_module", USAGE, "No module named 'no_such_module'"),
    "syntax error": (
        "def test(: pass", USAGE, "SyntaxError"),
    "conftest raises": (
        {"conftest.py": "1 / 0", "test_it.py": "def test(): pass"}, USAGE, "ZeroDivisionError"),
    "sys.exit when imported": (
        "import sys; sys.exit(0)", USAGE, "SystemExit"),
    "sys.exit in a test": (
        "import sys\ndef test(): sys.exit(0)", BASELINE, "SystemExit: 0"),
    "pytest.exit in a test": (
        "import pytest\ndef test(): pytest.exit('enough', returncode=0)", BASELINE, "enough"),
    "Ctrl-C in a test": (
        "def test(): raise KeyboardInterrupt", BASELINE, "KeyboardInterrupt"),
    "os._exit in a test": (
        "import os\ndef test(): os._exit(0)", BASELINE, "without notice"),
    "kills itself": (
        "import os\ndef test(): os.kill(os.getpid(), 9)", BASELINE, "without notice"),
    "dies, and a copy of it lives on": (
        "import os, time\ndef test():\n    if os.fork() == 0: time.sleep(300)\n    os._exit(0)",
        BASELINE, "without notice"),
    "closes all files": (
        "import os\ndef test(): os.closerange(0, 1000)", BASELINE, "without notice"),
    "kills what watches it": (
        "import os\ndef test(): os.killpg(os.getpgid(os.getppid()), 9)", BASELINE, "without notice"),
    "stops, and all its group": (
        "import os, signal\ndef test():\n    signal.alarm(2)\n    os.kill(0, signal.SIGTSTP)\n"
        "    os.kill(0, signal.SIGKILL)",
        BASELINE, "without notice"),
    "red in teardown": (
        "import pytest\n@pytest.fixture(autouse=True)\ndef f():\n    yield\n    assert False\n"
        "def test(): pass", BASELINE, "(teardown)"),
    "health check on clean code": (
        "from hypothesis import given, strategies as st\n"
        "@given(st.integers().filter(lambda _: False))\ndef test(n): pass",
        BASELINE, "FailedHealthCheck"),
    "the cache by its path, under its name": (
        "import importlib.util as u, sys\n"
        "from pathlib import Path\nimport tinyllm\n"
        "name = 'tinyllm.infer.paged'\n"
        "spec = u.spec_from_file_location(name, Path(tinyllm.__path__[0], 'infer', 'paged.py'))\n"
        "sys.modules[name] = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(sys.modules[name])\n"
        "def test(): pass",
        USAGE, "was imported from elsewhere"),
    "imported before planting": (
        {"pytest.ini": "[pytest]\naddopts = -p early\npythonpath = .\n",
         "early.py": "import tinyllm.infer.paged", "test_it.py": "def test(): pass"},
        USAGE, "usage error"),
    "never imports the cache": (
        "def test(): pass", USAGE, "no test constructs PagedKVCache of tinyllm.infer.paged, where the bugs"),
    "never constructs it": (
        "PRELUDE\ndef test(): assert PagedKVCache", USAGE, "tinyllm check IMPL --tests PATH"),
    "the cache by its path": (
        "import importlib.util as u\nfrom pathlib import Path\nimport tinyllm\n"
        "spec = u.spec_from_file_location('mine', Path(tinyllm.__path__[0], 'infer', 'paged.py'))\n"
        "mine = u.module_from_spec(spec)\nspec.loader.exec_module(mine)\n"
        "def test(): assert mine.PagedKVCache(1, 1, 1, 1, 1)",
        USAGE, "no test constructs PagedKVCache of tinyllm.infer.paged"),
    "edits itself": (
        "PRELUDE\ndef test():\n    assert cache_of_one()\n"
        "    with open(__file__, 'a') as file: file.write('#')", BASELINE, "test_it.py"),
}
HANGS = {
    "in a test": "import time\ndef test():\n    while True: time.sleep(1)",
    "in one call": "import time\ndef test(): time.sleep(1000)",
    "when imported": "import time\nwhile True: time.sleep(1)",
    "ignoring signals": (
        "import signal, time\n"
        "for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(name, signal.SIG_IGN)\n"
        "def test(): time.sleep(1000)"),
    "in teardown": (
        "import pytest, time\n@pytest.fixture(autouse=True)\ndef f():\n    yield\n    time.sleep(1000)\n"
        "def test(): pass"),
}
GRADED = {
    # name: (suite, exit code, status of s02, words of the reasons)
    "no test": (
        "x = 1", WEAK, "survived", "there is no test to grade"),
    "no test, and nothing else": (
        {"readme.txt": ""}, WEAK, "survived", "there is no test to grade"),
    "skips": (
        "PRELUDE\nimport pytest\ndef test(): pytest.skip()\ndef test_other(): cache_of_one()",
        WEAK, "survived", "the score is 0%"),
    "expects to fail": (
        "PRELUDE\nimport pytest\n@pytest.mark.xfail\ndef test(): assert not has_s02()",
        WEAK, "survived", "the score is 0%"),
    "catches everything": (
        "PRELUDE\ndef test():\n    try: assert not has_s02()\n    except: pass",
        WEAK, "survived", "the score is 0%"),
    "fails": (
        "PRELUDE\ndef test(): assert not has_s02()", PASS, "killed", ""),
    "as another name": (
        "import tinyllm.infer.paged as other\nPRELUDE\n"
        "from tinyllm.infer.paged import PagedKVCache as P\nPagedKVCache = other.PagedKVCache\n"
        "def test(): assert not has_s02() and P is PagedKVCache", PASS, "killed", ""),
    "from the package": (
        "PRELUDE\nfrom tinyllm import PagedKVCache\ndef test(): assert not has_s02()", PASS, "killed", ""),
    "reloaded": (
        "PRELUDE\nimport importlib, tinyllm.infer.paged as p\n"
        "PagedKVCache = importlib.reload(p).PagedKVCache\ndef test(): assert not has_s02()",
        PASS, "killed", ""),
    "imported anew": (
        "PRELUDE\nimport importlib, sys\ndef test():\n    global PagedKVCache\n"
        "    del sys.modules['tinyllm.infer.paged']\n"
        "    PagedKVCache = importlib.import_module('tinyllm.infer.paged').PagedKVCache\n"
        "    assert not has_s02()", PASS, "killed", ""),
    "deleted for good": (
        "PRELUDE\nimport sys\ndef test():\n    del sys.modules['tinyllm.infer.paged']\n"
        "    assert not has_s02()", PASS, "killed", ""),
    "raises SystemExit": (
        "PRELUDE\nimport sys\ndef test(): has_s02() and sys.exit(0)", PASS, "killed", ""),
    "fails in setup": (
        "PRELUDE\nimport pytest\n@pytest.fixture(autouse=True)\ndef f(): assert not has_s02()\n"
        "def test(): pass", PASS, "killed", ""),
    "passes what must fail": (
        "PRELUDE\nimport pytest\n@pytest.mark.xfail(strict=True)\ndef test(): assert has_s02()",
        PASS, "killed", ""),
    "unittest with Hypothesis": (
        "PRELUDE\nimport unittest\nfrom hypothesis import given, settings, strategies as st\n"
        "class Case(unittest.TestCase):\n    @settings(deadline=None)\n    @given(st.integers())\n"
        "    def test(self, n): self.assertFalse(has_s02())", PASS, "killed", ""),
    "unittest, a subtest": (
        "PRELUDE\nimport unittest\nclass Case(unittest.TestCase):\n    def test(self):\n"
        "        with self.subTest(): self.assertFalse(has_s02())", PASS, "killed", ""),
    "a thread is left": (
        "PRELUDE\nimport threading, time\ndef test():\n"
        "    threading.Thread(target=time.sleep, args=(300,)).start()\n    assert not has_s02()",
        PASS, "killed", ""),
    "a copy of the run is left": (
        "PRELUDE\nimport os\ndef test():\n    if os.fork() == 0: assert False\n    os.wait()\n"
        "    assert not has_s02()", PASS, "killed", ""),
    "prints 50 MB": (
        "PRELUDE\nimport sys\ndef test():\n    for _ in range(50): sys.__stdout__.write('x' * 1_000_000)\n"
        "    assert not has_s02()", PASS, "killed", ""),
    "pytest within pytest": (
        "PRELUDE\nimport pytest\ndef test():\n"
        "    assert pytest.main([__file__, '-k', 'inner', '-p', 'no:cacheprovider']) == 0\n"
        "def test_inner(): assert not has_s02()", PASS, "killed", ""),
    "only the deadline": (
        "PRELUDE\nimport time\nfrom hypothesis import given, settings, strategies as st\n"
        "@settings(deadline=20_000)\n@given(st.integers())\ndef test(n):\n"
        "    from hypothesis.errors import DeadlineExceeded\n    import datetime\n"
        "    if has_s02(): raise DeadlineExceeded(datetime.timedelta(1), datetime.timedelta(1))",
        WEAK, "survived", "the score is 0%"),
    "only a health check": (
        "PRELUDE\nfrom hypothesis import given, settings, strategies as st\n"
        "@settings(deadline=None)\n@given(st.data())\ndef test(data):\n"
        "    data.draw(st.integers().filter(lambda _: not has_s02()))", WEAK, "survived", "the score is 0%"),
    "flaky around what fails every time": (
        "PRELUDE\nfrom hypothesis import given, settings, strategies as st\nseen = []\n"
        "@settings(deadline=None)\n@given(st.integers())\ndef test(n):\n"
        "    if has_s02() and not seen:\n        seen.append(n)\n        assert False, 'the first time'",
        PASS, "killed", ""),
    "only flaky": (
        "PRELUDE\nfrom hypothesis.errors import Flaky\ndef test():\n    if has_s02(): raise Flaky('x')",
        WEAK, "survived", "the score is 0%"),
    "only the disk is full": (
        "PRELUDE\nimport errno, os\ndef test():\n"
        "    if has_s02(): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))",
        WEAK, "survived", "the score is 0%"),
    "manners": (
        "PRELUDE\nimport os, resource as r, shutil, signal, sys, tempfile\n"
        "for name in ('INT', 'TERM', 'HUP', 'CHLD', 'PIPE'):\n"
        "    signal.signal(getattr(signal, f'SIG{name}'), signal.SIG_IGN)\n"
        "sys.stdout = sys.stderr = None\n"
        "def test():\n    shutil.rmtree(tempfile.gettempdir())\n"
        "    os.chdir(tempfile.mkdtemp(dir='/tmp'))\n    os.rmdir(os.getcwd())\n    os.umask(0o777)\n"
        "    os.environ.clear()\n"
        "    for one in (r.RLIMIT_NOFILE, r.RLIMIT_FSIZE, r.RLIMIT_NPROC): r.setrlimit(one, (0, 0))\n"
        "    os.nice(19)\n    assert not has_s02()", PASS, "killed", ""),
    "a file is not there": (
        "PRELUDE\ndef test(): has_s02() and open('/nowhere/to/be/found')", PASS, "killed", ""),
    "exits": (
        "PRELUDE\nimport os\ndef test(): has_s02() and os._exit(0)", INVALID, "invalid", ""),
    "calls pytest.exit": (
        "PRELUDE\nimport pytest\ndef test(): has_s02() and pytest.exit('', returncode=0)",
        INVALID, "invalid", ""),
    "fails when imported": (
        "PRELUDE\nassert not has_s02()\ndef test(): pass", INVALID, "invalid", ""),
}
# fmt: on


ANOTHER_OF_ITS_KIND = {
    "syntax error",
    "sys.exit when imported",
    "pytest.exit in a test",
    "kills itself",
    "closes all files",
    "red in teardown",
    "sys.exit in a test",
    "imported before planting",
    "the cache by its path",
    "ignoring signals",
    "in one call",
    "in teardown",
    "calls pytest.exit",
    "no test, and nothing else",
}
"""Of these each of the many suites has one like it in every run."""
APART = {"reloaded", "imported anew", "deleted for good", "manners", "pytest within pytest"}
"""Of those that kill: the others would notice."""
TOGETHER = {
    end: {
        f"test_{number}.py": text
        for number, (name, (text, _, status, _)) in enumerate(GRADED.items())
        if status == end and name not in APART and not name.startswith("no test")
    }
    for end in ("killed", "survived")
}


def cases(table: dict[str, Any], *, alone: bool = False) -> Any:
    """The rows of a table as parameters; `long` if another is like it, or if it is also run with others."""
    others = (
        ANOTHER_OF_ITS_KIND if not alone else {*GRADED} - {"fails", "no test", "exits", "fails when imported"}
    )
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else [row]),
            id=name,
            marks=pytest.mark.long if name in others else (),
        )
        for name, row in table.items()
    ]


@pytest.mark.parametrize(("suite_of", "code", "words"), cases(NEVER_A_BASELINE))
def test_without_a_baseline_there_is_no_verdict(grade: Grade, suite_of: Any, code: int, words: str) -> None:
    verdict = grade(suite_of)
    assert (verdict.code, verdict.grade) == (code, None), verdict
    assert words in verdict.message


@pytest.mark.parametrize("suite_of", cases(HANGS))
def test_a_suite_that_hangs_is_ended(grade: Grade, suite_of: str) -> None:
    verdict = grade(suite_of, timeout=3)
    assert verdict.code == BASELINE
    assert "do not end within 3 s (--timeout)" in verdict.message


@pytest.mark.parametrize(("suite_of", "code", "status", "words"), cases(GRADED, alone=True))
def test_with_the_bug_alone(grade: Grade, suite_of: Any, code: int, status: str, words: str) -> None:
    verdict = grade(suite_of)
    assert (verdict.code, verdict.statuses) == (code, {"s02": status}), verdict
    assert words in verdict.message


def test_each_of_these_kills(grade: Grade) -> None:
    verdict = grade(TOGETHER["killed"], keep_going=True)
    assert verdict.code == PASS, verdict
    killers = {name.partition("::")[0].rpartition("/")[2] for name in verdict.grade.results[0].killed_by}
    assert killers == TOGETHER["killed"].keys()


def test_none_of_these_kills(grade: Grade) -> None:
    verdict = grade(TOGETHER["survived"], keep_going=True)
    assert (verdict.code, verdict.statuses) == (WEAK, {"s02": "survived"}), verdict
    assert "the score is 0%" in verdict.message


@pytest.mark.parametrize("name", sorted(APART))
def test_this_one_kills_too(kills: Callable[..., set[str]], name: str) -> None:
    assert kills(GRADED[name][0]) & {"test", "test_inner"}
