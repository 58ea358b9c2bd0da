"""What happens to queries and keys between their projection and attention: a norm, then a rotation;
and backwards. Complex numbers go through, so that derivatives can be taken by complex steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.dtypes import halves_as_float32
from mha._functions.rotary import Layout, Rotary


def prepared_heads(heads: NDArray[Any], norm: ArrayLike | None, eps: float, offset: float,
                   rotary_: Rotary | None, positions: ArrayLike | None) -> NDArray[Any]:
    """(..., heads, len, head_dim): normed, each head or all of a token together, then rotated."""
    if norm is not None and np.shape(norm)[0] == heads.shape[-1]:
        heads = rms_norm(heads, norm, eps, offset)
    elif norm is not None:
        heads = _apart(rms_norm(_together(heads), norm, eps, offset), heads.shape[-3])
    return heads if rotary_ is None else rotary(heads, rotary_, positions)


def prepared_heads_vjp(heads: NDArray[Any], norm: ArrayLike | None, eps: float, offset: float,
                       rotary_: Rotary | None, positions: ArrayLike | None,
                       ) -> tuple[NDArray[Any], Callable[[NDArray[Any]], tuple[NDArray[Any],
                                                                               Any]]]:
    """The pullback gives (grad heads, grad norm or None)."""
    num_heads = heads.shape[-3]
    of_each = norm is not None and np.shape(norm)[0] == heads.shape[-1]
    rows = heads if of_each else _together(heads)
    pull_norm: Any = None
    turn_back: Any = None
    if norm is not None:
        rows, pull_norm = rms_norm_vjp(rows, norm, eps, offset)
    output = rows if of_each else _apart(rows, num_heads)
    if rotary_ is not None:
        output, turn_back = rotary_vjp(output, rotary_, positions)

    def pullback(grad: NDArray[Any]) -> tuple[NDArray[Any], Any]:
        if turn_back is not None:
            grad = turn_back(grad)
        if pull_norm is None:
            return grad, None
        grad_rows, grad_norm = pull_norm(grad if of_each else _together(grad))
        return grad_rows if of_each else _apart(grad_rows, num_heads), grad_norm

    return output, pullback


def _together(heads: NDArray[Any]) -> NDArray[Any]:
    """(..., heads, len, d) -> (..., len, heads * d)."""
    by_token = np.swapaxes(heads, -2, -3)
    return by_token.reshape(*by_token.shape[:-2], by_token.shape[-2] * by_token.shape[-1])


def _apart(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    by_head = rows.reshape(*rows.shape[:-1], num_heads, rows.shape[-1] // num_heads)
    return np.swapaxes(by_head, -2, -3)


def rotary(x: ArrayLike, rotary: Rotary, positions: ArrayLike | None = None) -> NDArray[Any]:
    """Each pair of columns (a, b) rotates to (a cos - b sin, b cos + a sin) (Su et al. 2021).

    x (len, head_dim), (batch, len, head_dim) or (..., heads, len, head_dim); positions (len,) or
    batch axes + (len,), by default 0, 1, ...; with sections either behind an axis of them.
    """
    x = _floating(x)
    return rotated_pairs(x, *_circle(x, rotary, positions), rotary.layout)


def rotated_pairs(x: NDArray[Any], cosine: NDArray[Any], sine: NDArray[Any],
                 layout: Layout) -> NDArray[Any]:
    """`rotary` by any cosines and sines (..., len, dims/2)."""
    output = x.copy()
    first, second = _pairs(2 * cosine.shape[-1], layout)
    output[..., first] = x[..., first] * cosine - x[..., second] * sine
    output[..., second] = x[..., second] * cosine + x[..., first] * sine
    return output


def rotary_vjp(x: ArrayLike, rotary_: Rotary, positions: ArrayLike | None = None,
               ) -> tuple[NDArray[Any], Callable[[NDArray[Any]], NDArray[Any]]]:
    """The pullback rotates the other way."""
    output = rotary(x, rotary_, positions)
    cosine, sine = _circle(output, rotary_, positions)
    return output, lambda grad_output: rotated_pairs(grad_output, cosine, -sine, rotary_.layout)


def rms_norm(x: NDArray[Any], weight: ArrayLike, eps: float = 1e-6,
             offset: float = 0.0) -> NDArray[Any]:
    """x / sqrt(mean(x^2) + eps) * (offset + weight), over the last axis (Zhang & Sennrich 2019)."""
    return x * _inverse_size(x, eps) * _factors(weight, x, offset)


def rms_norm_vjp(x: NDArray[Any], weight: ArrayLike, eps: float = 1e-6, offset: float = 0.0,
                 ) -> tuple[NDArray[Any],
                            Callable[[NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]]:
    """The pullback gives (grad x, grad weight)."""
    inverse, factors = _inverse_size(x, eps), _factors(weight, x, offset)

    def pullback(grad_output: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        grad_normed = grad_output * factors
        shared = _mean(grad_normed * x) * inverse**2
        grad_x = inverse * (grad_normed - x * shared)
        grad_weight = (grad_output * x * inverse).sum(axis=tuple(range(x.ndim - 1)))
        return grad_x, grad_weight

    return x * inverse * factors, pullback


def _circle(x: NDArray[Any], rotary: Rotary,
            positions: ArrayLike | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cosines and sines times the magnitude, (..., len, dims/2), in the type of x."""
    steps = np.arange(x.shape[-2]) if positions is None else np.asarray(positions)
    wide = np.longdouble if x.dtype == np.longdouble else np.float64
    steps = steps[..., None] if rotary.sections is None else _by_pair(steps, x, rotary)
    angles = steps.astype(wide) * rotary.frequencies.astype(wide)
    if x.ndim >= 4 and angles.ndim > 2:  # the axis of heads
        angles = angles[..., None, :, :]
    real = x.real.dtype
    return ((rotary.magnitude * np.cos(angles)).astype(real),
            (rotary.magnitude * np.sin(angles)).astype(real))


