"""float16 and bfloat16 on the Python side: what a KVCache holds of them, and how it is shown.

NumPy has no bfloat16. Arrays of it are those of ml_dtypes, found by the name of their type; the
package is never imported here. A cache holds bfloat16 without it, as records that nothing but the
core and this file reads, so that no array of uint16 is ever taken for one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mha import _core
from mha._base.pieces import FEW, converted, pieces

Array = NDArray[Any]

# The name of the field is what csrc/python/convert/element_type.c asks for.
RAW_BFLOAT16: np.dtype[Any] = np.dtype([("mha_bfloat16", np.uint16)])
# What a cache of q8_0 holds: blocks of 32 columns of one head and position, as GGML has them, a
# float16 scale and 32 int8.
Q8_0: np.dtype[Any] = np.dtype([("mha_q8_0", np.uint8, 34)])
OF_BLOCK = 32
# What numpy.savez writes of bfloat16: it keeps the size of a type that it does not know, no more.
NUMPYS_BFLOAT16: np.dtype[Any] = np.dtype("V2")


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of this type hold bfloat16."""
    of = dtype.type
    return dtype == RAW_BFLOAT16 or (of.__name__, of.__module__) == ("bfloat16", "ml_dtypes")


def hint_of_numpys(dtype: np.dtype[Any]) -> str:
    """What an error adds where NumPy may have forgotten that an array is of bfloat16."""
    return ("; NumPy writes bfloat16 so: mha.parameters.open reads it back, or"
            " array.view(ml_dtypes.bfloat16)") * (dtype == NUMPYS_BFLOAT16)


def stored_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """The type in which a cache of this type holds its numbers."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        return RAW_BFLOAT16
    try:
        known = None if dtype is None else np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # of strings that NumPy reads as a list of types
        known = None
    if known is not None and is_bfloat16(known):
        return RAW_BFLOAT16
    if known not in (np.float16, np.float32, np.float64):
        raise TypeError(f"dtype: got {dtype!r}, wanted float16, bfloat16, float32 or float64")
    return known


def cache_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """The same for caches, which may be of "q8_0" too."""
    if (isinstance(dtype, str) and dtype == "q8_0") or (isinstance(dtype, np.dtype)
                                                        and dtype == Q8_0):
        return Q8_0
    try:
        return stored_dtype(dtype)
    except TypeError as error:
        raise TypeError(f'{error}, or "q8_0"') from None


def numbers_of_element(stored: np.dtype[Any], **widths: int) -> int:
    """How many numbers an element of a cache's arrays is; a ValueError for widths of rows that are
    no whole elements."""
    numbers = OF_BLOCK if stored == Q8_0 else 1
    for name, width in widths.items():
        if width % numbers:
            raise ValueError(f"{name}: got {width}, wanted a multiple of {numbers} for q8_0")
    return numbers


def columns_of(array: Array) -> int:
    """How many numbers a row of a cache's array has."""
    return array.shape[-1] * numbers_of_element(array.dtype)


def layer_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """The type of a layer's parameters: one that NumPy can compute with, where there is one."""
    stored = stored_dtype(dtype)
    known = shown_dtype(stored)
    return stored if isinstance(known, str) else known


def computing_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which a layer of this type computes: float32 for halves."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def is_half(dtype: np.dtype[Any]) -> bool:
    return is_bfloat16(dtype) or dtype.newbyteorder("=") == np.float16


def as_computed(array: Array, name: str, dtype: np.dtype[Any]) -> Array:
    """The array in the type in which a layer of this type computes."""
    computing = computing_dtype(dtype)
    if array.dtype == computing:
        return array
    check_beside(array, stored_dtype(dtype), name)
    return converted(widened(array), computing)


def shown_dtype(stored: np.dtype[Any]) -> Any:
    """What the user calls it: "bfloat16" where nobody has imported ml_dtypes; "q8_0"."""
    if stored == Q8_0:
        return "q8_0"
    if stored != RAW_BFLOAT16:
        return stored
    try:
        return np.dtype("bfloat16")  # NumPy knows the name once ml_dtypes is imported
    except TypeError:
        return "bfloat16"


def shown(stored: Array) -> Array:
    """The array in a type that NumPy can compute with."""
    if stored.dtype == Q8_0:
        return widened(stored)
    if stored.dtype != RAW_BFLOAT16:
        return stored
    dtype = shown_dtype(stored.dtype)
    if isinstance(dtype, str):
        raise ImportError("bfloat16: got no type for arrays of it, wanted ml_dtypes:"
                          " pip install ml_dtypes, and import it")
    return stored.view(dtype)


