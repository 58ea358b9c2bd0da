"""The weights that `mha.plot` and `mha.view` are given: what is none says so."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_array, as_int, check_kind
from mha._base.dtypes import widened

HOW_TO_GET_THEM = ("those come with return_weights=True: output, weights ="
                   " layer(x, return_weights=True)")


def as_numbers(array: ArrayLike, name: str) -> NDArray[np.float64]:
    """array in float64; a tuple of arrays, as calls return, is a TypeError."""
    return _real_numbers(array, name).astype(float)


def _real_numbers(array: ArrayLike, name: str) -> NDArray[Any]:
    if isinstance(array, tuple) and any(getattr(item, "ndim", 0) > 1 for item in array):
        raise TypeError(f"{name}: got a tuple of {len(array)} arrays, wanted one array; of what a"
                        f" call returns take the {name}, as in output, weights ="
                        " layer(x, return_weights=True)")
    try:
        array = as_array(array, name)
    except ValueError:
        raise ValueError(f"{name}: got rows or matrices of unlike sizes, wanted one array"
                         ) from None
    array = widened(array)
    check_kind(array, name, "biuf", "real numbers")
    return array


def as_weights(weights: ArrayLike) -> NDArray[np.float64]:
    """weights in float64; numbers below 0, as outputs and scores have, are a ValueError."""
    array = as_numbers(weights, "weights")
    if (array < -1e-6).any():
        raise ValueError(f"weights: got numbers below 0 (the least is {np.nanmin(array):.3g}), as"
                         f" an output or scores have, but no attention weights; {HOW_TO_GET_THEM}")
    return array


def check_sums(maps: NDArray[np.float64]) -> None:
    """ValueError where no row can be weights, dropout of a half included: outputs are positive
    where the values are."""
    with np.errstate(over="ignore"):
        sums = maps.sum(axis=-1)
    if (sums > 2.001).all():
        raise ValueError(f"weights: got rows that sum to {sums.min():.3g} and more, as those of an"
                         " output may, but attention weights of a query sum to 1;"
                         f" {HOW_TO_GET_THEM}")


def weights_of_item(weights: ArrayLike, batch: int) -> NDArray[np.float64]:
    """weights (batch, heads, query_len, key_len), or without the first one or two axes, as those
    of one batch item, (heads, query_len, key_len)."""
    batch = as_int(batch, "batch")
    array = _real_numbers(weights, "weights")
    if array.ndim not in (2, 3, 4) or 0 in array.shape:
        raise ValueError(f"weights: got shape {array.shape}, wanted"
                         " (batch, heads, query_len, key_len) without the first one or two axes"
                         " at will, and none of size 0")
    items = array if array.ndim == 4 else array[None]
    if not -len(items) <= batch < len(items):
        raise ValueError(f"batch: got {batch}, wanted an index into {len(items)} items")
    return as_weights(items[batch]).reshape(-1, *array.shape[-2:])
