"""mha's attention on tensors, and the operators by which PyTorch's compilers and transforms see it.

torch.ops.mha.attention is the call, torch.ops.mha.attention_outputs the same with the weights and
lse, torch.ops.mha.attention_backward the backward pass of both. torch.vmap computes them item by
item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mha import _core
from mha._functions.options import AttentionOptions, Window
from mha.compat.pytorch._memory import Tensors, array_of, arrays_of, tensor_of

DIFFERENTIABLE = ("query", "key", "value", "bias", "alibi", "relative_bias", "sinks")
NAMES = (*DIFFERENTIABLE, "mask", "key_lengths")  # the order of tensors everywhere below

# What is no tensor in a call: causal, query_offset, window, scale, softcap, dropout, seed (a tensor
# only where it is traced), and by_token: the output is (batch, query_len, heads, head_dim).
Settings = tuple[bool, int | None, Window | None, float | None, float | None, float,
                 int | Tensor | None, bool]
# Whether the weights and lse are returned behind the output.
Extras = tuple[bool, bool]


def attend(tensors: Tensors, settings: Settings, **asked_for: Any) -> Any:
    """What the core returns; of by_token the heads of a token lie side by side."""
    query, key, value, bias, alibi, relative_bias, sinks, mask, key_lengths = arrays_of(
        tensors, NAMES)
    causal, query_offset, window, scale, softcap, dropout, seed, by_token = settings
    options = AttentionOptions(
        mask, bias, alibi, relative_bias, sinks, key_lengths, causal, query_offset, window, scale,
        softcap, "zeros", dropout, seed)
    # Of one query both layouts are the same memory. Halves that are kept are rounded from float32
    # at the end, into an array of the core's own.
    if by_token and query.shape[2] > 1:
        dtype = np.result_type(query, key, value)
        if "save" not in asked_for or dtype.itemsize > 2:
            batch, heads, query_len, _ = query.shape
            output = np.empty((batch, query_len, heads, value.shape[-1]), dtype)
            asked_for["out"] = output.swapaxes(1, 2)
    return _core.scaled_dot_product_attention(query, key, value, options, **asked_for)


def forward(tensors: Tensors, settings: Settings) -> Tensor:
    return tensor_of(attend(tensors, settings), settings[-1])


def outputs(tensors: Tensors, settings: Settings, extras: Extras) -> list[Tensor]:
    """The output, and behind it the weights and lse that are asked for."""
    found = attend(tensors, settings, return_weights=extras[0], return_lse=extras[1])
    return as_tensors(found, settings)


def as_tensors(found: Any, settings: Settings) -> list[Tensor]:
    """The core's results, one or more, of which only the output may be by token."""
    output, *others = found if isinstance(found, tuple) else (found,)
    return [tensor_of(output, settings[-1]), *map(tensor_of, others)]


def gradients(saved: object, tensors: Tensors, grads: tuple[Tensor | None, Tensor | None],
              wanted: set[str], settings: Settings) -> dict[str, Tensor | None]:
    """By name, from those by the output and by lse, of which None stands for zeros."""
    query, _, value, *_ = tensors
    assert query is not None and value is not None
    grad_output, grad_lse = grads_as_arrays(grads, (*query.shape[:-1], value.shape[-1]))
    if grads[0] is not None and settings[-1]:
        grad_output = grad_output.swapaxes(1, 2)
    found = _core.scaled_dot_product_attention_backward(saved, grad_output, grad_lse, wanted)
    return {name: None if array is None else tensor_of(array) for name, array in found.items()}


