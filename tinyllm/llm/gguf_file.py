"""Read GGUF, the file format of llama.cpp: the metadata of a model, and the places of its tensors.

The `gguf` package reads these files too, but makes an array of every token's text, which takes seconds; this
reader takes a twentieth of a second. `weights` uses that package to dequantize.

The whole structure is checked when a file is opened. Truncated, overlapping and invalid files are refused,
and nothing is allocated that exceeds the length of the file. Lists in the metadata are checked at once and
read on demand, since most are not needed. The source is the format's own text, ggml's `docs/gguf.md`; as in
llama.cpp, tensors must lie in the order of their list, without gaps.
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
"""The `struct` codes of the types with a fixed size; strings and arrays have none."""
STRING, ARRAY = 8, 9

MOST = 65_536
"""The most metadata values and the most tensors: each becomes an object of many times its bytes."""

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""The tensor types that are read; a test compares the meaning of each."""


class ModelError(ValueError):
    """A model is missing, damaged, or not supported by this decoder."""


@dataclass(frozen=True)
class Values:
    """The place and type of a list in the metadata; `GGUF.strings` or `numbers` reads it."""

    type: int  # STRING, or one of SCALARS
    count: int
    start: int  # from the beginning of the file

    def __repr__(self) -> str:
        return f"a list of {self.count}"


@dataclass(frozen=True)
class Tensor:
    """The place, type and shape of a tensor in the file."""

    name: str
    type: str  # one of TYPES
    shape: tuple[int, ...]  # as NumPy has it: rows first
    start: int  # from the beginning of the file
    nbytes: int

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


class GGUF:
    """The metadata and the list of tensors of a GGUF file, which is not kept open.

    Args:
        path: the file.

    Attributes:
        path: the file.
        metadata: values by key: numbers, bools, strings, and `Values` for lists.
        tensors: by name, in the order of the file.

    Raises:
        ModelError: the file cannot be read, is no GGUF file or damaged, has more than `MOST` metadata values
            or tensors, or has a tensor of a type not in `TYPES`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with self._opened() as reader:
            self._read(reader)

    def get(self, key: str, kind: type[T]) -> T:
        """The value of a key.

        Raises:
            ModelError: there is no such key, or its value has another type.
        """
        if key not in self.metadata:
            raise ModelError(f"{self.path.name} does not say {key}")
        value = self.metadata[key]
        if type(value) is not kind:  # not isinstance: True is no number
            wanted = "a list" if kind is Values else f"of type {kind.__name__}"
            raise ModelError(f"{self.path.name}: {key} is {value!r}; it must be {wanted}")
        return value

    def strings(self, key: str) -> list[str]:
        """The strings of a list that is not empty.

        Raises:
            ModelError: there is no such list, or the file has changed since it was opened.
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
            ModelError: the file cannot be read, or is shorter than when it was opened.
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
        # The least bytes of an entry bound the counts by the length of the file.
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
    """Reads little-endian values in order, never past the end of the file."""

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
        # Compared first: a nonsensical length must not be allocated.
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
        data = self.take(
            int.from_bytes(self.take(8), "little")
        )  # faster than `number`; there are many strings
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"is damaged: {what} is not UTF-8, {data[:40]!r}") from error


def _value(reader: _Reader, key: str) -> Any:
    """Read a metadata value after its type."""
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
    """Read an entry of the list of tensors: the type, the shape, and the offset in the data."""
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
    """All types: the name, the elements of a block, and its bytes."""
    from gguf import GGML_QUANT_SIZES  # noqa: PLC0415 - the extra may be missing

    return {kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


def _up(offset: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return -(-offset // alignment) * alignment
