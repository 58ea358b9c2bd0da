"""The operators of ai.onnx, the standard's own domain."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_array, as_int, as_lengths, check_kind, checked_lengths
from mha._base.dtypes import in_type, widened
from mha._base.pieces import converted, copied
from mha._functions.heads import merge_heads
from mha._functions.options import AttentionKeywords
from mha.compat._shared.broadcast import check_over_scores
from mha.compat._shared.flags import as_flag
from mha.compat.onnx._caches import with_past
from mha.compat.onnx._heads import attend, by_head, floats, in_precision, public, rotated


@public
class AttentionOutputs(NamedTuple):
    """What `attention` returns, by the names of the operator's outputs."""

    Y: NDArray[Any]
    present_key: NDArray[Any]
    present_value: NDArray[Any]
    qk_matmul_output: NDArray[Any] | None


def attention(Q: ArrayLike, K: ArrayLike, V: ArrayLike, attn_mask: ArrayLike | None = None,
              past_key: ArrayLike | None = None, past_value: ArrayLike | None = None,
              nonpad_kv_seqlen: ArrayLike | None = None, *, is_causal: int = 0,
              kv_num_heads: int | None = None, left_window_size: int = -1,
              q_num_heads: int | None = None, qk_matmul_output_mode: int = 0,
              right_window_size: int = -1, scale: float | None = None, softcap: float = 0.0,
              softmax_precision: int | None = None, return_qk: bool = False) -> AttentionOutputs:
    """Attention of ai.onnx, opsets 23, 24 and 25.

    Parameters
    ----------
    Q : array (batch, q_num_heads, q_len, head_size)
    K, V : arrays (batch, kv_num_heads, kv_len, head_size) and (..., v_head_size)
        Or all three (batch, len, num_heads * size), with q_num_heads and kv_num_heads. Query
        heads share those of K and V in groups.
    attn_mask : bool (True = attend) or numbers (added to the scores), optional
        Broadcast to (batch, q_num_heads, q_len, total_len), but that a last axis which is shorter
        hides the keys behind it.
    past_key, past_value : arrays (batch, kv_num_heads, past_len, size), optional
        Stand in front of K and V: total_len = past_len + kv_len.
    nonpad_kv_seqlen : ints (batch,), optional
        How many keys of each sequence are no padding. Not together with past_key.
    is_causal : 0 or 1
        Query i sees the keys up to i + offset. The offset is past_len; with nonpad_kv_seqlen it
        is nonpad_kv_seqlen - q_len.
    left_window_size, right_window_size : int
        How far a query sees from i + offset on; -1 is without end.
    scale : float, by default 1 / sqrt(head_size)
    softcap : float
        Scores become softcap * tanh(score / softcap), before the mask; 0 is none.
    softmax_precision : 1, 10, 11 or 16 (onnx.TensorProto's types), optional
        11 computes in float64. The others change nothing: float32 is the least.
    return_qk : bool
        Whether to make qk_matmul_output (batch, q_num_heads, q_len, total_len), which a node asks
        for by naming its fourth output. It costs memory for all scores.
    qk_matmul_output_mode : 0, 1, 2 or 3
        What that holds: scaled scores, capped too, masked too, or their softmax.

    Returns
    -------
    AttentionOutputs: Y, shaped as Q but for v_head_size, and present_key and present_value
    (batch, kv_num_heads, total_len, size), then qk_matmul_output or None. A query without visible
    keys gives zeros.

    Raises
    ------
    ValueError: shapes that do not fit, a mode, precision or window that there is not. TypeError:
    arrays of other types.

    Source: the ONNX standard, operator Attention; Vaswani et al. 2017.

    >>> q = np.ones((2, 8, 10, 64), np.float32)
    >>> attention(q, q, q, is_causal=1).Y.shape
    (2, 8, 10, 64)
    """
    query, key, value = floats(("Q", Q), ("K", K), ("V", V))
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (3, 4):
        raise ValueError(f"Q, K, V: got shapes {query.shape}, {key.shape}, {value.shape}, wanted"
                         " 3 or 4 dimensions each")
    if qk_matmul_output_mode not in range(4):
        raise ValueError(f"qk_matmul_output_mode: got {qk_matmul_output_mode}, wanted 0 to 3")
    dtype = query.dtype
    merged = query.ndim == 3
    query, key, value = (
        by_head(array, name, heads) for array, name, heads in (
            (query, "q_num_heads", q_num_heads), (key, "kv_num_heads", kv_num_heads),
            (value, "kv_num_heads", kv_num_heads)))
    cache = with_past(key, value, past_key, past_value)

    options: AttentionKeywords = {
        "scale": scale, "softcap": softcap or None, "causal": as_flag(is_causal, "is_causal"),
        "query_offset": cache.past_len, "window": _window(left_window_size, right_window_size)}
    if attn_mask is not None:
        scores_shape = (*query.shape[:3], cache.key.shape[2])
        options |= _mask_or_bias(as_array(attn_mask, "attn_mask"), scores_shape)
    if nonpad_kv_seqlen is not None:
        if past_key is not None:
            raise ValueError("nonpad_kv_seqlen: got it together with past_key, wanted one of them")
        batch, _, query_len, _ = query.shape
        lengths = as_lengths(nonpad_kv_seqlen, batch, "nonpad_kv_seqlen")
        options |= {"query_offset": lengths - query_len, "key_lengths": checked_lengths(
            lengths, batch, key.shape[2], "nonpad_kv_seqlen")}

    stage = qk_matmul_output_mode if as_flag(return_qk, "return_qk") else None
    query, key, value = in_precision(softmax_precision, query, cache.key, cache.value)
    output, scores = attend(query, key, value, stage, options)
    if merged:
        output = merge_heads(output)
    return AttentionOutputs(in_type(output, dtype), cache.present_key, cache.present_value,
                            None if scores is None else in_type(scores, dtype))


