"""How the arrays of a call are cut into chunks: checked, and brought to agree, before anything
runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import dask.array as da
import numpy as np

from mha._base.arguments import as_array

Sizes = tuple[int, ...]


class Cuts(NamedTuple):
    """The sizes of the chunks along every axis of the scores."""

    batch: tuple[Sizes, ...]   # an axis each
    heads: Sizes | None        # None: 2-D and 3-D arrays have no axis of heads
    key_head_chunk: Sizes      # of each chunk of query heads: which one of key heads it attends to
    queries: Sizes
    keys: Sizes

    @property
    def of_scores(self) -> tuple[Sizes, ...]:
        heads = () if self.heads is None else (self.heads,)
        return (*self.batch, *heads, self.queries, self.keys)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the scores (..., heads, query_len, key_len)."""
        return tuple(map(sum, self.of_scores))


def starts(sizes: Sizes) -> list[int]:
    """Where each chunk begins, and where the last one ends."""
    return [0, *itertools.accumulate(sizes)]


def as_dask(array: Any, name: str) -> Any:
    """A dask array with chunks of known sizes; from anything else one of a single chunk, but from
    what holds a dask array that one."""
    if array is None:
        raise TypeError(f"{name}: got None, wanted an array")
    array = _held(array)
    if not isinstance(array, da.Array):
        array = as_array(array, name)
        return da.from_array(array, chunks=array.shape)
    if any(math.isnan(size) for sizes in array.chunks for size in sizes):
        raise ValueError(f"{name}: got chunks of unknown sizes, wanted known ones:"
                         f" {name}.compute_chunk_sizes() finds them out")
    return array


def check_shapes(query: Any, key: Any, value: Any) -> None:
    """ValueError unless they fit together as those of `mha.scaled_dot_product_attention`."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim < 2 or array.ndim != query.ndim:
            wanted = "at least 2" if array.ndim < 2 else f"{query.ndim}, as query has"
            raise ValueError(f"{name}: got {array.ndim} axes, wanted {wanted}")
        if array.numblocks[-1] != 1:
            raise ValueError(f"{name}: got {array.numblocks[-1]} chunks along head_dim, its last"
                             f" axis, wanted one: {name}.rechunk({{-1: -1}})")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: got head_dim {key.shape[-1]}, wanted {query.shape[-1]} as query"
                         " has")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value: got {value.shape[-2]} rows, wanted {key.shape[-2]} as key has")
    batch_axes = _batch_axes(query)
    for name, array in (("key", key), ("value", value)):
        if array.shape[:batch_axes] != query.shape[:batch_axes]:
            raise ValueError(f"{name}: got the batch axes {array.shape[:batch_axes]}, wanted"
                             f" {query.shape[:batch_axes]} as query has")
    if query.ndim >= 4:
        heads, kv_heads = query.shape[-3], key.shape[-3]
        if value.shape[-3] != kv_heads:
            raise ValueError(f"value: got {value.shape[-3]} heads, wanted {kv_heads} as key has")
        if heads and (kv_heads == 0 or heads % kv_heads):
            raise ValueError(f"query: got {heads} heads, wanted a multiple of {kv_heads}, those of"
                             " key")


def agreed(given: Sequence[tuple[str, Any, bool]], contiguous_batch: bool) -> tuple[Any, ...]:
    """(query, key, value, cuts), cut alike, of (name, array, whether it came as a dask array): what
    came as NumPy's is cut as the others are. contiguous_batch: the items of a chunk of the batch
    shall lie side by side in the whole."""
    arrays = {name: array for name, array, _ in given}
    batch_axes = _batch_axes(arrays["query"])
    batch = tuple(_common(given, axis) for axis in range(batch_axes))
    keys = _common(given[1:], -2)
    arrays |= {name: array.rechunk({axis: batch[axis] for axis in range(batch_axes)})
               for name, array in arrays.items()}
    for name in ("key", "value"):
        arrays[name] = arrays[name].rechunk({-2: keys})
    if contiguous_batch:
        batch = _contiguous(batch)
        arrays = {name: array.rechunk(dict(enumerate(batch))) for name, array in arrays.items()}
    heads: Sizes | None = None
    key_head_chunk: Sizes = (0,)
    if arrays["query"].ndim >= 4:
        heads, kv_heads, key_head_chunk = _cut_heads(
            *(arrays[name].chunks[-3] for name in ("query", "key", "value")))
        arrays["query"] = arrays["query"].rechunk({-3: heads})
        for name in ("key", "value"):
            arrays[name] = arrays[name].rechunk({-3: kv_heads})
    cuts = Cuts(batch, heads, key_head_chunk, arrays["query"].chunks[-2], keys)
    return arrays["query"], arrays["key"], arrays["value"], cuts


def is_dask(array: Any) -> bool:
    return isinstance(_held(array), da.Array)


def _held(array: Any) -> Any:
    """The dask array that an array of xarray's, say, holds; else the array itself."""
    held = None if isinstance(array, (da.Array, np.ndarray)) else getattr(array, "data", None)
    return held if isinstance(held, da.Array) else array


