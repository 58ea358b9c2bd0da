"""Scaled dot-product attention of a ragged batch: sequences of unequal lengths, nothing padded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, Unpack, overload

from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.arguments import wanted_names
from mha._base.keywords import other_names
from mha._functions.dropout import drawn
from mha._functions.gradients import Pullback, VarlenGradients, pullback_of
from mha._functions.options import VARLEN, VarlenKeywords, some_options, takes_options

Array = NDArray[Any]

__all__ = ["scaled_dot_product_attention_varlen", "scaled_dot_product_attention_varlen_vjp"]

other_names("cu_seqlens cu_seqlens_q cu_seqlens_k seqlens offsets", "query_starts",
            "query_starts= and key_starts=, where each sequence begins, and the total")
other_names("key_lengths", "query_starts",
            "query_starts= and key_starts=, in which no padding stands")
other_names("mask bias attn_mask attn_bias", "query_starts",
            "causal=, window=, alibi= or relative_bias=, or one call of"
            " scaled_dot_product_attention a sequence")
other_names("return_weights out", "query_starts",
            "nothing: scaled_dot_product_attention has it, one call a sequence")


@overload
def scaled_dot_product_attention_varlen(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, query_starts: ArrayLike,
        key_starts: ArrayLike | None = ..., *, return_lse: Literal[False] = ...,
        **options: Unpack[VarlenKeywords]) -> Array: ...
@overload
def scaled_dot_product_attention_varlen(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, query_starts: ArrayLike,
        key_starts: ArrayLike | None = ..., *, return_lse: Literal[True],
        **options: Unpack[VarlenKeywords]) -> tuple[Array, Array]: ...
@overload
def scaled_dot_product_attention_varlen(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, query_starts: ArrayLike,
        key_starts: ArrayLike | None = ..., *, return_lse: bool = ...,
        **options: Unpack[VarlenKeywords]) -> Any: ...
@takes_options(VARLEN, before="return_lse")
def scaled_dot_product_attention_varlen(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, query_starts: ArrayLike,
        key_starts: ArrayLike | None = None, *, return_lse: bool = False,
        **options: Unpack[VarlenKeywords]) -> Any:
    """`scaled_dot_product_attention` of sequences of unequal lengths, each by itself, in one call.

    The rows of all sequences stand one behind the other. Work and memory follow the real lengths,
    and each sequence gets the bits that it gets alone.

    Parameters
    ----------
    query : array (total_query_len, heads, head_dim)
    key : array (total_key_len, kv_heads, head_dim)
        heads is a multiple of kv_heads.
    value : array (total_key_len, kv_heads, value_head_dim)
    query_starts : ints (sequences + 1,)
        Sequence s is rows query_starts[s] to query_starts[s + 1], none where they are equal: from 0
        to total_query_len, never falling.
    key_starts : ints (sequences + 1,), by default query_starts
        Likewise for key and value.
    query_offset : int or ints (sequences,), by default key_len - query_len of each sequence
    The rest : as in `scaled_dot_product_attention`; a sequence's batch index for dropout is s.

    Returns
    -------
    output (total_query_len, heads, value_head_dim), and lse (heads, total_query_len) where asked
    for.

    Raises
    ------
    ValueError, TypeError: as `scaled_dot_product_attention`; starts that do not begin with 0, that
    fall, or that do not end with the total.

    Source: Dao 2023, "FlashAttention-2", whose package names it varlen.

    >>> q = np.ones((10, 8, 64), np.float32)
    >>> mha.scaled_dot_product_attention_varlen(q, q, q, [0, 3, 10], causal=True).shape
    (10, 8, 64)
    """
    chosen = some_options(scaled_dot_product_attention_varlen, options, VARLEN)
    with drawn(chosen) as drawn_options:
        return _core.scaled_dot_product_attention_varlen(
            query, key, value, query_starts, key_starts, drawn_options, return_lse=return_lse)


@takes_options(VARLEN, before="wrt")
def scaled_dot_product_attention_varlen_vjp(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, query_starts: ArrayLike,
        key_starts: ArrayLike | None = None, *, wrt: Collection[str] | None = None,
        **options: Unpack[VarlenKeywords]) -> tuple[Array, Pullback[VarlenGradients]]:
    """`scaled_dot_product_attention_varlen` and its gradients: the vector-Jacobian product.

    Parameters
    ----------
    wrt : names out of "query", "key", "value", "alibi", "relative_bias", "sinks", optional
        Whose gradients are wanted; by default all of them.
    The rest : as in `scaled_dot_product_attention_varlen`. The arrays but for the starts are kept,
        not copied: they must not change before the pullback is called.

    Returns
    -------
    (output, pullback). pullback(grad_output, grad_lse=None) takes the gradients of a loss with
    respect to the output (total_query_len, heads, value_head_dim) and, if it depends on it, the
    log-sum-exp (heads, total_query_len); it returns those with respect to query, key, value, alibi,
    relative_bias and sinks, each shaped as the argument; the last three are summed over the
    sequences. It may be called again.

    Raises
    ------
    ValueError, TypeError: as `scaled_dot_product_attention_varlen`; an unknown name in wrt.

    Source: Dao et al. 2022, "FlashAttention", appendix B.4.

    >>> q = np.ones((10, 8, 64), np.float32)
    >>> output, pullback = mha.scaled_dot_product_attention_varlen_vjp(q, q, q, [0, 3, 10])
    >>> pullback(np.ones_like(output)).query.shape
    (10, 8, 64)
    """
    wanted = wanted_names(wrt, VarlenGradients._fields)
    chosen = some_options(scaled_dot_product_attention_varlen_vjp, options, VARLEN)
    with drawn(chosen) as drawn_options:
        output, saved = _core.scaled_dot_product_attention_varlen(
            query, key, value, query_starts, key_starts, drawn_options, save=True)
    return output, pullback_of(_core.scaled_dot_product_attention_varlen_backward, saved, wanted,
                               VarlenGradients)
