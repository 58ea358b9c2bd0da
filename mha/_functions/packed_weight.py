"""Weights packed once for many products, as `freeze()` packs those of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha import _core
from mha._base.arguments import as_array
from mha._base.dtypes import in_type, shown_dtype, stored_dtype
from mha._base.keywords import names_its_keywords, unknown_keyword
from mha._functions.quantised import BITS, Blocks, checked_blocks, quantised
from mha._functions.quantised_array import QuantisedArray

__all__ = ["PackedWeight", "pack"]


class PackedWeight:
    """A weight (in, out) in the order in which `mha.linear` reads it: `mha.pack` makes one.

    Every function that takes a weight takes it, and gives the bits that the array gives. One that
    is quantised gives those of the float32 array that `unpack` makes of it.

    Attributes
    ----------
    shape : (in, out)
    dtype : numpy.dtype, or "q8_0", "q4_0"
        Of its numbers; "bfloat16" where ml_dtypes is not imported.
    nbytes : int
        Bytes of memory that it takes.

    It is immutable: many threads may use it at once, and a copy is the weight itself. Pickles hold
    its numbers, and are packed anew where they are loaded.

    Raises
    ------
    TypeError: a call of the class itself.

    Source: Goto & van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication",
    section 4.2.

    >>> mha.pack(np.ones((3, 4), np.float32))
    PackedWeight(shape=(3, 4), dtype=float32)
    """

    __module__ = "mha"  # where users import it from, and so do pickles
    __slots__ = ("__weakref__", "_core_weight", "_dtype", "_shape")
    if TYPE_CHECKING:
        _core_weight: object  # as the core takes it
        _dtype: np.dtype[Any] | str  # of what was packed
        _shape: tuple[int, int]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        raise TypeError("PackedWeight: got a call, wanted mha.pack(weight)")

    @property
    def shape(self) -> tuple[int, int]:
        """(in, out)."""
        return self._shape

    @property
    def dtype(self) -> Any:
        """The type of its numbers."""
        return self._dtype if isinstance(self._dtype, str) else shown_dtype(self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return _core.packed_bytes(self._core_weight)

    def unpack(self) -> NDArray[Any]:
        """A new array (in, out) of its numbers, in their type; float32 of one that is quantised.

        Raises
        ------
        MemoryError. ImportError: of bfloat16 where ml_dtypes is not imported.

        Source: as the class.

        >>> weight = np.arange(6.0).reshape(2, 3)
        >>> bool((mha.pack(weight).unpack() == weight).all())
        True
        """
        if isinstance(self._dtype, str):
            return self._blocks().dequantised()
        return _core.unpack_weight(self._core_weight)

    def _blocks(self) -> Blocks:
        """Of one that is quantised: its numbers and scales."""
        return Blocks(str(self._dtype), *_core.unpack_blocks(self._core_weight))

    def __array__(self, *arguments: object, **keywords: object) -> Never:
        raise TypeError("PackedWeight: got one where an array is wanted: unpack() makes an array of"
                        " it")

    def __repr__(self) -> str:
        return f"PackedWeight(shape={self.shape}, dtype={self.dtype})"

    def __copy__(self) -> PackedWeight:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        return self

    def __getstate__(self) -> Any:
        if isinstance(self._dtype, str):
            return tuple(self._blocks())
        return (self.unpack(),)

    def __setstate__(self, state: Any) -> None:
        if hasattr(self, "_core_weight"):
            raise AttributeError("a PackedWeight cannot be changed")
        try:
            weight = checked_blocks(*state) if len(state) > 1 else as_array(state[0], "weight")
            _fill(self, weight)
        except MemoryError:
            raise
        except Exception as error:  # whatever strange objects raise
            raise ValueError(f"state: got one that does not fit together ({error}), wanted what"
                             " pickling a PackedWeight gives") from error

    def __getattr__(self, name: str) -> Any:
        try:
            object.__getattribute__(self, "_core_weight")
        except AttributeError:
            raise AttributeError(f"{name}: got a PackedWeight that nobody filled, wanted what"
                                 " mha.pack(weight) gives") from None
        raise AttributeError(f"PackedWeight has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a PackedWeight cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name}: a PackedWeight cannot be changed")


@names_its_keywords
def pack(weight: ArrayLike | PackedWeight, *, dtype: DTypeLike | None = None,
         **unknown: Never) -> PackedWeight:
    """Packs a weight once for all products with it.

    `mha.linear` packs a weight again in every call with many rows, and reads it as it lies for few.
    A packed one is read from front to back: what multiplies many inputs is faster so. Layers have
    `freeze()`, which packs theirs.

    Parameters
    ----------
    weight : array (in, out), or PackedWeight
        Copied: it may change afterwards. Of a .gguf file's array, which is (out, in), give .T: its
        blocks are kept as they are, where they are of this dtype or of none.
    dtype : float16, "bfloat16", float32, float64, "q8_0" or "q4_0", optional
        The type in which its numbers are kept, each rounded once; by default its own, float64 of
        integers, float32 of "q4_k" and "q6_k". "q8_0" and "q4_0" are quantised: 8 or 4 bits a
        number and a float16 scale for each 32 along the input axis, as llama.cpp has them. Products
        compute in float32; float64 x is a TypeError.

    Returns
    -------
    mha.PackedWeight: weight itself where it is one of this dtype.

    Raises
    ------
    ValueError: a weight that is no matrix; of one to be quantised, an input axis that is no
    multiple of 32, numbers or scales that are not finite, a scale beyond float16. TypeError:
    another type. MemoryError.

    Source: as `PackedWeight`.

    >>> packed = mha.pack(np.ones((3, 4)))
    >>> mha.linear(np.ones((2, 3)), packed).shape
    (2, 4)
    """
    if unknown:
        raise unknown_keyword(pack, unknown)
    stored = None if dtype is None else _packed_dtype(dtype)
    if isinstance(weight, PackedWeight):
        if stored is None or stored == weight._dtype:
            return weight
        weight = weight.unpack()
    if isinstance(weight, QuantisedArray) and weight.dtype in BITS:
        if weight.is_weight and (stored is None or stored == weight.dtype):
            return packed_weight(weight.blocks())
        if stored is None:
            raise ValueError(f"weight: got {weight.dtype} blocks along the output axis, wanted .T"
                             " of it, (in, out), or dtype=")
    array = as_array(weight, "weight")
    return packed_weight(array if stored is None
                         else quantised(array, stored) if isinstance(stored, str)
                         else in_type(array, stored))


def _packed_dtype(dtype: DTypeLike) -> np.dtype[Any] | str:
    if isinstance(dtype, str) and dtype in BITS:
        return dtype
    try:
        return stored_dtype(dtype)
    except TypeError as error:
        raise TypeError(f'{error}; or "q8_0" or "q4_0"') from None


def packed_weight(weight: NDArray[Any] | Blocks) -> PackedWeight:
    """Of numbers that are checked."""
    return _fill(object.__new__(PackedWeight), weight)


def numbers_of(weight: NDArray[Any] | PackedWeight) -> NDArray[Any]:
    """The array itself, or a new one of what is packed: read-only, since writing into it would
    change nothing else."""
    if not isinstance(weight, PackedWeight):
        return weight
    numbers = weight.unpack()
    numbers.flags.writeable = False
    return numbers


def _fill(packed: PackedWeight, weight: NDArray[Any] | Blocks) -> PackedWeight:
    """`packed`, which was just made, of these numbers."""
    set_slot = object.__setattr__
    if isinstance(weight, Blocks):
        core = _core.pack_blocks(weight.numbers, weight.scales, BITS[weight.kind])
        own: np.dtype[Any] | str = weight.kind
        shape = weight.numbers.shape
    else:
        core, shape = _core.pack_weight(weight), weight.shape
        is_integer = weight.dtype.kind in "iub"
        own = np.dtype(np.float64) if is_integer else weight.dtype.newbyteorder("=")
    set_slot(packed, "_core_weight", core)
    set_slot(packed, "_dtype", own)
    set_slot(packed, "_shape", shape)
    return packed
