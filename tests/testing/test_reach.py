"""What a program reaches is counted from the oracle, line by line."""

from collections import Counter

import pytest

from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.contract import CAPABILITIES
from tinyllm.testing.reach import FEATURES, Meter, missed
from tinyllm.testing.run import Run
from tinyllm.testing.trace import parse

EVERYTHING = frozenset(CAPABILITIES) | {"truncate"}


def measured(text: str) -> Counter[str]:
    """The most of each feature in a program; what is 0 left out."""
    run, meter = Run(PagedKVCache), Meter()
    for op in parse(text):
        before = dict(run.oracle.tables)
        run.step(op)
        meter.note(op, before, run)
    return +meter.most


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("new 4 2 1 1 2", {"lines": 1}),
        ("new 4 2 1 1 1\nadd 0\nfree 0\nadd 0\nadd 1", {"lines": 5, "live": 2, "lives": 2}),
        (
            "new 4 2 2 1 1\nadd 0\nappend 0 1 5",
            {"lines": 3, "live": 1, "lives": 1, "taken": 3, "table": 3, "ragged": 2},
        ),
        ("new 4 2 1 1 1\nadd 0\nadd 1\nfree 0\nadd 0", {"lines": 5, "live": 2, "lives": 2}),
        (  # whole blocks apart, whatever the positions are; a truncate inside a block of its own
            "new 4 2 2 1 1\nadd 0\nappend 0 1 1\nappend 0 0 2\ntruncate 0 1",
            {"lines": 5, "live": 1, "lives": 1, "taken": 1, "table": 1, "ragged": 1},
        ),
        (  # three generations hold one block; the last of them frees
            "new 4 2 1 1 1\nadd 0\nappend 0 0 1\nfork 0 1\nfork 1 2\nfree 2",
            {"lines": 6, "live": 3, "lives": 1, "generations": 2, "sharing": 3, "taken": 1, "table": 1},
        ),
        (  # a layer that lags writes into two blocks of its parent
            "new 8 2 2 1 1\nadd 0\nappend 0 0 4\nfork 0 1\nappend 1 1 4",
            {"lines": 5, "live": 2, "lives": 1, "generations": 1, "sharing": 2, "ragged forks": 1}
            | {"taken": 2, "table": 2, "ragged": 2, "copied": 2},
        ),
        (  # a block more than there is; then only the copy is too much
            "new 1 2 1 1 1\nadd 0\nappend 0 0 3 ! OutOfBlocks\nappend 0 0 1\nfork 0 1\n"
            "append 0 0 1 ! OutOfBlocks",
            {"lines": 6, "live": 2, "lives": 1, "generations": 1, "sharing": 2, "taken": 1, "table": 1}
            | {"refused": 2, "copies refused": 1},
        ),
        (
            "new 4 2 1 1 1\nadd 0\nappend 0 0 7\nfork 0 1\ntruncate 1 3\ntruncate 0 2",
            {"lines": 6, "live": 2, "lives": 1, "generations": 1, "sharing": 2, "taken": 4, "table": 4}
            | {"dropped": 3, "cut": 1},
        ),
        (
            "new 4 2 1 1 1\nadd 0\nadd 0 ! ValueError\nfree 7 ! KeyError",
            {"lines": 4, "live": 1, "lives": 1, "wrong": 2},
        ),
    ],
)
def test_a_program_is_measured(text: str, most: dict[str, int]) -> None:
    assert measured(text) == most


def test_a_step_is_reached_by_all_that_is_beyond_it() -> None:
    meter = Meter()
    meter.most.update({"sharing": 5, "lives": 1})
    assert meter.reached() == {("sharing", 2): 1, ("sharing", 4): 1}


def test_what_no_program_came_to() -> None:
    every = Counter({(name, step): 1 for name, one in FEATURES.items() for step in one.steps})
    assert missed(every, EVERYTHING) == []
    del every["copied", 8], every["dropped", 2], every["dropped", 4]
    assert missed(every, EVERYTHING) == [
        "shared blocks that one append copied: 8 or more",
        "blocks that one truncate gave back: 2 or more",
    ]
    assert missed(every, frozenset({"fork"})) == ["shared blocks that one append copied: 8 or more"]
    assert missed(every, frozenset()) == []


def test_steps_ascend_and_needs_exist() -> None:
    for one in FEATURES.values():
        assert len(one.steps) == 4
        assert list(one.steps) == sorted(set(one.steps))
        assert not one.needs or one.needs in EVERYTHING