def _by_pair(steps: NDArray[Any], x: NDArray[Any], rotary: Rotary) -> NDArray[Any]:
    """The position of each pair, (..., len, dims/2), along its axis (Wang et al. 2024, "Qwen2-VL",
    section 2.1; in turns as in Qwen3-VL)."""
    sections = rotary.sections or ()
    count, batch = len(sections), x.shape[:-3] if x.ndim >= 4 else x.shape[:-2]
    if steps.ndim == 2 and batch == (count,) and len(steps) == count:
        raise ValueError(f"positions: got shape {steps.shape}, wanted all {count} axes")
    if not (steps.ndim == len(batch) + 2 or (steps.ndim == 2 and len(steps) == count)):
        steps = np.stack([steps] * count)
    if rotary.section_layout == "split":
        axes = np.repeat(np.arange(count), sections)
    else:
        axes = np.zeros(sum(sections), int)
        for axis in range(1, count):
            axes[axis:count * sections[axis]:count] = axis
    return np.moveaxis(steps[axes], 0, -1)


def _pairs(dims: int, layout: Layout) -> tuple[slice, slice]:
    """The columns of a, and those of b."""
    if layout == "interleaved":
        return slice(0, dims, 2), slice(1, dims, 2)
    return slice(0, dims // 2), slice(dims // 2, dims)


def _inverse_size(x: NDArray[Any], eps: float) -> NDArray[Any]:
    return 1 / np.sqrt(_mean(x * x) + x.real.dtype.type(eps))


def _mean(x: NDArray[Any]) -> NDArray[Any]:
    """Over the last axis, which stays; 0 where it has no columns."""
    return x.sum(axis=-1, keepdims=True) / x.real.dtype.type(max(x.shape[-1], 1))


def _factors(weight: ArrayLike, x: NDArray[Any], offset: float) -> NDArray[Any]:
    weight = np.asarray(weight)
    return x.real.dtype.type(offset) + (
        weight if weight.dtype.kind == "c" else weight.astype(x.real.dtype))


def _floating(x: ArrayLike) -> NDArray[Any]:
    """Numbers to compute with: halves become float32, integers float64."""
    x = halves_as_float32(np.asarray(x))
    return x if x.dtype.kind in "fc" else x.astype(np.float64)
