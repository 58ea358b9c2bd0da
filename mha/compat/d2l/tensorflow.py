"""The book's TensorFlow form on NumPy arrays: `from mha.compat.d2l import tensorflow as d2l`.

Dropout acts in calls with training=True. Weights have TensorFlow's layout, kernel (in, out);
`weight` is the same as (out, in). For the book's `tf.ones` the module may be imported as tf too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha.compat.d2l import _common
from mha.compat.d2l._helpers import (
    add_to_class,
    check_shape,
    masked_softmax,
    normal,
    ones,
    reshape,
    show_heatmaps,
    tensor,
)

__all__ = ["AdditiveAttention", "DotProductAttention", "MultiHeadAttention", "add_to_class",
           "check_shape", "masked_softmax", "normal", "ones", "reshape", "show_heatmaps", "tensor"]


class DotProductAttention(_common.DotProductAttention):
    """Scaled dot-product attention (d2l, section 11.3.3).

    >>> attention = DotProductAttention(dropout=0.5)
    >>> attention(ones((2, 1, 2)), ones((2, 10, 2)), ones((2, 10, 4)), tensor([2, 6])).shape
    (2, 1, 4)
    """

    def __init__(self, dropout: float, *, rng: Any = None) -> None:
        super().__init__(dropout, rng)

    def call(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
             valid_lens: ArrayLike | None = None, *,
             training: bool | None = None) -> NDArray[Any]:
        """(batch, num_queries, v); valid_lens None, (batch,) or (batch, num_queries)."""
        return self._attend(queries, keys, values, valid_lens, training)

    __call__ = call


class AdditiveAttention(_common.AdditiveAttention):
    """Additive attention (d2l, section 11.3.4), for queries and keys of unlike sizes.

    key_size and query_size are in the form's signature; like Keras, the layer takes the sizes of
    its first call.

    >>> attention = AdditiveAttention(key_size=2, query_size=20, num_hiddens=8, dropout=0.1)
    >>> attention(ones((2, 1, 20)), ones((2, 10, 2)), ones((2, 10, 4)), tensor([2, 6])).shape
    (2, 1, 4)
    """

    def __init__(self, key_size: int, query_size: int, num_hiddens: int, dropout: float, *,
                 rng: Any = None) -> None:
        super().__init__(num_hiddens, dropout, rng)

    def call(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
             valid_lens: ArrayLike | None = None, *,
             training: bool | None = None) -> NDArray[Any]:
        """(batch, num_queries, v); valid_lens None, (batch,) or (batch, num_queries)."""
        return self._attend(queries, keys, values, valid_lens, training)

    __call__ = call


class MultiHeadAttention(_common.MultiHeadAttention):
    """Multi-head attention (d2l, section 11.5), sized at the first call.

    Parameters
    ----------
    key_size, query_size, value_size : int
        In the form's signature; like Keras, the layer takes the sizes of its first call.
    num_hiddens : int
        The width of the projections and of the output.
    num_heads : int
        Must divide num_hiddens (ValueError).
    dropout : float in [0, 1)
        On the attention weights, in calls with training=True.
    bias : bool
        Whether the four projections have biases.
    rng : None, int or numpy.random.Generator
        Draws the weights and the dropout.

    >>> attention = MultiHeadAttention(100, 100, 100, 100, 5, 0.5)
    >>> attention(ones((2, 4, 100)), ones((2, 6, 100)), ones((2, 6, 100)), tensor([3, 2])).shape
    (2, 4, 100)
    """

    def __init__(self, key_size: int, query_size: int, value_size: int, num_hiddens: int,
                 num_heads: int, dropout: float, bias: bool = False, *, rng: Any = None) -> None:
        rng = np.random.default_rng(rng)
        super().__init__(num_hiddens, num_heads, bias, DotProductAttention(dropout, rng=rng), rng)

    def call(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
             valid_lens: ArrayLike | None = None, *,
             training: bool | None = None) -> NDArray[Any]:
        """(batch, num_queries, num_hiddens); valid_lens None, (batch,) or (batch, num_queries)."""
        arguments = self._split(queries, keys, values, valid_lens)
        return self._join(self.attention(*arguments, training=training))

    __call__ = call
