"""The gradients of _forward.py in plain NumPy: each function is the chain rule, backwards.

The same names, arguments and meanings as the public functions of `mha`, without `wrt`. A function
does the forward pass, saves what the backward pass needs, and returns (output, pullback); the
pullback takes the gradient of a loss with respect to the output and returns a dictionary of its
gradients with respect to the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._functions.dropout import seed_from
from mha._functions.options import EmptyRows, RandomSource
from mha._functions.rotary import Rotary
from mha.reference._forward import (
    _batch_of_one,
    _by_head,
    _dropout_factors,
    _group_size,
    _repeat_heads,
    _same_type,
    _weighted_sum,
    distances,
    dot_product_scores,
    linear,
    mask_scores,
    merge_heads,
    output_gate,
    softmax,
    split_heads,
)
from mha.reference._prepared_heads import prepared_heads_vjp

Gradients = dict[str, NDArray[Any]]
Pullback = Callable[..., Gradients]


def linear_vjp(x: ArrayLike, weight: ArrayLike,
               bias: ArrayLike | None = None) -> tuple[NDArray[Any], Pullback]:
    """output = x @ weight + bias."""
    output = linear(x, weight, bias)
    rows = np.asarray(x).astype(output.dtype, copy=False)
    num_rows = math.prod(rows.shape[:-1])
    matrix = np.asarray(weight).astype(output.dtype, copy=False)

    def pullback(grad_output: NDArray[Any]) -> Gradients:
        by_row = grad_output.reshape(num_rows, grad_output.shape[-1])
        gradients = {"x": grad_output @ matrix.T,
                     "weight": rows.reshape(num_rows, rows.shape[-1]).T @ by_row}
        if bias is not None:
            gradients["bias"] = by_row.sum(axis=0)
        return gradients

    return output, pullback


def scaled_dot_product_attention_vjp(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *, scale: float | None = None,
        softcap: float | None = None, **options: Any) -> tuple[NDArray[Any], Pullback]:
    """The options are those of `mha.reference.scaled_dot_product_attention`."""
    query, key, value = _same_type(query, key, value)
    group = _group_size(query, key)
    keys, values = _repeat_heads(key, group), _repeat_heads(value, group)
    capped = dot_product_scores(query, keys, scale=scale, softcap=softcap)
    output, attend_pullback = attend_vjp(capped, values, **options)
    if scale is None:
        scale = query.shape[-1] ** -0.5 if query.shape[-1] else 1.0

    def pullback(grad_output: NDArray[Any], grad_lse: NDArray[Any] | None = None) -> Gradients:
        gradients = attend_pullback(grad_output, grad_lse)
        grad_dots, visible = gradients.pop("scores"), gradients.pop("visible")
        # scores = softcap * tanh(dots / softcap), dots = query @ key^T * scale
        if softcap is not None and softcap != math.inf:
            grad_dots = np.where(visible, grad_dots * (1 - (capped / softcap) ** 2), 0)
        grad_dots = grad_dots * query.dtype.type(scale)
        gradients["query"] = _weighted_sum(grad_dots, keys, visible)
        gradients["key"] = _sum_of_groups(
            _weighted_sum(_transposed(grad_dots), query, _transposed(visible)), group)
        gradients["value"] = _sum_of_groups(gradients["value"], group)
        return gradients

    return output, pullback


def scaled_dot_product_attention_backward(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, output: NDArray[Any],
        lse: NDArray[Any], grad_output: NDArray[Any], *, grad_lse: NDArray[Any] | None = None,
        **options: Any) -> Gradients:
    """The gradients by query, and by these keys and values, of attention over these and others:
    output and lse are the results over all of them."""
    _, pullback = scaled_dot_product_attention_vjp(query, key, value, known=(output, lse),
                                                   **options)
    return pullback(grad_output, grad_lse)


def additive_attention_vjp(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        w_v: ArrayLike, **options: Any) -> tuple[NDArray[Any], Pullback]:
    """The options are those of `mha.reference.additive_attention`."""
    query, key, value = _same_type(query, key, value)
    group = _group_size(query, key)
    keys, values = _repeat_heads(key, group), _repeat_heads(value, group)
    projected_query, query_pullback = linear_vjp(query, W_q)
    projected_key, key_pullback = linear_vjp(keys, W_k)
    vector = np.asarray(w_v).astype(query.dtype).reshape(-1)
    # features: (..., heads, query_len, key_len, hidden)
    features = np.tanh(projected_query[..., :, None, :] + projected_key[..., None, :, :])
    output, attend_pullback = attend_vjp(features @ vector, values, **options)

    def pullback(grad_output: NDArray[Any], grad_lse: NDArray[Any] | None = None) -> Gradients:
        gradients = attend_pullback(grad_output, grad_lse)
        grad_scores = gradients.pop("scores")
        visible = gradients.pop("visible")
        grad_sums = np.where(visible[..., None],
                             grad_scores[..., None] * vector * (1 - features**2), 0)
        of_query = query_pullback(grad_sums.sum(axis=-2))
        of_key = key_pullback(grad_sums.sum(axis=-3))
        return {"query": of_query["x"], "key": _sum_of_groups(of_key["x"], group),
                "value": _sum_of_groups(gradients["value"], group), "W_q": of_query["weight"],
                "W_k": of_key["weight"],
                "w_v": np.where(visible[..., None], grad_scores[..., None] * features, 0).sum(
                    axis=tuple(range(grad_scores.ndim)))}

    return output, pullback


def attend_vjp(scores: NDArray[Any], value: NDArray[Any], *, sinks: ArrayLike | None = None,
               empty_rows: EmptyRows = "zeros", dropout: float = 0.0, rng: RandomSource = None,
               dropout_offsets: tuple[int, int, int, int] | None = None,
               known: tuple[NDArray[Any], NDArray[Any]] | None = None,
               **conditions: Any) -> tuple[NDArray[Any], Pullback]:
    """From scores to output: bias, masks, softmax, dropout, and the weighted sum of the values.

    known: (output, lse) of attention over more keys, of which these are a part.
    """
    masked, visible = mask_scores(scores, **conditions)
    weights, lse = softmax(masked, sinks)
    if known is not None:
        lse = known[1]
        with np.errstate(invalid="ignore", over="ignore"):
            weights = np.where(visible, np.exp(masked - lse[..., None]), 0).astype(scores.dtype)
    empty = (lse == -np.inf)[..., None]
    seen = visible  # what stands in value at other pairs never counts
    used = weights
    if empty_rows == "uniform" and scores.shape[-1]:
        used = np.where(empty, weights.dtype.type(1 / scores.shape[-1]), weights)
        seen = visible | empty
    factors: Any = 1.0
    if dropout:
        factors = _dropout_factors(weights.shape, dropout, seed_from(rng), dropout_offsets)
    kept = used * factors
    output = _weighted_sum(kept, value, seen) if known is None else known[0]

    def pullback(grad_output: NDArray[Any], grad_lse: NDArray[Any] | None) -> Gradients:
        # output = kept @ value
        grad_value = _weighted_sum(_transposed(kept), grad_output, _transposed(seen))
        with np.errstate(invalid="ignore"):
            grad_weights = grad_output @ _transposed(value) * factors
        grad_weights = np.where(weights == 0, 0, grad_weights)
        # weights = softmax(scores): each row's gradients lose their weighted mean
        of_keys = weights * grad_weights if known is None else grad_output * output
        mean = of_keys.sum(axis=-1, keepdims=True)
        grad_rows = grad_weights - mean
        if grad_lse is not None:
            grad_rows = grad_rows + grad_lse[..., None]
        grad_scores = np.where(weights == 0, 0, weights * grad_rows)
        gradients = {"value": grad_value, "scores": grad_scores.astype(value.dtype),
                     "visible": visible}
        gradients |= grad_biases(grad_scores, **conditions)
        if sinks is not None:
            # a score whose weight times value is 0
            sink = _by_head(np.asarray(sinks).astype(lse.dtype), scores.shape)
            lse_of_row = np.where(lse == -np.inf, 0, lse)[..., None]
            of_lse = 0 if grad_lse is None else grad_lse[..., None]
            grad_sinks = np.where(sink == -np.inf, 0, np.exp(sink - lse_of_row) * (of_lse - mean))
            gradients["sinks"] = _sum_to_heads(grad_sinks)
        return gradients

    return output, pullback


def grad_biases(grad_scores: NDArray[Any], *, bias: ArrayLike | None = None,
                alibi: ArrayLike | None = None, relative_bias: ArrayLike | None = None,
                query_offset: ArrayLike | None = None, **visibility: Any) -> Gradients:
    """The gradients of what was added to scores, as far as it was given."""
    gradients = {}
    if bias is not None:
        gradients["bias"] = _sum_to_shape(grad_scores, np.shape(bias))
    distance = distances(grad_scores.shape, query_offset)
    if alibi is not None:
        gradients["alibi"] = _sum_to_heads(-grad_scores * abs(distance).astype(grad_scores.dtype))
    if relative_bias is not None:
        table = np.zeros(np.shape(relative_bias), grad_scores.dtype)
        farthest = table.shape[1] // 2
        at = np.broadcast_to(np.clip(distance, -farthest, farthest) + farthest, grad_scores.shape)
        for entry in range(table.shape[1]):
            found = np.where(at == entry, grad_scores, 0)
            table[:, entry] = _sum_to_heads(found) if len(table) > 1 else found.sum()
        gradients["relative_bias"] = table
    return gradients


def multi_head_attention_vjp(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *, b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None, b_v: ArrayLike | None = None, b_o: ArrayLike | None = None,
        W_g: ArrayLike | None = None, b_g: ArrayLike | None = None,
        num_heads: int, num_kv_heads: int | None = None, head_gate: ArrayLike | None = None,
        rotary: Rotary | None = None, q_norm: ArrayLike | None = None,
        k_norm: ArrayLike | None = None, norm_eps: float = 1e-6, norm_offset: float = 0.0,
        positions: ArrayLike | None = None, key_positions: ArrayLike | None = None,
        **options: Any) -> tuple[NDArray[Any], Pullback]:
    """The whole figure; query (batch..., query_len, query_dim)."""
    if key_positions is None and key is query:
        key_positions = positions
    is_one = np.ndim(query) == 2  # one sequence: a batch of one, and back
    if is_one:
        query, key, value = map(_batch_of_one, (query, key, value))
        options["key_lengths"] = _batch_of_one(options.get("key_lengths"))
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads

    # 1. Linear projections.
    projected_query, pull_query = linear_vjp(query, W_q, b_q)
    projected_key, pull_key = linear_vjp(key, W_k, b_k)
    projected_value, pull_value = linear_vjp(value, W_v, b_v)
    # 2. Split heads, norms and rotation. 3. Scaled dot-product attention, every head on its own.
    query_heads, unprepare_query = prepared_heads_vjp(
        split_heads(projected_query, num_heads), q_norm, norm_eps, norm_offset, rotary, positions)
    key_heads, unprepare_key = prepared_heads_vjp(
        split_heads(projected_key, kv_heads), k_norm, norm_eps, norm_offset, rotary, key_positions)
    attended, pull_attention = scaled_dot_product_attention_vjp(
        query_heads, key_heads, split_heads(projected_value, kv_heads), **options)
    gate = 1.0 if head_gate is None else np.asarray(head_gate).astype(
        attended.dtype)[:, None, None]
    # 4. Merge heads, and the output gate. 5. Output projection.
    merged, pull_gate = _gated_vjp(merge_heads(attended * gate), query, W_g, b_g)
    output, pull_output = linear_vjp(merged, W_o, b_o)

    def pullback(grad_output: NDArray[Any], grad_lse: NDArray[Any] | None = None) -> Gradients:
        if is_one:
            grad_output, grad_lse = grad_output[None], _batch_of_one(grad_lse)
        of_output = pull_output(grad_output)
        grad_merged, of_gate = pull_gate(of_output["x"])
        grad_attended = split_heads(grad_merged, num_heads)
        of_heads = pull_attention(grad_attended * gate, grad_lse)
        grad_query_heads, grad_q_norm = unprepare_query(of_heads["query"])
        grad_key_heads, grad_k_norm = unprepare_key(of_heads["key"])
        of_query = pull_query(merge_heads(grad_query_heads))
        of_key = pull_key(merge_heads(grad_key_heads))
        of_value = pull_value(merge_heads(of_heads["value"]))
        gradients = {"query": of_query["x"], "key": of_key["x"], "value": of_value["x"],
                     "W_q": of_query["weight"], "W_k": of_key["weight"],
                     "W_v": of_value["weight"], "W_o": of_output["weight"]}
        for name, bias, pulled in (("b_q", b_q, of_query), ("b_k", b_k, of_key),
                                   ("b_v", b_v, of_value), ("b_o", b_o, of_output),
                                   ("b_g", b_g, of_gate)):
            if bias is not None:
                gradients[name] = pulled["bias"]
        if W_g is not None:
            gradients["query"] = gradients["query"] + of_gate["x"]
            gradients["W_g"] = of_gate["weight"]
        gradients |= {name: grad for name, grad in (("q_norm", grad_q_norm),
                                                    ("k_norm", grad_k_norm)) if grad is not None}
        if head_gate is not None:
            products = np.moveaxis(grad_attended * attended, -3, 0)
            gradients["head_gate"] = products.reshape(num_heads, -1).sum(axis=1)
        for name in ("bias", "alibi", "relative_bias", "sinks"):
            if name in of_heads:
                gradients[name] = of_heads[name]
        if is_one:
            gradients |= {name: gradients[name][0] for name in ("query", "key", "value")}
        return gradients

    return output[0] if is_one else output, pullback


def _gated_vjp(merged: NDArray[Any], query: ArrayLike, W_g: ArrayLike | None,
               b_g: ArrayLike | None) -> tuple[NDArray[Any], Callable[..., Any]]:
    """merged (..., len, heads * d) times sigmoid(query @ W_g + b_g); the pullback gives the
    gradients of merged and those of that projection."""
    if W_g is None:
        return merged, lambda grad_gated: (grad_gated, {})
    logits, pull_logits = linear_vjp(query, W_g, b_g)
    gates = (1 + np.tanh(logits / 2)) / 2
    columns = merged.shape[-1] // max(gates.shape[-1], 1)  # that share a gate

    def pullback(grad_gated: NDArray[Any]) -> tuple[NDArray[Any], Gradients]:
        products = (grad_gated * merged).reshape(*gates.shape, columns)
        return (grad_gated * np.repeat(gates, columns, axis=-1),
                pull_logits(products.sum(axis=-1) * gates * (1 - gates)))

    return output_gate(merged, logits), pullback


def _transposed(x: NDArray[Any]) -> NDArray[Any]:
    return np.swapaxes(x, -1, -2)


def _sum_of_groups(gradient: NDArray[Any], group: int) -> NDArray[Any]:
    """Heads that shared a key head add up in its gradient."""
    if group <= 1:
        return gradient
    *batch, heads, length, width = gradient.shape
    return gradient.reshape(*batch, heads // group, group, length, width).sum(axis=-3)


def _sum_to_heads(gradient: NDArray[Any]) -> NDArray[Any]:
    """(..., heads, query_len, any) or that of one head -> (heads,)."""
    if gradient.ndim < 4:
        return gradient.sum()[None]
    return gradient.sum(axis=(-2, -1)).sum(axis=tuple(range(gradient.ndim - 3)))


def _sum_to_shape(gradient: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The sum over the axes along which an array of this shape was broadcast."""
    summed = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
    repeated = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return summed.sum(axis=repeated, keepdims=True)
