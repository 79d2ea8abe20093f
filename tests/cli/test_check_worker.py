"""Step 1 of `check`, called here: what it sends, and how it ends."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyllm.cli.check_worker import Held, Programs, Progress, as_json, hold

Hold = Callable[..., tuple[Held, list[Any]]]


@pytest.fixture
def held(tmp_path: Path, reference: str) -> Hold:
    """Holds the reference, with one thing replaced, to the laws."""

    def run(old: str = "", new: str = "") -> tuple[Held, list[Any]]:
        path = tmp_path / "paged.py"
        assert not old or reference.count(old) == 1
        path.write_text(reference.replace(old, new) if old else reference, encoding="utf-8")
        sent: list[Any] = []
        return hold(sent.append, str(path), "dev", 0), sent

    return run


@pytest.mark.long
def test_a_right_one(held: Hold) -> None:
    found, sent = held()
    assert found.passed
    assert found.programs >= 100
    assert found.lines > found.programs
    begun = [event.name for event in sent if isinstance(event, Progress) and event.seconds is None]
    ended = [event.name for event in sent if isinstance(event, Progress) and event.seconds is not None]
    assert begun == ended
    assert len(set(begun)) > 20
    assert [event.count for event in sent if isinstance(event, Programs)][-1] == found.programs


def test_a_broken_law(held: Hold) -> None:
    found, sent = held("[refs[block] + 1 for block in table]", "[refs[block] for block in table]")
    assert (found.passed, found.law) == (False, 8)
    assert found.story
    assert found.trace
    assert sent[-1].problem == "law 8 is broken"
    assert json.loads(json.dumps(as_json(found)))["check"] == found.name


@pytest.mark.parametrize("error", ["NotImplementedError", "SystemExit(3)", "ZeroDivisionError('no')"])
def test_a_constructor_that_raises(held: Hold, error: str) -> None:
    line = '        self.num_blocks = as_size("num_blocks", num_blocks, 2**31 - 1)\n'
    found, sent = held(line, f"        raise {error}\n")
    first = sent[1]
    assert not found.passed
    if error == "NotImplementedError":
        assert (found.unwritten, first.problem) == ("__init__", "__init__ is not written yet")
        assert {one.kind for one in sent} == {"catalogue"}, "it stops there"
    else:
        assert first.problem.startswith(error.partition("(")[0])
        assert "(paged.py, line " in first.problem


def test_one_that_cannot_be_used(tmp_path: Path) -> None:
    found = hold(print, str(tmp_path / "none.py"), "dev", 0)
    assert not found.passed
    assert found.unusable.startswith("there is no file ")


def test_what_is_not_offered(held: Hold) -> None:
    line = "    _closed = True  #"
    found, _ = held(line, f"    capabilities = frozenset({{'nonsense'}})\n{line}")
    assert "nonsense" in found.unusable
