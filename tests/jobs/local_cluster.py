"""A Dask cluster in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distributed import LocalCluster


@contextmanager
def local(workers: int) -> Iterator[Any]:
    """A scheduler and its workers, a thread each; what they say to each other goes through TCP."""
    options = {"protocol": "tcp", "host": "127.0.0.1", "dashboard_address": ":0", "silence_logs": 50}
    made: Any = LocalCluster
    with made(n_workers=workers, threads_per_worker=1, processes=False, **options) as cluster:
        yield cluster


def address(cluster: Any) -> str:
    """As the command takes it."""
    return str(cluster.scheduler_address.replace("tcp://", "dask://"))
