"""The operators of com.microsoft, the domain of ONNX Runtime's own."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_array, as_int_array, as_size
from mha._base.dtypes import halves_as_float32, in_type
from mha._functions.heads import merge_heads
from mha._functions.options import AttentionKeywords
from mha.compat._shared.broadcast import check_over_scores
from mha.compat._shared.flags import as_flag
from mha.compat.onnx._heads import (
    MASKED,
    attend,
    by_head,
    check_pair,
    floats,
    joined,
    rotated,
)

__all__ = ["MultiHeadAttentionOutputs", "multi_head_attention", "rotary_embedding"]


class MultiHeadAttentionOutputs(NamedTuple):
    """What `multi_head_attention` returns, by the names of the operator's outputs."""

    output: NDArray[Any]
    present_key: NDArray[Any]
    present_value: NDArray[Any]
    qk: NDArray[Any] | None


def multi_head_attention(
        query: ArrayLike, key: ArrayLike | None = None, value: ArrayLike | None = None,
        bias: ArrayLike | None = None, key_padding_mask: ArrayLike | None = None,
        attention_bias: ArrayLike | None = None, past_key: ArrayLike | None = None,
        past_value: ArrayLike | None = None, past_sequence_length: ArrayLike | None = None,
        cache_indirection: ArrayLike | None = None, *, num_heads: int,
        mask_filter_value: float = -10000.0, scale: float = 0.0, unidirectional: int = 0,
        return_qk: bool = False) -> MultiHeadAttentionOutputs:
    """MultiHeadAttention of com.microsoft: attention between projections that others compute.

    Parameters
    ----------
    query : array (batch, len, hidden), or queries, keys and values (batch, len, num_heads, 3,
        head_size)
    key : array (batch, kv_len, hidden), by head (batch, num_heads, kv_len, head_size), or keys
        and values (batch, kv_len, num_heads, 2, head_size)
    value : array laid out as key; None where it is packed with it
    bias : array (hidden + hidden + v_hidden,), optional
        Added to queries, keys and values; to queries alone where keys and values are laid out by
        head. Not together with packed keys and values.
    key_padding_mask : ints, optional
        (batch,) lengths; (3 * batch + 2,), of which the first batch are lengths; or (batch,
        total_len) or (batch, len, total_len), 0 at what is padding and 1 elsewhere.
    attention_bias : array (batch or 1, num_heads or 1, len, total_len), optional
        Added to the scaled scores.
    past_key, past_value : arrays (batch, num_heads, past_len, head_size), optional
        Stand in front of the keys and values: total_len = past_len + kv_len.
    past_sequence_length, cache_indirection
        Not supported: buffers that past and present share, and beams.
    mask_filter_value : float
        Added to the scores of padding, which so is not hidden where a query sees nothing else.
    scale : float, by default (0) 1 / sqrt(head_size)
    unidirectional : 0 or 1
        Query i sees the keys up to i + past_len.
    return_qk : bool
        Whether to return qk, which a node asks for by naming its fourth output: the scores that
        go into softmax (batch, num_heads, len, total_len). It costs memory for all of them.

    Returns
    -------
    MultiHeadAttentionOutputs: output (batch, len, v_hidden), present_key and present_value (batch,
    num_heads, total_len, size), then qk or None.

    Raises
    ------
    ValueError: shapes that do not fit, a layout that there is not. TypeError: arrays of other
    types. NotImplementedError: past_sequence_length or cache_indirection.

    Source: ONNX Runtime's contributed operators; Vaswani et al. 2017.

    >>> x = np.ones((2, 10, 512), np.float32)
    >>> multi_head_attention(x, x, x, num_heads=8).output.shape
    (2, 10, 512)
    """
    for unsupported, name in ((past_sequence_length, "past_sequence_length"),
                              (cache_indirection, "cache_indirection")):
        if unsupported is not None:
            raise NotImplementedError(f"{name}: got an array, but buffers that past and present"
                                      " share are not supported; give past_key of the past alone")
    query, key, value = _heads_of_inputs(query, key, value, bias, as_size(num_heads, "num_heads"))
    dtype = query.dtype
    check_pair(past_key, past_value, "past_key, past_value")
    present_key = joined(past_key, "past_key", key)
    present_value = joined(past_value, "past_value", value)

    scores_shape = (*query.shape[:3], present_key.shape[2])
    options: AttentionKeywords = {
        "bias": _bias(key_padding_mask, attention_bias, float(mask_filter_value), scores_shape),
        "causal": as_flag(unidirectional, "unidirectional"),
        "query_offset": present_key.shape[2] - key.shape[2],
        "scale": scale or None, "softcap": None}
    stage = MASKED if as_flag(return_qk, "return_qk") else None
    output, qk = attend(query, present_key, present_value, stage, options)
    return MultiHeadAttentionOutputs(in_type(merge_heads(output), dtype), present_key,
                                     present_value, None if qk is None else in_type(qk, dtype))


