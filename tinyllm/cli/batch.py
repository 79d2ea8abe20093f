"""`tinyllm batch`: many prompts on one pool, however small."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from tinyllm.cli.grade import progress_bar
from tinyllm.cli.language import (
    INTERRUPTED,
    USAGE,
    BlockSize,
    Chat,
    Draws,
    Loaded,
    MaxTokens,
    TopP,
    load,
    show,
    temperature_option,
    usage_errors,
)
from tinyllm.cli.model import ModelFile
from tinyllm.cli.screen import fail, terminal

if TYPE_CHECKING:
    from tinyllm.infer.batch import Batch, Finished, Request

BUDGET = 1 << 30  # bytes that a pool takes at most, unless told otherwise
FIELDS: dict[str, tuple[type, ...]] = {
    "prompt": (str,),
    "prompt_ids": (list,),
    "chat": (bool,),
    "max_tokens": (int,),
    "temperature": (int, float),
    "top_p": (int, float),
    "seed": (int,),
}
"""What a line of JSON may say, and its types."""


def batch(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help='A prompt a line; or JSON lines such as {"prompt": "Hi", "max_tokens": 9}. `-` reads stdin.',
        ),
    ],
    num_blocks: Annotated[
        str | None,
        typer.Option(
            metavar="N|N%",
            help="Blocks in the pool, or their share of what all requests need at once.",
            show_default="100%, up to 1 GiB",
        ),
    ] = None,
    block_size: BlockSize = 16,
    max_tokens: MaxTokens = 64,
    temperature: Annotated[float, temperature_option("0")] = 0.0,
    top_p: TopP = 1.0,
    seed: Draws = 0,
    chat: Chat = False,
    model: ModelFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print an object a request, and one with the figures.")
    ] = False,
) -> None:
    """Answer many prompts on one pool of blocks, in the order of the file.

    Requests are admitted while there are blocks. When blocks run out, the youngest gives its own back and is
    computed once more later: a small pool costs time, and changes no token.

    A line of JSON may have prompt or prompt_ids, chat, max_tokens, temperature, top_p and seed; the options
    say the rest. Ctrl-C keeps what is finished.
    """
    lines = _lines(file)
    loaded = load(model)
    draws = {"temperature": temperature, "top_p": top_p, "seed": seed}
    defaults = {"max_tokens": max_tokens, "chat": chat, **draws}
    requests = [_request(loaded, number, line, defaults) for number, line in lines]

    from tinyllm.infer.batch import Batch, checked  # noqa: PLC0415
    from tinyllm.infer.planning import blocks_for_budget, blocks_for_lengths  # noqa: PLC0415
    from tinyllm.infer.sequences import new_pool  # noqa: PLC0415

    config = loaded.llama.config
    needs = []
    for request, (number, _) in zip(requests, lines):
        with _naming(number):
            ids, most = checked(config, request)
            needs.append(blocks_for_lengths([len(ids) + most - 1], block_size))
    sizes = (block_size, config.n_layers, config.n_kv_heads, config.d_head)
    blocks = _blocks(num_blocks, needs, blocks_for_budget(BUDGET, *sizes))
    if blocks < max(needs):
        number = lines[needs.index(max(needs))][0]
        told = f"line {number} may need {max(needs)} blocks, but the pool has {blocks} in all"
        fail(USAGE, f"{told}. The least pool for this file is --num-blocks {max(needs)}")
    with usage_errors(sum(needs)):
        run = Batch(loaded.llama, new_pool(config, blocks, block_size))
        for request in requests:
            run.submit(request)
        _drain(loaded, run, requests, sum(needs), as_json=as_json)


def _lines(file: str) -> list[tuple[int, str]]:
    """The lines with something on them, and their numbers."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(USAGE, f"cannot read {file}: {error}")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        fail(USAGE, f"{file} has no prompt in it")
    return lines


def _request(loaded: Loaded, number: int, line: str, defaults: Mapping[str, Any]) -> "Request":
    from tinyllm.infer.batch import Request  # noqa: PLC0415
    from tinyllm.infer.sampling import Sampling  # noqa: PLC0415

    asked: dict[str, Any] = {"prompt": line}
    if line.lstrip().startswith("{"):
        asked = _object(number, line)
    asked = {**defaults, **asked}
    with _naming(number):
        sampling = Sampling(asked["temperature"], asked["top_p"], asked["seed"])
        if "prompt_ids" in asked:
            return Request(asked["prompt_ids"], asked["max_tokens"], sampling)
        ids = loaded.encode(asked["prompt"], chat=asked["chat"])
        return Request(ids, asked["max_tokens"], sampling, [loaded.tokenizer.eos])


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """End the command with a message that names the line, where a value on it is wrong."""
    try:
        yield
    except (ValueError, TypeError) as error:
        fail(USAGE, f"line {number}: {error}")


