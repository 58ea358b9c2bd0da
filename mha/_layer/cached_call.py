"""A layer's call with a cache: project, append, attend to all positions so far, merge, project.

Row i of sequence b stands at position lengths[b] + i, with the cache's lengths before the call. One
call of the core does all of it; between projection and attention it calls back to append. The cache
changes by one assignment, after everything else has succeeded. With append=False the n rows are the
last n positions that the cache has, and nothing is appended.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.arguments import (
    as_array,
    as_bool,
    as_int,
    as_positions,
    check_rows,
    checked_lengths,
)
from mha._base.dtypes import (
    Q8_0,
    as_computed,
    columns_of,
    shown_dtype,
    stored_dtype,
    widened,
)
from mha._base.pieces import copy_into
from mha._functions.dropout import drawn
from mha._functions.options import (
    DEFAULTS,
    AttentionOptions,
    Window,
    as_sides,
    check_score_axes,
    is_block_mask,
)
from mha._functions.rotary import position_axes
from mha._layer.cache_state import CacheState
from mha._layer.kv_cache import Append, KVCache, Memory
from mha._layer.latent_cache import LatentCache
from mha._layer.paged_cache import PagedCache, PagedLayer
from mha._layer.prepare_heads import by_head
from mha._layer.settings import LayerSettings, as_window
from mha._layer.state import LayerState, core_at

Array = NDArray[Any]
Maybe = ArrayLike | None

# Options that ask where the queries stand among the keys: among a memory's they stand nowhere.
OF_POSITIONS = ("causal", "window", "alibi", "relative_bias")


def call(state: LayerState, query: ArrayLike, key: Maybe, value: Maybe, *, cache: Any,
         append: Any, lengths: Maybe, padding: str, positions: Maybe, key_positions: Maybe,
         training: Any, options: AttentionOptions, head_gate: Maybe, return_weights: bool,
         return_lse: bool) -> Any:
    """A layer's call where cache, append, lengths or padding is given: query (batch, n,
    query_dim), or (n, query_dim), in; the output, and weights and lse where asked for, out."""
    appends = append is True or as_bool(append, "append")
    if not isinstance(padding, str):
        raise TypeError(f'padding: got {type(padding).__name__}, wanted "right" or "left"')
    if padding not in ("right", "left"):
        raise ValueError(f'padding: got {padding!r}, wanted "right" or "left"')
    cache = _checked_cache(state.settings, cache, lengths, appends)
    if key is not None or value is not None:
        raise ValueError(f"{'value' if key is None else 'key'}: got one with a cache, wanted none:"
                         " the rows of query are the next positions")
    if key_positions is not None:
        raise ValueError("key_positions: got some with a cache, wanted none: keys were rotated as"
                         " they came in")
    check_not_training(training)
    head_gate = None if head_gate is None else as_array(head_gate, "head_gate")
    undrawn = drawn(checked_options(options, cache)).options  # without training nothing is drawn
    return _call(state, query, cache, appends, lengths, padding == "left", positions, undrawn,
                 head_gate, return_weights, return_lse)


def _call(state: LayerState, query: ArrayLike, cache: KVCache, appends: bool, lengths: Maybe,
          left: bool, positions: Maybe, options: AttentionOptions, head_gate: Maybe,
          return_weights: bool, return_lse: bool) -> Any:
    settings, is_memory = state.settings, isinstance(cache, Memory)
    appends = appends and not is_memory
    given = as_array(query, "query")
    check_rows(given.shape, "query", settings.query_dim)
    x = given if given.ndim == 3 else given[None]
    batch, n, _ = x.shape
    if batch != cache.batch:
        token = ("; x[:, i] is no token of each sequence but one sequence: write x[:, i:i + 1]"
                 if given.ndim == 2 else "")
        raise ValueError(f"cache: got one of {cache.batch} sequences, wanted {batch} as query has"
                         + token)
    counts = checked_lengths(lengths, batch, n)
    real = None if counts is None else _real_rows(counts, n, left)
    if positions is not None:
        axes = position_axes(settings.rotary)
        positions = as_positions(positions, "positions", batch, n, axes)
        if axes == 1:  # tokens of an image never stand one behind the other
            _check_slot_order(positions, real, options)
    before = cache._state  # behind all conversions of arguments, which may run any code
    if not appends and not is_memory:
        _check_held(before, n, counts, options.window)
    first = _first_positions(before, counts, n, left, appends, is_memory)
    positions, moved = _positions(settings, positions, before, first, n, real)
    core = state.core if positions is None else core_at(state, positions, None, appends)
    keys, values = x, x
    if not appends:  # no rows: keys and values are there
        keys, values = (np.empty((batch, 0, width), x.dtype)
                        for width in (settings.key_dim, settings.value_dim))

    def attend(after: CacheState, append: Append) -> Any:
        """All of the call, before the cache changes."""
        (key, value), append = _as_read(after, append, settings.dtype)
        kept = ({"keep_first": cache.keep_first, "dropped": after.dropped} if cache.keep_first
                else {})
        results = core(x, keys, values, *state.call, head_gate,
                       _placed(options, after, first, real, is_memory),
                       return_weights=return_weights, return_lse=return_lse, dtype=settings.dtype,
                       cached_key=key, cached_value=value, append=append, **kept)
        results = list(results) if isinstance(results, tuple) else [results]
        if real is not None:
            results[0][~real] = 0
        if return_weights and after.start:
            results[1] = _with_dropped(results[1], after)
        if given.ndim == 2:
            results = [result[0] for result in results]
        return tuple(results) if len(results) > 1 else results[0]

    if not appends:
        return cache._read(before, attend)
    return cache._extend(before, n, counts, left, attend, moved)


def _positions(settings: LayerSettings, given: Array | None, before: CacheState,
               first: int | Array, n: int,
               real: Array | None) -> tuple[Array | None, Array | None]:
    """Where the n rows of each sequence stand, by default one behind the other; and in which
    sequences (batch,), if any, that is elsewhere along some of several position axes."""
    if settings.rotary is None:
        return given, None
    axes = position_axes(settings.rotary)
    if axes == 1 and given is not None:
        return given, None
    places = (np.arange(first, first + n) if isinstance(first, int)
              else np.arange(n) + first[:, None])
    if axes == 1:
        return places, None
    if given is not None:
        elsewhere = given != places
        moved = (elsewhere if real is None else elsewhere & real).any(axis=(0, 2))
        return given, moved if moved.any() else None
    if before.has_moved:
        raise ValueError(no_positions(axes, f"({len(before.lengths)}, {n})"))
    return np.broadcast_to(places, (axes, len(before.lengths), n)), None


def no_positions(axes: int, rows: str) -> str:
    """Of a call behind an image."""
    return (f"positions: got none, wanted those of these rows, {axes} axes in front of {rows}: rows"
            " before them in the cache did not stand one behind the other, as tokens of an image do"
            " not")


def _as_read(after: CacheState, append: Append,
             dtype: np.dtype[Any]) -> tuple[list[Array], Append]:
    """Key and value as a layer of this type reads them, once `append` has been called: float64
    beside a narrower cache is a copy."""
    held = list(after.held())
    if dtype != np.float64 or held[0].dtype == dtype:
        return held, append
    copies = [np.empty((*array.shape[:-1], columns_of(array)), dtype) for array in held]

    def append_and_copy(key: Array, value: Array) -> None:
        append(key, value)
        for copy, array in zip(copies, held, strict=True):
            copy_into(copy, widened(array))

    return copies, append_and_copy


def _with_dropped(weights: Array, after: CacheState) -> Array:
    """(batch, heads, n, longest): with zeros for the positions that the cache has dropped."""
    whole = np.zeros((*weights.shape[:3], after.longest), weights.dtype)
    copy_into(whole[..., :after.kept], weights[..., :after.kept])
    copy_into(whole[..., after.start:], weights[..., after.kept:])
    return whole


def new_memory(state: LayerState, key: ArrayLike, value: Maybe, key_lengths: Maybe,
               key_positions: Maybe) -> KVCache:
    """key (batch, key_len, key_dim) and value projected, in a cache that refuses more."""
    settings = state.settings
    _, keys = _rows(key, "key", settings.key_dim, settings)
    _, values = _rows(key if value is None else value, "value", settings.value_dim, settings)
    batch, key_len, _ = keys.shape
    if values.shape[:2] != (batch, key_len):
        raise ValueError(f"value: got {values.shape[0]} sequences of {values.shape[1]} rows, wanted"
                         f" {batch} of {key_len} as key has")
    counts = checked_lengths(key_lengths, batch, key_len, "key_lengths")
    if key_positions is not None:
        key_positions = as_positions(key_positions, "key_positions", batch, key_len,
                                     position_axes(settings.rotary))
    memory = Memory(batch, settings.num_kv_heads, settings.head_dim, settings.value_head_dim,
                    capacity=key_len, dtype=settings.dtype)
    call = state.call
    key_heads = by_head(state, "k", _core.linear(keys, call.W_k, call.b_k), key_positions)
    value_heads = by_head(state, "v", _core.linear(values, call.W_v, call.b_v))
    memory._fill(key_heads, value_heads, counts)
    return memory


def _placed(options: AttentionOptions, seen: CacheState, first: int | Array, real: Array | None,
            is_memory: bool) -> AttentionOptions:
    """The options with queries and keys in their places among the columns that are held."""
    if real is not None:  # rows of padding see no key
        key_lengths = np.where(real, (seen.lengths - seen.dropped)[:, None], 0)
    elif seen.shortest != seen.longest:
        key_lengths = seen.lengths - seen.dropped
    else:
        key_lengths = None
    causal, query_offset = not is_memory, None if is_memory else first - seen.dropped
    if options is DEFAULTS:  # a new record takes a quarter of the time of a changed one
        return AttentionOptions(key_lengths=key_lengths, causal=causal, query_offset=query_offset)
    return options._replace(
        mask=_columns(options.mask, "mask", seen), bias=_columns(options.bias, "bias", seen),
        key_lengths=key_lengths, causal=causal, query_offset=query_offset)


def _columns(scores: Any, name: str, seen: CacheState) -> Any:
    """A mask or bias without its columns of dropped positions."""
    if scores is None:
        return None
    if is_block_mask(scores):
        if scores.key_len != seen.longest:
            raise ValueError(f"{name}: got a BlockMask of key_len {scores.key_len}, wanted"
                             f" {seen.longest}: every position so far, those of this call too")
        if seen.kept:
            return np.concatenate([part.to_dense() for part in (
                scores[:, :seen.kept], scores[:, seen.start:])], axis=-1)
        return scores[:, seen.start:] if seen.start else scores
    if scores.shape[-1] not in (1, seen.longest):
        raise ValueError(f"{name}: got {scores.shape[-1]} columns, wanted {seen.longest}: one for"
                         " every position so far, those of this call too")
    if scores.shape[-1] == 1:
        return scores
    held = scores[..., seen.start:]
    return np.concatenate([scores[..., :seen.kept], held], axis=-1) if seen.kept else held


def _real_rows(counts: Array, n: int, left: bool) -> Array:
    """(batch, n): which rows are no padding."""
    rows = np.arange(n)
    return rows >= n - counts[:, None] if left else rows < counts[:, None]


def _first_positions(before: CacheState, counts: Array | None, n: int, left: bool,
                     appends: bool, is_memory: bool) -> int | Array:
    """Where row 0 stands: an int where it does so in all sequences, else ints (batch,). In front
    of rows padded left that is before the first real one."""
    padding = 0 if counts is None or not left else n - counts
    if is_memory:
        return 0 - padding
    lengths = before.shortest if before.shortest == before.longest else before.lengths
    if not appends:  # the rows are the last positions
        lengths = lengths - (n if counts is None else counts)
    return lengths - padding


def _check_slot_order(positions: Array, real: Array | None, options: AttentionOptions) -> None:
    """A ValueError where real rows do not stand one behind the other, as those of a tree, and an
    option takes them for what does."""
    name = next((name for name in ("window", "alibi", "relative_bias")
                 if _is_in_force(name, getattr(options, name))), None)
    if name is None:
        return
    ahead, behind = positions[..., 1:], positions[..., :-1]
    follows = (ahead > behind) & (ahead - behind == 1)
    if real is not None:
        follows = follows | ~(real[:, 1:] & real[:, :-1])
    if not follows.all():
        raise ValueError(f"positions: got ones that do not rise by 1 from row to row with {name},"
                         " wanted such, or none of it: it counts the rows of the cache, whatever"
                         " their positions")


def _check_held(before: CacheState, n: int, counts: Array | None, window: Any) -> None:
    """A ValueError where the last n positions, or counts (batch,) of them, are not there, or where
    they may see what has been dropped."""
    rows = np.full(before.lengths.size, n) if counts is None else counts
    if (rows > before.lengths).any():
        raise ValueError(f"query: got {rows.tolist()} rows with append=False, wanted at most those"
                         f" that the cache has, {before.lengths.tolist()}")
    left, _ = as_sides(window)
    if before.start == 0 or left is None or not rows.any():
        return
    needed = int((before.lengths - rows)[rows > 0].min()) - left
    if needed < before.start:
        raise ValueError(f"query: got {rows.tolist()} rows with append=False, wanted fewer: the"
                         f" first one's window begins at {needed}, and what stood before"
                         f" {before.start} is dropped. A cache keeps what the rows of its last call"
                         " see")


def _rows(array: ArrayLike, name: str, width: int, settings: LayerSettings) -> tuple[Array, Array]:
    """What was given, and it as (batch, n, width) in the layer's type."""
    given = as_array(array, name)
    rows = as_computed(given, name, settings.dtype)
    check_rows(given.shape, name, width)
    return given, rows if rows.ndim == 3 else rows[None]


