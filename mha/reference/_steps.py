"""Every intermediate of a layer's call, by the figure's names: what each box of it computes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_array
from mha._base.dtypes import is_half
from mha._functions.options import (
    LAYER,
    AttentionOptions,
    LayerKeywords,
    some_options,
    takes_options,
)
from mha._layer.layer import MultiHeadAttention
from mha._layer.options import call_options
from mha.reference._forward import (
    _batch_of_one,
    _repeat_heads,
    dot_product_scores,
    linear,
    mask_scores,
    merge_heads,
    output_gate,
    scaled_dot_product_attention,
    split_heads,
    visible_pairs,
)
from mha.reference._prepared_heads import prepared_heads

STEPS = {  # name: (the function of this module, the file of the C core)
    "query": ("the input", ""),
    "key": ("the input", ""),
    "value": ("the input", ""),
    "projected_query": ("linear", "csrc/core/projection/linear_projection.c"),
    "projected_key": ("linear", "csrc/core/projection/linear_projection.c"),
    "projected_value": ("linear", "csrc/core/projection/linear_projection.c"),
    "query_heads": ("split_heads", "csrc/core/heads/split_heads.c"),
    "key_heads": ("split_heads", "csrc/core/heads/split_heads.c"),
    "value_heads": ("split_heads", "csrc/core/heads/split_heads.c"),
    "prepared_query": ("rms_norm, rotary", "csrc/core/heads/prepare_heads.c"),
    "prepared_key": ("rms_norm, rotary", "csrc/core/heads/prepare_heads.c"),
    "scores": ("dot_product_scores, mask_scores", "csrc/kernels/attention/scores.inc, mask.inc"),
    "weights": ("softmax", "csrc/kernels/attention/softmax.inc"),
    "attended": ("scaled_dot_product_attention",
                 "csrc/core/attention/scaled_dot_product_attention.c"),
    "merged": ("merge_heads", "csrc/core/heads/merge_heads.c"),
    "gate_logits": ("linear", "csrc/core/projection/linear_projection.c"),
    "gated": ("output_gate", "csrc/core/heads/output_gate.c"),
    "output": ("linear", "csrc/core/projection/linear_projection.c"),
}


class Steps(dict[str, NDArray[Any]]):
    """Arrays by name; shown by their names and shapes."""

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: {array.shape}' for name, array in self.items())}}}"


@takes_options(LAYER)
def steps(layer: MultiHeadAttention, x: ArrayLike, key: ArrayLike | None = None,
          value: ArrayLike | None = None, *, head_gate: ArrayLike | None = None,
          positions: ArrayLike | None = None, key_positions: ArrayLike | None = None,
          **options: Unpack[LayerKeywords]) -> dict[str, NDArray[Any]]:
    """Every intermediate of `layer(x, key, value, ...)` by the figure's names, in its order.

    x (batch, query_len, query_dim), or (query_len, query_dim) for one sequence. Prints a line for
    each: its name and shape, the function here and the file in C that compute it. `scores` are
    the final ones, scaled and -inf where blocked: weights are their softmax, in which a sink has
    its part. No dropout.

    Raises
    ------
    ValueError, TypeError: as a call of the layer; TypeError for another kind of layer.

    Source: Vaswani et al. 2017, figure 2.

    >>> layer, x = mha.MultiHeadAttention(512, 8), np.ones((2, 10, 512))
    >>> found = mha.reference.steps(layer, x)  # doctest: +ELLIPSIS
    name             shape           in mha.reference                 in C
    query            (2, 10, 512)    the input
    ...
    >>> found["weights"].shape
    (2, 8, 10, 10)
    """
    some_options(steps, options, LAYER)  # raises what is unknown
    if not isinstance(layer, MultiHeadAttention):
        raise TypeError(
            f"layer: got {type(layer).__name__}, wanted an instance of mha.MultiHeadAttention")
    layer = copy.copy(layer)  # as it is now, whatever another thread does to it
    chosen = call_options(steps, options, (), layer._state.options, 0.0, False, None)
    if key is None and key_positions is None:
        key_positions = positions
    x = as_array(x, "x")
    key = x if key is None else key
    value = key if value is None else value
    layer(x, key, value, head_gate=head_gate, positions=positions, key_positions=key_positions,
          **options)  # raises what is wrong with an argument

    if np.ndim(x) == 2:  # one sequence: a batch of one, and back
        x, key, value = map(_batch_of_one, (x, key, value))
        chosen = chosen._replace(key_lengths=_batch_of_one(chosen.key_lengths))
        found = _intermediates(layer, x, key, value, head_gate, positions, key_positions, chosen)
        found = {name: array[0] for name, array in found.items()}
    else:
        found = _intermediates(layer, x, key, value, head_gate, positions, key_positions, chosen)
    _print_steps(found)
    return Steps(found)


def _as_layer_takes_it(layer: MultiHeadAttention, array: NDArray[Any]) -> NDArray[Any]:
    """In the layer's type; a layer of halves computes in float32 and rounds nothing before."""
    takes_float32 = is_half(layer.dtype) and not is_half(array.dtype)
    return array.astype(np.float32 if takes_float32 else layer.dtype)


