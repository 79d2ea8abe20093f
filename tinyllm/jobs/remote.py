"""Run a unit of work on a worker of a cluster, in a process of its own with the files of its bundle.

A worker is daemonic and may not use multiprocessing, and it has imported modules that a bug may be planted
in. So it starts a fresh interpreter with this module, which refuses if a version that matters differs.
"""

import hashlib
import os
import pickle
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tinyllm.jobs.bundle import Bundle

COMPARED = ("numpy", "hypothesis", "pytest")
START = "from tinyllm.jobs.remote import main; main()"
Versions = dict[str, str]


class RemoteError(RuntimeError):
    """A unit could not run on that machine."""


def versions() -> Versions:
    """The versions that must be equal on every machine."""
    ours = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for file in sorted(ours.rglob("*.py")):
        digest.update(file.relative_to(ours).as_posix().encode() + b"\0" + file.read_bytes())
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "tinyllm-paged": f"{version('tinyllm-paged')}, files {digest.hexdigest()[:12]}",
        **{name: version(name) for name in COMPARED},
    }


def differences(ours: Versions, theirs: Versions) -> str:
    """The differences in words; empty if there are none."""
    return "; ".join(
        f"{name} is {theirs.get(name, 'missing')} there and {ours[name]} here"
        for name in ours
        if ours[name] != theirs.get(name)
    )


def away(expected: Versions, bundle: Bundle, unit: bytes) -> Any:
    """Run a pickled unit, `(function, args)`, in a process of its own; called on a worker.

    Raises:
        RemoteError: versions differ, or the unit gave no result.
    """
    with tempfile.TemporaryDirectory(prefix="tinyllm-away-", ignore_cleanup_errors=True) as folder:
        task, result = Path(folder, "unit"), Path(folder, "result")
        task.write_bytes(pickle.dumps((expected, bundle, unit)))
        output = Path(folder, "output")
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(task), str(result)],
                stdin=subprocess.PIPE,  # nothing is written; it closes when we die
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": folder},
                start_new_session=True,
            )
            try:
                code = process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                process.stdin.close()  # type: ignore[union-attr]
        if code or not result.exists():
            said = output.read_bytes()[-2000:].decode(errors="replace").strip()
            raise RemoteError(f"on {platform.node()} the work ended with {code}: {said}")
        how, value = pickle.loads(result.read_bytes())  # noqa: S301 - our own process wrote it
    if how == "error":
        raise RemoteError(f"on {platform.node()}: {value}")
    return value


def main() -> None:
    """Read the unit, unpack its files, run it, write its result."""
    task, result = map(Path, sys.argv[1:])
    threading.Thread(target=_end_with_worker, args=(task.parent,), daemon=True).start()
    expected, bundle, unit = pickle.loads(task.read_bytes())  # noqa: S301 - the worker wrote it
    if differ := differences(expected, versions()):
        outcome = ("error", f"other versions: {differ}")
    else:
        outcome = _do(bundle, unit, task.parent / "files")
    aside = result.with_suffix(".new")
    aside.write_bytes(pickle.dumps(outcome))
    aside.replace(result)


def _end_with_worker(folder: Path) -> None:
    """When stdin closes, remove the folder and kill the process group."""
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _do(bundle: Bundle, unit: bytes, folder: Path) -> tuple[str, Any]:
    folder.mkdir()
    try:
        os.chdir(bundle.unpack(folder))
        sys.path += [str(folder / one) for one in bundle.path]
        function: Callable[..., Any]
        function, args = pickle.loads(unit)  # noqa: S301 - senders may run anything on this cluster anyway
        return "done", function(*args)
    except Exception:
        return "error", traceback.format_exc()
