"""What the adapters for Keras, JAX and Flax share: projections whose kernels keep the heads apart,
and masks over scores of any axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.dtypes import widened
from mha._functions.linear_projection import linear
from mha._functions.multi_head_attention import multi_head_attention
from mha._functions.options import AttentionKeywords
from mha.compat._shared.broadcast import check_over_scores
from mha.compat._shared.dtypes import array_of_kind


class Projection:
    """x @ kernel + bias over the last axes of x.

    kernel (inputs..., outputs...), of which the first input_axes are inputs; bias (outputs...), or
    None. Either may be set. Keras calls it EinsumDense, Flax DenseGeneral.
    """

    def __init__(self, kernel: NDArray[Any], bias: NDArray[Any] | None,
                 input_axes: int = 1) -> None:
        self.kernel = kernel
        self.bias = bias
        self._input_axes = input_axes

    def __repr__(self) -> str:
        return f"Projection(kernel={self.kernel.shape}, bias={self.bias is not None})"

    @property
    def matrix(self) -> NDArray[Any]:
        """The kernel (in, out) as `mha` takes it, a view."""
        shape = self.kernel.shape
        return self.kernel.reshape(math.prod(shape[:self._input_axes]),
                                   math.prod(shape[self._input_axes:]))

    @property
    def offset(self) -> NDArray[Any] | None:
        """The bias (out,) as `mha` takes it."""
        return None if self.bias is None else self.bias.reshape(-1)

    def mapped(self, function: Callable[[NDArray[Any]], NDArray[Any]]) -> Projection:
        """A projection of the function's results for kernel and bias."""
        return Projection(function(self.kernel), None if self.bias is None else function(self.bias),
                          self._input_axes)

    def __call__(self, x: NDArray[Any]) -> NDArray[Any]:
        """x (..., in) -> (..., out), the outputs side by side."""
        return linear(x, self.matrix, self.offset)


def project_and_attend(projections: Sequence[Projection], query: NDArray[Any], key: NDArray[Any],
                       value: NDArray[Any], *, num_heads: int, num_kv_heads: int,
                       return_weights: bool, gate: Projection | None = None,
                       **options: Unpack[AttentionKeywords]) -> Any:
    """`mha.multi_head_attention` with the projections of query, key, value and output, and that of
    the output gate where there is one."""
    of_query, of_key, of_value, of_output = projections
    return multi_head_attention(
        query, key, value, of_query.matrix, of_key.matrix, of_value.matrix, of_output.matrix,
        b_q=of_query.offset, b_k=of_key.offset, b_v=of_value.offset, b_o=of_output.offset,
        W_g=None if gate is None else gate.matrix, b_g=None if gate is None else gate.offset,
        num_heads=num_heads, num_kv_heads=num_kv_heads, return_weights=return_weights, **options)


def as_visible(mask: ArrayLike, name: str) -> NDArray[np.bool_]:
    """A mask of any numbers as bool: what is not 0 attends."""
    return widened(array_of_kind(mask, name, "biuf", "bool, True = attend")) != 0


def over_scores(mask: NDArray[Any], name: str, groups: Sequence[tuple[int, ...]],
                given: tuple[int, ...] | None = None) -> NDArray[Any]:
    """The mask with one axis for each group of axes of the scores, such as all batch axes; an axis
    that has size 1 throughout its group stays 1. Of groups (2, 3), (8,), (5,), (7,) a mask
    (3, 1, 5, 7) becomes (6, 1, 5, 7). Errors show the shape that was given."""
    scores = tuple(size for group in groups for size in group)
    check_over_scores(mask, name, scores, given)
    sizes = iter((1,) * (len(scores) - mask.ndim) + mask.shape)
    kept = []
    for group in groups:
        own = tuple(next(sizes) for _ in group)
        kept.append(group if max(own, default=1) > 1 else own)
    spread = np.broadcast_to(mask, tuple(size for own in kept for size in own))
    return spread.reshape([math.prod(own) for own in kept])
