"""A call as a plan: its arrays, cut alike, and where the task of each part finds its chunks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.base import tokenize

from mha._base.arguments import as_array, as_int, as_size
from mha._functions.options import AttentionOptions, is_block_mask
from mha._functions.scaled_dot_product_attention import scaled_dot_product_attention
from mha.dask._cuts import Cuts, agreed, as_dask, check_shapes, cut_like_scores, is_dask
from mha.dask._graph import Key, TaskRef
from mha.dask._places import Place, Visibility, flat_item
from mha.dask._tasks import ARRAYS, Call, check_lengths

_log = logging.getLogger(__name__)
# Of the numbers of a part, (*batch, head, key head, queries, keys): those that an array's chunk
# has, in the order of its axes; -1 stands for an axis that is not cut, or that all parts share.
Locator = tuple[int, ...]


class Part(NamedTuple):
    """One chunk of queries with one of keys."""

    numbers: Key                      # (*batch, head, key head, queries, keys)
    place: Place
    references: list[TaskRef | None]  # to the chunks of the arrays that were asked for


def _no_array(keys: int) -> None:
    return None


@dataclass(frozen=True)
class Plan:
    """Small: what tasks are written from, here or on the scheduler."""

    token: str
    call: Call
    cuts: Cuts
    visibility: Visibility
    split_every: int
    inputs: dict[str, tuple[str, Locator]]  # of an array: its name in the graph, and its chunks
    rounded: np.dtype[Any]                  # the type of the output

    def name(self, what: str) -> str:
        return f"mha-{what}-{self.token}"

    def blocks(self) -> Iterator[Key]:
        """(*batch, head, queries), the numbers of every block of queries."""
        heads = 1 if self.cuts.heads is None else len(self.cuts.heads)
        return itertools.product(*(range(len(sizes)) for sizes in self.cuts.batch), range(heads),
                                 range(len(self.cuts.queries)))

    def parts(self, block: Key, arrays: Iterable[str]) -> list[Part]:
        """Of a block of queries, in the order of their keys."""
        *chunk, head, queries = block
        batch, seen = tuple(chunk), self.visibility
        numbers = (*batch, head, self.cuts.key_head_chunk[head], queries)
        shown = seen.seen(batch, head, queries)
        references = [shown.__getitem__ if array == "mask" and seen.mask is not None
                      else self._references(array, numbers) for array in arrays]
        first = next(iter(shown))
        where = (tuple(of_axis[at] for of_axis, at in zip(seen.batch_starts, batch, strict=True)),
                 seen.head_starts[head], seen.query_starts[queries], self.cuts.queries[queries],
                 flat_item(batch, seen), seen.offset_of(batch))
        return [Part((*numbers, keys),
                     Place(*where, seen.key_starts[keys], self.cuts.keys[keys],
                           keys == first),
                     [reference(keys) for reference in references])
                for keys in shown]

    def _references(self, array: str, numbers: Key) -> Callable[[int], TaskRef | None]:
        """From the number of a chunk of keys to the chunk of an array that belongs to that part of
        a block, (*batch, head, key head, queries); to None where there is no such array."""
        if array not in self.inputs:
            return _no_array
        name, locator = self.inputs[array]
        chunk = [0 if number < 0 else (*numbers, None)[number] for number in locator]
        if None not in chunk:
            the_only_one = TaskRef((name, *chunk))
            return lambda keys: the_only_one
        at = chunk.index(None)
        before, after = (name, *chunk[:at]), chunk[at + 1:]
        return lambda keys: TaskRef((*before, keys, *after))

    def with_arrays(self, arrays: dict[str, tuple[da.Array, Locator]]) -> Plan:
        """The same with more arrays whose chunks belong to parts."""
        call = replace(self.call, given=self.call.given | {
            name: array.dtype for name, (array, _) in arrays.items()})
        return replace(self, call=call, inputs=self.inputs | {
            name: (array.name, locator) for name, (array, locator) in arrays.items()})

    def of_result(self, block: Key) -> Key:
        """The numbers of a block's chunk in the output, without its last axis."""
        *batch, head, queries = block
        return (*batch, *(() if self.cuts.heads is None else (head,)), queries)


def plan_of(query: Any, key: Any, value: Any, options: AttentionOptions, split_every: int,
            function: Callable[..., Any]) -> tuple[Plan, dict[str, da.Array]]:
    """The plan of a call and its arrays, all that can be known to be wrong checked."""
    split_every = as_size(split_every, "split_every", least=2)
    given = [(name, as_dask(array, name), is_dask(array)) for name, array in (
        ("query", query), ("key", key), ("value", value))]
    check_shapes(*(array for _, array, _ in given))
    options = _settled(options)
    rounded = _checked_types([array for _, array, _ in given], options)
    *arrays, cuts = agreed(given, contiguous_batch=bool(options.dropout))
    by_name = dict(zip(("query", "key", "value"), arrays, strict=True))
    by_name |= _option_arrays(options, cuts)
    lengths: Any = options.key_lengths
    known = None if lengths is None or isinstance(lengths, da.Array) else lengths
    if known is not None:
        check_lengths(known, sum(cuts.keys))
    visibility = Visibility(options, cuts, known)
    plain = {name: getattr(options, name) for name in (
        "causal", "window", "scale", "softcap", "empty_rows", "dropout", "rng", "dropout_offsets")}
    computed = np.dtype(np.float64 if rounded == np.float64 else np.float32)
    call = Call(computed, sum(cuts.keys), {name: array.dtype for name, array in by_name.items()},
                {name: choice for name, choice in plain.items() if choice is not None})
    inputs = {name: (array.name, _locator(name, array, cuts)) for name, array in by_name.items()}
    mask = visibility.mask
    token = tokenize(function.__name__, sorted(inputs.items()), plain, options.query_offset,
                     known, split_every, None if mask is None else mask._core_record)
    _log.debug("%s: %d chunks of queries, %d of keys, computed in %s", function.__name__,
               len(cuts.queries), len(cuts.keys), computed)
    return Plan(token, call, cuts, visibility, split_every, inputs, rounded), by_name


