"""The gradients of scaled dot-product attention over dask arrays."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Unpack

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from mha._base.arguments import wanted_names
from mha._functions.gradients import ScaledDotProductAttentionGradients
from mha._functions.options import ATTENTION, AttentionKeywords, takes_options
from mha._functions.scaled_dot_product_attention import (
    scaled_dot_product_attention_vjp as plain_vjp,
)
from mha.dask import _tasks as tasks
from mha.dask._attention import DaskOrArray, joined, output_of
from mha.dask._cuts import as_dask
from mha.dask._graph import Key, Task, TaskRef, Tasks, array_of, join_by_tree
from mha.dask._plan import Plan, locator_of_result
from mha.dask._tasks import ARRAYS

Pullback = Callable[..., ScaledDotProductAttentionGradients]


@takes_options(ATTENTION, before="wrt")
def scaled_dot_product_attention_vjp(
        query: DaskOrArray, key: DaskOrArray, value: DaskOrArray, *,
        wrt: Collection[str] | None = None, split_every: int = 8,
        **options: Unpack[AttentionKeywords]) -> tuple[da.Array, Pullback]:
    """`mha.scaled_dot_product_attention_vjp` over dask arrays: nothing runs before compute().

    Parameters
    ----------
    wrt : names out of "query", "key", "value", "bias", "alibi", "relative_bias", "sinks", optional
        Whose gradients are wanted; by default all of them.
    The rest : as in `mha.dask.scaled_dot_product_attention`.

    Returns
    -------
    (output, pullback). pullback(grad_output, grad_lse=None) returns the gradients by name, dask
    arrays in the chunks of the attention. A part's gradient comes from the output and log-sum-exp
    over all keys, which are computed before: `dask.compute(output, *gradients)` does that once, and
    each compute() of its own once more.

    Raises
    ------
    ValueError, TypeError: as `mha.dask.scaled_dot_product_attention`; an unknown name in wrt.

    Source: Dao et al. 2022, "FlashAttention", appendix B.4; over parts of the keys as in Liu et al.
    2023, "Ring Attention with Blockwise Transformers", section 3.

    >>> import dask.array as da
    >>> x = da.ones((1, 8, 1000, 64), chunks=(1, 4, 250, 64), dtype=np.float32)
    >>> output, pullback = mha.dask.scaled_dot_product_attention_vjp(x, x, x, causal=True)
    >>> pullback(da.ones_like(output)).query.compute().shape
    (1, 8, 1000, 64)
    """
    wanted = wanted_names(wrt, ScaledDotProductAttentionGradients._fields)
    plan, arrays, graph = joined(scaled_dot_product_attention_vjp, query, key, value, split_every,
                                 options)
    output = output_of(plan, graph, arrays["value"].shape[-1])

    def pullback(grad_output: DaskOrArray,
                 grad_lse: DaskOrArray | None = None) -> ScaledDotProductAttentionGradients:
        """The gradients of a loss by name, from those by the output and by lse (or None: zeros)."""
        return _gradients(plan, output, arrays, wanted, grad_output, grad_lse)

    return output, pullback


@dataclass(frozen=True)
class BackwardPlan:
    """Of a pullback's call."""

    forward: Plan  # that has the gradients of its results among its arrays
    wanted: frozenset[str]
    token: str

    def name(self, what: str) -> str:
        return f"mha-{what}-{self.token}"


@dataclass(frozen=True)
class GradientPlan:
    """Of the gradient of one array."""

    backward: BackwardPlan
    array: str
    chunks: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]


