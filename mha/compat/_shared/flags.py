"""Flags and probabilities as other libraries take them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mha._base.arguments import as_float


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