def grads_as_arrays(grads: tuple[Tensor | None, Tensor | None], shape: tuple[int, ...],
                    ) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Those by the output, zeros of this shape for None, and by lse."""
    grad_output, grad_lse = (None if grad is None else array_of(grad, name)
                             for grad, name in zip(grads, ("grad_output", "grad_lse"), strict=True))
    if grad_output is None:
        assert grad_lse is not None
        grad_output = np.zeros(shape, grad_lse.dtype)
    return grad_output, grad_lse


def refuse_second_gradients(ctx: Any, *unused: Any) -> Never:
    raise NotImplementedError(
        "mha's attention has no gradients of gradients, forwards or backwards; wanted one backward"
        ' pass without create_graph, or PyTorch\'s own attention ("eager" in transformers)')


# The operators. Their arguments are the tensors, and the settings one by one.

_TENSORS = "Tensor query, Tensor key, Tensor value, " + ", ".join(
    f"Tensor? {name}" for name in NAMES[3:])
_SETTINGS = ("bool causal, SymInt? query_offset, SymInt? window_left, SymInt? window_right,"
             " float? scale, float? softcap, float dropout, Tensor? seed, bool by_token")
_COUNT = len(NAMES) + _SETTINGS.count(",") + 1


def flat(settings: Settings) -> tuple[Any, ...]:
    """The settings as the operators take them."""
    causal, query_offset, window, scale, softcap, dropout, seed, by_token = settings
    left, right = (None, None) if window is None else window
    if isinstance(seed, int):
        seed = torch.tensor(seed - 2**64 * (seed >= 2**63))
    return causal, query_offset, left, right, scale, softcap, float(dropout), seed, by_token


def _parted(arguments: tuple[Any, ...]) -> tuple[Tensors, Settings]:
    """Tensors and settings from what an operator took."""
    tensors, (causal, query_offset, left, right, scale, softcap, dropout, seed, by_token) = (
        arguments[:len(NAMES)], arguments[len(NAMES):])
    window = None if left is None and right is None else (left, right)
    if seed is not None:
        seed = int(seed) % 2**64
    return tensors, (causal, query_offset, window, scale, softcap, dropout, seed, by_token)


def _operate(*arguments: Any) -> Tensor:
    return forward(*_parted(arguments))


def _operate_outputs(*arguments: Any) -> list[Tensor]:
    return outputs(*_parted(arguments[:-2]), arguments[-2:])


def _operate_backward(grad_output: Tensor | None, grad_lse: Tensor | None, wanted: list[bool],
                      *arguments: Any) -> tuple[Tensor, ...]:
    tensors, settings = _parted(arguments)
    _, saved = attend(tensors, settings, save=True)
    names = {name for name, needed in zip(DIFFERENTIABLE, wanted, strict=True) if needed}
    found = gradients(saved, tensors, (grad_output, grad_lse), names, settings)
    # Those of biases and sinks are float32, whatever halves the arguments are.
    return tuple(
        torch.empty(0) if tensor is None or (gradient := found.get(name)) is None
        else _laid_out_like(tensor, gradient.to(tensor.dtype))
        for name, tensor in zip(DIFFERENTIABLE, tensors, strict=False))


def _laid_out_like(tensor: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the strides that `_shaped_backward` foretells: compilers rely on them."""
    if gradient.stride() == torch.empty_like(tensor, device="meta").stride():
        return gradient
    return torch.empty_like(tensor).copy_(gradient)


def check_devices(tensors: Tensors) -> None:
    """TypeError where some tensors have numbers and others, on meta, have none."""
    kinds = {name: tensor.device for name, tensor in zip(NAMES, tensors, strict=True)
             if tensor is not None}
    for name, device in kinds.items():
        if device != kinds["query"]:
            raise TypeError(f"{name}: got a tensor on {device}, wanted one on {kinds['query']},"
                            " as query is")


def _shaped(*arguments: Any) -> Tensor:
    """An output without numbers."""
    query, key, value, by_token = *arguments[:3], arguments[-1]
    check_devices(arguments[:len(NAMES)])
    *leading, query_len, _ = query.shape
    if by_token:
        leading, query_len = [leading[0], query_len], leading[1]
    dtype = torch.promote_types(query.dtype, torch.promote_types(key.dtype, value.dtype))
    return query.new_empty((*leading, query_len, value.shape[-1]), dtype=dtype)


def _shaped_outputs(*arguments: Any) -> list[Tensor]:
    query, key, return_weights, return_lse = *arguments[:2], *arguments[-2:]
    output = _shaped(*arguments[:-2])
    dtype = torch.float64 if output.dtype is torch.float64 else torch.float32
    found = [output]
    if return_weights:
        found.append(query.new_empty((*query.shape[:-1], key.shape[-2]), dtype=dtype))
    if return_lse:
        found.append(query.new_empty(query.shape[:-1], dtype=dtype))
    return found