def _intermediates(layer: MultiHeadAttention, query: ArrayLike, key: ArrayLike, value: ArrayLike,
                   head_gate: ArrayLike | None, positions: ArrayLike | None,
                   key_positions: ArrayLike | None,
                   options: AttentionOptions) -> dict[str, NDArray[Any]]:
    """What `multi_head_attention` computes on its way, by name."""
    found = {name: _as_layer_takes_it(layer, np.asarray(array))
             for name, array in (("query", query), ("key", key), ("value", value))}
    for name, weight, bias in (("query", layer.W_q, layer.b_q), ("key", layer.W_k, layer.b_k),
                               ("value", layer.W_v, layer.b_v)):
        found["projected_" + name] = linear(found[name], weight, bias)
    for name, heads in (("query", layer.num_heads), ("key", layer.num_kv_heads),
                        ("value", layer.num_kv_heads)):
        found[name + "_heads"] = split_heads(found["projected_" + name], heads)

    query_heads, key_heads = found["query_heads"], found["key_heads"]
    if layer.rotary is not None or layer.qk_norm is not None:
        how = (layer.norm_eps, layer.norm_offset, layer.rotary)
        query_heads = prepared_heads(query_heads, layer.q_norm, *how, positions)
        key_heads = prepared_heads(key_heads, layer.k_norm, *how, key_positions)
        found |= {"prepared_query": query_heads, "prepared_key": key_heads}
    key_of_query_head = _repeat_heads(key_heads, layer.num_heads // layer.num_kv_heads)
    scores = dot_product_scores(query_heads, key_of_query_head,
                                **_chosen_of(options, dot_product_scores))
    found["scores"], _ = mask_scores(scores, **_chosen_of(options, visible_pairs)
                                     | _chosen_of(options, mask_scores))
    attended, found["weights"] = scaled_dot_product_attention(
        query_heads, key_heads, found["value_heads"], return_weights=True, **options._asdict())
    if head_gate is not None:
        attended = attended * np.asarray(head_gate).astype(layer.dtype)[:, None, None]
    found["attended"] = attended
    found["merged"] = merge_heads(attended)
    last = found["merged"]
    if layer.W_g is not None:
        found["gate_logits"] = linear(found["query"], layer.W_g, layer.b_g)
        last = found["gated"] = output_gate(last, found["gate_logits"])
    found["output"] = linear(last, layer.W_o, layer.b_o)
    return found


def _chosen_of(options: AttentionOptions, function: Callable[..., Any]) -> dict[str, Any]:
    """Those that the function takes."""
    taken = inspect.signature(function).parameters
    return {name: value for name, value in options._asdict().items() if name in taken}


def _print_steps(found: dict[str, NDArray[Any]]) -> None:
    rows = [("name", "shape", "in mha.reference", "in C")]
    rows += [(name, str(array.shape), *STEPS[name]) for name, array in found.items()]
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(4)]
    for row in rows:
        print("".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
