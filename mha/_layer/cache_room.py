"""Room in a KVCache for what a call appends: arrays grow by doubling, and a window's cache drops
blocks of positions that no sequence needs any more."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mha._layer.cache_state import (
    BLOCK,
    NOWHERE,
    CacheState,
    CacheWindow,
    first_needed,
    most_columns,
    read_only,
    resized_from,
)

Array = NDArray[Any]


def extended(before: CacheState, window: CacheWindow, n: int, counts: Array | None,
             moved: Array | None) -> CacheState:
    """The state with n positions more, or counts (batch,) of them, that nobody has written. moved
    (batch,): in which sequences some of them stand elsewhere."""
    lengths = read_only(before.lengths + (n if counts is None else counts))
    if counts is None:
        shortest, longest = before.shortest + n, before.longest + n
    else:
        shortest, longest = int(lengths.min()), int(lengths.max())
    state = _with_room(before, window, longest, longest - shortest + n)
    return CacheState(state.key, state.value, lengths, shortest, longest, state.start, state.first,
                      state.kept, _moved(before, moved))


def _moved(before: CacheState, moved: Array | None) -> Array | None:
    """That of the state with rows more: what is no longer there does not count."""
    if moved is None and not before.has_moved:
        return None
    nowhere = np.full(before.lengths.size, NOWHERE)
    found = nowhere if before.moved is None else np.where(before.moved < before.lengths,
                                                          before.moved, nowhere)
    return found if moved is None else np.where(moved, np.minimum(found, before.lengths), found)


def _with_room(before: CacheState, window: CacheWindow, longest: int, ragged: int) -> CacheState:
    """In arrays that hold positions up to longest, without blocks that no sequence's next row
    needs. ragged: the spread of the lengths, and what this call appends, which a window's cache may
    hold beyond its own."""
    columns, most = before.key.shape[2], most_columns(window)
    needed = first_needed(before.shortest, window.size) // BLOCK * BLOCK
    start = max(before.start, needed)
    # Kept ones stand right before the others: where they are to move, all do, to new arrays.
    state = before if window.keep_first or start == before.start else before._replace(
        start=start, first=before.first + start - before.start)
    fits = state.first + longest - state.start <= columns
    if fits and (most is None or columns <= most + ragged):
        return state
    kept = window.first_columns if start > window.first_columns else 0
    start = start if kept or not window.keep_first else 0
    least = kept + longest - start
    wanted = 2 * columns if most is None else min(2 * columns, most)
    return resized_from(state, None, max(least, wanted), start, kept)
