"""The book's helpers, the same in all four forms: those in `__all__` are what a form exports."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._base.arguments import check_kind
from mha._functions.scaled_dot_product_attention import scaled_dot_product_attention
from mha.compat._shared.layers import as_numbers
from mha.plot import _layout as plot_layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:  # for typing.get_type_hints, which shall not import it
    Figure = Any

__all__ = ["add_to_class", "check_shape", "masked_softmax", "normal", "ones", "reshape",
           "show_heatmaps", "tensor"]


def tensor(data: ArrayLike, dtype: DTypeLike | None = None) -> NDArray[Any]:
    """A new array; Python floats become float32, arrays keep their type.

    >>> tensor([1.0, 2.0]).dtype, tensor([3, 2]).dtype.kind
    (dtype('float32'), 'i')
    """
    array = np.array(as_numbers(data, "data"), dtype=dtype)
    python_floats = dtype is None and array.dtype == np.float64 and not hasattr(data, "dtype")
    return array.astype(np.float32) if python_floats else array


def ones(shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """An array of ones, float32 unless told.

    >>> ones((2, 3)).shape
    (2, 3)
    """
    return np.ones(shape, dtype)


def normal(mean: float, std: float, shape: int | Sequence[int]) -> NDArray[Any]:
    """Fresh normal numbers in float32.

    >>> normal(0, 1, (2, 3)).shape
    (2, 3)
    """
    return np.random.default_rng().normal(mean, std, shape).astype(np.float32)


def reshape(x: ArrayLike, shape: int | Sequence[int]) -> NDArray[Any]:
    """x in another shape, one size of which may be -1.

    >>> reshape(np.ones((2, 6)), (1, 3, -1)).shape
    (1, 3, 4)
    """
    return np.reshape(as_numbers(x, "x"), shape)


def check_shape(a: Any, shape: Sequence[int]) -> None:
    """Raise AssertionError, as the book's does, where a.shape is not shape.

    >>> check_shape(np.ones((2, 3)), (2, 3))
    """
    if tuple(a.shape) != tuple(shape):
        raise AssertionError(f"a: got shape {tuple(a.shape)}, wanted {tuple(shape)}")


def add_to_class(Class: type) -> Callable[[Callable[..., Any]], None]:
    """A decorator that makes the function a method of Class, under the function's name."""
    def add(function: Callable[..., Any]) -> None:
        setattr(Class, function.__name__, function)
    return add


def masked_softmax(X: ArrayLike, valid_lens: ArrayLike | None) -> NDArray[Any]:
    """Softmax over the last axis of X (batch, num_queries, num_keys), each row up to its length.

    valid_lens None, (batch,) or (batch, num_queries): keys from there on get 0, a row of length 0
    is uniform. Other shapes are a ValueError.

    >>> masked_softmax(np.zeros((2, 2, 4), np.float32), [2, 4])[:, 0].tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]
    """
    X = as_numbers(X, "X")
    check_kind(X, "X", "biuf", "numbers")
    if X.ndim != 3:
        raise ValueError(f"X: got shape {X.shape}, wanted (batch, num_queries, num_keys)")
    if X.dtype.kind != "f":
        X = X.astype(np.float64)
    batch, num_queries, num_keys = X.shape
    # Queries and keys of no features score 0, which leaves X, as the bias, to be the scores.
    queries = np.zeros((batch, num_queries, 0), X.dtype)
    keys = np.zeros((batch, num_keys, 0), X.dtype)
    _, weights = scaled_dot_product_attention(
        queries, keys, keys, bias=X, empty_rows="uniform", return_weights=True,
        key_lengths=key_lengths(valid_lens, batch, num_queries, num_keys))
    return weights


def key_lengths(valid_lens: ArrayLike | None, batch: int, num_queries: int,
                num_keys: int) -> NDArray[np.int64] | None:
    """valid_lens as `mha` takes it: integers in [0, num_keys], (batch,) or (batch, num_queries).

    The book compares positions with lengths, so integral floats are lengths too, a length past
    the end means all keys and a negative one none. Other numbers and shapes are a ValueError.
    """
    if valid_lens is None:
        return None
    lengths = as_numbers(valid_lens, "valid_lens")
    check_kind(lengths, "valid_lens", "iuf", "integers")
    if lengths.shape not in ((batch,), (batch, num_queries)):
        raise ValueError(f"valid_lens: got shape {lengths.shape}, wanted ({batch},) or"
                         f" ({batch}, {num_queries})")
    broken = lengths[lengths != np.floor(lengths)]
    if broken.size:
        raise ValueError(f"valid_lens: got {broken[0]}, wanted whole numbers")
    return np.clip(lengths, 0, num_keys).astype(np.int64)


def show_heatmaps(matrices: ArrayLike, xlabel: str, ylabel: str,
                  titles: Sequence[str] | None = None, figsize: tuple[float, float] = (2.5, 2.5),
                  cmap: str = "Reds") -> Figure:
    """A grid of heat maps: matrices (rows, columns, queries, keys) -> the figure.

    titles are those of the columns. Needs matplotlib. For labelled heads see `mha.plot.heads`.

    >>> figure = show_heatmaps(np.eye(10)[None, None], xlabel="Keys", ylabel="Queries")
    """
    matrices = as_numbers(matrices, "matrices")
    if matrices.ndim != 4 or 0 in matrices.shape:
        raise ValueError(f"matrices: got shape {matrices.shape}, wanted (rows, columns, queries,"
                         " keys), none of them 0")
    rows, columns = matrices.shape[:2]
    if titles is not None and len(titles) != columns:
        raise ValueError(f"titles: got {len(titles)}, wanted one for each of the {columns} columns")
    # The figure that mha.plot makes: without pyplot, so that a notebook draws it once.
    figure = plot_layout.figure_class()(figsize=figsize, layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for row, column in itertools.product(range(rows), range(columns)):
        image = axes[row, column].imshow(matrices[row, column], cmap=cmap, vmin=matrices.min(),
                                         vmax=matrices.max())
    for column in range(columns):
        axes[-1, column].set_xlabel(xlabel)
        if titles is not None:
            axes[0, column].set_title(titles[column])
    for row in range(rows):
        axes[row, 0].set_ylabel(ylabel)
    figure.colorbar(image, ax=axes, shrink=0.6)
    return figure


def three_axes(given: ArrayLike, name: str) -> NDArray[Any]:
    """The array; a ValueError where it is not (batch, length, features)."""
    array = as_numbers(given, name)
    if array.ndim != 3:
        raise ValueError(f"{name}: got shape {array.shape}, wanted (batch, length, features)")
    return array


def checked_inputs(queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
                   valid_lens: ArrayLike | None) -> list[Any]:
    """The arrays, each (batch, length, features), and valid_lens as `key_lengths` gives it."""
    arrays = [three_axes(array, name) for array, name in (
        (queries, "queries"), (keys, "keys"), (values, "values"))]
    batch, num_queries, _ = arrays[0].shape
    return [*arrays, key_lengths(valid_lens, batch, num_queries, arrays[1].shape[1])]
