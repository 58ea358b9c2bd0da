"""Which rows of a call are new, where they stand, and what a cache of GroupQueryAttention holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mha._base.arguments import as_exact_int_array
from mha._base.dtypes import in_type
from mha.compat.onnx._caches import one_int
from mha.compat.onnx._heads import check_pair, floats

Ints = NDArray[np.int64]


class Rows(NamedTuple):
    """Of each sequence (batch,), and total_len of all."""

    query_lens: Ints   # how many of the call's rows are no padding
    first_query: Ints  # where the first of them stands
    new_lens: Ints     # how many keys the call brings
    past_lens: Ints    # how many rows of the past it has
    first_key: Ints    # where row 0 of the past stands
    total_lens: Ints   # how many positions are known after the call
    total_len: int

    @property
    def key_lens(self) -> Ints:
        return self.past_lens + self.new_lens

    @property
    def query_offset(self) -> Ints:
        """The row of the keys that belongs to query 0."""
        return self.first_query - self.first_key

    def are_real(self, query_len: int) -> NDArray[np.bool_]:
        """(batch, query_len): False at padding."""
        return np.arange(query_len) < self.query_lens[:, None]


def as_rows(seqlens_k: Any, total_sequence_length: Any, query_seqlens: Any, *, batch: int,
            query_len: int, key_len: int) -> Rows:
    """Of a cache that holds every position from 0 on; key_len is 0 or query_len."""
    total_len = one_int(total_sequence_length, "total_sequence_length")
    total_lens = _ints(seqlens_k, "seqlens_k", batch) + 1
    if batch and not 1 <= total_lens.min() <= total_lens.max() <= total_len:
        raise ValueError(f"seqlens_k: got {(total_lens - 1).tolist()}, wanted 0 to"
                         f" {total_len - 1}, below total_sequence_length")
    query_lens = most = np.minimum(query_len, total_lens)
    if query_seqlens is not None:
        query_lens = _ints(query_seqlens, "query_seqlens", batch)
        if ((query_lens < 0) | (query_lens > most)).any():
            raise ValueError(f"query_seqlens: got {query_lens.tolist()}, wanted 0 to at most"
                             f" {most.tolist()}, rows of query and seqlens_k + 1")
    new_lens = query_lens if key_len else np.zeros_like(query_lens)
    return Rows(query_lens, total_lens - query_lens, new_lens, total_lens - new_lens,
                np.zeros_like(total_lens), total_lens, total_len)


def in_window_cache(rows: Rows, past: NDArray[Any] | None, window: int) -> Rows:
    """The same where the past holds the last positions alone."""
    capacity = 0 if past is None else past.shape[2]
    if capacity < window:
        raise ValueError(f"past_key: got {capacity} rows with sliding_window_cache, wanted at least"
                         f" local_window_size={window}")
    if rows.query_lens.any() and not rows.new_lens.any():
        raise ValueError("key: got no rows with sliding_window_cache, wanted those of the call")
    before = rows.total_lens - rows.new_lens
    past_lens = _resident(before, capacity, window)
    return rows._replace(past_lens=past_lens, first_key=before - past_lens)


def _resident(total_lens: Ints, capacity: int, window: int) -> Ints:
    """How many of the last positions a cache of this capacity holds: all while they fit, and from
    then on as many less as are dropped at once, `step` of them."""
    step = capacity - window + 1
    dropped = np.maximum(-((capacity - total_lens) // step), 0) * step
    return total_lens - dropped


def as_pasts(past_key: Any, past_value: Any,
             new: NDArray[Any]) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """Both (batch, kv_num_heads, past_len, head_size), or None."""
    check_pair(past_key, past_value, "past_key, past_value")
    if past_key is None:
        return None, None
    pasts = floats(("past_key", past_key), ("past_value", past_value))
    past_len = pasts[0].shape[2] if pasts[0].ndim == 4 else "past_len"
    wanted = (*new.shape[:2], past_len, new.shape[3])
    for name, past in zip(("past_key", "past_value"), pasts, strict=True):
        if past.shape != wanted:
            raise ValueError(f"{name}: got shape {past.shape}, wanted {wanted}")
    return pasts[0], pasts[1]


def keys_and_present(past: NDArray[Any] | None, name: str, new: NDArray[Any], rows: Rows,
                     window: int | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys (or values) of all positions that may be seen, and the cache to return. A window is that
    of a cache that holds the last positions alone."""
    past_len = 0 if past is None else past.shape[2]
    needed = rows.past_lens.max(initial=0)
    if needed > past_len:
        raise ValueError(f"{name}: got {past_len} rows, wanted at least {needed}: seqlens_k + 1"
                         " less the new rows")
    if window is None:
        present = with_new(past, new, rows, max(past_len, rows.total_len))
        return present[:, :, :rows.total_len], present
    keys = with_new(past, new, rows, rows.key_lens.max(initial=0))
    return keys, last_rows(keys, rows, past_len, window)


def with_new(past: NDArray[Any] | None, new: NDArray[Any], rows: Rows,
             length: int) -> NDArray[Any]:
    """(batch, heads, length, size): each sequence's past, its new rows behind it, then zeros."""
    dtype = new.dtype if past is None else past.dtype
    new = in_type(new, dtype)
    cache = np.zeros((*new.shape[:2], length, new.shape[3]), dtype)
    for b, (past_len, new_len) in enumerate(zip(rows.past_lens, rows.new_lens, strict=True)):
        if past is not None:
            cache[b, :, :past_len] = past[b, :, :past_len]
        cache[b, :, past_len:past_len + new_len] = new[b, :, :new_len]
    return cache


def last_rows(keys: NDArray[Any], rows: Rows, capacity: int, window: int) -> NDArray[Any]:
    """What a window cache (batch, heads, capacity, size) keeps of its past and the new rows."""
    cache = np.zeros((*keys.shape[:2], capacity, keys.shape[3]), keys.dtype)
    kept = _resident(rows.total_lens, capacity, window)
    for b, (length, count) in enumerate(zip(rows.key_lens, kept, strict=True)):
        cache[b, :, :count] = keys[b, :, length - count:length]
    return cache


def _ints(values: Any, name: str, batch: int) -> Ints:
    array = as_exact_int_array(values, name)
    if array.size != batch or array.ndim == 0:
        raise ValueError(f"{name}: got shape {array.shape}, wanted ({batch},)")
    return array.reshape(batch)
