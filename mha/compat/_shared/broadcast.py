"""Attention whose batch axes broadcast as np.matmul and torch.matmul broadcast them, and what
broadcasts to its scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mha._functions.scaled_dot_product_attention import scaled_dot_product_attention


def attention_with_weights(query: NDArray[Any], key: NDArray[Any], value: NDArray[Any],
                           visible: NDArray[Any] | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """(output, weights) of `mha.scaled_dot_product_attention`, a row without visible keys uniform.

    query (..., query_len, d_k), key (..., key_len, d_k), value (..., key_len, d_v), visible
    broadcastable to (..., query_len, key_len): the axes before the last two of all four
    broadcast with each other.
    """
    masks = () if visible is None else (np.atleast_2d(visible),)
    query, key, value, *_ = broadcast_leading(query, key, value, *masks, own_axes=2,
                                              names="query, key, value" + ", mask" * len(masks))
    return scaled_dot_product_attention(query, key, value, mask=visible, empty_rows="uniform",
                                        return_weights=True)


def broadcast_leading(*arrays: NDArray[Any], own_axes: int,
                      names: str = "query, key, value") -> list[NDArray[Any]]:
    """Broadcast the axes before each array's last own_axes against each other, as views."""
    shapes = [array.shape for array in arrays]
    if min(map(len, shapes)) < own_axes:
        raise ValueError(f"{names}: got shapes {shapes}, wanted at least {own_axes} dimensions")
    try:
        leading = np.broadcast_shapes(*(shape[:-own_axes] for shape in shapes))
    except ValueError:
        raise ValueError(f"{names}: got shapes {shapes}, wanted batch axes, those before the last"
                         f" {own_axes}, that broadcast") from None
    if all(shape[:-own_axes] == leading for shape in shapes):
        return [*arrays]
    return [np.broadcast_to(array, leading + array.shape[-own_axes:]) for array in arrays]


def check_over_scores(array: NDArray[Any], name: str, scores_shape: tuple[int, ...],
                      given: tuple[int, ...] | None = None) -> None:
    """Raise a ValueError unless the array broadcasts to the scores; it shows the given shape."""
    try:
        fits = np.broadcast_shapes(array.shape, scores_shape) == scores_shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: got shape {given or array.shape}, wanted one that broadcasts to"
                         f" the scores {scores_shape}")
