"""The book's PyTorch form on NumPy arrays: `from mha.compat.d2l import torch as d2l`.

Modules start in training mode, with dropout on, and switch by train() and eval(). Weights have
PyTorch's layout, weight (out, in); `kernel` is the same as (in, out). For the section's own class
there are `nn` and `repeat_interleave` too, so that the module may be imported as torch:

    from mha.compat.d2l import torch
    from mha.compat.d2l.torch import nn
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ParamSpec, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._functions.options import RandomSource
from mha.compat._shared.layers import Linear, Trained, as_numbers
from mha.compat.d2l import _common, _helpers
from mha.compat.d2l._helpers import add_to_class, check_shape, show_heatmaps

__all__ = ["AdditiveAttention", "DotProductAttention", "Module", "MultiHeadAttention", "Tensor",
           "add_to_class", "check_shape", "masked_softmax", "nn", "normal", "ones",
           "repeat_interleave", "reshape", "show_heatmaps", "tensor"]


class Tensor(np.ndarray):
    """An array that can `permute`: the book transposes what modules and helpers return."""

    def permute(self, *axes: int) -> Tensor:
        """The axes in another order.

        >>> np.ones((2, 3, 4)).view(Tensor).permute(0, 2, 1).shape
        (2, 4, 3)
        """
        return self.transpose(*axes)


Arguments = ParamSpec("Arguments")


def _tensors(function: Callable[Arguments, NDArray[Any]]) -> Callable[Arguments, Tensor]:
    """The same function, its array a Tensor."""
    @functools.wraps(function)
    def returns_tensor(*arguments: Arguments.args, **options: Arguments.kwargs) -> Tensor:
        return function(*arguments, **options).view(Tensor)
    return returns_tensor


masked_softmax = _tensors(_helpers.masked_softmax)
normal = _tensors(_helpers.normal)
ones = _tensors(_helpers.ones)
reshape = _tensors(_helpers.reshape)
tensor = _tensors(_helpers.tensor)


@_tensors
def repeat_interleave(input: ArrayLike, repeats: int, dim: int | None = None) -> NDArray[Any]:
    """Every item along dim `repeats` times, one after the other; dim None is over all of them.

    >>> repeat_interleave([3, 2], repeats=2, dim=0).tolist()
    [3, 3, 2, 2]
    """
    return np.repeat(as_numbers(input, "input"), repeats, axis=dim)


class Module(Trained):
    """Training mode on and off, for a module and those among its attributes."""

    def train(self, mode: bool = True) -> Self:
        """Dropout on, or off with mode=False. Returns the module."""
        for part in vars(self).values():
            if isinstance(part, Module):
                part.train(mode)
        return super().train(mode)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        returned = self.forward(*arguments, **options)
        return returned.view(Tensor) if isinstance(returned, np.ndarray) else returned

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """What a call computes; a subclass says it."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")


class LazyLinear(Module, Linear):
    """x @ weight.T + bias, sized at its first call.

    >>> LazyLinear(4, bias=False)(np.ones((2, 3), np.float32)).shape
    (2, 4)
    """

    def __init__(self, out_features: int, bias: bool = True, *, rng: RandomSource = None) -> None:
        Linear.__init__(self, out_features, bias=bias, rng=rng)

    def forward(self, x: ArrayLike) -> NDArray[Any]:
        """(..., in_features) -> (..., out_features)."""
        return Linear.__call__(self, x)


nn = SimpleNamespace(Module=Module, LazyLinear=LazyLinear)


class _Call(Module, _common.Attention):
    """How this form of the book calls DotProductAttention and AdditiveAttention."""

    def forward(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
                valid_lens: ArrayLike | None = None) -> NDArray[Any]:
        """(batch, num_queries, v); valid_lens None, (batch,) or (batch, num_queries)."""
        return self._attend(queries, keys, values, valid_lens, self.training)


class DotProductAttention(_Call, _common.DotProductAttention):
    """Scaled dot-product attention (d2l, section 11.3.3).

    >>> attention = DotProductAttention(dropout=0.5).eval()
    >>> attention(ones((2, 1, 2)), ones((2, 10, 2)), ones((2, 10, 4)), tensor([2, 6])).shape
    (2, 1, 4)
    """


class AdditiveAttention(_Call, _common.AdditiveAttention):
    """Additive attention (d2l, section 11.3.4), for queries and keys of unlike sizes.

    >>> attention = AdditiveAttention(num_hiddens=8, dropout=0.1).eval()
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
        On the attention weights, in training mode.
    bias : bool
        Whether the four projections have biases.
    rng : None, int or numpy.random.Generator
        Draws the weights and the dropout.

    >>> attention = MultiHeadAttention(100, 5, 0.5).eval()
    >>> attention(ones((2, 4, 100)), ones((2, 6, 100)), ones((2, 6, 100)), tensor([3, 2])).shape
    (2, 4, 100)
    """

    _linear = LazyLinear
    _dot_product_attention = DotProductAttention

    def forward(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
                valid_lens: ArrayLike | None = None) -> NDArray[Any]:
        """(batch, num_queries, num_hiddens); valid_lens None, (batch,) or (batch, num_queries)."""
        return self._join(self.attention(*self._split(queries, keys, values, valid_lens)))
