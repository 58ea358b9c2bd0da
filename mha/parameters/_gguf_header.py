"""The header of a .gguf file: what it says of its model, and where its arrays are.

No size is believed before it is compared with the file's own. Texts and arrays of the metadata are
passed over, and read when they are asked for: a vocabulary is some 10^5 of them.
"""

from __future__ import annotations

import math
import os
import struct
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mha.parameters._files import Tensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_AXES = 4
LONGEST_NAME = (1 << 16) - 1  # bytes
MOST_TEXTS = 1 << 24  # of an array; the largest vocabularies have 2^18
PIECE = 1 << 20  # bytes that are looked through at once
OF_LENGTH = struct.Struct("<Q")
UINT32 = "<I"
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: UINT32, 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
           11: "<q", 12: "<d"}
TEXT, ARRAY = 8, 9
# What GGUF calls the types of arrays, numbers of a block of them, and its bytes.
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18)}


class Later(NamedTuple):
    """A text or, where length is given, an array of so many values, that was passed over."""

    type: int
    start: int
    length: int | None = None

    def read(self, file: BinaryIO) -> Any:
        """The text, or a list."""
        file.seek(self.start)
        reader = Reader(file)
        if self.length is None:
            return reader.text()
        if self.type == TEXT:
            return [reader.text() for _ in range(self.length)]
        code = np.dtype(SCALARS[self.type])
        numbers = np.frombuffer(reader.take(self.length * code.itemsize), code)
        return numbers.tolist()


class Header(NamedTuple):
    """What a file says: numbers and what is read later, by key; where each array is, by name."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]


class Reader:
    """A file from where it stands; nothing is asked of it that lies behind its end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size
        self.place = file.tell()

    def _check_has(self, count: int) -> None:
        if count > self.size - self.place:
            raise ValueError("a file that ends before what it has said")

    def take(self, count: int) -> bytes:
        self._check_has(count)
        data = self._file.read(count)
        if len(data) < count:
            raise ValueError("a file that was cut while it was read")
        self.place += count
        return data

    def skip(self, count: int) -> None:
        self._check_has(count)
        self.place += count
        self._file.seek(self.place)

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text(self, longest: int | None = None) -> str:
        length = self.number("<Q")
        if longest is not None and length > longest:
            raise ValueError(f"a name of {length} bytes")
        return self.take(length).decode()

    def skip_texts(self, count: int) -> None:
        if count > MOST_TEXTS:
            raise ValueError(f"an array of {count} texts")
        length_at = OF_LENGTH.unpack_from
        while count:
            piece = self._file.read(PIECE)
            place, last = 0, len(piece) - OF_LENGTH.size
            if last < 0:
                raise ValueError("a file that ends before what it has said")
            while count and place <= last:
                place += OF_LENGTH.size + length_at(piece, place)[0]
                count -= 1
            self.skip(place)


def header_of(file: BinaryIO) -> Header:
    """Of a file that stands at its beginning; a ValueError says what does not fit together."""
    reader = Reader(file)
    if reader.take(len(MAGIC)) != MAGIC:
        raise ValueError("a file of another kind")
    version = reader.number(UINT32)
    if version & 0xffff == 0:
        raise ValueError("numbers in the other byte order")
    if version not in VERSIONS:
        raise ValueError(f"version {version} of GGUF")
    count_of_tensors, count_of_values = reader.number("<Q"), reader.number("<Q")
    values: dict[str, Any] = {}
    for _ in range(count_of_values):
        key = reader.text(LONGEST_NAME)
        if key in values:
            raise ValueError(f"the key {key!r} twice")
        values[key] = _value(reader, reader.number(UINT32))
    found: dict[str, tuple[int, Tensor]] = {}
    for _ in range(count_of_tensors):
        name = reader.text(LONGEST_NAME)
        if name in found:
            raise ValueError(f"the array {name!r} twice")
        found[name] = _tensor(reader, name)
    return Header(values, _placed(found, _start_of_arrays(reader, values), reader.size))


def _value(reader: Reader, kind: int) -> Any:
    """The number, or where a text or an array is."""
    if kind in SCALARS:
        return reader.number(SCALARS[kind])
    start = reader.place
    if kind == TEXT:
        reader.skip(reader.number("<Q"))
        return Later(TEXT, start)
    if kind != ARRAY:
        raise ValueError(f"a value of type {kind}")
    of_each, count = reader.number(UINT32), reader.number("<Q")
    start = reader.place
    if of_each == TEXT:
        reader.skip_texts(count)
    elif of_each in SCALARS:
        reader.skip(count * struct.calcsize(SCALARS[of_each]))
    else:
        raise ValueError(f"an array of values of type {of_each}")
    return Later(of_each, start, count)


def _tensor(reader: Reader, name: str) -> tuple[int, Tensor]:
    """The bytes of an array, and where it starts among the arrays."""
    axes = reader.number(UINT32)
    if axes > MOST_AXES:
        raise ValueError(f"{name} of {axes} axes")
    shape = tuple(reader.number("<Q") for _ in range(axes))[::-1]
    width = shape[-1] if shape else 1
    number = reader.number(UINT32)
    # Of a type that came later, which is an error when it is read, nothing is known.
    kind, numbers, nbytes = TYPES.get(number, (f"number {number}", 1, 0))
    if width % numbers:
        raise ValueError(f"{name} of shape {shape}, whose rows are no blocks of {kind}")
    return math.prod(shape) // numbers * nbytes, Tensor(kind, shape, reader.number("<Q"))


def _start_of_arrays(reader: Reader, values: dict[str, Any]) -> int:
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError("a general.alignment that is no power of two")
    return -(-reader.place // alignment) * alignment


def _placed(found: dict[str, tuple[int, Tensor]], start: int, size: int) -> dict[str, Tensor]:
    """The arrays by where they are in the file: each in it, none within another."""
    tensors = {name: tensor._replace(start=start + tensor.start)
               for name, (_, tensor) in found.items()}
    end, before = 0, ""
    for name in sorted(found, key=lambda name: (tensors[name].start, found[name][0])):
        nbytes = found[name][0]
        first = tensors[name].start
        if first + nbytes > size:
            raise ValueError(f"{name}, which ends at byte {first + nbytes}, in {size} bytes")
        if nbytes and first < end:
            raise ValueError(f"{name} within the bytes of {before}")
        if nbytes:
            end, before = first + nbytes, name
    return tensors