def _checked_cache(settings: LayerSettings, cache: Any, lengths: Maybe,
                   appends: bool) -> KVCache:
    """The cache, if it fits the layer."""
    if cache is None:
        raise ValueError(
            "append: got False without a cache, wanted cache= too" if not appends else
            'padding: got one without a cache, wanted cache= too' if lengths is None else
            "lengths: got some without a cache, wanted cache= too, or key_lengths=, how many keys"
            " of each sequence are real")
    if not isinstance(cache, KVCache):
        instead = "; a layer of a pool takes starts=" * isinstance(cache, PagedLayer)
        raise TypeError(f"cache: got {type(cache).__name__}, wanted one of new_cache(){instead}")
    if cache._fits is not settings:
        before = cache._state  # what a signal handler puts in its place is not checked
        check_cache_fits(settings, cache, "cache")
        cache._fits = settings if cache._state is before else None
    is_memory = isinstance(cache, Memory)
    if is_memory and not appends:
        raise ValueError("append: got False with a memory, wanted none: nothing is ever appended"
                         " to it, and its rows have no order that a query could stand in")
    widths = settings.query_dim, settings.key_dim, settings.value_dim
    if appends and not is_memory and len(set(widths)) > 1:
        raise ValueError(f"cache: got a new_cache() for query_dim, key_dim and value_dim {widths},"
                         " wanted equal ones, or what new_memory() gives")
    return cache


