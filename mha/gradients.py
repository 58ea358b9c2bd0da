"""What the pullbacks return, and the way back through the whole figure, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha.arguments import as_array, bits

Gradient = NDArray[Any] | None


class LinearGradients(NamedTuple):
    """What the pullback of `mha.linear_vjp` returns; None where not wanted or not given."""

    x: Gradient
    weight: Gradient
    bias: Gradient


class ScaledDotProductAttentionGradients(NamedTuple):
    """What the pullback of `mha.scaled_dot_product_attention_vjp` returns; None where not wanted
    or not given."""

    query: Gradient
    key: Gradient
    value: Gradient
    bias: Gradient


class AdditiveAttentionGradients(NamedTuple):
    """What the pullback of `mha.additive_attention_vjp` returns; None where not wanted."""

    query: Gradient
    key: Gradient
    value: Gradient
    W_q: Gradient
    W_k: Gradient
    w_v: Gradient


class MultiHeadAttentionGradients(NamedTuple):
    """What the pullbacks of `mha.multi_head_attention_vjp` and of a layer's `vjp` return; None
    where not wanted or not given."""

    query: Gradient
    key: Gradient
    value: Gradient
    W_q: Gradient
    W_k: Gradient
    W_v: Gradient
    W_o: Gradient
    b_q: Gradient
    b_k: Gradient
    b_v: Gradient
    b_o: Gradient
    head_gate: Gradient
    bias: Gradient


def checked_gradient(gradient: ArrayLike, result: NDArray[Any], name: str) -> NDArray[Any]:
    """The gradient with respect to a result: of its shape, in its type."""
    array = as_array(gradient, name)
    if array.dtype.kind not in "iub" and array.dtype.newbyteorder("=") not in (
            np.float16, np.float32, np.float64):
        raise TypeError(f"{name}: got an array of {array.dtype}, wanted {result.dtype}")
    if array.shape != result.shape:
        raise ValueError(f"{name}: got shape {array.shape}, wanted {result.shape}")
    return array.astype(result.dtype, copy=False)


def linear_gradients(grad_output: NDArray[Any], x: NDArray[Any], weight: NDArray[Any],
                     of_x: bool, of_weight: bool, of_bias: bool) -> LinearGradients:
    """output = x @ weight + bias, backwards: each gradient is a product of matrices too.

    grad_output (..., out), x (..., in), weight (in, out), all of one type.
    """
    num_rows = math.prod(x.shape[:-1])
    by_row = grad_output.reshape(num_rows, grad_output.shape[-1])  # (rows, out)
    rows = x.reshape(num_rows, x.shape[-1])  # (rows, in)
    return LinearGradients(
        _core.linear(grad_output, weight.T, None) if of_x else None,
        _core.linear(rows.T, by_row, None) if of_weight else None,
        _sum_of_rows(by_row) if of_bias else None)


def input_projection_gradients(grad_output: NDArray[Any], x: NDArray[Any], weight: NDArray[Any],
                               of_x: bool, of_weight: bool, of_bias: bool) -> LinearGradients:
    """linear_gradients, but NaN in rows that get no gradient, as padding has, stays there."""
    found = linear_gradients(grad_output, x, weight, of_x, of_weight, of_bias)
    if found.weight is None or math.isfinite(float(found.weight.sum())):
        return found
    seen = np.where(grad_output.any(axis=-1, keepdims=True), x, 0).astype(x.dtype, copy=False)
    return found._replace(
        weight=linear_gradients(grad_output, seen, weight, False, True, False).weight)


def _sum_of_rows(rows: NDArray[Any]) -> NDArray[Any]:
    """(rows, columns) -> (columns,)."""
    return _core.linear(np.ones((1, rows.shape[0]), rows.dtype), rows, None)[0]


class AdditiveSteps(NamedTuple):
    """What the forward pass of additive attention leaves for the way back."""

    query: NDArray[Any]
    key: NDArray[Any]
    value: NDArray[Any]
    projected_query: NDArray[Any]
    projected_key: NDArray[Any]
    output: NDArray[Any]
    statistics: NDArray[Any]


def additive_gradients(
        steps: AdditiveSteps, matrices: tuple[NDArray[Any], ...], options: tuple[Any, ...],
        wanted: set[str], grad_output: NDArray[Any], grad_lse: NDArray[Any] | None,
        ) -> AdditiveAttentionGradients:
    """Additive attention backwards. matrices: W_q, W_k, w_v; options: from mask to seed."""
    W_q, W_k, w_v = matrices

    # 2. Attention with the scores w_v . tanh(projected query + projected key).
    asked = [bool({"query", "W_q"} & wanted), bool({"key", "W_k"} & wanted), "value" in wanted,
             False, "w_v" in wanted]
    grad_query, grad_key, grad_value, _, w_v_by_query = (
        _core.scaled_dot_product_attention_backward(
            grad_output, grad_lse, steps.output, steps.statistics, bits(asked), w_v,
            steps.projected_query, steps.projected_key, steps.value, *options))
    grad_w_v = None
    if w_v_by_query is not None:
        rows = w_v_by_query.reshape(math.prod(w_v_by_query.shape[:-1]), w_v.size)
        grad_w_v = _sum_of_rows(rows)

    # 1. Projections to the hidden width.
    of_query = of_key = LinearGradients(None, None, None)
    if grad_query is not None:
        of_query = input_projection_gradients(grad_query, steps.query, W_q, "query" in wanted,
                                              "W_q" in wanted, False)
    if grad_key is not None:
        of_key = input_projection_gradients(grad_key, steps.key, W_k, "key" in wanted,
                                            "W_k" in wanted, False)
    return AdditiveAttentionGradients(
        of_query.x, of_key.x, grad_value, of_query.weight, of_key.weight, grad_w_v)


class FigureSteps(NamedTuple):
    """What the forward pass of the figure leaves for the way back. Arrays are (batch, len, ...);
    one sequence is a batch of one."""

    query: NDArray[Any]
    key: NDArray[Any]
    value: NDArray[Any]
    projected_query: NDArray[Any]
    projected_key: NDArray[Any]
    projected_value: NDArray[Any]
    attended: NDArray[Any]  # before head_gate
    merged: NDArray[Any]    # after it
    statistics: NDArray[Any]


def figure_gradients(
        steps: FigureSteps, matrices: tuple[NDArray[Any], ...], num_heads: int, num_kv_heads: int,
        head_gate: NDArray[Any] | None, options: tuple[Any, ...], wanted: set[str],
        grad_output: NDArray[Any], grad_lse: NDArray[Any] | None) -> dict[str, Gradient]:
    """The figure backwards, from the output projection to the input projections.

    options: those of attention from mask to seed, as the core takes them. wanted: names of
    arguments, without those that were not given.
    """
    W_q, W_k, W_v, W_o = matrices
    found: dict[str, Gradient] = {}

    # 5. Output projection.
    of_output = linear_gradients(
        grad_output, steps.merged, W_o, bool(wanted - {"W_o", "b_o"}), "W_o" in wanted,
        "b_o" in wanted)
    found["W_o"], found["b_o"] = of_output.weight, of_output.bias
    if of_output.x is None:
        return found

    # 4. Merge heads: back to (batch, heads, query_len, value_head_dim), a view.
    grad_heads = _core.split_heads(of_output.x, num_heads)
    attended = _core.split_heads(steps.attended, num_heads)
    if head_gate is not None:
        if "head_gate" in wanted:
            found["head_gate"] = _sum_by_head(grad_heads * attended)
        grad_heads = grad_heads * head_gate[:, None, None]

    # 3. Scaled dot-product attention.
    asked = [bool({name, f"W_{name[0]}", f"b_{name[0]}"} & wanted)
             for name in ("query", "key", "value")] + ["bias" in wanted]
    gradients = _core.scaled_dot_product_attention_backward(
        grad_heads, grad_lse, attended, steps.statistics,
        bits(asked),
        None, _core.split_heads(steps.projected_query, num_heads),
        _core.split_heads(steps.projected_key, num_kv_heads),
        _core.split_heads(steps.projected_value, num_kv_heads), *options)
    found["bias"] = gradients[3]

    # 2. Split heads: the gradients lie as the projections do. 1. Linear projections.
    for index, (name, weight) in enumerate((("query", W_q), ("key", W_k), ("value", W_v))):
        gradient = gradients[index]
        if gradient is not None:
            letter = name[0]
            of_input = input_projection_gradients(
                _merged_view(gradient), getattr(steps, name), weight, name in wanted,
                f"W_{letter}" in wanted, f"b_{letter}" in wanted)
            found[name], found[f"W_{letter}"], found[f"b_{letter}"] = of_input
    return found


def _merged_view(heads: NDArray[Any]) -> NDArray[Any]:
    """(batch, heads, len, d) in the memory order of (batch, len, heads * d)."""
    by_token = np.swapaxes(heads, -2, -3)
    return by_token.reshape(*by_token.shape[:-2], by_token.shape[-2] * by_token.shape[-1])


def _sum_by_head(products: NDArray[Any]) -> NDArray[Any]:
    """(batch..., heads, query_len, d) -> (heads,)."""
    heads = products.shape[-3]
    by_head = np.moveaxis(products, -3, 0).reshape(heads, products.size // max(heads, 1))
    return _core.linear(by_head, np.ones((by_head.shape[1], 1), products.dtype), None)[:, 0]


MultiHeadPullback = Callable[..., MultiHeadAttentionGradients]
