"""The `tinyllm` command."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code; `arguments` are those of the command line by default."""
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
