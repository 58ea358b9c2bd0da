"""mha's attention on PyTorch's tensors: their memory is read and shared, never copied.

Plain tensors go straight to the core, with a torch.autograd.Function where gradients are wanted.
What stands for a tensor while PyTorch traces (torch.compile, torch.export, make_fx, fake tensors,
other subclasses) meets the operator torch.ops.mha.attention instead, which is the same call;
transforms of torch.func meet it too. PyTorch's threads do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Never

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad as _forward_mode
from torch.nn.parameter import is_lazy

from mha._base.arguments import as_int, as_seed
from mha._base.torch_tensors import is_causal_bias, plain, triangle
from mha._functions.options import Window
from mha.compat.pytorch import _operators as operators
from mha.compat.pytorch._memory import PLAIN, Tensors
from mha.compat.pytorch._operators import NAMES, Extras, Settings, attend, forward, gradients
from mha.compat.pytorch._team import share_threads

SAVED = "mha_kept"

# Between the layers of a model all caches are cold, and each step from name to name takes time.
_is_autocast_enabled = torch.is_autocast_enabled
_is_compiling = torch.compiler.is_compiling
_is_tracing = torch.jit.is_tracing
_is_transforming = torch._C._are_functorch_transforms_active
_number_of_modes = torch._C._len_torch_dispatch_stack
_compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch  # modes that see operators as they are called


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None,
              alibi: Tensor | None = None, relative_bias: Tensor | None = None,
              sinks: Tensor | None = None, mask: Tensor | None = None,
              key_lengths: Tensor | None = None, *, causal: bool = False,
              query_offset: int | None = None, window: Window | None = None,
              scale: float | None = None, softcap: float | None = None, dropout: float = 0.0,
              rng: int | torch.Generator | None = None, by_token: bool = False,
              extras: Extras | None = None) -> Any:
    """`functional_attention`; with by_token (batch, query_len, heads, head_dim) is returned, and
    with extras a list of the output and what they ask for."""
    if _is_autocast_enabled("cpu"):
        query, key, value = autocast(query, key, value)
    tensors: Tensors = (query, key, value, bias, alibi, relative_bias, sinks, mask, key_lengths)
    traced = (_is_compiling() or _is_tracing() or _is_transforming() or _number_of_modes() > 0
              or _is_included(_PRE_DISPATCH))
    wants_gradients = False
    if _forward_mode._current_level >= 0:
        refuse_tangents(NAMES, tensors)
    for tensor in tensors:
        if tensor is not None:
            if type(tensor) not in PLAIN or not tensor.is_cpu:
                if not _is_compiling() and _compiler() is not None:  # it could not take the tensor
                    return torch.compiler.disable(attention)(
                        *tensors, causal=causal, query_offset=query_offset, window=window,
                        scale=scale, softcap=softcap, dropout=dropout, rng=rng, by_token=by_token,
                        extras=extras)
                tensors, others = _checked(tensors)
                traced = traced or others
                wants_gradients = any(tensor is not None and tensor.requires_grad
                                      for tensor in tensors)
                break
            if tensor.requires_grad:
                wants_gradients = True
    if query_offset is not None and not traced:
        query_offset = as_int(query_offset, "query_offset")
    seed = drawn_seed(rng, traced) if dropout else None
    settings = (causal, query_offset, window, scale, softcap, dropout, seed, by_token)
    if traced:
        return _by_operator(tensors, settings, extras)
    if wants_gradients and torch.is_grad_enabled():
        if extras is None:
            return _Attention.apply(*tensors, settings, None)
        return list(_Attention.apply(*tensors, settings, extras))
    if extras is None:
        return forward(tensors, settings)
    return operators.outputs(tensors, settings, extras)


def attention_weights(*tensors: Tensor | None, causal: bool, query_offset: int | None,
                      window: Window | None, scale: float | None,
                      softcap: float | None) -> Tensor:
    """The weights (batch, heads, query_len, key_len) before dropout, without gradients."""
    with torch.no_grad():
        settings = (causal, query_offset, window, scale, softcap, 0.0, None, False)
        return operators.outputs(tensors, settings, (True, False))[1]


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In the type that torch.autocast wants of scaled_dot_product_attention."""
    dtype = torch.get_autocast_dtype("cpu")
    return tuple(tensor if tensor.dtype is torch.float64 else tensor.to(dtype)
                 for tensor in tensors)


