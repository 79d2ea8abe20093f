"""What the tests of the kit share: caches by name, and a way to watch a law break."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tinyllm.grading.bugs import load_set, reference
from tinyllm.testing.adapters.loading import load
from tinyllm.testing.catalogue import CATALOGUE
from tinyllm.testing.contract import Factory
from tinyllm.testing.directed import DIRECTED
from tinyllm.testing.laws import LawBroken
from tinyllm.testing.run import replay

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def named(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Factory]:
    """A cache by name: `s06`, the reference with that bug; `wrong_caches:LiveTable`, a class beside this."""
    folder = tmp_path_factory.mktemp("buggy")

    def find(name: str) -> Factory:
        file, colon, cls = name.partition(":")
        if colon:
            return load(f"{HERE / file}.py:{cls}")
        (bug,) = [bug for bug in load_set("all") if bug.id == name]
        path = folder / f"{name}.py"
        path.write_text(bug.planted(reference()).source, encoding="utf-8")
        return load(str(path))

    return find


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit without the three of its checks that take a second each; they have tests of their own."""
    monkeypatch.delitem(CATALOGUE, "test_random_ops_conserve_blocks")
    for name in [name for name in DIRECTED if name[0].isdigit()]:
        monkeypatch.delitem(DIRECTED, name)


@pytest.fixture
def breaks() -> Callable[[Callable[[], object]], LawBroken]:
    """Run an act that must break a law: the LawBroken that comes, bare, is handed back."""

    def see(act: Callable[[], object]) -> LawBroken:
        with pytest.raises(LawBroken) as caught:
            act()
        assert type(caught.value) is LawBroken
        return caught.value

    return see


@pytest.fixture
def again(breaks: Callable[[Callable[[], object]], LawBroken]) -> Callable[[Factory, LawBroken], None]:
    """The program of a broken law, replayed, breaks the same law in the same words."""

    def see(factory: Factory, broken: LawBroken) -> None:
        other = breaks(lambda: replay(factory, broken.trace))
        assert (other.law, other.name) == (broken.law, broken.name)
        assert (other.expected, other.found) == (broken.expected, broken.found)

    return see


@pytest.fixture
def run_story() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Paste the program out of a story into a fresh interpreter."""

    def run(story: str) -> subprocess.CompletedProcess[str]:
        program = re.search(r"^  from tinyllm.*?^  \"\"\"\)$", story, re.DOTALL | re.MULTILINE)
        assert program, story
        lines = [line[2:] for line in program[0].splitlines()]
        return subprocess.run(
            [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False, cwd=HERE
        )

    return run
