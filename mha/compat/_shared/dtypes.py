"""The types of an adapter's layers. Halves are kept as halves and computed in float32: what goes
in is rounded to the layer's type, what comes out is rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mha._base.arguments import check_kind, detached_array
from mha._base.dtypes import RAW_BFLOAT16, computing_dtype, in_type, stored_dtype, widened
from mha._base.pieces import converted, copied

Array = NDArray[Any]


def bfloat16(name: str) -> np.dtype[Any]:
    """The type of arrays of bfloat16, which NumPy does not have: that of the package ml_dtypes,
    which is imported for it. The name is an argument's."""
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(f"{name}: got bfloat16, whose results are arrays of ml_dtypes: pip"
                          " install ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)


def as_float_dtype(dtype: DTypeLike | Any) -> np.dtype[Any]:
    """float16, bfloat16, float32 or float64, of NumPy, ml_dtypes, JAX or PyTorch."""
    if type(dtype).__module__ == "torch":
        dtype = str(dtype).removeprefix("torch.")
    stored = stored_dtype(dtype)
    return bfloat16("dtype") if stored == RAW_BFLOAT16 else stored


def array_of_kind(given: Any, name: str, kinds: str, wanted: object) -> Array:
    """`detached_array`, of one of these kinds (`check_kind`); bfloat16 is a float."""
    array = detached_array(given, name)
    check_kind(widened(array), name, kinds, wanted)
    return array


def as_own(array: Array, dtype: np.dtype[Any]) -> Array:
    """The numbers in a layer's type, each rounded once."""
    return array if array.dtype == dtype else in_type(widened(array), dtype)


def own_copy(array: Array, dtype: np.dtype[Any], order: Any = "C") -> Array:
    """The same, as a copy."""
    own = as_own(array, dtype) if dtype.itemsize == 2 else widened(array)
    return copied(own, dtype, order)


def to_compute(array: Array) -> Array:
    """An array of a layer's type in the type that the layer computes in."""
    return converted(widened(array), computing_dtype(array.dtype))
