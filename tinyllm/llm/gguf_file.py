"""Read GGUF, the file format of llama.cpp: what a model says of itself, and where its tensors lie.

The `gguf` package reads these files too, but makes arrays of every token's text: that takes seconds, this a
twentieth of one. What a quantised number means is left to that package; see `weights`.

A file is checked as a whole when it is opened: what is truncated, overlaps, or is not as the format has it is
refused, and nothing is allocated that the file is not long enough for. Lists in the metadata are checked, but
read when they are asked for: nobody asks for most. The source is the format's own text, ggml's
`docs/gguf.md`; like llama.cpp, this wants tensors to lie in the order of their list, without gaps.
"""

import math
import os
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of a value that have one size, and how `struct` calls them; there are two more."""
STRING, ARRAY = 8, 9

MOST = 65_536
"""Metadata values of a file, and tensors: each becomes an object, which takes many times its bytes."""

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""The tensor types that are read: those of which a test knows what their bytes mean."""


class ModelError(ValueError):
    """A model that is missing, damaged, or none that this decoder can run; the message says which."""


@dataclass(frozen=True)
class Values:
    """Where a list in the metadata lies in the file, and as what; `GGUF.strings` or `numbers` reads it."""

    type: int  # STRING, or one of SCALARS
    count: int
    start: int  # from the beginning of the file

    def __repr__(self) -> str:
        return f"a list of {self.count}"


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies in the file, and as what."""

    name: str
    type: str  # one of TYPES
    shape: tuple[int, ...]  # as NumPy has it: rows first
    start: int  # from the beginning of the file
    nbytes: int

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


class GGUF:
    """A GGUF file: its metadata and its list of tensors. It is not kept open.

    Args:
        path: the file.

    Attributes:
        path: likewise.
        metadata: values by key: numbers, bools, strings, and where lists of one of these lie.
        tensors: by name, in the order of the file.

    Raises:
        ModelError: it cannot be read, is no GGUF file, is damaged, has more than `MOST` metadata values or
            tensors, or a tensor of a type not in `TYPES`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with self._opened() as reader:
            self._read(reader)

    def get(self, key: str, kind: type[T]) -> T:
        """A value that has to be there, and of this type.

        Raises:
            ModelError: it is not.
        """
        if key not in self.metadata:
            raise ModelError(f"{self.path.name} does not say {key}")
        value = self.metadata[key]
        if type(value) is not kind:  # not isinstance: True is no number
            wanted = "a list" if kind is Values else f"of type {kind.__name__}"
            raise ModelError(f"{self.path.name}: {key} is {value!r}; it must be {wanted}")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings that has to be there, and to have some.

        Raises:
            ModelError: it is not, or the file has been changed since it was opened.
        """
        values = self._values(key, "strings", {STRING})
        with self._opened(values.start) as reader:
            return [reader.string(key) for _ in range(values.count)]

    def numbers(self, key: str) -> NDArray[Any]:
        """A list of numbers, `[count]` of the type in the file; errors as for `strings`."""
        values = self._values(key, "numbers", SCALARS.keys())
        kind = np.dtype(SCALARS[values.type]).newbyteorder("<")
        with self._opened(values.start) as reader:
            return np.frombuffer(reader.take(values.count * kind.itemsize), kind)

    def _values(self, key: str, what: str, types: Collection[int]) -> Values:
        values = self.get(key, Values)
        if values.type not in types or not values.count:
            raise ModelError(f"{self.path.name} has {key}, which is no list of {what}")
        return values

    @contextmanager
    def _opened(self, at: int = 0) -> Iterator["_Reader"]:
        try:
            with self.path.open("rb") as file:
                yield _Reader(file, self.path.name, at)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror}") from error

    def raw(self, tensor: Tensor) -> NDArray[np.uint8]:
        """The bytes of a tensor, a row for each of its rows.

        Raises:
            ModelError: the file cannot be read, or has become shorter since it was opened.
        """
        try:
            data = np.fromfile(self.path, np.uint8, tensor.nbytes, offset=tensor.start)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror}") from error
        if len(data) != tensor.nbytes:
            raise ModelError(f"{self.path.name} ends within {tensor.name}; it has been changed")
        return data.reshape(*tensor.shape[:-1], -1)

    def _read(self, reader: "_Reader") -> None:
        if reader.take(4) != b"GGUF":
            raise reader.error("does not begin as a GGUF file does")
        if (version := reader.number("I")) not in {2, 3}:
            raise reader.error(f"is of GGUF version {version}; versions 2 and 3, little-endian, are read")
        # Of the least an entry takes, not more than the file has room for.
        tensors, values = reader.few(32, "tensors"), reader.few(13, "metadata values")
        self.metadata = self._collect(reader, values, "key", _value)
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise reader.error(f"has general.alignment {alignment!r}; it must be a power of two from 8 up")
        listed = self._collect(reader, tensors, "tensor", _entry)
        base = _up(reader.at, alignment)
        self.tensors: dict[str, Tensor] = {}
        expected = 0
        for name, (type_, shape, offset) in listed.items():
            tensor = _tensor(reader, name, type_, shape, base + offset)
            if offset != expected:
                raise reader.error(f"has {name} at {offset} of its data; it must be at {expected}")
            expected = _up(offset + tensor.nbytes, alignment)
            self.tensors[name] = tensor

    @staticmethod
    def _collect(
        reader: "_Reader", count: int, what: str, read: Callable[["_Reader", str], T]
    ) -> dict[str, T]:
        found: dict[str, T] = {}
        for _ in range(count):
            name = reader.string(f"the name of a {what}")
            if name in found:
                raise reader.error(f"has the {what} {name!r} twice")
            found[name] = read(reader, name)
        return found


class _Reader:
    """Little-endian values, one after the other; never more than the file holds."""

    def __init__(self, file: BinaryIO, name: str, at: int = 0) -> None:
        self.size = os.fstat(file.fileno()).st_size
        self.at = at
        file.seek(at)
        self._file = file
        self._name = name

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self._name} {text}")

    def take(self, count: int) -> bytes:
        self._advance(count)
        if len(data := self._file.read(count)) != count:
            raise self.error("has been changed while it was read")
        return data

    def skip(self, count: int) -> None:
        self._advance(count)
        self._file.seek(self.at)

    def _advance(self, count: int) -> None:
        self.at += count
        # Compared first: a length that makes no sense must not be allocated.
        if self.at > self.size:
            raise self.error(
                f"is truncated or damaged: of {self.size:,} bytes, byte {self.at - 1:,} is needed"
            )

    def number(self, code: str) -> Any:
        form = "<" + code
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, least: int, what: str) -> int:
        count: int = self.number("Q")
        if count * least > self.size - self.at:
            raise self.error(f"is truncated or damaged: it has no room for {count:,} {what}")
        return count

    def few(self, least: int, what: str) -> int:
        if (count := self.count(least, what)) > MOST:
            raise self.error(f"has {count:,} {what}; at most {MOST:,} are read")
        return count

    def string(self, what: str) -> str:
        data = self.take(int.from_bytes(self.take(8), "little"))  # `number` takes longer, and there are many
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"is damaged: {what} is not UTF-8, {data[:40]!r}") from error


def _value(reader: _Reader, key: str) -> Any:
    """A metadata value, its type first."""
    type_ = reader.number("I")
    if type_ == STRING:
        return reader.string(key)
    if type_ in SCALARS:
        return reader.number(SCALARS[type_])
    if type_ != ARRAY:
        raise reader.error(f"is damaged: {key} has type {type_}, which is none")
    inner = reader.number("I")
    if inner != STRING and inner not in SCALARS:
        raise reader.error(f"has {key}, a list of values of type {inner}, which is not read")
    size = 8 if inner == STRING else struct.calcsize(SCALARS[inner])
    values = Values(
        inner, reader.count(size, f"{'strings' if inner == STRING else 'numbers'} of {key}"), reader.at
    )
    if inner == STRING:
        for _ in range(values.count):
            reader.string(key)
    else:
        reader.skip(values.count * size)
    return values


def _entry(reader: _Reader, name: str) -> tuple[int, tuple[int, ...], int]:
    """Of the list of tensors: the type, the shape, and the offset in the data."""
    if not 1 <= (ndim := reader.number("I")) <= 4:
        raise reader.error(f"has {name} of {ndim} dimensions; it must be 1 to 4")
    shape = tuple(reader.number("Q") for _ in range(ndim))[::-1]
    return reader.number("I"), shape, reader.number("Q")


def _tensor(reader: _Reader, name: str, type_: int, shape: tuple[int, ...], start: int) -> Tensor:
    kind, numbers, size = _types().get(type_, (str(type_), 0, 0))
    if kind not in TYPES:
        raise reader.error(f"has {name} of type {kind}; what is read is {', '.join(TYPES)}")
    if 0 in shape or shape[-1] % numbers:
        bound = f"rows of {kind} must be a multiple of {numbers} long, and there must be some"
        raise reader.error(f"has {name} of shape {list(shape)}; {bound}")
    nbytes = math.prod(shape) // numbers * size
    if start + nbytes > reader.size:
        end = f"{start + nbytes:,}"
        raise reader.error(f"is truncated: {name} ends at byte {end}, the file at {reader.size:,}")
    return Tensor(name, kind, shape, start, nbytes)


@cache
def _types() -> dict[int, tuple[str, int, int]]:
    """All types that there are: their names, and so many numbers in so many bytes."""
    from gguf import GGML_QUANT_SIZES  # noqa: PLC0415 - the extra may be missing

    return {kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


def _up(offset: int, alignment: int) -> int:
    """The next multiple."""
    return -(-offset // alignment) * alignment
