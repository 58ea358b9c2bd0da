"""Arrays in the blocks of GGML, as files of llama.cpp hold them: q8_0, q4_0, q4_k and q6_k."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._base.pieces import copied, copy_into
from mha._functions.quantised import BITS, ROWS, Blocks

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
PIECE = 1 << 18  # numbers that are dequantised at once, or those of a row
LOW, HIGH = 15, 4  # the mask of a byte's low four bits, and the shift to its high ones


class Kind(NamedTuple):
    """What a block is."""

    numbers: int
    nbytes: int
    dequantise: Callable[[Bytes], NDArray[np.float32]]  # (blocks, nbytes) -> (blocks, numbers)


def _halves(bytes_of_each: Bytes) -> NDArray[np.float16]:
    """The float16 numbers in bytes (blocks, 2 n)."""
    return np.ascontiguousarray(bytes_of_each).view("<f2")


def _nibbles(packed: Bytes) -> Bytes:
    """Bytes (..., n) as numbers of four bits (..., 2, n): the low ones before the high ones."""
    return np.stack([packed & LOW, packed >> HIGH], axis=-2)


def _numbers_8(blocks: Bytes) -> NDArray[np.int8]:
    return blocks[:, 2:].view(np.int8)


def _numbers_4(blocks: Bytes) -> NDArray[np.int8]:
    """From -8 to 7: byte i has the numbers i and i + 16."""
    whole = _nibbles(blocks[:, 2:]).reshape(len(blocks), ROWS)
    return whole.astype(np.int8) - np.int8(8)


NUMBERS = {"q8_0": _numbers_8, "q4_0": _numbers_4}


def _of_8(blocks: Bytes) -> NDArray[np.float32]:
    return _numbers_8(blocks).astype(np.float32) * _halves(blocks[:, :2]).astype(np.float32)


def _of_4(blocks: Bytes) -> NDArray[np.float32]:
    return _halves(blocks[:, :2]).astype(np.float32) * _numbers_4(blocks).astype(np.float32)


def _of_4_k(blocks: Bytes) -> NDArray[np.float32]:
    """Eight runs of 32 numbers n: (scale * s) * n - (least * m), of s and m with six bits. Both
    products are exact, their difference is rounded once."""
    scale, least = _halves(blocks[:, :4]).astype(np.float32).T[:, :, None]
    first, second, rest = blocks[:, 4:16].reshape(-1, 3, 4).transpose(1, 0, 2)
    # The last four of s and m have their low four bits in `rest`, their high two above the others'.
    scales = np.hstack([first & 63, rest & LOW | first >> 2 & 48]).astype(np.float32)
    leasts = np.hstack([second & 63, rest >> HIGH | second >> 2 & 48]).astype(np.float32)
    runs = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).astype(np.float32)
    found = (scale * scales)[:, :, None] * runs - (least * leasts)[:, :, None]
    return found.reshape(len(blocks), 256)


def _of_6_k(blocks: Bytes) -> NDArray[np.float32]:
    """Sixteen runs of 16 numbers n of six bits: (scale * s) * (n - 32), of s with eight bits."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3  # (blocks, 2, 4, 32)
    whole = (low | high << HIGH).astype(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scales = _halves(blocks[:, 208:]).astype(np.float32) * scales
    found = scales[:, :, None] * whole.reshape(-1, 16, 16).astype(np.float32)
    return found.reshape(len(blocks), 256)


def _row_numbers(rows: ArrayLike) -> Array:
    """An array of ints that chooses along one axis."""
    numbers = np.asarray(rows)
    if isinstance(rows, list) and not numbers.size:  # which NumPy makes floats
        return numbers.astype(np.intp)
    if isinstance(rows, tuple) or numbers.dtype.kind not in "iu":
        raise IndexError(f"rows: got {rows!r}, wanted an int, a slice or an array of ints")
    return numbers


KINDS = {"q8_0": Kind(32, 34, _of_8), "q4_0": Kind(32, 18, _of_4), "q4_k": Kind(256, 144, _of_4_k),
         "q6_k": Kind(256, 210, _of_6_k)}


class QuantisedArray:
    """An array whose blocks lie along its last axis, or the transpose of such a matrix.

    NumPy makes the float32 array of it that `unpack` gives. It is never changed.
    """

    __slots__ = ("_data", "_is_transposed", "_stored_shape", "dtype")

    def __init__(self, kind: str, shape: tuple[int, ...], data: Bytes, *,
                 is_transposed: bool = False) -> None:
        """data: the blocks (rows, bytes of a row) of the array of this shape."""
        self.dtype = kind
        self._stored_shape = shape
        self._data = data
        self._is_transposed = is_transposed

    @property
    def shape(self) -> tuple[int, ...]:
        return self._stored_shape[::-1] if self._is_transposed else self._stored_shape

    @property
    def ndim(self) -> int:
        return len(self._stored_shape)

    @property
    def size(self) -> int:
        return math.prod(self._stored_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the blocks take."""
        return self._data.nbytes

    @property
    def is_weight(self) -> bool:
        """Whether it is a matrix (in, out) whose blocks lie along the input axis."""
        return self._is_transposed

    @property
    def T(self) -> QuantisedArray:  # noqa: N802 - as NumPy calls it
        """The transpose of a matrix, of the same blocks."""
        if self.ndim != 2:
            raise ValueError(f".T: got shape {self.shape}, wanted that of a matrix")
        return QuantisedArray(self.dtype, self._stored_shape, self._data,
                              is_transposed=not self._is_transposed)

    def __len__(self) -> int:
        if not self._stored_shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __getitem__(self, rows: ArrayLike | slice) -> NDArray[np.float32]:
        """These rows of a matrix (rows, n), with the bits of unpack()[rows]: by an int, a slice or
        ints of any shape. No others are dequantised."""
        if self.ndim != 2 or self._is_transposed:
            raise IndexError(f"rows: got some of {self!r}, wanted those of a matrix whose rows are"
                             " whole blocks; unpack() has all numbers")
        if not isinstance(rows, slice):
            rows = _row_numbers(rows)
        data = self._data[rows]  # (..., bytes of a row): NumPy counts from the end, and checks
        width = self._stored_shape[1]
        whole = data.reshape(math.prod(data.shape[:-1]), data.shape[-1])
        return QuantisedArray(self.dtype, (*data.shape[:-1], width), whole).unpack()

    def __repr__(self) -> str:
        return f"QuantisedArray(shape={self.shape}, dtype={self.dtype})"

    def unpack(self) -> NDArray[np.float32]:
        """A new array of its numbers, to the bits of the gguf package's."""
        kind = KINDS[self.dtype]
        whole = np.empty(self.shape, np.float32)
        # (rows, n), as the blocks lie
        rows = whole.T if self._is_transposed else whole.reshape(len(self._data), self.shape[-1])
        step = max(PIECE // max(rows.shape[1], 1), 1)
        with np.errstate(invalid="ignore"):  # of infinite scales
            for first in range(0, len(rows) if whole.size else 0, step):
                blocks = self._data[first:first + step].reshape(-1, kind.nbytes)
                rows[first:first + step] = kind.dequantise(blocks).reshape(-1, rows.shape[1])
        return whole

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("copy: got False, wanted None or True: the numbers are in blocks")
        return self.unpack().astype(np.float32 if dtype is None else dtype, copy=False)

    def in_rows(self, order: NDArray[np.intp]) -> QuantisedArray:
        """These rows of a matrix (rows, n), whose blocks stay whole."""
        return QuantisedArray(self.dtype, (len(order), self._stored_shape[1]), self._data[order])

    def blocks(self, name: str = "weight") -> Blocks:
        """The same numbers and scales, of a weight (in, out) that is q8_0 or q4_0."""
        if self.dtype not in BITS or not self.is_weight:
            raise TypeError(f"{name}: got {self!r}, wanted one (in, out) of q8_0 or q4_0 blocks")
        columns, rows = self._stored_shape
        kind, split = KINDS[self.dtype], NUMBERS[self.dtype]
        data = self._data.reshape(columns, rows // ROWS, kind.nbytes)
        scales = copied(data[:, :, :2].view("<f2")[:, :, 0].T, np.float16, order="C")
        if not np.isfinite(scales).all():
            raise ValueError(f"{name}: got scales that are not finite, wanted finite ones, for"
                             f" {self.dtype}")
        numbers = np.empty((rows // ROWS, ROWS, columns), np.int8)
        step = max(PIECE // max(rows, 1), 1)
        for first in range(0, columns, step):
            part = split(data[first:first + step].reshape(-1, kind.nbytes))
            part = part.reshape(-1, rows // ROWS, ROWS)
            copy_into(numbers[:, :, first:first + step], part.transpose(1, 2, 0))
        return Blocks(self.dtype, numbers.reshape(rows, columns), scales)
