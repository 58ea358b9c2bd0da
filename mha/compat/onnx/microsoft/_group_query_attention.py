"""GroupQueryAttention of com.microsoft: what decoders of large language models run."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_exact_int_array, as_finite, as_size
from mha._base.dtypes import halves_as_float32, in_type
from mha._functions.heads import merge_heads, split_heads
from mha._functions.options import AttentionKeywords
from mha.compat._shared.flags import as_flag
from mha.compat.onnx._heads import MASKED, WEIGHTS, attend, check_pair, floats, public, rotated
from mha.compat.onnx.microsoft._padded_attention import checked_bias
from mha.compat.onnx.microsoft._rows import (
    Rows,
    as_pasts,
    as_rows,
    in_window_cache,
    keys_and_present,
)

STAGES = {0: None, 1: MASKED, 2: WEIGHTS}  # of qk_output


@public
class GroupQueryAttentionOutputs(NamedTuple):
    """What `group_query_attention` returns, by the names of the operator's outputs."""

    output: NDArray[Any]
    present_key: NDArray[Any]
    present_value: NDArray[Any]
    output_qk: NDArray[Any] | None


def group_query_attention(
        query: ArrayLike, key: ArrayLike | None, value: ArrayLike | None,
        past_key: ArrayLike | None, past_value: ArrayLike | None, seqlens_k: ArrayLike,
        total_sequence_length: ArrayLike, cos_cache: ArrayLike | None = None,
        sin_cache: ArrayLike | None = None, position_ids: ArrayLike | None = None,
        attention_bias: ArrayLike | None = None, head_sink: ArrayLike | None = None,
        k_scale: ArrayLike | None = None, v_scale: ArrayLike | None = None,
        q_norm_weight: ArrayLike | None = None, k_norm_weight: ArrayLike | None = None,
        query_seqlens: ArrayLike | None = None, *, num_heads: int, kv_num_heads: int,
        causal: int = 1, do_rotary: int = 0, k_norm_epsilon: float | None = None,
        k_quant_type: str = "NONE", kv_cache_bit_width: int = 0, local_window_size: int = -1,
        q_norm_epsilon: float | None = None, qk_norm_epsilon: float = 1e-6, qk_output: int = 0,
        rotary_interleaved: int = 0, scale: float = 0.0, sliding_window_cache: int = 0,
        smooth_softmax: int = -1, softcap: float = 0.0,
        v_quant_type: str = "NONE") -> GroupQueryAttentionOutputs:
    """GroupQueryAttention of com.microsoft: a norm, rotation, a cache and attention in groups.

    Of sequence b, T = seqlens_k[b] + 1 positions are known after the call, Q = query_seqlens[b],
    by default min(len, T), of them new: the first Q rows of query, key and value, which stand at T
    - Q, T - Q + 1, .... The rows behind them are right padding.

    Parameters
    ----------
    query : array (batch, len, num_heads * head_size), or queries, keys and values side by side
        (batch, len, (num_heads + 2 * kv_num_heads) * head_size)
    key, value : arrays (batch, len, kv_num_heads * head_size), or None where query has them
        Of no rows where the past already has those of this call, from another layer.
    past_key, past_value : arrays (batch, kv_num_heads, past_len, head_size), or None
        Each sequence's known positions from row 0 on; what lies behind them is never read.
    seqlens_k : ints (batch,)
        T - 1 of each sequence.
    total_sequence_length : int
        At least each T.
    cos_cache, sin_cache : arrays (positions, dims / 2)
        With do_rotary; the first dims columns of each head rotate.
    position_ids : ints (batch, len), optional
        The rows of these caches, by default where the rows stand. In a first prompt (len ==
        total_sequence_length, no query_seqlens) the first number counts alone, and others count
        on from it, as in ONNX Runtime.
    attention_bias : array (batch or 1, num_heads or 1, len, total_sequence_length), optional
        Added to the scores; its columns are positions.
    head_sink : array (num_heads,), optional
        One more score a head, in the denominator of softmax alone.
    k_scale, v_scale, k_quant_type, v_quant_type, kv_cache_bit_width
        Not supported: quantised caches.
    q_norm_weight, k_norm_weight : arrays (head_size,), optional, both or neither
        RMSNorm of each head in front of the rotation, by q_norm_epsilon and k_norm_epsilon, by
        default qk_norm_epsilon.
    query_seqlens : ints (batch,), optional
        Q of each sequence, 0 included.
    causal : 0 or 1
        Whether a query sees nothing behind itself.
    local_window_size : int
        How many keys a query sees, itself included, with causal; -1 is all.
    qk_output : 0, 1 or 2
        output_qk: none, the scores that go into softmax, or the weights.
    rotary_interleaved : 0 or 1
        Whether column 2c rotates with 2c + 1, or c with c + dims / 2.
    scale : float, by default (0) 1 / sqrt(head_size)
    sliding_window_cache : 0 or 1
        Whether the past, of past_len rows, holds the last positions alone, of which T decides how
        many: all of them while they fit, else T - G * ceil((T - past_len) / G) with G = past_len -
        local_window_size + 1.
    smooth_softmax : 1 or another int
        1 is a head_sink of zeros, where there is none.
    softcap : float
        Scores become softcap * tanh(score / softcap), before the bias; 0 is none.

    Returns
    -------
    GroupQueryAttentionOutputs: output (batch, len, num_heads * head_size), present_key and
    present_value (batch, kv_num_heads, present_len, head_size), where present_len is past_len or,
    if that is more and without sliding_window_cache, total_sequence_length, then output_qk (batch,
    num_heads, len, total_sequence_length) or None. Rows of padding are zeros in output and present.

    Raises
    ------
    ValueError: shapes that do not fit, lengths that do not, a window without causal. TypeError:
    arrays of other types. NotImplementedError: quantised caches.

    Source: ONNX Runtime's contributed operators; Ainslie et al. 2023, "GQA"; Zhang & Sennrich 2019
    for the norm.

    >>> x, kv = np.ones((2, 10, 512), np.float32), np.ones((2, 10, 128), np.float32)
    >>> group_query_attention(x, kv, kv, None, None, [9, 9], 10, num_heads=8,
    ...                       kv_num_heads=2).output.shape
    (2, 10, 512)
    """
    _refuse_quantised(k_quant_type=(k_quant_type, "NONE"), v_quant_type=(v_quant_type, "NONE"),
                      kv_cache_bit_width=(kv_cache_bit_width, 0), k_scale=(k_scale, None),
                      v_scale=(v_scale, None))
    is_causal = as_flag(causal, "causal")
    holds_window = as_flag(sliding_window_cache, "sliding_window_cache")
    local_window_size = as_size(local_window_size, "local_window_size", least=-1)
    _check_options(is_causal, holds_window, local_window_size, qk_output, query_seqlens)

    # 1. Heads (batch, heads, len, head_size), and where their rows stand.
    query, key, value = _heads_of_inputs(query, key, value, as_size(num_heads, "num_heads"),
                                         as_size(kv_num_heads, "kv_num_heads"))
    dtype, key_dtype = query.dtype, key.dtype
    past_key, past_value = as_pasts(past_key, past_value, key)
    rows = as_rows(seqlens_k, total_sequence_length, query_seqlens, batch=len(query),
                   query_len=query.shape[2], key_len=key.shape[2])
    if holds_window:
        rows = in_window_cache(rows, past_key, local_window_size)

    # 2. Queries and keys normed and rotated, of float32 where they are halves; keys rounded once.
    query, key = _normed(query, key, q_norm_weight, k_norm_weight, qk_norm_epsilon,
                         q_norm_epsilon, k_norm_epsilon)
    if as_flag(do_rotary, "do_rotary"):
        positions = _positions(position_ids, rows, query.shape, query_seqlens)
        query, key = _rotated(query, key, cos_cache, sin_cache, positions,
                              as_flag(rotary_interleaved, "rotary_interleaved"))
    key = in_type(key, key_dtype)

    # 3. Keys and values of all positions that may be seen, and the caches to return.
    window = local_window_size if holds_window else None
    keys, present_key = keys_and_present(past_key, "past_key", key, rows, window)
    values, present_value = keys_and_present(past_value, "past_value", value, rows, window)

    # 4. Attention. Rows of padding see something or other; their outputs become zeros.
    options: AttentionKeywords = {
        "bias": _bias(attention_bias, rows, query.shape, keys.shape[2]),
        "sinks": _sinks(head_sink, smooth_softmax, query.shape[1]),
        "key_lengths": rows.key_lens, "causal": is_causal, "query_offset": rows.query_offset,
        "window": None if local_window_size == -1 else (local_window_size - 1, None),
        "scale": scale or None, "softcap": softcap or None}
    output, qk = attend(query, keys, values, STAGES[qk_output], options)
    output = in_type(merge_heads(output), dtype)
    output[~rows.are_real(query.shape[2])] = 0
    return GroupQueryAttentionOutputs(output, present_key, present_value,
                                      None if qk is None else in_type(qk, dtype))


