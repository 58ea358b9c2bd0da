"""Additive attention, in the place of step 3, and its gradients."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, Never, Unpack, overload

from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.arguments import wanted_names
from mha._functions.dropout import drawn
from mha._functions.gradients import AdditiveAttentionGradients, Pullback, pullback_of
from mha._functions.options import ADDITIVE, AdditiveKeywords, some_options, takes_options

Array = NDArray[Any]

__all__ = ["additive_attention", "additive_attention_vjp"]


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
        output, saved = _core.additive_attention(query, key, value, W_q, W_k, w_v, drawn_options,
                                                save=True)
    return output, pullback_of(_core.additive_attention_backward, saved, wanted,
                               AdditiveAttentionGradients)
