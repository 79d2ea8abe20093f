"""Standard streams that are closed, full, without a reader, or limited in characters."""

import codecs
import contextlib
import errno
import io
import os
import re
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinyllm.exit_codes import UNREAD, USAGE
from tinyllm.grading.foreign import visible

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
PLAIN = dict(zip("✓✗█━╸\u2013\u2014\u2018\u2019\u201c\u201d", "+x#----''\"\"", strict=True))
PLAIN |= dict.fromkeys(map(chr, range(0x2800, 0x2900)), "*")  # rich's spinner
HANDLER = "tinyllm.plain"
COMMAND = re.compile(r"(?<![^\n\r])[^\S\n\r]*::|##\[")
"""The start of a GitHub workflow command: `::` after blanks at the start of a line, `##[` anywhere."""


def prepare() -> None:
    """Open every closed stream, and let each take any text."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # the next file opened would get this number, and the output
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    codecs.register_error(HANDLER, plain)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=HANDLER)
            if os.environ.get("GITHUB_ACTIONS") == "true" and not isinstance(stream, Harmless):
                setattr(sys, name, Harmless(stream))


class Harmless(io.TextIOWrapper):
    """A stream under GitHub Actions, in which no text is a workflow command.

    The last character of a command's start is written as an escape, which JSON reads as that character.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        how = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        encoding = stream.encoding
        super().__init__(stream.detach(), encoding, HANDLER, **how)  # type: ignore[arg-type]
        self._before = ""  # of the line: a command may come in pieces

    def write(self, text: str) -> int:
        """Write a text, with the start of a command escaped."""
        whole = COMMAND.sub(_as_text, self._before + text)
        super().write(whole[len(self._before) :])
        line = re.split("[\n\r]", whole)[-1]
        self._before = line if line.strip() in {"", ":"} else f"x{line[-2:]}"
        return len(text)

    def command(self, line: str) -> None:
        """Write a workflow command."""
        super().write(f"{line}\n")
        self._before = ""


def _as_text(found: re.Match[str]) -> str:
    return f"{found[0][:-1]}\\u{ord(found[0][-1]):04x}"


def command(line: str) -> None:
    """Print a workflow command for GitHub Actions."""
    if isinstance(sys.stdout, Harmless):
        sys.stdout.command(line)
    else:
        print(line)  # noqa: T201 - unwrapped: a console may break it into lines


def plain(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an encoding lacks by similar ASCII, or by a question mark.

    Raises:
        UnicodeError: the given error, if it is not one of encoding.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(character: str) -> str:
    parts = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return PLAIN.get(character) or parts or "?"


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn an OSError into a message and an exit, a broken pipe into a silent exit."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _leave(UNREAD)
    except OSError as error:
        _leave(USAGE, _said(error))
    except SystemExit as ended:
        if isinstance(
            ended.__context__, BrokenPipeError
        ):  # rich and typer end with 1 then, a verdict of ours
            _leave(UNREAD)
        raise


def _said(error: OSError) -> str:
    try:
        Path.cwd()
    except OSError:
        return "the current folder is gone, or cannot be entered"
    why = error.strerror or str(error)
    if error.filename is None:
        return f"the output cannot be written: {why}" if error.errno in FULL else f"the system refuses: {why}"
    return f"{os.fsdecode(error.filename)}: {why}"


def _leave(code: int, message: str = "") -> None:
    """Exit without writing anything more."""
    if message:
        with contextlib.suppress(OSError):
            print(f"tinyllm: {visible(message)}", file=sys.stderr, flush=True)  # noqa: T201 - rich may be what failed
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
    sys.exit(code)
