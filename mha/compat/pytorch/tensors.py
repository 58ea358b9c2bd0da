"""mha's attention on PyTorch's tensors: their memory is read and shared, never copied.

Plain tensors go straight to the core, with a torch.autograd.Function where gradients are wanted.
What stands for a tensor while PyTorch traces (torch.compile, torch.export, fake tensors, other
subclasses) meets the operator torch.ops.mha.attention instead, which is the same call. PyTorch's
threads do the work.
"""

from __future__ import annotations

from typing import Any, Never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad as _forward_mode

from mha import _core
from mha.arguments import as_int, as_seed
from mha.compat.pytorch.team import share_threads
from mha.options import AttentionOptions, Window

DIFFERENTIABLE = ("query", "key", "value", "bias", "alibi", "relative_bias", "sinks")
NAMES = (*DIFFERENTIABLE, "mask", "key_lengths")  # the order of tensors everywhere below
PLAIN = (Tensor, torch.nn.Parameter)
KEPT = "mha_kept"
EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # since PyTorch 2.10

Tensors = tuple[Tensor | None, ...]


# What is no tensor in a call: causal, query_offset, window, scale, softcap, dropout, seed (a tensor
# only where it is traced), and by_token: the output is (batch, query_len, heads, head_dim).
Settings = tuple[bool, int | None, Window | None, float | None, float | None, float,
                 int | Tensor | None, bool]

# Between the layers of a model all caches are cold, and each step from name to name takes time.
_is_autocast_enabled = torch.is_autocast_enabled
_is_compiling = torch.compiler.is_compiling
_is_tracing = torch.jit.is_tracing


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None,
              alibi: Tensor | None = None, relative_bias: Tensor | None = None,
              sinks: Tensor | None = None, mask: Tensor | None = None,
              key_lengths: Tensor | None = None, *, causal: bool = False,
              query_offset: int | None = None, window: Window | None = None,
              scale: float | None = None, softcap: float | None = None, dropout: float = 0.0,
              rng: int | torch.Generator | None = None, by_token: bool = False) -> Tensor:
    """`functional_attention`; with by_token (batch, query_len, heads, head_dim) is returned."""
    if _is_autocast_enabled("cpu"):
        query, key, value = _autocast(query, key, value)
    tensors = (query, key, value, bias, alibi, relative_bias, sinks, mask, key_lengths)
    traced = _is_compiling() or _is_tracing()
    wants_gradients = False
    if _forward_mode._current_level >= 0:
        _refuse_tangents(tensors)
    for tensor in tensors:
        if tensor is not None:
            if type(tensor) not in PLAIN or not tensor.is_cpu:
                _check_tensors(tensors)
                traced = True
            elif tensor.requires_grad:
                wants_gradients = True
    if query_offset is not None and not traced:
        query_offset = as_int(query_offset, "query_offset")
    seed = _seed(rng, traced) if dropout else None
    settings = (causal, query_offset, window, scale, softcap, dropout, seed, by_token)
    if traced:
        return torch.ops.mha.attention(*tensors, *_flat(settings))
    if wants_gradients and torch.is_grad_enabled():
        return _Attention.apply(*tensors, settings)
    return _forward(tensors, settings)


def attention_weights(*tensors: Tensor | None, causal: bool, query_offset: int | None,
                      window: Window | None, scale: float | None,
                      softcap: float | None) -> Tensor:
    """The weights (batch, heads, query_len, key_len) before dropout, without gradients."""
    with torch.no_grad():
        settings = (causal, query_offset, window, scale, softcap, 0.0, None, False)
        return tensor_of(_attend(tensors, settings, return_weights=True)[1])


def array_of(tensor: Tensor) -> NDArray[Any]:
    """The tensor's memory as an array."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(_bfloat16())
    return tensor.numpy()


def tensor_of(array: NDArray[Any], by_token: bool = False) -> Tensor:
    """The array's memory as a tensor; by_token: axis 1, the heads, behind axis 2."""
    if EXCHANGE is not None:
        return _core.tensor_of_array(EXCHANGE, array, by_token)
    if by_token:
        array = array.swapaxes(1, 2)
    if array.dtype.kind != "f":  # bfloat16, which is no type of NumPy's own
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError("bfloat16: got tensors of it, which mha returns as arrays of ml_dtypes:"
                          " pip install ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In the type that torch.autocast wants of scaled_dot_product_attention."""
    dtype = torch.get_autocast_dtype("cpu")
    return tuple(tensor if tensor.dtype is torch.float64 else tensor.to(dtype)
                 for tensor in tensors)


def _refuse_tangents(tensors: Tensors) -> None:
    """The core computes no tangents: what has one would lose it."""
    for name, tensor in zip(NAMES, tensors, strict=True):
        if tensor is not None and _forward_mode.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{name}: got a tensor with a tangent, which mha's attention does not carry on,"
                ' wanted gradients backwards, or PyTorch\'s own ("eager" in transformers)')


