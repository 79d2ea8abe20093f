"""Stop texts: they end an output, may begin and end within a token, and are not shown."""

import codecs
from collections.abc import Collection, Iterable, Sequence

from tinyllm.llm.tokenizer import Tokenizer


class Stops:
    """The stop texts of an output, each of at least one letter.

    Args:
        tokenizer: the tokenizer of the model.
        texts: the texts; there may be none.

    Attributes:
        ids: the control tokens that the texts name, since these ids decode to no text.

    Raises:
        ValueError: a text is empty.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Collection[str] = ()) -> None:
        if "" in texts:
            raise ValueError("a stop text is empty; it must have at least one letter")
        self.tokenizer = tokenizer
        self.ids = frozenset(i for text in texts if (i := tokenizer.control(text)) is not None)
        self._texts = [text.encode(errors="replace") for text in texts]
        self._longest = max(map(len, self._texts), default=0)

    def __call__(self, ids: Sequence[int]) -> bool:
        """Whether the last of these tokens completes a stop text; the `until` of `generate`."""
        if not self._texts:
            return False
        tail = self.tokenizer.token(ids[-1])
        enough = len(tail) + self._longest - 1
        for id_ in reversed(ids[:-1]):
            if len(tail) >= enough:
                break
            tail = self.tokenizer.token(id_) + tail
        return any(text in tail for text in self._texts)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids up to the first stop text."""
        stream = self.stream()
        return "".join(map(stream.feed, ids)) + stream.end()

    def stream(self) -> "StopStream":
        """A decoder as of `Tokenizer.stream`, up to the first stop text."""
        return StopStream(self.tokenizer, self._texts)


class StopStream:
    """Decode tokens one by one; a possible start of a stop text is held back."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[bytes]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._held = b""
        self._over = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, id_: int) -> str:
        """The text that is certain after this token, often empty; errors as for `Tokenizer.token`."""
        data = self._held + self._tokenizer.token(id_)
        if self._over:
            return ""
        found = [at for text in self._texts if (at := data.find(text)) >= 0]
        if found:
            self._over = True
            shown = min(found)
            self._held = b""
        else:
            shown = len(data) - max((_overlap(data, text) for text in self._texts), default=0)
            self._held = data[shown:]
        return self._decoder.decode(data[:shown])

    def end(self) -> str:
        """The text held back, and U+FFFD for an incomplete character."""
        return self._decoder.decode(self._held, final=True)


def _overlap(data: bytes, text: bytes) -> int:
    """The length of the longest end of `data` that starts `text`."""
    return next((n for n in range(min(len(text) - 1, len(data)), 0, -1) if data.endswith(text[:n])), 0)