def _shaped_backward(grad_output: Tensor | None, grad_lse: Tensor | None, wanted: list[bool],
                     *arguments: Any) -> tuple[Tensor, ...]:
    query = arguments[0]
    return tuple(torch.empty_like(tensor) if needed and tensor is not None
                 else query.new_empty(0, dtype=torch.float32)
                 for tensor, needed in zip(arguments, wanted, strict=False))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, (*settings, seed, by_token), extras = (
        inputs[:len(NAMES)], inputs[len(NAMES):_COUNT], inputs[_COUNT:] or (False, False))
    ctx.save_for_backward(*tensors, seed)
    ctx.settings, ctx.by_token, ctx.has_lse = settings, by_token, extras[1]
    if extras[0]:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def backward_call(back: Callable[..., Any], grads: tuple[Tensor | None, Tensor | None],
             needed: tuple[bool, ...], arguments: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of a call's tensors by `back`, an operator or a function of its arguments."""
    wanted = list(needed[:len(DIFFERENTIABLE)])
    found = back(*grads, wanted, *arguments)
    return (*[gradient if is_wanted else None
              for gradient, is_wanted in zip(found, wanted, strict=True)],
            *[None] * (len(NAMES) - len(wanted)))


def _pull_back_by(back: Callable[..., Any], ctx: Any,
                  grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    *tensors, seed = ctx.saved_tensors
    grad_output, grad_lse = grads[0], grads[-1] if ctx.has_lse else None
    found: tuple[Tensor | None, ...] = ()
    if not (grad_output is grad_lse is None):
        found = backward_call(back, (grad_output, grad_lse), ctx.needs_input_grad,
                         (*tensors, *ctx.settings, seed, ctx.by_token))
    return (*found, *[None] * (len(ctx.needs_input_grad) - len(found)))


def _pull_back(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
    return _pull_back_by(torch.ops.mha.attention_backward, ctx, [grad_output])


def _pull_back_outputs(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    return _pull_back_by(torch.ops.mha.attention_backward, ctx, grads)


def _item_by_item(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of torch.vmap for an operator: a call for each item, whatever is batched."""
    def rule(info: Any, axes: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        count = info.batch_size
        results = [operator(*[_item(argument, axis, i) for argument, axis in zip(
            arguments, axes, strict=True)]) for i in range(max(count, 1))]
        if isinstance(results[0], Tensor):
            return torch.stack(results)[:count], 0
        stacked = [torch.stack(parts)[:count] for parts in zip(*results, strict=True)]
        kind = type(results[0])  # a list or a tuple, as the signature says
        return kind(stacked), kind(0 for _ in stacked)
    return rule


def _item(argument: Any, axis: Any, i: int) -> Any:
    """One of the items along the axis; of none, zeros, for their shape."""
    if not isinstance(axis, int):  # None, or a list of None for a list of bools
        return argument
    if argument.shape[axis] == 0:
        return argument.new_zeros((*argument.shape[:axis], *argument.shape[axis + 1:]))
    return argument.select(axis, i)


def _define(name: str, signature: str, compute: Callable[..., Any], shape: Callable[..., Any],
            pull_back: Callable[..., Any], remember: Callable[..., None] | None) -> None:
    """The operator torch.ops.mha.<name>: numbers, shapes, gradients, and vmap."""
    operator = f"mha::{name}"
    torch.library.define(operator, signature)
    torch.library.impl(operator, "cpu")(compute)
    torch.library.register_fake(operator)(shape)
    torch.library.register_autograd(operator, pull_back, setup_context=remember)
    torch.library.register_vmap(operator, _item_by_item(getattr(torch.ops.mha, name)))


_define("attention", f"({_TENSORS}, {_SETTINGS}) -> Tensor", _operate, _shaped, _pull_back,
        _remember)
_define("attention_outputs",
        f"({_TENSORS}, {_SETTINGS}, bool return_weights, bool return_lse) -> Tensor[]",
        _operate_outputs, _shaped_outputs, _pull_back_outputs, _remember)
_define("attention_backward",
        f"(Tensor? grad_output, Tensor? grad_lse, bool[] wanted, {_TENSORS}, {_SETTINGS})"
        f" -> ({', '.join(['Tensor'] * len(DIFFERENTIABLE))})", _operate_backward, _shaped_backward,
        refuse_second_gradients, None)


# The same where torch.func takes gradients, which asks more of a function than of an operator.

class Transformed(torch.autograd.Function):
    """torch.ops.mha.attention_outputs inside transforms of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(torch.ops.mha.attention_outputs(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _remember(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _pull_back_by(TransformedBack.apply, ctx, grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Never:
        refuse_second_gradients(ctx)


class TransformedBack(torch.autograd.Function):
    """torch.ops.mha.attention_backward inside transforms of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return torch.ops.mha.attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is saved: there is no backward pass of this."""

    backward = jvp = staticmethod(refuse_second_gradients)
