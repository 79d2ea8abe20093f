"""The kit as pytest tests of the cache that `--cache-impl` names.

pytest --pyargs tinyllm.testing --cache-impl path/to/paged.py
"""

import pytest

from tinyllm.testing.catalogue import CATALOGUE
from tinyllm.testing.check import run_directed, run_entry, run_machine
from tinyllm.testing.contract import Factory
from tinyllm.testing.directed import DIRECTED
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.profiles import current_profile
from tinyllm.testing.trace import NotOffered


@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue(name: str, cache_factory: Factory) -> None:
    try:
        run_entry(cache_factory, name)
    except NotOffered as needed:
        pytest.skip(f"not offered: {needed}")


@pytest.mark.parametrize("name", DIRECTED)
def test_directed(name: str, cache_factory: Factory) -> None:
    try:
        run_directed(cache_factory, name)
    except NotOffered as needed:
        pytest.skip(f"not offered: {needed}")


def test_machine(cache_shard: int, cache_factory: Factory) -> None:
    run_machine(cache_factory, shard(CacheMachine, cache_shard, cache_factory), current_profile())
