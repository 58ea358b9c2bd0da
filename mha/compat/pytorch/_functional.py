"""Attention as functions: torch.nn.functional's on arrays, and mha's own on tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_bool, check_kind, detached_array, detached_arrays
from mha._base.dtypes import RAW_BFLOAT16, is_bfloat16
from mha._functions.options import RandomSource, Window
from mha._functions.scaled_dot_product_attention import (
    scaled_dot_product_attention as attend,
)
from mha.compat._shared.broadcast import broadcast_leading, check_over_scores
from mha.compat._shared.dtypes import bfloat16
from mha.compat._shared.flags import as_dropout, as_flag, split_dropout

if TYPE_CHECKING:
    from torch import Generator, Tensor
else:  # for typing.get_type_hints, which shall not import it
    Generator = Tensor = Any


def scaled_dot_product_attention(query: ArrayLike, key: ArrayLike, value: ArrayLike,
                                 attn_mask: ArrayLike | None = None, dropout_p: float = 0.0,
                                 is_causal: bool = False, scale: float | None = None,
                                 enable_gqa: bool = False, *,
                                 rng: RandomSource = None) -> NDArray[Any]:
    """torch.nn.functional.scaled_dot_product_attention.

    Parameters
    ----------
    query : array (..., query_len, head_dim)
    key : array (..., key_len, head_dim)
    value : array (..., key_len, value_head_dim)
        The leading axes broadcast against each other.
    attn_mask : bool (True = attend) or float (added to the scores), optional
        Broadcast to the scores (..., query_len, key_len). A CausalBias of
        torch.nn.attention.bias, too.
    dropout_p : float in [0, 1]
        Always acts: the function knows no evaluation mode. 1 gives zeros.
    is_causal : bool
        The upper-left triangle: query i sees keys 0 to i. Not together with attn_mask.
    scale : float, by default 1 / sqrt(head_dim)
    enable_gqa : bool
        Axis -3 is the heads, and each head of key and value serves several of query's.
    rng : None, int or numpy.random.Generator
        Draws the dropout; PyTorch has no such argument.

    Returns
    -------
    array (..., query_len, value_head_dim), of halves too (those of bfloat16 tensors are arrays of
    the package ml_dtypes); zeros for a query whose every key is masked.

    Raises
    ------
    ValueError: shapes that do not fit, attn_mask together with is_causal, a tensor whose memory was
    freed. TypeError: attn_mask of a type other than bool and float, a tensor without numbers that
    NumPy can read (meta, sparse, nested, quantized, inside torch.func). ImportError: a result of
    bfloat16 without ml_dtypes.

    Source: Vaswani et al. 2017, section 3.2.1.

    >>> q = np.ones((2, 8, 4, 64), np.float32)
    >>> scaled_dot_product_attention(q, q, q, is_causal=True).shape
    (2, 8, 4, 64)
    """
    is_causal, enable_gqa = as_flag(is_causal, "is_causal"), as_flag(enable_gqa, "enable_gqa")
    dropout, drops_all = split_dropout(as_dropout(dropout_p, "dropout_p"))
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask: got a mask together with is_causal=True, wanted one of them")
    query, key, value = detached_arrays(query=query, key=key, value=value)
    if query.dtype == key.dtype == value.dtype == RAW_BFLOAT16:
        query = query.view(bfloat16("query"))  # after which there is a type for the result
    if enable_gqa:
        key, value = _with_equal_heads(query, key, value)
    query, key, value = broadcast_leading(query, key, value, own_axes=3 if enable_gqa else 2)
    only_heads = enable_gqa and query.ndim == 3
    if only_heads:  # in 3-D `mha` takes the first axis for the batch
        query, key, value = query[None], key[None], value[None]
    mask, bias = None, None
    if attn_mask is not None:
        attn_mask = detached_array(attn_mask, "attn_mask")
        check_over_scores(attn_mask, "attn_mask", (*query.shape[:-1], key.shape[-2]))
        if is_bool(attn_mask, "attn_mask", true_blocks=False):
            mask = attn_mask
        else:
            bias = attn_mask
    output = attend(
        query, key, value, mask=mask, bias=bias, causal=is_causal,
        query_offset=0 if is_causal else None, scale=scale, dropout=dropout, rng=rng)
    if drops_all:
        output[...] = 0
    return output[0] if only_heads else output


def functional_attention(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None,
                         bias: Tensor | None = None, alibi: Tensor | None = None,
                         relative_bias: Tensor | None = None, sinks: Tensor | None = None,
                         key_lengths: Tensor | None = None, causal: bool = False,
                         query_offset: int | None = None, window: Window | None = None,
                         scale: float | None = None, softcap: float | None = None,
                         dropout: float = 0.0, rng: int | Generator | None = None,
                         return_weights: bool = False, return_lse: bool = False) -> Any:
    """`mha.scaled_dot_product_attention` on PyTorch's tensors on the CPU, with gradients.

    Parameters
    ----------
    query : tensor (query_len, head_dim), (batch, query_len, head_dim) or
        (..., heads, query_len, head_dim)
    key : tensor (..., kv_heads, key_len, head_dim)
    value : tensor (..., kv_heads, key_len, value_head_dim)
        No tensor is copied whose last axis is contiguous. float16, bfloat16, float32 or float64.
    mask, bias, alibi, relative_bias, sinks, key_lengths : tensors, optional
        The mask may be a CausalBias of torch.nn.attention.bias.
    causal, query_offset, window, scale, softcap : of Python
        The options of `mha.scaled_dot_product_attention` (docs/options.md); query_offset is an int.
    dropout : float in [0, 1)
    rng : None, int or torch.Generator
        Draws the dropout; None is PyTorch's own generator, which torch.manual_seed sets.
    return_weights, return_lse : bool
        Whether to return the weights, and the logarithm of the sums that softmax divides by.

    Returns
    -------
    output (..., heads, query_len, value_head_dim); with return_weights or return_lse a tuple of it,
    the weights (..., heads, query_len, key_len) before dropout and lse (..., heads, query_len), as
    far as they are asked for. query, key, value, bias, alibi, relative_bias and sinks get their
    gradients through output and lse. The weights have none: they are for looking at.

    torch.compile, torch.export and make_fx see one operator, torch.ops.mha.attention, or
    torch.ops.mha.attention_outputs where more is returned. vmap, grad, vjp and jacrev of torch.func
    work; vmap calls attention for one item after the other.

    Raises
    ------
    ValueError, TypeError: as `mha.scaled_dot_product_attention`; tensors that are not on the CPU,
    whose memory was freed, or that are nested, sparse or quantized. ImportError: bfloat16 without
    the package ml_dtypes. NotImplementedError: gradients of gradients, by the backward pass that
    needs them; tangents (jvp, jacfwd).

    Source: Vaswani et al. 2017, section 3.2.1; Dao et al. 2022.

    >>> query = torch.randn(2, 8, 4, 64, requires_grad=True)
    >>> functional_attention(query, query, query, causal=True).sum().backward()
    """
    try:
        from mha.compat.pytorch._tensors import attention  # which imports torch
    except ModuleNotFoundError as error:
        raise ImportError(f"functional_attention: {error}, wanted PyTorch, whose tensors it takes:"
                          " pip install torch; arrays go to mha.scaled_dot_product_attention"
                          ) from error
    extras = None
    if return_weights is not False or return_lse is not False:
        extras = (as_bool(return_weights, "return_weights"), as_bool(return_lse, "return_lse"))
    found = attention(query, key, value, bias, alibi, relative_bias, sinks, mask, key_lengths,
                      causal=causal, query_offset=query_offset, window=window, scale=scale,
                      softcap=softcap, dropout=dropout, rng=rng, extras=extras)
    if extras is None:
        return found
    return tuple(found) if any(extras) else found[0]


def is_bool(mask: NDArray[Any], name: str, *, true_blocks: bool) -> bool:
    """True for a bool mask, False for an additive one; an error says how to make one of ints."""
    if not is_bfloat16(mask.dtype):
        attend, block = ("==", "!=") if true_blocks else ("!=", "==")
        check_kind(mask, name, "bf", f"bool or float: {name} {attend} 0 where 1 means attend,"
                                     f" {name} {block} 0 where 1 means blocked")
    return mask.dtype.kind == "b"


def _with_equal_heads(query: NDArray[Any], key: NDArray[Any],
                      value: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Key and value with as many heads (axis -3) each, which `mha` wants and PyTorch does not."""
    if min(query.ndim, key.ndim, value.ndim) < 3:
        raise ValueError(f"enable_gqa: got query, key and value of shapes {query.shape},"
                         f" {key.shape}, {value.shape}, wanted heads in axis -3")
    heads = query.shape[-3]
    for name, array in (("key", key), ("value", value)):
        if heads % max(array.shape[-3], 1):
            raise ValueError(f"{name}: got {array.shape[-3]} heads, wanted a divisor of query's"
                             f" {heads}")
    if key.shape[-3] != value.shape[-3]:
        key, value = (np.repeat(array, heads // max(array.shape[-3], 1), axis=-3)
                      for array in (key, value))
    return key, value