def _refuse_quantised(**given: tuple[Any, Any]) -> None:
    for name, (value, wanted) in given.items():
        if value is not wanted and np.ndim(value):
            shown: Any = "an array"
        elif value != wanted:
            shown = repr(value)
        else:
            continue
        raise NotImplementedError(f"{name}: got {shown}, wanted {wanted!r}: quantised caches are"
                                  " not supported; dequantise past_key and past_value")


def _check_options(is_causal: bool, holds_window: bool, local_window_size: int, qk_output: int,
                   query_seqlens: Any) -> None:
    if local_window_size != -1 and (local_window_size < 1 or not is_causal):
        raise ValueError(f"local_window_size: got {local_window_size} with causal={int(is_causal)},"
                         " wanted -1, or at least 1 with causal=1")
    if not is_causal and query_seqlens is not None:
        raise ValueError("query_seqlens: got it with causal=0, wanted causal=1")
    if qk_output not in STAGES:
        raise ValueError(f"qk_output: got {qk_output}, wanted 0, 1 or 2")
    if holds_window and (local_window_size == -1 or qk_output):
        raise ValueError(f"sliding_window_cache: got 1 with local_window_size={local_window_size}"
                         f" and qk_output={qk_output}, wanted a window, and no scores, whose"
                         " columns would be gone")


