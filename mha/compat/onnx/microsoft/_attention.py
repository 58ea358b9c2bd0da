"""Attention of com.microsoft: the projections and the attention between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_array, as_int_array, as_ints, as_size
from mha._base.dtypes import halves_as_float32, in_type
from mha._functions.heads import split_heads
from mha._functions.linear_projection import linear
from mha._functions.rotary import Rotary
from mha.compat._shared.flags import as_flag
from mha.compat.onnx._caches import one_int, with_past
from mha.compat.onnx._heads import checked_rotary_dims, floats, public
from mha.compat.onnx.microsoft._padded_attention import padded_attention, padding_of


@public
class AttentionOutputs(NamedTuple):
    """What `attention` returns, by the names of the operator's outputs."""

    output: NDArray[Any]
    present: NDArray[Any] | None


def attention(input: ArrayLike, weights: ArrayLike, bias: ArrayLike | None = None,
              mask_index: ArrayLike | None = None, past: ArrayLike | None = None,
              attention_bias: ArrayLike | None = None,
              past_sequence_length: ArrayLike | None = None, *, num_heads: int,
              do_rotary: int = 0, mask_filter_value: float = -10000.0,
              past_present_share_buffer: int = 0, qkv_hidden_sizes: Sequence[int] | None = None,
              rotary_embedding_dim: int = 0, scale: float = 0.0,
              unidirectional: int = 0) -> AttentionOutputs:
    """Attention of com.microsoft: projections to queries, keys and values, and self attention.

    Parameters
    ----------
    input : array (batch, len, input_hidden)
    weights : array (input_hidden, hidden + hidden + v_hidden)
        Those of queries, keys and values side by side.
    bias : array (hidden + hidden + v_hidden,), optional
    mask_index : ints, optional
        (batch,) ends of right padding; (2 * batch,) ends, then starts behind left padding; (3 *
        batch + 2,), of which the first batch are ends; (batch, total_len) or (batch, len,
        total_len), 0 at what is padding and 1 elsewhere; (batch, 1, max_len, max_len), the same of
        all positions, not with unidirectional; (batch, 1) or (1, 1), which mask nothing.
    past : array (2, batch, num_heads, past_len, head_size), optional
        Keys, then values, that stand in front: total_len = past_len + len. With
        past_present_share_buffer a buffer (2, batch, num_heads, max_len, head_size).
    attention_bias : array (batch or 1, num_heads or 1, len, total_len), optional
        Added to the scaled scores.
    past_sequence_length : int
        With past_present_share_buffer: how many rows of the buffer are the past.
    do_rotary : 0 or 1
        Whether queries and keys are rotated by their positions, those of the past included:
        column c with c + dims / 2 by position / 10000^(2 c / dims).
    mask_filter_value : float
        Added to the scores of padding, which so is not hidden where a query sees nothing else.
    past_present_share_buffer : 0 or 1
        Whether past and present have the shape of the buffer. Nothing is written into the one that
        is given.
    qkv_hidden_sizes : three ints, by default a third of the columns of weights each
        hidden, hidden and v_hidden.
    rotary_embedding_dim : int
        How many columns of a head rotate, the first ones: dims. 0 is all.
    scale : float, by default (0) 1 / sqrt(head_size)
    unidirectional : 0 or 1
        Query i sees the keys up to i + past_len.

    Returns
    -------
    AttentionOutputs: output (batch, len, v_hidden) and present (2, batch, num_heads, total_len or
    max_len, head_size), None where values have another size than keys.

    Raises
    ------
    ValueError: shapes that do not fit; a past where values have another size than keys. TypeError:
    arrays of other types.

    Source: ONNX Runtime's contributed operators; Vaswani et al. 2017.

    >>> x, weights = np.ones((2, 10, 512), np.float32), np.ones((512, 1536), np.float32)
    >>> attention(x, weights, num_heads=8).output.shape
    (2, 10, 512)
    """
    causal = as_flag(unidirectional, "unidirectional")
    (x,) = floats(("input", input))
    query, key, value = _projected(x, weights, bias, qkv_hidden_sizes,
                                   as_size(num_heads, "num_heads"))
    past_key, past_value, past_len = _checked_past(
        past, past_sequence_length, key, value,
        as_flag(past_present_share_buffer, "past_present_share_buffer"))
    if as_flag(do_rotary, "do_rotary"):
        turn = Rotary(checked_rotary_dims(rotary_embedding_dim, query.shape[3]))
        positions = past_len + np.arange(query.shape[2])
        query, key = turn(query, positions), turn(key, positions)

    key, value = in_type(key, x.dtype), in_type(value, x.dtype)  # as a later step reads them
    cache = with_past(key, value, past_key, past_value, past_sequence_length)
    scores_shape = (*query.shape[:3], cache.key.shape[2])
    output, _ = padded_attention(
        query, cache, _padding(mask_index, scores_shape, cache.past_len, causal), attention_bias,
        mask_filter_value=mask_filter_value, scale=scale, causal=causal, return_qk=False,
        dtype=x.dtype)
    present = None
    if key.shape == value.shape:
        present = np.stack([cache.present_key, cache.present_value])
    return AttentionOutputs(output, present)


