"""A layer's call over a ragged batch: x (total_len, embed_dim), of which sequence s is rows
starts[s] to starts[s + 1]. Rows are projected together; every sequence attends to itself. Its
positions begin with 0, or go on behind those that a pool of pages has of it; where the layer's
rotary has several position axes, they may be given, (axes, total_len).
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.arguments import as_array, as_bool, as_int_array, as_positions
from mha._base.dtypes import as_computed, computing_dtype, is_half, returned, rounded, shown
from mha._base.pieces import contiguous
from mha._functions.dropout import drawn
from mha._functions.gradients import Gradient, MultiHeadAttentionGradients, Pullback
from mha._functions.options import AttentionOptions
from mha._functions.rotary import position_axes
from mha._layer import state as layer_state
from mha._layer.cached_call import (
    check_cache_fits,
    check_not_training,
    checked_options,
    no_positions,
)
from mha._layer.paged_cache import PagedLayer
from mha._layer.prepare_heads import gated, heads_of, prepared
from mha._layer.state import CallArguments, LayerState
from mha._layer.steps import checked_gate, linear_backward

Array = NDArray[Any]
Maybe = ArrayLike | None

ITSELF = "every sequence attends to itself"
REFUSED = {  # arguments of a call that do not go with starts, and why
    "key": ITSELF, "value": ITSELF, "lengths": "starts say how long sequences are",
    "positions": "rows of a sequence stand one behind the other",
    "key_positions": "rows of a sequence stand one behind the other",
    "padding": "nothing is padded",
    "return_weights": "weights of unequal shapes are no array"}
# What the gradients of attention's inputs are needed for, and what all sequences share.
BEFORE = {"query": {"query", "W_q", "b_q", "q_norm"}, "key": {"query", "W_k", "b_k", "k_norm"},
          "value": {"query", "W_v", "b_v"}}
OF_GATE = {"query", "W_g", "b_g"}
SHARED = ("alibi", "relative_bias", "sinks")


def call(state: LayerState, x: ArrayLike, starts: ArrayLike, options: AttentionOptions,
         head_gate: Maybe, return_lse: bool, cache: Any = None, append: Any = True,
         sequences: Any = None, training: Any = False, positions: Maybe = None,
         **others: Any) -> Any:
    """The output (total_len, output_dim), and lse (heads, total_len) where asked for. cache is a
    layer of a PagedCache, and sequences are ids of it. `others` are given though they do not go
    with starts."""
    if cache is None and sequences is not None:
        raise ValueError("sequences: got some without a cache, wanted cache=pool[layer] too")
    appends = as_bool(append, "append")
    if cache is not None:
        return _paged_call(state, x, starts, options, head_gate, return_lse, cache, appends,
                           sequences, training, positions, others)
    if not appends:
        raise ValueError("append: got False without a cache, wanted cache=pool[layer] too")
    _, rows, begins, where = _checked(state, x, starts, positions, others)
    steps = _projected(state, state.call, rows, begins, positions=where)
    query, key, value = (step.heads for step in steps)
    with drawn(options) as drawn_options:
        results = _core.scaled_dot_product_attention_varlen(
            query, key, value, begins, None, drawn_options, return_lse=return_lse,
            head_gate=head_gate)
    return _output(state, results, rows)


def _paged_call(state: LayerState, x: ArrayLike, starts: ArrayLike, options: AttentionOptions,
                head_gate: Maybe, return_lse: bool, cache: Any, appends: bool, sequences: Any,
                training: Any, positions: Maybe, others: dict[str, Any]) -> Any:
    """Appends the rows to their sequences, or takes them for the last ones that these have, and
    attends to all positions so far."""
    if not isinstance(cache, PagedLayer):
        raise TypeError(f"cache: got {type(cache).__name__} with starts, wanted a layer of a"
                        " mha.PagedCache, pool[i]; other caches take lengths=")
    check_cache_fits(state.settings, cache.pool, "cache")
    check_not_training(training)
    if sequences is None:
        raise ValueError("sequences: got none, wanted the ids of the sequences of starts")
    gate = None if head_gate is None else as_array(head_gate, "head_gate")
    _, rows, begins, where = _checked(state, x, starts, positions, others, appends)
    undrawn = drawn(checked_options(options, cache)).options._replace(causal=True)
    _check_options(state, cache, undrawn, gate)
    axes = position_axes(state.settings.rotary)
    if where is None and axes > 1 and cache.have_moved(sequences):
        raise ValueError(no_positions(axes, f"({len(rows)},)"))
    new = (cache.rows(sequences, begins, where) if appends
           else cache.last_rows(sequences, begins, undrawn.window))
    where = new.positions if where is None else where
    if appends:
        steps = _projected(state, state.call, rows, begins, positions=where)
        query, key, value = (step.heads for step in steps)
        cache.write(new, key, value)
    else:
        query = _projected_to(state, state.call, "q", rows, where).heads
    results = _core.scaled_dot_product_attention_varlen(
        query, cache.key, cache.value, begins, new.key_starts,
        undrawn._replace(query_offset=new.query_offset),
        return_lse=return_lse, head_gate=gate, page_tables=new.tables, keep_first=cache.keep_first,
        dropped=new.dropped)
    output = _output(state, results, rows)
    cache.publish(new)
    return output


def _check_options(state: LayerState, cache: PagedLayer, options: AttentionOptions,
                   gate: Array | None) -> None:
    """Raises what attention would, before pages that no next row sees are given back for it."""
    if cache.window is not None:
        none = np.zeros(1, np.int64)
        query = np.zeros((0, state.settings.num_heads, state.settings.head_dim),
                         computing_dtype(state.settings.dtype))
        _core.scaled_dot_product_attention_varlen(
            query, cache.key, cache.value, none, none, options, head_gate=gate,
            page_tables=np.zeros((0, 0), np.int64))


def _output(state: LayerState, results: Any, rows: Array) -> Any:
    """Attention's results, the first one merged, gated and projected."""
    attended, *lse = results if isinstance(results, tuple) else (results,)
    merged = gated(state, _merged(attended), rows)
    output = returned(_core.linear(merged, state.call.W_o, state.call.b_o), state.settings.dtype)
    return (output, *lse) if lse else output


