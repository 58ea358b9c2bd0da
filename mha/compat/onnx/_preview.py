"""The operator of ai.onnx.preview: attention whose scores and weights the caller modifies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.dtypes import RAW_BFLOAT16, halves_as_float32, in_type, rounded, shown, widened
from mha._base.pieces import converted
from mha._functions.scaled_dot_product_attention import scaled_dot_product_attention
from mha.compat.onnx._heads import PRECISIONS, floats, in_precision

Modifier = Callable[[NDArray[Any]], ArrayLike]


def flex_attention(Q: ArrayLike, K: ArrayLike, V: ArrayLike, *, prob_mod: Modifier | None = None,
                   scale: float | None = None, score_mod: Modifier | None = None,
                   softmax_precision: int | None = None) -> NDArray[Any]:
    """FlexAttention of ai.onnx.preview, version 1.

    Parameters
    ----------
    Q : array (batch, q_num_heads, q_len, head_size)
    K, V : arrays (batch, kv_num_heads, kv_len, head_size) and (..., v_head_size)
        Query heads share those of K and V in groups.
    score_mod : function, optional
        Takes the scaled scores (batch, q_num_heads, q_len, kv_len) and returns what goes into
        softmax, of the same shape; -inf hides a key. It and prob_mod cost memory for all scores.
    prob_mod : function, optional
        Takes the weights, of that shape, and returns what multiplies V.
    scale : float, by default 1 / sqrt(head_size)
    softmax_precision : 1, 10, 11 or 16 (onnx.TensorProto's types), optional
        The type of what score_mod and prob_mod are given, by default float64 where Q is, else
        float32. 11 computes in float64; the others change nothing else: float32 is the least.

    Returns
    -------
    array Y (batch, q_num_heads, q_len, v_head_size), of the type of Q. A query all of whose scores
    are -inf gives zeros.

    Raises
    ------
    ValueError: shapes that do not fit, those of what the functions return too, a precision that
    there is not. TypeError: arrays of other types.

    Source: the ONNX standard, operator FlexAttention; Dong et al. 2024, "Flex Attention".

    >>> q = np.ones((2, 8, 10, 64), np.float32)
    >>> flex_attention(q, q, q, score_mod=lambda scores: np.tanh(scores / 20) * 20).shape
    (2, 8, 10, 64)
    """
    query, key, value = floats(("Q", Q), ("K", K), ("V", V))
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"Q, K, V: got shapes {query.shape}, {key.shape}, {value.shape}, wanted"
                         " 4 dimensions each")
    dtype = query.dtype
    query, key, value = in_precision(softmax_precision, query, key, value)
    if score_mod is None and prob_mod is None:
        return in_type(scaled_dot_product_attention(query, key, value, scale=scale), dtype)

    query, key, value = (halves_as_float32(array) for array in (query, key, value))
    given_type = PRECISIONS[softmax_precision or (11 if query.dtype == np.float64 else 1)]
    scores = _scores(query, key, value, scale)
    if score_mod is not None:
        scores = _modified(score_mod, "score_mod", scores, given_type)
    # From here on the scores are a bias of queries and keys without columns.
    query, key = query[..., :0], key[..., :0]
    if prob_mod is None:
        return in_type(scaled_dot_product_attention(query, key, value, bias=scores), dtype)
    _, weights = scaled_dot_product_attention(query, key, value, bias=scores, return_weights=True)
    weights = _modified(prob_mod, "prob_mod", weights, given_type)
    return in_type(weights @ _for_each_query(value, query), dtype)


def _for_each_query(heads: NDArray[Any], query: NDArray[Any]) -> NDArray[Any]:
    """Heads of keys or values, repeated for the query heads that share them."""
    return np.repeat(heads, query.shape[1] // max(heads.shape[1], 1), axis=1)


def _scores(query: NDArray[Any], key: NDArray[Any], value: NDArray[Any],
            scale: float | None) -> NDArray[Any]:
    from mha.reference import dot_product_scores

    shapes = query.shape, key.shape, value.shape
    if (query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3]
            or query.shape[3] != key.shape[3] or query.shape[1] % max(key.shape[1], 1)):
        raise ValueError(f"Q, K, V: got shapes {shapes}, wanted (batch, q_num_heads, q_len,"
                         " head_size), (batch, kv_num_heads, kv_len, head_size) and (...,"
                         " v_head_size), q_num_heads a multiple of kv_num_heads")
    return dot_product_scores(query, _for_each_query(key, query), scale=scale)


def _modified(modify: Modifier, name: str, array: NDArray[Any], precision: str) -> NDArray[Any]:
    """What the function makes of the array, which it is given in this precision."""
    given = shown(rounded(array, RAW_BFLOAT16)) if precision == "BFLOAT16" else in_type(
        array, np.dtype({"FLOAT": "f4", "FLOAT16": "f2", "DOUBLE": "f8"}[precision]))
    result, = floats((name, modify(given)))
    if result.shape != array.shape:
        raise ValueError(f"{name}: got shape {result.shape} back, wanted {array.shape}")
    return converted(widened(result), array.dtype)
