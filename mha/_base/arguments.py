"""Arguments on the Python side, checked as the C core checks its own: each error names the
argument, what came and what was wanted."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
import sys
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import _core


def as_array(array: Any, name: str) -> NDArray[Any]:
    """numpy.asarray, or by DLPack where that is all that is offered, with the argument's name in
    front of its errors; bfloat16 by DLPack, which NumPy does not know."""
    return array if type(array) is np.ndarray else _core.as_array(array, name)


def printable(text: str) -> str:
    """What came from outside, as an error may show it: what a terminal would obey written out."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def check_kind(array: NDArray[Any], name: str, kinds: str, wanted: object) -> None:
    """TypeError unless the array's dtype is of one of these kinds: b, i, u, f as NumPy names
    bool, int, uint and float."""
    if array.dtype.kind not in kinds:
        raise TypeError(f"{name}: got an array of {array.dtype}, wanted {wanted}")


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


def as_size(value: Any, name: str, default: int | None = None, *, least: int = 1) -> int:
    """An int of at least `least`; None stands for the default where there is one."""
    if value is None and default is not None:
        return default
    size = as_int(value, name)
    if size < least:
        raise ValueError(f"{name}: got {size}, wanted at least {least}")
    return size


def as_seed(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: got {type(value).__name__}, wanted an int in [0, 2**64)")
    if not 0 <= int(value) < 2**64:
        raise ValueError(f"{name}: got {value}, wanted an int in [0, 2**64)")
    return int(value)


def as_ints(values: Any, name: str) -> list[int]:
    is_number = isinstance(values, np.ndarray) and values.ndim == 0
    if isinstance(values, (str, bytes)) or not isinstance(values, Collection) or is_number:
        raise TypeError(f"{name}: got {type(values).__name__}, wanted a list of ints")
    return [as_int(value, name) for value in values]


def checked_lengths(lengths: ArrayLike | None, batch: int, n: int,
                    name: str = "lengths") -> NDArray[Any] | None:
    """How many of n rows of each sequence are real; None where all are."""
    if lengths is None:
        return None
    counts = as_lengths(lengths, batch, name)
    if (counts < 0).any() or (counts > n).any():
        raise ValueError(f"{name}: got {counts.tolist()}, wanted lengths in [0, {n}]")
    return None if (counts == n).all() else counts


def as_lengths(lengths: ArrayLike, batch: int, name: str = "lengths") -> NDArray[Any]:
    """(batch,) int64, of its own, of as many ints or of one for all."""
    array = as_int_array(lengths, name)
    if array.shape not in ((), (batch,)):
        raise ValueError(f"{name}: got shape {array.shape}, wanted ({batch},)")
    return np.full(batch, array)


def as_branches(indices: ArrayLike, lengths: ArrayLike | None,
                there: NDArray[Any]) -> list[NDArray[Any]]:
    """Of indices (batch, k) the first lengths[b] of each sequence, or all; different ints in
    [0, there[b])."""
    given = as_int_array(indices, "indices")
    if given.ndim != 2 or len(given) != len(there):
        raise ValueError(f"indices: got shape {given.shape}, wanted ({len(there)}, k)")
    counts = checked_lengths(lengths, len(there), given.shape[1])
    branches = [*given] if counts is None else [
        row[:count] for row, count in zip(given, counts, strict=True)]
    for branch, most in zip(branches, there.tolist(), strict=True):
        if (branch < 0).any() or (branch >= most).any():
            raise ValueError(f"indices: got {branch.tolist()}, wanted ints in [0, {most}), which"
                             " the sequence has from start on")
        if len({*branch.tolist()}) < len(branch):
            raise ValueError(f"indices: got {branch.tolist()}, wanted each position once")
    return branches


def as_positions(positions: ArrayLike, name: str, batch: int, n: int,
                 axes: int = 1) -> NDArray[Any]:
    """Positions (n,) or (batch, n) as integers. Along several axes they are alike then, or stand
    behind a first axis of so many: what comes out is (axes, batch, n)."""
    given = as_exact_int_array(positions, name)
    alike = given.shape in ((n,), (batch, n))
    if axes == 1 and alike:
        return given
    by_axis = axes > 1 and given.shape in ((axes, n), (axes, batch, n))
    if alike and by_axis:
        raise ValueError(f"{name}: got shape {given.shape}, which may be {axes} position axes or"
                         f" {axes} sequences, wanted all axes: {axes} in front of ({batch}, {n})")
    if not (alike or by_axis):
        several = f", or the {axes} position axes of the rotary's sections in front of that"
        raise ValueError(f"{name}: got shape {given.shape}, wanted ({n},) or ({batch}, {n})"
                         + several * (axes > 1))
    if by_axis and given.ndim == 2:
        given = given[:, None]
    return np.broadcast_to(given, (axes, batch, n))


def check_rows(shape: tuple[int, ...], name: str, width: int) -> None:
    """(batch, len, width) or (len, width)."""
    if len(shape) not in (2, 3):
        raise ValueError(f"{name}: got shape {shape}, wanted (batch, len, dim) or (len, dim)")
    if shape[-1] != width:
        raise ValueError(f"{name}: got shape {shape}, wanted a last axis of {width}")


def detached_array(array: Any, name: str) -> NDArray[Any]:
    """`as_array`, of tensors that require a gradient detached, as NumPy wants them."""
    if isinstance(array, getattr(sys.modules.get("torch"), "Tensor", ())):
        from mha._base.torch_tensors import plain

        array = plain(array, name).detach()  # detached it loses what its class says
        with contextlib.suppress(TypeError):  # of a type that NumPy lacks, which the core reads
            array = array.numpy()
    return as_array(array.detach() if hasattr(array, "detach") else array, name)


def detached_arrays(**arrays: Any) -> list[NDArray[Any]]:
    """`detached_array` of each, by its name."""
    return [detached_array(array, name) for name, array in arrays.items()]


def as_int_array(ints: ArrayLike, name: str) -> NDArray[Any]:
    array = as_array(ints, name)
    if not array.size:
        return array.astype(np.int64)  # of an empty list NumPy makes floats
    check_kind(array, name, "iu", "ints")
    if array.dtype.kind == "u":  # NumPy 1 makes floats of uint64 beside a Python int
        array = np.minimum(array.astype(np.uint64), np.uint64(np.iinfo(np.int64).max))
    return array.astype(np.int64)


def as_exact_int_array(ints: ArrayLike, name: str) -> NDArray[Any]:
    """The same, but what is beyond int64 is an error and not the largest int64."""
    array, most = as_array(ints, name), np.iinfo(np.int64).max
    if array.dtype.kind == "u" and array.size and array.max() > most:
        raise ValueError(f"{name}: got {array.max()}, wanted at most {most}")
    return as_int_array(array, name)


def as_finite(value: Any, name: str, *, above: float = -math.inf,
              least: float = -math.inf) -> float:
    """A finite number, over `above` and at least `least`."""
    wanted = "a finite number" + f" above {above:g}" * (above > -math.inf)
    wanted += f" of at least {least:g}" * (least > -math.inf)
    number = as_float(value, name, wanted)
    if not math.isfinite(number) or number <= above or number < least:
        raise ValueError(f"{name}: got {value}, wanted {wanted}")
    return number


def as_probability(value: Any, name: str) -> float:
    wanted = "a number in [0, 1)"
    probability = as_float(value, name, wanted)
    if not 0 <= probability < 1:
        raise ValueError(f"{name}: got {value}, wanted {wanted}")
    return probability


def as_float(value: Any, name: str, wanted: str) -> float:
    """A real number; errors say what is wanted."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, wanted {wanted}")
    try:
        return float(value)
    except OverflowError:  # an int beyond all floats
        raise ValueError(f"{name}: got {value}, wanted {wanted}") from None


def check_choice(given: Any, name: str, *choices: str | None) -> None:
    """That it is one of these words, or None where that is among them."""
    if (given is None or isinstance(given, str)) and given in choices:
        return
    *others, last = ("None" if choice is None else f'"{choice}"' for choice in choices)
    wrong = ValueError if isinstance(given, str) else TypeError
    raise wrong(f"{name}: got {given!r}, wanted {', '.join(others)} or {last}")


def no_memory(name: str, shape: tuple[int, ...]) -> MemoryError:
    """For what NumPy raises as ValueError, OverflowError or MemoryError by how large it is."""
    return MemoryError(f"{name}: got shape {shape}, wanted one that fits in memory")


def wanted_names(wrt: Collection[str] | None, names: Sequence[str],
                 argument: str = "wrt") -> set[str]:
    """The names in wrt, all of `names` for None."""
    if wrt is None:
        return set(names)
    if type(wrt) is not tuple and (  # asking for a Collection takes longer than all else
            isinstance(wrt, (str, bytes, np.ndarray)) or not isinstance(wrt, Collection)):
        raise TypeError(f"{argument}: got {wrt!r}, wanted a tuple of names out of"
                        f" {', '.join(names)}")
    given = tuple(wrt)
    for name in given:
        if not isinstance(name, str) or name not in names:
            raise ValueError(f"{argument}: got {name!r}, wanted names out of"
                             f" {', '.join(names)}")
    return set(given)
