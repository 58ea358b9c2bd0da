"""Attention with a BlockMask on tensors, for mha.compat.flex. PyTorch's compilers go around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mha import _core
from mha._functions.block_mask import BlockMask
from mha._functions.options import AttentionOptions
from mha.compat.pytorch._memory import arrays_of, tensor_of
from mha.compat.pytorch._operators import gradients, refuse_second_gradients
from mha.compat.pytorch._tensors import SAVED

NAMES = ("query", "key", "value")
SETTINGS = (False, None, None, None, None, 0.0, None, False)  # of gradients(): nothing by token


@torch.compiler.disable
def outside_compilers(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, whatever compiles the caller: the graph breaks here."""
    return function(*arguments)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | None, scale: float | None,
           return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """The output, and lse where asked for."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "flex_attention: got a transform of torch.func or torch.vmap, wanted plain tensors;"
            " mha.compat.pytorch.functional_attention goes through them, with mask=")
    for tensor, name in zip((query, key, value), NAMES, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, wanted a tensor as others are")
        if tensor.device.type != "cpu":
            raise ValueError(f"{name}: got a tensor on {tensor.device}, wanted one on the CPU")
    key, value = (tensor.expand(query.shape[0], *tensor.shape[1:]) for tensor in (key, value))
    output, *lse = _BlockMaskAttention.apply(query, key, value, mask, scale, return_lse)
    return output, lse[0] if lse else None


class _BlockMaskAttention(torch.autograd.Function):
    """What the core saves hangs on a saved tensor, so that PyTorch frees it with those; where hooks
    replaced that, attention runs once more."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        query, key, value, mask, scale, return_lse = arguments
        tensors, options = (query, key, value), AttentionOptions(mask=mask, scale=scale)
        if not any(ctx.needs_input_grad):
            return _as_tensors(_compute(tensors, options, return_lse=return_lse))
        found, saved = _compute(tensors, options, save=True, return_lse=return_lse)
        carrier = torch.empty(0)
        setattr(carrier, SAVED, saved)
        ctx.save_for_backward(*tensors, carrier)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return _as_tensors(found)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None,
                 grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph
            refuse_second_gradients(ctx)
        *tensors, carrier = ctx.saved_tensors
        if grad_output is grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = getattr(carrier, SAVED, None)
        if saved is None:
            _, saved = _compute(tuple(tensors), ctx.options, save=True)
        wanted = {name for name, needed in zip(NAMES, ctx.needs_input_grad, strict=False) if needed}
        found = gradients(saved, tuple(tensors), (grad_output, grad_lse), wanted, SETTINGS)
        return (*map(found.get, NAMES), None, None, None)


def _compute(tensors: tuple[Tensor, ...], options: AttentionOptions, **asked_for: Any) -> Any:
    query, key, value = arrays_of(tensors, NAMES)
    return _core.scaled_dot_product_attention(query, key, value, options, **asked_for)


def _as_tensors(found: Any) -> tuple[Tensor, ...]:
    return tuple(map(tensor_of, found if isinstance(found, tuple) else (found,)))
