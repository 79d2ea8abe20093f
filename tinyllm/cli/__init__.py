"""The `tinyllm` command."""

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code; `arguments` are those of the command line by default."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _leave)
    try:
        _run(arguments)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)  # not at once: processes and temporary files are cleared away on the way out


def _run(arguments: Sequence[str] | None) -> None:
    try:
        from tinyllm.cli.app import app  # noqa: PLC0415 - the extra may be missing, and then has to be named
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in {"tinyllm", "mutants"}:
            raise
        print(  # noqa: T201 - rich is what may be missing
            f"tinyllm: {error.name} is missing; it is in the extra: pip install 'tinyllm-paged[check]'",
            file=sys.stderr,
        )
        sys.exit(2)
    app(args=arguments, prog_name="tinyllm")
