"""RotaryEmbedding of com.microsoft."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_array
from mha.compat.onnx._heads import floats, rotated


def rotary_embedding(input: ArrayLike, position_ids: ArrayLike, cos_cache: ArrayLike,
                     sin_cache: ArrayLike, *, interleaved: int = 0, is_packed_batching: int = 0,
                     num_heads: int = 0, rotary_embedding_dim: int = 0,
                     scale: float = 1.0) -> NDArray[Any]:
    """RotaryEmbedding of com.microsoft.

    Parameters
    ----------
    input : array (batch, num_heads, len, head_size) or (batch, len, num_heads * head_size)
    position_ids : ints (batch, len), or one int: the position of the first row, others counting on
    cos_cache, sin_cache : arrays (positions, dims / 2)
    interleaved : 0 or 1
        Whether column 2c rotates with 2c + 1, or c with c + dims / 2.
    is_packed_batching : 0 or 1
        Changes nothing here: sequences may be longer than the caches either way.
    num_heads : int
        Needed for an input of 3 dimensions whose heads rotate in part; else 2 * (dims / 2) columns
        are a head.
    rotary_embedding_dim : int
        How many columns of a head rotate, the first ones: dims. 0 is all.
    scale : 1.0
        Not supported: ONNX Runtime takes another number and ignores it.

    Returns
    -------
    array, of the shape and type of input.

    Raises
    ------
    ValueError: shapes that do not fit, positions beyond the caches. TypeError: other types.
    NotImplementedError: another scale.

    Source: ONNX Runtime's contributed operators; Su et al. 2021, "RoFormer".

    >>> x, caches = np.ones((2, 10, 512), np.float32), np.ones((99, 32), np.float32)
    >>> rotary_embedding(x, [5], caches, caches).shape
    (2, 10, 512)
    """
    if scale != 1:
        raise NotImplementedError(f"scale: got {scale}, wanted 1: ONNX Runtime ignores it; scale"
                                  " cos_cache and sin_cache")
    x, cosine, sine = floats(("input", input), ("cos_cache", cos_cache), ("sin_cache", sin_cache))
    positions = as_array(position_ids, "position_ids")
    if x.ndim not in (3, 4) or cosine.ndim != 2:
        raise ValueError(f"input, cos_cache: got shapes {x.shape}, {cosine.shape}, wanted 3 or 4"
                         " dimensions and 2")
    if positions.shape in ((), (1,)):
        positions = np.broadcast_to(positions + np.arange(x.shape[-2]),
                                    (x.shape[0], x.shape[-2]))
    if x.ndim == 3 and not num_heads:
        if rotary_embedding_dim:
            raise ValueError("num_heads: got 0 with rotary_embedding_dim, wanted the number of"
                             " heads, which inputs of 3 dimensions do not show")
        num_heads = x.shape[2] // max(2 * cosine.shape[1], 1)
    return rotated(x, cosine, sine, positions, num_heads=num_heads or None,
                   dims=rotary_embedding_dim, interleaved=interleaved)
