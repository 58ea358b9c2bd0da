"""Multi-head attention in plain NumPy: the text to learn from, and the oracle of the tests.

Read it top-down: `multi_head_attention` is the figure, and every box of the figure is one of the
functions below it. Same names, arguments and meanings (but for `out`) as the public functions of
`mha`, which do the same work in C. It favours clarity: the scores are stored whole, so memory grows
with query_len * key_len. Besides float32 and float64 it computes in complex128 and long double; of
halves it makes float32, and does not round the result.
`mha.reference.steps` shows every intermediate of a layer, with its shape and the file that computes
it in C; _backward.py has the gradients.

Source of the method: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._functions.block_mask import BlockMask
from mha._functions.dropout import seed_from
from mha._functions.options import EmptyRows, RandomSource, Window
from mha._functions.rotary import Rotary
from mha.reference._prepared_heads import _floating, prepared_heads


def multi_head_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *, b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None, b_v: ArrayLike | None = None, b_o: ArrayLike | None = None,
        W_g: ArrayLike | None = None, b_g: ArrayLike | None = None,
        num_heads: int, num_kv_heads: int | None = None, head_gate: ArrayLike | None = None,
        rotary: Rotary | None = None, q_norm: ArrayLike | None = None,
        k_norm: ArrayLike | None = None, norm_eps: float = 1e-6, norm_offset: float = 0.0,
        positions: ArrayLike | None = None, key_positions: ArrayLike | None = None,
        return_weights: bool = False, return_lse: bool = False, **options: Any) -> Any:
    """The whole figure: project, split heads, attend, merge heads, project.

    query (..., query_len, query_dim) -> output (..., query_len, output_dim); then weights
    (..., heads, query_len, key_len) and lse (..., heads, query_len) where asked for.
    """
    if key_positions is None and key is query:
        key_positions = positions
    is_one = np.ndim(query) == 2  # one sequence: a batch of one, and back
    if is_one:
        query, key, value = map(_batch_of_one, (query, key, value))
        options["key_lengths"] = _batch_of_one(options.get("key_lengths"))
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads

    # 1. Linear projections.
    projected_query = linear(query, W_q, b_q)  # (..., query_len, heads * head_dim)
    projected_key = linear(key, W_k, b_k)      # (..., key_len, kv_heads * head_dim)
    projected_value = linear(value, W_v, b_v)  # (..., key_len, kv_heads * value_head_dim)

    # 2. Split heads: (..., len, heads * d) -> (..., heads, len, d).
    query_heads = split_heads(projected_query, num_heads)
    key_heads = split_heads(projected_key, kv_heads)
    value_heads = split_heads(projected_value, kv_heads)
    query_heads = prepared_heads(query_heads, q_norm, norm_eps, norm_offset, rotary, positions)
    key_heads = prepared_heads(key_heads, k_norm, norm_eps, norm_offset, rotary, key_positions)

    # 3. Scaled dot-product attention, every head on its own.
    attended, weights, lse = scaled_dot_product_attention(
        query_heads, key_heads, value_heads, return_weights=True, return_lse=True, **options)
    if head_gate is not None:
        attended = attended * _cast(head_gate, attended.dtype)[:, None, None]

    # 4. Merge heads: (..., heads, query_len, d) -> (..., query_len, heads * d).
    merged = merge_heads(attended)
    if W_g is not None:
        merged = output_gate(merged, linear(query, W_g, b_g))

    # 5. Output projection.
    output = linear(merged, W_o, b_o)
    return _returned(output, weights, lse, return_weights, return_lse, is_one)


def linear(x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None) -> NDArray[Any]:
    """x (..., in) @ weight (in, out) + bias (out,)."""
    x = _floating(x)
    output = x @ _cast(weight, x.dtype)
    return output if bias is None else output + _cast(bias, x.dtype)


def split_heads(x: ArrayLike, num_heads: int) -> NDArray[Any]:
    """(..., len, num_heads * d) -> (..., num_heads, len, d): a view, nothing is copied."""
    x = np.asarray(x)
    by_head = x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // max(num_heads, 1))
    return np.swapaxes(by_head, -2, -3)


def merge_heads(x: ArrayLike) -> NDArray[Any]:
    """(..., heads, len, d) -> (..., len, heads * d): the inverse of `split_heads`, contiguous."""
    by_token = np.swapaxes(np.asarray(x), -2, -3)
    return np.ascontiguousarray(by_token).reshape(
        *by_token.shape[:-2], by_token.shape[-2] * by_token.shape[-1])


def output_gate(merged: NDArray[Any], logits: NDArray[Any]) -> NDArray[Any]:
    """merged (..., len, heads * d) times sigmoid(logits), (..., len, heads * d) or (..., len,
    heads): one for all columns of a head."""
    gates = (1 + np.tanh(logits / 2)) / 2
    return merged * np.repeat(gates, merged.shape[-1] // max(gates.shape[-1], 1), axis=-1)


def scaled_dot_product_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *, mask: ArrayLike | None = None,
        bias: ArrayLike | None = None, alibi: ArrayLike | None = None,
        relative_bias: ArrayLike | None = None, sinks: ArrayLike | None = None,
        key_lengths: ArrayLike | None = None, causal: bool = False,
        query_offset: ArrayLike | None = None,
        window: Window | None = None, scale: float | None = None,
        softcap: float | None = None, empty_rows: EmptyRows = "zeros", dropout: float = 0.0,
        rng: RandomSource = None, dropout_offsets: tuple[int, int, int, int] | None = None,
        return_weights: bool = False, return_lse: bool = False) -> Any:
    """softmax(query @ key^T * scale) @ value over the visible keys (section 3.2.1).

    query (..., heads, query_len, head_dim), key (..., kv_heads, key_len, head_dim), value
    (..., kv_heads, key_len, value_head_dim) -> output (..., heads, query_len, value_head_dim).
    """
    query, key, value = _same_type(query, key, value)
    group = _group_size(query, key)
    key, value = _repeat_heads(key, group), _repeat_heads(value, group)

    # 1. Scores: one number for each (query, key) pair, (..., heads, query_len, key_len).
    scores = dot_product_scores(query, key, scale=scale, softcap=softcap)
    return _attend(scores, value, mask=mask, bias=bias, alibi=alibi, relative_bias=relative_bias,
                   sinks=sinks, key_lengths=key_lengths, causal=causal, query_offset=query_offset,
                   window=window, empty_rows=empty_rows, dropout=dropout, rng=rng,
                   dropout_offsets=dropout_offsets, return_weights=return_weights,
                   return_lse=return_lse)


def dot_product_scores(query: NDArray[Any], key: NDArray[Any], *, scale: float | None = None,
                       softcap: float | None = None) -> NDArray[Any]:
    """query @ key^T * scale, then capped: (..., heads, query_len, key_len). As many heads in key
    as in query."""
    head_dim = query.shape[-1]
    if scale is None:
        scale = 1 / math.sqrt(head_dim) if head_dim else 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        scores = (query * query.dtype.type(scale)) @ np.swapaxes(key, -1, -2)
    if softcap is not None and softcap != math.inf:
        scores = softcap * np.tanh(scores / softcap)
    return scores


def unmasked_attention(query: NDArray[Any], key: NDArray[Any],
                       value: NDArray[Any]) -> NDArray[Any]:
    """The same without options and as fast as NumPy gets, in place: `python -m mha` races it.

    (..., query_len, head_dim), (..., key_len, head_dim) -> (..., query_len, value_head_dim).
    """
    weights = query @ np.swapaxes(key, -1, -2)
    weights *= weights.dtype.type(1 / math.sqrt(query.shape[-1]))
    weights -= weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ value


def additive_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        w_v: ArrayLike, *, mask: ArrayLike | None = None, key_lengths: ArrayLike | None = None,
        causal: bool = False, query_offset: ArrayLike | None = None,
        empty_rows: EmptyRows = "zeros", dropout: float = 0.0, rng: RandomSource = None,
        return_weights: bool = False) -> Any:
    """Attention with the scores w_v . tanh(query W_q + key W_k) (Bahdanau et al. 2015, A.1.2).

    query (..., heads, query_len, query_dim), key (..., kv_heads, key_len, key_dim), W_q
    (query_dim, hidden), W_k (key_dim, hidden), w_v (hidden,).
    """
    query, key, value = _same_type(query, key, value)
    group = _group_size(query, key)
    key, value = _repeat_heads(key, group), _repeat_heads(value, group)

    # features: (..., heads, query_len, key_len, hidden)
    features = np.tanh(linear(query, W_q)[..., :, None, :] + linear(key, W_k)[..., None, :, :])
    scores = features @ _cast(w_v, query.dtype).reshape(-1)
    return _attend(scores, value, mask=mask, key_lengths=key_lengths, causal=causal,
                   query_offset=query_offset, empty_rows=empty_rows, dropout=dropout, rng=rng,
                   return_weights=return_weights)


def _attend(scores: NDArray[Any], value: NDArray[Any], *, empty_rows: EmptyRows, dropout: float,
            rng: RandomSource, return_weights: bool, return_lse: bool = False,
            dropout_offsets: tuple[int, int, int, int] | None = None,
            sinks: ArrayLike | None = None, **conditions: Any) -> Any:
    """From scores to output: bias, masks, softmax, dropout, and the weighted sum of the values."""
    # 2. Biases, then -inf wherever a query may not see a key.
    scores, visible = mask_scores(scores, **conditions)

    # 3. Softmax over the keys, and the sink where there is one.
    weights, lse = softmax(scores, sinks)
    if empty_rows == "uniform" and scores.shape[-1]:
        empty = (lse.real == -np.inf)[..., None]
        weights = np.where(empty, weights.dtype.type(1 / scores.shape[-1]), weights)
        visible = visible | empty

    # 4. Dropout on the weights, then the weighted sum: (..., heads, query_len, value_head_dim).
    kept = weights
    if dropout:
        kept = weights * _dropout_factors(weights.shape, dropout, seed_from(rng), dropout_offsets)
    output = _weighted_sum(kept, value, visible)
    return _returned(output, weights, lse, return_weights, return_lse)


def mask_scores(scores: NDArray[Any], *, bias: ArrayLike | None = None,
                alibi: ArrayLike | None = None, relative_bias: ArrayLike | None = None,
                query_offset: ArrayLike | None = None,
                **conditions: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Add the biases and block with -inf what `visible_pairs` rules out: (scores, visible)."""
    visible = np.broadcast_to(
        visible_pairs(scores.shape, query_offset=query_offset, **conditions), scores.shape)
    added = [] if bias is None else [_cast(bias, scores.dtype)]
    if alibi is not None:
        slopes = _cast(alibi, scores.dtype)
        size = abs(distances(scores.shape, query_offset)).astype(scores.real.dtype)
        added.append(_by_head(-slopes, scores.shape) * size)
    if relative_bias is not None:
        added.append(biases_by_distance(_cast(relative_bias, scores.dtype),
                                        distances(scores.shape, query_offset), scores.shape))
    for biases in added:
        with np.errstate(invalid="ignore", over="ignore"):
            scores = scores + biases
        visible = visible & (biases.real != -np.inf)
    return np.where(visible, scores, scores.dtype.type(-np.inf)), visible


