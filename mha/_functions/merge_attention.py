"""Attention over parts of the keys, joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.keywords import checks_keywords

Array = NDArray[Any]

__all__ = ["merge_attention"]


@checks_keywords
def merge_attention(outputs: Sequence[ArrayLike],
                    lses: Sequence[ArrayLike]) -> tuple[Array, Array]:
    """Join attention over parts of the keys into attention over all of them, exactly.

    Parameters
    ----------
    outputs : sequence of arrays (..., query_len, value_head_dim)
    lses : sequence of arrays (..., query_len), equally long
        As `scaled_dot_product_attention(..., return_lse=True)` returned them, one a part. A part
        whose lse is -inf is ignored.

    Returns
    -------
    (output, lse), shaped as one part's. Where all outputs are halves, the output is too, rounded
    once, and lse is float32.

    Raises
    ------
    ValueError: empty or unequally long sequences, unequal shapes. TypeError: as elsewhere.

    Source: Dao et al. 2023, "Flash-Decoding"; log-sum-exp as in Blanchard et al. 2021.

    >>> q, k = np.ones((4, 8)), np.ones((6, 8))
    >>> parts = [mha.scaled_dot_product_attention(q, h, h, return_lse=True) for h in (k[:3], k[3:])]
    >>> output, lse = mha.merge_attention(*zip(*parts))
    """
    return _core.merge_attention(outputs, lses)
