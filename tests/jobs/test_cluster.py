"""A Dask cluster as an executor; its scheduler and workers are in this process."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyllm.jobs import bundle, cluster, remote
from tinyllm.jobs.cluster import Cluster, ClusterError

from .local_cluster import address, local


@contextlib.contextmanager
def executor(workers: int = 1) -> Iterator[tuple[Any, Cluster]]:
    """A cluster of its own, and the executor."""
    with local(workers) as made:
        pool = Cluster(address(made), bundle.nothing())
        try:
            yield made, pool
        finally:
            pool.shutdown()


def test_units_that_fail(tmp_path: Path) -> None:
    """An error, the end of its process, and keywords; the next unit is done all the same.

    One whose process is killed once is done again.
    """
    marker = str(tmp_path / "marker")
    once = f"import os, pathlib\nif not pathlib.Path({marker!r}).exists():\n"
    once += f"    pathlib.Path({marker!r}).touch(); os.kill(os.getpid(), 9)"
    with executor(2) as (_, pool):
        assert pool.threads == 2
        with pytest.raises(ClusterError, match=r"(?s)could not do its work: .*ZeroDivisionError"):
            pool.submit(divmod, 1, 0).result(60)
        with pytest.raises(ClusterError, match="the work ended with 3"):
            pool.submit(exec, "import os; os._exit(3)").result(60)
        with pytest.raises(TypeError, match="no keywords"):
            pool.submit(int, base=3)
        assert pool.submit(divmod, 7, 2).result(60) == (3, 1)
        assert pool.submit(exec, once).result(60) is None
        assert Path(marker).exists()


def test_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "WAIT", 1.0)
    with pytest.raises(ClusterError, match=r"the cluster at dask://[\d.:]+ has no worker"), executor(0):
        pass


def test_no_worker_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever."""
    monkeypatch.setattr(cluster, "ALONE", 1.0)
    with executor() as (made, pool):
        made.scale(0)
        while made.workers:
            time.sleep(0.05)
        waiting = pool.submit(divmod, 7, 2)
        with pytest.raises(ClusterError, match=r"the cluster at dask://[\d.:]+ has no worker left"):
            waiting.result(60)


def test_a_scheduler_that_is_lost() -> None:
    with executor() as (made, pool):
        waiting = pool.submit(time.sleep, 30)
        made.close()
        with pytest.raises(
            ClusterError, match=r"the cluster at dask://[\d.:]+ was lost: its scheduler is gone"
        ):
            waiting.result(60)


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker, which is asked second, has another NumPy."""
    ours = remote.versions()
    found = iter([ours, ours | {"numpy": "0.0.1"}])
    monkeypatch.setattr(remote, "versions", lambda: next(found))
    with (
        pytest.raises(ClusterError, match=r"would decide otherwise: numpy is 0\.0\.1 there and "),
        executor(),
    ):
        pass


def test_versions_are_compared_once_more_where_the_work_is_done() -> None:
    """A worker can join later, or be older than what is installed beside it."""
    expected = remote.versions() | {"numpy": "0.0.1"}
    with pytest.raises(remote.RemoteError, match=r"other versions: numpy is .* there and 0\.0\.1 here"):
        remote.away(expected, bundle.nothing(), b"")
