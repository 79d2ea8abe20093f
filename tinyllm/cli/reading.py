"""Read input files as UTF-8, up to a limit, without waiting for ever."""

import errno
import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from tinyllm.cli.screen import fail
from tinyllm.exit_codes import USAGE

LARGEST = 1 << 26  # bytes of a file; a trace of a million lines has a quarter of it


def text(path: Path, *, stdin: bool = False) -> str:
    """The text of a file, of a pipe, or of stdin if `stdin`; exits with a message if it cannot be read."""
    try:
        data = _whole(sys.stdin.buffer, "stdin") if stdin else _read(path, kept=False)
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(USAGE, f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")


def kept(path: Path) -> bytes:
    """The bytes of a regular file that was found in a folder. Raises OSError."""
    return _read(path, kept=True)


def _read(path: Path, *, kept: bool) -> bytes:
    with open(_opened(path, kept=kept), "rb") as file:
        return _whole(file, str(path))


def _whole(file: BinaryIO, name: str) -> bytes:
    found = file.read(LARGEST + 1)
    if len(found) > LARGEST:
        raise OSError(errno.EFBIG, f"it has more than {LARGEST:,} bytes", name)
    return found


def _opened(path: Path, *, kept: bool) -> int:
    """A descriptor; a pipe without a writer reads as empty, where a blocking open would wait."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode) or not (kept or stat.S_ISDIR(mode)):
        os.set_blocking(number, True)
        return number
    os.close(number)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no regular file", str(path))