def _window(left: int, right: int) -> tuple[int | None, int | None]:
    for name, size in (("left_window_size", left), ("right_window_size", right)):
        if size < -1:
            raise ValueError(f"{name}: got {size}, wanted at least -1")
    return (None if left == -1 else left, None if right == -1 else right)


def _mask_or_bias(mask: NDArray[Any], scores_shape: tuple[int, ...]) -> AttentionKeywords:
    """attn_mask as mha's option, keys beyond its last axis hidden."""
    mask = widened(mask)
    check_kind(mask, "attn_mask", "biuf", "bool or numbers")
    is_bool = mask.dtype.kind == "b"
    if not is_bool:  # -inf is no integer
        mask = converted(mask, np.result_type(mask, np.float32))
    missing = scores_shape[-1] - mask.shape[-1] if mask.ndim else 0
    if missing > 0:
        mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)],
                      constant_values=False if is_bool else -np.inf)
    check_over_scores(mask, "attn_mask", scores_shape)
    return {"mask": mask} if is_bool else {"bias": mask}


def rotary_embedding(X: ArrayLike, cos_cache: ArrayLike, sin_cache: ArrayLike,
                     position_ids: ArrayLike | None = None, *, interleaved: int = 0,
                     num_heads: int | None = None, rotary_embedding_dim: int = 0) -> NDArray[Any]:
    """RotaryEmbedding of ai.onnx, opset 23.

    Parameters
    ----------
    X : array (batch, num_heads, len, head_size)
        Or (batch, len, num_heads * head_size), with num_heads.
    cos_cache, sin_cache : arrays (positions, dims / 2), or (batch, len, dims / 2) without
        position_ids
    position_ids : ints (batch, len), optional
        Rows of the caches.
    interleaved : 0 or 1
        Whether column 2c rotates with 2c + 1, or c with c + dims / 2.
    rotary_embedding_dim : int
        How many columns of a head rotate, the first ones: dims. 0 is all.

    Returns
    -------
    array, of the shape and type of X.

    Raises
    ------
    ValueError: shapes that do not fit, positions beyond the caches. TypeError: other types.

    Source: the ONNX standard, operator RotaryEmbedding; Su et al. 2021, "RoFormer".

    >>> x, caches = np.ones((2, 8, 10, 64), np.float32), np.ones((2, 10, 32), np.float32)
    >>> rotary_embedding(x, caches, caches).shape
    (2, 8, 10, 64)
    """
    x, cosine, sine = floats(("X", X), ("cos_cache", cos_cache), ("sin_cache", sin_cache))
    positions = None if position_ids is None else as_array(position_ids, "position_ids")
    return rotated(x, cosine, sine, positions, num_heads=num_heads, dims=rotary_embedding_dim,
                   interleaved=interleaved)


def tensor_scatter(past_cache: ArrayLike, update: ArrayLike, write_indices: ArrayLike | None = None,
                   *, axis: int = -2, mode: str = "linear") -> NDArray[Any]:
    """TensorScatter of ai.onnx, opset 24: a cache with new rows, which `attention` takes with
    nonpad_kv_seqlen.

    Parameters
    ----------
    past_cache : array (batch, ..., max_len, ...)
        Stays as it is.
    update : array of the same type and shape, but for len in place of max_len
    write_indices : ints (batch,), by default 0
        Which row of the cache the first row of the update becomes.
    axis : int
        The axis of the rows, any but 0.
    mode : "linear" or "circular"
        Whether rows behind the last one are an error, or begin at 0 again.

    Returns
    -------
    array present_cache, shaped as past_cache.

    Raises
    ------
    ValueError: shapes, an axis or rows that do not fit, another mode. TypeError: arrays of unlike
    types.

    Source: the ONNX standard, operator TensorScatter.

    >>> cache, key = np.zeros((2, 8, 100, 64)), np.ones((2, 8, 1, 64))
    >>> tensor_scatter(cache, key, [7, 9])[:, 0, 9, 0]
    array([0., 1.])
    """
    cache, new = as_array(past_cache, "past_cache"), as_array(update, "update")
    if new.dtype != cache.dtype:
        raise TypeError(f"update: got an array of {new.dtype}, wanted {cache.dtype} as past_cache")
    if mode not in ("linear", "circular"):
        raise ValueError(f"mode: got {mode!r}, wanted 'linear' or 'circular'")
    at = as_int(axis, "axis") + (cache.ndim if axis < 0 else 0)
    if not 0 < at < cache.ndim:
        raise ValueError(f"axis: got {axis} with a past_cache of shape {cache.shape}, wanted one of"
                         " its axes but the first")
    batch, max_len = cache.shape[0], cache.shape[at]
    wanted = (*cache.shape[:at], "len", *cache.shape[at + 1:])
    if new.ndim != cache.ndim or (*new.shape[:at], "len", *new.shape[at + 1:]) != wanted or (
            new.shape[at] > max_len):
        raise ValueError(f"update: got shape {new.shape}, wanted {wanted} with len of at most"
                         f" {max_len}")
    starts = as_lengths(0 if write_indices is None else write_indices, batch, "write_indices")
    room = max_len - new.shape[at]
    if mode == "linear" and ((starts < 0) | (starts > room)).any():
        raise ValueError(f"write_indices: got {starts.tolist()}, wanted 0 to {room}, so that"
                         f" {new.shape[at]} rows fit in {max_len}")
    rows = (starts[:, None] + np.arange(new.shape[at])) % max(max_len, 1)
    present = copied(cache, order="C")
    np.moveaxis(present, at, 1)[np.arange(batch)[:, None], rows] = np.moveaxis(new, at, 1)
    return present
