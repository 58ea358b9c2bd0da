"""Calls of the core on tensors that no operator stands for: attention with a BlockMask, and of
ragged batches. Autograd knows them; PyTorch's compilers go around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from mha import _core
from mha._functions.options import AttentionOptions
from mha.compat.pytorch._memory import array_of, arrays_of, tensor_of
from mha.compat.pytorch._operators import grads_as_arrays
from mha.compat.pytorch._tensors import autocast, differentiated, keep, kept, refuse_tangents

_number_of_modes = torch._C._len_torch_dispatch_stack

NAMES = ("query", "key", "value")


class Call(Protocol):
    """A call of the core on query, key and value, and its backward pass."""

    def forward(self, query: NDArray[Any], key: NDArray[Any], value: NDArray[Any], *,
                save: bool = False) -> Any:
        """(output, lse); with save ((output, lse), what backward takes)."""

    def backward(self, saved: Any, grad_output: NDArray[Any], grad_lse: NDArray[Any] | None,
                 wanted: set[str]) -> dict[str, NDArray[Any] | None]:
        """The gradients that are wanted, by name."""


class DenseCall:
    """Attention of (batch, heads, len, head_dim)."""

    def __init__(self, options: AttentionOptions) -> None:
        self.options = options

    def forward(self, *arrays: NDArray[Any], save: bool = False) -> Any:
        query, key, value = arrays
        return _core.scaled_dot_product_attention(query, key, value, self.options, return_lse=True,
                                                  save=save)

    def backward(self, *arguments: Any) -> dict[str, NDArray[Any] | None]:
        return _core.scaled_dot_product_attention_backward(*arguments)


@torch.compiler.disable
def attend_outside_compilers(caller: str, query: Tensor, key: Tensor, value: Tensor,
                             call: Call) -> tuple[Tensor, Tensor]:
    """The output and lse, with gradients; the caller's name is for errors."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{caller}: got a transform of torch.func or torch.vmap, wanted plain tensors;"
            " mha.compat.pytorch.functional_attention goes through them")
    if _number_of_modes() > 0 and get_proxy_mode() is not None:
        raise NotImplementedError(
            f"{caller}: got a call that make_fx or torch.export traces, which would keep this"
            " result for all inputs, wanted mha.compat.pytorch.functional_attention, an operator")
    if torch.is_autocast_enabled("cpu"):
        query, key, value = autocast(query, key, value)
    output, lse = _CoreCall.apply(query, key, value, call)
    return output, lse


@torch.compiler.disable
def without_gradients(function: Callable[..., tuple[NDArray[Any], NDArray[Any]]],
                      tensors: dict[str, Tensor | None], written: tuple[str, ...],
                      *arguments: Any) -> tuple[Tensor, Tensor]:
    """The function's two results of the tensors' memory, of which it writes the named ones."""
    refuse_tangents(tuple(tensors), tuple(tensors.values()))
    arrays = {name: None if tensor is None else array_of(tensor, name)
              for name, tensor in tensors.items()}
    for name in written:
        tensor, array = tensors[name], arrays[name]
        assert tensor is not None and array is not None
        if array.size and array.ctypes.data != tensor.data_ptr():  # one that PyTorch negates later
            raise ValueError(f"{name}: got a tensor whose memory does not hold its numbers, wanted"
                             " a plain one that can be written into: its .resolve_neg()")
    found = function(*arrays.values(), *arguments)
    for name in written:  # autograd refuses what was saved before
        torch.autograd.graph.increment_version(tensors[name])
    return tensor_of(found[0]), tensor_of(found[1])


class _CoreCall(torch.autograd.Function):
    """Where what the backward pass needs was not kept, attention runs once more."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, call = arguments
        arrays = arrays_of(tuple(tensors), NAMES)
        if not any(ctx.needs_input_grad):
            output, lse = call.forward(*arrays)
            return tensor_of(output), tensor_of(lse)
        (output, lse), saved = call.forward(*arrays, save=True)
        keep(ctx, tensors, saved)
        ctx.call, ctx.shape = call, output.shape
        return tensor_of(output), tensor_of(lse)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None,
                 grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, saved = kept(ctx)
        if grad_output is grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        wanted = {name for name, needed in zip(NAMES, ctx.needs_input_grad, strict=False) if needed}
        return *differentiated(_backward, grad_output, grad_lse, *tensors, saved, ctx.call,
                               ctx.shape, wanted), None


def _backward(grad_output: Tensor | None, grad_lse: Tensor | None,
              *arguments: Any) -> tuple[Tensor | None, ...]:
    *tensors, saved, call, shape, wanted = arguments
    if saved is None:
        _, saved = call.forward(*arrays_of(tuple(tensors), NAMES), save=True)
    found = call.backward(saved, *grads_as_arrays((grad_output, grad_lse), shape), wanted)
    return tuple(None if (array := found.get(name)) is None else tensor_of(array)
                 for name in NAMES)
