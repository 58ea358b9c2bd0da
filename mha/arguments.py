"""Arguments on the Python side, checked as the C core checks its own: each error names the
argument, what came and what was wanted."""

import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def as_array(array: ArrayLike, name: str) -> NDArray[Any]:
    """numpy.asarray, with the argument's name in front of its errors."""
    try:
        return np.asarray(array)
    except (TypeError, ValueError) as error:
        raised = ValueError if isinstance(error, ValueError) else TypeError
        raise raised(f"{name}: got {type(array).__name__}, wanted an array, but NumPy could not"
                     f" make one: {error}") from error


def as_bool(value: Any, name: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: got {type(value).__name__}, wanted True or False")
    return bool(value)


def as_int(value: Any, name: str) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: got {type(value).__name__}, wanted an int")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {type(value).__name__}, wanted an int") from None


def no_memory(name: str, shape: tuple[int, ...]) -> MemoryError:
    """For what NumPy raises as ValueError, OverflowError or MemoryError by how large it is."""
    return MemoryError(f"{name}: got shape {shape}, wanted one that fits in memory")
