"""The kit's machine on the reference cache."""

from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.check import run_machine
from tinyllm.testing.machine import CacheMachine, shard
from tinyllm.testing.profiles import current_profile


def test_machine(cache_shard: int) -> None:
    run_machine(PagedKVCache, shard(CacheMachine, cache_shard, PagedKVCache), current_profile())
