"""mha among the attention implementations of the transformers package (5.23).

    from mha.compat import transformers as mha_transformers
    mha_transformers.register()
    model = AutoModel.from_pretrained(name, attn_implementation="mha")

All models whose attention goes through the package's AttentionInterface then compute it here, on
the CPU: tensors are read where they lie, gradients come from mha's backward pass. Masks are those
of "sdpa"; where the package tells what they follow from, keys that no query of a block sees are
skipped. Models that attend by code of their own (Falcon, BLOOM, DeBERTa and a hundred others) keep
it, with a warning. torch and transformers are imported by this module alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from mha.compat._shared.flags import split_dropout
from mha.compat._shared.own_attention import keep_from_models_that_attend_themselves
from mha.compat.pytorch._tensors import attention, attention_weights

__all__ = ["attention_forward", "attention_mask", "register"]

_BOUNDS = "mha_bounds"  # an attribute of masks: query_offset, window, whether that is all
_names: set[str] = set()  # those registered


def register(name: str = "mha") -> None:
    """Put `attention_forward` and `attention_mask` among the package's, under this name.

    A model that attends by code of its own, and asks for no registered function, is then built as
    if it had not been asked for this name, and a UserWarning names it: the masks made for mha mean
    nothing to its code. For that, PreTrainedModel.get_correct_attn_implementation is wrapped.

    >>> register()
    >>> model = AutoModel.from_config(config, attn_implementation="mha")
    """
    if not _names:
        keep_from_models_that_attend_themselves(_names)
    _names.add(name)
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0,
                   kv_offset: int = 0, mask_function: Any = causal_mask_function,
                   attention_mask: Tensor | None = None, local_size: int | None = None,
                   allow_is_causal_skip: bool = True, **options: Any) -> Tensor | None:
    """The mask of transformers' "sdpa": bool (batch, 1, query_len, key_len), or None where nothing
    is hidden.

    Several queries get a causal mask even where "sdpa" does without one and asks is_causal of the
    module: modules of NLLB-MoE and PaliGemma say False under a causal mask, of BridgeTower True
    where nothing is hidden. The package allows that of masks that hide all that the causal mask, or
    the window of local_size, hides. What they hide is told to `attention_forward` beside the mask,
    and whether that is all.
    """
    options.update(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
        kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
        local_size=local_size)
    mask = sdpa_mask(allow_is_causal_skip=allow_is_causal_skip, **options)
    if not allow_is_causal_skip or q_length == 1:
        return mask
    is_all = mask is None
    if is_all:
        mask = sdpa_mask(allow_is_causal_skip=False, **options)
    if mask is not None and not torch.compiler.is_compiling():
        window = None if local_size is None else (local_size - 1, None)
        setattr(mask, _BOUNDS, (int(q_offset) - kv_offset, window, is_all))
    return mask


def attention_forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
                      attention_mask: Tensor | None, dropout: float = 0.0,
                      scaling: float | None = None, is_causal: bool | None = None,
                      sliding_window: int | None = None, softcap: float | None = None,
                      s_aux: Tensor | None = None, position_bias: Tensor | None = None,
                      sinks: Tensor | None = None, cache: object = None,
                      output_attentions: bool | None = False,
                      **others: Any) -> tuple[Tensor, Tensor | None]:
    """Attention as the package's modules ask for it.

    Parameters
    ----------
    module : unused
    query, key, value : tensors (batch, heads, len, head_dim), key and value with kv_heads
    attention_mask : bool (True = attend) or float (added to the scores), optional
        Without it a query sees all keys; query i of several, with is_causal, keys 0 to i. What the
        module says of itself does not count: every causal mask of `attention_mask` is there.
    s_aux : sinks, a number a head
    sinks : (batch, heads, query_len, 1), sinks of each query
    position_bias : added to the scores
    sliding_window : int
        How many keys a query sees, itself the last, where attention_mask does not say it.
    output_attentions : bool
        Return the weights too, before dropout and without gradients.

    Returns
    -------
    output (batch, query_len, heads, value_head_dim), and the weights
    (batch, heads, query_len, key_len) or None.

    Raises
    ------
    ValueError, TypeError: as `mha.compat.pytorch.functional_attention`. NotImplementedError: a
    paged cache.
    """
    if cache is not None:
        raise NotImplementedError(
            "cache: got what mha does not take here, wanted None: continuous batching needs"
            ' attn_implementation="paged|eager" or "sdpa"')
    query_len = query.shape[2]
    mask, bias = attention_mask, position_bias
    causal, query_offset, window = False, None, None
    if mask is None:
        causal = bool(is_causal) and query_len > 1
        if sliding_window is not None and sliding_window < key.shape[2]:
            query_offset = 0 if query_len > 1 else key.shape[2] - 1
            window = (sliding_window - 1, None if causal else sliding_window - 1)
        elif causal:
            query_offset = 0
    else:
        bounds = getattr(mask, _BOUNDS, None)
        if mask.dtype is not torch.bool:
            mask, bias = None, mask if bias is None else bias + mask
        if bounds is not None:
            causal, (query_offset, window, is_all) = True, bounds
            mask = None if is_all else mask
    dropout, drops_all = split_dropout(dropout)
    tensors = query, key, value, bias, None, None, s_aux, mask, None
    options: dict[str, Any] = {"causal": causal, "query_offset": query_offset, "window": window,
                               "scale": scaling, "softcap": softcap}
    share = None
    if sinks is None:
        output = attention(*tensors, **options, dropout=dropout, by_token=True)
    else:
        output, lse = attention(*tensors, **options, dropout=dropout, by_token=True,
                                extras=(False, True))
        share = _share_of_keys(lse, sinks)
        output = output * share.transpose(1, 2).to(output.dtype)
    if drops_all:
        output = output * 0
    if not output_attentions:
        return output, None
    weights = attention_weights(*tensors, **options)
    return output, weights if share is None else weights * share.detach().to(weights.dtype)


def _share_of_keys(lse: Tensor, sinks: Tensor) -> Tensor:
    """What the keys keep of each query's weights beside a sink, which has the score sinks and no
    value: exp(lse) of exp(lse) + exp(sinks), (batch, heads, query_len, 1)."""
    return torch.sigmoid(lse.unsqueeze(-1) - sinks.to(lse.dtype))
