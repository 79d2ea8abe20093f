"""Files that a command writes."""

import os
from pathlib import Path

from rich.markup import escape

from tinyllm.cli.screen import fail, terminal
from tinyllm.exit_codes import USAGE


def append(path: Path, summary: str) -> None:
    """Append to the summary of the job; a failure is reported on stderr and changes no exit code."""
    from tinyllm.grading import report  # noqa: PLC0415 - heavy

    try:
        report.append(path, summary)
    except OSError as error:
        said = f"the summary of the job cannot be written: {error.strerror}"
        terminal(stderr=True).print(f"[yellow]tinyllm:[/yellow] {escape(said)}", soft_wrap=True)


def check_writable(*paths: Path | None) -> None:
    """Exit with a message when a file could not be written; called before the work begins."""
    for path in filter(None, paths):
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            why = "it is a folder" if path.is_dir() else "its folder is not there, or not writable"
            fail(USAGE, f"{path} cannot be written: {why}")


def write(path: Path, content: object) -> None:
    """Write one file; exits with a message when it cannot be written."""
    from tinyllm.grading import report  # noqa: PLC0415

    try:
        report.write(path, content)  # type: ignore[arg-type]
    except OSError as error:
        fail(USAGE, f"{path} cannot be written: {error.strerror}")
