"""A layer's call over a ragged batch: x (total_len, embed_dim), of which sequence s is rows
starts[s] to starts[s + 1]. Rows are projected together; every sequence attends to itself, and its
positions begin with 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import _core, layer_state
from mha.arguments import as_array, as_int_array, check_real
from mha.dropout import drawn
from mha.gradients import Gradient, MultiHeadAttentionGradients, Pullback
from mha.layer_cache import _prepared
from mha.layer_state import LayerState
from mha.options import AttentionOptions

Array = NDArray[Any]
Maybe = ArrayLike | None

ITSELF = "every sequence attends to itself"
REFUSED = {  # arguments of a call that do not go with starts, and why
    "key": ITSELF, "value": ITSELF,
    "cache": "a cache takes lengths=", "lengths": "starts say how long sequences are",
    "positions": "they restart with each sequence",
    "key_positions": "they restart with each sequence", "padding": "nothing is padded",
    "return_weights": "weights of unequal shapes are no array"}
# What the gradient of attention's inputs is needed for, and what all sequences share.
BEFORE = {"query": {"query", "W_q", "b_q"}, "key": {"query", "W_k", "b_k"},
          "value": {"query", "W_v", "b_v"}}
SHARED = ("alibi", "relative_bias", "sinks")


def call(state: LayerState, x: ArrayLike, starts: ArrayLike, options: AttentionOptions,
         head_gate: Maybe, return_lse: bool, **others: Any) -> Any:
    """The output (total_len, output_dim), and lse (heads, total_len) where asked for. `others` are
    given though they do not go with starts."""
    rows, begins = _checked(state, x, starts, others)
    W_q, W_k, W_v, W_o, b_q, b_k, b_v, b_o, *_ = state.call
    projected = [_core.linear(rows, W, b) for W, b in ((W_q, b_q), (W_k, b_k), (W_v, b_v))]
    query, key, value = _by_head(state, projected, begins)
    with drawn(options) as drawn_options:
        results = _core.scaled_dot_product_attention_varlen(
            query, key, value, begins, None, drawn_options, return_lse=return_lse,
            head_gate=head_gate)
    attended, *lse = results if isinstance(results, tuple) else (results,)
    output = _core.linear(_merged(attended), W_o, b_o)
    return (output, *lse) if lse else output


def vjp(state: LayerState, x: ArrayLike, starts: ArrayLike, options: AttentionOptions,
        head_gate: Maybe, wanted: set[str], **others: Any,
        ) -> tuple[Array, Pullback[MultiHeadAttentionGradients]]:
    """The same and its gradients, as of `MultiHeadAttention.vjp`."""
    rows, begins = _checked(state, x, starts, others)
    if state.settings.qk_norm is not None:
        raise ValueError("starts: got some for gradients of a layer with qk_norm, wanted a call a"
                         " sequence")
    W_q, W_k, W_v, W_o, b_q, b_k, b_v, b_o, *_ = layer_state.plain_call(state)
    gate = None if head_gate is None else _checked_gate(state, head_gate)
    steps = [_core.linear(rows, W, b, keep=True) for W, b in ((W_q, b_q), (W_k, b_k), (W_v, b_v))]
    query, key, value = _by_head(state, [projected for projected, _ in steps], begins)
    with drawn(options) as drawn_options:
        attended, kept = _core.scaled_dot_product_attention_varlen(
            query, key, value, begins, None, drawn_options, keep=True)
    gated = attended if gate is None else attended * gate
    output, kept_output = _core.linear(_merged(gated), W_o, b_o, keep=True)

    def pullback(grad_output: ArrayLike, grad_lse: Maybe = None) -> MultiHeadAttentionGradients:
        """The gradients of a loss by name, from those by the output and by lse (or None: zeros)."""
        found: dict[str, Gradient] = dict.fromkeys(MultiHeadAttentionGradients._fields)
        grad_merged = _linear_backward(kept_output, grad_output, "o", wanted, found)
        grad_gated = grad_merged.reshape(attended.shape)
        grad_attended = grad_gated
        if gate is not None:
            grad_attended = grad_gated * gate
            if "head_gate" in wanted:
                sums = (grad_gated * attended).sum(axis=(0, 2), dtype=np.float64)
                found["head_gate"] = sums.astype(attended.dtype)
        needed = {name for name, goals in BEFORE.items() if goals & wanted}
        gradients = _core.scaled_dot_product_attention_varlen_backward(
            kept, grad_attended, grad_lse, needed | (wanted & {*SHARED}))
        found |= {name: gradients[name] for name in SHARED}
        gradients = _turned_back(state, gradients, begins)
        grad_x = [_linear_backward(steps[i][1], grad, "qkv"[i], wanted, found)
                  for i, grad in enumerate(_by_head_backward(gradients)) if grad is not None]
        if "query" in wanted:
            found["query"] = grad_x[0] + grad_x[1] + grad_x[2]
        return MultiHeadAttentionGradients(**found)

    return output, pullback


def _positions(starts: Array) -> Array:
    """(total_len,): they begin with 0 in each sequence."""
    return np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))


def _by_head(state: LayerState, projected: list[Array], starts: Array) -> list[Array]:
    """What is projected (total_len, heads * d) to query, key and value, (total_len, heads, d)."""
    positions = _positions(starts)
    return [np.swapaxes(_prepared(state, which, rows[None], positions)[0], 0, 1)
            for which, rows in zip("qkv", projected, strict=True)]


def _turned_back(state: LayerState, gradients: dict[str, Gradient],
                 starts: Array) -> dict[str, Gradient]:
    """Those of query and key before the layer's rotation: the turn the other way."""
    rotary = state.settings.rotary
    turned = dict(gradients)
    for name in ("query", "key") if rotary is not None else ():
        gradient = gradients[name]
        if rotary is not None and gradient is not None:
            by_head = np.ascontiguousarray(np.swapaxes(gradient, 0, 1))[None]
            _, pullback = rotary.vjp(by_head, _positions(starts))
            turned[name] = np.swapaxes(np.asarray(pullback(by_head).x)[0], 0, 1)
    return turned


