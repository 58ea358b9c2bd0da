"""Attention of a ragged batch in plain NumPy: a loop over the sequences, there and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._functions.dropout import seed_from
from mha.reference._backward import Gradients, Pullback, scaled_dot_product_attention_vjp
from mha.reference._forward import _same_type, scaled_dot_product_attention

Array = NDArray[Any]
OF_ALL = ("alibi", "relative_bias", "sinks")  # one for all sequences


class Sequence(NamedTuple):
    """One sequence as a call of its own."""

    queries: slice        # its rows of query
    keys: slice           # and of key and value
    arrays: list[Array]   # query, key, value: (items, heads, len, columns)
    item: int             # which of these batch items it is
    options: dict[str, Any]


def scaled_dot_product_attention_varlen(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, query_starts: ArrayLike,
        key_starts: ArrayLike | None = None, *, return_lse: bool = False, **options: Any) -> Any:
    """query (total_query_len, heads, head_dim), key (total_key_len, kv_heads, head_dim), value
    (total_key_len, kv_heads, value_head_dim) -> output (total_query_len, heads, value_head_dim),
    and lse (heads, total_query_len). Sequence s is rows starts[s] to starts[s + 1]."""
    arrays = _same_type(query, key, value)
    total_len, heads = arrays[0].shape[:2]
    is_complex = any(np.asarray(options.get(name)).dtype.kind == "c" for name in OF_ALL)
    dtype = np.result_type(arrays[0], *[np.complex64] * is_complex)  # for complex steps
    output = np.empty((total_len, heads, arrays[2].shape[2]), dtype)
    lse = np.empty((heads, total_len), dtype)
    for one in _sequences(arrays, query_starts, key_starts, _seeded(options)):
        attended, sums = scaled_dot_product_attention(*one.arrays, return_lse=True, **one.options)
        output[one.queries] = np.swapaxes(attended[one.item], 0, 1)
        lse[:, one.queries] = sums[one.item]
    return (output, lse) if return_lse else output


def scaled_dot_product_attention_varlen_vjp(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, query_starts: ArrayLike,
        key_starts: ArrayLike | None = None, **options: Any) -> tuple[Array, Pullback]:
    """The gradients of alibi, relative_bias and sinks are sums over the sequences."""
    arrays = _same_type(query, key, value)
    options = _seeded(options)
    output = scaled_dot_product_attention_varlen(query, key, value, query_starts, key_starts,
                                                 **options)
    given = [name for name in OF_ALL if options.get(name) is not None]

    def pullback(grad_output: Array, grad_lse: Array | None = None) -> Gradients:
        gradients = dict(zip(("query", "key", "value"), map(np.zeros_like, arrays), strict=True))
        gradients |= {name: np.zeros(np.shape(options[name]), output.dtype) for name in given}
        for one in _sequences(arrays, query_starts, key_starts, options):
            attended, one_pullback = scaled_dot_product_attention_vjp(*one.arrays, **one.options)
            of_output = np.zeros_like(attended)  # the other items have no part in the loss
            of_output[one.item] = np.swapaxes(grad_output[one.queries], 0, 1)
            of_lse = np.zeros(attended.shape[:-1], attended.dtype)
            if grad_lse is not None:
                of_lse[one.item] = grad_lse[:, one.queries]
            found = one_pullback(of_output, of_lse)
            for name, rows in (("query", one.queries), ("key", one.keys), ("value", one.keys)):
                gradients[name][rows] = np.swapaxes(found[name][one.item], 0, 1)
            for name in given:
                gradients[name] += found[name]
        return gradients

    return output, pullback


def _sequences(arrays: list[Array], query_starts: ArrayLike, key_starts: ArrayLike | None,
               options: dict[str, Any]) -> Iterator[Sequence]:
    """With dropout, whose mask goes by the batch index, sequence s is behind s others like it."""
    offset = options.get("query_offset")
    of_query = np.asarray(query_starts)
    of_key = of_query if key_starts is None else np.asarray(key_starts)
    for s in range(len(of_query) - 1):
        queries, keys = (slice(starts[s], starts[s + 1]) for starts in (of_query, of_key))
        item = s if options.get("dropout") else 0
        alone = [np.swapaxes(array[at], 0, 1) for array, at in
                 zip(arrays, (queries, keys, keys), strict=True)]
        own = options if offset is None or np.ndim(offset) == 0 else (
            options | {"query_offset": np.asarray(offset)[s]})
        yield Sequence(queries, keys, [np.broadcast_to(array, (item + 1, *array.shape))
                                       for array in alone], item, own)


def _seeded(options: dict[str, Any]) -> dict[str, Any]:
    """One seed for all sequences."""
    return options | {"rng": seed_from(options.get("rng"))} if options.get("dropout") else options
