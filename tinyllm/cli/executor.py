"""Executors for the work of a command: local threads, each with a process, or a cluster."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from tinyllm.cli.extras import need
from tinyllm.cli.screen import fail
from tinyllm.exit_codes import USAGE

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from tinyllm.jobs.bundle import Bundle


class Pool(NamedTuple):
    """An executor, the number of units it runs at once, and the name of a path where they run."""

    executor: "Executor"
    size: Callable[[], int]
    place: Callable[[str], str]
    away: bool


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def pool(address: str | None, jobs: int | None, bundle: "Callable[[], Bundle]") -> Iterator[Pool]:
    """Local threads, or the cluster at `address`, whose units carry the bundle.

    Leaving the context cancels units that have not begun. Exits with a message if the cluster cannot be used.
    """
    if address is None:
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - heavy

        size = jobs or cores()
        executor = ThreadPoolExecutor(size, thread_name_prefix="tinyllm")
        made = Pool(executor, lambda: size, str, away=False)
    else:
        made = _cluster(address, jobs, bundle)
    try:
        yield made
    finally:
        made.executor.shutdown(wait=True, cancel_futures=True)


def _cluster(address: str, jobs: int | None, bundle: "Callable[[], Bundle]") -> Pool:
    from tinyllm.jobs.bundle import BundleError  # noqa: PLC0415
    from tinyllm.jobs.cluster import Cluster, ClusterError  # noqa: PLC0415 - heavy

    need("distributed")
    if jobs is not None:
        fail(USAGE, "-j is for this machine; the workers of a cluster set how many units run at once")
    try:
        cluster = Cluster(address, bundle())
    except (ClusterError, BundleError) as error:
        fail(USAGE, str(error))
    return Pool(cluster, lambda: cluster.threads, cluster.place, away=True)