def check_beside(array: Array, stored: np.dtype[Any], name: str) -> None:
    """TypeError unless numbers of the array can be stored so."""
    dtype = array.dtype
    bfloat16 = is_bfloat16(dtype)
    fits = (dtype.kind in "iu" or bfloat16
            or dtype.newbyteorder("=") in (np.float16, np.float32, np.float64))
    wanted = "float16, bfloat16, float32, float64 or integers"
    if stored == RAW_BFLOAT16:
        fits = bfloat16 or dtype.newbyteorder("=") in (np.float32, np.float64)
        wanted = "bfloat16, float32 or float64"
    elif stored == np.float16:
        fits = fits and not bfloat16
        wanted = "float16, float32, float64 or integers"
    if not fits:
        raise TypeError(f"{name}: got an array of {dtype}, wanted {wanted}")


def rounded(array: Array, stored: np.dtype[Any]) -> Array:
    """The array as a cache of this type holds it: each number rounded once, ties to even; or in
    blocks along the last axis, whose length is a multiple of 32."""
    if array.dtype == stored:
        return array
    if stored == Q8_0:
        return _in_blocks(array)
    if stored.itemsize > 2:
        return widened(array)
    if is_bfloat16(array.dtype):
        if is_bfloat16(stored):
            return array.view(stored)
        array = widened(array)
    result = np.empty(array.shape, stored)
    if array.size <= FEW:
        _core.round_numbers(np.ascontiguousarray(_as_float32(array)), result)
        return result
    for piece in pieces(result, array.itemsize):
        _core.round_numbers(np.ascontiguousarray(_as_float32(array[piece])), result[piece])
    return result


def in_type(array: Array, dtype: np.dtype[Any]) -> Array:
    """The array in this type, rounded once."""
    return rounded(array, dtype) if dtype.itemsize == 2 else converted(array, dtype)


def widened(stored: Array) -> Array:
    """bfloat16 and blocks as float32; other arrays as they are."""
    if stored.dtype == Q8_0:
        return _dequantised(stored)
    if not is_bfloat16(stored.dtype):
        return stored
    halves = stored.view(np.uint16)
    bits = np.empty_like(halves, np.uint32, subok=False)
    for piece in pieces(bits):
        np.left_shift(halves[piece], 16, out=bits[piece], dtype=np.uint32)
    return bits.view(np.float32)


def _in_blocks(array: Array) -> Array:
    """Numbers (..., 32 n) as blocks (..., n)."""
    with np.errstate(all="ignore"):  # what float32 cannot hold spoils its block
        numbers = converted(widened(array), np.float32)
    blocks = np.empty((*array.shape[:-1], array.shape[-1] // OF_BLOCK), Q8_0)
    _core.round_numbers(numbers, blocks)
    return blocks


def _dequantised(blocks: Array) -> Array:
    """The other way."""
    numbers = np.empty((*blocks.shape, OF_BLOCK), np.float32)
    for piece in pieces(blocks):
        part = blocks[piece]["mha_q8_0"]
        scales = np.ascontiguousarray(part[..., :2]).view("<f2")
        with np.errstate(invalid="ignore"):
            np.multiply(np.ascontiguousarray(part[..., 2:]).view(np.int8), scales,
                        out=numbers[piece], dtype=np.float32)
    return numbers.reshape(*blocks.shape[:-1], blocks.shape[-1] * OF_BLOCK)


def halves_as_float32(array: Array) -> Array:
    """float16 and bfloat16 as float32; other arrays as they are."""
    array = widened(array)
    return converted(array, np.float32) if array.dtype == np.float16 else array


def returned(numbers: Array, dtype: np.dtype[Any]) -> Array:
    """float32 numbers as a layer of this type returns them: rounded once, and still float32 where
    there is no type for arrays of bfloat16."""
    halves = rounded(numbers, dtype)
    if halves.dtype != RAW_BFLOAT16:
        return halves
    return widened(halves) if isinstance(shown_dtype(dtype), str) else shown(halves)


def _as_float32(array: Array) -> Array:
    """float32 numbers that round to the same halves: those between two end in a one, so that no
    rounding follows another (Boldo & Melquiond 2008, rounding to odd)."""
    if array.dtype == np.float32:
        return array
    exact = array.astype(np.float64, copy=False)
    with np.errstate(all="ignore"):
        numbers = exact.astype(np.float32)
    bits = numbers.view(np.uint32)
    inexact = numbers != exact
    bits -= np.abs(numbers) > np.abs(exact)
    bits |= inexact
    return numbers
