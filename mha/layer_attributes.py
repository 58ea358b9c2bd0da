"""The attributes of a layer: its parameters, and what its constructor was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Never, Self, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike

from mha.half_precision import shown, shown_dtype

if TYPE_CHECKING:
    from mha.layer import MultiHeadAttention

T = TypeVar("T")


class Parameter:
    """A parameter of the layer as an attribute; assigning checks its shape and type."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.__doc__ = "A parameter, or None; assigning checks its shape and type."

    def __get__(self, layer: MultiHeadAttention | None, owner: type | None = None) -> Any:
        if layer is None:
            return self
        parameter = layer._state.parameters.get(self.name)
        return parameter if parameter is None else shown(parameter)

    def __set__(self, layer: MultiHeadAttention, array: ArrayLike) -> None:
        layer._set_parameter(self.name, array)

    def __delete__(self, layer: MultiHeadAttention) -> None:
        raise AttributeError(f"{self.name}: got deleted, wanted an array in its place, or a new"
                             " layer without")


class Setting(Generic[T]):
    """What the constructor was given, as an attribute that cannot be assigned."""

    def __init__(self, instead: str) -> None:
        self.instead = instead
        self.__doc__ = f"Read-only. Wanted in place of an assignment: {instead}."

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, layer: None, owner: type) -> Self: ...
    @overload
    def __get__(self, layer: MultiHeadAttention, owner: type) -> T: ...
    def __get__(self, layer: MultiHeadAttention | None, owner: type | None = None) -> Any:
        return self if layer is None else getattr(layer._state.settings, self.name)

    def __set__(self, layer: MultiHeadAttention, value: Never) -> None:
        raise AttributeError(f"{self.name}: got an assignment of {value!r} to a layer that is"
                             f" made, wanted {self.instead}")

    def __delete__(self, layer: MultiHeadAttention) -> None:
        raise AttributeError(f"{self.name}: got deleted, wanted {self.instead}")


class ShownDtype(Setting[np.dtype[Any]]):
    """That of dtype: "bfloat16", the name, where nobody has imported ml_dtypes."""

    def __get__(self, layer: MultiHeadAttention | None, owner: type | None = None) -> Any:
        return self if layer is None else shown_dtype(layer._state.settings.dtype)


OTHER_SIZES = "a new layer of these sizes"
OTHER_OPTION = "a new layer with another one, or one that a call gives"
FEWER_HEADS = "prune_heads() for fewer heads, or a new layer"