def _heads_of_inputs(query: Any, key: Any, value: Any, num_heads: int,
                     kv_num_heads: int) -> list[NDArray[Any]]:
    """Queries, keys and values (batch, heads, len, head_size)."""
    check_pair(key, value, "key, value")
    (query,) = floats(("query", query))
    parts = num_heads if key is not None else num_heads + 2 * kv_num_heads
    if query.ndim != 3 or query.shape[2] % parts or num_heads % kv_num_heads:
        raise ValueError(f"query: got shape {query.shape}, wanted (batch, len, {parts} * head_size)"
                         f" with num_heads={num_heads}, a multiple of kv_num_heads={kv_num_heads}")
    size = query.shape[2] // parts
    if key is None:
        heads = split_heads(query, parts)
        return np.split(heads, [num_heads, num_heads + kv_num_heads], axis=1)
    batch, length, _ = query.shape
    arrays = floats(("key", key), ("value", value))
    wanted = [(batch, kv_len, kv_num_heads * size) for kv_len in (length, 0)]
    for name, array in zip(("key", "value"), arrays, strict=True):
        if array.shape not in wanted or array.shape != arrays[0].shape:
            raise ValueError(f"{name}: got shape {array.shape}, wanted {wanted[0]}, or key and"
                             " value of no rows where the past has them")
    return [split_heads(query, num_heads), *(split_heads(array, kv_num_heads) for array in arrays)]


