"""Shared by the commands with a language model: options, loading, printing."""

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

SPREAD = 0.8  # default temperature of several outputs, which would all be equal at 0

MaxTokens = Annotated[int, typer.Option(parser=at_least(1), metavar="N", help="Most tokens of an output.")]
TopP = Annotated[
    float,
    typer.Option(metavar="P", help="Draw from the likeliest tokens that hold this share of the probability."),
]
Draws = Annotated[int, typer.Option(parser=at_least(0), metavar="N", help="Seed of the random draws.")]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Put the prompt into the model's chat template; no text in it becomes a control token.",
    ),
]
StopTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="End an output before TEXT; may be repeated.",
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
        """The ids of a prompt, in the chat template if `chat`. Raises ValueError: it is empty or too long."""
        own = self.tokenizer
        ids = own.chat([{"role": "user", "content": text}]) if chat else own.encode(text)
        if own.add_bos and own.bos is not None and not chat:
            ids = [own.bos, *ids]
        if not ids:
            raise ValueError("the prompt is empty; it must have at least one token")
        if len(ids) > (most := self.llama.config.max_context):
            raise ValueError(f"the prompt has {len(ids):,} tokens; the model takes at most {most:,}")
        return ids


def load(file: Path | None) -> Loaded:
    """The fetched model, or the one in a file; exits with a message if it cannot be used."""
    need("gguf", "tokenizers", "platformdirs", "jinja2")
    from tinyllm.llm import model, weights  # noqa: PLC0415
    from tinyllm.llm.gguf_file import ModelError  # noqa: PLC0415
    from tinyllm.llm.tokenizer import Tokenizer  # noqa: PLC0415

    try:
        gguf = weights.GGUF(model.find() if file is None else file)
        return Loaded(weights.load(gguf), Tokenizer(gguf))
    except (ModelError, OSError, MemoryError) as error:
        fail(USAGE, str(error) or f"{file} needs more memory than there is")


def read(file: str) -> str:
    """The UTF-8 text of a file, or of stdin for `-`, without a byte-order mark and with its line ends.

    Exits with a message if it cannot be read.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        fail(USAGE, f"cannot read {file}: {error}")


@contextmanager
def usage_errors(enough: int = 0) -> Iterator[None]:
    """Turn OutOfBlocks, MemoryError and ValueError into a message and an exit."""
    from tinyllm.infer.paged import OutOfBlocks  # noqa: PLC0415

    try:
        yield
    except OutOfBlocks as error:
        print(flush=True)  # noqa: T201 - ends the line of the output so far
        fail(USAGE, f"the pool ran dry: {error}. With --num-blocks {enough} it cannot")
    except (ValueError, MemoryError) as error:
        fail(USAGE, str(error) or "there is not enough memory")


def show(text: str) -> None:
    """Print model output at once; on a terminal, control characters are escaped."""
    print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)  # noqa: T201
