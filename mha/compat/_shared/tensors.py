"""Which arguments are PyTorch's tensors, without importing PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def is_tensor(array: object) -> bool:
    return isinstance(array, getattr(sys.modules.get("torch"), "Tensor", ()))


def outside_compilers(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result. A compiler of PyTorch's that looks on goes around it: the graph breaks
    here."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.compiler.is_compiling():
        return function(*arguments)
    return torch.compiler.disable(function)(*arguments)


def are_tensors(**arrays: Any) -> bool:
    """Whether all of them are tensors, on the CPU, or none is; None counts as either."""
    given = {name: array for name, array in arrays.items() if array is not None}
    first = next((name for name, array in given.items() if is_tensor(array)), None)
    if first is None:
        return False
    for name, array in given.items():
        if not is_tensor(array):
            raise TypeError(f"{name}: got {type(array).__name__}, wanted a tensor as {first} is")
        if array.is_nested:  # it has no shape to look at
            from mha._base.torch_tensors import plain

            plain(array, name)
        if array.device.type != "cpu":
            raise ValueError(f"{name}: got a tensor on {array.device}, wanted one on the CPU")
    return True