def _settled(options: AttentionOptions) -> AttentionOptions:
    """What may change before the tasks run, as it is now: lists of ints and lengths of NumPy's. The
    other arrays become chunks of dask arrays, which are copies."""
    changed: dict[str, Any] = {}
    for name in ("window", "dropout_offsets"):
        given = getattr(options, name)
        if isinstance(given, (tuple, list)):
            changed[name] = tuple(None if one is None else as_int(one, name) for one in given)
    lengths = options.key_lengths
    if lengths is not None and not isinstance(lengths, da.Array):
        changed["key_lengths"] = np.array(as_array(lengths, "key_lengths"))
    return options._replace(**changed)


def _checked_types(arrays: list[da.Array], options: AttentionOptions) -> np.dtype[Any]:
    """The type of the output; errors of types and of plain options come from a call without any
    batch item, by the words of that function."""
    none = [np.zeros((0, *array.shape[-2:]), array.dtype) for array in arrays]
    shapes = {"mask": (1, 1), "bias": (1, 1), "alibi": (1,), "relative_bias": (1, 1), "sinks": (1,)}
    without: dict[str, Any] = {
        name: None if getattr(options, name) is None else np.zeros(0, np.int64)
        for name in ("key_lengths", "query_offset")}
    for name, shape in shapes.items():
        array = getattr(options, name)
        if is_block_mask(array):
            without[name] = None
        elif array is not None:
            without[name] = np.zeros(shape, as_dask(array, name).dtype)
    result = scaled_dot_product_attention(*none, **options._replace(**without)._asdict())
    return np.dtype(result.dtype)


def _option_arrays(options: AttentionOptions, cuts: Cuts) -> dict[str, da.Array]:
    """Those that are given, cut as the parts need them."""
    heads = cuts.heads or (1,)
    found: dict[str, da.Array] = {}
    for name in ARRAYS:
        array = getattr(options, name)
        if array is None or is_block_mask(array):
            continue
        array = as_dask(array, name)
        if name in ("mask", "bias"):
            found[name] = cut_like_scores(array, name, cuts)
        elif name == "key_lengths":
            if array.dtype.kind not in "iu":
                raise TypeError(f"key_lengths: got an array of {array.dtype}, wanted ints")
            found[name] = _cut_lengths(array, cuts)
        else:
            found[name] = _cut_by_head(array, name, heads)
    return found


def _cut_by_head(array: da.Array, name: str, heads: tuple[int, ...]) -> da.Array:
    """(heads,), or of relative_bias (heads or 1, 2r + 1)."""
    count = sum(heads)
    if name != "relative_bias":
        if array.shape != (count,):
            raise ValueError(f"{name}: got shape {array.shape}, wanted ({count},), a number for"
                             " each head")
        return array.rechunk((heads,))
    if array.ndim != 2 or array.shape[1] % 2 == 0 or array.shape[0] not in (1, count):
        raise ValueError(f"relative_bias: got shape {array.shape}, wanted ({count}, 2r + 1), or"
                         " (1, 2r + 1) for one row that all heads share")
    return array.rechunk((heads if array.shape[0] == count else (1,), -1))


def _cut_lengths(array: da.Array, cuts: Cuts) -> da.Array:
    batch = tuple(map(sum, cuts.batch))
    per_query = (*batch, sum(cuts.queries))
    if array.shape not in (batch, per_query):
        raise ValueError(f"key_lengths: got shape {array.shape}, wanted {batch} (the batch axes) or"
                         f" {per_query} (a length a query)")
    return array.rechunk((*cuts.batch, cuts.queries)[:array.ndim])


def _locator(name: str, array: da.Array, cuts: Cuts) -> Locator:
    batch = tuple(range(len(cuts.batch)))
    head, key_head, queries, keys = range(len(batch), len(batch) + 4)
    has_heads = cuts.heads is not None
    if name == "query":
        return (*batch, *(head,) * has_heads, queries, -1)
    if name in ("key", "value"):
        return (*batch, *(key_head,) * has_heads, keys, -1)
    if name in ("mask", "bias"):
        axes = (*batch, *(head,) * has_heads, queries, keys)[-array.ndim:] if array.ndim else ()
        sizes = cuts.of_scores[len(cuts.of_scores) - array.ndim:]
        return tuple(axis if chunks == wanted else -1
                     for axis, chunks, wanted in zip(axes, array.chunks, sizes, strict=True))
    if name == "key_lengths":
        return (*batch, queries)[:array.ndim]
    of_heads = -1 if len(array.chunks[0]) == 1 else head
    return (of_heads, -1)[:array.ndim]


def locator_of_result(array: da.Array, cuts: Cuts) -> Locator:
    """Of an array cut like the output, or without its last axis like lse."""
    batch = tuple(range(len(cuts.batch)))
    heads = () if cuts.heads is None else (len(batch),)
    return (*batch, *heads, len(batch) + 2, -1)[:array.ndim]
