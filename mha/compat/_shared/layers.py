"""What the adapters' layers share: a linear layer in two layouts, and the checks of their sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._base.arguments import as_array, as_probability, as_size, check_kind
from mha._base.dtypes import widened
from mha._base.pieces import copied, pieces
from mha._functions.linear_projection import linear
from mha._functions.options import RandomSource


class Trained:
    """Training mode, in which dropout acts."""

    training = True

    def train(self, mode: bool = True) -> Self:
        """Dropout on, or off with mode=False. Returns the layer."""
        self.training = bool(mode)
        return self

    def eval(self) -> Self:
        """Dropout off. Returns the layer."""
        return self.train(False)


class Linear:
    """x @ kernel + bias, sized at its first call where `in_features` is not given.

    Its parameters may be read and set at any time, before the first call too:

    kernel (in_features, out_features)
        As TensorFlow and JAX store it, and mha's own W. None until it is sized.
    weight (out_features, in_features)
        As PyTorch and MXNet store it: the same numbers, transposed. A view, so that writing into
        either changes both.
    bias (out_features,), or None without one

    Setting copies; float32 and float64 keep their type. The start is Xavier-uniform
    (Glorot & Bengio 2010), biases zero. Computes in the type of x, as `mha.linear` does.

    >>> layer = Linear(4)
    >>> layer(np.ones((2, 3), np.float32)).shape, layer.weight.shape
    ((2, 4), (4, 3))
    """

    def __init__(self, out_features: int, *, bias: bool = False, in_features: int | None = None,
                 rng: RandomSource = None) -> None:
        self.out_features = as_size(out_features, "out_features")
        self._bias = np.zeros(out_features, np.float32) if bias else None
        self.forget(rng)
        if in_features is not None:
            self._draw(as_size(in_features, "in_features"))

    def forget(self, rng: RandomSource = None) -> None:
        """Back to the unsized start; rng draws the next kernel."""
        self._rng = np.random.default_rng(rng)
        self._kernel: NDArray[Any] | None = None
        if self._bias is not None:
            self._bias = np.zeros_like(self._bias)

    def _draw(self, in_features: int) -> NDArray[Any]:
        bound = math.sqrt(6 / (in_features + self.out_features))
        self._kernel = uniform(self._rng, bound, (in_features, self.out_features), np.float32)
        return self._kernel

    def sized_for(self, x: NDArray[Any]) -> NDArray[Any]:
        """The kernel; drawn for x (..., in_features) if this is the first call."""
        if x.ndim < 1:
            raise ValueError("x: got a scalar, wanted an array (..., in_features)")
        return self._draw(x.shape[-1]) if self._kernel is None else self._kernel

    def __call__(self, x: ArrayLike) -> NDArray[Any]:
        x = as_numbers(x, "x")
        return linear(x, self.sized_for(x), self._bias)

    @property
    def in_features(self) -> int | None:
        """The size found at the first call, or None before."""
        return None if self._kernel is None else self._kernel.shape[0]

    @property
    def kernel(self) -> NDArray[Any] | Any:  # Any for None: a caller mostly knows it is sized
        """(in_features, out_features), used as x @ kernel; None before it is sized."""
        return self._kernel

    @kernel.setter
    def kernel(self, kernel: ArrayLike) -> None:
        self._set_kernel(as_numbers(kernel, "kernel"), "kernel")

    @property
    def weight(self) -> NDArray[Any] | None:
        """(out_features, in_features), used as x @ weight.T: a view of kernel."""
        return None if self._kernel is None else self._kernel.T

    @weight.setter
    def weight(self, weight: ArrayLike) -> None:
        self._set_kernel(as_numbers(weight, "weight").T, "weight")

    def _set_kernel(self, kernel: NDArray[Any], name: str) -> None:
        in_features = self.in_features or (kernel.shape[0] if kernel.ndim == 2 else "in_features")
        wanted = (in_features, self.out_features)
        if kernel.shape != wanted:
            order = slice(None, None, -1 if name == "weight" else 1)
            raise ValueError(f"{name}: got shape {kernel.shape[order]}, wanted {wanted[order]}")
        self._kernel = _parameter(kernel, name)

    @property
    def bias(self) -> NDArray[Any] | None:
        """(out_features,), or None."""
        return self._bias

    @bias.setter
    def bias(self, bias: ArrayLike) -> None:
        if self._bias is None:
            raise ValueError("bias: got an array, but the layer was made without a bias")
        array = as_numbers(bias, "bias")
        if array.shape != self._bias.shape:
            raise ValueError(f"bias: got shape {array.shape}, wanted {self._bias.shape}")
        self._bias = _parameter(array, "bias")

    def parameters(self) -> list[NDArray[Any]]:
        """[weight], or [weight, bias]; empty until it is sized."""
        found = [self.weight, self._bias] if self._kernel is not None else []
        return [array for array in found if array is not None]

    def __repr__(self) -> str:
        return (f"Linear(in_features={self.in_features}, out_features={self.out_features},"
                f" bias={self._bias is not None})")


def as_numbers(array: Any, name: str) -> NDArray[Any]:
    """`as_array`, bfloat16 as float32, of which NumPy can compute."""
    return widened(as_array(array, name))


def _parameter(array: NDArray[Any], name: str) -> NDArray[Any]:
    """A contiguous copy in float32, or float64 where it was."""
    check_kind(array, name, "iuf", "float32 or float64")
    dtype = np.float64 if array.dtype == np.float64 else np.float32
    return copied(array, dtype, "C")


def uniform(generator: np.random.Generator, bound: float, shape: tuple[int, ...],
            dtype: DTypeLike) -> NDArray[Any]:
    """generator.uniform(-bound, bound, shape) in this type."""
    numbers = np.empty(shape, dtype)
    for piece in pieces(numbers, np.float64().itemsize):
        numbers[piece] = generator.uniform(-bound, bound, numbers[piece].shape)
    return numbers


def checked_heads(num_heads: Any, width: Any, width_name: str) -> tuple[int, int]:
    """(num_heads, width), where the heads divide the width."""
    width = as_size(width, width_name)
    num_heads = as_size(num_heads, "num_heads")
    if width % num_heads:
        raise ValueError(f"{width_name}: got {width}, wanted a multiple of num_heads ({num_heads})")
    return num_heads, width


def checked_dropout(dropout: Any, name: str = "dropout") -> float:
    """dropout as a probability in [0, 1); False is 0, as it is to the frameworks."""
    return as_probability(int(dropout) if isinstance(dropout, bool) else dropout, name)


def checked_mask(mask: ArrayLike) -> NDArray[Any]:
    """mask as an array of at least one axis, whose zeros and other numbers have a meaning."""
    array = np.atleast_1d(as_numbers(mask, "mask"))
    check_kind(array, "mask", "biuf", "bool, integers or floats")
    return array


def described(layer: object, shown: Sequence[str], others: Mapping[str, Any]) -> str:
    """The layer's name with these attributes, and with the others that differ from their
    defaults."""
    names = [*shown, *(name for name, default in others.items() if getattr(layer, name) != default)]
    values = ", ".join(f"{name}={getattr(layer, name)}" for name in names)
    return f"{type(layer).__name__}({values})"
