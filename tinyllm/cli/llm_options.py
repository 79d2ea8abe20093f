"""What the commands with a language model share: its options, loading it, showing what it says."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tinyllm.cli.extras import need
from tinyllm.cli.options import at_least
from tinyllm.cli.screen import fail
from tinyllm.exit_codes import USAGE
from tinyllm.grading.foreign import visible

if TYPE_CHECKING:
    from tinyllm.llm.llama import Llama
    from tinyllm.llm.tokenizer import Tokenizer

SPREAD = 0.8  # the temperature of several outputs, which would otherwise all be the same

MaxTokens = Annotated[int, typer.Option(parser=at_least(1), metavar="N", help="Tokens of an output at most.")]
TopP = Annotated[
    float, typer.Option(metavar="P", help="Draw from the likeliest tokens with this share of probability.")
]
Draws = Annotated[int, typer.Option(parser=at_least(0), metavar="N", help="Of what is drawn.")]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Ask the model as a user does, by its chat template; control tokens are the template's alone.",
    ),
]
StopTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="End an output where it says TEXT, which is not shown; can be given several times.",
    ),
]
BlockSize = Annotated[int, typer.Option(parser=at_least(1), metavar="B", help="Positions in a block.")]


def temperature_option(default: str) -> Any:
    """The option --temperature of a command with this default, in words."""
    return typer.Option(
        parser=at_least(0, float),
        metavar="T",
        help="0 takes the most likely token each time; higher values draw.",
        show_default=default,
    )


class Loaded(NamedTuple):
    """A model, ready to run."""

    llama: "Llama"
    tokenizer: "Tokenizer"

    def encode(self, text: str, *, chat: bool) -> list[int]:
        """The ids of a prompt, by the chat template if asked. Raises ValueError: it is empty or too long."""
        own = self.tokenizer
        ids = own.chat([{"role": "user", "content": text}]) if chat else own.encode(text)
        if own.add_bos and own.bos is not None and not chat:
            ids = [own.bos, *ids]
        if not ids:
            raise ValueError("the prompt is empty: there is nothing to go on from")
        if len(ids) > (most := self.llama.config.max_context):
            raise ValueError(f"the prompt has {len(ids):,} tokens; the model takes at most {most:,}")
        return ids


def load(file: Path | None) -> Loaded:
    """The fetched model, or the one in a file; what is wrong with it ends the command."""
    need("gguf", "tokenizers", "platformdirs", "jinja2")
    from tinyllm.llm import model, weights  # noqa: PLC0415
    from tinyllm.llm.gguf_file import ModelError  # noqa: PLC0415
    from tinyllm.llm.tokenizer import Tokenizer  # noqa: PLC0415

    try:
        gguf = weights.GGUF(model.find() if file is None else file)
        return Loaded(weights.load(gguf), Tokenizer(gguf))
    except (ModelError, OSError, MemoryError) as error:
        fail(USAGE, str(error) or f"{file} takes more memory than there is")


def read(file: str) -> str:
    """The text of a file, or of stdin where it is `-`: line ends as they are, no byte-order mark.

    What cannot be read, or is no UTF-8, ends the command.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        fail(USAGE, f"cannot read {file}: {error}")


@contextmanager
def usage_errors(enough: int = 0) -> Iterator[None]:
    """End the command with a message where a pool runs dry, memory is refused or a number is wrong."""
    from tinyllm.infer.paged import OutOfBlocks  # noqa: PLC0415

    try:
        yield
    except OutOfBlocks as error:
        print(flush=True)  # noqa: T201 - what has been said stays on a line of its own
        fail(USAGE, f"the pool ran dry: {error}. With --num-blocks {enough} it cannot")
    except (ValueError, MemoryError) as error:
        fail(USAGE, str(error) or "there is not enough memory")


def show(text: str) -> None:
    """Print what a model said, at once; as it is, if not on a terminal, which would take orders from it."""
    print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)  # noqa: T201