def vjp(state: LayerState, x: ArrayLike, starts: ArrayLike, options: AttentionOptions,
        head_gate: Maybe, wanted: set[str], positions: Maybe = None, **others: Any,
        ) -> tuple[Array, Pullback[MultiHeadAttentionGradients]]:
    """The same and its gradients, as of `MultiHeadAttention.vjp`."""
    given, rows, begins, where = _checked(state, x, starts, positions, others)
    layer_state.known_dtype(state.settings.dtype, has_gradients=True)
    arguments = layer_state.plain_call(state)
    gate = None if head_gate is None else checked_gate(state.settings, head_gate)[:, None]
    steps = _projected(state, arguments, rows, begins, save=True, positions=where)
    query, key, value = (step.heads for step in steps)
    with drawn(options) as drawn_options:
        attended, saved = _core.scaled_dot_product_attention_varlen(
            query, key, value, begins, None, drawn_options, save=True)
    merged = _merged(attended if gate is None else attended * gate)
    if arguments.W_g is not None:
        logits, saved_logits = _core.linear(rows, arguments.W_g, arguments.b_g, save=True)
        merged, saved_gate = _core.output_gate(merged, logits, arguments.num_heads, save=True)
    output, saved_output = _core.linear(merged, arguments.W_o, arguments.b_o, save=True)

    def pullback(grad_output: ArrayLike, grad_lse: Maybe = None) -> MultiHeadAttentionGradients:
        """The gradients of a loss by name, from those by the output and by lse (or None: zeros)."""
        found: dict[str, Gradient] = dict.fromkeys(MultiHeadAttentionGradients._fields)
        grad_merged = linear_backward(saved_output, grad_output, "o", wanted | {"x"}, found)
        grad_rows = []
        if arguments.W_g is not None:
            of_gate = _core.output_gate_backward(saved_gate, grad_merged, None,
                                                 {"merged", "logits"})
            grad_merged = of_gate["merged"]
            if wanted & OF_GATE:
                grad_rows.append(linear_backward(saved_logits, np.asarray(of_gate["logits"]), "g",
                                                 _with_x(wanted), found))
        grad_attended = grad_gated = np.asarray(grad_merged).reshape(attended.shape)
        if gate is not None:
            grad_attended = grad_gated * gate
            if "head_gate" in wanted:
                sums = (grad_gated * attended).sum(axis=(0, 2), dtype=np.float64)
                found["head_gate"] = sums.astype(attended.dtype)
        needed = {name for name, goals in BEFORE.items() if goals & wanted}
        gradients = _core.scaled_dot_product_attention_varlen_backward(
            saved, grad_attended, grad_lse, needed | (wanted & {*SHARED}))
        found |= {name: gradients[name] for name in SHARED}
        grad_rows[:0] = [_projected_backward(step, gradients[name], wanted, found)
                         for name, step in zip(BEFORE, steps, strict=True) if name in needed]
        if "query" in wanted:
            grad_x = functools.reduce(operator.add, grad_rows)
            found["query"] = (shown(rounded(grad_x, given.dtype)) if is_half(given.dtype)
                              else grad_x)
        return MultiHeadAttentionGradients(**found)

    return returned(output, state.settings.dtype), pullback


