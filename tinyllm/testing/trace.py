"""The trace language: a program of cache operations, a line each, readable aloud.

    trace 1                   # the version of the language, if the first line says it
    new 4 2 1 1 2             # blocks, block size, layers, heads, dims: a fresh, empty cache
    add 0
    append 0 0 3              # sequence, layer, tokens
    append 0 0 2 as strided   # the same, handed over in another form
    append 0 0 1 KHEX VHEX    # with data: little-endian float32, C order [H, T, D]
    fork 0 1
    append 0 0 1 @7/40        # values of the pattern from number 7 (V: from 40) on: data that repeat
    append 1 0 9 ! OutOfBlocks   # must be refused, by an error of that name
    table 0                   # reads: also len SEQ LAYER, gather SEQ LAYER, stats
    needed 0 0 5              # where the cache can: also pages LAYER SEQ, runs SEQ LAYER, check
    truncate 1 2              # cut every layer to two positions, where the cache can
    free 0 quiet              # nothing is looked at after this line
    len 0 1 boxed             # its numbers are handed over as objects that are integers by `__index__` alone
    close

`#` starts a comment. An append without data stores the next values of one pattern: for the i-th scalar since
`new`, in C order of [H, T, D], k = 1 + (i mod 2039) and v = -k, which float16 holds exactly. A refused append
does not advance i, and neither does one with `@`. A number that is not whole (`add 1.5`) is handed over as it
is, to be refused.
"""

import math
import re
import sys
from typing import Any, NamedTuple

import numpy as np

from tinyllm.testing.contract import Config
from tinyllm.testing.forms import FORMS, Values
from tinyllm.testing.operations import OPERATIONS

VERSION = 1
PATTERN = 2039  # the largest prime whose multiples up to it float16 holds exactly (its integers end at 2048)

MOST = {
    "blocks": 2**31 - 1,  # ids are int32
    "block size": 2**31 - 1,
    "layers": 2**12,  # ten times as many as any model has; all of them are looked at after each line
    "heads": 2**12,
    "dims": 2**12,
}
"""What a size may be at most; a cache of larger ones cannot be run."""
VALUES = 2**24  # of K, that one append hands over; what is longer is written as several
ADDRESSED = 2**47  # bytes: of what a pool may take at most, if this machine has them
SHOWN = 200  # characters of a line that a message quotes


class TraceError(ValueError):
    """A trace that cannot be read, or that asks for what its own state forbids."""


class TooLarge(TraceError):  # noqa: N818 - no error of anyone's
    """A program for which this machine has too little memory, or that no machine could run."""


class NotOffered(TraceError):  # noqa: N818 - no error of anyone's
    """A program that needs a capability which the cache under test does not have."""


class Op(NamedTuple):
    """One line of a trace."""

    name: str
    args: tuple[int | float, ...] = ()
    form: str = ""
    data: tuple[str, str] | None = None
    refusal: str = ""
    quiet: bool = False
    places: tuple[int, int] | None = None  # in the pattern, of K and V
    boxed: bool = False

    def __str__(self) -> str:
        words = [self.name, *map(str, self.args), *(self.data or ())]
        words += [f"@{self.places[0]}/{self.places[1]}"] if self.places else []
        words += ["as", self.form] if self.form else []
        words += ["!", self.refusal] if self.refusal else []
        words += ["boxed"] if self.boxed else []
        words += ["quiet"] if self.quiet else []
        return " ".join(words)


def parse(text: str) -> list[Op]:
    """The operations of a trace. Raises TraceError, which names the line and what is wrong with it."""
    ops: list[Op] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if words:
            try:
                if words[0] == "trace" and not ops:
                    _check_version(words[1:])
                else:
                    ops.append(_parse_line(words))
            except TraceError as error:
                raise TraceError(f"line {number}: {error}: {_cut(line.strip())}") from None
    return ops


def program(text: str) -> list[Op]:
    """The same of a text that has to be run. Raises TraceError also where there is no line at all."""
    ops = parse(text)
    if not ops:
        raise TraceError("there is no line to run, and so nothing to check")
    return ops


def check_sizes(op: Op, config: Config) -> None:
    """Raises TooLarge for a `new` or an `append` that no machine can run; `config` is that of the cache."""
    if op.name == "append" and op.data is None:
        most = VALUES // (config.n_kv_heads * config.d_head)
        if op.args[2] > most:
            raise TooLarge(f"'{op}' hands over too much at once: at most {most:,} tokens of this cache")
    if op.name != "new":
        return
    for name, size in zip(OPERATIONS["new"].arguments, op.args, strict=True):
        if isinstance(size, int) and size > MOST[name]:
            raise TooLarge(f"'{op}' is too large: {name} are at most {MOST[name]:,}")
    if all(isinstance(size, int) and size > 0 for size in op.args) and pool_bytes(op) > ADDRESSED:
        raise TooLarge(f"'{op}' is too large: a pool of {pool_bytes(op):,} bytes, at most {ADDRESSED:,}")


