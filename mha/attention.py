"""Scaled dot-product, additive and multi-head attention as functions (step 3, and all five)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha.arguments import as_array, wanted_bits, wanted_names
from mha.dropout import drawn_seed
from mha.gradients import (
    AdditiveAttentionGradients,
    AdditiveSteps,
    FigureSteps,
    MultiHeadAttentionGradients,
    MultiHeadPullback,
    ScaledDotProductAttentionGradients,
    additive_gradients,
    checked_gradient,
    figure_gradients,
)
from mha.keywords import names_its_keywords, unknown_keyword

__all__ = ["additive_attention", "additive_attention_vjp", "merge_attention",
           "multi_head_attention", "multi_head_attention_vjp", "scaled_dot_product_attention",
           "scaled_dot_product_attention_vjp"]


@names_its_keywords
def scaled_dot_product_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *, mask: ArrayLike | None = None,
        bias: ArrayLike | None = None, key_lengths: ArrayLike | None = None, causal: bool = False,
        query_offset: ArrayLike | None = None,
        window: tuple[int | None, int | None] | None = None, scale: float | None = None,
        softcap: float | None = None, empty_rows: str = "zeros", dropout: float = 0.0,
        rng: int | np.random.Generator | None = None, return_weights: bool = False,
        return_lse: bool = False, out: NDArray[Any] | None = None, **unknown: Never) -> Any:
    """softmax(query @ key^T * scale) @ value over the keys that each query may see.

    Parameters
    ----------
    query : array (query_len, head_dim), (batch, query_len, head_dim) or
        (..., heads, query_len, head_dim)
    key : array (..., kv_heads, key_len, head_dim)
        The same layout; heads is a multiple of kv_heads, and each key head serves
        heads / kv_heads consecutive query heads.
    value : array (..., kv_heads, key_len, value_head_dim)
    mask : bool array, optional
        True = attend; broadcast to the scores (..., heads, query_len, key_len).
    bias : float array, optional
        Added to the scaled scores, broadcast likewise; -inf blocks as a mask does.
    key_lengths : ints in [0, key_len], optional
        Shaped as the batch axes, or batch axes + (query_len,): keys from there on are blocked.
    causal : bool
        Key j is visible to query i iff j <= i + query_offset.
    query_offset : int or ints over the batch axes, optional
        The position of query 0 among the keys, by default key_len - query_len; 0 is PyTorch's
        upper-left triangle.
    window : (left, right), ints >= 0 or None, optional
        Key j is visible iff i + query_offset - left <= j <= i + query_offset + right.
    scale : float, by default 1 / sqrt(head_dim)
    softcap : float > 0, optional
        Scores become softcap * tanh(score / softcap), before bias and masks.
    empty_rows : "zeros" or "uniform"
        What a query that sees no key gets: zeros, or the mean of all values.
    dropout, rng : float in [0, 1); None, int or numpy.random.Generator
        Dropout on the weights, by the mask of `mha.dropout_mask`.
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
    ValueError: a shape, size or option that does not fit. TypeError: a type other than float32,
    float64 or integers, or a mask that is not bool. Both name the argument.

    Source: Vaswani et al. 2017, section 3.2.1; without a score matrix as in Dao et al. 2022.

    >>> q = np.ones((2, 8, 4, 64), np.float32)
    >>> mha.scaled_dot_product_attention(q, q, q, causal=True).shape
    (2, 8, 4, 64)
    """
    if unknown:
        raise unknown_keyword(scaled_dot_product_attention, unknown)
    with drawn_seed(dropout, rng) as seed:
        return _core.scaled_dot_product_attention(
            query, key, value, mask, bias, key_lengths, causal, query_offset, window, scale,
            softcap, empty_rows, dropout, seed, return_weights, return_lse, out, False)


@names_its_keywords
def scaled_dot_product_attention_vjp(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *, mask: ArrayLike | None = None,
        bias: ArrayLike | None = None, key_lengths: ArrayLike | None = None, causal: bool = False,
        query_offset: ArrayLike | None = None,
        window: tuple[int | None, int | None] | None = None, scale: float | None = None,
        softcap: float | None = None, empty_rows: str = "zeros", dropout: float = 0.0,
        rng: int | np.random.Generator | None = None, wrt: Collection[str] | None = None,
        **unknown: Never) -> tuple[NDArray[Any], Callable[..., ScaledDotProductAttentionGradients]]:
    """`scaled_dot_product_attention` and its gradients: the vector-Jacobian product.

    Parameters
    ----------
    wrt : names out of "query", "key", "value", "bias", optional
        Whose gradients are wanted; by default all of them.
    The rest : as in `scaled_dot_product_attention`. The arrays are kept, not copied: they must
        not change before the pullback is called.

    Returns
    -------
    (output, pullback). pullback(grad_output, grad_lse=None) takes the gradients of a loss with
    respect to the output (..., heads, query_len, value_head_dim) and, if it depends on it, the
    log-sum-exp (..., heads, query_len); it returns those with respect to query, key, value and
    bias, each shaped as the argument. It may be called again. Its memory is linear in the length:
    the weights are computed again, block by block.

    Raises
    ------
    ValueError, TypeError: as `scaled_dot_product_attention`; an unknown name in wrt.

    Source: Dao et al. 2022, "FlashAttention", appendix B.4.

    >>> q = np.ones((2, 8, 4, 64), np.float32)
    >>> output, pullback = mha.scaled_dot_product_attention_vjp(q, q, q, causal=True)
    >>> pullback(np.ones_like(output)).query.shape
    (2, 8, 4, 64)
    """
    if unknown:
        raise unknown_keyword(scaled_dot_product_attention_vjp, unknown)
    wanted = wanted_bits(wrt, ScaledDotProductAttentionGradients._fields)
    with drawn_seed(dropout, rng) as seed:
        arguments = (query, key, value, mask, bias, key_lengths, causal, query_offset, window,
                     scale, softcap, empty_rows, dropout, seed)
        output, kept_output, statistics = _core.scaled_dot_product_attention(
            *arguments, False, False, None, True)

    def pullback(grad_output: ArrayLike, grad_lse: ArrayLike | None = None,
                 ) -> ScaledDotProductAttentionGradients:
        return ScaledDotProductAttentionGradients(*_core.scaled_dot_product_attention_backward(
            grad_output, grad_lse, kept_output, statistics, wanted, None, *arguments)[:4])

    return output, pullback


@names_its_keywords
def additive_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        w_v: ArrayLike, *, mask: ArrayLike | None = None, key_lengths: ArrayLike | None = None,
        causal: bool = False, query_offset: ArrayLike | None = None, empty_rows: str = "zeros",
        dropout: float = 0.0, rng: int | np.random.Generator | None = None,
        return_weights: bool = False, **unknown: Never) -> Any:
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
    if unknown:
        raise unknown_keyword(additive_attention, unknown)
    with drawn_seed(dropout, rng) as seed:
        return _core.additive_attention(
            query, key, value, W_q, W_k, w_v, mask, None, key_lengths, causal, query_offset, None,
            None, None, empty_rows, dropout, seed, return_weights, False)


@names_its_keywords
def additive_attention_vjp(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        w_v: ArrayLike, *, mask: ArrayLike | None = None, key_lengths: ArrayLike | None = None,
        causal: bool = False, query_offset: ArrayLike | None = None, empty_rows: str = "zeros",
        dropout: float = 0.0, rng: int | np.random.Generator | None = None,
        wrt: Collection[str] | None = None,
        **unknown: Never) -> tuple[NDArray[Any], Callable[..., AdditiveAttentionGradients]]:
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
    if unknown:
        raise unknown_keyword(additive_attention_vjp, unknown)
    wanted = wanted_names(wrt, AdditiveAttentionGradients._fields)
    with drawn_seed(dropout, rng) as seed:
        options = (mask, None, key_lengths, causal, query_offset, None, None, None, empty_rows,
                   dropout, seed)
        output, kept = _core.additive_attention(
            query, key, value, W_q, W_k, w_v, *options, False, True)
    query, key, value, *matrices = (
        as_array(array, name).astype(output.dtype, copy=False) for name, array in zip(
            AdditiveAttentionGradients._fields, (query, key, value, W_q, W_k, w_v), strict=True))
    projected_query, projected_key, statistics = kept
    steps = AdditiveSteps(query, key, value, projected_query, projected_key, output.copy(),
                          statistics)

    def pullback(grad_output: ArrayLike,
                 grad_lse: ArrayLike | None = None) -> AdditiveAttentionGradients:
        grad_output = checked_gradient(grad_output, steps.output, "grad_output")
        if grad_lse is not None:
            grad_lse = checked_gradient(grad_lse, statistics[0], "grad_lse")
        return additive_gradients(steps, tuple(matrices), options, wanted, grad_output, grad_lse)

    return output, pullback


@names_its_keywords
def multi_head_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *, b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None, b_v: ArrayLike | None = None, b_o: ArrayLike | None = None,
        num_heads: int, num_kv_heads: int | None = None, head_gate: ArrayLike | None = None,
        mask: ArrayLike | None = None, bias: ArrayLike | None = None,
        key_lengths: ArrayLike | None = None, causal: bool = False,
        query_offset: ArrayLike | None = None,
        window: tuple[int | None, int | None] | None = None, scale: float | None = None,
        softcap: float | None = None, empty_rows: str = "zeros", dropout: float = 0.0,
        rng: int | np.random.Generator | None = None, return_weights: bool = False,
        return_lse: bool = False, **unknown: Never) -> Any:
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
    if unknown:
        raise unknown_keyword(multi_head_attention, unknown)
    with drawn_seed(dropout, rng) as seed:
        return _core.multi_head_attention(
            query, key, value, W_q, W_k, W_v, W_o, b_q, b_k, b_v, b_o, num_heads, num_kv_heads,
            head_gate, mask, bias, key_lengths, causal, query_offset, window, scale, softcap,
            empty_rows, dropout, seed, return_weights, return_lse, None, False)


@names_its_keywords
def multi_head_attention_vjp(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, W_q: ArrayLike, W_k: ArrayLike,
        W_v: ArrayLike, W_o: ArrayLike, *, b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None, b_v: ArrayLike | None = None, b_o: ArrayLike | None = None,
        num_heads: int, num_kv_heads: int | None = None, head_gate: ArrayLike | None = None,
        mask: ArrayLike | None = None, bias: ArrayLike | None = None,
        key_lengths: ArrayLike | None = None, causal: bool = False,
        query_offset: ArrayLike | None = None,
        window: tuple[int | None, int | None] | None = None, scale: float | None = None,
        softcap: float | None = None, empty_rows: str = "zeros", dropout: float = 0.0,
        rng: int | np.random.Generator | None = None, wrt: Collection[str] | None = None,
        **unknown: Never) -> tuple[NDArray[Any], MultiHeadPullback]:
    """`multi_head_attention` and its gradients: the vector-Jacobian product.

    Parameters
    ----------
    wrt : names out of "query", "key", "value", "W_q", ..., "b_o", "head_gate", "bias", optional
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
    if unknown:
        raise unknown_keyword(multi_head_attention_vjp, unknown)
    with drawn_seed(dropout, rng) as seed:
        options = (mask, bias, key_lengths, causal, query_offset, window, scale, softcap,
                   empty_rows, dropout, seed)
        return figure_vjp((query, key, value), (W_q, W_k, W_v, W_o), (b_q, b_k, b_v, b_o),
                          num_heads, num_kv_heads, head_gate, options, wrt, None)


