"""A Dask cluster as an executor: units of work go to its workers, each with all that it needs.

Dask does the scheduling: a unit whose worker dies is given to another. What we add is what a unit takes along
(`bundle`), the process that it is done in (`remote`), and words for what can go wrong.
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
WAIT = 5.0  # seconds, for a scheduler that answers, and for its first worker
LOOK = 1.0  # seconds between two looks at how many workers there are
ALONE = 60.0  # seconds without any, after which nobody waits on
RETRIES = 2  # of a unit whose process is gone; those of a worker that is gone are Dask's own


class ClusterError(Exception):
    """The cluster cannot be used, or was lost; the message says which, and what to do."""


def _hush() -> None:
    """What Dask would log of a cluster that is lost, with tracebacks, is said by us in a line."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "distributed":
            logging.getLogger(name).setLevel(logging.CRITICAL)


class Cluster(Executor):
    """The workers of a Dask scheduler.

    Args:
        address: `dask://HOST:PORT`, of the scheduler.
        bundle: the files that every unit takes along.

    Raises:
        ClusterError: no scheduler there, no worker, or one with other versions than here.
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
        except Exception as error:  # Dask has its own way to say that a module is missing
            text = f"the workers of {self.address} cannot do this; they need tinyllm-paged[cluster]: {error}"
            raise ClusterError(text) from error
        for worker, versions in found.items():
            if differ := remote.differences(self._versions, versions):
                raise ClusterError(f"the worker {worker} would decide otherwise: {differ}")

    @property
    def threads(self) -> int:
        """How many units the cluster does at the same time, as of now; at least 1. Raises ClusterError."""
        with self._lost():
            return max(1, sum(int(count) for count in self._client.nthreads().values()))

    def place(self, path: str) -> str:
        """How a path on this machine is named where the work is done."""
        return self._bundle.place(path)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a worker call `fn(*args)` in a process of its own.

        The future fails with ClusterError where the work was not done: the cluster was lost, or refuses.
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
        except Exception as error:  # KilledWorker, say: several workers in a row were gone
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
        """Give up when there has been no worker for long; Dask would wait for ever."""
        since = time.monotonic()
        while not self._closed.wait(LOOK):
            with suppress(Exception):  # a scheduler that is gone is seen by the futures
                if any(self._client.nthreads().values()):
                    since = time.monotonic()
            if time.monotonic() - since > ALONE:
                for one in list(self._pending):
                    with suppress(InvalidStateError):
                        one.set_exception(ClusterError(f"the cluster at {self.address} has no worker left"))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster; what is not done there is cancelled."""
        del wait, cancel_futures
        self._closed.set()
        self._executor.shutdown(wait=False)
        self._client.close(timeout=2)
