"""Room in a KVCache for what a call appends: arrays grow by doubling, and a window's cache drops
blocks of positions that no sequence needs any more."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from mha._layer.cache_state import (
    BLOCK,
    CacheState,
    first_needed,
    most_columns,
    read_only,
    resized,
)

Array = NDArray[Any]


def extended(before: CacheState, window: int | None, n: int, counts: Array | None) -> CacheState:
    """The state with n positions more, or counts (batch,) of them, that nobody has written."""
    state = _without_unneeded(before, window)
    lengths = read_only(state.lengths + (n if counts is None else counts))
    if counts is None:
        shortest, longest = state.shortest + n, state.longest + n
    else:
        shortest, longest = int(lengths.min()), int(lengths.max())
    state = _with_room(state, window, longest, longest - shortest + n)
    return state._replace(lengths=lengths, shortest=shortest, longest=longest)


def _without_unneeded(state: CacheState, window: int | None) -> CacheState:
    """Without the blocks that no sequence's next row needs."""
    if window is None:
        return state
    needed = first_needed(state.shortest, window) // BLOCK * BLOCK
    dropped = max(0, needed - state.start)
    return state._replace(start=state.start + dropped, first=state.first + dropped)


def _with_room(state: CacheState, window: int | None, longest: int, ragged: int) -> CacheState:
    """In arrays that hold positions up to longest; ragged: the spread of the lengths, and what
    this call appends, which a window's cache may hold beyond its own."""
    columns, needed = state.key.shape[2], longest - state.start
    fits = state.first + needed <= columns
    if window is None:
        return state if fits else resized(state, None, max(needed, 2 * columns))
    most = most_columns(window)
    if fits and columns <= most + ragged:
        return state
    return resized(state, None, max(needed, min(2 * columns, most)))
