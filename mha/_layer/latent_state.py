"""Changes of a layer of latent attention that its matrices decide: heads that go."""

from __future__ import annotations

from typing import Any

from mha._layer.state import (
    LayerState,
    heads_that_stay,
    new_state,
    of_heads,
    own_copy,
    prunable,
    with_packed,
)


def pruned(state: LayerState, heads: list[int]) -> LayerState:
    """Without these heads, in new arrays."""
    in_blocks_now = prunable(state, heads)
    settings: Any = state.settings
    kept = heads_that_stay(heads, settings.num_heads)
    widths = {"W_q": settings.head_dim, "W_uq": settings.head_dim, "W_uk": settings.nope_dim,
              "W_uv": settings.value_head_dim, "W_o": settings.value_head_dim}
    parameters: dict[str, Any] = {
        name: of_heads(parameter, kept, widths[name], 0 if name == "W_o" else 1)
        if name in widths else own_copy(parameter)
        for name, parameter in state.parameters.items()}
    settings = settings._replace(num_heads=len(kept))
    return with_packed(settings, parameters) if in_blocks_now else new_state(settings, parameters)
