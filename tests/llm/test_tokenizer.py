"""Text to ids and back, on a small tokenizer in a file; the real one is in tests/model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from tinyllm.llm.gguf_file import GGUF, ModelError
from tinyllm.llm.tokenizer import ALPHABET, Tokenizer

Make = Callable[..., Tokenizer]
END, END_OF, START, OWN = range(4)


@pytest.fixture
def make(write: Callable[..., Path], words: dict[str, Any]) -> Make:
    """The small tokenizer, with other settings: `ggml__pre` is tokenizer.ggml.pre."""

    def call(**edits: Any) -> Tokenizer:
        other = {f"tokenizer.{name.replace('__', '.')}": value for name, value in edits.items()}
        return Tokenizer(GGUF(write(words | other)))

    return call


def pieces(tokenizer: Tokenizer, text: str, **how: bool) -> list[bytes]:
    return [tokenizer.token(i, special=True) for i in tokenizer.encode(text, **how)]


def test_the_alphabet_is_that_of_byte_level_bpe() -> None:
    assert set(ALPHABET.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert ALPHABET[ord(" ")] == "Ġ"
    assert ALPHABET[ord("\n")] == "Ċ"


def test_merges_words_and_digits(make: Make) -> None:
    tokenizer = make()
    assert pieces(tokenizer, "hello wo") == [b"hello", b" wo"]
    assert pieces(tokenizer, "12") == [b"1", b"2"]  # a merge, but digits stand alone
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""


def test_control_tokens_are_text_unless_asked_for(make: Make) -> None:
    tokenizer = make()
    text = "<|start|>hello<|end|>of<|end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert not {END, END_OF, START} & set(tokenizer.encode(text))
    ids = tokenizer.encode(text, special=True)
    assert [i for i in ids if i < 4] == [START, END_OF, END]  # the longest name wins
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, special=True) == text


def test_a_users_token_is_one_token_always(make: Make) -> None:
    tokenizer = make()
    for special in (False, True):
        ids = tokenizer.encode("hello  own hello", special=special)
        assert ids[1] == OWN
        assert tokenizer.decode(ids) == "hello  own hello"


def test_bytes_without_a_token_vanish(make: Make) -> None:
    tokenizer = make()
    assert tokenizer.lost == b"\x04\xf1"
    assert tokenizer.decode(tokenizer.encode("a\x04b\x05")) == "ab\x05"
    assert tokenizer.decode(tokenizer.encode("\U00040000.")) == "\ufffd\ufffd\ufffd."


def test_half_of_a_surrogate_pair_is_no_character(make: Make) -> None:
    tokenizer = make()
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ufeffa")) == "\ufeffa"


def test_a_character_comes_with_its_last_byte(make: Make) -> None:
    tokenizer = make()
    stream = tokenizer.stream()
    assert [stream.feed(i) for i in tokenizer.encode("é🎉")] == ["", "é", "", "", "", "🎉"]
    assert stream.end() == ""
    for i in tokenizer.encode("🎉")[:2]:
        assert stream.feed(i) == ""
    assert stream.end() == "\ufffd"
    assert stream.feed(tokenizer.encode("a")[0]) == "a"  # as new
    named = tokenizer.stream(special=True)
    assert named.feed(START) == "<|start|>"
    assert stream.feed(START) == ""


@pytest.fixture
def tokenizer(make: Make) -> Tokenizer:
    return make()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_stream_gives_what_decode_gives(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 264)))
    special = data.draw(st.booleans())
    stream = tokenizer.stream(special=special)
    assert "".join(map(stream.feed, ids)) + stream.end() == tokenizer.decode(ids, special=special)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\x04", max_codepoint=0x3FFFF)))
def test_what_is_not_lost_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, special=True), special=True) == text


def test_the_ids_that_a_model_needs(make: Make) -> None:
    tokenizer = make()
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (START, END, False)
    other = make(ggml__bos_token_id=None, ggml__add_bos_token=True)
    assert (other.bos, other.eos, other.add_bos) == (None, END, True)
    for wrong in (-1, 265):
        with pytest.raises(ValueError, match=rf"id {wrong} is outside the vocabulary, \[0, 265\)"):
            tokenizer.decode([wrong])


def test_chat_follows_the_template(make: Make) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    expected = "<|start|>system\nBe brief.<|end|>\n<|start|>user\nhello<|end|>\n<|start|>"
    tokenizer = make()
    ids = tokenizer.chat(messages)
    assert tokenizer.decode(ids, special=True) == expected
    assert ids == tokenizer.encode(expected, special=True)
    other = make(ggml__bos_token_id=None, chat_template="{{ bos_token }}.")
    assert other.decode(other.chat(messages), special=True) == "."


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{% for %}", "has a chat template that fails: "),
        ("{{ raise_exception('no ' + messages[0].role) }}", "has a chat template that fails: no user"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "has a chat template that fails: .*unsafe"),
        ("{{ messages.append(1) }}", "has a chat template that fails: .*unsafe"),
        ("{{ 1 / 0 }}", "has a chat template that fails: division by zero"),
        ("{% for i in range(999999) %}{% endfor %}", "has a chat template that fails: Range too big"),
        ("{% include '/etc/passwd' %}", "has a chat template that fails: "),
    ],
)
def test_a_template_that_fails_or_breaks_out(make: Make, template: str | None, message: str) -> None:
    tokenizer = make(chat_template=template)
    with pytest.raises(ModelError, match=f"toy.gguf {message}"):
        tokenizer.chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"ggml__model": "llama"}, "has tokenizer.ggml.model 'llama'; expected one of gpt2"),
        ({"ggml__pre": "llama-bpe"}, "has tokenizer.ggml.pre 'llama-bpe'; expected one of smollm"),
        ({"ggml__pre": None}, "does not say tokenizer.ggml.pre"),
        ({"ggml__tokens": None}, "does not say tokenizer.ggml.tokens"),
        ({"ggml__tokens": [1, 2]}, "has tokenizer.ggml.tokens, which is no list of strings"),
        ({"ggml__tokens": "a"}, "tokenizer.ggml.tokens is 'a'; it must be a list"),
        ({"ggml__tokens": ["a", "b", "a"], "ggml__token_type": [1, 1, 1]}, "has the token 'a' twice"),
        ({"ggml__tokens": ["a", "b c"], "ggml__token_type": [1, 1]}, "has tokens with ' ', which stands"),
        ({"ggml__token_type": [1]}, "has 265 tokens, and types of 1"),
        (
            {"ggml__tokens": [f"<{i}>" for i in range(8193)], "ggml__token_type": [3] * 8000 + [4] * 193},
            "has 8,193 control and user's tokens; at most 8,192 are read",
        ),
        ({"ggml__merges": ["h e", "he y"]}, "has the merge 'he y', but 'hey' is no token"),
        ({"ggml__merges": ["he"]}, "has the merge 'he ', but '' is no token"),
        ({"ggml__eos_token_id": 265}, r"has tokenizer.ggml.eos_token_id 265; it must be in \[0, 265\)"),
        ({"ggml__eos_token_id": None}, "does not say tokenizer.ggml.eos_token_id"),
    ],
)
def test_another_tokenizer_is_refused(make: Make, edits: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"toy.gguf:? {message}"):
        make(**edits)
