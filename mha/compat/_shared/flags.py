"""Flags and probabilities as other libraries take them, and what dropout leaves of weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mha._base.arguments import as_float
from mha._functions.dropout import dropout_mask


def as_flag(value: Any, name: str) -> bool:
    """True or False, of Python, NumPy or a tensor of no axes; 1, 0 or None."""
    flag = value.item() if getattr(value, "shape", None) == () else value
    if flag is None:
        return False
    if isinstance(flag, (bool, np.bool_)) or (isinstance(flag, int) and flag in (0, 1)):
        return bool(flag)
    raise TypeError(f"{name}: got {value!r}, wanted True or False")


def as_dropout(p: Any, name: str = "dropout") -> float:
    """A probability, 1 included; True and False are 1 and 0, as they are to the frameworks, and
    tensors of no axes are numbers."""
    plain = p.item() if getattr(p, "shape", None) == () else p
    number = as_float(int(plain) if isinstance(plain, bool) else plain, name, "a number in [0, 1]")
    if not 0 <= number <= 1:
        raise ValueError(f"{name}: got {p}, wanted a number in [0, 1]")
    return number


def split_dropout(p: float) -> tuple[float, bool]:
    """(what the core is to drop, whether all is dropped): its dropout is below 1."""
    return (0.0, True) if p == 1 else (p, False)


def after_dropout(weights: NDArray[Any], p: float, seed: int) -> NDArray[Any]:
    """The weights that the values were summed with, from those before dropout: the seed gives the
    call's own mask."""
    if not p:
        return weights
    kept_fraction = 1 - math.floor(65536 * p + 0.5) / 65536
    # Where the dropout rounds to 1 nothing is kept, and there is no fraction to divide by.
    return np.where(dropout_mask(weights.shape, p, seed), weights, 0) / (kept_fraction or 1)