def _gradients(plan: Plan, output: da.Array, arrays: dict[str, da.Array], wanted: set[str],
               grad_output: DaskOrArray,
               grad_lse: DaskOrArray | None) -> ScaledDotProductAttentionGradients:
    given = {"grad_output": _cut_like_result(grad_output, "grad_output", output.chunks, plan)}
    if grad_lse is not None:
        given["grad_lse"] = _cut_like_result(grad_lse, "grad_lse", output.chunks[:-1], plan)
    names = frozenset(name for name in ScaledDotProductAttentionGradients._fields
                      if name in wanted and name in arrays)
    backward = BackwardPlan(
        plan.with_arrays({name: (array, locator_of_result(array, plan.cuts))
                          for name, array in given.items()}),
        names, tokenize(plan.token, sorted(names), *(array.name for array in given.values())))
    name = backward.name("gradients")
    below = HighLevelGraph.from_collections(
        name, Tasks(write_parts, backward), [output, *arrays.values(), *given.values()])
    # The parts read what the output was rounded from; the output itself may be another by now, of
    # persist(), without what is below it.
    graph = HighLevelGraph(below.layers, {**below.dependencies, name: {
        plan.name("joined"), *(array.name for array in (*arrays.values(), *given.values()))}})
    found: dict[str, da.Array | None] = dict.fromkeys(ScaledDotProductAttentionGradients._fields)
    for array in names:
        of_array = GradientPlan(backward, array, arrays[array].chunks,
                                _type_of_gradient(array, arrays[array].dtype, plan))
        found[array] = array_of(backward.name(f"grad-{array}"), Tasks(write_sums, of_array), graph,
                                [name], of_array.chunks, of_array.dtype)
    return ScaledDotProductAttentionGradients(**found)


def _type_of_gradient(name: str, given: np.dtype[Any], plan: Plan) -> np.dtype[Any]:
    """Of halves among query, key and value it is theirs, else that of the arithmetic."""
    is_half = given.itemsize == 2 and given.kind in "fV" and name in ("query", "key", "value")
    return given.newbyteorder("=") if is_half else plan.call.computed


def _cut_like_result(array: Any, name: str, chunks: tuple[tuple[int, ...], ...],
                     plan: Plan) -> da.Array:
    shape = tuple(map(sum, chunks))
    found = as_dask(array, name)
    # The errors of a type, in the words of the pullback of one call.
    none = np.zeros((0, 1), plan.rounded)
    pullback = plain_vjp(none, none, none)[1]
    grads: dict[str, Any] = {"grad_output": none, "grad_lse": None}
    grads[name] = np.zeros((0, 1)[:1 if name == "grad_lse" else 2], found.dtype)
    pullback(**grads)
    if found.shape != shape:
        raise ValueError(f"{name}: got shape {found.shape}, wanted {shape}")
    return found.rechunk(chunks)


def write_parts(plan: BackwardPlan) -> dict[Key, Task]:
    """A task for each part, whose result is a dictionary of gradients."""
    written: dict[Key, Task] = {}
    forward, name = plan.forward, plan.name("gradients")
    for block in forward.blocks():
        joined = TaskRef((forward.name("joined"), *block))
        for part in forward.parts(
                block, ("grad_output", "grad_lse", "query", "key", "value", *ARRAYS)):
            key = (name, *part.numbers)
            written[key] = Task(key, tasks.differentiate, forward.call, part.place, plan.wanted,
                                joined, *part.references)
    return written


def write_sums(plan: GradientPlan) -> dict[Key, Task]:
    """For each chunk of an array the sum of what the parts that read it give; zeros where there is
    none."""
    forward, written = plan.backward.forward, dict[Key, Task]()
    _, locator = forward.inputs[plan.array]
    name, of_parts = plan.backward.name(f"grad-{plan.array}"), plan.backward.name("gradients")
    readers: dict[Key, list[Key]] = defaultdict(list)
    for block in forward.blocks():
        for part in forward.parts(block, ()):
            if plan.array == "sinks" and not part.place.has_sinks:
                continue
            chunk = tuple(0 if number < 0 else part.numbers[number] for number in locator)
            readers[chunk].append(part.numbers)
    for chunk in np.ndindex(*map(len, plan.chunks)):
        key = (name, *chunk)
        leaves = []
        for part_numbers in readers.get(chunk, ()):
            leaf = (plan.backward.name(f"part-{plan.array}"), *part_numbers)
            written[leaf] = Task(leaf, operator.getitem, TaskRef((of_parts, *part_numbers)),
                                 plan.array)
            leaves.append(leaf)
        total = leaves[0] if len(leaves) == 1 else (plan.backward.name(f"sum-{plan.array}"), *chunk)
        if not leaves:
            shape = tuple(sizes[at] for at, sizes in zip(chunk, plan.chunks, strict=True))
            written[key] = Task(key, np.zeros, shape, plan.dtype)
            continue
        join_by_tree(written, plan.backward.name(f"sums-{plan.array}"), total, leaves, tasks.add,
                     forward.split_every)
        written[key] = Task(key, tasks.rounded, TaskRef(total), plan.dtype)
    return written
