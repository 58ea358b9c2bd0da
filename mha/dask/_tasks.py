"""What runs in a task, on a worker: one part, or the join of several."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mha import _core
from mha._base.runtime import get_num_threads, threads
from mha._functions.merge_attention import merge_attention
from mha._functions.options import attention_options
from mha._functions.scaled_dot_product_attention import scaled_dot_product_attention
from mha._functions.scaled_dot_product_attention_backward import (
    scaled_dot_product_attention_backward,
)
from mha.dask._places import Place, first_numbers

Array = NDArray[Any]
Part = tuple[Array, Array, int]  # output, lse in float64, how many keys

ARRAYS = ("mask", "bias", "alibi", "relative_bias", "sinks", "key_lengths")


@dataclass(frozen=True)
class Call:
    """What all parts of a call have in common. The arrays among the options come with each part."""

    computed: np.dtype[Any]           # the type of the arithmetic
    key_len: int                      # of the whole
    given: dict[str, np.dtype[Any]]   # that of every array's chunks
    options: dict[str, Any] = field(default_factory=dict)  # the plain ones

    def options_of(self, place: Place, arrays: Sequence[Any]) -> dict[str, Any]:
        """The options of a part; arrays in the order of ARRAYS, None where not given."""
        given = {name: array for name, array in zip(ARRAYS, arrays, strict=True)
                 if array is not None}
        for name, array in given.items():
            if name in self.given:  # else a part of a BlockMask
                self.check(name, array)
        if "key_lengths" in given:
            check_lengths(given["key_lengths"], self.key_len)
            lengths = given["key_lengths"].astype(np.int64)
            given["key_lengths"] = np.clip(lengths - place.key, 0, place.keys)
        if not place.has_sinks:
            given.pop("sinks", None)
        return self.options | given | first_numbers(place, self.options)

    def check_rows(self, name: str, chunk: Array, rows: int) -> None:
        self.check(name, chunk)
        if chunk.shape[-2] != rows:
            raise ValueError(f"{name}: got a chunk of {chunk.shape[-2]} rows, wanted {rows} as the"
                             " dask array says")

    def check(self, name: str, chunk: Array) -> None:
        if chunk.dtype != self.given[name]:
            raise TypeError(f"{name}: got a chunk of {chunk.dtype}, wanted {self.given[name]} as"
                            " the dask array says")


def check_lengths(lengths: Array, key_len: int) -> None:
    wrong = lengths[(lengths < 0) | (lengths > key_len)]
    if wrong.size:
        raise ValueError(f"key_lengths: got {wrong[0]}, wanted lengths in [0, {key_len}]")


def share_of_cores() -> int:
    """How many threads a task may use: where others run beside it in this process, its part of
    those that a call would have."""
    worker_module = sys.modules.get("distributed.worker")
    if worker_module is not None:
        with contextlib.suppress(ValueError):  # not in a task of a worker
            tasks_at_a_time = worker_module.get_worker().state.nthreads
            return max(1, get_num_threads() // tasks_at_a_time)
    is_alone = (threading.current_thread() is threading.main_thread()
                and multiprocessing.parent_process() is None)
    return get_num_threads() if is_alone else 1


@contextlib.contextmanager
def _at(what: str, place: Place) -> Iterator[None]:
    """Runs a part with its share of the cores; errors say which part it was."""
    try:
        with threads(share_of_cores()):
            yield
    except Exception as error:
        error.add_note(f"mha.dask: {what}: {place}")
        raise


def attend(call: Call, place: Place, query: Array, key: Array, value: Array,
           *arrays: Any) -> Part:
    """Step 3 of the figure, for a part."""
    with _at("attention", place):
        for name, chunk, rows in (("query", query, place.queries), ("key", key, place.keys),
                                  ("value", value, place.keys)):
            call.check_rows(name, chunk, rows)
        output, lse = _attend(call, query, key, value, call.options_of(place, arrays))
        return output, lse, key.shape[-2]


def _attend(call: Call, query: Array, key: Array, value: Array, options: dict[str, Any],
            return_weights: bool = False) -> tuple[Array, ...]:
    """The output, the weights where asked for, and lse in float64: in float32, joins and weights
    would have its rounding, which grows with large scores, as a factor."""
    chosen = attention_options(scaled_dot_product_attention, options)
    return _core.scaled_dot_product_attention(
        query.astype(call.computed, copy=False), key, value, chosen, exact_lse=True,
        return_weights=return_weights)


def join(parts: Sequence[Part]) -> Part:
    """Of one block of queries. A row that sees no key in any part has the mean of the parts' means,
    each by its keys: zeros, or under empty_rows="uniform" the mean of all values."""
    outputs, lses, keys = zip(*parts, strict=True)
    with threads(share_of_cores()):
        joined, lse = merge_attention(outputs, lses)  # float64, as the lses are
    output = joined.astype(outputs[0].dtype, copy=False)
    empty = lse == -np.inf
    if empty.any() and sum(keys):
        output[empty] = sum(part[empty] * output.dtype.type(count / sum(keys))
                            for part, count in zip(outputs, keys, strict=True) if count)
    return output, lse, sum(keys)


def result(part: Part, at: int, dtype: np.dtype[Any]) -> Array:
    """The output or lse, in this type."""
    return rounded((part[0], part[1])[at], dtype)


def weights(call: Call, place: Place, whole: Part, query: Array, key: Array,
            *arrays: Any) -> Array:
    """The part's weights among all keys: those among its own, times its share of each row."""
    with _at("weights", place):
        options = call.options_of(place, arrays) | {"dropout": 0.0, "empty_rows": "zeros"}
        _, part, lse = _attend(call, query, key, key[..., :0], options, return_weights=True)
        empty = whole[1] == -np.inf
        with np.errstate(invalid="ignore"):  # nothing seen here, nor anywhere
            share = np.where(empty, 0, np.exp(lse - whole[1]))
        part *= share[..., None].astype(part.dtype)
        if call.options.get("empty_rows") == "uniform" and call.key_len:
            part[empty] = 1 / call.key_len
        return part


def differentiate(call: Call, place: Place, wanted: frozenset[str], whole: Part,
                  grad_output: Array, grad_lse: Array | None, query: Array, key: Array,
                  value: Array, *arrays: Any) -> dict[str, Array]:
    """What the part adds to the gradients of its chunks, by name, in the type of the
    arithmetic."""
    with _at("gradients", place):
        call.check_rows("grad_output", grad_output, place.queries)
        options = call.options_of(place, arrays)
        for name in wanted & options.keys() & {"bias", "alibi", "relative_bias", "sinks"}:
            options[name] = options[name].astype(call.computed, copy=False)
        output, lse, _ = whole
        grad_output = grad_output.astype(call.computed, copy=False)
        empty = lse == -np.inf
        if call.options.get("empty_rows") == "uniform" and place.keys and empty.any():
            # Their output is the mean of all values: the mean of these has this part of it.
            grad_output = np.where(empty[..., None], grad_output * (place.keys / call.key_len),
                                   grad_output).astype(call.computed, copy=False)
        query, key, value = (x.astype(call.computed, copy=False) for x in (query, key, value))
        found = scaled_dot_product_attention_backward(
            query, key, value, output, lse, grad_output, grad_lse=grad_lse, wrt=wanted, **options)
        return {name: gradient for name, gradient in found._asdict().items()
                if gradient is not None}


def add(gradients: Sequence[Array]) -> Array:
    """In their order."""
    total = gradients[0].copy()
    for other in gradients[1:]:
        total += other
    return total


def rounded(array: Array, dtype: np.dtype[Any]) -> Array:
    return array.astype(dtype, copy=False)
