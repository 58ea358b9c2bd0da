"""A layer over dask arrays: the whole figure, cut along the batch and the sequences."""

from __future__ import annotations

import copy
import uuid
from typing import Any, Unpack

import dask.array as da
import numpy as np
from dask._task_spec import DataNode
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.arguments import as_array, as_positions, check_rows
from mha._base.dtypes import as_computed, computing_dtype, returned, shown_dtype
from mha._base.keywords import checks_keywords
from mha._base.runtime import threads
from mha._functions.options import (
    LAYER,
    LayerKeywords,
    RandomSource,
    check_score_axes,
    is_block_mask,
    takes_options,
)
from mha._functions.rotary import position_axes
from mha._layer.layer import MultiHeadAttention as Layer
from mha._layer.options import call_options
from mha._layer.prepare_heads import by_head, gated, heads_of
from mha.dask._attention import DaskOrArray, scaled_dot_product_attention
from mha.dask._cuts import adopted, as_dask, is_dask, starts
from mha.dask._graph import Key, Task, TaskRef
from mha.dask._tasks import share_of_cores

Array = NDArray[Any]

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention:
    """A layer whose call takes and gives dask arrays: (batch, len, dim), cut along batch and len.

    Parameters
    ----------
    layer : mha.MultiHeadAttention
        Its parameters are copied here and packed, as by `freeze()`. They go to each worker once,
        which packs them once.

    Raises
    ------
    TypeError: something else than a layer.

    Source: Vaswani et al. 2017, section 3.2.2.

    >>> import dask.array as da
    >>> layer = mha.dask.MultiHeadAttention(mha.MultiHeadAttention(64, 4, rng=0))
    >>> layer(da.ones((1, 1000, 64), chunks=(1, 250, 64)), causal=True, window=(99, 0)).shape
    (1, 1000, 64)
    """

    __module__ = "mha.dask"  # where users import it from

    @checks_keywords
    def __init__(self, layer: Layer) -> None:
        if not isinstance(layer, Layer):
            raise TypeError(f"layer: got {type(layer).__name__}, wanted a mha.MultiHeadAttention")
        if type(layer).__call__ is not Layer.__call__:
            raise TypeError(f"layer: got {type(layer).__name__}, whose call is its own, wanted one"
                            " that is called as mha.MultiHeadAttention is")
        self._layer = copy.copy(layer).freeze()
        self._name = f"mha-layer-{uuid.uuid4().hex}"

    def __repr__(self) -> str:
        return f"mha.dask.{self._layer!r}"

    @takes_options(LAYER, before="training")
    def __call__(self, query: DaskOrArray, key: DaskOrArray | None = None,
                 value: DaskOrArray | None = None, *, training: bool = False,
                 rng: RandomSource = None, positions: ArrayLike | None = None,
                 key_positions: ArrayLike | None = None, return_weights: bool = False,
                 return_lse: bool = False, split_every: int = 8,
                 **options: Unpack[LayerKeywords]) -> Any:
        """Attend: query (batch, query_len, query_dim) -> output (batch, query_len, output_dim).

        The output is a dask array in query's chunks: nothing runs before compute().

        Parameters
        ----------
        query, key, value : dask arrays (batch, len, dim), or (len, dim) for one sequence
            Cut anywhere but along the last axis, batch axes alike, keys of key and value alike. key
            defaults to query, value to key.
        positions, key_positions : ints (len,) or (batch, len), by default 0, 1, ...
            NumPy arrays: where rows of query and key stand, for the layer's rotary alone; with its
            sections also (n, len) or (n, batch, len).
        The rest : as in a call of the layer, and in `mha.dask.scaled_dot_product_attention`.

        Returns
        -------
        output; then weights (batch, heads, query_len, key_len) and lse (batch, heads, query_len)
        where asked for, as a tuple in this order.

        Raises
        ------
        ValueError, TypeError: as a call of the layer, before anything runs.

        Source: Vaswani et al. 2017, section 3.2.2.

        >>> import dask.array as da
        >>> layer = mha.dask.MultiHeadAttention(mha.MultiHeadAttention(64, 4, rng=0))
        >>> layer(da.ones((2, 100, 64), chunks=(1, 50, 64))).compute().shape
        (2, 100, 64)
        """
        state = self._layer._state
        settings = state.settings
        chosen = call_options(MultiHeadAttention.__call__, options, (), state.options,
                              settings.dropout, training, rng)
        if key_positions is None and key is None:
            key_positions = positions
        key = query if key is None else key
        value = key if value is None else value
        given = [(name, self._rows(array, name, width), is_dask(array)) for name, array, width in (
            ("query", query, settings.query_dim), ("key", key, settings.key_dim),
            ("value", value, settings.value_dim))]
        is_one = given[0][1].ndim == 2
        for name, rows, _ in given[1:]:
            if rows.ndim != given[0][1].ndim:
                raise ValueError(f"{name}: got shape {rows.shape}, wanted as many axes as query"
                                 f" has, {given[0][1].ndim}")
        if is_one:
            given = [(name, rows[None], was_dask) for name, rows, was_dask in given]
        inputs = adopted(given)
        heads = [self._heads(which, rows, name, where) for which, name, rows, where in zip(
            "qkv", ("query", "key", "value"), inputs,
            (positions, key_positions, None), strict=True)]
        attended = scaled_dot_product_attention(
            *heads, return_weights=return_weights, return_lse=return_lse, split_every=split_every,
            **_of_scores(chosen._asdict(), is_one))
        output, *others = attended if isinstance(attended, tuple) else (attended,)
        results = [self._projected(output, inputs[0]), *others]
        if is_one:
            results = [result[0] for result in results]
        return tuple(results) if others else results[0]

    def _rows(self, array: DaskOrArray, name: str, width: int) -> da.Array:
        """(batch, len, dim) or (len, dim), checked."""
        rows = as_dask(array, name)
        check_rows(rows.shape, name, width)
        if rows.numblocks[-1] != 1:
            raise ValueError(f"{name}: got {rows.numblocks[-1]} chunks along its last axis, wanted"
                             f" one: {name}.rechunk({{-1: -1}})")
        none = np.zeros((0, width), rows.dtype)
        as_computed(none, name, self._layer._state.settings.dtype)  # its errors
        return rows

    def _heads(self, which: str, rows: da.Array, name: str,
               positions: ArrayLike | None) -> da.Array:
        """Rows (batch, len, dim) projected, split into heads: (batch, heads, len, d)."""
        settings = self._layer._state.settings
        where = None
        if positions is not None:
            of_rows = "positions" if which == "q" else "key_positions"
            if settings.rotary is None:
                raise ValueError(f"{of_rows}: got some, wanted none: the layer has no rotary")
            batch, length, _ = rows.shape
            where = as_positions(positions, of_rows, batch, length, position_axes(settings.rotary))
        head_dim = settings.value_head_dim if which == "v" else settings.head_dim
        first_items, first_rows = map(starts, rows.chunks[:2])
        written: dict[Key, Task] = {}
        result = f"mha-{name}-heads-{tokenize(self._name, which, rows.name, where)}"
        for item, row in np.ndindex(*rows.numblocks[:2]):
            part: Any = (slice(*first_items[item:item + 2]), slice(*first_rows[row:row + 2]))
            here = None if where is None else where[(..., *part[where.ndim == 1:])]
            chunk = (result, item, 0, row, 0)
            written[chunk] = Task(chunk, project, TaskRef(self._name), which, name,
                                  TaskRef((rows.name, item, row, 0)), part[1].start, here)
        chunks = (rows.chunks[0], (heads_of(settings, which),), rows.chunks[1], (head_dim,))
        return self._array(result, written, [rows], chunks, computing_dtype(settings.dtype))

    def _projected(self, attended: da.Array, query: da.Array) -> da.Array:
        """(batch, heads, len, d) merged, gated by rows of query where the layer has a gate, through
        the output projection: (batch, len, dim)."""
        settings = self._layer._state.settings
        sources = [attended.rechunk({1: -1})]
        rows, _, length, _ = sources[0].chunks
        if settings.output_gate is not None:
            sources.append(query.rechunk((rows, length, -1)))
        written: dict[Key, Task] = {}
        name = f"mha-projected-{tokenize(self._name, *(source.name for source in sources))}"
        for item, row in np.ndindex(len(rows), len(length)):
            chunk, at = (name, item, row, 0), ((item, 0, row, 0), (item, row, 0))
            written[chunk] = Task(chunk, merge_and_project, TaskRef(self._name), *(
                TaskRef((source.name, *place))
                for source, place in zip(sources, at, strict=False)))
        chunks = (rows, length, (settings.output_dim,))
        return self._array(name, written, sources, chunks, shown_dtype(settings.dtype))

    def _array(self, name: str, written: dict[Key, Task], sources: list[da.Array], chunks: Any,
               dtype: Any) -> da.Array:
        """The tasks as an array; the layer itself is one node of the graph."""
        below = HighLevelGraph.from_collections(name, MaterializedLayer(written), sources)
        parameters = {self._name: DataNode(self._name, self._layer)}
        graph = HighLevelGraph(
            {**below.layers, self._name: MaterializedLayer(parameters)},
            {**below.dependencies, self._name: set(),
             name: below.dependencies[name] | {self._name}})
        return da.Array(graph, name, chunks=chunks, dtype=dtype)


