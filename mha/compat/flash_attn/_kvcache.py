"""flash_attn_with_kvcache on arrays: keys and values go into the caches, then queries attend."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mha._base.arguments import as_array, as_lengths
from mha._base.dtypes import in_type
from mha._functions.options import AttentionOptions
from mha.compat._shared.rotary_tables import rotated_by_tables
from mha.compat.flash_attn._attention import check_floats
from mha.compat.flash_attn._calls import by_token, slopes_of
from mha.compat.flash_attn._pages import PagedCall, as_table, check_pages, check_unshared, places

Array = NDArray[Any]


class Cached(NamedTuple):
    """Where the sequences stand in the caches; each (batch,)."""

    rows: Array  # of k_cache and v_cache
    begins: Array  # the first position that is seen
    appends: Array  # where new keys and values go
    ends: Array  # behind the last position that is seen
    table: Array | None = None  # (batch, most), the pages of each where the caches are pools


def attend_with_cache(q: Array, k_cache: Array, v_cache: Array, k: Array | None, v: Array | None,
                      rotary: tuple[Array, Array, bool] | None, cached: Cached,
                      options: AttentionOptions, slopes: Array | None) -> tuple[Array, Array]:
    """Output (batch, query_len, heads, head_dim) and lse (batch, heads, query_len)."""
    if k is not None and v is not None:
        # 1. Refuse what attention refuses, before anything is written: ask it for no queries.
        item = min(len(q), len(k_cache), 1)
        by_token(q[:item, :0], k_cache[:item, :0], v_cache[:item, :0],
                 options._replace(alibi=slopes_of(slopes, 0)))
        positions = cached.appends[:, None] + np.arange(k.shape[1])
        # 2. Rotate. Without an order of its own, each query stands behind the cache.
        if rotary is not None:
            steps = np.arange(q.shape[1]) * have_order(options)
            q = _rotated(q, *rotary, cached.appends[:, None] + steps)
            k = _rotated(k, *rotary, positions)
        # 3. Append to the caches, which are the caller's.
        q, k, v = (_apart(array, k_cache, v_cache) for array in (
            q, in_type(k, k_cache.dtype), in_type(v, v_cache.dtype)))
        where = (cached.rows[:, None], positions) if cached.table is None else places(
            cached.table, positions, k_cache.shape[1])
        k_cache[where], v_cache[where] = k, v
    # 4. Attend to what each sequence holds then.
    return _attend(q, k_cache, v_cache, cached, options, slopes)


def have_order(options: AttentionOptions) -> bool:
    """Whether the queries stand one behind the other, or all at one position."""
    return bool(options.causal or options.window is not None)


def _attend(q: Array, k_cache: Array, v_cache: Array, cached: Cached, options: AttentionOptions,
            slopes: Array | None) -> tuple[Array, Array]:
    """Position 0 of a sequence is its first that is seen."""
    if cached.table is not None:
        return _in_pages(q, k_cache, v_cache, cached.ends, cached.table, options, slopes)
    apart = slopes is not None and slopes.ndim == 2
    if apart or not np.array_equal(cached.rows, np.arange(len(cached.rows))):
        return _one_by_one(q, k_cache, v_cache, cached, options, slopes)
    return _together(q, k_cache, v_cache, cached, options._replace(alibi=slopes))


def _together(q: Array, k_cache: Array, v_cache: Array, cached: Cached,
              options: AttentionOptions) -> tuple[Array, Array]:
    """All sequences in one call: they are the first rows of the caches."""
    first = min(cached.begins.tolist(), default=0)
    last = max(cached.ends.tolist(), default=0)
    keys, values = (cache[:len(q), first:last] for cache in (k_cache, v_cache))
    begins, ends = cached.begins - first, cached.ends - first
    if (begins > 0).any():
        mask = np.arange(last - first) >= begins[:, None]
        options = options._replace(mask=mask[:, None, None])
    if (ends < last - first).any():
        options = options._replace(key_lengths=ends)
    return by_token(q, keys, values, options._replace(query_offset=ends - q.shape[1]))


def _one_by_one(q: Array, k_cache: Array, v_cache: Array, cached: Cached,
                options: AttentionOptions, slopes: Array | None) -> tuple[Array, Array]:
    """A call a sequence, so that no row of a cache is copied."""
    batch, query_len, heads, _ = q.shape
    output = np.empty((batch, query_len, heads, v_cache.shape[3]),
                      np.result_type(q, k_cache, v_cache))
    lse = np.empty((batch, heads, query_len), np.promote_types(output.dtype, np.float32))
    seen = zip(cached.rows, cached.begins, cached.ends, strict=True)
    for b, (row, begin, end) in enumerate(seen):
        keys, values = (cache[row:row + 1, begin:end] for cache in (k_cache, v_cache))
        output[b:b + 1], lse[b:b + 1] = by_token(
            q[b:b + 1], keys, values, options._replace(alibi=slopes_of(slopes, b)))
    return output, lse


def _in_pages(q: Array, k_cache: Array, v_cache: Array, ends: Array, table: Array,
              options: AttentionOptions, slopes: Array | None) -> tuple[Array, Array]:
    """As a ragged batch whose sequences have as many queries each."""
    batch, query_len, heads, head_dim = q.shape
    call = PagedCall(np.arange(batch + 1) * query_len, np.concatenate([[0], np.cumsum(ends)]),
                     slopes, options, table=table)
    output, lse = call.forward(q.reshape(batch * query_len, heads, head_dim), k_cache, v_cache)
    return (output.reshape(batch, query_len, heads, v_cache.shape[3]),
            np.ascontiguousarray(lse.reshape(heads, batch, query_len).swapaxes(0, 1)))


def _rotated(heads: Array, cosine: Array, sine: Array, interleaved: bool,
             positions: Array) -> Array:
    """heads (batch, len, heads, head_dim) at positions (batch, len)."""
    turned = rotated_by_tables(heads.swapaxes(1, 2), cosine[positions], sine[positions],
                               "interleaved" if interleaved else "half")
    return turned.swapaxes(1, 2)


def _apart(array: Array, *caches: Array) -> Array:
    """A copy where it may lie in the memory of the caches, which are written before it is read."""
    return array.copy() if any(np.may_share_memory(array, cache) for cache in caches) else array


def as_cache(cache: Any, name: str, *, is_written: bool) -> Array:
    """The memory of the cache itself, as a plain array."""
    if not isinstance(cache, np.ndarray):
        raise TypeError(f"{name}: got {type(cache).__name__}, wanted a NumPy array or a tensor")
    as_array(cache, name)  # refuses masked ones
    check_floats(cache, name)
    if is_written and not cache.flags.writeable:
        raise ValueError(f"{name}: got a read-only array, wanted one that k and v can be"
                         " written into")
    if is_written and cache.size and any(stride == 0 and size > 1 for stride, size in zip(
            cache.strides, cache.shape, strict=True)):
        raise ValueError(f"{name}: got an array whose parts share memory, as expanded ones do,"
                         " wanted one that k and v can be written into: a copy of it")
    return cache.view(np.ndarray)


def check_new(q: Array, k_cache: Array, v_cache: Array, k: Array | None, v: Array | None) -> None:
    """k and v, both or none: (batch, seqlen_new, kv_heads, head_dim) as the caches have them."""
    if (k is None) != (v is None):
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"{missing}: got None beside {given}, wanted both or none")
    if k is None or v is None:
        return
    new_len = k.shape[1] if k.ndim == 4 else 0
    for array, cache, name in ((k, k_cache, "k"), (v, v_cache, "v")):
        wanted = len(q), new_len, *cache.shape[2:]
        check_floats(array, name)
        if array.shape != wanted:
            raise ValueError(f"{name}: got shape {array.shape}, wanted ({len(q)}, seqlen_new,"
                             f" {cache.shape[2]}, {cache.shape[3]}) as of q and {name}_cache, k and"
                             " v of one seqlen_new")


def where_cached(q: Array, k_cache: Array, new_len: int | None, cache_seqlens: Any,
                 cache_batch_idx: Any, cache_leftpad: Any) -> Cached:
    """Checked, so that nothing is written where a call fails."""
    batch, rows = len(q), len(k_cache)
    lengths, ends = _lengths(batch, k_cache.shape[1], new_len, cache_seqlens)
    if cache_batch_idx is None and batch > rows:
        raise ValueError(f"k_cache: got {rows} sequences, wanted at least {batch} as q has")
    indices = np.arange(batch) if cache_batch_idx is None else _ints(
        cache_batch_idx, "cache_batch_idx", batch, 0, rows - 1)
    if new_len is not None and len(np.unique(indices)) < batch:
        raise ValueError(f"cache_batch_idx: got {indices.tolist()}, wanted each one once, since k"
                         " and v are written there")
    begins = _ints(0 if cache_leftpad is None else cache_leftpad, "cache_leftpad", batch, 0, ends)
    return Cached(indices, begins, lengths, ends)


def where_in_pages(q: Array, k_cache: Array, new_len: int | None, cache_seqlens: Any,
                   cache_batch_idx: Any, cache_leftpad: Any, block_table: Any) -> Cached:
    """The same with a table of pages, beside which flash-attention refuses two arguments, too."""
    for given, name in ((cache_batch_idx, "cache_batch_idx"), (cache_leftpad, "cache_leftpad")):
        if given is not None:
            raise ValueError(f"{name}: got it beside block_table, wanted None: rows of the table"
                             " say where sequences are")
    table = as_table(block_table, len(q))
    capacity = table.shape[1] * k_cache.shape[1]
    lengths, ends = _lengths(len(q), capacity, new_len, cache_seqlens)
    check_pages(table, ends, k_cache)
    check_unshared(table, lengths, new_len or 0, k_cache)
    return Cached(np.arange(len(q)), np.zeros_like(ends), lengths, ends, table)


def _lengths(batch: int, capacity: int, new_len: int | None,
             cache_seqlens: Any) -> tuple[Array, Array]:
    """How many positions the sequences have, (batch,), before and after the new ones."""
    if cache_seqlens is None and new_len is not None:
        raise ValueError("cache_seqlens: got None beside k, wanted how many positions the caches"
                         " hold, k not counted")
    if (new_len or 0) > capacity:
        raise ValueError(f"k: got {new_len} positions, wanted at most {capacity}, which the caches"
                         " hold")
    lengths = _ints(capacity if cache_seqlens is None else cache_seqlens, "cache_seqlens", batch,
                    0, capacity - (new_len or 0))
    return lengths, lengths + (new_len or 0)


def check_rotary(rotary: tuple[Array, Array, bool], q: Array, new_len: int | None, cached: Cached,
                 options: AttentionOptions) -> None:
    """Tables (positions, dims / 2) that reach as far as the queries and the new keys."""
    cosine, sine, _ = rotary
    if new_len is None:
        raise ValueError("rotary_cos: got it without k and v, wanted the keys that it rotates")
    for table, name in ((cosine, "rotary_cos"), (sine, "rotary_sin")):
        check_floats(table, name)
        if table.ndim != 2 or table.shape != cosine.shape or 2 * table.shape[1] > q.shape[3]:
            raise ValueError(f"{name}: got shape {table.shape}, wanted (positions, rotary_dim / 2),"
                             f" both tables alike, rotary_dim at most {q.shape[3]}: of tables that"
                             " have each column twice, one half")
    most = max(new_len, q.shape[1] if have_order(options) else 1)
    if len(cached.appends) and cached.appends.max() + most > len(cosine):
        raise ValueError(f"rotary_cos: got {len(cosine)} positions, wanted at least"
                         f" {cached.appends.max() + most}: cache_seqlens and what is new")


def _ints(numbers: Any, name: str, batch: int, least: int, most: Any) -> Array:
    """(batch,) of one number or as many as sequences, in range."""
    found = as_lengths(numbers, batch, name)
    if (found < least).any() or (found > most).any():
        wanted = most if np.ndim(most) == 0 else np.asarray(most).tolist()
        raise ValueError(f"{name}: got {found.tolist()}, wanted {least} to {wanted}")
    return found
