"""Text to token ids and back, and the chat template, from a GGUF file; needs the extra `model`.

It is byte-level BPE: a text is split into digits and words, each is spelled in an alphabet of 256 letters,
one a byte, and neighbouring pieces are merged. The `tokenizers` package merges.

It is not lossless. Encoding drops a byte whose letter is no token. SmolLM2 has 21 such bytes, control
characters and bytes that begin rare characters or none; `Tokenizer.lost` lists them.
"""

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tinyllm.llm.gguf_file import GGUF, ModelError
from tinyllm.llm.marks import Marks
from tinyllm.llm.template import Template

PRE = ("smollm",)
"""The supported names of `tokenizer.ggml.pre`, the way to split texts."""

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`: names without text, and texts that are always one token."""

WHOLE = 8192
"""The most tokens of these two types; models have up to a few hundred."""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
ALPHABET = {byte: chr(byte) for byte in _PRINTABLE}
"""The letter of each byte: itself if it is printable Latin-1, else one from U+0100 up."""
ALPHABET |= {byte: chr(0x100 + i) for i, byte in enumerate(b for b in range(256) if b not in ALPHABET)}
_LATIN = str.maketrans({letter: chr(byte) for byte, letter in ALPHABET.items()})

_ANSWER = "\U000f0000"  # a letter that no template writes


class Tokenizer:
    """The tokenizer of a model.

    Args:
        file: the GGUF file.

    Attributes:
        bos: the id that begins a text, or None.
        eos: the id that ends a text, from the file.
        add_bos: whether the model wants `bos` before a text. `encode` does not add it.
        lost: the bytes that encoding drops.

    Raises:
        ModelError: the tokenizer is not supported, or the file is damaged.
    """

    def __init__(self, file: GGUF) -> None:
        self._name = file.path.name
        for key, known in {"model": ("gpt2",), "pre": PRE}.items():
            if (kind := file.get(f"tokenizer.ggml.{key}", str)) not in known:
                raise self._error(f"has tokenizer.ggml.{key} {kind!r}; expected one of {', '.join(known)}")
        tokens = file.strings("tokenizer.ggml.tokens")
        kinds = file.numbers("tokenizer.ggml.token_type")
        if len(kinds) != len(tokens):
            raise self._error(f"has {len(tokens)} tokens, and types of {len(kinds)}")
        self._ids = {token: i for i, token in enumerate(tokens)}
        if len(self._ids) != len(tokens):
            twice = next(token for i, token in enumerate(tokens) if self._ids[token] != i)
            raise self._error(f"has the token {twice!r} twice")
        self._tokens = tokens
        self._control = set(np.flatnonzero(kinds == CONTROL).tolist())
        own = set(np.flatnonzero(kinds == USER_DEFINED).tolist())
        self._whole = self._control | own
        if len(self._whole) > WHOLE:  # searching a text for so many names is slow
            raise self._error(
                f"has {len(self._whole):,} control and user's tokens; at most {WHOLE:,} are read"
            )
        letters = set().union(*(token for i, token in enumerate(tokens) if i not in self._whole))
        if strange := sorted(letters - set(ALPHABET.values())):
            raise self._error(f"has tokens with {strange[0]!r}, which stands for no byte")
        self.lost = bytes(byte for byte, letter in sorted(ALPHABET.items()) if letter not in self._ids)
        self._bpe = self._merger(file.strings("tokenizer.ggml.merges"))
        self._cut_control, self._cut_own = self._cutter(self._control), self._cutter(own)
        self.eos = self._id(file, "eos_token_id")
        self.bos, eot, eom = (
            self._id(file, key) if f"tokenizer.ggml.{key}" in file.metadata else None
            for key in ("bos_token_id", "eot_token_id", "eom_token_id")
        )
        self._ends = frozenset(id_ for id_ in (self.eos, eot, eom) if id_ is not None)
        self.add_bos = file.metadata.get("tokenizer.ggml.add_bos_token") is True
        ids = {"bos_token": self.bos, "eos_token": self.eos}
        names = {name: "" if i is None else self._tokens[i] for name, i in ids.items()}
        template = file.metadata.get("tokenizer.chat_template")
        self._template = Template(self._name, template, names) if isinstance(template, str) else None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text, with no id added.

        Args:
            text: any text. A lone surrogate counts as U+FFFD.
            special: whether the name of a control token, such as `<|im_end|>`, becomes that token. Never use
                it for untrusted text, which could then speak for the model.
        """
        text = _unicode(text)
        return self._encode(text, text if special else "")

    def _encode(self, text: str, named: str, drop: str = "") -> list[int]:
        """The ids of a text without the letter `drop`; `named`, of equal length, holds the control tokens."""
        ids: list[int] = []
        at = 0
        for found in self._cut_control.finditer(named):
            ids += self._plain(text[at : found.start()].replace(drop, ""))
            ids.append(self._ids[found[0]])
            at = found.end()
        return ids + self._plain(text[at:].replace(drop, ""))

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(self._cut_own.split(text)):  # every second part is a token
            ids += [self._ids[part]] if i % 2 else self._bpe.encode(part, add_special_tokens=False).ids
        return ids

    def token(self, id_: int, *, special: bool = False) -> bytes:
        """The bytes of one token; for a control token empty, or its name if `special`.

        Raises:
            ValueError: the id is outside the vocabulary.
        """
        if not 0 <= id_ < len(self._tokens):
            raise ValueError(f"id {id_} is outside the vocabulary, [0, {len(self._tokens)})")
        if id_ in self._whole:
            return b"" if id_ in self._control and not special else self._tokens[id_].encode()
        spelled: str = self._tokens[id_]
        return spelled.translate(_LATIN).encode("latin-1")

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of ids; invalid UTF-8 becomes U+FFFD. Arguments and errors as for `token`."""
        return b"".join(self.token(i, special=special) for i in ids).decode(errors="replace")

    def control(self, name: str) -> int | None:
        """The control token of this name, or None."""
        return id_ if (id_ := self._ids.get(name)) in self._control else None

    def stream(self, *, special: bool = False) -> "Stream":
        """A decoder for ids one by one; its texts together equal `decode`."""
        return Stream(self, special=special)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation in the model's chat template, up to the start of an answer.

        Messages are plain text: the name of a control token in them is spelled out.

        Args:
            messages: with "role" ("system", "user" or "assistant") and "content", oldest first.

        Raises:
            ModelError: there is no template; it fails, refuses the messages or exceeds its limits; or it
                depends on the text of a message, which then cannot be separated from its own text.
        """
        if self._template is None:
            raise self._error("has no chat template")
        plain = [{name: _unicode(text) for name, text in message.items()} for message in messages]
        names = [self._tokens[i] for i in self._control]
        marks = Marks(names, [self._template.source, *(text for m in plain for text in m.values())])
        wanted, *marked = self._template.render([plain, *marks.ways(plain)])
        if isinstance(wanted, ModelError):
            raise wanted
        for text in marked:
            if isinstance(text, str) and (found := marks.read(text)) and found.text == wanted:
                return self._encode(found.marked, found.named, marks.inside)
        raise self._error(
            "has a chat template that depends on the text of a message, "
            "which cannot be separated from control tokens"
        )

    @cached_property
    def ends(self) -> frozenset[int]:
        """The ids that end an answer: those of the file, and the token that its template writes after one.

        Raises:
            ModelError: the template exceeds its limits. Its other errors are raised by `chat`.
        """
        if self._template is None:
            return self._ends
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        [text] = self._template.render([turn], ask=False)
        after = "" if isinstance(text, ModelError) else text.partition(_ANSWER)[2].lstrip()
        found = self._cut_control.match(after)
        return self._ends | {self._ids[found[0]]} if found else self._ends

    def _error(self, text: str) -> ModelError:
        return ModelError(f"{self._name} {text}")

    def _id(self, file: GGUF, key: str) -> int:
        value = file.get(f"tokenizer.ggml.{key}", int)
        if not 0 <= value < len(self._tokens):
            raise self._error(f"has tokenizer.ggml.{key} {value}; it must be in [0, {len(self._tokens)})")
        return value

    def _merger(self, merges: list[str]) -> Any:
        import tokenizers  # noqa: PLC0415 - the extra may be missing
        from tokenizers import models, pre_tokenizers  # noqa: PLC0415

        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        for pair in pairs:
            if missing := [token for token in (*pair, "".join(pair)) if token not in self._ids]:
                raise self._error(f"has the merge {' '.join(pair)!r}, but {missing[0]!r} is no token")
        bpe = tokenizers.Tokenizer(models.BPE(self._ids, pairs))
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        return bpe

    def _cutter(self, ids: set[int]) -> re.Pattern[str]:
        """A pattern that splits texts at these tokens, the longest first."""
        names = sorted(filter(None, (self._tokens[i] for i in ids)), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")


def _unicode(text: str) -> str:
    """The text with U+FFFD for each lone surrogate."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Stream:
    """Decode tokens one by one; a character of several tokens appears with the last of them."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, id_: int) -> str:
        """The text that is complete after this token, often empty; errors as for `Tokenizer.token`."""
        return self._decoder.decode(self._tokenizer.token(id_, special=self._special))

    def end(self) -> str:
        """U+FFFD for an incomplete character, else empty; resets the stream."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
