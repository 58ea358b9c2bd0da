"""Scaled dot-product attention over dask arrays (step 3 of the figure)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, Unpack

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph
from numpy.typing import ArrayLike

from mha._functions.dropout import drawn
from mha._functions.options import ATTENTION, AttentionKeywords, attention_options, takes_options
from mha.dask import _tasks as tasks
from mha.dask._graph import Key, Task, TaskRef, Tasks, array_of, join_by_tree
from mha.dask._plan import Plan, plan_of
from mha.dask._tasks import ARRAYS

DaskOrArray: TypeAlias = da.Array | ArrayLike


@takes_options(ATTENTION, before="return_weights")
def scaled_dot_product_attention(
        query: DaskOrArray, key: DaskOrArray, value: DaskOrArray, *, return_weights: bool = False,
        return_lse: bool = False, split_every: int = 8,
        **options: Unpack[AttentionKeywords]) -> Any:
    """`mha.scaled_dot_product_attention` over dask arrays: nothing runs before compute().

    A task attends a chunk of queries to a chunk of keys; joins of `split_every` at a time add up
    what the chunks of keys gave, exactly. Chunks that no query of a task sees have no task.

    Parameters
    ----------
    query : dask array (query_len, head_dim), (batch, query_len, head_dim) or
        (..., heads, query_len, head_dim)
    key : dask array (..., kv_heads, key_len, head_dim)
    value : dask array (..., kv_heads, key_len, value_head_dim)
        Cut anywhere but along the last axis; batch axes alike, keys of key and value alike. A NumPy
        array counts as one that is cut as the others are.
    {options}
    return_weights, return_lse : bool
        Return the weights (before dropout), in chunks of queries x keys, and the log-sum-exp too.
    split_every : int
        How many parts one task joins.

    Arrays among the options may be dask arrays, too; query_offset, and what is no array, may not.

    Returns
    -------
    dask arrays: output (..., heads, query_len, value_head_dim); then weights
    (..., heads, query_len, key_len) and lse (..., heads, query_len) where asked for, as a tuple in
    this order. The same chunks give the same bits, whatever runs them.

    Raises
    ------
    ValueError, TypeError: as `mha.scaled_dot_product_attention`, before anything runs; chunks of
    unknown sizes, unlike ones, several along head_dim. What a task raises says which part it was.

    Source: joins by log-sum-exp as in Dao et al. 2023, "Flash-Decoding", and Shyam et al. 2024,
    "Tree Attention".

    >>> import dask.array as da
    >>> x = da.ones((1, 8, 1000, 64), chunks=(1, 4, 250, 64), dtype=np.float32)
    >>> mha.dask.scaled_dot_product_attention(x, x, x, causal=True).compute().shape
    (1, 8, 1000, 64)
    """
    plan, arrays, graph = joined(scaled_dot_product_attention, query, key, value, split_every,
                                 options)
    results = [output_of(plan, graph, arrays["value"].shape[-1])]
    if return_weights:
        results.append(weights_of(plan, graph))
    if return_lse:
        results.append(lse_of(plan, graph))
    return results[0] if len(results) == 1 else tuple(results)


def joined(function: Callable[..., Any], query: DaskOrArray, key: DaskOrArray, value: DaskOrArray,
           split_every: int, options: AttentionKeywords,
           ) -> tuple[Plan, dict[str, da.Array], HighLevelGraph]:
    """The plan of a function's call, its arrays, and the graph that joins the parts."""
    with drawn(attention_options(function, options)) as drawn_options:
        plan, arrays = plan_of(query, key, value, drawn_options, split_every, function)
    graph = HighLevelGraph.from_collections(plan.name("joined"), Tasks(write_joined, plan),
                                            list(arrays.values()))
    return plan, arrays, graph


def write_joined(plan: Plan) -> dict[Key, Task]:
    """A task for each part, and those that join the parts of a block of queries."""
    written: dict[Key, Task] = {}
    name = plan.name("part")
    for block in plan.blocks():
        root = (plan.name("joined"), *block)
        parts = plan.parts(block, ("query", "key", "value", *ARRAYS))
        leaves = [root]
        if len(parts) > 1:
            leaves = [(name, *part.numbers) for part in parts]
        for leaf, part in zip(leaves, parts, strict=True):
            written[leaf] = Task(leaf, tasks.attend, plan.call, part.place, *part.references)
        join_by_tree(written, plan.name("join"), root, leaves, tasks.join, plan.split_every)
    return written


def output_of(plan: Plan, graph: HighLevelGraph, value_head_dim: int) -> da.Array:
    name = plan.name("output")
    return array_of(name, Tasks(write_output, plan), graph, [plan.name("joined")],
                    (*plan.cuts.of_scores[:-1], (value_head_dim,)), plan.rounded)


def write_output(plan: Plan) -> dict[Key, Task]:
    return _of_each_block(plan, "output", (0,), 0, plan.rounded)


def lse_of(plan: Plan, graph: HighLevelGraph) -> da.Array:
    return array_of(plan.name("lse"), Tasks(write_lse, plan), graph, [plan.name("joined")],
                    plan.cuts.of_scores[:-1], plan.call.computed)


def write_lse(plan: Plan) -> dict[Key, Task]:
    return _of_each_block(plan, "lse", (), 1, plan.call.computed)


def _of_each_block(plan: Plan, what: str, last: Key, at: int,
                   dtype: np.dtype[Any]) -> dict[Key, Task]:
    """Result `at` of what was joined, in this type."""
    written = {}
    for block in plan.blocks():
        key = (plan.name(what), *plan.of_result(block), *last)
        written[key] = Task(key, tasks.result, TaskRef((plan.name("joined"), *block)), at, dtype)
    return written


def weights_of(plan: Plan, graph: HighLevelGraph) -> da.Array:
    inputs = {name for name, _ in plan.inputs.values()}
    return array_of(plan.name("weights"), Tasks(write_weights, plan), graph,
                    [plan.name("joined"), *inputs], plan.cuts.of_scores, plan.call.computed)


def write_weights(plan: Plan) -> dict[Key, Task]:
    """A task for each part, and zeros for chunks of which no part sees anything."""
    written: dict[Key, Task] = {}
    for block in plan.blocks():
        parts = {part.numbers[-1]: part for part in plan.parts(block, ("query", "key", *ARRAYS))}
        for keys in range(len(plan.cuts.keys)):
            key = (plan.name("weights"), *plan.of_result(block), keys)
            if keys in parts:
                part = parts[keys]
                written[key] = Task(
                    key, tasks.weights, plan.call, part.place,
                    TaskRef((plan.name("joined"), *block)), *part.references)
            else:
                chunk = zip(plan.of_result(block), plan.cuts.of_scores[:-1], strict=True)
                shape = (*(sizes[number] for number, sizes in chunk), plan.cuts.keys[keys])
                written[key] = Task(key, np.zeros, shape, plan.call.computed)
    return written
