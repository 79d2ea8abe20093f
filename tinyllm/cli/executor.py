"""Where the work of a command is done: in threads here, each with its process, or on a cluster."""

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
    """An executor; how many units it does at once; how a path is named where they are done."""

    executor: "Executor"
    size: Callable[[], int]
    place: Callable[[str], str]
    away: bool


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def pool(address: str | None, jobs: int | None, bundle: "Callable[[], Bundle]") -> Iterator[Pool]:
    """Threads of our own, or the cluster at `address`, whose units take the bundle along.

    Leaving the context cancels what has not begun; exits with a message where there is no such cluster.
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
        fail(USAGE, "-j is for this machine; how much a cluster does at once, its workers say")
    try:
        cluster = Cluster(address, bundle())
    except (ClusterError, BundleError) as error:
        fail(USAGE, str(error))
    return Pool(cluster, lambda: cluster.threads, cluster.place, away=True)