def _normed(query: NDArray[Any], key: NDArray[Any], q_norm_weight: Any, k_norm_weight: Any,
            qk_norm_epsilon: float, q_norm_epsilon: float | None,
            k_norm_epsilon: float | None) -> tuple[NDArray[Any], NDArray[Any]]:
    from mha.reference import rms_norm

    check_pair(q_norm_weight, k_norm_weight, "q_norm_weight, k_norm_weight")
    query, key = halves_as_float32(query), halves_as_float32(key)
    if q_norm_weight is None:
        return query, key
    weights = floats(("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight))
    for name, weight in zip(("q_norm_weight", "k_norm_weight"), weights, strict=True):
        if weight.shape != query.shape[-1:]:
            raise ValueError(f"{name}: got shape {weight.shape}, wanted {query.shape[-1:]}")
    both = as_finite(qk_norm_epsilon, "qk_norm_epsilon", above=0)
    epsilons = [both if epsilon is None else as_finite(epsilon, name, above=0)
                for name, epsilon in (("q_norm_epsilon", q_norm_epsilon),
                                      ("k_norm_epsilon", k_norm_epsilon))]
    query, key = (rms_norm(heads, halves_as_float32(weight), epsilon)
                  for heads, weight, epsilon in zip((query, key), weights, epsilons, strict=True))
    return query, key


def _positions(position_ids: Any, rows: Rows, shape: tuple[int, ...],
               query_seqlens: Any) -> NDArray[Any]:
    """(batch, len): where the rows stand, or what stands in for that."""
    batch, _, query_len, _ = shape
    counted = np.arange(query_len)
    if position_ids is None:  # rows of padding as the last position, which the caches have
        return np.minimum(rows.first_query[:, None] + counted, rows.total_lens[:, None] - 1)
    positions = as_exact_int_array(position_ids, "position_ids")
    is_first_prompt = query_seqlens is None and query_len == rows.total_len
    if positions.shape != (batch, query_len) or not (is_first_prompt and positions.size):
        return positions
    return np.broadcast_to(positions[0, 0] + counted, (batch, query_len))


def _rotated(query: NDArray[Any], key: NDArray[Any], cos_cache: Any, sin_cache: Any,
             positions: NDArray[Any], interleaved: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    if cos_cache is None or sin_cache is None:
        raise ValueError("cos_cache, sin_cache: got None with do_rotary=1, wanted arrays"
                         " (positions, dims / 2)")
    cosine, sine = floats(("cos_cache", cos_cache), ("sin_cache", sin_cache))
    if cosine.ndim != 2:
        raise ValueError(f"cos_cache: got shape {cosine.shape}, wanted (positions, dims / 2)")
    query, key = (
        rotated(heads, cosine, sine, positions, num_heads=None, dims=2 * cosine.shape[1],
                interleaved=interleaved) if heads.shape[2] else heads for heads in (query, key))
    return query, key


def _bias(attention_bias: Any, rows: Rows, query_shape: tuple[int, ...],
          key_len: int) -> NDArray[Any] | None:
    """attention_bias, whose columns are positions, over the keys."""
    if attention_bias is None:
        return None
    bias = checked_bias(attention_bias, (*query_shape[:3], rows.total_len))
    if not rows.first_key.any():
        return bias[..., :key_len]
    bias = np.broadcast_to(bias, (*bias.shape[:-1], rows.total_len))
    columns = np.minimum(rows.first_key[:, None] + np.arange(key_len), rows.total_len - 1)
    return np.take_along_axis(bias, columns[:, None, None], axis=-1)


def _sinks(head_sink: Any, smooth_softmax: int, num_heads: int) -> NDArray[Any] | None:
    if head_sink is None:
        return np.zeros(num_heads, np.float32) if smooth_softmax == 1 else None
    (sinks,) = floats(("head_sink", head_sink))
    if sinks.shape != (num_heads,):
        raise ValueError(f"head_sink: got shape {sinks.shape}, wanted ({num_heads},)")
    return halves_as_float32(sinks)
