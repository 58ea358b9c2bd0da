"""Scaled dot-product attention, step 3 of the figure, and its gradients."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, Never, Unpack, overload

from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.arguments import wanted_names
from mha._functions.dropout import drawn
from mha._functions.gradients import Pullback, ScaledDotProductAttentionGradients, pullback_of
from mha._functions.options import ATTENTION, AttentionKeywords, attention_options, takes_options

Array = NDArray[Any]

__all__ = ["scaled_dot_product_attention", "scaled_dot_product_attention_vjp"]


@overload
def scaled_dot_product_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *,
        return_weights: Literal[False] = ..., return_lse: Literal[False] = ...,
        out: Array | None = ..., **options: Unpack[AttentionKeywords]) -> Array: ...
@overload
def scaled_dot_product_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *, return_weights: Literal[True],
        return_lse: Literal[True], out: Array | None = ...,
        **options: Unpack[AttentionKeywords]) -> tuple[Array, Array, Array]: ...
@overload
def scaled_dot_product_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *, return_weights: Literal[True],
        return_lse: Literal[False] = ..., out: Array | None = ...,
        **options: Unpack[AttentionKeywords]) -> tuple[Array, Array]: ...
@overload
def scaled_dot_product_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *,
        return_weights: Literal[False] = ..., return_lse: Literal[True], out: Array | None = ...,
        **options: Unpack[AttentionKeywords]) -> tuple[Array, Array]: ...
@overload
def scaled_dot_product_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *, return_weights: bool = ...,
        return_lse: bool = ..., out: Array | None = ...,
        **options: Unpack[AttentionKeywords]) -> Any: ...
@takes_options(ATTENTION, before="return_weights")
def scaled_dot_product_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *more: Never,
        return_weights: bool = False, return_lse: bool = False, out: Array | None = None,
        **options: Unpack[AttentionKeywords]) -> Any:
    """softmax(query @ key^T * scale) @ value over the keys that each query may see.

    Parameters
    ----------
    query : array (query_len, head_dim), (batch, query_len, head_dim) or
        (..., heads, query_len, head_dim)
    key : array (..., kv_heads, key_len, head_dim)
        The same layout; heads is a multiple of kv_heads, and each key head serves
        heads / kv_heads consecutive query heads.
    value : array (..., kv_heads, key_len, value_head_dim)
    {options}
    return_weights, return_lse : bool
        Return the weights (before dropout) and the log-sum-exp of the scores too.
    out : array, optional
        Where to write the output: exact shape and type, no overlap with an input.

    Returns
    -------
    output (..., heads, query_len, value_head_dim); then weights (..., heads, query_len, key_len)
    and lse (..., heads, query_len) where asked for, as a tuple in this order.

    Raises
    ------
    ValueError: a shape, size or option that does not fit. TypeError: a type other than float16,
    bfloat16, float32, float64 or integers, float16 with bfloat16, bfloat16 with integers, or a mask
    that is not bool. Both name the argument.

    float16 and bfloat16 (that of ml_dtypes) are computed in float32; the output is rounded once,
    weights and lse are float32. Beside a float32 query, key and value may be halves.

    Source: Vaswani et al. 2017, section 3.2.1; without a score matrix as in Dao et al. 2022.

    >>> q = np.ones((2, 8, 4, 64), np.float32)
    >>> mha.scaled_dot_product_attention(q, q, q, causal=True).shape
    (2, 8, 4, 64)
    """
    chosen = attention_options(scaled_dot_product_attention, options, more)
    with drawn(chosen) as drawn_options:
        return _core.scaled_dot_product_attention(
            query, key, value, drawn_options, return_weights=return_weights,
            return_lse=return_lse, out=out)


@takes_options(ATTENTION, before="wrt")
def scaled_dot_product_attention_vjp(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *more: Never,
        wrt: Collection[str] | None = None, **options: Unpack[AttentionKeywords],
        ) -> tuple[Array, Pullback[ScaledDotProductAttentionGradients]]:
    """`scaled_dot_product_attention` and its gradients: the vector-Jacobian product.

    Parameters
    ----------
    wrt : names out of "query", "key", "value", "bias", "alibi", "relative_bias", "sinks", optional
        Whose gradients are wanted; by default all of them.
    The rest : as in `scaled_dot_product_attention`. The arrays are kept, not copied: they must
        not change before the pullback is called.

    Returns
    -------
    (output, pullback). pullback(grad_output, grad_lse=None) takes the gradients of a loss with
    respect to the output (..., heads, query_len, value_head_dim) and, if it depends on it, the
    log-sum-exp (..., heads, query_len); it returns those with respect to query, key, value, bias,
    alibi, relative_bias and sinks, each shaped as the argument. It may be called again. Its memory
    is linear in the length: the weights are computed again, block by block.

    Raises
    ------
    ValueError, TypeError: as `scaled_dot_product_attention`; an unknown name in wrt.

    Source: Dao et al. 2022, "FlashAttention", appendix B.4.

    >>> q = np.ones((2, 8, 4, 64), np.float32)
    >>> output, pullback = mha.scaled_dot_product_attention_vjp(q, q, q, causal=True)
    >>> pullback(np.ones_like(output)).query.shape
    (2, 8, 4, 64)
    """
    wanted = wanted_names(wrt, ScaledDotProductAttentionGradients._fields)
    chosen = attention_options(scaled_dot_product_attention_vjp, options, more)
    with drawn(chosen) as drawn_options:
        output, saved = _core.scaled_dot_product_attention(query, key, value, drawn_options,
                                                          save=True)
    return output, pullback_of(_core.scaled_dot_product_attention_backward, saved, wanted,
                               ScaledDotProductAttentionGradients)
