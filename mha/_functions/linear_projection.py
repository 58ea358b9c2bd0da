"""The linear projections of the figure (steps 1 and 5)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.arguments import as_array, wanted_names
from mha._base.dtypes import is_half
from mha._base.keywords import names_its_keywords, unknown_keyword
from mha._functions.gradients import LinearGradients
from mha._functions.packed_weight import PackedWeight
from mha._functions.quantised import BITS

__all__ = ["linear", "linear_vjp"]


@names_its_keywords
def linear(x: ArrayLike, weight: ArrayLike | PackedWeight, bias: ArrayLike | None = None,
           **unknown: Never) -> NDArray[Any]:
    """x @ weight + bias: one linear projection.

    Parameters
    ----------
    x : array (..., in)
    weight : array (in, out), or PackedWeight
        Laid out as the figure writes it, x @ W; PyTorch stores the transpose. `mha.pack` packs it
        once for many calls, which then give the same bits sooner.
    bias : array (out,), optional

    Returns
    -------
    numpy.ndarray (..., out), of the type of x (integers become float64).

    Raises
    ------
    ValueError: sizes that do not fit. TypeError: a type other than float16, bfloat16,
    float32, float64 or integer.

    Source: Vaswani et al. 2017, section 3.2.2, figure 2: the linear projections.

    >>> mha.linear(np.ones((2, 3)), np.ones((3, 4)), np.zeros(4)).shape
    (2, 4)
    """
    if unknown:
        raise unknown_keyword(linear, unknown)
    return _core.linear(x, weight, bias)


@names_its_keywords
def linear_vjp(x: ArrayLike, weight: ArrayLike | PackedWeight, bias: ArrayLike | None = None, *,
               wrt: Collection[str] | None = None, **unknown: Never,
               ) -> tuple[NDArray[Any], Callable[[ArrayLike], LinearGradients]]:
    """`linear` and its gradients: the vector-Jacobian product.

    Parameters
    ----------
    x, weight, bias : as in `linear`
        Kept, not copied: they must not change before the pullback is called.
    wrt : names out of "x", "weight", "bias", optional
        Whose gradients are wanted; by default all of them, beside a PackedWeight that of x alone.

    Returns
    -------
    (output, pullback). pullback(grad_output) takes the gradient of a loss with respect to the
    output (..., out) and returns those with respect to x, weight and bias, shaped as they are:
    grad_output @ weight^T, x^T @ grad_output and the sum of the rows of grad_output. That of x has
    the type of x. Those of weight and bias have the type of the arithmetic, float64 where x has it,
    else float32; in float32 the gradients of halves are halves.

    Raises
    ------
    ValueError, TypeError: as `linear`; an unknown name in wrt; "weight" beside a PackedWeight.

    Source: Goodfellow et al. 2016, "Deep Learning", section 6.5.

    >>> output, pullback = mha.linear_vjp(np.ones((2, 3)), np.ones((3, 4)))
    >>> pullback(np.ones_like(output)).weight.shape
    (3, 4)
    """
    if unknown:
        raise unknown_keyword(linear_vjp, unknown)
    names: tuple[str, ...] = LinearGradients._fields
    if isinstance(weight, PackedWeight):
        names = tuple(name for name in names if name != "weight")
        x = _beside_packed(x, weight)
        weight, wrt = weight.unpack(), ("x",) if wrt is None else wrt
    wanted = wanted_names(wrt, names)
    output, saved = _core.linear(x, weight, bias, save=True)

    def pullback(grad_output: ArrayLike) -> LinearGradients:
        """The gradients of a loss by name, from that by the output, which is shaped so."""
        return LinearGradients(**_core.linear_backward(saved, grad_output, False, wanted))

    pullback.__qualname__ = "pullback"  # errors have it
    return output, pullback


def _beside_packed(x: ArrayLike, weight: PackedWeight) -> NDArray[Any]:
    """x as an array; a TypeError where the weight is quantised and the arithmetic not float32, as
    `linear` has it."""
    array = as_array(x, "x")
    is_float32 = array.dtype.newbyteorder("=") == np.float32 or is_half(array.dtype)
    if weight.dtype in [*BITS] and not is_float32:
        raise TypeError("weight: got a quantised weight, wanted x in float32 or a half")
    return array
