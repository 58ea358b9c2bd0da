"""A KVCache as pickles have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from mha._base.arguments import as_lengths, as_size
from mha._base.dtypes import numbers_of_element
from mha._base.pieces import converted
from mha._layer.cache_state import BLOCK, CacheState, CacheWindow, first_needed, read_only, resized

Array = NDArray[Any]


def to_pickle(state: CacheState, window: CacheWindow) -> dict[str, Any]:
    key, value = resized(state, None, state.longest - state.dropped).held()
    return {"key": key, "value": value, "lengths": state.lengths.copy(), "start": state.start,
            "capacity": state.key.shape[2], "window": window.size, "keep_first": window.keep_first,
            "moved": state.moved}


def from_pickle(new_cache: Callable[..., Any], key: Array, value: Array, lengths: Array, start: int,
                capacity: int, window: int | None, keep_first: int = 0,
                moved: Array | None = None) -> tuple[CacheState, CacheWindow]:
    """The state of these, which must fit together, and the window; new_cache is `mha.KVCache`.
    Older pickles are without the last two."""
    batch, heads, held, head_dim = key.shape
    of_block = numbers_of_element(key.dtype)
    empty = new_cache(batch, heads, head_dim * of_block, value.shape[3] * of_block, dtype=key.dtype,
                      window=window, keep_first=keep_first)
    stored = empty._state.key.dtype
    known = as_lengths(lengths, batch)
    shortest, longest = int(known.min()), int(known.max())
    if value.shape[:3] != key.shape[:3] or value.dtype != key.dtype or shortest < 0:
        raise ValueError("wanted a value for each key")
    start, columns = as_size(start, "start", least=0), as_size(capacity, "capacity", least=held)
    kept = empty._window.first_columns if start else 0
    if (start % BLOCK or start > first_needed(shortest, window) or (kept and start <= kept)
            or longest - start + kept != held):
        raise ValueError("wanted lengths of the positions that are held")
    whole = CacheState(converted(key, stored), converted(value, stored), read_only(known),
                       shortest, longest, start, kept, kept,
                       None if moved is None else as_lengths(moved, batch, "moved"))
    return resized(whole, None, columns), empty._window
