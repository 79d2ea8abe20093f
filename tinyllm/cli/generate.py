"""`tinyllm generate`: a language model on either cache, and its cost."""

import json
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from rich.markup import escape

from tinyllm.cli.llm_options import (
    SPREAD,
    BlockSize,
    Chat,
    Draws,
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
from tinyllm.cli.screen import fail, terminal
from tinyllm.exit_codes import INTERRUPTED, USAGE

if TYPE_CHECKING:
    from tinyllm.llm.generate import Figures
    from tinyllm.llm.sequences import Sequences
    from tinyllm.llm.stops import Stops


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT]",
            help="The text to continue; `-` reads it from stdin. The name of a control token in it is plain "
            "text; only --prompt-ids can give the token.",
        ),
    ] = None,
    cache: Annotated[
        Literal["paged", "contiguous"], typer.Option(help="The cache that keeps keys and values.")
    ] = "paged",
    max_tokens: MaxTokens = 64,
    temperature: Annotated[float | None, temperature_option(f"0; {SPREAD} with -n")] = None,
    top_p: TopP = 1.0,
    seed: Draws = 0,
    n: Annotated[
        int, typer.Option("-n", parser=at_least(1), metavar="N", help="Outputs, which share the prompt.")
    ] = 1,
    beams: Annotated[
        int | None,
        typer.Option(parser=at_least(1), metavar="K", help="Search for the likeliest outputs, K beams wide."),
    ] = None,
    lookup: Annotated[
        bool, typer.Option("--lookup", help="Draft tokens from the text so far, and check several in a pass.")
    ] = False,
    stop: StopTexts = None,
    chat: Chat = False,
    block_size: BlockSize = 16,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            parser=at_least(1),
            metavar="N",
            help="Blocks in the pool.",
            show_default="enough for every output",
        ),
    ] = None,
    prompt_ids: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,3",
            help="Token ids in place of a text. Outputs end at --max-tokens or --stop, and with --eos.",
        ),
    ] = None,
    eos: Annotated[
        bool | None,
        typer.Option(
            "--eos/--ignore-eos",
            help="End at the tokens that end the model's answers.",
            show_default="--eos for texts",
        ),
    ] = None,
    model: ModelFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print ids, texts and figures as one object.")
    ] = False,
) -> None:
    """Continue a prompt with a real language model, on the paged cache or the contiguous one.

    Both caches give the same tokens; the last line gives speed and memory.
    Several outputs (-n) and beams are forks that share the prompt's blocks.
    Run `tinyllm model fetch` first.
    """
    if (prompt is None) == (prompt_ids is None):
        fail(USAGE, "give a PROMPT or --prompt-ids, one of the two")
    if beams and (n > 1 or lookup or temperature):
        fail(
            USAGE,
            "--beams searches for the likeliest outputs: it excludes -n, --lookup and --temperature",
        )
    if lookup and (n > 1 or temperature):
        fail(
            USAGE,
            "--lookup is for one greedy output: it excludes -n and --temperature",
        )
    loaded = load(model)

    from tinyllm.llm.stops import Stops  # noqa: PLC0415 - imports NumPy

    with usage_errors():
        stops = Stops(loaded.tokenizer, stop or [])
        text = read(prompt).replace("\r\n", "\n") if prompt == "-" else prompt
        ids = _ids(prompt_ids, loaded) if text is None else loaded.encode(text, chat=chat)
        ends = loaded.tokenizer.ends if (text is not None if eos is None else eos) else frozenset()
    temperature = (SPREAD if n > 1 else 0.0) if temperature is None else temperature

    from tinyllm.infer.planning import blocks_for_lengths  # noqa: PLC0415
    from tinyllm.llm.sequences import Contiguous, Paged, new_pool  # noqa: PLC0415

    config = loaded.llama.config
    count = beams or n
    longest = min(len(ids) + max_tokens - 1, config.max_context)
    enough = count * blocks_for_lengths([longest], block_size)
    with usage_errors(enough):
        place: Sequences = (
            Contiguous(config, longest)
            if cache == "contiguous"
            else Paged(new_pool(config, num_blocks or enough, block_size))
        )
        asked = _Asked(ids, place, max_tokens, ends | stops.ids, stops, as_json)
        if beams:
            outputs, figures = _search(loaded, asked, beams)
        else:
            outputs, figures = _stream(
                loaded, asked, n, (temperature, top_p, seed), lookup=lookup, prompt=prompt
            )
    facts = _measured(figures)
    if as_json:
        facts |= {"cache": cache, "block_size": block_size if cache == "paged" else None}
        print(json.dumps({"prompt_ids": ids, **_columns(outputs), "figures": facts}))  # noqa: T201
    else:
        terminal().print(
            f"[dim]{escape(_line(figures, facts, cache))}[/dim]", soft_wrap=True, highlight=False
        )
    if any(output.finish == "interrupted" for output in outputs):
        raise typer.Exit(INTERRUPTED)


class _Asked(NamedTuple):
    ids: list[int]
    place: "Sequences"
    max_tokens: int
    ends: frozenset[int]
    stops: "Stops"
    as_json: bool


