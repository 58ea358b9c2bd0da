"""The memory of tensors as arrays, and of arrays as tensors: shared, never copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mha import _core
from mha._base.arguments import detached_array
from mha._base.torch_tensors import plain
from mha.compat._shared.dtypes import bfloat16

PLAIN = (Tensor, torch.nn.Parameter)  # no other class has nothing but what its memory holds
EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # since PyTorch 2.10
_FUNCTIONS = Tensor.is_neg, Tensor.untyped_storage, torch.UntypedStorage.data_ptr

Tensors = tuple[Tensor | None, ...]


def arrays_of(tensors: Tensors, names: Sequence[str]) -> list[Any]:
    """The tensors' memory, by the table of C functions where it can be had; errors have the names.

    What must be computed first, as a negation that PyTorch put off, is copied.
    """
    if EXCHANGE is not None:
        arrays = _core.arrays_of_tensors(PLAIN, EXCHANGE, _FUNCTIONS, tensors)
        if arrays is not None:
            return arrays
    return [None if tensor is None else array_of(tensor, name)
            for tensor, name in zip(tensors, names, strict=True)]


def array_of(tensor: Tensor, name: str) -> NDArray[Any]:
    """The tensor's memory as an array."""
    if tensor.dtype is torch.bfloat16:
        bits = plain(tensor, name).detach().view(torch.uint16)
        return detached_array(bits, name).view(bfloat16(name))
    return detached_array(tensor, name)


def tensor_of(array: NDArray[Any], by_token: bool = False) -> Tensor:
    """The array's memory as a tensor; by_token: axis 1, the heads, behind axis 2."""
    if EXCHANGE is not None:
        return _core.tensor_of_array(EXCHANGE, array, by_token)
    if by_token:
        array = array.swapaxes(1, 2)
    if array.dtype.kind != "f":  # bfloat16, which is no type of NumPy's own
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