def distances(scores_shape: tuple[int, ...],
              query_offset: ArrayLike | None = None) -> NDArray[np.int64]:
    """j - i - query_offset of query i and key j: (query_len, key_len), or batch axes before."""
    query_len, key_len = scores_shape[-2:]
    offset = key_len - query_len if query_offset is None else query_offset
    offset = np.asarray(np.clip(np.asarray(offset, object), -2**60, 2**60)).astype(np.int64)
    return np.arange(key_len) - np.arange(query_len)[:, None] - _over_scores(
        offset, scores_shape, False)


def biases_by_distance(table: NDArray[Any], distance: NDArray[np.int64],
                       scores_shape: tuple[int, ...]) -> NDArray[Any]:
    """relative_bias: table (heads or 1, 2r + 1) -> what is added to the scores."""
    farthest = table.shape[-1] // 2
    at = np.clip(distance, -farthest, farthest) + farthest
    if len(scores_shape) < 4:  # one head, and no axis for it
        return table[0][at]
    by_head = np.broadcast_to(at, np.broadcast_shapes(at.shape, (scores_shape[-3], 1, 1)))
    head = 0 if len(table) == 1 else np.arange(scores_shape[-3])[:, None, None]
    return table[head, by_head]


def softmax(scores: NDArray[Any],
            sinks: ArrayLike | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Weights exp(s) / sum(exp(s)) over the last axis, and the log-sum-exp of every row.

    The row's maximum is subtracted first, so that large scores do not overflow. A row that is
    -inf throughout has weights 0 and lse -inf. Complex scores take the maximum by real part.
    sinks (heads,) are one more score of each row, whose weight is left out.
    """
    if sinks is not None:
        sink = np.broadcast_to(_by_head(_cast(sinks, scores.dtype), scores.shape),
                               (*scores.shape[:-1], 1))
        weights, lse = softmax(np.concatenate([scores, sink], axis=-1))
        return weights[..., :-1], lse
    if scores.shape[-1] == 0:
        return scores, np.full(scores.shape[:-1], -np.inf, scores.dtype)
    largest = scores.real.max(axis=-1, keepdims=True)
    largest = np.where(largest == -np.inf, 0, largest).astype(largest.dtype)
    with np.errstate(invalid="ignore", divide="ignore"):
        exponentials = np.where(scores.real == -np.inf, 0, np.exp(scores - largest))
        total = exponentials.sum(axis=-1, keepdims=True)
        weights = np.where(total == 0, 0, exponentials / np.where(total == 0, 1, total))
        lse = np.where(total == 0, -np.inf, np.log(total) + largest)[..., 0]
    return weights.astype(scores.dtype), lse.astype(scores.dtype)


def visible_pairs(scores_shape: tuple[int, ...], *, mask: ArrayLike | None = None,
                  key_lengths: ArrayLike | None = None, causal: bool = False,
                  query_offset: ArrayLike | None = None,
                  window: Window | None = None) -> NDArray[np.bool_]:
    """Which query may see which key: bool, broadcastable to scores_shape. All conditions hold."""
    key_len = scores_shape[-1]
    batch_axes = max(len(scores_shape) - 3, 0) if len(scores_shape) != 3 else 1
    key_index = np.arange(key_len)

    visible = np.ones((1, 1), bool)
    if mask is not None:
        visible = visible & (over_scores(mask, scores_shape) if isinstance(mask, BlockMask)
                             else np.asarray(mask))
    if key_lengths is not None:
        lengths = np.asarray(key_lengths)
        per_query = lengths.ndim == batch_axes + 1
        visible = visible & (key_index < _over_scores(lengths, scores_shape, per_query))
    if causal or window is not None:
        distance = distances(scores_shape, query_offset)
        if causal:
            visible = visible & (distance <= 0)
        left, right = window if window is not None else (None, None)
        if left is not None:
            visible = visible & (distance >= -min(left, 2**60))
        if right is not None:
            visible = visible & (distance <= min(right, 2**60))
    return visible


def over_scores(mask: BlockMask, scores_shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """A BlockMask as a bool array with the axes of the scores: (batch..., heads, query_len,
    key_len), batch axes flattened in C order."""
    dense = mask.to_dense()
    if len(scores_shape) < 4:
        return dense[0, 0] if len(scores_shape) == 2 else dense[:, 0]
    batch = scores_shape[:-3] if mask.batch > 1 else (1,) * len(scores_shape[:-3])
    return dense.reshape(*batch, *dense.shape[1:])


def merge_attention(outputs: Sequence[ArrayLike],
                    lses: Sequence[ArrayLike]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Join attention over parts of the keys into attention over all of them, exactly.

    outputs: each (..., query_len, value_head_dim); lses: each (..., query_len). Every part
    counts with weight exp(lse - largest lse) (Dao et al. 2023, Flash-Decoding).
    """
    parts = _same_type(*outputs)
    stacked = np.stack([np.asarray(lse).astype(parts[0].dtype) for lse in lses])
    weights, lse = softmax(np.moveaxis(stacked, 0, -1))
    output = np.zeros_like(parts[0])
    for index, part in enumerate(parts):
        share = weights[..., index, None]
        ignored = (stacked[index] == -np.inf)[..., None]
        with np.errstate(invalid="ignore"):
            output = output + np.where(ignored, 0, share * part)
    return output, lse


def dropout_mask(shape: Sequence[int], p: float, seed: int, *,
                 offsets: Sequence[int] = (0, 0, 0, 0)) -> NDArray[np.bool_]:
    """True where a weight is kept: Philox4x32-7 of (key // 8, query, head, batch), 16 bits a key.

    shape as the weights: (query_len, key_len), (batch, query_len, key_len) or
    (..., heads, query_len, key_len); offsets: what is added to (batch, head, query, key).
    Source: Salmon et al. 2011, "Parallel Random Numbers".
    """
    query_len, key_len = shape[-2:]
    heads = shape[-3] if len(shape) >= 4 else 1
    batch = math.prod(shape[:-3]) if len(shape) >= 4 else math.prod(shape[:-2])
    first_batch, first_head, first_query, first_key = offsets
    first_group, skipped = divmod(first_key, 8)
    groups = -(-(skipped + key_len) // 8)
    batch_index, head, query_index, group = np.meshgrid(
        *(np.arange(first, first + n).astype(np.uint64) & np.uint64(0xFFFFFFFF) for first, n in (
            (first_batch, batch), (first_head, heads), (first_query, query_len),
            (first_group, groups))), indexing="ij")
    words = _philox(group, query_index, head, batch_index, seed)  # four of 32 bits
    sixteen = [half for word in words for half in (word & 0xFFFF, word >> np.uint64(16))]
    random = np.stack(sixteen, axis=-1).reshape(batch, heads, query_len, groups * 8)
    random = random[..., skipped:skipped + key_len]
    return (random >= _dropout_threshold(p)).reshape(shape)


def _philox(counter0: Any, counter1: Any, counter2: Any, counter3: Any, seed: int,
            rounds: int = 7) -> tuple[Any, Any, Any, Any]:
    """Philox4x32: each round multiplies two words and mixes in the key."""
    low, word = np.uint64(0xFFFFFFFF), np.uint64(32)
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(rounds):
        product0 = counter0 * np.uint64(0xD2511F53)
        product1 = counter2 * np.uint64(0xCD9E8D57)
        counter0, counter1, counter2, counter3 = (
            (product1 >> word) ^ counter1 ^ np.uint64(key0), product1 & low,
            (product0 >> word) ^ counter3 ^ np.uint64(key1), product0 & low)
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return counter0, counter1, counter2, counter3


def _dropout_threshold(p: float) -> int:
    return math.floor(65536 * p + 0.5)


def _dropout_factors(shape: tuple[int, ...], p: float, seed: int,
                     offsets: Sequence[int] | None) -> NDArray[Any]:
    """0 where a weight is dropped, 1 / (kept fraction) where it is kept."""
    kept_fraction = (65536 - _dropout_threshold(p)) / 65536
    if not kept_fraction:
        return np.zeros(shape)
    return dropout_mask(shape, p, seed, offsets=offsets or (0, 0, 0, 0)) / kept_fraction


def _weighted_sum(weights: NDArray[Any], value: NDArray[Any],
                  visible: NDArray[np.bool_]) -> NDArray[Any]:
    """weights @ value, but what stands in value behind a blocked pair never counts."""
    weights = _cast(weights, value.dtype)
    with np.errstate(invalid="ignore"):
        if np.isfinite(value).all():
            return weights @ value
        terms = weights[..., None] * value[..., None, :, :]
        return np.where(visible[..., None], terms, 0).sum(axis=-2).astype(terms.dtype)


def _over_scores(per_batch: NDArray[Any], scores_shape: tuple[int, ...],
                 per_query: bool) -> NDArray[Any]:
    """Shape an array over the batch axes (and the queries) so that it broadcasts to the scores."""
    batch = per_batch.shape[:-1] if per_query else per_batch.shape
    head_axis = (1,) if len(scores_shape) >= 4 and batch else ()
    query_axis = per_batch.shape[-1:] if per_query else (1,)
    return per_batch.reshape(*batch, *head_axis, *query_axis, 1)


def _by_head(numbers: NDArray[Any], scores_shape: tuple[int, ...]) -> NDArray[Any]:
    """(heads,) so that it broadcasts to the scores."""
    return numbers[:, None, None] if len(scores_shape) >= 4 else numbers


def _group_size(query: NDArray[Any], key: NDArray[Any]) -> int:
    """How many consecutive query heads one key head serves (Ainslie et al. 2023)."""
    return query.shape[-3] // max(key.shape[-3], 1) if query.ndim >= 4 else 1


def _repeat_heads(x: NDArray[Any], group: int) -> NDArray[Any]:
    return np.repeat(x, group, axis=-3) if group > 1 else x


def _cast(array: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
    """In this type; complex stays complex, so that derivatives can be taken by complex steps."""
    array = np.asarray(array)
    return array if array.dtype.kind == "c" else array.astype(dtype, copy=False)


def _same_type(*arrays: ArrayLike) -> list[NDArray[Any]]:
    floating = [_floating(array) for array in arrays]
    common = np.result_type(*floating)
    return [array.astype(common, copy=False) for array in floating]


def _batch_of_one(x: ArrayLike | None) -> Any:
    return None if x is None else np.asarray(x)[None]


def _returned(output: NDArray[Any], weights: NDArray[Any], lse: NDArray[Any],
              return_weights: bool, return_lse: bool, is_one: bool = False) -> Any:
    """What was asked for; is_one: without the axis of a batch of one."""
    results = [output]
    if return_weights:
        results.append(weights)
    if return_lse:
        results.append(lse)
    if is_one:
        results = [result[0] for result in results]
    return tuple(results) if len(results) > 1 else results[0]
