"""MultiHeadAttention of com.microsoft."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_size
from mha.compat._shared.flags import as_flag
from mha.compat.onnx._caches import with_past
from mha.compat.onnx._heads import by_head, floats, public, with_bias
from mha.compat.onnx.microsoft._padded_attention import padded_attention, padding_of


@public
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
    past_sequence_length : int, optional
        The past is the first rows of past_key and past_value, buffers (batch, num_heads,
        max_len, head_size); the present is a copy of them with the new rows behind these.
    cache_indirection : ints (batch / beams, beams, max_len), optional
        Which beam of its group holds a sequence's keys and values of each position of the past.
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
    num_heads, total_len or max_len, size), then qk or None.

    Raises
    ------
    ValueError: shapes that do not fit, a layout that there is not. TypeError: arrays of other
    types.

    Source: ONNX Runtime's contributed operators; Vaswani et al. 2017.

    >>> x = np.ones((2, 10, 512), np.float32)
    >>> multi_head_attention(x, x, x, num_heads=8).output.shape
    (2, 10, 512)
    """
    query, key, value = _heads_of_inputs(query, key, value, bias, as_size(num_heads, "num_heads"))
    cache = with_past(key, value, past_key, past_value, past_sequence_length, cache_indirection)
    batch, _, query_len, _ = query.shape
    key_len = cache.key.shape[2]
    padding = padding_of(key_padding_mask, "key_padding_mask", batch, key_len, (
        (batch,), (3 * batch + 2,), (batch, key_len), (batch, query_len, key_len)))
    output, qk = padded_attention(
        query, cache, padding, attention_bias, mask_filter_value=mask_filter_value, scale=scale,
        causal=as_flag(unidirectional, "unidirectional"),
        return_qk=as_flag(return_qk, "return_qk"), dtype=query.dtype)
    return MultiHeadAttentionOutputs(output, cache.present_key, cache.present_value, qk)


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
    if bias is not None and layout == KEYS_PACKED:
        raise ValueError("bias: got one beside packed keys and values, wanted it added already")
    return with_bias(heads, bias, 1 if layout == BY_HEAD else 3)  # which hold theirs already