def refuse_tangents(names: Sequence[str], tensors: Tensors) -> None:
    """The core computes no tangents: what has one would lose it."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None and _forward_mode.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{name}: got a tensor with a tangent, which mha's attention does not carry on,"
                ' wanted gradients backwards, or PyTorch\'s own ("eager" in transformers)')


def _checked(tensors: Tensors) -> tuple[Tensors, bool]:
    """The tensors, and whether the operator must be called for them.

    TypeError or ValueError for what is no tensor, holds its numbers elsewhere, or has no numbers
    where others have.
    """
    found = tuple(_checked_one(tensor, name) for name, tensor in zip(NAMES, tensors, strict=True))
    operators.check_devices(found)
    given = {name: tensor for name, tensor in zip(NAMES, found, strict=True) if tensor is not None}
    fakes = {name: tensor for name, tensor in given.items() if isinstance(tensor, FakeTensor)}
    for name in given.keys() - fakes.keys() if fakes else ():
        first = next(iter(fakes))
        if not fakes[first].fake_mode.allow_non_fake_inputs:
            raise TypeError(f"{name}: got a tensor with numbers, wanted a FakeTensor as {first} is")
    return found, any(type(tensor) not in PLAIN or not tensor.is_cpu for tensor in given.values())


def _checked_one(tensor: Any, name: str) -> Tensor | None:
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, wanted a tensor")
    if is_causal_bias(tensor):
        return triangle(tensor)
    if tensor.is_nested or is_lazy(tensor):  # of whose classes PyTorch would speak
        plain(tensor, name)
    if tensor.device.type not in ("cpu", "meta"):
        raise ValueError(f"{name}: got a tensor on {tensor.device}, wanted one on the CPU")
    return tensor


def drawn_seed(rng: int | torch.Generator | None, traced: bool = False) -> int | Tensor:
    """The seed of one call: PyTorch's own generator draws it, so that torch.manual_seed counts."""
    if rng is None or isinstance(rng, torch.Generator):
        drawn = torch.randint(2**63 - 1, (), generator=rng)
        return drawn if traced else int(drawn)
    if isinstance(rng, bool) or not isinstance(rng, int):
        raise TypeError(f"rng: got {type(rng).__name__}, wanted None, an int or a torch.Generator")
    return as_seed(rng, "rng")


def _by_operator(tensors: Tensors, settings: Settings, extras: Extras | None) -> Any:
    """The same by an operator, which PyTorch's compilers and transforms know."""
    arguments = *tensors, *operators.flat(settings)
    if not _is_compiling() and _is_transforming():
        kinds = {level.key() for level in torch._C._functorch.get_interpreter_stack()}
        apart = TransformType.Functionalize in kinds or _is_included(_PRE_DISPATCH)
        if not apart:
            found = operators.Transformed.apply(*arguments, *(extras or (False, False)))
            return found[0] if extras is None else list(found)
        if not kinds <= {TransformType.Functionalize, TransformType.Vmap}:
            raise NotImplementedError(
                "mha's attention: got torch.func's grad, vjp or jacrev together with functionalize"
                " or make_fx(pre_dispatch=True), under which PyTorch calls no autograd.Function;"
                " wanted one without the other")
    if extras is None:
        return torch.ops.mha.attention(*arguments)
    return torch.ops.mha.attention_outputs(*arguments, *extras)


class _Attention(torch.autograd.Function):
    """The core's backward pass. Where what it needs was not kept, attention runs once more."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, settings, extras = arguments
        weights, lse = extras or (False, False)
        found, saved = attend(tuple(tensors), settings, save=True, return_weights=weights,
                             return_lse=lse)
        keep(ctx, tensors, saved)
        ctx.settings, ctx.has_lse = settings, lse
        output, *others = operators.as_tensors(found, settings)
        if weights:
            ctx.mark_non_differentiable(others[0])
        return output if extras is None else (output, *others)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None,
                 *others: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, saved = kept(ctx)
        grad_lse = others[-1] if ctx.has_lse else None
        if grad_output is grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        if _is_transforming() or _is_batched(grad_output) or _is_batched(grad_lse):
            return *operators.backward_call(
                operators.TransformedBack.apply, (grad_output, grad_lse), ctx.needs_input_grad,
                (*tensors, *operators.flat(ctx.settings))), None, None
        wanted = {name for name, needed in zip(NAMES, ctx.needs_input_grad, strict=False) if needed}
        return *differentiated(_backward, grad_output, grad_lse, *tensors, saved, wanted,
                               ctx.settings), None, None


def _is_batched(grad: Tensor | None) -> bool:
    """Whether it is those of several losses at once, as is_grads_batched has them."""
    return grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)


def _backward(grad_output: Tensor | None, grad_lse: Tensor | None,
              *arguments: Any) -> tuple[Tensor | None, ...]:
    *tensors, saved, wanted, settings = arguments
    if saved is None:
        _, saved = attend(tuple(tensors), settings, save=True)
    found = gradients(saved, tuple(tensors), (grad_output, grad_lse), wanted, settings)
    return tuple(found.get(name) for name in NAMES)


class Gradients(torch.autograd.Function):
    """compute(*arguments), gradients which depend on all of a call and have none of their own:
    whoever asks for these is refused, instead of given zeros."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *arguments: Any) -> Any:
        return compute(*arguments)

    @staticmethod
    def backward(ctx: Any, *unused: Tensor | None) -> Never:
        operators.refuse_second_gradients(ctx)


def differentiated(compute: Callable[..., Any], *arguments: Any) -> Any:
    """compute(*arguments), the gradients of a backward pass; with create_graph as `Gradients`."""
    if torch.is_grad_enabled():
        return Gradients.apply(compute, *arguments)
    return compute(*arguments)


def keep(ctx: Any, tensors: Sequence[Tensor | None], saved: object) -> None:
    """For the backward pass. What the core saved hangs on a saved tensor, so that PyTorch frees it
    with those."""
    carrier = torch.empty(0)
    setattr(carrier, SAVED, saved)
    ctx.save_for_backward(*tensors, carrier)
    ctx.set_materialize_grads(False)


def kept(ctx: Any) -> tuple[list[Tensor], Any]:
    """The tensors, and what the core saved: None where hooks replaced the saved tensors, as
    checkpoints do."""
    *tensors, carrier = ctx.saved_tensors
    return tensors, getattr(carrier, SAVED, None)


share_threads()
