"""What a layer does to projected queries and keys before attention, and to merged heads after it,
where a step is on its own: ragged calls, memories and Dask's tasks. The core's multi_head_attention
does it within.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._functions.rotary import as_record
from mha._layer.settings import LayerSettings
from mha._layer.state import LayerState

Array = NDArray[Any]
Maybe = ArrayLike | None


def heads_of(settings: LayerSettings, which: str) -> int:
    """How many there are of "q", "k" or "v"."""
    return settings.num_heads if which == "q" else settings.num_kv_heads


def prepared(state: LayerState, which: str, projected: Array, positions: Maybe = None, *,
             save: bool = False) -> tuple[Array, object]:
    """What is projected (batch, n, heads * d) to "q", "k" or "v", shaped as it is: queries and keys
    normed, and rotated by positions (n,) or (batch, n), by default 0, 1, ...; and with save what
    `_core.prepare_heads_backward` takes, None where nothing was done."""
    settings = state.settings
    if which == "v" or (settings.rotary is None and settings.qk_norm is None):
        return projected, None
    record = as_record(settings.rotary)
    result = _core.prepare_heads(projected, heads_of(settings, which), record,
                                 None if record is None else positions,
                                 state.parameters.get(which + "_norm"), settings.norm_eps,
                                 settings.norm_offset, save=save)
    return result if save else (result, None)


def gated(state: LayerState, merged: Array, query: Array) -> Array:
    """Merged heads (..., num_heads * d) times the output gate of the query's rows (..., query_dim),
    where the layer has one."""
    call = state.call
    if call.W_g is None:
        return merged
    return _core.output_gate(merged, _core.linear(query, call.W_g, call.b_g), call.num_heads)


def by_head(state: LayerState, which: str, projected: Array, positions: Maybe = None) -> Array:
    """`prepared`, split: (batch, heads, n, d)."""
    heads, _ = prepared(state, which, projected, positions)
    return _core.split_heads(heads, heads_of(state.settings, which))