def check_not_training(training: Any) -> None:
    if training is not False and as_bool(training, "training"):
        raise ValueError("training: got True with a cache, wanted False")


def check_cache_fits(settings: LayerSettings, cache: KVCache | PagedCache, name: str) -> None:
    wanted = settings.num_kv_heads, settings.head_dim, settings.value_head_dim
    if isinstance(cache, LatentCache):
        wanted = _sizes_of_latents(settings, name)
    if settings.is_latent and cache.keep_first:
        raise ValueError(f"{name}: got keep_first {cache.keep_first} for latent attention, wanted"
                         " a cache without")
    got = cache.kv_heads, cache.head_dim, cache.value_head_dim
    if got != wanted:
        instead = ": one of its new_cache()" * isinstance(cache, KVCache)
        raise ValueError(f"{name}: got kv_heads, head_dim and value_head_dim {got}, wanted {wanted}"
                         f" as the layer has{instead}")
    if not isinstance(cache, KVCache) and settings.dtype == np.float64 != cache._stored:
        raise TypeError(f"{name}: got {cache.dtype}, wanted float64 as the layer has")
    check_cache_dtype(settings, cache._stored, name)


def _sizes_of_latents(settings: Any, name: str) -> tuple[int, int, int]:
    """kv_heads, head_dim and value_head_dim of an absorbed cache."""
    if not settings.is_latent:
        raise ValueError(f"{name}: got one of latents, wanted one of the layer's own new_cache()")
    return 1, settings.latent_dim, settings.kv_rank