def _check_tensors(tensors: Tensors) -> None:
    """TypeError or ValueError for what is no tensor, or holds its numbers elsewhere."""
    for name, tensor in zip(NAMES, tensors, strict=True):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, wanted a tensor")
        if tensor.device.type not in ("cpu", "meta"):
            raise ValueError(f"{name}: got a tensor on {tensor.device}, wanted one on the CPU")


def _seed(rng: int | torch.Generator | None, traced: bool) -> int | Tensor:
    """The seed of one call: PyTorch's own generator draws it, so that torch.manual_seed counts."""
    if rng is None or isinstance(rng, torch.Generator):
        drawn = torch.randint(2**63 - 1, (), generator=rng)
        return drawn if traced else int(drawn)
    if isinstance(rng, bool) or not isinstance(rng, int):
        raise TypeError(f"rng: got {type(rng).__name__}, wanted None, an int or a torch.Generator")
    seed = as_seed(rng, "rng")
    return torch.tensor(seed - 2**64 * (seed >= 2**63)) if traced else seed


def _arrays(tensors: Tensors) -> list[Any]:
    """The tensors' memory, by the table of C functions where it can be had."""
    arrays = _core.arrays_of_tensors(Tensor, EXCHANGE, tensors) if EXCHANGE is not None else None
    if arrays is not None:
        for tensor in tensors:
            if tensor is not None and tensor.is_neg():  # its memory has the opposite numbers
                break
        else:
            return arrays
    return _arrays_one_by_one(tensors)


def _arrays_one_by_one(tensors: Tensors) -> list[Any]:
    try:
        return [None if tensor is None else array_of(tensor) for tensor in tensors]
    except (TypeError, RuntimeError):  # which of them it was
        for name, tensor in zip(NAMES, tensors, strict=True):
            try:
                if tensor is not None:
                    array_of(tensor)
            except (TypeError, RuntimeError) as error:
                raise type(error)(f"{name}: got a tensor that NumPy cannot read: {error}") from None
        raise


def _attend(tensors: Tensors, settings: Settings, **asked_for: Any) -> Any:
    """What the core returns; of by_token the heads of a token lie side by side."""
    query, key, value, bias, alibi, relative_bias, sinks, mask, key_lengths = _arrays(tensors)
    causal, query_offset, window, scale, softcap, dropout, seed, by_token = settings
    options = AttentionOptions(
        mask, bias, alibi, relative_bias, sinks, key_lengths, causal, query_offset, window, scale,
        softcap, "zeros", dropout, seed)
    # Of one query both layouts are the same memory. Halves that are kept are rounded from float32
    # at the end, into an array of the core's own.
    if by_token and query.shape[2] > 1:
        dtype = np.result_type(query, key, value)
        if not asked_for or dtype.itemsize > 2:
            batch, heads, query_len, _ = query.shape
            output = np.empty((batch, query_len, heads, value.shape[-1]), dtype)
            asked_for["out"] = output.swapaxes(1, 2)
    return _core.scaled_dot_product_attention(query, key, value, options, **asked_for)


def _forward(tensors: Tensors, settings: Settings) -> Tensor:
    return tensor_of(_attend(tensors, settings), settings[-1])


def _gradients(kept: object, grad_output: Tensor, wanted: set[str],
               settings: Settings) -> dict[str, Tensor | None]:
    grad = array_of(grad_output.resolve_neg())  # as it comes from the imaginary part of a conj()
    if settings[-1]:
        grad = grad.swapaxes(1, 2)
    found = _core.scaled_dot_product_attention_backward(kept, grad, None, wanted)
    return {name: None if array is None else tensor_of(array) for name, array in found.items()}


class _Attention(torch.autograd.Function):
    """The core's way back. What it needs hangs on a saved tensor, so that PyTorch frees it with
    the saved tensors; where hooks replaced that (checkpoints do), attention runs once more."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, settings = arguments
        output, kept = _attend(tuple(tensors), settings, keep=True)
        carrier = torch.empty(0)
        setattr(carrier, KEPT, kept)
        ctx.save_for_backward(*tensors, carrier)
        ctx.settings = settings
        return tensor_of(output, settings[-1])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, carrier = ctx.saved_tensors
        wanted = {name for name, needed in zip(NAMES, ctx.needs_input_grad, strict=False) if needed}
        kept = getattr(carrier, KEPT, None)
        way_back = _WayBack.apply if torch.is_grad_enabled() else _way_back  # create_graph
        return *way_back(grad_output, *tensors, kept, wanted, ctx.settings), None


def _way_back(grad_output: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    *tensors, kept, wanted, settings = arguments
    if kept is None:
        _, kept = _attend(tuple(tensors), settings, keep=True)
    found = _gradients(kept, grad_output, wanted, settings)
    return tuple(found.get(name) for name in NAMES)


class _WayBack(torch.autograd.Function):
    """The gradients, which depend on all of the call, and have none of their own: whoever asks for
    these is refused, instead of given zeros."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        return _way_back(*arguments)

    @staticmethod
    def backward(ctx: Any, *unused: Tensor | None) -> Never:
        _refuse_second_gradients(ctx)


