"""DecoderMaskedMultiHeadAttention of com.microsoft: one step of decoding."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_size
from mha.compat._shared.flags import as_flag
from mha.compat.onnx._caches import one_int, with_past
from mha.compat.onnx._heads import by_head, check_pair, floats, public, with_bias
from mha.compat.onnx.microsoft._padded_attention import padded_attention, padding_of


@public
class DecoderMaskedMultiHeadAttentionOutputs(NamedTuple):
    """What `decoder_masked_multi_head_attention` returns, by the names of the operator's
    outputs."""

    output: NDArray[Any]
    present_key: NDArray[Any]
    present_value: NDArray[Any]
    qk: NDArray[Any] | None


def decoder_masked_multi_head_attention(
        query: ArrayLike, key: ArrayLike | None = None, value: ArrayLike | None = None,
        mask_index: ArrayLike | None = None, attention_bias: ArrayLike | None = None,
        past_key: ArrayLike | None = None, past_value: ArrayLike | None = None,
        past_sequence_length: ArrayLike | None = None, beam_width: ArrayLike | None = None,
        cache_indirection: ArrayLike | None = None, bias: ArrayLike | None = None, *,
        num_heads: int, mask_filter_value: float = -10000.0, output_qk: int = 0,
        past_present_share_buffer: int = 0,
        scale: float = 0.0) -> DecoderMaskedMultiHeadAttentionOutputs:
    """DecoderMaskedMultiHeadAttention of com.microsoft: one query a sequence.

    Parameters
    ----------
    query : array (batch, 1, hidden), or query, key and value side by side (batch, 1, 2 * hidden +
        v_hidden), where v_hidden is hidden
    key, value : arrays (batch, 1, hidden), this step's, or (batch, num_heads, kv_len, head_size):
        all that there are, as in cross attention, which has no past
    mask_index : ints (batch, total_len), optional
        0 at what is padding and 1 elsewhere.
    attention_bias : array (batch or 1, num_heads or 1, 1, total_len), optional
        Added to the scaled scores.
    past_key, past_value : arrays (batch, num_heads, past_len, head_size), optional
        Stand in front of this step's key and value. With past_present_share_buffer they are
        buffers (batch, num_heads, max_len, head_size) in the order of their axes, which is what
        ONNX Runtime's CPU provider takes, too; on GPUs it reorders those of the keys.
    past_sequence_length : int, optional
        With past_present_share_buffer: how many rows of the buffers are the past.
    beam_width : int, by default 1
        How many consecutive sequences are beams of one search; more than 1 needs
        cache_indirection.
    cache_indirection : ints (batch / beam_width, beam_width, max_len), optional
        Which beam of its group holds a sequence's key and value of each position of the past.
    bias : array (hidden + hidden + v_hidden,), optional
        Added to query, key and value; to the query alone in cross attention.
    mask_filter_value : float
        Added to the scores of padding, which so is not hidden where a query sees nothing else.
    output_qk : 0 or 1
        Whether to return qk: the scores that go into softmax (batch, num_heads, 1, total_len).
    past_present_share_buffer : 0 or 1
        Whether past and present have the shape of the buffers. Nothing is written into those
        that are given.
    scale : float, by default (0) 1 / sqrt(head_size)

    Returns
    -------
    DecoderMaskedMultiHeadAttentionOutputs: output (batch, 1, v_hidden), present_key and
    present_value (batch, num_heads, total_len or max_len, size), in cross attention key and value
    as they are, then qk or None.

    Raises
    ------
    ValueError: shapes that do not fit, more than one query, a layout that there is not. TypeError:
    arrays of other types.

    Source: ONNX Runtime's contributed operators; Vaswani et al. 2017.

    >>> x, past = np.ones((2, 1, 512), np.float32), np.ones((2, 8, 9, 64), np.float32)
    >>> step = decoder_masked_multi_head_attention(x, x, x, past_key=past, past_value=past,
    ...                                            num_heads=8)
    >>> step.output.shape, step.present_key.shape
    ((2, 1, 512), (2, 8, 10, 64))
    """
    num_heads = as_size(num_heads, "num_heads")
    is_cross = key is not None and np.ndim(key) == 4
    new_query, new_key, new_value = _heads_of_inputs(query, key, value, bias, num_heads)
    _check_past(is_cross, past_key, past_sequence_length,
                as_flag(past_present_share_buffer, "past_present_share_buffer"))
    _check_beams(beam_width, cache_indirection)
    cache = with_past(new_key, new_value, past_key, past_value, past_sequence_length,
                      cache_indirection)
    batch, key_len = len(new_query), cache.key.shape[2]
    output, qk = padded_attention(
        new_query, cache,
        padding_of(mask_index, "mask_index", batch, key_len, ((batch, key_len),)), attention_bias,
        mask_filter_value=mask_filter_value, scale=scale, causal=False,
        return_qk=as_flag(output_qk, "output_qk"), dtype=new_query.dtype)
    return DecoderMaskedMultiHeadAttentionOutputs(output, cache.present_key, cache.present_value,
                                                  qk)


def _heads_of_inputs(query: Any, key: Any, value: Any, bias: Any,
                     num_heads: int) -> list[NDArray[Any]]:
    """Query, key and value (batch, num_heads, len, size), bias added."""
    check_pair(key, value, "key, value")
    (query,) = floats(("query", query))
    packed = 3 if key is None else 1
    if query.ndim != 3 or query.shape[1] != 1 or query.shape[2] % (packed * num_heads):
        raise ValueError(f"query: got shape {query.shape}, wanted (batch, 1, {packed} * num_heads *"
                         f" head_size) with num_heads={num_heads}")
    if key is None:
        arrays = np.split(query, 3, axis=2)
    else:
        arrays = [query, *floats(("key", key), ("value", value))]
    for name, array in zip(("key", "value"), arrays[1:], strict=True):
        of_this_step = array.ndim == 3 and array.shape[:2] == query.shape[:2]
        if array.ndim != arrays[1].ndim or not (of_this_step or array.ndim == 4):
            raise ValueError(f"{name}: got shape {array.shape}, wanted {query.shape[:2]} and"
                             " num_heads * size, or key and value (batch, num_heads, kv_len, size)")
    heads = [by_head(array, "num_heads", num_heads) for array in arrays]
    return with_bias(heads, bias, 1 if arrays[1].ndim == 4 else 3)


def _check_past(is_cross: bool, past_key: Any, past_sequence_length: Any,
                shares_buffer: bool) -> None:
    if is_cross and past_key is not None:
        raise ValueError("past_key: got one beside a key of 4 dimensions, which is all keys that"
                         " there are; wanted a key (batch, 1, hidden) or no past")
    if not is_cross and shares_buffer != (past_sequence_length is not None):
        raise ValueError(f"past_sequence_length: got {past_sequence_length} with"
                         f" past_present_share_buffer={int(shares_buffer)}, wanted both or"
                         " neither")


def _check_beams(beam_width: Any, cache_indirection: Any) -> None:
    width = 1 if beam_width is None else one_int(beam_width, "beam_width")
    if cache_indirection is None:
        if width != 1:
            raise ValueError(f"beam_width: got {width} without cache_indirection, wanted both")
    elif np.shape(cache_indirection)[1:2] != (width,):
        raise ValueError(f"beam_width: got {width} with a cache_indirection of shape"
                         f" {np.shape(cache_indirection)}, wanted its second axis")