class _Said(NamedTuple):
    ids: list[int]
    text: str
    finish: str
    score: float | None = None


def _columns(outputs: list[_Said]) -> dict[str, Any]:
    table = {name: [getattr(said, name) for said in outputs] for name in _Said._fields}
    if table["score"][0] is None:
        del table["score"]
    return table


def _ids(text: str | None, loaded: Loaded) -> list[int]:
    vocab, found = loaded.llama.config.vocab, []
    for part in (text or "").split(","):
        if not part.strip().isdecimal() or int(part) >= vocab:
            fail(USAGE, f"--prompt-ids: {part.strip()!r} is no token id, 0 to {vocab - 1:,}; write 1,2,3")
        found.append(int(part))
    return found


def _stream(
    loaded: Loaded,
    asked: _Asked,
    n: int,
    chosen: tuple[float, float, int],
    *,
    lookup: bool,
    prompt: str | None,
) -> "tuple[list[_Said], Figures]":
    from tinyllm.llm.generate import stream  # noqa: PLC0415
    from tinyllm.llm.sampling import Sampling  # noqa: PLC0415

    going = stream(
        loaded.llama,
        asked.ids,
        cache=asked.place,
        max_tokens=asked.max_tokens,
        sampling=Sampling(*chosen),
        n=n,
        stop=asked.ends,
        until=asked.stops,
        lookup=lookup,
    )
    texts = [asked.stops.stream() for _ in range(n)]
    said = [""] * n
    alone = n == 1 and not asked.as_json
    quiet = terminal(stderr=True)
    with quiet.status("reading the prompt") if quiet.is_terminal and not asked.as_json else nullcontext():
        first = next(going)
    if alone and prompt and terminal().is_terminal:
        terminal().print(f"[dim]{escape(prompt)}[/dim]", end="", soft_wrap=True, highlight=False)
    with quiet.status("writing") if quiet.is_terminal and n > 1 and not asked.as_json else nullcontext():
        try:
            for step in chain([first], going):
                text = texts[step.output].feed(step.id)
                said[step.output] += text
                if alone:
                    show(text)
        except KeyboardInterrupt:
            if asked.as_json:
                raise
            for output in going.outputs:
                output.finish = output.finish or "interrupted"
    rests = [text.end() for text in texts]
    said = [text + rest for text, rest in zip(said, rests)]
    if alone:
        show(f"{rests[0]}\n")
    elif not asked.as_json:
        for i, text in enumerate(said):
            terminal().print(f"[bold]{i + 1}[/bold] ", end="")
            show(f"{text.strip()}\n")
    return [_Said(o.ids, text, o.finish) for o, text in zip(going.outputs, said)], going.figures


def _search(loaded: Loaded, asked: _Asked, beams: int) -> "tuple[list[_Said], Figures]":
    from tinyllm.llm.beams import beam_search  # noqa: PLC0415

    quiet = terminal(stderr=True)
    with quiet.status("searching") if quiet.is_terminal and not asked.as_json else nullcontext():
        found, figures = beam_search(
            loaded.llama,
            asked.ids,
            beams=beams,
            cache=asked.place,
            max_tokens=asked.max_tokens,
            stop=asked.ends,
            until=asked.stops,
        )
    if not asked.as_json:
        for beam in found:
            mark = ", greedy" if beam.greedy else ""
            terminal().print(f"[bold]{beam.score:.2f}[/bold][dim]{mark}[/dim] ", end="", highlight=False)
            show(f"{asked.stops.decode(beam.ids).strip()}\n")
    said = [_Said(list(b.ids), asked.stops.decode(b.ids), b.finish, b.score) for b in found]
    return said, figures


def _measured(figures: "Figures") -> dict[str, Any]:
    """The figures by name, with the rates derived from them."""
    return {
        **vars(figures),
        "prefill_tokens_per_second": (
            figures.prompt_tokens / figures.prefill_seconds if figures.prefill_seconds else 0.0
        ),
        "decode_tokens_per_second": (
            figures.decode_tokens / figures.decode_seconds if figures.decode_seconds else 0.0
        ),
        "speed_up": figures.speed_up,
    }


def _line(figures: "Figures", facts: dict[str, Any], cache: str) -> str:
    parts = [
        f"prefill {facts['prefill_tokens_per_second']:,.0f} tokens/s",
        f"decode {facts['decode_tokens_per_second']:,.0f} tokens/s",
    ]
    held, whole = figures.held_bytes / 1e6, figures.contiguous_bytes / 1e6
    if cache == "paged":
        parts.append(f"KV {held:,.2f} MB held, contiguous {whole:,.2f} MB")
        parts.append(f"{figures.shared_blocks} blocks shared at the peak")
    else:
        parts.append(f"KV {held:,.2f} MB held")
    if figures.drafted:
        share = figures.accepted / figures.drafted
        parts.append(
            f"{share:.0%} of {figures.drafted} drafted tokens accepted, {figures.speed_up:.2f}x as fast"
        )
        parts.append(f"{figures.ties} ties")
    return "; ".join(parts)
