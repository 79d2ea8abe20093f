"""The `tinyllm` command."""

import signal
import sys
from collections.abc import Sequence

from tinyllm.cli import streams

EXTRAS = {
    **dict.fromkeys(("hypothesis", "jinja2", "pytest", "rich", "typer"), "check"),
    **dict.fromkeys(("gguf", "platformdirs", "tokenizers"), "model"),
    "distributed": "cluster",
}
"""What the command cannot do without, and `tinyllm.infer` can; and which extra brings it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code; `arguments` are those of the command line by default."""
    streams.prepare()
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) == signal.SIG_DFL:  # `nohup` has it ignored
            signal.signal(number, _leave)
    with streams.errors_told():
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
            f"tinyllm: {error.name} is missing; it is in the extra: "
            f"pip install 'tinyllm-paged[{EXTRAS[error.name]}]'",
            file=sys.stderr,
        )
        sys.exit(2)


def need(*modules: str) -> None:
    """Raise ModuleNotFoundError unless these are installed: before work that needs them elsewhere begins."""
    from importlib.util import find_spec  # noqa: PLC0415

    for name in modules:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)  # not at once: processes and temporary files are cleared away on the way out
