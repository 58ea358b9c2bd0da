"""Numbers for the options `alibi` and `relative_bias`, as trained models have them."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_array, as_bool, as_finite, as_size, check_kind, no_memory
from mha._base.keywords import checks_keywords
from mha._functions.gradients import RelativeBiasGradients

__all__ = ["alibi_slopes", "t5_relative_bias", "t5_relative_bias_vjp"]

Array = NDArray[Any]
MOST_NUMBERS = 1 << 48  # that a process may address


@checks_keywords
def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> Array:
    """The slopes of ALiBi, for the option `alibi`: float64 (num_heads,).

    Head h of n, a power of two, has 2 ** (-max_bias * (h + 1) / n). Other numbers of heads get the
    slopes of the next smaller power of two, and then every other one of twice as many, beginning
    with the first.

    Raises
    ------
    ValueError: num_heads below 1, a max_bias that is not finite. TypeError: other types.

    Source: Press et al. 2022, "Train Short, Test Long", section 3, and the rule for other numbers
    of heads in the authors' program; max_bias as in MPT.

    >>> mha.alibi_slopes(8)[:3]
    array([0.5  , 0.25 , 0.125])
    """
    heads = as_size(num_heads, "num_heads")
    largest = as_finite(max_bias, "max_bias")
    if heads > MOST_NUMBERS:
        raise no_memory("num_heads", (heads,))
    power = 1 << (heads.bit_length() - 1)
    whole = np.arange(1, power + 1) / power
    between = (2 * np.arange(heads - power) + 1) / (2 * power)
    return np.exp2(-largest * np.concatenate([whole, between]))


@checks_keywords
def t5_relative_bias(table: ArrayLike, *, bidirectional: bool, max_distance: int = 128) -> Array:
    """T5's table of biases by buckets of distances, expanded for the option `relative_bias`.

    Parameters
    ----------
    table : array (buckets, heads)
        The model's relative_attention_bias: of an encoder with bidirectional=True, of a decoder's
        self-attention with False. T5 does not scale its scores: give scale=1 with it.
    bidirectional : bool
        Whether half of the buckets are for keys behind the query; else these have bucket 0.
    max_distance : int
        From there on all keys share the last bucket.

    Returns
    -------
    (heads, 2 * max_distance + 1), of the table's type.

    Raises
    ------
    ValueError: a table that is not 2-D, fewer than 2 buckets (4 where bidirectional), a
    max_distance within the buckets of one distance. TypeError: other types.

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning", section 2.1.

    >>> mha.t5_relative_bias(np.zeros((32, 8)), bidirectional=True).shape
    (8, 257)
    """
    array, buckets = _table_and_buckets(table, bidirectional, max_distance)
    return np.ascontiguousarray(array.T[:, buckets])


@checks_keywords
def t5_relative_bias_vjp(table: ArrayLike, *, bidirectional: bool, max_distance: int = 128,
                         ) -> tuple[Array, Callable[[ArrayLike], RelativeBiasGradients]]:
    """`t5_relative_bias` and its gradient: (expanded, pullback).

    pullback(grad_expanded) takes the gradient with respect to the result, (heads, 2 * max_distance
    + 1), which the pullbacks of attention call relative_bias, and returns that of the table,
    (buckets, heads), under its name.

    Raises
    ------
    ValueError, TypeError: as `t5_relative_bias`; a gradient of another shape.

    Source: Raffel et al. 2020, section 2.1.

    >>> expanded, pullback = mha.t5_relative_bias_vjp(np.zeros((32, 8)), bidirectional=True)
    >>> pullback(expanded).table.shape
    (32, 8)
    """
    array, buckets = _table_and_buckets(table, bidirectional, max_distance)
    expanded = np.ascontiguousarray(array.T[:, buckets])

    def pullback(grad_expanded: ArrayLike) -> RelativeBiasGradients:
        grad = as_array(grad_expanded, "grad_expanded")
        check_kind(grad, "grad_expanded", "iuf", array.dtype)
        if grad.shape != expanded.shape:
            raise ValueError(f"grad_expanded: got shape {grad.shape}, wanted {expanded.shape}")
        of_bucket = buckets == np.arange(len(array))[:, None]  # (buckets, 2 * max_distance + 1)
        sums = [grad[:, chosen].sum(axis=1, dtype=np.float64) for chosen in of_bucket]
        return RelativeBiasGradients(np.stack(sums).astype(array.dtype))

    return expanded, pullback


def _table_and_buckets(table: ArrayLike, bidirectional: bool,
                       max_distance: int) -> tuple[Array, NDArray[np.int64]]:
    """The table as floats, and the bucket of each distance, -max_distance to max_distance."""
    array = as_array(table, "table")
    check_kind(array, "table", "iuf", "floats")
    both = as_bool(bidirectional, "bidirectional")
    fewest = 4 if both else 2
    if array.ndim != 2 or len(array) < fewest:
        raise ValueError(f"table: got shape {array.shape}, wanted (buckets, heads) with at least"
                         f" {fewest} buckets")
    of_a_side = len(array) // 2 if both else len(array)
    farthest = as_size(max_distance, "max_distance", least=of_a_side // 2 + 1)
    if farthest > MOST_NUMBERS:
        raise no_memory("max_distance", (farthest,))
    before = _buckets_of_distances(of_a_side, farthest)
    behind = before[1:] + of_a_side if both else np.zeros(farthest, np.int64)
    floats = array if array.dtype.kind == "f" else array.astype(np.float64)
    return floats, np.concatenate([before[::-1], behind])


def _buckets_of_distances(count: int, farthest: int) -> NDArray[np.int64]:
    """The bucket, of `count`, of the distances 0 to farthest on one side.

    Half of them are for one distance each. The others are as wide as they are far: distance d has
    number `exact + floor(steps * log(d / exact) / log(farthest / exact))`. Where the next one
    begins is found in whole numbers, since logarithms in floating point are a matter of rounding
    there: d ** steps * exact ** k >= farthest ** k * exact ** steps.
    """
    exact = count // 2
    steps = count - exact

    def start_of(k: int) -> int:
        return bisect.bisect_left(range(farthest + 1), farthest**k * exact**steps, lo=exact,
                                  key=lambda distance: distance**steps * exact**k)

    starts = [start_of(k) for k in range(1, steps)]
    distances = np.arange(farthest + 1)
    wide = exact + np.searchsorted(np.array(starts, np.int64), distances, side="right")
    return np.where(distances < exact, distances, wide)
