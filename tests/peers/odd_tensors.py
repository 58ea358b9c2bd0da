"""Tensors of PyTorch that mean something else than what NumPy or DLPack reads of their memory."""

import contextlib
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map


class Own(torch.Tensor):
    """A class that changes nothing: its memory counts."""


class Speaking(torch.Tensor):
    """A class with a word in what functions do: its memory may mean anything."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs)


class Wrapper(torch.Tensor):
    """A tensor around another, without memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def unwrapped(given):
            return given.inner if isinstance(given, Wrapper) else given

        found = function(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        return tree_map(lambda each: Wrapper(each) if isinstance(each, torch.Tensor) else each,
                        found)


def freed(tensor, nbytes=0):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake(tensor):
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


@contextlib.contextmanager
def nesting(increment, decrement):
    level = increment()
    try:
        yield level
    finally:
        decrement()


def batched(tensor):
    return torch._C._functorch._add_batch_dim(tensor.unsqueeze(0), 0, 1)


def in_grad(tensor):
    functorch = torch._C._functorch
    with nesting(functorch._grad_increment_nesting, functorch._grad_decrement_nesting) as level:
        return functorch._wrap_for_grad(tensor, level)


class Kind(NamedTuple):
    made: object  # from a plain tensor
    words: str | None  # of the error; None: its numbers are those of the plain tensor
    of: str = "fib"  # kinds of types: floating-point numbers, ints, bools


KINDS = {
    "parameter": Kind(lambda t: torch.nn.Parameter(t, requires_grad=False), None),
    "class": Kind(lambda t: t.as_subclass(Own), None),
    "strided": Kind(lambda t: torch.stack([t, t], -1)[..., 0], None),
    "copied on write": Kind(lambda t: torch._lazy_clone(t.clone()), None),
    "inference": Kind(torch.inference_mode()(torch.clone), None),
    "negated": Kind(lambda t: torch._neg_view(-t), None, "fi"),
    "imaginary": Kind(lambda t: torch.complex(t, -t).conj().imag, None, "f"),
    "meta": Kind(lambda t: t.to("meta"), "meta"),
    "freed": Kind(freed, "resized to 0 bytes"),
    "cut short": Kind(lambda t: freed(t, 1), "resized to 1 bytes"),
    "functionalized": Kind(torch._to_functional_tensor, "functionalize"),
    "batched": Kind(batched, "vmap"),
    "in grad": Kind(in_grad, "torch.func"),
    "fake": Kind(fake, "FakeTensor"),
    "wrapper": Kind(Wrapper, "Wrapper"),
    "speaking": Kind(lambda t: t.as_subclass(Speaking), "Speaking"),
    "nested": Kind(lambda t: torch.nested.nested_tensor([t, t]), "nested"),
    "jagged": Kind(lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged), "nested"),
    "sparse": Kind(torch.Tensor.to_sparse, "sparse"),
    "mkldnn": Kind(torch.Tensor.to_mkldnn, "MKLDNN", "f"),
    "quantized": Kind(lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "quantized",
                      "f"),
    "complex": Kind(lambda t: torch.complex(t, t), "complex64", "f"),
    "conjugate": Kind(lambda t: torch.complex(t, t).conj(), "complex64", "f"),
    "float8": Kind(lambda t: t.to(torch.float8_e4m3fn), "Float8|float8", "f"),
    "uninitialized": Kind(lambda t: torch.nn.UninitializedParameter(), "UninitializedParameter"),
}


def letter(tensor):
    """The kind of its type."""
    if tensor.dtype is torch.bool:
        return "b"
    return "f" if tensor.is_floating_point() else "i"