def _refuse_second_gradients(ctx: Any, *unused: Any) -> Never:
    raise NotImplementedError(
        "mha's attention has no gradients of gradients; wanted one backward pass without"
        ' create_graph, or PyTorch\'s own attention ("eager" in transformers)')


# The operator: the same call, for what traces.

_TENSORS = "Tensor query, Tensor key, Tensor value, " + ", ".join(
    f"Tensor? {name}" for name in NAMES[3:])
_SETTINGS = ("bool causal, SymInt? query_offset, SymInt? window_left, SymInt? window_right,"
             " float? scale, float? softcap, float dropout, Tensor? seed, bool by_token")
_OPERATOR = "mha::attention"
_BACKWARD = "mha::attention_backward"


def _flat(settings: Settings) -> tuple[Any, ...]:
    """The settings as the operator takes them."""
    causal, query_offset, window, scale, softcap, dropout, seed, by_token = settings
    left, right = (None, None) if window is None else window
    return causal, query_offset, left, right, scale, softcap, float(dropout), seed, by_token


def _parted(arguments: tuple[Any, ...]) -> tuple[Tensors, Settings]:
    """Tensors and settings from what the operator took."""
    tensors, (causal, query_offset, left, right, scale, softcap, dropout, seed, by_token) = (
        arguments[:len(NAMES)], arguments[len(NAMES):])
    window = None if left is None and right is None else (left, right)
    if seed is not None:
        seed = int(seed) % 2**64
    return tensors, (causal, query_offset, window, scale, softcap, dropout, seed, by_token)


def _operate(*arguments: Any) -> Tensor:
    return _forward(*_parted(arguments))


def _operate_backward(grad_output: Tensor, wanted: list[bool], *arguments: Any) -> list[Tensor]:
    tensors, settings = _parted(arguments)
    _, kept = _attend(tensors, settings, keep=True)
    arguments_by_name = {name: tensor for name, tensor, needed in zip(
        DIFFERENTIABLE, tensors, wanted, strict=False) if needed and tensor is not None}
    found = _gradients(kept, grad_output, set(arguments_by_name), settings)
    # Those of biases and sinks are float32, whatever halves the arguments are.
    return [gradient.to(tensor.dtype) for name, tensor in arguments_by_name.items()
            if (gradient := found[name]) is not None]


def _shaped(*arguments: Any) -> Tensor:
    """An output without numbers."""
    query, key, value, by_token = *arguments[:3], arguments[-1]
    *leading, query_len, _ = query.shape
    if by_token:
        leading, query_len = [leading[0], query_len], leading[1]
    dtype = torch.promote_types(query.dtype, torch.promote_types(key.dtype, value.dtype))
    return query.new_empty((*leading, query_len, value.shape[-1]), dtype=dtype)


def _shaped_backward(grad_output: Tensor, wanted: list[bool], *arguments: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape)
            for tensor, needed in zip(arguments, wanted, strict=False) if needed]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, settings = inputs[:len(NAMES)], list(inputs[len(NAMES):])
    ctx.save_for_backward(*tensors, settings[-2])
    ctx.settings = (*settings[:-2], settings[-1])


def _pull_back(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, seed = ctx.saved_tensors
    wanted = [bool(needed) for needed in ctx.needs_input_grad[:len(DIFFERENTIABLE)]]
    *settings, by_token = ctx.settings
    found = iter(torch.ops.mha.attention_backward(grad_output, wanted, *tensors, *settings, seed,
                                                  by_token))
    gradients = [next(found) if needed else None for needed in wanted]
    return (*gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients)))


torch.library.define(_OPERATOR, f"({_TENSORS}, {_SETTINGS}) -> Tensor")
torch.library.define(
    _BACKWARD, f"(Tensor grad_output, bool[] wanted, {_TENSORS}, {_SETTINGS}) -> Tensor[]")
torch.library.impl(_OPERATOR, "cpu")(_operate)
torch.library.impl(_BACKWARD, "cpu")(_operate_backward)
torch.library.register_fake(_OPERATOR)(_shaped)
torch.library.register_fake(_BACKWARD)(_shaped_backward)
torch.library.register_autograd(_OPERATOR, _pull_back, setup_context=_remember)
torch.library.register_autograd(_BACKWARD, _refuse_second_gradients)

share_threads()
