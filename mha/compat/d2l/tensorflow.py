"""The book's TensorFlow form on NumPy arrays: `from mha.compat.d2l import tensorflow as d2l`.

Dropout acts in calls with training=True. Weights have TensorFlow's layout, kernel (in, out);
`weight` is the same as (out, in). The module may be imported as tf too: it has what the section's
own class names, `tf.keras.layers.Dense`, `tf.reshape`, `tf.transpose`, `tf.repeat` and `tf.ones`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._functions.options import RandomSource
from mha.compat._shared.layers import Linear
from mha.compat.d2l import _common, _helpers
from mha.compat.d2l._helpers import *  # noqa: F403

__all__ = ["AdditiveAttention", "DotProductAttention", "Module", "MultiHeadAttention", "keras",
           "repeat", "transpose"]
__all__ += _helpers.__all__


def transpose(a: ArrayLike, perm: Sequence[int] | None = None) -> NDArray[Any]:
    """The axes in the order of perm, by default reversed.

    >>> transpose(np.ones((2, 3, 4)), perm=(0, 2, 1)).shape
    (2, 4, 3)
    """
    return np.transpose(np.asarray(a), perm)


def repeat(input: ArrayLike, repeats: int, axis: int | None = None) -> NDArray[Any]:
    """Every item along axis `repeats` times, one after the other; axis None is over all of them.

    >>> repeat([3, 2], repeats=2, axis=0).tolist()
    [3, 3, 2, 2]
    """
    return np.repeat(np.asarray(input), repeats, axis=axis)


class Module:
    """What is called computes `call`, as in Keras."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.call(*arguments, **options)

    def call(self, *arguments: Any, **options: Any) -> Any:
        """What a call computes; a subclass says it."""
        raise NotImplementedError(f"{type(self).__name__} has no call")


class Dense(Linear):
    """x @ kernel + bias, sized at its first call.

    >>> Dense(4, use_bias=False)(np.ones((2, 3), np.float32)).shape
    (2, 4)
    """

    def __init__(self, units: int, use_bias: bool = True, *, rng: RandomSource = None) -> None:
        super().__init__(units, bias=use_bias, rng=rng)


keras = SimpleNamespace(layers=SimpleNamespace(Dense=Dense))


class _Call(Module, _common.Attention):
    """How this form of the book calls DotProductAttention and AdditiveAttention."""

    def call(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
             valid_lens: ArrayLike | None = None, *,
             training: bool | None = None) -> NDArray[Any]:
        """(batch, num_queries, v); valid_lens None, (batch,) or (batch, num_queries)."""
        return self._attend(queries, keys, values, valid_lens, training)


class DotProductAttention(_Call, _common.DotProductAttention):
    """Scaled dot-product attention (d2l, section 11.3.3).

    >>> attention = DotProductAttention(dropout=0.5)
    >>> attention(ones((2, 1, 2)), ones((2, 10, 2)), ones((2, 10, 4)), tensor([2, 6])).shape
    (2, 1, 4)
    """


class AdditiveAttention(_Call, _common.AdditiveAttention):
    """Additive attention (d2l, section 11.3.4), for queries and keys of unlike sizes.

    key_size and query_size are in the form's signature; like Keras, the layer takes the sizes of
    its first call.

    >>> attention = AdditiveAttention(key_size=2, query_size=20, num_hiddens=8, dropout=0.1)
    >>> attention(ones((2, 1, 20)), ones((2, 10, 2)), ones((2, 10, 4)), tensor([2, 6])).shape
    (2, 1, 4)
    """

    def __init__(self, key_size: int, query_size: int, num_hiddens: int, dropout: float, *,
                 rng: RandomSource = None) -> None:
        super().__init__(num_hiddens, dropout, rng=rng)


class MultiHeadAttention(Module, _common.MultiHeadAttention):
    """Multi-head attention (d2l, section 11.5), sized at the first call.

    Parameters
    ----------
    key_size, query_size, value_size : int
        In the form's signature; like Keras, the layer takes the sizes of its first call.
    num_hiddens : int
        The width of the projections and of the output.
    num_heads : int
        Must divide num_hiddens (ValueError).
    dropout : float in [0, 1]
        On the attention weights, in calls with training=True.
    bias : bool
        Whether the four projections have biases.
    rng : None, int or numpy.random.Generator
        Draws the weights and the dropout.

    >>> attention = MultiHeadAttention(100, 100, 100, 100, 5, 0.5)
    >>> attention(ones((2, 4, 100)), ones((2, 6, 100)), ones((2, 6, 100)), tensor([3, 2])).shape
    (2, 4, 100)
    """

    _dot_product_attention = DotProductAttention

    def __init__(self, key_size: int, query_size: int, value_size: int, num_hiddens: int,
                 num_heads: int, dropout: float, bias: bool = False, *,
                 rng: RandomSource = None) -> None:
        super().__init__(num_hiddens, num_heads, dropout, bias, rng=rng)

    def call(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
             valid_lens: ArrayLike | None = None, *,
             training: bool | None = None) -> NDArray[Any]:
        """(batch, num_queries, num_hiddens); valid_lens None, (batch,) or (batch, num_queries)."""
        arguments = self._split(queries, keys, values, valid_lens)
        return self._join(self.attention(*arguments, training=training))