def _object(number: int, line: str) -> dict[str, Any]:
    try:
        asked = json.loads(line)
    except json.JSONDecodeError as error:
        fail(USAGE, f"line {number} is no JSON: {error}")
    for name, value in asked.items():
        if name not in FIELDS:
            fail(USAGE, f"line {number}: there is no field {name!r}; there are {', '.join(FIELDS)}")
        if type(value) not in FIELDS[name]:
            kind = FIELDS[name][-1].__name__
            fail(USAGE, f"line {number}: {name} is {json.dumps(value)}; it must be a {kind}")
    if ("prompt" in asked) == ("prompt_ids" in asked):
        fail(USAGE, f"line {number} must have prompt or prompt_ids, one of the two")
    return dict(asked)


def _blocks(text: str | None, needs: list[int], most: int) -> int:
    """How many blocks the pool has, given what each request needs."""
    if text is None:
        return max(*needs, min(sum(needs), most))
    number = text.removesuffix("%")
    if not number.isdecimal() or not int(number):
        fail(USAGE, f"--num-blocks {text} is neither a number of blocks, at least 1, nor a share such as 25%")
    return int(number) if number == text else max(*needs, sum(needs) * int(number) // 100)


def _drain(loaded: Loaded, run: "Batch", requests: "list[Request]", need: int, *, as_json: bool) -> None:
    found: dict[int, Finished] = {}
    shown = 0
    start = perf_counter()
    stopped = False
    with progress_bar(terminal(stderr=True)) as bar:
        task = bar.add_task("answering", total=len(requests))
        try:
            while not run.idle:
                found |= {finished.number: finished for finished in run.step()}
                bar.update(task, completed=len(found))
                while shown in found:
                    _tell(loaded, requests[shown], found[shown], as_json=as_json)
                    shown += 1
        except KeyboardInterrupt:
            found |= {finished.number: finished for finished in run.finished}
            stopped = True
    seconds = perf_counter() - start
    for number in sorted(found.keys() - range(shown)):  # only where it was interrupted
        _tell(loaded, requests[number], found[number], as_json=as_json)
    facts = {**vars(run.figures), "blocks": run.cache.num_blocks, "blocks_needed": need, "seconds": seconds}
    used = facts.pop("used")
    if as_json:
        print(json.dumps({"figures": facts, "used": used}))  # noqa: T201
    else:
        terminal().print(f"[dim]{escape(_line(facts))}[/dim]", soft_wrap=True, highlight=False)
    if stopped:
        left = len(requests) - len(found)
        fail(
            INTERRUPTED, f"interrupted: {len(found)} of {len(requests)} requests are finished, {left} are not"
        )


def _tell(loaded: Loaded, request: "Request", finished: "Finished", *, as_json: bool) -> None:
    text = loaded.tokenizer.decode(finished.ids)
    if as_json:
        ids = {"index": finished.number, "prompt_ids": list(request.ids), "ids": finished.ids, "text": text}
        print(json.dumps({**ids, "finish": finished.finish, "preemptions": finished.preemptions}), flush=True)  # noqa: T201
        return
    terminal().print(f"[bold]{finished.number + 1}[/bold] ", end="")
    show(f"{text.strip()}\n")


def _line(facts: dict[str, Any]) -> str:
    speed = facts["new_tokens"] / facts["seconds"] if facts["seconds"] else 0.0
    share = facts["blocks"] / facts["blocks_needed"]
    return (
        f"{facts['requests']} requests, {facts['new_tokens']:,} tokens, {speed:,.1f} tokens/s; "
        f"pool of {facts['blocks']} blocks, {share:.0%} of what all need at once; "
        f"{facts['preemptions']} preemptions, {facts['replayed_tokens']:,} tokens replayed; "
        f"peak {facts['peak_blocks']} blocks, {facts['peak_waste']:.1%} of their slots empty"
    )
