"""Ragged batches for the tests: random ones, and their sequences as calls of their own."""

import numpy as np
from half_types import HALVES

import mha

LENGTHS = (0, 1, 7, 9, 63, 65, 129, 1000)
OF_ALL = ("alibi", "relative_bias", "sinks")


def starts_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def ragged(rng, query_lengths, key_lengths=None, heads=4, kv_heads=2, head_dim=16,
           value_head_dim=12, dtype=np.float64):
    """(query, key, value, query_starts, key_starts)."""
    starts = starts_of(query_lengths)
    key_starts = starts if key_lengths is None else starts_of(key_lengths)
    shapes = ((starts[-1], heads, head_dim), (key_starts[-1], kv_heads, head_dim),
              (key_starts[-1], kv_heads, value_head_dim))
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    return *arrays, starts, key_starts


def option_values(rng, heads, sequences):
    """Values for every option of a ragged batch."""
    return {
        "alibi": [rng.uniform(0, 1, heads)],
        "relative_bias": [rng.standard_normal((heads, 9)), rng.standard_normal((1, 33)),
                          rng.standard_normal((heads, 1))],
        "sinks": [3 * rng.standard_normal(heads)],
        "causal": [True],
        "query_offset": [0, -3, rng.integers(-5, 9, sequences), rng.integers(0, 99, sequences)],
        "window": [(3, 2), (20, None), (0, 0), (150, 0)],
        "scale": [-0.3],
        "softcap": [2.0],
        "empty_rows": ["uniform"],
        "dropout": [0.4],
    }


def alone(array, starts, s, items):
    """Sequence s as (items, heads, len, columns): the last of so many batch items, the others
    empty of information."""
    rows = np.swapaxes(array[starts[s]:starts[s + 1]], 0, 1)
    batch = np.zeros((items, *rows.shape), array.dtype)
    batch[-1] = rows
    return batch


def own_options(options, s):
    offset = options.get("query_offset")
    return options if offset is None or np.ndim(offset) == 0 else options | {
        "query_offset": int(offset[s])}


def dtype_of_lse(query):
    return np.float32 if query.dtype in HALVES else query.dtype


def one_by_one(query, key, value, query_starts, key_starts, **options):
    """(output, lse) by one call of mha.scaled_dot_product_attention a sequence."""
    output = np.empty((*query.shape[:2], value.shape[2]), query.dtype)
    lse = np.empty((query.shape[1], len(query)), dtype_of_lse(query))
    for s in range(len(query_starts) - 1):
        items = s + 1 if "dropout" in options else 1
        got = mha.scaled_dot_product_attention(
            alone(query, query_starts, s, items), alone(key, key_starts, s, items),
            alone(value, key_starts, s, items), return_lse=True, **own_options(options, s))
        rows = slice(query_starts[s], query_starts[s + 1])
        output[rows] = np.swapaxes(got[0][-1], 0, 1)
        lse[:, rows] = got[1][-1]
    return output, lse


def gradients_one_by_one(query, key, value, query_starts, key_starts, grad_output, grad_lse,
                         **options):
    """Those of query, key and value."""
    gradients = [np.empty_like(array) for array in (query, key, value)]
    for s in range(len(query_starts) - 1):
        items = s + 1 if "dropout" in options else 1
        rows = slice(query_starts[s], query_starts[s + 1])
        _, pullback = mha.scaled_dot_product_attention_vjp(
            alone(query, query_starts, s, items), alone(key, key_starts, s, items),
            alone(value, key_starts, s, items), **own_options(options, s))
        of_lse = np.zeros((items, *grad_lse[:, rows].shape), grad_lse.dtype)
        of_lse[-1] = grad_lse[:, rows]
        found = pullback(alone(grad_output, query_starts, s, items), of_lse)
        keys = slice(key_starts[s], key_starts[s + 1])
        for to, at, one in zip(gradients, (rows, keys, keys), found[:3], strict=True):
            to[at] = np.swapaxes(one[-1], 0, 1)
    return gradients
