"""What dot_product_attention of Linen and NNX share: attention on heads behind the lengths."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._functions.scaled_dot_product_attention import scaled_dot_product_attention
from mha.compat._shared.dtypes import as_own, to_compute
from mha.compat._shared.flags import as_flag
from mha.compat._shared.layers import checked_dropout
from mha.compat._shared.projections import as_visible, over_scores
from mha.compat.flax._attention import (
    chosen_dtype,
    generator_of,
    real_array,
    with_shared_dropout,
)

Array = NDArray[Any]


def attend_heads(query: ArrayLike, key: ArrayLike, value: ArrayLike, *, bias: ArrayLike | None,
                 mask: ArrayLike | None, shared_dropout: bool, dropout_rng: Any,
                 dropout_rate: float, deterministic: bool, dtype: DTypeLike | None, module: Any,
                 causal: bool, collection: str | None, grouped: bool,
                 rounds_weights: bool = True) -> Array:
    """query (batch..., query_len, num_heads, head_dim) -> output (batch..., query_len, num_heads,
    value_head_dim). The module sows into the collection of this name, or into NNX' Intermediate;
    grouped: whether heads may share keys."""
    given = [real_array(array, name) for array, name in (
        (query, "query"), (key, "key"), (value, "value"))]
    _check_shapes(given[0], given[1], given[2], grouped)
    *batch, query_len, heads, _ = given[0].shape
    key_len = given[1].shape[-3]
    scores = tuple(batch), (heads,), (query_len,), (key_len,)
    rate = checked_dropout(dropout_rate, "dropout_rate")
    dropping = rate > 0 and not as_flag(deterministic, "deterministic")
    if dropping and dropout_rng is None:
        raise ValueError("dropout_rng: got None with dropout, wanted a key, or deterministic=True")
    seed = (int(generator_of(dropout_rng, "dropout_rng").integers(2**64, dtype=np.uint64))
            if dropping else None)
    chosen = chosen_dtype(dtype, *given)
    # heads: (batch, num_heads, len, head_dim)
    laid_out = [to_compute(as_own(array, chosen)).reshape(math.prod(batch), *array.shape[-3:])
                .swapaxes(1, 2) for array in given]
    function: Any = (with_shared_dropout if dropping and shared_dropout
                     else scaled_dot_product_attention)
    found = function(
        *laid_out,
        mask=None if mask is None else over_scores(as_visible(mask, "mask"), "mask", scores),
        bias=None if bias is None else over_scores(
            to_compute(real_array(bias, "bias")), "bias", scores),
        causal=causal, query_offset=0, empty_rows="uniform", dropout=rate if dropping else 0.0,
        rng=seed, return_weights=module is not None)
    output, *weights = found if module is not None else (found,)
    if weights:
        sown = weights[0].reshape(*batch, heads, query_len, key_len)
        where = collection or importlib.import_module("flax.nnx").Intermediate
        module.sow(where, "attention_weights", as_own(sown, chosen) if rounds_weights else sown)
    output = output.swapaxes(1, 2).reshape(*batch, query_len, heads, output.shape[-1])
    return as_own(output, chosen)


def _check_shapes(query: Array, key: Array, value: Array, grouped: bool) -> None:
    if query.ndim < 3:
        raise ValueError(f"query: got shape {query.shape}, wanted (batch..., len, num_heads,"
                         " head_dim)")
    for name, array in (("key", key), ("value", value)):
        if array.ndim != query.ndim or array.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name}: got shape {array.shape}, wanted the batch axes of query"
                             f" {query.shape}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: got shape {key.shape}, wanted query's head_dim {query.shape[-1]}")
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(f"value: got shape {value.shape}, wanted key's length and heads"
                         f" {key.shape[-3:-1]}")
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if heads % max(kv_heads, 1) or (heads != kv_heads and not grouped):
        wanted = f"a divisor of query's {heads}" if grouped else f"query's {heads}"
        raise ValueError(f"key: got {kv_heads} heads, wanted {wanted}")