APART = {"query": 3, "key": 3, "value": 3}  # dimensions of each
BY_HEAD = {"query": 3, "key": 4, "value": 4}
KEYS_PACKED = {"query": 3, "key": 5}
ALL_PACKED = {"query": 5}
LAYOUTS = (APART, BY_HEAD, KEYS_PACKED, ALL_PACKED)


def _heads_of_inputs(query: Any, key: Any, value: Any, bias: Any,
                     num_heads: int) -> list[NDArray[Any]]:
    """Query, key and value (batch, num_heads, len, size), bias added."""
    given = {name: floats((name, array))[0] for name, array in (
        ("query", query), ("key", key), ("value", value)) if array is not None}
    layout = {name: array.ndim for name, array in given.items()}
    if layout not in LAYOUTS:
        raise ValueError(f"query, key, value: got dimensions {layout}, wanted one of {LAYOUTS}")
    heads = []
    for name, array in given.items():
        packed = 1 if array.ndim < 5 else 4 - len(given)  # 3 in query alone, 2 in key
        if array.ndim == 5 and array.shape[2:4] != (num_heads, packed):
            raise ValueError(f"{name}: got shape {array.shape}, wanted (batch, len, {num_heads},"
                             f" {packed}, head_size)")
        heads += [by_head(array, "num_heads", num_heads)] if array.ndim < 5 else [
            array[:, :, :, index].swapaxes(1, 2) for index in range(packed)]
    if bias is None:
        return heads
    if layout == KEYS_PACKED:
        raise ValueError("bias: got one beside packed keys and values, wanted it added already")
    bias = as_array(bias, "bias")
    widths = [num_heads * array.shape[3] for array in heads]
    if bias.shape != (sum(widths),):
        raise ValueError(f"bias: got shape {bias.shape}, wanted ({sum(widths)},)")
    parts = np.split(bias, np.cumsum(widths)[:-1])
    if layout == BY_HEAD:  # such keys and values hold theirs already
        parts = parts[:1]
    added = [array + part.reshape(num_heads, 1, -1) for array, part in zip(heads, parts)]
    return added + heads[len(added):]


def _bias(key_padding_mask: Any, attention_bias: Any, mask_filter_value: float,
          scores_shape: tuple[int, ...]) -> NDArray[Any] | None:
    """What the two add to the scores together."""
    batch, _, query_len, key_len = scores_shape
    added: list[NDArray[Any]] = []
    if key_padding_mask is not None:
        mask = as_int_array(key_padding_mask, "key_padding_mask")
        wanted = ((batch,), (3 * batch + 2,), (batch, key_len), (batch, query_len, key_len))
        if mask.shape not in wanted:
            raise ValueError(f"key_padding_mask: got shape {mask.shape}, wanted one of {wanted}")
        visible = mask > 0 if mask.ndim > 1 else np.arange(key_len) < mask[:batch, None]
        added.append(np.where(visible.reshape(batch, 1, -1, key_len), np.float32(0),
                              np.float32(mask_filter_value)))
    if attention_bias is not None:
        array = as_array(attention_bias, "attention_bias")
        check_over_scores(array, "attention_bias", scores_shape)
        added.append(halves_as_float32(array))
    return sum(added[1:], added[0]) if added else None


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
