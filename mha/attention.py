"""Scaled dot-product, additive and multi-head attention as functions (step 3, and all five)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, Never, Unpack, overload

from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha.arguments import wanted_names
from mha.dropout import drawn
from mha.gradients import (
    AdditiveAttentionGradients,
    MultiHeadAttentionGradients,
    Pullback,
    ScaledDotProductAttentionGradients,
    pullback_of,
)
from mha.keywords import names_its_keywords, unknown_keyword
from mha.options import (
    ADDITIVE,
    ATTENTION,
    AdditiveKeywords,
    AttentionKeywords,
    attention_options,
    some_options,
    takes_options,
)
from mha.preparation import prepared_core
from mha.rotary import Rotary

Array = NDArray[Any]

__all__ = ["additive_attention", "additive_attention_vjp", "merge_attention",
           "multi_head_attention", "multi_head_attention_vjp", "scaled_dot_product_attention",
           "scaled_dot_product_attention_vjp"]


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
        output, kept = _core.scaled_dot_product_attention(query, key, value, drawn_options,
                                                          keep=True)
    return output, pullback_of(_core.scaled_dot_product_attention_backward, kept, wanted,
                               ScaledDotProductAttentionGradients)


@overload
def additive_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        w_v: ArrayLike, *, return_weights: Literal[False] = ...,
        **options: Unpack[AdditiveKeywords]) -> Array: ...
@overload
def additive_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        w_v: ArrayLike, *, return_weights: Literal[True],
        **options: Unpack[AdditiveKeywords]) -> tuple[Array, Array]: ...
@overload
def additive_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        w_v: ArrayLike, *, return_weights: bool = ...,
        **options: Unpack[AdditiveKeywords]) -> Any: ...
@takes_options(ADDITIVE, before="return_weights")
def additive_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        w_v: ArrayLike, *more: Never, return_weights: bool = False,
        **options: Unpack[AdditiveKeywords]) -> Any:
    """Attention with the scores w_v . tanh(query W_q + key W_k), for unlike query and key sizes.

    Parameters
    ----------
    query : array (..., heads, query_len, query_dim)
    key : array (..., kv_heads, key_len, key_dim)
    value : array (..., kv_heads, key_len, value_dim)
        The layouts of `scaled_dot_product_attention`: one head in 2-D and 3-D.
    W_q, W_k, w_v : arrays (query_dim, hidden), (key_dim, hidden), (hidden,)
    The rest : as in `scaled_dot_product_attention`.

    Returns
    -------
    output (..., heads, query_len, value_dim), and the weights where asked for.

    Raises
    ------
    ValueError, TypeError: as `scaled_dot_product_attention`.

    Source: Bahdanau, Cho & Bengio 2015, section 3.1 and appendix A.1.2.

    >>> q, k, v = np.ones((2, 1, 20)), np.ones((2, 10, 2)), np.ones((2, 10, 4))
    >>> mha.additive_attention(q, k, v, np.ones((20, 8)), np.ones((2, 8)), np.ones(8)).shape
    (2, 1, 4)
    """
    chosen = some_options(additive_attention, options, ADDITIVE, more)
    with drawn(chosen) as drawn_options:
        return _core.additive_attention(query, key, value, W_q, W_k, w_v, drawn_options,
                                        return_weights=return_weights)


@takes_options(ADDITIVE, before="wrt")
def additive_attention_vjp(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        w_v: ArrayLike, *more: Never, wrt: Collection[str] | None = None,
        **options: Unpack[AdditiveKeywords]) -> tuple[Array, Pullback[AdditiveAttentionGradients]]:
    """`additive_attention` and its gradients: the vector-Jacobian product.

    Parameters
    ----------
    wrt : names out of "query", "key", "value", "W_q", "W_k", "w_v", optional
        Whose gradients are wanted; by default all of them.
    The rest : as in `additive_attention`. The arrays are kept, not copied: they must not change
        before the pullback is called.

    Returns
    -------
    (output, pullback). pullback(grad_output, grad_lse=None) takes the gradients of a loss with
    respect to the output (..., heads, query_len, value_dim) and, if it depends on it, the
    log-sum-exp (..., heads, query_len); it returns those with respect to the arguments by name,
    each shaped as the argument. It may be called again. Its memory is linear in the length.

    Raises
    ------
    ValueError, TypeError: as `additive_attention`; an unknown name in wrt.

    Source: Bahdanau, Cho & Bengio 2015, appendix A.1.2; recomputation as in Dao et al. 2022.

    >>> q, k, v = np.ones((2, 1, 20)), np.ones((2, 10, 2)), np.ones((2, 10, 4))
    >>> output, pullback = mha.additive_attention_vjp(
    ...     q, k, v, np.ones((20, 8)), np.ones((2, 8)), np.ones(8))
    >>> pullback(np.ones_like(output)).w_v.shape
    (8,)
    """
    wanted = wanted_names(wrt, AdditiveAttentionGradients._fields)
    chosen = some_options(additive_attention_vjp, options, ADDITIVE, more)
    with drawn(chosen) as drawn_options:
        output, kept = _core.additive_attention(query, key, value, W_q, W_k, w_v, drawn_options,
                                                keep=True)
    return output, pullback_of(_core.additive_attention_backward, kept, wanted,
                               AdditiveAttentionGradients)


@overload
def multi_head_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *, b_q: ArrayLike | None = ...,
        b_k: ArrayLike | None = ..., b_v: ArrayLike | None = ..., b_o: ArrayLike | None = ...,
        num_heads: int, num_kv_heads: int | None = ..., head_gate: ArrayLike | None = ...,
        rotary: Rotary | None = ..., q_norm: ArrayLike | None = ..., k_norm: ArrayLike | None = ...,
        norm_eps: float = ..., norm_offset: float = ..., positions: ArrayLike | None = ...,
        key_positions: ArrayLike | None = ...,
        return_weights: Literal[False] = ..., return_lse: Literal[False] = ...,
        **options: Unpack[AttentionKeywords]) -> Array: ...
@overload
def multi_head_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *, b_q: ArrayLike | None = ...,
        b_k: ArrayLike | None = ..., b_v: ArrayLike | None = ..., b_o: ArrayLike | None = ...,
        num_heads: int, num_kv_heads: int | None = ..., head_gate: ArrayLike | None = ...,
        rotary: Rotary | None = ..., q_norm: ArrayLike | None = ..., k_norm: ArrayLike | None = ...,
        norm_eps: float = ..., norm_offset: float = ..., positions: ArrayLike | None = ...,
        key_positions: ArrayLike | None = ...,
        return_weights: Literal[True], return_lse: Literal[True],
        **options: Unpack[AttentionKeywords]) -> tuple[Array, Array, Array]: ...
@overload
def multi_head_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *, b_q: ArrayLike | None = ...,
        b_k: ArrayLike | None = ..., b_v: ArrayLike | None = ..., b_o: ArrayLike | None = ...,
        num_heads: int, num_kv_heads: int | None = ..., head_gate: ArrayLike | None = ...,
        rotary: Rotary | None = ..., q_norm: ArrayLike | None = ..., k_norm: ArrayLike | None = ...,
        norm_eps: float = ..., norm_offset: float = ..., positions: ArrayLike | None = ...,
        key_positions: ArrayLike | None = ...,
        return_weights: Literal[True], return_lse: Literal[False] = ...,
        **options: Unpack[AttentionKeywords]) -> tuple[Array, Array]: ...
@overload
def multi_head_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *, b_q: ArrayLike | None = ...,
        b_k: ArrayLike | None = ..., b_v: ArrayLike | None = ..., b_o: ArrayLike | None = ...,
        num_heads: int, num_kv_heads: int | None = ..., head_gate: ArrayLike | None = ...,
        rotary: Rotary | None = ..., q_norm: ArrayLike | None = ..., k_norm: ArrayLike | None = ...,
        norm_eps: float = ..., norm_offset: float = ..., positions: ArrayLike | None = ...,
        key_positions: ArrayLike | None = ...,
        return_weights: Literal[False] = ..., return_lse: Literal[True],
        **options: Unpack[AttentionKeywords]) -> tuple[Array, Array]: ...
@overload
def multi_head_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *, b_q: ArrayLike | None = ...,
        b_k: ArrayLike | None = ..., b_v: ArrayLike | None = ..., b_o: ArrayLike | None = ...,
        num_heads: int, num_kv_heads: int | None = ..., head_gate: ArrayLike | None = ...,
        rotary: Rotary | None = ..., q_norm: ArrayLike | None = ..., k_norm: ArrayLike | None = ...,
        norm_eps: float = ..., norm_offset: float = ..., positions: ArrayLike | None = ...,
        key_positions: ArrayLike | None = ...,
        return_weights: bool = ..., return_lse: bool = ...,
        **options: Unpack[AttentionKeywords]) -> Any: ...
@takes_options(ATTENTION, before="return_weights")
def multi_head_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *more: Never, b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None, b_v: ArrayLike | None = None, b_o: ArrayLike | None = None,
        num_heads: int, num_kv_heads: int | None = None, head_gate: ArrayLike | None = None,
        rotary: Rotary | None = None,
        q_norm: ArrayLike | None = None, k_norm: ArrayLike | None = None, norm_eps: float = 1e-6,
        norm_offset: float = 0.0, positions: ArrayLike | None = None,
        key_positions: ArrayLike | None = None,
        return_weights: bool = False, return_lse: bool = False,
        **options: Unpack[AttentionKeywords]) -> Any:
    """The whole figure: project, split heads, attend, merge heads, project.

    Parameters
    ----------
    query : array (batch, query_len, query_dim), or (query_len, query_dim) for one sequence
    key : array (batch, key_len, key_dim)
    value : array (batch, key_len, value_dim)
    W_q : array (query_dim, num_heads * head_dim), used as query @ W_q
    W_k : array (key_dim, num_kv_heads * head_dim)
    W_v : array (value_dim, num_kv_heads * value_head_dim)
    W_o : array (num_heads * value_head_dim, output_dim)
    b_q, b_k, b_v, b_o : arrays, one number for each column of their W; optional
    num_heads : int
    num_kv_heads : int, by default num_heads
    head_gate : array (num_heads,), optional
        Multiplies each head's output.
    rotary : mha.Rotary, optional
        Turns the heads of queries and keys by their positions (Su et al. 2021).
    q_norm, k_norm : arrays (head_dim,), or (num_heads * head_dim,) and (num_kv_heads * head_dim,)
        Weights of the norm of each head, or of all together, before that; optional:
        x / sqrt(mean(x^2) + norm_eps) * (norm_offset + q_norm) (Zhang & Sennrich 2019).
    norm_eps, norm_offset : float
    positions, key_positions : ints (len,) or (batch, len), by default 0, 1, ...
        Where rows of query and key stand, for rotary alone. key_positions are positions where key
        is query itself.
    mask, bias : arrays (query_len, key_len) or (batch, num_heads, query_len, key_len), optional
        Either of batch and num_heads may be 1; for one mask per batch item write mask[:, None].
    The rest : as in `scaled_dot_product_attention`; the scores are
        (batch, num_heads, query_len, key_len), without batch for 2-D input.

    Returns
    -------
    output (batch, query_len, output_dim); then weights (batch, num_heads, query_len, key_len) and
    lse (batch, num_heads, query_len) where asked for.

    Raises
    ------
    ValueError, TypeError: as `scaled_dot_product_attention`; a mask or bias of 3 dimensions too.

    Source: Vaswani et al. 2017, section 3.2.2; shared key heads as in Ainslie et al. 2023.

    >>> x, W = np.ones((2, 4, 512)), np.eye(512)
    >>> mha.multi_head_attention(x, x, x, W, W, W, W, num_heads=8).shape
    (2, 4, 512)
    """
    chosen = attention_options(multi_head_attention, options, more)
    core = _core.multi_head_attention
    if (rotary is not None or q_norm is not None or k_norm is not None or positions is not None
            or key_positions is not None):
        core = prepared_core(
            rotary=rotary, q_norm=q_norm, k_norm=k_norm, norm_eps=norm_eps,
            norm_offset=norm_offset, positions=positions, key_positions=key_positions,
            key_is_query=key is query)
    with drawn(chosen) as drawn_options:
        return core(
            query, key, value, W_q, W_k, W_v, W_o, b_q, b_k, b_v, b_o, num_heads, num_kv_heads,
            head_gate, drawn_options, return_weights=return_weights, return_lse=return_lse)


@takes_options(ATTENTION, before="wrt")
def multi_head_attention_vjp(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *more: Never, b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None, b_v: ArrayLike | None = None, b_o: ArrayLike | None = None,
        num_heads: int, num_kv_heads: int | None = None, head_gate: ArrayLike | None = None,
        rotary: Rotary | None = None,
        q_norm: ArrayLike | None = None, k_norm: ArrayLike | None = None, norm_eps: float = 1e-6,
        norm_offset: float = 0.0, positions: ArrayLike | None = None,
        key_positions: ArrayLike | None = None,
        wrt: Collection[str] | None = None, **options: Unpack[AttentionKeywords],
        ) -> tuple[Array, Pullback[MultiHeadAttentionGradients]]:
    """`multi_head_attention` and its gradients: the vector-Jacobian product.

    Parameters
    ----------
    wrt : names out of "query", "key", "value", "W_q", ..., "b_o", "q_norm", "k_norm", "head_gate",
        "bias", "alibi", "relative_bias", "sinks", optional
        Whose gradients are wanted; by default all of them.
    The rest : as in `multi_head_attention`. The arrays are kept, not copied: they must not change
        before the pullback is called.

    Returns
    -------
    (output, pullback). pullback(grad_output, grad_lse=None) takes the gradients of a loss with
    respect to the output (batch, query_len, output_dim) and, if it depends on it, the log-sum-exp
    (batch, num_heads, query_len); it returns those with respect to the arguments by name, each
    shaped as the argument. It may be called again.

    Raises
    ------
    ValueError, TypeError: as `multi_head_attention`; an unknown name in wrt.

    Source: Vaswani et al. 2017, section 3.2.2; attention backwards as in Dao et al. 2022.

    >>> x, W = np.ones((2, 4, 512)), np.eye(512)
    >>> output, pullback = mha.multi_head_attention_vjp(x, x, x, W, W, W, W, num_heads=8)
    >>> pullback(np.ones_like(output)).W_q.shape
    (512, 512)
    """
    wanted = wanted_names(wrt, MultiHeadAttentionGradients._fields)
    chosen = attention_options(multi_head_attention_vjp, options, more)
    core = _core.multi_head_attention
    if (rotary is not None or q_norm is not None or k_norm is not None or positions is not None
            or key_positions is not None):
        core = prepared_core(
            rotary=rotary, q_norm=q_norm, k_norm=k_norm, norm_eps=norm_eps,
            norm_offset=norm_offset, positions=positions, key_positions=key_positions,
            key_is_query=key is query)
    with drawn(chosen) as drawn_options:
        output, kept = core(
            query, key, value, W_q, W_k, W_v, W_o, b_q, b_k, b_v, b_o, num_heads, num_kv_heads,
            head_gate, drawn_options, keep=True)
    return output, pullback_of(_core.multi_head_attention_backward, kept, wanted,
                               MultiHeadAttentionGradients)


@names_its_keywords
def merge_attention(outputs: Sequence[ArrayLike],
                    lses: Sequence[ArrayLike],
                    **unknown: Never) -> tuple[Array, Array]:
    """Join attention over parts of the keys into attention over all of them, exactly.

    Parameters
    ----------
    outputs : sequence of arrays (..., query_len, value_head_dim)
    lses : sequence of arrays (..., query_len), equally long
        As `scaled_dot_product_attention(..., return_lse=True)` returned them, one a part. A part
        whose lse is -inf is ignored.

    Returns
    -------
    (output, lse), shaped as one part's. Where all outputs are halves, the output is too, rounded
    once, and lse is float32.

    Raises
    ------
    ValueError: empty or unequally long sequences, unequal shapes. TypeError: as elsewhere.

    Source: Dao et al. 2023, "Flash-Decoding"; log-sum-exp as in Blanchard et al. 2021.

    >>> q, k = np.ones((4, 8)), np.ones((6, 8))
    >>> parts = [mha.scaled_dot_product_attention(q, h, h, return_lse=True) for h in (k[:3], k[3:])]
    >>> output, lse = mha.merge_attention(*zip(*parts))
    """
    if unknown:
        raise unknown_keyword(merge_attention, unknown)
    return _core.merge_attention(outputs, lses)
