"""The kit as pytest sees it: options, shards, seeds, and failures that are told and not dumped."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tinyllm.infer import paged
from tinyllm.testing.directed import DIRECTED

pytest_plugins = ["pytester"]

HERE = Path(__file__).parent
RIGHT = Path(paged.__file__)
WRONG = f"{HERE / 'wrong_caches.py'}:LeaksWhenRefused"
ALWAYS_WRONG = f"{HERE / 'wrong_caches.py'}:GathersFloat32"
KIT = ("--pyargs", "tinyllm.testing")
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Pytest in an empty folder, under a profile of a few examples; in a process of its own if it says so."""
    before = settings.get_current_profile_name()
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest(
        "from hypothesis import settings\n"
        "from tinyllm.testing.profiles import profile\n"
        "settings.register_profile('tinyllm-few', settings(profile('ci'), max_examples=4))\n"
        "settings.load_profile('tinyllm-few')\n"
    )

    def go(*args: str, process: bool = False) -> pytest.RunResult:
        start = pytester.runpytest_subprocess if process else pytester.runpytest_inprocess
        return start("-p", "no:cacheprovider", *args)

    yield go
    settings.load_profile(before)


def test_a_copy_of_the_reference_passes(run: Run, pytester: pytest.Pytester) -> None:
    copy = pytester.path / "mine.py"
    copy.write_text(RIGHT.read_text(encoding="utf-8"), encoding="utf-8")
    slow = [name for name in DIRECTED if "776" in name or "000" in name]
    result = run(*KIT, "--cache-impl=mine.py", "--shards", "3", "-k", "not 776 and not 000", "-v")
    result.assert_outcomes(passed=10 + len(DIRECTED) - len(slow) + 3, deselected=len(slow))
    for i in range(3):
        result.stdout.fnmatch_lines([f"*::test_machine?shard-{i}? PASSED*"])
    result.stdout.fnmatch_lines(["tinyllm: --shard-seed=*"])


def test_a_wrong_cache_fails_with_the_story(run: Run) -> None:
    result = run(*KIT, f"--cache-impl={WRONG}", "-k", "refused")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "*law 10, atomicity: A call that raises leaves everything observable as it was.",
            "*expected  stats() == {'free': 1, *",
            "*found     {'free': 0, *",
            "*LeaksWhenRefused = load('*wrong_caches.py:LeaksWhenRefused')",
            "*append 0 0 2 ! OutOfBlocks",
        ]
    )


PROGRAMS = """
from hypothesis import settings
from tinyllm.testing.check import run_machine
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.profiles import current_profile

def test_programs(cache_shard, cache_factory, request):
    machine = shard(CacheMachine, cache_shard, cache_factory)
    run_machine(cache_factory, machine, current_profile())
    with open(f"{request.config.rootpath}/seen", "a") as file:
        print(cache_shard, machine.search.programs, machine.search.lines, file=file)
"""


@pytest.fixture
def seen(run: Run, pytester: pytest.Pytester) -> Callable[..., list[str]]:
    """What each shard drew, by its seed: a line a shard."""
    pytester.makepyfile(test_programs=PROGRAMS)

    def go(*args: str) -> list[str]:
        path = pytester.path / "seen"
        path.unlink(missing_ok=True)
        result = run(*args, process=True)  # how it draws depends on what its process drew before
        assert result.ret == 0, result.stdout.str()
        return sorted(path.read_text().splitlines())

    return go