def check_cache_dtype(settings: LayerSettings, stored: np.dtype[Any], name: str) -> None:
    """Of the type in which a cache stores its numbers."""
    if settings.is_latent and stored == Q8_0:
        raise TypeError(f"{name}: got q8_0 for latent attention, wanted a float type")
    if stored in (settings.dtype, Q8_0):
        return
    if stored != stored_dtype(settings.dtype) and stored.itemsize >= settings.dtype.itemsize:
        raise TypeError(f"{name}: got {shown_dtype(stored)}, wanted {shown_dtype(settings.dtype)}"
                        " as the layer has, or a narrower one")


def checked_options(options: AttentionOptions, cache: KVCache | PagedLayer) -> AttentionOptions:
    """Without what the cache decides; the window no wider than the cache's."""
    is_memory = isinstance(cache, Memory)
    if options is not DEFAULTS:
        for name in ("key_lengths", "query_offset"):
            if getattr(options, name) is not None:
                raise ValueError(f"{name}: got one with a cache, wanted none: the cache knows what"
                                 " stands where")
        if isinstance(options.empty_rows, str) and options.empty_rows == "uniform":
            raise ValueError('empty_rows: got "uniform" with a cache, wanted "zeros": a mean of all'
                             " values would change as others join")
        options = _settled(options)
        for name in OF_POSITIONS if is_memory else ():
            if _is_in_force(name, getattr(options, name)):
                raise ValueError(f"{name}: got one with a memory, the layer's own or the call's,"
                                 " wanted none: rows have no place among its keys")
        if is_memory:
            return options._replace(window=None, alibi=None)
    if cache.window is None or is_memory:
        return options
    return options._replace(window=_within(options.window, cache.window))


