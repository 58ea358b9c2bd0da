"""Where the parts of an attention stand, and which queries see which chunks of keys."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_array, as_int, as_int_array
from mha._functions.options import AttentionOptions, is_block_mask
from mha.dask._cuts import Cuts, starts

FARTHEST = 2**60  # beyond which the core clips offsets, too


@dataclass(frozen=True, slots=True)
class Place:
    """Of a part: where its first query and key stand in the whole. Picklable, one a task."""

    batch: tuple[int, ...]
    head: int
    query: int
    queries: int                     # how many
    dropout_batch: int               # the flat index of its first batch item
    offset: int | NDArray[np.int64]  # query_offset of the whole, of these batch items
    key: int
    keys: int                        # how many
    has_sinks: bool                  # one part of a row counts them

    def __str__(self) -> str:
        batch = f"batch {', '.join(map(str, self.batch))}, " if self.batch else ""
        return (f"{batch}head {self.head}, queries {self.query} to"
                f" {self.query + self.queries}, keys {self.key} to {self.key + self.keys}")


class Visibility:
    """Which chunks of keys the queries of a chunk may see, as far as positions and lengths tell."""

    def __init__(self, options: AttentionOptions, cuts: Cuts,
                 key_lengths: NDArray[np.int64] | None) -> None:
        self.cuts = cuts
        self.query_starts, self.key_starts = starts(cuts.queries), starts(cuts.keys)
        self.head_starts = starts(cuts.heads or (1,))
        self.batch_starts = [starts(sizes) for sizes in cuts.batch]
        self.batch_shape = tuple(sum(sizes) for sizes in cuts.batch)
        key_len, query_len = self.key_starts[-1], self.query_starts[-1]
        self.offset = checked_offset(options.query_offset, self.batch_shape, key_len - query_len)
        self.key_lengths = key_lengths
        left, right = options.window or (None, None)
        self.left = FARTHEST * 4 if left is None else min(left, FARTHEST)
        self.right = FARTHEST * 4 if right is None else min(right, FARTHEST)
        if options.causal:
            self.right = min(self.right, 0)
        self.has_sinks = options.sinks is not None
        self.mask = checked_mask(options.mask, self.batch_shape, cuts)
        # A row that sees nothing, for whatever reason, is the mean of all values.
        self.needs_all = options.empty_rows == "uniform"

    def items(self, batch: tuple[int, ...]) -> tuple[slice, ...]:
        """The batch items of a chunk of them."""
        return tuple(slice(of_axis[at], of_axis[at + 1])
                     for of_axis, at in zip(self.batch_starts, batch, strict=True))

    def offset_of(self, batch: tuple[int, ...]) -> int | NDArray[np.int64]:
        return self.offset if isinstance(self.offset, int) else self.offset[self.items(batch)]

    def seen(self, batch: tuple[int, ...], head: int, queries: int) -> dict[int, Any]:
        """The chunks of keys that a chunk of queries has parts with, and what a BlockMask shows of
        each (None without one): at least one where there are keys, since what no part sees still
        has its result."""
        chunks = self._in_reach(batch, queries)
        if self.mask is None:
            return dict.fromkeys(chunks)
        items = np.arange(math.prod(self.batch_shape)).reshape(self.batch_shape)
        items = items[self.items(batch)].reshape(-1)
        heads = slice(*self.head_starts[head:head + 2])
        of_queries = self.query_starts[queries], self.query_starts[queries + 1]
        shown = {keys: self.mask._part(items, heads, of_queries, (
            self.key_starts[keys], self.key_starts[keys + 1])) for keys in chunks}
        kept = (keys for keys, part in shown.items() if part is not None or self.needs_all
                or (self.has_sinks and keys == chunks[0]))  # as with a dense mask
        nothing = np.zeros((1, 1), bool)
        return {keys: nothing if shown[keys] is None else shown[keys]
                for keys in (list(kept) or chunks[:1])}

    def _in_reach(self, batch: tuple[int, ...], queries: int) -> range:
        """As far as positions and lengths tell."""
        first_query, end_query = self.query_starts[queries:queries + 2]
        offset = np.asarray(self.offset_of(batch))
        if offset.size == 0 or first_query == end_query:
            return range(1)
        least, most = int(offset.min()), int(offset.max())
        if self.needs_all:
            return range(len(self.cuts.keys))
        longest = self._longest(batch, first_query, end_query)
        first = max(first_query + least - self.left, 0)
        end = min(end_query + most + self.right, longest)
        if first >= end:
            return range(1)
        first_chunk = bisect_right(self.key_starts, first) - 1
        return range(first_chunk, bisect_left(self.key_starts, end))

    def _longest(self, batch: tuple[int, ...], first_query: int, end_query: int) -> int:
        if self.key_lengths is None:
            return self.key_starts[-1]
        here = self.key_lengths[self.items(batch)]
        if here.ndim > len(batch):
            here = here[..., first_query:end_query]
        return int(here.max(initial=0))


def checked_mask(mask: Any, batch_shape: tuple[int, ...], cuts: Cuts) -> Any:
    """A BlockMask that fits the scores; None for all else."""
    if not is_block_mask(mask):
        return None
    heads = 1 if cuts.heads is None else sum(cuts.heads)
    wanted = math.prod(batch_shape), heads, sum(cuts.queries), sum(cuts.keys)
    got = mask._blocks.shape
    if not got.broadcasts_to(wanted):
        raise ValueError(f"mask: got a BlockMask (batch, heads, query_len, key_len) {tuple(got)},"
                         f" wanted one that broadcasts to {wanted}")
    return mask


def checked_offset(given: ArrayLike | None, batch: tuple[int, ...],
                   default: int) -> int | NDArray[np.int64]:
    """query_offset within what the core tells apart: one int, or one each batch item."""
    if given is None:
        return default
    if isinstance(given, da.Array):
        raise TypeError("query_offset: got a dask array, wanted an int or a NumPy array: it decides"
                        " which tasks there are")
    number = as_array(given, "query_offset")
    if number.ndim == 0:
        return max(-FARTHEST, min(as_int(number[()], "query_offset"), FARTHEST))
    offset = as_int_array(number, "query_offset")
    if offset.shape != batch:
        raise ValueError(f"query_offset: got shape {offset.shape}, wanted an int or {batch} (the"
                         " batch axes)")
    return np.clip(offset, -FARTHEST, FARTHEST)


def flat_item(batch: tuple[int, ...], visibility: Visibility) -> int:
    """The index of a chunk's first batch item among all."""
    index = 0
    for of_axis, at in zip(visibility.batch_starts, batch, strict=True):
        index = index * of_axis[-1] + of_axis[at]
    return index


def first_numbers(place: Place, options: dict[str, Any]) -> dict[str, Any]:
    """What tells a call where its part stands."""
    batch, head, query, key = options.get("dropout_offsets") or (0, 0, 0, 0)
    return {"query_offset": place.offset + (place.query - place.key),
            "dropout_offsets": (batch + place.dropout_batch, head + place.head,
                                query + place.query, key + place.key)}
