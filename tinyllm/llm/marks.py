"""Tell the text of messages from the template's own text in a rendered conversation.

A message may contain the name of a control token, which must stay text. So a conversation is rendered twice:
unchanged, and with marks in its messages. Marks are letters that occur nowhere else. They stand around each
message, and after each of its letters that begins a name. If both texts differ by marks only, the marks show
where the messages are.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

Messages = Sequence[Mapping[str, str]]


class Marked(NamedTuple):
    """A rendered text in which the messages are known."""

    text: str  # without marks
    marked: str  # with the marks inside of messages
    named: str  # the same, with messages replaced by marks: names here are the template's


class Marks:
    """Three letters that occur in none of the given texts.

    Args:
        names: the names of control tokens.
        texts: the template and its inputs.
    """

    def __init__(self, names: Collection[str], texts: Iterable[str]) -> None:
        taken = set().union(*names, *texts)
        private = (letter for letter in map(chr, range(0xF0000, 0x110000)) if letter not in taken)
        self._begin, self.inside, self._end = islice(private, 3)
        self._firsts = {name[0] for name in names if name}
        self._names = re.compile("|".join(map(re.escape, filter(None, names))) or "(?!)")

    def ways(self, messages: Messages) -> Iterator[Messages]:
        """The messages with marks at their ends, then with marks inside their outer blanks, for stripping."""
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
        """Read a text of marked messages; None if the template split them or made names of them."""
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
