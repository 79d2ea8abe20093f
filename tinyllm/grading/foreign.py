"""Foreign text: titles of bugs, ids of tests, messages of exceptions, output of engines."""

import re

HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
"""Characters that command a terminal, are invisible, or change the direction or the line of a text."""


def visible(text: str) -> str:
    """The text with the characters of `HIDDEN` written as escapes."""
    return HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