def _settled(options: AttentionOptions) -> AttentionOptions:
    """With arrays, before anything changes: their conversion may run any code."""
    by_head: dict[str, Any] = {
        name: as_array(given, name) for name in ("alibi", "relative_bias", "sinks")
        if (given := getattr(options, name)) is not None}
    return options._replace(mask=_of_scores(options.mask, "mask"),
                            bias=_of_scores(options.bias, "bias"),
                            causal=as_bool(options.causal, "causal"), **by_head)


def _is_in_force(name: str, given: Any) -> bool:
    """Whether an option of positions is more than what switches a layer's own off."""
    if name == "alibi":
        return given is not None and bool(given.any())
    if name == "window":
        return as_window(given) is not None
    return given is not None and given is not False


def _of_scores(array: Maybe, name: str) -> Any:
    if array is None or (name == "mask" and is_block_mask(array)):
        return array
    scores = as_array(array, name)
    check_score_axes(scores.ndim, name)
    return scores


def _within(window: Window | None, kept: int) -> Window:
    """The call's window, by default the cache's own; a ValueError where it needs dropped keys."""
    if window is None:
        return kept - 1, 0
    if isinstance(window, (tuple, list)) and len(window) == 2:  # else attention says what is wrong
        left = None if window[0] is None else as_int(window[0], "window")
        if left is None or left >= kept:
            raise ValueError(f"window: got {window} with a cache of window {kept}, wanted at most"
                             f" {kept - 1} positions to the left")
    return window
