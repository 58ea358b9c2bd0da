"""The book's MXNet form on NumPy arrays: `from mha.compat.d2l import mxnet as d2l`.

Dropout never acts: in MXNet it does within autograd.record() alone, and nothing is recorded here.
Weights have MXNet's layout, weight (out, in); `kernel` is the same as (in, out). For the section's
own class and first cell there are `nn`, `np` (NumPy itself) and `npx`:

    from mha.compat.d2l.mxnet import nn, np, npx
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._functions.options import RandomSource
from mha.compat._shared.layers import Linear
from mha.compat.d2l import _common, _helpers
from mha.compat.d2l._helpers import *  # noqa: F403

__all__ = ["AdditiveAttention", "DotProductAttention", "Module", "MultiHeadAttention", "nn", "np",
           "npx"]
__all__ += _helpers.__all__


npx = SimpleNamespace(set_np=lambda: None)  # arrays are NumPy's already


class Module:
    """What the form's layers have in common: initialize() before the call."""

    def initialize(self) -> None:
        """Nothing to do: as MXNet defers it, weights are drawn when the sizes are known."""

    def __call__(self, *arguments: Any) -> Any:
        return self.forward(*arguments)

    def forward(self, *arguments: Any) -> Any:
        """What a call computes; a subclass says it."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")


class Dense(Linear):
    """x @ weight.T + bias, sized at its first call.

    flatten : whether all axes but the first count as features, as they do in MXNet unless told.

    >>> x = np.ones((2, 3, 5), np.float32)
    >>> Dense(4)(x).shape, Dense(4, flatten=False)(x).shape
    ((2, 4), (2, 3, 4))
    """

    def __init__(self, units: int, use_bias: bool = True, flatten: bool = True, *,
                 rng: RandomSource = None) -> None:
        super().__init__(units, bias=use_bias, rng=rng)
        self._flatten = flatten

    def __call__(self, x: ArrayLike) -> NDArray[Any]:
        x = np.asarray(x)
        return super().__call__(x.reshape(len(x), -1) if self._flatten and x.ndim > 1 else x)


nn = SimpleNamespace(Dense=Dense)


class _Call(Module, _common.Attention):
    """How this form of the book calls DotProductAttention and AdditiveAttention."""

    def forward(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
                valid_lens: ArrayLike | None = None) -> NDArray[Any]:
        """(batch, num_queries, v); valid_lens None, (batch,) or (batch, num_queries)."""
        return self._attend(queries, keys, values, valid_lens, training=False)


class DotProductAttention(_Call, _common.DotProductAttention):
    """Scaled dot-product attention (d2l, section 11.3.3).

    >>> attention = DotProductAttention(dropout=0.5)
    >>> attention(ones((2, 1, 2)), ones((2, 10, 2)), ones((2, 10, 4)), tensor([2, 6])).shape
    (2, 1, 4)
    """


class AdditiveAttention(_Call, _common.AdditiveAttention):
    """Additive attention (d2l, section 11.3.4), for queries and keys of unlike sizes.

    >>> attention = AdditiveAttention(num_hiddens=8, dropout=0.1)
    >>> attention(ones((2, 1, 20)), ones((2, 10, 2)), ones((2, 10, 4)), tensor([2, 6])).shape
    (2, 1, 4)
    """


class MultiHeadAttention(Module, _common.MultiHeadAttention):
    """Multi-head attention (d2l, section 11.5), sized at the first call.

    Parameters
    ----------
    num_hiddens : int
        The width of the projections and of the output.
    num_heads : int
        Must divide num_hiddens (ValueError).
    dropout : float in [0, 1]
        Checked, and never acts.
    use_bias : bool
        Whether the four projections have biases.
    rng : None, int or numpy.random.Generator
        Draws the weights.

    >>> attention = MultiHeadAttention(100, 5, 0.5)
    >>> attention.initialize()
    >>> attention(ones((2, 4, 100)), ones((2, 6, 100)), ones((2, 6, 100)), tensor([3, 2])).shape
    (2, 4, 100)
    """

    _dot_product_attention = DotProductAttention

    def __init__(self, num_hiddens: int, num_heads: int, dropout: float, use_bias: bool = False,
                 *, rng: RandomSource = None) -> None:
        super().__init__(num_hiddens, num_heads, dropout, use_bias, rng=rng)

    def forward(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
                valid_lens: ArrayLike | None = None) -> NDArray[Any]:
        """(batch, num_queries, num_hiddens); valid_lens None, (batch,) or (batch, num_queries)."""
        return self._join(self.attention(*self._split(queries, keys, values, valid_lens)))
