"""Whose a letter is in what a chat template makes: a message's, or the template's own.

A message may hold the name of a control token, and must not speak with it. So a conversation is rendered once
as it is, and once with marks in its messages, letters that nobody else uses: around each message, and after
every letter in it with which a name begins. If marks are all that differs, they tell where the messages are.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

Messages = Sequence[Mapping[str, str]]


class Marked(NamedTuple):
    """A text whose messages are known."""

    text: str  # without marks
    marked: str  # with those inside of messages
    named: str  # the same, but of messages marks alone: what has a name here is the template's


class Marks:
    """Three letters that are in none of some texts.

    Args:
        names: of control tokens.
        texts: a template, and what goes into it.
    """

    def __init__(self, names: Collection[str], texts: Iterable[str]) -> None:
        taken = set().union(*names, *texts)
        private = (letter for letter in map(chr, range(0xF0000, 0x110000)) if letter not in taken)
        self._begin, self.inside, self._end = islice(private, 3)
        self._firsts = {name[0] for name in names if name}
        self._names = re.compile("|".join(map(re.escape, filter(None, names))) or "(?!)")

    def ways(self, messages: Messages) -> Iterator[Messages]:
        """The messages with marks: at their ends, and within the blanks there, which many templates strip."""
        self._said = [text for m in messages for key, text in m.items() if key != "role"]
        for strip in (False, True):
            yield [
                {key: text if key == "role" else self._mark(text, strip=strip) for key, text in m.items()}
                for m in messages
            ]

    def _mark(self, text: str, *, strip: bool) -> str:
        core = text.strip() if strip else text
        if not core:
            return text
        before, _, after = text.partition(core)
        inside = "".join(letter + self.inside * (letter in self._firsts) for letter in core)
        return f"{before}{self._begin}{inside}{self._end}{after}"

    def read(self, text: str) -> Marked | None:
        """What a template made of marked messages; None if it took them apart, or made names of them."""
        parts = re.split(f"([{self._begin}{self._end}])", text)
        if parts[1::2] != [self._begin, self._end] * (len(parts) // 4):
            return None
        messages = [part.replace(self.inside, "") for part in parts[2::4]]
        names = {name for message in messages for name in self._names.findall(message)}
        if any(all(name not in text for text in self._said) for name in names):
            return None
        marked = "".join(parts[::2])
        named = "".join(self.inside * len(part) if i % 2 else part for i, part in enumerate(parts[::2]))
        return Marked(marked.replace(self.inside, ""), marked, named)