def test_workers_share_a_seed_that_was_drawn_and_printed_and_given_it_repeats_a_shard(
    seen: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Shard i adds i."""
    lines = seen("--shards", "2", "-n", "2")
    (drawn,) = re.findall(r"tinyllm: --shard-seed=(\d+)", capsys.readouterr().out)
    seeds = [line.split()[0] for line in lines]
    assert seeds == [str(int(drawn) + i) for i in range(2)]
    assert seen("--shard-seed", seeds[1]) == lines[1:]


@pytest.mark.long
def test_a_shard_is_what_it_was_by_the_seed_of_hypothesis_too(seen: Callable[..., list[str]]) -> None:
    assert seen("--shards", "2", "--shard-seed", "7") == seen("--hypothesis-seed", "7") + seen(
        "--shard-seed", "8"
    )


def test_without_a_request_nothing_is_said(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = run("--hypothesis-seed", "random", process=True)  # Hypothesis would keep it
    result.assert_outcomes(passed=1)
    assert "tinyllm: " not in result.stdout.str()


BAD: dict[tuple[str, ...], tuple[int, str]] = {
    ("--shards", "0"): (4, "ERROR: --shards is 0; it must be at least 1"),
    ("--shards", "-3"): (4, "ERROR: --shards is -3; it must be at least 1"),
    ("--shards", "many"): (4, "*--shards: invalid int value: 'many'"),
    ("--cache-impl", "no/such/file.py"): (2, "*--cache-impl: there is no file no/such/file.py*"),
    ("--cache-impl", "no.such"): (2, "*--cache-impl: there is no module 'no.such' here;*"),
    ("--cache-impl", "json"): (2, "*--cache-impl: json defines no PagedKVCache;*"),
}


@pytest.mark.parametrize("args", BAD, ids=" ".join)
def test_a_bad_option_is_said_in_words_and_shows_in_the_exit_code(args: tuple[str, ...], run: Run) -> None:
    code, words = BAD[args]
    result = run(*KIT, *args, "-x")
    assert result.ret == code
    result.stdout.fnmatch_lines([words]) if code == 2 else result.stderr.fnmatch_lines([words])
    for text in (result.stdout.str(), result.stderr.str()):
        assert "Traceback" not in text
        assert "INTERNALERROR" not in text


def test_a_bad_implementation_is_said_by_workers_too(run: Run) -> None:
    result = run(*KIT, "--cache-impl", "no.such", "-n", "1", "-k", "hand")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["--cache-impl: there is no module 'no.such' here;*"])
    for word in ("INTERNALERROR", "Traceback", "crashed"):
        assert word not in result.stdout.str()


SUBCLASS = f"""
from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing import CacheMachine, load, state_machine_test

class Mine(CacheMachine):
    def make_cache(self, config):
        return PagedKVCache(*config)

class Wrong(CacheMachine):
    def make_cache(self, config):
        return load({ALWAYS_WRONG!r})(*config)

TestMine = state_machine_test(Mine)
TestWrong = state_machine_test(Wrong)
"""


def test_the_subclass_door(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_subclass=SUBCLASS)
    result = run("-v")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*TestMine*PASSED*", "*TestWrong*FAILED*", "*law 3, contents*"])
    assert "ExceptionGroup" not in result.stdout.str()


def test_the_options_are_in_the_help(run: Run) -> None:
    result = run("--help")
    result.stdout.fnmatch_lines(
        ["*paged KV caches:", "*--cache-impl=IMPL*", "*--shards=*", "*--shard-seed=*"]
    )


def test_loading_the_plugin_imports_nothing_heavy(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import sys\n"
        "def test_light():\n"
        "    loaded = {name for name in sys.modules if name.startswith('tinyllm')}\n"
        "    ours = {f'tinyllm.{name}{end}' for name in ('testing', 'grading') for end in ('', '.plugin')}\n"
        "    assert loaded <= {'tinyllm', *ours}, loaded\n"
    )
    pytester.path.joinpath("conftest.py").unlink()
    result = run("-p", "no:hypothesispytest", process=True)
    result.assert_outcomes(passed=1)


@pytest.fixture
def folder(pytester: pytest.Pytester) -> None:
    """An engine in a folder that has a configuration of its own, in which the kit cannot run."""
    engine = pytester.mkdir("engine")
    (engine / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (engine / "paged.py").write_text(RIGHT.read_text(encoding="utf-8"), encoding="utf-8")


@pytest.mark.usefixtures("folder")
def test_a_path_is_given_with_an_equals_sign(
    run: Run, monkeypatch: pytest.MonkeyPatch, pytester: Any
) -> None:
    run(*KIT, "--cache-impl=engine/paged.py", "-k", "hand_example").assert_outcomes(
        passed=1, deselected=len(DIRECTED) + 10
    )
    (pytester.path / "engine/pytest.ini").write_text("[pytest]\naddopts = -q\n")
    said = "ERROR: --cache-impl engine/paged.py: write --cache-impl=engine/paged.py; *"
    refused = run(*KIT, "--cache-impl", "engine/paged.py")
    assert refused.ret == 4
    refused.stderr.fnmatch_lines([said])
    monkeypatch.setenv("PYTEST_ADDOPTS", "--cache-impl engine/paged.py")
    refused = run(*KIT)
    assert refused.ret == 4
    refused.stderr.fnmatch_lines([said])


def test_capabilities_that_are_none_are_said(run: Run, pytester: pytest.Pytester) -> None:
    text = "from tinyllm.infer.paged import PagedKVCache as R\nclass PagedKVCache(R): capabilities = 'fork'\n"
    (pytester.path / "mine.py").write_text(text)
    result = run(*KIT, "--cache-impl=mine.py", "-k", "hand_example")
    assert result.ret == 2
    result.stdout.fnmatch_lines(["*--cache-impl: capabilities is 'fork' (str); it must be a set of names*"])
