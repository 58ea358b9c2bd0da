"""Modules and functions of PyTorch: called with NumPy arrays, their parameters read as such.

Nothing here imports torch: who has a module has imported it.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import numpy as np

from mha.testing._diagnosis.aliases import Array, Tested

HALVES = ("torch.float16", "torch.bfloat16")


def _torch() -> Any:
    """The torch that the user imported, or None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "nn") else None


def is_tensor(thing: object) -> bool:
    return (torch := _torch()) is not None and isinstance(thing, torch.Tensor)


def is_module(thing: object) -> bool:
    return (torch := _torch()) is not None and isinstance(thing, torch.nn.Module)


def modules_of(thing: object) -> list[Any]:
    """The modules that an object is, or that its attributes and bound methods belong to."""
    if _torch() is None:
        return []
    if is_module(thing):
        return [thing]
    held = [getattr(other, "func", other) for other in getattr(thing, "__dict__", {}).values()]
    owners = [getattr(other, "__self__", other) for other in held]
    return [owner for owner in owners if is_module(owner)]


def attributes(module: Any) -> list[tuple[str | int, object]]:
    """The parameters, parts and other attributes of a module; those of lists by their index."""
    held = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
    held += [*module._parameters.items(), *module._modules.items()]
    return [(int(name) if name.isdigit() else name, value) for name, value in held
            if value is not None]


def array_of(tensor: Any) -> Array | None:
    """The tensor's own memory as an array; None where it holds no numbers or no such memory."""
    try:
        array: Array = tensor.detach().numpy()
    except Exception:  # lazy, sparse, on another device ...
        return None
    return array


def in_out(module: Any, name: str | int, array: Array) -> Array | None:
    """A matrix as (in, out) where the module's type tells how it is kept; else None."""
    nn = _torch().nn
    if array.ndim != 2:
        return None
    if (isinstance(module, nn.Linear) and name == "weight") or isinstance(
            module, nn.MultiheadAttention):
        return array.T
    is_conv = any(base.__name__ == "Conv1D" for base in type(module).__mro__)  # of transformers
    return array if is_conv and name == "weight" else None


def unset(module: Any) -> list[str]:
    """Names of parameters that get their shape when the module is first called."""
    is_lazy = _torch().nn.parameter.is_lazy
    return [name for name, parameter in module.named_parameters() if is_lazy(parameter)]


def give_shape(module: Any, width: int) -> None:
    """Parameters that wait for a first call get their shape, where `forward` does not call them."""
    torch = _torch()
    for part in module.modules():
        if not list(part.children()) and any(map(torch.nn.parameter.is_lazy, part.parameters())):
            with torch.no_grad():
                part(torch.ones(1, width))


def has_matrices(thing: object) -> bool:
    """Whether a module, or one in an object, has parameters to multiply by."""
    return any(parameter.ndim > 1 for module in modules_of(thing)
               for parameter in module.parameters())


def speaks_torch(function: object) -> bool:
    """Whether a function is one of tensors: its code names something of torch, or its file does,
    and its code nothing of NumPy."""
    inner = inspect.unwrap(getattr(function, "func", function))  # type: ignore[arg-type]
    inner = getattr(inner, "__func__", inner)
    code, names = getattr(inner, "__code__", None), getattr(inner, "__globals__", {})
    if _torch() is None or not isinstance(code, CodeType):
        return _origin(inner) == "torch"
    origins = {_origin(names.get(name)) for name in _names_in(code)}
    return "torch" in origins or ("numpy" not in origins and any(
        _origin(thing) == "torch" for thing in names.values()))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _origin(thing: object) -> str:
    """The package that a module, function or class is of."""
    where = thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", "")
    return where.split(".")[0] if isinstance(where, str) else ""


def with_tensors(function: Tested, modules: list[Any] | None = None) -> Tested:
    """The function of tensors as one of arrays, with the same signature; modules tell the type."""
    torch = _torch()
    floats = [p.dtype for module in modules or () for p in module.parameters()
              if p.is_floating_point()]
    dtype = floats[0] if floats else torch.get_default_dtype()

    def called(*arrays: Any, **options: Any) -> Any:
        given = [(array, _tensor(array, dtype)) for array in (*arrays, *options.values())]
        before = [tensor.clone() if is_tensor(tensor) else None for _, tensor in given]
        with torch.no_grad():
            result = function(*(tensor for _, tensor in given[:len(arrays)]),
                              **dict(zip(options, (tensor for _, tensor in given[len(arrays):]))))
        for (array, tensor), old in zip(given, before):
            if old is not None and not torch.equal(tensor, old):
                array[...] = tensor.numpy()  # a change of the argument shows
        return _arrays(result)

    functools.update_wrapper(called, function, updated=())
    return called


def _tensor(array: object, dtype: Any) -> Any:
    """An array as a tensor, numbers as the module has them."""
    if not isinstance(array, np.ndarray):
        return array
    tensor = _torch().from_numpy(array.copy())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _arrays(result: Any) -> Any:
    if is_tensor(result):
        result = result.detach()
        return (result.float() if str(result.dtype) in HALVES else result).numpy()
    if isinstance(result, Mapping):
        return {name: _arrays(part) for name, part in result.items()}
    return type(result)(map(_arrays, result)) if type(result) in (tuple, list) else result


def original(thing: Any) -> Any:
    """What torch.compile made its module from; all else is itself."""
    return getattr(thing, "_orig_mod", thing) if is_module(thing) else thing


def in_float32(thing: Any) -> Any:
    """A module of halves, or on another device, as a copy in float32 on the CPU; else itself."""
    if not is_module(thing):
        return thing
    parameters = list(thing.parameters())
    if any(str(p.dtype) in HALVES or p.device.type not in ("cpu", "meta") for p in parameters):
        return copied(thing).float().cpu()
    return thing


def copied(thing: Any) -> Any:
    """A deep copy; what a call left on a module is kept without its history, which forbids it."""
    memo: dict[int, Any] = {}
    for module in modules_of(thing):
        for part in module.modules():
            memo |= {id(value): value.detach().clone() for value in vars(part).values()
                     if is_tensor(value) and not value.is_leaf}
    return copy.deepcopy(thing, memo)


def unreadable(thing: object) -> str:
    """Why the parameters of a module cannot be read, or ""."""
    for module in modules_of(thing):
        if isinstance(module, _torch().jit.ScriptModule):
            return "torch.jit made it; diagnose the module that it was made from"
        devices = {parameter.device.type for parameter in module.parameters()} - {"cpu"}
        if devices:
            return (f"its parameters are on the device {devices.pop()}; diagnose a copy on the CPU"
                    " that holds numbers")
    return ""


def advice(thing: object) -> str:
    """How to hand over a module that cannot be read."""
    if not modules_of(thing):
        return ""
    return ("; wrap a layer that cannot be read: types.SimpleNamespace(W_q=layer.a, W_k=layer.b,"
            " W_v=layer.c, W_o=layer.d, num_heads=4, forward=layer.forward), with your names and"
            " number, and functools.partial(layer.forward, name=value) where it wants more inputs")
