"""The book's PyTorch form on NumPy arrays: `from mha.compat.d2l import torch as d2l`.

Modules start in training mode, with dropout on, and switch by train() and eval(). Weights have
PyTorch's layout, weight (out, in); `kernel` is the same as (in, out).
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

__all__ = ["AdditiveAttention", "DotProductAttention", "Module", "MultiHeadAttention",
           "add_to_class", "check_shape", "masked_softmax", "normal", "ones", "reshape",
           "show_heatmaps", "tensor"]


class Module:
    """Training mode on and off, for a module and those among its attributes."""

    training = True

    def train(self, mode: bool = True) -> Any:
        """Dropout on, or off with mode=False. Returns the module."""
        self.training = bool(mode)
        for part in vars(self).values():
            if isinstance(part, Module):
                part.train(mode)
        return self

    def eval(self) -> Any:
        """Dropout off. Returns the module."""
        return self.train(False)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.forward(*arguments, **options)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """What a call computes; a subclass says it."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")


class DotProductAttention(Module, _common.DotProductAttention):
    """Scaled dot-product attention (d2l, section 11.3.3).

    >>> attention = DotProductAttention(dropout=0.5).eval()
    >>> attention(ones((2, 1, 2)), ones((2, 10, 2)), ones((2, 10, 4)), tensor([2, 6])).shape
    (2, 1, 4)
    """

    def __init__(self, dropout: float, *, rng: Any = None) -> None:
        super().__init__(dropout, rng)

    def forward(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
                valid_lens: ArrayLike | None = None) -> NDArray[Any]:
        """(batch, num_queries, v); valid_lens None, (batch,) or (batch, num_queries)."""
        return self._attend(queries, keys, values, valid_lens, self.training)


class AdditiveAttention(Module, _common.AdditiveAttention):
    """Additive attention (d2l, section 11.3.4), for queries and keys of unlike sizes.

    >>> attention = AdditiveAttention(num_hiddens=8, dropout=0.1).eval()
    >>> attention(ones((2, 1, 20)), ones((2, 10, 2)), ones((2, 10, 4)), tensor([2, 6])).shape
    (2, 1, 4)
    """

    def __init__(self, num_hiddens: int, dropout: float, *, rng: Any = None) -> None:
        super().__init__(num_hiddens, dropout, rng)

    def forward(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
                valid_lens: ArrayLike | None = None) -> NDArray[Any]:
        """(batch, num_queries, v); valid_lens None, (batch,) or (batch, num_queries)."""
        return self._attend(queries, keys, values, valid_lens, self.training)


class MultiHeadAttention(Module, _common.MultiHeadAttention):
    """Multi-head attention (d2l, section 11.5), sized at the first call.

    Parameters
    ----------
    num_hiddens : int
        The width of the projections and of the output.
    num_heads : int
        Must divide num_hiddens (ValueError).
    dropout : float in [0, 1)
        On the attention weights, in training mode.
    bias : bool
        Whether the four projections have biases.
    rng : None, int or numpy.random.Generator
        Draws the weights and the dropout.

    >>> attention = MultiHeadAttention(100, 5, 0.5).eval()
    >>> attention(ones((2, 4, 100)), ones((2, 6, 100)), ones((2, 6, 100)), tensor([3, 2])).shape
    (2, 4, 100)
    """

    def __init__(self, num_hiddens: int, num_heads: int, dropout: float, bias: bool = False, *,
                 rng: Any = None) -> None:
        rng = np.random.default_rng(rng)
        super().__init__(num_hiddens, num_heads, bias, DotProductAttention(dropout, rng=rng), rng)

    def forward(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
                valid_lens: ArrayLike | None = None) -> NDArray[Any]:
        """(batch, num_queries, num_hiddens); valid_lens None, (batch,) or (batch, num_queries)."""
        return self._join(self.attention(*self._split(queries, keys, values, valid_lens)))
