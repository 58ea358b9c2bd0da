"""The gradients of step 3 of the figure from its results, for whoever has those already."""

from __future__ import annotations

from collections.abc import Collection
from typing import Unpack

from numpy.typing import ArrayLike

from mha import _core
from mha._base.arguments import as_array, as_seed, wanted_names
from mha._functions.dropout import check_rng
from mha._functions.gradients import ScaledDotProductAttentionGradients
from mha._functions.options import ATTENTION, AttentionKeywords, attention_options, takes_options

__all__ = ["scaled_dot_product_attention_backward"]


@takes_options(ATTENTION, before="wrt")
def scaled_dot_product_attention_backward(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, output: ArrayLike, lse: ArrayLike,
        grad_output: ArrayLike, *, grad_lse: ArrayLike | None = None,
        wrt: Collection[str] | None = None,
        **options: Unpack[AttentionKeywords]) -> ScaledDotProductAttentionGradients:
    """The gradients of `scaled_dot_product_attention` from its output and log-sum-exp.

    Key and value may be a part of those that output and lse belong to: the gradients of all parts'
    keys and values stand side by side, and those of query add up. `mha.dask` and ring attention
    work so. Nothing is computed forward.

    Parameters
    ----------
    query, key, value : as in `scaled_dot_product_attention`
    output : array (..., heads, query_len, value_head_dim)
        The output over all keys, as one call gives it, or `merge_attention` of several. Of halves
        best in float32, as a float32 query gives it: what was rounded away is missing here.
    lse : array (..., heads, query_len)
        The log-sum-exp over all keys, of the same scores: weights are exp(score - lse), as exact as
        lse is, which may be float64.
    grad_output : array (..., heads, query_len, value_head_dim)
        The gradient of a loss with respect to the output.
    grad_lse : array (..., heads, query_len), optional
        The same by lse, if the loss depends on it.
    wrt : names out of "query", "key", "value", "bias", "alibi", "relative_bias", "sinks", optional
        Whose gradients are wanted; by default all of them.
    The rest : as in the forward call, of these keys: query_offset counts from the first of them,
        dropout_offsets says where they stand for dropout, whose rng is the seed, an int. One part
        gets the sinks. empty_rows="uniform" means rows whose lse is -inf, and the mean of the
        values given here.

    Returns
    -------
    The gradients by name, each shaped as the argument; None for what is not wanted or not given.

    Raises
    ------
    ValueError, TypeError: as `scaled_dot_product_attention`; an unknown name in wrt; a rng that is
    not the seed.

    Source: Dao et al. 2022, "FlashAttention", appendix B.4; over parts of the keys as in Liu et al.
    2023, "Ring Attention with Blockwise Transformers", section 3.

    >>> q, k = np.ones((4, 8)), np.ones((6, 8))
    >>> output, lse = mha.scaled_dot_product_attention(q, k, k, return_lse=True)
    >>> first = mha.scaled_dot_product_attention_backward(q, k[:3], k[:3], output, lse, output)
    >>> first.key.shape
    (3, 8)
    """
    wanted = wanted_names(wrt, ScaledDotProductAttentionGradients._fields)
    chosen = attention_options(scaled_dot_product_attention_backward, options)
    if chosen.rng is not None and not (type(chosen.dropout) is float and chosen.dropout == 0):
        chosen = chosen._replace(rng=as_seed(chosen.rng, "rng"))
    elif chosen.rng is not None:
        check_rng(chosen.rng)
        chosen = chosen._replace(rng=None)
    # First what may run code of the gradients' own: the call keeps views of all else.
    grad_output = as_array(grad_output, "grad_output")
    grad_lse = None if grad_lse is None else as_array(grad_lse, "grad_lse")
    saved = _core.saved_attention(query, key, value, output, lse, chosen)
    return ScaledDotProductAttentionGradients(
        **_core.scaled_dot_product_attention_backward(saved, grad_output, grad_lse, wanted))
