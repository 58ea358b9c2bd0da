"""Rotation by tables of cosines and sines, which other libraries take.

Tables may hold any numbers, where a `mha.Rotary` knows those of angles alone.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from mha._base.dtypes import halves_as_float32, in_type
from mha._functions.rotary import Layout


def rotated_by_tables(heads: NDArray[Any], cosine: NDArray[Any], sine: NDArray[Any],
                      layout: Layout) -> NDArray[Any]:
    """heads (batch, heads, len, head_dim), the first columns rotated by tables (batch, len, dims/2)
    and rounded once to its own type."""
    from mha.reference._prepared_heads import rotated_pairs

    rotated = rotated_pairs(halves_as_float32(heads), halves_as_float32(cosine)[:, None],
                            halves_as_float32(sine)[:, None], layout)
    return in_type(rotated, heads.dtype)