class Projected(NamedTuple):
    """Rows of x projected to "q", "k" or "v" and prepared, and what the ways back take."""

    which: str
    heads: Array  # (total_len, heads, d)
    linear: object
    preparation: object  # None where nothing was done


def _projected(state: LayerState, arguments: CallArguments, rows: Array, starts: Array,
               save: bool = False, positions: Array | None = None) -> list[Projected]:
    """Of query, key and value; by default positions begin with 0 in each sequence."""
    if positions is None and state.settings.rotary is not None:
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
    return [_projected_to(state, arguments, which, rows, positions, save) for which in "qkv"]


def _projected_to(state: LayerState, arguments: CallArguments, which: str, rows: Array,
                  positions: Array | None, save: bool = False) -> Projected:
    W, b = getattr(arguments, f"W_{which}"), getattr(arguments, f"b_{which}")
    result = _core.linear(rows, W, b, save=save)
    projected, linear = result if save else (result, None)
    merged, preparation = prepared(state, which, projected[None], positions, save=save)
    heads = heads_of(state.settings, which)
    width = merged.shape[2] // heads
    return Projected(which, merged.reshape(len(rows), heads, width), linear, preparation)


def _projected_backward(step: Projected, grad_heads: Gradient, wanted: set[str],
                        found: dict[str, Gradient]) -> Any:
    """The gradient of x, None where it is not wanted; those of parameters go to `found`."""
    grad_projected = _merged(np.asarray(grad_heads))
    if step.preparation is not None:
        norm = step.which + "_norm"
        gradients = _core.prepare_heads_backward(step.preparation, grad_projected[None], None,
                                                 {"x"} | {"norm"} if norm in wanted else {"x"})
        found[norm] = gradients["norm"]
        grad_projected = np.asarray(gradients["x"])[0]
    return linear_backward(step.linear, grad_projected, step.which, _with_x(wanted), found)


def _with_x(wanted: set[str]) -> set[str]:
    """With "x", the rows of query, where query's gradient is wanted."""
    return wanted | {"x"} if "query" in wanted else wanted


def _merged(heads: Array) -> Array:
    """(total_len, heads, d) -> (total_len, heads * d)."""
    return contiguous(heads).reshape(len(heads), heads.shape[1] * heads.shape[2])


def _checked(state: LayerState, x: ArrayLike, starts: ArrayLike, positions: Maybe,
             others: dict[str, Any],
             appends: bool = True) -> tuple[Array, Array, Array, Array | None]:
    """What was given, it as rows (total_len, embed_dim) in the type in which the layer computes,
    the starts, an array of our own, and the positions (axes, total_len), where some were given."""
    settings = state.settings
    axes = position_axes(settings.rotary)
    if axes == 1:
        others = {**others, "positions": positions}
    for name, other in others.items():
        if other is not None and other is not False:
            raise ValueError(f"{name}: got one with starts, wanted none: {REFUSED[name]}")
    widths = settings.query_dim, settings.key_dim, settings.value_dim
    if appends and len(set(widths)) > 1:
        raise ValueError(f"starts: got some for query_dim, key_dim and value_dim {widths}, wanted"
                         f" equal ones: {ITSELF}")
    given = as_array(x, "query")
    if given.ndim != 2 or given.shape[1] != settings.query_dim:
        raise ValueError(f"query: got shape {given.shape}, wanted (total_len,"
                         f" {settings.query_dim}) with starts")
    rows = as_computed(given, "query", settings.dtype)
    begins = _checked_starts(starts, len(given))
    if positions is None:
        return given, rows, begins, None
    return given, rows, begins, as_positions(positions, "positions", 1, len(rows), axes)[:, 0]


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