def figure_vjp(
        inputs: tuple[Any, ...], matrices: tuple[Any, ...], biases: tuple[Any, ...],
        num_heads: int, num_kv_heads: int | None, head_gate: Any, options: Any,
        wrt: Collection[str] | None, dtype: Any) -> tuple[NDArray[Any], MultiHeadPullback]:
    """`multi_head_attention_vjp` for functions and layers; options from mask to seed, as the core
    takes them; dtype is a layer's, or None."""
    wanted = wanted_names(wrt, MultiHeadAttentionGradients._fields)
    arguments: list[Any] = [*inputs, *matrices, *biases, num_heads, num_kv_heads, head_gate,
                            *options, False, False, dtype, True]
    output, (*kept, statistics) = _core.multi_head_attention(*arguments)
    given = dict(zip(("b_q", "b_k", "b_v", "b_o"), biases, strict=True))
    given |= {"head_gate": head_gate, "bias": options[1]}
    wanted -= {name for name, array in given.items() if array is None}
    one_sequence = output.ndim == 2
    sequences = [as_array(array, "query").astype(output.dtype, copy=False) for array in inputs]
    arrays = [*sequences, *kept]
    steps = FigureSteps._make(
        [*(array[None] for array in arrays), statistics[:, None]] if one_sequence
        else [*arrays, statistics])
    own_matrices = tuple(
        as_array(array, "W").astype(output.dtype, copy=False) for array in matrices)
    gate = None if head_gate is None else as_array(head_gate, "head_gate").astype(output.dtype)
    if one_sequence and options[2] is not None:  # key_lengths gets the batch axis too
        options = (*options[:2], as_array(options[2], "key_lengths")[None], *options[3:])
    result = output.view()

    def pullback(grad_output: ArrayLike,
                 grad_lse: ArrayLike | None = None) -> MultiHeadAttentionGradients:
        grad_output = checked_gradient(grad_output, result, "grad_output")
        if grad_lse is not None:
            grad_lse = checked_gradient(grad_lse, statistics[0], "grad_lse")
        found = figure_gradients(
            steps, own_matrices, num_heads, num_kv_heads or num_heads, gate, options, wanted,
            grad_output[None] if one_sequence else grad_output,
            grad_lse if grad_lse is None or not one_sequence else grad_lse[None])
        if one_sequence:
            for name in ("query", "key", "value"):
                gradient = found.get(name)
                found[name] = None if gradient is None else gradient[0]
        return MultiHeadAttentionGradients(
            **{name: found.get(name) for name in MultiHeadAttentionGradients._fields})

    return output, pullback


@names_its_keywords
def merge_attention(outputs: Sequence[ArrayLike],
                    lses: Sequence[ArrayLike],
                    **unknown: Never) -> tuple[NDArray[Any], NDArray[Any]]:
    """Join attention over parts of the keys into attention over all of them, exactly.

    Parameters
    ----------
    outputs : sequence of arrays (..., query_len, value_head_dim)
    lses : sequence of arrays (..., query_len), equally long
        As `scaled_dot_product_attention(..., return_lse=True)` returned them, one a part. A part
        whose lse is -inf is ignored.

    Returns
    -------
    (output, lse), shaped as one part's.

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
