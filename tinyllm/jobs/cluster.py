"""A Dask cluster as an executor of units of work.

Dask schedules: a unit whose worker dies goes to another. This module adds the files of a unit (`bundle`),
its process (`remote`), and clear errors.
"""

import logging
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, InvalidStateError
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

from tinyllm.jobs import remote
from tinyllm.jobs.bundle import Bundle
from tinyllm.jobs.remote import RemoteError, Versions

SCHEME = "dask://"
WAIT = 5.0  # seconds to wait for the scheduler, and for its first worker
LOOK = 1.0  # seconds between two counts of the workers
ALONE = 60.0  # seconds without a worker after which the work is given up
RETRIES = 2  # of a unit whose process died; Dask itself retries those of a dead worker


class ClusterError(Exception):
    """The cluster cannot be used, or was lost."""


def _hush() -> None:
    """Silence Dask's logging of a lost cluster; a ClusterError says it in a line."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "distributed":
            logging.getLogger(name).setLevel(logging.CRITICAL)


class Cluster(Executor):
    """The workers of a Dask scheduler.

    Args:
        address: `dask://HOST:PORT`, of the scheduler.
        bundle: the files that every unit carries.

    Raises:
        ClusterError: there is no scheduler or no worker, or a worker has other versions.
        ModuleNotFoundError: the extra `cluster` is not installed.
    """

    def __init__(self, address: str, bundle: Bundle) -> None:
        from distributed import Client  # noqa: PLC0415 - of the extra `cluster`

        if not address.startswith(SCHEME) or ":" not in address.removeprefix(SCHEME):
            raise ClusterError(f"{address}: a cluster is named as {SCHEME}HOST:PORT, by its scheduler")
        _hush()
        self.address = address
        self._bundle = bundle
        self._versions = remote.versions()
        try:
            connect: Any = Client  # it has no types
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of versions that differ: see below
                self._client = connect("tcp://" + address.removeprefix(SCHEME), timeout=WAIT)
        except (OSError, ValueError, TimeoutError) as error:
            raise ClusterError(f"no Dask scheduler answers at {address}: {error}") from error
        try:
            self._compare()
        except BaseException:
            self._client.close()
            raise
        self._executor = self._client.get_executor(pure=False, retries=RETRIES)
        self._pending: set[Future[Any]] = set()
        self._closed = Event()
        Thread(target=self._watch, daemon=True).start()

    def _compare(self) -> None:
        try:
            self._client.wait_for_workers(1, timeout=WAIT)
        except TimeoutError as error:
            raise ClusterError(f"the cluster at {self.address} has no worker") from error
        try:
            found: dict[str, Versions] = self._client.run(remote.versions)
        except Exception as error:  # Dask raises its own error for a missing module
            text = f"the workers of {self.address} cannot do this; they need tinyllm-paged[cluster]: {error}"
            raise ClusterError(text) from error
        for worker, versions in found.items():
            if differ := remote.differences(self._versions, versions):
                raise ClusterError(f"the worker {worker} would decide otherwise: {differ}")

    @property
    def threads(self) -> int:
        """The number of units that the cluster runs at once now, at least 1. Raises ClusterError."""
        with self._lost():
            return max(1, sum(int(count) for count in self._client.nthreads().values()))

    def place(self, path: str) -> str:
        """The name of a path of this machine on a worker."""
        return self._bundle.place(path)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a worker call `fn(*args)` in a process of its own.

        The future fails with ClusterError if the cluster is lost or refuses the work.
        """
        if kwargs:
            raise TypeError(f"a unit takes no keywords: {sorted(kwargs)}")
        unit = pickle.dumps((fn, args))
        done: Future[Any] = Future()
        with self._lost():
            inner = self._executor.submit(remote.away, self._versions, self._bundle, unit)
        self._pending.add(done)
        done.add_done_callback(self._pending.discard)
        inner.add_done_callback(lambda one: self._pass_on(one, done))
        done.add_done_callback(lambda one: inner.cancel() if one.cancelled() else None)
        return done

    def _pass_on(self, inner: Future[Any], done: Future[Any]) -> None:
        if done.done() or not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(inner.result())
        except CancelledError:
            done.set_exception(self._gone())
        except RemoteError as error:
            done.set_exception(ClusterError(f"a worker of {self.address} could not do its work: {error}"))
        except Exception as error:  # such as KilledWorker: several workers in a row died
            text = f"the cluster at {self.address} gave up: {type(error).__name__}: {error}"
            done.set_exception(ClusterError(text))

    @contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self._gone() from error

    def _gone(self) -> ClusterError:
        return ClusterError(f"the cluster at {self.address} was lost: its scheduler is gone")

    def _watch(self) -> None:
        """Fail the pending units after `ALONE` seconds without a worker; Dask would wait for ever."""
        since = time.monotonic()
        while not self._closed.wait(LOOK):
            with suppress(Exception):  # the futures notice a lost scheduler
                if any(self._client.nthreads().values()):
                    since = time.monotonic()
            if time.monotonic() - since > ALONE:
                for one in list(self._pending):
                    with suppress(InvalidStateError):
                        one.set_exception(ClusterError(f"the cluster at {self.address} has no worker left"))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, and cancel its unfinished units."""
        del wait, cancel_futures
        self._closed.set()
        self._executor.shutdown(wait=False)
        self._client.close(timeout=2)
