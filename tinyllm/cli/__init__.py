"""The `tinyllm` command."""

import signal
import sys
from collections.abc import Sequence

from tinyllm.cli import streams
from tinyllm.cli.extras import EXTRAS

ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that ask the command to end."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code; `arguments` are those of the command line by default."""
    streams.prepare()
    for number in ENDING:
        if signal.getsignal(number) in {
            signal.SIG_DFL,
            signal.default_int_handler,
        }:  # `nohup` has one ignored
            signal.signal(number, _leave)
    with streams.report_errors():
        _run(arguments)


def _run(arguments: Sequence[str] | None) -> None:
    try:
        from tinyllm.cli.app import app  # noqa: PLC0415 - the extra may be missing, and then has to be named

        app(args=arguments, prog_name="tinyllm")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        print(  # noqa: T201 - rich is what may be missing
            f"tinyllm: {error.name} is missing; it is in the extra `{EXTRAS[error.name]}`: "
            "see Getting it in README.md",
            file=sys.stderr,
        )
        sys.exit(2)


def _leave(number: int, _: object) -> None:
    """End the command by an exception, so that cleanup runs; later signals cannot interrupt it."""
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
