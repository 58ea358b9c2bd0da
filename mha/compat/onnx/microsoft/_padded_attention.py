"""Attention as com.microsoft's operators have it: padding is a number that is added to the scores,
and hides no key from a query that sees nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mha._base.arguments import as_int_array
from mha._base.dtypes import halves_as_float32, in_type
from mha._functions.heads import merge_heads
from mha._functions.options import AttentionKeywords
from mha.compat._shared.broadcast import check_over_scores
from mha.compat.onnx._caches import Cache
from mha.compat.onnx._heads import MASKED, attend, floats


def padded_attention(query: NDArray[Any], cache: Cache, padding: NDArray[np.bool_] | None,
                     attention_bias: Any, *, mask_filter_value: float, scale: float,
                     causal: bool, return_qk: bool,
                     dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """The output (batch, len, v_hidden) and the scores that go into softmax, or None, of a query
    (batch, heads, len, size)."""
    scores_shape = (*query.shape[:3], cache.key.shape[2])
    options: AttentionKeywords = {
        "bias": added_to_scores(padding, float(mask_filter_value), attention_bias, scores_shape),
        "causal": causal, "query_offset": cache.past_len, "scale": scale or None, "softcap": None}
    output, qk = attend(query, cache.key, cache.value, MASKED if return_qk else None, options)
    return in_type(merge_heads(output), dtype), None if qk is None else in_type(qk, dtype)


def added_to_scores(padding: NDArray[np.bool_] | None, mask_filter_value: float,
                    attention_bias: Any, scores_shape: tuple[int, ...]) -> NDArray[Any] | None:
    """mask_filter_value where `padding` is True, and the bias."""
    added: list[NDArray[Any]] = []
    if padding is not None:
        added.append(np.where(padding, np.float32(mask_filter_value), np.float32(0)))
    if attention_bias is not None:
        added.append(checked_bias(attention_bias, scores_shape))
    return sum(added[1:], added[0]) if added else None


def checked_bias(attention_bias: Any, scores_shape: tuple[int, ...]) -> NDArray[Any]:
    bias, = floats(("attention_bias", attention_bias))
    check_over_scores(bias, "attention_bias", scores_shape)
    return halves_as_float32(bias)


def padding_of(mask: Any, name: str, batch: int, key_len: int,
               wanted: tuple[tuple[int, ...], ...]) -> NDArray[np.bool_] | None:
    """Which keys are padding, broadcastable to the scores (batch, heads, len, total_len), from a
    mask of one of the wanted shapes: (batch,) lengths, the first of (3 * batch + 2,) too; (2 *
    batch,) ends, then starts; (batch, total_len) or (batch, len, total_len), 0 at padding."""
    if mask is None:
        return None
    mask = as_int_array(mask, name)
    if mask.shape not in wanted:
        raise ValueError(f"{name}: got shape {mask.shape}, wanted one of {wanted}")
    if mask.ndim > 1:
        return (mask <= 0).reshape(batch, 1, -1, key_len)
    columns = np.arange(key_len)
    padding = columns >= mask[:batch, None]
    if len(mask) == 2 * batch:
        padding |= columns < mask[batch:, None]
    return padding[:, None, None]
