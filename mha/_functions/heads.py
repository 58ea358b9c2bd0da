"""Splitting into heads and merging them again (steps 2 and 4 of the figure)."""

from __future__ import annotations

from typing import Any, Never

from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.keywords import names_its_keywords, unknown_keyword

__all__ = ["merge_heads", "split_heads"]


@names_its_keywords
def split_heads(x: ArrayLike, num_heads: int, **unknown: Never) -> NDArray[Any]:
    """(..., len, num_heads * d) -> (..., num_heads, len, d), as a view: nothing is copied.

    Head h holds the features h*d to (h+1)*d of every token. Writing into the view writes into x.

    Raises
    ------
    ValueError: fewer than two axes, num_heads < 1, or a last axis that it does not divide.
    TypeError: num_heads is not an int.

    Source: Vaswani et al. 2017, section 3.2.2: the columns that W_i^Q of head i projects to.

    >>> mha.split_heads(np.zeros((2, 4, 512)), 8).shape
    (2, 8, 4, 64)
    """
    if unknown:
        raise unknown_keyword(split_heads, unknown)
    return _core.split_heads(x, num_heads)


@names_its_keywords
def merge_heads(x: ArrayLike, **unknown: Never) -> NDArray[Any]:
    """(..., heads, len, d) -> (..., len, heads * d): the inverse of `split_heads`, contiguous.

    Of any type, which stays.

    Raises
    ------
    ValueError: fewer than three axes. TypeError: what is no array.

    Source: Vaswani et al. 2017, section 3.2.2: Concat(head_1, ..., head_h).

    >>> mha.merge_heads(np.zeros((2, 8, 4, 64))).shape
    (2, 4, 512)
    """
    if unknown:
        raise unknown_keyword(merge_heads, unknown)
    return _core.merge_heads(x)
