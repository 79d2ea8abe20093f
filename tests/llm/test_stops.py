"""Texts that end an output: where they end it, and what is shown of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyllm.llm.batch import Batch, Request
from tinyllm.llm.beams import beam_search
from tinyllm.llm.generate import generate
from tinyllm.llm.gguf_file import GGUF
from tinyllm.llm.llama import TOY, toy
from tinyllm.llm.sequences import new_pool
from tinyllm.llm.stops import Stops
from tinyllm.llm.tokenizer import Tokenizer

MODEL = toy()
PROMPT = [5, 9, 33, 2]


@pytest.fixture
def tokenizer(write: Callable[..., Path], words: dict[str, Any]) -> Tokenizer:
    return Tokenizer(GGUF(write(words)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_output_ends_with_the_first_text_it_says(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Whatever tokens say it: single letters, merged ones, parts of a character, control tokens between."""
    tokens = [0, 3, *tokenizer.encode("he hello wo é🎉")]
    ids = data.draw(st.lists(st.sampled_from(tokens), min_size=1, max_size=12))
    texts = data.draw(st.lists(st.text("helo wé🎉", min_size=1, max_size=4), max_size=3))
    stops = Stops(tokenizer, texts)
    spoken = [b"".join(map(tokenizer.token, ids[:n])) for n in range(1, len(ids) + 1)]
    over = [any(text.encode() in said for text in texts) for said in spoken]
    first = next((n for n, ended in enumerate(over, 1) if ended), len(ids))
    assert [stops(ids[:n]) for n in range(1, first + 1)] == over[:first]
    said = spoken[first - 1]
    shown = said[: min((said.index(t.encode()) for t in texts if t.encode() in said), default=len(said))]
    assert stops.decode(ids) == shown.decode(errors="replace")


def test_what_may_begin_a_stop_text_waits(tokenizer: Tokenizer) -> None:
    stream = Stops(tokenizer, ["hello", "lw"]).stream()
    h, e, l, o, x = (tokenizer.encode(letter)[0] for letter in "helox")
    assert [stream.feed(i) for i in (h, e, l, l, x)] == ["", "", "", "", "hellx"]
    assert [stream.feed(i) for i in (h, e, h, e, l)] == ["", "", "he", "", ""]
    assert stream.end() == "hel"
    stream = Stops(tokenizer, ["hello"]).stream()
    assert [stream.feed(i) for i in (x, h, e, l, l, o, x)] == ["x", "", "", "", "", "", ""]
    assert stream.end() == ""


def test_the_name_of_a_control_token_is_its_id(tokenizer: Tokenizer) -> None:
    assert Stops(tokenizer, ["<|end|>", "hello", "  own "]).ids == {0}
    assert Stops(tokenizer).ids == frozenset()
    with pytest.raises(ValueError, match="a stop text is empty; it must have at least one letter"):
        Stops(tokenizer, ["a", ""])


def test_whatever_generates_asks_after_each_token() -> None:
    plain = generate(MODEL, PROMPT, max_tokens=12).outputs[0].ids
    seen: list[list[int]] = []

    def until(ids: Any) -> bool:
        seen.append(list(ids))
        return list(ids[-2:]) == plain[3:5]

    for lookup in (False, True):
        made = generate(MODEL, PROMPT, max_tokens=12, until=until, lookup=lookup).outputs[0]
        assert (made.ids, made.finish) == (plain[:5], "stop")
    assert seen == 2 * [plain[:n] for n in range(1, 6)]
    [beam], _ = beam_search(MODEL, PROMPT, beams=1, max_tokens=12, until=until)
    assert (list(beam.ids), beam.finish) == (plain[:5], "stop")
    batch = Batch(MODEL, new_pool(TOY, 20))
    batch.submit(Request(PROMPT, 12, until=until))
    found = [done for _ in range(5) for done in batch.step()]
    assert [(done.ids, done.finish) for done in found] == [(plain[:5], "stop")]
    assert batch.idle
