"""The golden traces are those that the script writes, and the reference passes each."""

import runpy
from pathlib import Path

import pytest

from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.run import replay

FOLDER = Path(__file__).parent
FILES = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.trace"))}


def test_they_are_not_stale() -> None:
    assert runpy.run_path(str(FOLDER / "generate.py"))["golden"]() == FILES


@pytest.mark.parametrize("name", [name for name in FILES if not name[0].isdigit()])
def test_the_reference_passes(name: str) -> None:
    assert replay(PagedKVCache, FILES[name]).ops
