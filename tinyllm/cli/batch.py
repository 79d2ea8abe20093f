"""`tinyllm batch`: many prompts on one pool, however small."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from tinyllm.cli.llm_options import (
    BlockSize,
    Chat,
    Loaded,
    MaxTokens,
    StopTexts,
    TopP,
    load,
    read,
    show,
    temperature_option,
    usage_errors,
)
from tinyllm.cli.model import ModelFile
from tinyllm.cli.options import at_least
from tinyllm.cli.screen import fail, progress_bar, terminal
from tinyllm.exit_codes import INTERRUPTED, USAGE

if TYPE_CHECKING:
    from tinyllm.llm.batch import Batch, Finished, Request
    from tinyllm.llm.stops import Stops

BUDGET = 1 << 30  # default limit on the bytes of a pool
FIELDS: dict[str, tuple[type, ...]] = {
    "prompt": (str,),
    "prompt_ids": (list,),
    "chat": (bool,),
    "max_tokens": (int,),
    "temperature": (int, float),
    "top_p": (int, float),
    "seed": (int,),
    "stop": (str, list),
}
"""The fields of a JSON line, and their types."""

Seed = Annotated[
    int,
    typer.Option(
        parser=at_least(0),
        metavar="N",
        help="Seed of the random draws: line 1 of the file uses N + 1, and so on.",
    ),
]


def batch(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help='A prompt a line; or JSON lines such as {"prompt": "Hi", "max_tokens": 9}. `-` reads stdin. '
            "Prompts are text throughout: names of control tokens in them are spelled out.",
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
    seed: Seed = 0,
    stop: StopTexts = None,
    chat: Chat = False,
    model: ModelFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print an object a request, and one with the figures.")
    ] = False,
) -> None:
    """Answer many prompts on one pool of blocks, in the order of the file.

    Requests are admitted while there are free blocks. When blocks run out, the youngest request is preempted
    and recomputed later: a small pool costs time and changes no token.

    A line of JSON may have prompt or prompt_ids, chat, max_tokens, temperature, top_p, seed and stop (a text
    or a list); options are the defaults. Ctrl-C keeps the finished outputs.

    A line without a seed uses --seed plus its line number, counted from 1. The seed is shown, and
    `tinyllm generate` draws the same tokens with it.
    """
    lines = _lines(file)
    loaded = load(model)
    draws = {"temperature": temperature, "top_p": top_p, "stop": stop or []}
    defaults = {"max_tokens": max_tokens, "chat": chat, **draws}
    asked = [_asked(loaded, number, line, defaults | {"seed": seed + number}) for number, line in lines]

    from tinyllm.infer.planning import blocks_for_budget, blocks_for_lengths  # noqa: PLC0415
    from tinyllm.llm.batch import Batch, checked  # noqa: PLC0415
    from tinyllm.llm.sequences import new_pool  # noqa: PLC0415

    config = loaded.llama.config
    needs = []
    for one in asked:
        with _naming(one.line):
            ids, most = checked(config, one.request)
            needs.append(blocks_for_lengths([len(ids) + most - 1], block_size))
    sizes = (block_size, config.n_layers, config.n_kv_heads, config.d_head)
    blocks = _blocks(num_blocks, needs, blocks_for_budget(BUDGET, *sizes))
    if blocks < max(needs):
        number = asked[needs.index(max(needs))].line
        problem = f"line {number} may need {max(needs)} blocks, but the pool has {blocks} in all"
        fail(USAGE, f"{problem}. The least pool for this file is --num-blocks {max(needs)}")
    with usage_errors(sum(needs)):
        run = Batch(loaded.llama, new_pool(config, blocks, block_size))
        for one in asked:
            run.submit(one.request)
        _drain(run, asked, sum(needs), as_json=as_json)


def _lines(file: str) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    split = read(file).split("\n")  # not splitlines: U+2028 and others are text, in JSON too
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(split, 1) if line.strip()]
    if not lines:
        fail(USAGE, f"{file} has no prompt in it")
    return lines


class _Asked(NamedTuple):
    line: int
    request: "Request"
    stops: "Stops"


def _asked(loaded: Loaded, number: int, line: str, defaults: Mapping[str, Any]) -> _Asked:
    from tinyllm.llm.batch import Request  # noqa: PLC0415
    from tinyllm.llm.sampling import Sampling  # noqa: PLC0415
    from tinyllm.llm.stops import Stops  # noqa: PLC0415

    said: dict[str, Any] = {"prompt": line}
    if line.lstrip(" \t").startswith("{"):
        said = _object(number, line)
    said = {**defaults, **said}
    texts = [said["stop"]] if isinstance(said["stop"], str) else said["stop"]
    with _naming(number):
        sampling = Sampling(said["temperature"], said["top_p"], said["seed"])
        if strange := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(f"stop has {json.dumps(strange[0])}; it must be a str, or a list of them")
        stops = Stops(loaded.tokenizer, texts)
        if "prompt_ids" in said:
            ids, ends = said["prompt_ids"], stops.ids
        else:
            ids, ends = loaded.encode(said["prompt"], chat=said["chat"]), loaded.tokenizer.ends | stops.ids
    return _Asked(number, Request(ids, said["max_tokens"], sampling, ends, stops), stops)


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """Turn a wrong value into a usage error that names its line."""
    try:
        yield
    except (ValueError, TypeError, OverflowError) as error:
        fail(USAGE, f"line {number}: {error}")


def _object(number: int, line: str) -> dict[str, Any]:
    try:
        asked = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        fail(USAGE, f"line {number} is not valid JSON: {error}")
    for name, value in asked.items():
        if name not in FIELDS:
            fail(USAGE, f"line {number}: there is no field {name!r}; expected one of {', '.join(FIELDS)}")
        if type(value) not in FIELDS[name]:
            kind = FIELDS[name][-1].__name__
            fail(USAGE, f"line {number}: {name} is {json.dumps(value)}; it must be a {kind}")
    if ("prompt" in asked) == ("prompt_ids" in asked):
        fail(USAGE, f"line {number} must have prompt or prompt_ids, one of the two")
    return dict(asked)


def _blocks(text: str | None, needs: list[int], most: int) -> int:
    """The blocks of the pool, given the blocks that each request needs."""
    if text is None:
        return max(*needs, min(sum(needs), most))
    number = text.removesuffix("%")
    if not number.isdecimal() or not int(number):
        fail(USAGE, f"--num-blocks {text} is neither a number of blocks, at least 1, nor a share such as 25%")
    return int(number) if number == text else max(*needs, sum(needs) * int(number) // 100)


def _drain(run: "Batch", asked: list[_Asked], need: int, *, as_json: bool) -> None:
    found: dict[int, Finished] = {}
    shown = 0
    start = perf_counter()
    stopped = False
    with progress_bar(terminal(stderr=True)) as bar:
        task = bar.add_task("answering", total=len(asked))
        try:
            while not run.idle:
                found |= {finished.number: finished for finished in run.step()}
                bar.update(task, completed=len(found))
                while shown in found:
                    _tell(asked[shown], found[shown], as_json=as_json)
                    shown += 1
        except KeyboardInterrupt:
            found |= {finished.number: finished for finished in run.finished}
            stopped = True
    seconds = perf_counter() - start
    for number in sorted(found.keys() - range(shown)):  # only where it was interrupted
        _tell(asked[number], found[number], as_json=as_json)
    facts = {**vars(run.figures), "blocks": run.cache.num_blocks, "blocks_needed": need, "seconds": seconds}
    used = facts.pop("used")
    if as_json:
        print(json.dumps({"figures": facts, "used": used}))  # noqa: T201
    else:
        terminal().print(f"[dim]{escape(_line(facts))}[/dim]", soft_wrap=True, highlight=False)
    if stopped:
        left = len(asked) - len(found)
        fail(INTERRUPTED, f"interrupted: {len(found)} of {len(asked)} requests are finished, {left} are not")


def _tell(asked: _Asked, finished: "Finished", *, as_json: bool) -> None:
    text = asked.stops.decode(finished.ids)
    sampling = asked.request.sampling
    if as_json:
        row: dict[str, Any] = {"index": finished.number, "line": asked.line, "seed": sampling.seed}
        row |= {"prompt_ids": list(asked.request.ids), "ids": finished.ids, "text": text}
        row |= {"finish": finished.finish, "preemptions": finished.preemptions}
        print(json.dumps(row), flush=True)  # noqa: T201
        return
    drawn = f" [dim](seed {sampling.seed})[/dim]" if sampling.temperature else ""
    terminal().print(f"[bold]{finished.number + 1}[/bold]{drawn} ", end="", highlight=False)
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
