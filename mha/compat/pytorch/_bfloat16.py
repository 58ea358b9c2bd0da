"""The type of arrays of bfloat16, which NumPy does not have."""

from __future__ import annotations

from typing import Any

import numpy as np


def bfloat16(name: str) -> np.dtype[Any]:
    """That of the package ml_dtypes, which is imported for it. The name is an argument's."""
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(f"{name}: got a tensor of bfloat16, whose results are arrays of"
                          " ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)
