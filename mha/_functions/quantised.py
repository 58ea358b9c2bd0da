"""Numbers in blocks of 32 along the input axis, 8 or 4 bits each, that share a float16 scale: the
types q8_0 and q4_0 of GGML."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mha._base.dtypes import in_type, is_bfloat16

Array = NDArray[Any]
BITS = {"q8_0": 8, "q4_0": 4}
ROWS = 32  # of a block
PIECE = 1 << 20  # numbers that are quantised at once


class Blocks(NamedTuple):
    """numbers int8 (in, out), of 4 bits from -8 to 7; scales float16 (in / 32, out)."""

    kind: str
    numbers: NDArray[np.int8]
    scales: NDArray[np.float16]

    def dequantised(self) -> NDArray[np.float32]:
        """numbers * scales, exactly: float32 (in, out)."""
        scales = self.scales.astype(np.float32)[:, None]
        whole = self.numbers.reshape(len(scales), ROWS, scales.shape[2]) * scales
        return whole.reshape(self.numbers.shape)


def checked_blocks(kind: Any, numbers: Any, scales: Any) -> Blocks:
    """What somebody claims to be blocks."""
    if not isinstance(kind, str) or kind not in BITS:
        raise ValueError(f"kind: got {kind!r}, wanted one of {', '.join(BITS)}")
    for array, name, dtype in ((numbers, "numbers", np.int8), (scales, "scales", np.float16)):
        if not isinstance(array, np.ndarray) or array.dtype.newbyteorder("=") != dtype:
            raise ValueError(f"{name}: wanted an array of {np.dtype(dtype)}")
    if not np.isfinite(scales).all():
        raise ValueError("scales: got some that are not finite")
    if kind == "q4_0" and numbers.size and not -8 <= numbers.min() <= numbers.max() <= 7:
        raise ValueError("numbers: got some beyond 4 bits")
    return Blocks(kind, numbers, scales)


@np.errstate(all="ignore")  # numbers near 0 become 0, and what is too large is an error below
def quantised(array: Array, kind: str, name: str = "weight") -> Blocks:
    """A matrix (in, out) in blocks: the numbers that the gguf package gives."""
    if array.ndim != 2:
        raise ValueError(f"{name}: got shape {array.shape}, wanted (in, out)")
    if array.dtype.kind not in "iuf" and not is_bfloat16(array.dtype):
        raise TypeError(f"{name}: got an array of {array.dtype}, wanted float16, bfloat16, float32,"
                        " float64 or integers")
    rows, columns = array.shape
    if rows % ROWS:
        raise ValueError(f"{name}: got {rows} rows, wanted a multiple of {ROWS} for {kind}")
    try:
        numbers = np.empty((rows, columns), np.int8)
        scales = np.empty((rows // ROWS, columns), np.float16)
    except MemoryError:
        raise MemoryError(f"{name}: no memory to quantise it") from None
    quantise = _quantise_8 if kind == "q8_0" else _quantise_4
    step = max(PIECE // max(columns, 1) // ROWS, 1)
    for first in range(0, rows // ROWS, step):
        part = in_type(array[first * ROWS:(first + step) * ROWS], np.dtype(np.float32))
        if not np.isfinite(part).all():
            raise ValueError(f"{name}: got numbers that are not finite, wanted finite ones, for"
                             f" {kind}")
        found, scale = quantise(part.reshape(len(part) // ROWS, ROWS, columns))
        scales[first:first + step] = scale
        numbers[first * ROWS:(first + step) * ROWS] = found.reshape(part.shape)
    if not np.isfinite(scales).all():
        raise ValueError(f"{name}: got numbers whose scale is beyond float16, wanted smaller ones"
                         f" for {kind}")
    return Blocks(kind, numbers, scales)


def _inverse(scale: Array) -> Array:
    """1 / scale; 0 where that is infinite: all numbers are then 0 times a scale of 0."""
    inverse = 1 / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _quantise_8(blocks: Array) -> tuple[Array, Array]:
    """The largest magnitude becomes 127; ties away from zero."""
    scale = np.abs(blocks).max(axis=1) / np.float32(127)
    scaled = blocks * _inverse(scale)[:, None]
    whole = np.floor(np.abs(scaled))
    rounded = whole + np.floor(2 * (np.abs(scaled) - whole))
    return (np.sign(scaled) * rounded).astype(np.int8), scale


def _quantise_4(blocks: Array) -> tuple[Array, Array]:
    """The first of the largest magnitudes becomes -8."""
    largest = np.abs(blocks).argmax(axis=1)[:, None]
    scale = np.take_along_axis(blocks, largest, axis=1)[:, 0] / np.float32(-8)
    shifted = np.trunc(blocks * _inverse(scale)[:, None] + np.float32(8.5))
    return shifted.clip(0, 15).astype(np.int8) - np.int8(8), scale
