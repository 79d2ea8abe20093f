"""The kit as pytest tests of the cache that `--cache-impl` names.

pytest --pyargs tinyllm.testing --cache-impl=path/to/paged.py
"""

from collections.abc import Callable

import pytest

from tinyllm.testing.catalogue import CATALOGUE
from tinyllm.testing.check import (
    SECONDS,
    run_directed,
    run_entry,
    run_machine,
    search_seconds,
)
from tinyllm.testing.contract import Factory
from tinyllm.testing.directed import DIRECTED
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.profiles import current_profile
from tinyllm.testing.time_limit import CutShort, limited
from tinyllm.testing.trace import NotOffered


def _hold(act: Callable[[], None], seconds: float = SECONDS) -> None:
    try:
        with limited(seconds):
            act()
    except NotOffered as needed:
        pytest.skip(f"not offered: {needed}")
    except CutShort as cut:
        pytest.skip(str(cut))


@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue(name: str, cache_factory: Factory) -> None:
    _hold(lambda: run_entry(cache_factory, name))


@pytest.mark.parametrize("name", DIRECTED)
def test_directed(name: str, cache_factory: Factory) -> None:
    _hold(lambda: run_directed(cache_factory, name))


def test_machine(cache_shard: int, cache_factory: Factory) -> None:
    machine, settings = shard(CacheMachine, cache_shard, cache_factory), current_profile()
    _hold(lambda: run_machine(cache_factory, machine, settings), search_seconds(settings))
