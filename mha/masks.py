"""Masks in this library's one meaning: bool, True = attend.

Each function returns an array that `mask=` takes as it is. For causal attention, windows and
lengths the options `causal=`, `window=` and `key_lengths=` do the same without a mask in memory,
and skip what they block.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_array, as_int, as_size, check_kind, no_memory
from mha._base.keywords import checks_keywords
from mha._functions.options import Window, as_sides

__all__ = ["causal", "from_attend", "from_blocked", "from_lengths", "sliding_window"]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # checkers know the names

    def __getattr__(name: str) -> Never:
        from mha._base.foreign_names import no_such_name

        raise no_such_name(sys.modules[__name__], name)


@checks_keywords
def causal(query_len: int, key_len: int | None = None,
           query_offset: int | None = None) -> NDArray[np.bool_]:
    """(query_len, key_len): key j is visible to query i iff j <= i + query_offset.

    key_len defaults to query_len, query_offset to key_len - query_len (the last query sees the
    last key, as with a cache). query_offset=0 is PyTorch's upper-left triangle.

    Raises
    ------
    ValueError: a negative length. TypeError: a length or offset that is not an int.

    Source: Vaswani et al. 2017, section 3.2.3: masking out what a position must not see.

    >>> mha.masks.causal(3).tolist()
    [[True, False, False], [True, True, False], [True, True, True]]
    """
    return sliding_window(query_len, key_len, window=(None, 0), query_offset=query_offset)


@checks_keywords
def sliding_window(query_len: int, key_len: int | None = None, *, window: Window | None,
                   query_offset: int | None = None) -> NDArray[np.bool_]:
    """(query_len, key_len): i + query_offset - left <= j <= i + query_offset + right.

    window is (left, right); None leaves a side open. (2, 0) sees the token itself and the two
    before it.

    Raises
    ------
    ValueError: a negative length or side, no pair. TypeError: one that is not an int.

    Source: Beltagy et al. 2020, "Longformer", section 3.1.

    >>> mha.masks.sliding_window(3, window=(1, 0)).tolist()
    [[True, False, False], [True, True, False], [False, True, True]]
    """
    query_len = as_size(query_len, "query_len", least=0)
    key_len = as_size(key_len, "key_len", query_len, least=0)
    if query_offset is None:
        query_offset = key_len - query_len
    left, right = as_sides(window)
    try:
        visible = np.ones((query_len, key_len), bool)
        query_index, key_index = np.arange(query_len)[:, None], np.arange(key_len)
    except (ValueError, OverflowError, MemoryError):
        raise no_memory("query_len, key_len", (query_len, key_len)) from None
    position = query_index + _clipped(as_int(query_offset, "query_offset"))
    if left is not None:
        visible &= key_index >= position - _clipped(left)
    if right is not None:
        visible &= key_index <= position + _clipped(right)
    return visible


@checks_keywords
def from_lengths(key_lengths: ArrayLike, key_len: int) -> NDArray[np.bool_]:
    """(batch,) -> (batch, 1, 1, key_len), (batch, query_len) -> (batch, 1, query_len, key_len).

    Key j is visible iff j < length: what d2l calls valid_lens.

    Raises
    ------
    ValueError: a length outside [0, key_len], or another number of axes. TypeError: key_lengths
    that are not integers.

    Source: Dive into Deep Learning, "Attention Scoring Functions": the masked softmax.

    >>> mha.masks.from_lengths([1, 3], 3)[:, 0, 0].tolist()
    [[True, False, False], [True, True, True]]
    """
    key_len = as_size(key_len, "key_len", least=0)
    lengths = as_array(key_lengths, "key_lengths")
    if lengths.size:
        check_kind(lengths, "key_lengths", "iu", "integers")
    if lengths.ndim not in (1, 2):
        raise ValueError(
            f"key_lengths: got shape {lengths.shape}, wanted (batch,) or (batch, query_len)")
    if lengths.size and (lengths.min() < 0 or lengths.max() > key_len):
        raise ValueError(
            f"key_lengths: got values from {lengths.min()} to {lengths.max()}, wanted them in"
            f" [0, {key_len}], the key length")
    per_query = lengths if lengths.ndim == 2 else lengths[:, None]
    try:
        key_index = np.arange(key_len)
        if len(key_index) < key_len:  # NumPy gives none where there are too many to count
            raise MemoryError
        return key_index < per_query[:, None, :, None]
    except (ValueError, OverflowError, MemoryError):
        raise no_memory("key_len", (*per_query.shape, key_len)) from None


@checks_keywords
def from_attend(mask: ArrayLike) -> NDArray[np.bool_]:
    """A mask where nonzero means attend (the PyTorch notebook, Keras, Hugging Face) -> bool.

    The shape (..., query_len, key_len) stays as it is.

    Raises
    ------
    ValueError: floats other than 0 and 1. TypeError: other than bool, integers and floats.

    Source: the arguments `attention_mask` of Keras and Hugging Face Transformers.

    >>> mha.masks.from_attend([[1, 0], [1, 1]]).tolist()
    [[True, False], [True, True]]
    """
    return _numbers(mask) != 0


@checks_keywords
def from_blocked(mask: ArrayLike) -> NDArray[np.bool_]:
    """A mask where nonzero means blocked (the NumPy tutorial, key_padding_mask) -> bool.

    The shape (..., query_len, key_len) stays as it is.

    Raises
    ------
    ValueError: floats other than 0 and 1. TypeError: other than bool, integers and floats.

    Source: the argument `key_padding_mask` of PyTorch's nn.MultiheadAttention.

    >>> mha.masks.from_blocked([[0, 1], [0, 0]]).tolist()
    [[True, False], [True, True]]
    """
    return _numbers(mask) == 0


def _numbers(mask: ArrayLike) -> NDArray[Any]:
    mask = as_array(mask, "mask")
    check_kind(mask, "mask", "biuf", "bool, integers or floats")
    if mask.dtype.kind != "b" and not np.isin(mask, (0, 1)).all():
        raise ValueError("mask: got numbers other than 0 and 1, wanted only these; an additive mask"
                         " goes to bias=")
    return mask


def _clipped(position: int) -> int:
    """Beyond +-2**60 all positions mean the same, and none overflows."""
    return max(-2**60, min(position, 2**60))