def _projected(x: NDArray[Any], weights: Any, bias: Any, qkv_hidden_sizes: Any,
               num_heads: int) -> list[NDArray[Any]]:
    """Queries, keys and values (batch, num_heads, len, size), of float32 where x is of halves."""
    (weights,) = floats(("weights", weights))
    if x.ndim != 3 or weights.ndim != 2 or x.shape[2] != weights.shape[0]:
        raise ValueError(f"input, weights: got shapes {x.shape}, {weights.shape}, wanted (batch,"
                         " len, input_hidden) and (input_hidden, hidden + hidden + v_hidden)")
    sizes = [weights.shape[1] // 3] * 3 if qkv_hidden_sizes is None else as_ints(
        qkv_hidden_sizes, "qkv_hidden_sizes")
    if (len(sizes) != 3 or sum(sizes) != weights.shape[1] or sizes[0] != sizes[1]
            or any(size <= 0 or size % num_heads for size in sizes)):
        raise ValueError(f"qkv_hidden_sizes: got {sizes}, wanted hidden, hidden and v_hidden,"
                         f" multiples of num_heads={num_heads} that sum to the"
                         f" {weights.shape[1]} columns of weights")
    if bias is not None:
        (bias,) = floats(("bias", bias))
        bias = halves_as_float32(bias)
    projected = linear(halves_as_float32(x), halves_as_float32(weights), bias)
    return [split_heads(part, num_heads)
            for part in np.split(projected, np.cumsum(sizes)[:-1], axis=2)]


def _checked_past(past: Any, past_sequence_length: Any, key: NDArray[Any], value: NDArray[Any],
                  shares_buffer: bool) -> tuple[Any, Any, int]:
    """past_key, past_value and past_len."""
    if shares_buffer != (past_sequence_length is not None) or (shares_buffer and past is None):
        raise ValueError(f"past_sequence_length: got {past_sequence_length} with"
                         f" past_present_share_buffer={int(shares_buffer)} and"
                         f" {'no ' * (past is None)}past, wanted all three or past alone")
    if past is None:
        return None, None, 0
    past = as_array(past, "past")
    wanted = (2, *key.shape[:2], "past_len", key.shape[3])
    if past.ndim != 5 or (*past.shape[:3], "past_len", past.shape[4]) != wanted:
        raise ValueError(f"past: got shape {past.shape}, wanted {wanted}")
    if key.shape != value.shape:
        raise ValueError(f"past: got one with keys of size {key.shape[3]} and values of"
                         f" {value.shape[3]}, wanted the same; use MultiHeadAttention")
    past_len = past.shape[3] if past_sequence_length is None else one_int(
        past_sequence_length, "past_sequence_length")
    return past[0], past[1], past_len


def _padding(mask_index: Any, scores_shape: tuple[int, ...], past_len: int,
             causal: bool) -> NDArray[np.bool_] | None:
    """`padding_of` for the shapes that this operator alone takes, too."""
    if mask_index is None:
        return None
    mask = as_int_array(mask_index, "mask_index")
    batch, _, query_len, key_len = scores_shape
    if mask.shape in ((batch, 1), (1, 1)):
        return None
    if mask.ndim == 4:
        max_len = mask.shape[3]
        if mask.shape != (batch, 1, max_len, max_len) or max_len < key_len or causal:
            raise ValueError(f"mask_index: got shape {mask.shape} with unidirectional={int(causal)}"
                             f", wanted ({batch}, 1, max_len, max_len) with max_len of at least"
                             f" {key_len} and unidirectional=0")
        mask = mask[:, 0, past_len:past_len + query_len, :key_len]
    return padding_of(mask, "mask_index", batch, key_len, (
        (batch,), (2 * batch,), (3 * batch + 2,), (batch, key_len), (batch, query_len, key_len)))
