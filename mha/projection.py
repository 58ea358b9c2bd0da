"""The linear projections of the figure (steps 1 and 5)."""

from typing import Any

from numpy.typing import ArrayLike, NDArray

from mha import _core

__all__ = ["linear"]


def linear(x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None) -> NDArray[Any]:
    """x @ weight + bias: one linear projection.

    Parameters
    ----------
    x : array (..., in)
    weight : array (in, out)
        Laid out as the figure writes it, x @ W; PyTorch stores the transpose.
    bias : array (out,), optional

    Returns
    -------
    numpy.ndarray (..., out), of the type of x (integers become float64).

    Raises
    ------
    ValueError: sizes that do not fit. TypeError: a type other than float32, float64 or integer.

    >>> mha.linear(np.ones((2, 3)), np.ones((3, 4)), np.zeros(4)).shape
    (2, 4)
    """
    return _core.linear(x, weight, bias)