def _of_scores(options: dict[str, Any], is_one: bool) -> dict[str, Any]:
    """The options for (batch, heads, query_len, key_len), from those of a call of the layer; of one
    sequence they have no batch axis."""
    for name in ("mask", "bias"):
        if options[name] is not None and not is_block_mask(options[name]):
            check_score_axes(np.ndim(options[name]), name)
    lengths = options["key_lengths"]
    if is_one and lengths is not None:
        options["key_lengths"] = as_dask(lengths, "key_lengths")[None] if is_dask(
            lengths) else as_array(lengths, "key_lengths")[None]
    return options


def project(layer: Layer, which: str, name: str, rows: Array, first_row: int,
            positions: Array | None) -> Array:
    """Task: a chunk of rows to "q", "k" or "v", normed, rotated and split as the layer does."""
    state = layer._state
    with threads(share_of_cores()):
        rows = as_computed(rows, name, state.settings.dtype)
        at = "qkv".index(which)
        weight = (state.call.W_q, state.call.W_k, state.call.W_v)[at]
        bias = (state.call.b_q, state.call.b_k, state.call.b_v)[at]
        if positions is None and state.settings.rotary is not None:
            positions = first_row + np.arange(rows.shape[1])
        return by_head(state, which, _core.linear(rows, weight, bias), positions)


def merge_and_project(layer: Layer, attended: Array, query: Array | None = None) -> Array:
    """Task: a chunk of rows of all heads, and query's rows for the gate, to the layer's output."""
    state = layer._state
    with threads(share_of_cores()):
        merged = _core.merge_heads(attended)
        if query is not None:
            merged = gated(state, merged, as_computed(query, "query", state.settings.dtype))
        return returned(_core.linear(merged, state.call.W_o, state.call.b_o), state.settings.dtype)