def adopted(given: Sequence[tuple[str, Any, bool]]) -> list[Any]:
    """Rows (batch, len, dim) of query, key and value: what came as NumPy's is cut like the others,
    along the batch and, of key and value, along the keys."""
    found = []
    for name, array, was_dask in given:
        others = [(axis, other.chunks[axis]) for axis in (0, 1) for _, other, other_was in
                  (given if axis == 0 else given[1:]) if other_was and not was_dask
                  and (axis == 0 or name != "query") and other.shape[axis] == array.shape[axis]]
        found.append(array.rechunk(dict(reversed(others))) if others else array)
    return found


def _batch_axes(query: Any) -> int:
    return query.ndim - 3 if query.ndim >= 4 else query.ndim - 2


def _common(given: Sequence[tuple[str, Any, bool]], axis: int) -> Sizes:
    """The chunks of an axis, which those that came as dask arrays have to agree on."""
    cut = [(name, array) for name, array, was_dask in given if was_dask] or [given[0][:2]]
    first, sizes = cut[0][0], cut[0][1].chunks[axis]
    for name, array in cut[1:]:
        if array.chunks[axis] != sizes:
            along = "the keys" if axis == -2 else f"batch axis {axis}"
            raise ValueError(
                f"{name}: got the chunks {array.chunks[axis]} along {along}, wanted those of"
                f" {first}, {sizes}: {name}.rechunk({{{axis}: {first}.chunks[{axis}]}})")
    return sizes


def _contiguous(batch: tuple[Sizes, ...]) -> tuple[Sizes, ...]:
    """Before the last axis that is cut, chunks of one."""
    last = max((axis for axis, sizes in enumerate(batch) if len(sizes) > 1), default=0)
    return tuple((1,) * len(range(sum(sizes))) if axis < last and any(sizes) else sizes
                 for axis, sizes in enumerate(batch))


def _cut_heads(query: Sizes, key: Sizes, value: Sizes) -> tuple[Sizes, Sizes, Sizes]:
    """Chunks of query heads and of key heads, so that each one of the first has its key heads in
    one of the second: all of a chunk, or one for a part of its group. And which."""
    heads, kv_heads = sum(query), sum(key)
    if heads == 0:
        return (0,), (kv_heads,), (0,)
    group = heads // kv_heads
    of_keys = {*starts(key), *starts(value)}
    for boundary in starts(query):
        of_keys |= {boundary // group, -(-boundary // group)}
    key_starts = sorted(of_keys)
    query_starts = sorted({*starts(query), *(group * boundary for boundary in key_starts)})
    chunk_of = [int(np.searchsorted(key_starts, first // group, side="right")) - 1
                for first in query_starts[:-1]]
    return _sizes(query_starts), _sizes(key_starts), tuple(chunk_of)


def _sizes(boundaries: list[int]) -> Sizes:
    return tuple(end - first for first, end in itertools.pairwise(boundaries)) or (0,)


def cut_like_scores(array: Any, name: str, cuts: Cuts) -> Any:
    """A mask or bias as a dask array that is cut as the scores are; axes of 1 stay."""
    shape = cuts.shape
    aligned = shape[len(shape) - array.ndim:]
    if array.ndim > len(shape) or any(
            size not in (1, wanted) for size, wanted in zip(array.shape, aligned, strict=True)):
        raise ValueError(f"{name}: got shape {array.shape}, wanted one that broadcasts to the"
                         f" scores {shape}")
    sizes = cuts.of_scores[len(shape) - array.ndim:]
    return array.rechunk(tuple(
        wanted if sum(wanted) == size else (1,)
        for size, wanted in zip(array.shape, sizes, strict=True)))