def pool_bytes(op: Op) -> int:
    """What K and V of a `new` take."""
    return 4 * math.prod(map(int, op.args))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text):,} characters)"


def _check_version(words: list[str]) -> None:
    if len(words) != 1 or not re.fullmatch(r"[1-9][0-9]{0,8}", words[0]):
        raise TraceError("trace is followed by the version of the language, a whole number from 1")
    if int(words[0]) > VERSION:
        raise TraceError(f"version {words[0]} of the trace language; this kit reads versions up to {VERSION}")


def _parse_line(words: list[str]) -> Op:
    refusal = form = ""
    name, *words = words
    quiet = words[-1:] == ["quiet"]
    words = words[:-1] if quiet else words
    boxed = words[-1:] == ["boxed"]
    words = words[:-1] if boxed else words
    if name not in OPERATIONS:
        raise TraceError(f"{_cut(name)!r} is no operation; there are {', '.join(OPERATIONS)}")
    if "!" in words:
        at = words.index("!")
        words, after = words[:at], words[at + 1 :]
        if len(after) != 1 or not after[0].isidentifier():
            raise TraceError("! is followed by the name of one error")
        refusal = after[0]
    if "as" in words and name == "append":
        at = words.index("as")
        words, after = words[:at], words[at + 1 :]
        if len(after) != 1 or after[0] not in FORMS:
            raise TraceError(f"as is followed by one of {', '.join(FORMS)}")
        form = after[0]
    wanted = OPERATIONS[name].arguments
    args, rest = words[: len(wanted)], words[len(wanted) :]
    places = None
    if name == "append" and len(rest) == 1 and rest[0].startswith("@"):
        places, rest = _places(rest[0]), []
    if len(args) < len(wanted) or (rest and not (name == "append" and len(rest) == 2 and not form)):
        raise TraceError(f"{name} takes {', '.join(wanted) or 'nothing'}")
    for word in rest:
        _decode(word)
    numbers = tuple(_number(word) for word in args)
    if name == "append" and not isinstance(numbers[2], int):
        raise TraceError(f"{args[2]} tokens: a number of tokens is whole")
    return Op(name, numbers, form, (rest[0], rest[1]) if rest else None, refusal, quiet, places, boxed)


def _number(word: str) -> int | float:
    try:
        return int(word)
    except ValueError:
        if word.lstrip("+-").isdecimal():
            digits = sys.get_int_max_str_digits()
            raise TraceError(f"{_cut(word)} is too long for a number, of {digits:,} digits at most") from None
    try:
        return float(word)
    except ValueError:
        raise TraceError(f"{_cut(word)!r} is no number") from None


def _places(word: str) -> tuple[int, int]:
    """Where in the pattern K and V begin, by `@K` or `@K/V`."""
    k, slash, v = word[1:].partition("/")
    numbers = k, v if slash else k
    if not all(re.fullmatch(r"[0-9]{1,12}", number) for number in numbers):
        raise TraceError(f"{_cut(word)!r} is no place in the pattern: @ and a number of 12 digits at most")
    return int(numbers[0]), int(numbers[1])


def _decode(word: str) -> Values:
    try:
        return np.frombuffer(bytes.fromhex(word), "<f4").astype(np.float32)
    except ValueError:
        raise TraceError(f"{word[:20]!r} is not the hex of float32 values") from None


def encode(values: Any) -> str:
    """Values as the hex of little-endian float32 in C order."""
    return np.ascontiguousarray(values, "<f4").tobytes().hex()


def pattern(start: int, config: Config, tokens: int) -> tuple[Values, Values]:
    """The K and V of an append without data whose first scalar is number `start` since `new`."""
    shape = (config.n_kv_heads, tokens, config.d_head)
    i = np.arange(start, start + config.n_kv_heads * tokens * config.d_head)
    k = (1 + i % PATTERN).astype(np.float32).reshape(shape)
    return k, -k


def values(op: Op, start: int, config: Config) -> tuple[Values, Values]:
    """The K and V `[H, T, D]` that an append line stands for. Raises TraceError when data does not fit."""
    tokens = max(0, int(op.args[2]))
    if op.data is None:
        at_k, at_v = op.places or (start, start)
        return pattern(at_k, config, tokens)[0], pattern(at_v, config, tokens)[1]
    shape = (config.n_kv_heads, tokens, config.d_head)
    k, v = (_decode(word) for word in op.data)
    if k.size != v.size or k.size != config.n_kv_heads * tokens * config.d_head:
        raise TraceError(f"{op.name} {op.args}: data of {k.size} and {v.size} values for shape {shape}")
    return k.reshape(shape), v.reshape(shape)
