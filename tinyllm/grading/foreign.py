"""Text that others wrote: titles of bugs, ids of tests, messages of exceptions, what an engine says."""

import re

HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
"""Characters that command a terminal, show as nothing, or turn or break the text after them."""


def visible(text: str) -> str:
    """The text with control characters, and those that turn it around, written as escapes."""
    return HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