def _by_head_backward(gradients: dict[str, Gradient]) -> list[Array | None]:
    """The gradients of what is projected, (total_len, heads * d), where they are there."""
    return [None if gradients[name] is None else _merged(np.asarray(gradients[name]))
            for name in BEFORE]


def _merged(heads: Array) -> Array:
    """(total_len, heads, d) -> (total_len, heads * d)."""
    return np.ascontiguousarray(heads).reshape(len(heads), heads.shape[1] * heads.shape[2])


def _linear_backward(kept: object, grad_output: ArrayLike, which: str, wanted: set[str],
                     found: dict[str, Gradient]) -> Array:
    """The gradient of x; those of W and b go to `found` where they are wanted."""
    names = {f"W_{which}": "weight", f"b_{which}": "bias"}
    gradients = _core.linear_backward(kept, grad_output, None, {"x"} | {
        step for name, step in names.items() if name in wanted})
    found |= {name: gradients[step] for name, step in names.items()}
    return np.asarray(gradients["x"])


def _checked(state: LayerState, x: ArrayLike, starts: ArrayLike,
             others: dict[str, Any]) -> tuple[Array, Array]:
    """The rows (total_len, embed_dim) in the layer's type, and the starts, an array of our own."""
    settings = state.settings
    for name, other in others.items():
        if other is not None and other is not False:
            raise ValueError(f"{name}: got one with starts, wanted none: {REFUSED[name]}")
    widths = settings.query_dim, settings.key_dim, settings.value_dim
    if len(set(widths)) > 1:
        raise ValueError(f"starts: got some for query_dim, key_dim and value_dim {widths}, wanted"
                         f" equal ones: {ITSELF}")
    given = as_array(x, "query")
    if given.ndim != 2 or given.shape[1] != settings.query_dim:
        raise ValueError(f"query: got shape {given.shape}, wanted (total_len,"
                         f" {settings.query_dim}) with starts")
    if given.dtype != settings.dtype:
        check_real(given, "query")
    return given.astype(settings.dtype, copy=False), _checked_starts(starts, len(given))


def _checked_starts(starts: ArrayLike, total_len: int) -> Array:
    given = as_int_array(starts, "starts")
    if given.ndim != 1 or not given.size:
        raise ValueError(f"starts: got shape {given.shape}, wanted (sequences + 1,)")
    if given[0] != 0:
        raise ValueError(f"starts: got {given[0]} at first, wanted 0")
    falls = np.flatnonzero(given[1:] < given[:-1])
    if falls.size:
        before, after = given[falls[0]:falls[0] + 2]
        raise ValueError(f"starts: got {after} after {before}, wanted starts that never fall")
    if given[-1] != total_len:
        raise ValueError(f"starts: got {given[-1]} at last, wanted {total_len}, the number of rows"
                         " of query")
    return given


def _checked_gate(state: LayerState, head_gate: ArrayLike) -> Array:
    """(num_heads, 1) in the layer's type."""
    gate = as_array(head_gate, "head_gate")
    heads = state.settings.num_heads
    if gate.shape != (heads,):
        raise ValueError(f"head_gate: got shape {gate.shape}, wanted ({heads},)")
    if gate.dtype != state.settings.dtype:
        check_real(gate, "head_gate")
    return gate.astype(state.settings.dtype)[:, None]
