"""Tensors of PyTorch whose memory does not say what they mean.

NumPy and DLPack read a tensor's memory. Many a tensor means something else: PyTorch negates some
when it reads them, and keeps the numbers of others elsewhere, or none at all. The core asks here
about each tensor that it is given; nothing imports this module, and with it torch, before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# PyTorch chooses the code of an operation by the dispatch keys of its tensors, so that these say
# what a tensor is. Memory with the tensor's numbers, or what is easily made of them, has only:
_ORDINARY = frozenset({"CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU", "Named", "Negative",
                       "Conjugate", "ZeroTensor"})
_OUTSIDE = ("wanted one with its numbers: call it outside, or take mha.compat.pytorch's"
            " functional_attention")
# What a tensor with one of the keys is, and what to give instead; the first that fits counts.
_OTHERS = (
    ({"FuncTorchBatched", "BatchedNestedTensor"}, f"a tensor inside torch.vmap, {_OUTSIDE}"),
    ({"FuncTorchGradWrapper"},
     f"a tensor inside grad, vjp, jacrev, jvp or another of torch.func, {_OUTSIDE}"),
    ({"Functionalize"}, f"a tensor inside torch.func.functionalize, {_OUTSIDE}"),
    ({"NestedTensorCPU", "NestedTensorMeta"},
     "a nested tensor, wanted a plain one: its .to_padded_tensor(0), and which keys are real"),
    ({"Meta"}, "a tensor on meta, which has no numbers, wanted one on the CPU"),
    ({"SparseCPU", "SparseCsrCPU", "SparseMeta", "SparseCsrMeta"},
     "a sparse tensor, wanted a dense one: its .to_dense()"),
    ({"MkldnnCPU"}, "a tensor in the layout of MKLDNN, wanted a plain one: its .to_dense()"),
    ({"QuantizedCPU", "QuantizedMeta"},
     "a quantized tensor, wanted plain numbers: its .dequantize()"),
)

_NAMES: dict[int, frozenset[str]] = {}  # of the sets of keys that were seen: they are few


def plain(given: Any, name: str) -> Any:
    """A tensor whose memory holds the numbers of the given one: itself, where it can be.

    Of a list or tuple, a list whose tensors are all such. TypeError for what holds no numbers that
    NumPy could read; ValueError for memory that was freed, or is on another device.
    """
    if isinstance(given, (list, tuple)):
        return [plain(part, name) for part in given]
    if not isinstance(given, Tensor):
        return given
    if is_causal_bias(given):
        return triangle(given)
    keys = _dispatch_keys(given)
    _check_meaning(given, keys, name)
    tensor = given
    if "ZeroTensor" in keys:  # all are zero, and no memory says so
        tensor = tensor.clone()
    if keys & {"Negative", "Conjugate"}:
        tensor = tensor.resolve_conj().resolve_neg()
    _check_storage(tensor, name)
    return tensor


def is_causal_bias(tensor: Any) -> bool:
    kind = type(tensor)
    return (kind.__module__, kind.__name__) == ("torch.nn.attention.bias", "CausalBias")


def triangle(bias: Any) -> Tensor:
    """The mask that a torch.nn.attention.bias.CausalBias stands for: its own memory is never
    filled.

    >>> triangle(torch.nn.attention.bias.causal_upper_left(2, 3)).tolist()
    [[True, False, False], [True, True, False]]
    """
    query_len, key_len = bias.seq_len_q, bias.seq_len_kv
    offset = key_len - query_len if bias.variant.name == "LOWER_RIGHT" else 0
    return torch.ones(query_len, key_len, dtype=torch.bool).tril(offset)


def _dispatch_keys(tensor: Tensor) -> frozenset[str]:
    keys = torch._C._dispatch_keys(tensor)
    found = _NAMES.get(keys.raw_repr())
    if found is None:
        text = str(keys)  # DispatchKeySet(CPU, AutogradCPU)
        found = frozenset(text.removeprefix("DispatchKeySet(").removesuffix(")").split(", "))
        _NAMES[keys.raw_repr()] = found
    return found


def _check_meaning(tensor: Tensor, keys: frozenset[str], name: str) -> None:
    if keys <= _ORDINARY and tensor.is_cpu and _is_as_tensor(type(tensor)):
        return
    for others, text in _OTHERS:
        if keys & others:
            raise TypeError(f"{name}: got {text}")
    if "Python" in keys or not _is_as_tensor(type(tensor)):
        raise TypeError(
            f"{name}: got a {type(tensor).__name__}, a class of tensors that computes in its own"
            " way, wanted a plain torch.Tensor with its numbers")
    if not tensor.is_cpu:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, wanted one on the CPU")
    raise TypeError(f"{name}: got a tensor with {', '.join(sorted(keys - _ORDINARY))} among its"
                    " dispatch keys, wanted a plain one")


def _is_as_tensor(kind: type) -> bool:
    """Whether the class leaves to torch.Tensor what operations do: then its memory counts."""
    if kind is Tensor:
        return True
    function = kind.__torch_function__  # type: ignore[attr-defined]
    return getattr(function, "__func__", function) in (
        Tensor.__torch_function__.__func__, torch.nn.Parameter.__torch_function__)


def _check_storage(tensor: Tensor, name: str) -> None:
    """ValueError where a storage has become too small for the tensor: resized, as FSDP frees it."""
    if tensor.numel() == 0:
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    needed = (last + 1) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if held < needed:
        raise ValueError(
            f"{name}: got a tensor of shape {tuple(tensor.shape)} whose storage was resized to"
            f" {held} bytes, wanted the {needed} that its numbers take")
