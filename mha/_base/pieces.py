"""Arrays of any size in pieces: between two of them Python runs signal handlers, so that Ctrl-C
acts in the middle of a long copy. csrc/python/convert/pieces.c does it for arguments of the core.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
Index = tuple[EllipsisType] | tuple[slice, ...]

# Bytes that the slowest conversion handles in a few milliseconds, and so many that Python's own
# steps between two pieces do not count.
PIECE = 1 << 20
FEW = PIECE // 16  # elements that are one piece in any type
WHOLE: Index = (...,)


def pieces(array: Array, itemsize: int = 0) -> Iterator[Index]:
    """Indices that cut the array along its axes of the longest strides, so that each piece has at
    most PIECE bytes. An element counts as `itemsize` bytes where that is more than its own."""
    rest = math.prod(array.shape) * max(itemsize, array.itemsize)
    if rest <= PIECE:
        yield WHOLE
        return
    steps = list(array.shape)
    for axis in sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis])):
        rest //= array.shape[axis]  # the bytes of one of its rows
        steps[axis] = max(1, PIECE // rest)
        if rest <= PIECE:
            break
    yield from itertools.product(*(
        [slice(begin, begin + step) for begin in range(0, length, step)]
        for length, step in zip(array.shape, steps, strict=True)))


def copy_into(to: Array, numbers: Array) -> None:
    """to[...] = numbers, for another array of the same shape."""
    for piece in pieces(to, numbers.itemsize):
        to[piece] = numbers[piece]


def copied(array: Array, dtype: DTypeLike | None = None, order: Any = "K") -> Array:
    """A copy, as array.astype(dtype, order) gives it; by default in the array's own type."""
    if array.size <= FEW:
        return array.astype(array.dtype if dtype is None else dtype, order, subok=False)
    copy = np.empty_like(array, dtype, order, subok=False)
    copy_into(copy, array)
    return copy


def contiguous(array: Array) -> Array:
    """The array in C order: itself where it lies so."""
    return array if array.flags.c_contiguous else copied(array, order="C")


def deep_copied(array: Array, memo: dict[int, Any]) -> Array:
    """As copy.deepcopy(array, memo), of an array that somebody else holds."""
    known: Array | None = memo.get(id(array))
    if known is None:
        known = memo[id(array)] = copied(array)
    return known


def converted(array: Array, dtype: DTypeLike) -> Array:
    """The array in this type: itself where it has it."""
    return array if array.dtype == dtype else copied(array, dtype)
