"""What a layer is made with: its settings, checked, and the attributes that show them."""

from __future__ import annotations

import math
from typing import Any, Generic, Literal, NamedTuple, Never, Protocol, Self, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from mha._base.arguments import (
    as_array,
    as_bool,
    as_finite,
    as_float,
    as_probability,
    as_size,
    check_choice,
    check_kind,
)
from mha._base.dtypes import layer_dtype, shown, shown_dtype
from mha._functions.multi_head_attention import BIASES, WEIGHTS, NormOf
from mha._functions.options import Window, as_sides
from mha._functions.packed_weight import numbers_of
from mha._functions.rotary import Rotary, as_record

T = TypeVar("T")
OutputGate = Literal["element", "head"]

PROJECTIONS = "qkvo"
GATE = "g"  # the output gate's letter
# What to do in place of an assignment.
OTHER_SIZES = "a new layer of these sizes"
OTHER_OPTION = "a new layer with another one, or one that a call gives"
FEWER_HEADS = "prune_heads() for fewer heads, or a new layer"


class LayerSettings(NamedTuple):
    """The constructor's arguments, defaults filled in."""

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    query_dim: int
    key_dim: int
    value_dim: int
    output_dim: int
    dropout: float
    use_bias: bool | str  # letters of "qkvog", where not all or none have one
    dtype: np.dtype[Any]
    # Those below have come later: older pickles are without.
    scale: float | None = None
    softcap: float | None = None
    window: Window | None = None
    alibi: tuple[float, ...] | None = None
    sinks: bool = False
    relative_bias: int | None = None  # the distance at which the table ends
    rotary: Rotary | None = None
    qk_norm: NormOf | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    output_gate: OutputGate | None = None

    @property
    def is_latent(self) -> bool:
        """Whether they are those of latent attention."""
        return False

    @property
    def matrices(self) -> tuple[str, ...]:
        """The names of what is packed when the layer freezes."""
        return WEIGHTS

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by its name."""
        queries = self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        values = self.num_kv_heads * self.value_head_dim
        merged = self.num_heads * self.value_head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "W_q": (self.query_dim, queries), "W_k": (self.key_dim, keys),
            "W_v": (self.value_dim, values), "W_o": (merged, self.output_dim)}
        if self.output_gate is not None:
            gates = merged if self.output_gate == "element" else self.num_heads
            shapes["W_g"] = (self.query_dim, gates)
        biased = biased_projections(self.use_bias, self.output_gate)
        shapes |= {"b_" + name: shapes["W_" + name][1:] for name in biased}
        if self.sinks:
            shapes["sinks"] = (self.num_heads,)
        if self.relative_bias is not None:
            shapes["relative_bias"] = (self.num_heads, 2 * self.relative_bias + 1)
        if self.qk_norm == "head":
            shapes |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        elif self.qk_norm == "width":
            shapes |= {"q_norm": (queries,), "k_norm": (keys,)}
        return shapes

    def wanted_for(self, name: str) -> str:
        """What a layer must be made with to have a parameter that this one has not."""
        if name in BIASES and (name != "b_g" or self.output_gate is not None):
            return f"use_bias=True or letters with {name[-1]!r}"
        given = {"sinks": "sinks=True", "relative_bias": "relative_bias=r", "W_g": "output_gate=",
                 "b_g": "output_gate="}
        return f"one made with {given.get(name, 'qk_norm=')}"


def checked_settings(
        embed_dim: int, num_heads: int, *, use_bias: bool | str, dropout: float,
        num_kv_heads: int | None, head_dim: int | None, value_head_dim: int | None,
        query_dim: int | None, key_dim: int | None, value_dim: int | None,
        output_dim: int | None, dtype: DTypeLike, scale: float | None = None,
        softcap: float | None = None, window: Window | None = None,
        alibi: ArrayLike | None = None, sinks: bool = False, relative_bias: int | None = None,
        rotary: Rotary | None = None, qk_norm: NormOf | None = None, norm_eps: float = 1e-6,
        norm_offset: float = 0.0, output_gate: OutputGate | None = None) -> LayerSettings:
    """The constructor's arguments, checked; its docstring has the defaults that None stands for."""
    embed_dim = as_size(embed_dim, "embed_dim")
    num_heads = as_size(num_heads, "num_heads")
    num_kv_heads = as_size(num_kv_heads, "num_kv_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads: got {num_kv_heads}, wanted a divisor of num_heads"
                         f" ({num_heads})")
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(f"embed_dim: got {embed_dim}, wanted a multiple of num_heads"
                         f" ({num_heads}); or give head_dim")
    head_dim = as_size(head_dim, "head_dim", embed_dim // num_heads)
    key_dim = as_size(key_dim, "key_dim", embed_dim)
    check_rotary(rotary, head_dim, "head_dim")
    check_choice(qk_norm, "qk_norm", "head", "width", None)
    check_choice(output_gate, "output_gate", "element", "head", None)
    return LayerSettings(
        embed_dim, num_heads, num_kv_heads, head_dim,
        as_size(value_head_dim, "value_head_dim", head_dim),
        as_size(query_dim, "query_dim", embed_dim), key_dim,
        as_size(value_dim, "value_dim", key_dim), as_size(output_dim, "output_dim", embed_dim),
        as_probability(dropout, "dropout"), as_projections(use_bias, output_gate),
        layer_dtype(dtype), None if scale is None else as_finite(scale, "scale"),
        as_softcap(softcap), as_window(window), as_alibi(alibi, num_heads), as_bool(sinks, "sinks"),
        None if relative_bias is None else as_size(relative_bias, "relative_bias", least=0),
        rotary, qk_norm, as_finite(norm_eps, "norm_eps", least=0),
        as_finite(norm_offset, "norm_offset"), output_gate)


def check_rotary(rotary: Rotary | None, width: int, name: str) -> None:
    as_record(rotary)  # raises what is no Rotary
    if rotary is not None and rotary.dims > width:
        raise ValueError(f"rotary: got {rotary.dims} dims, wanted at most {name} ({width})")


def as_projections(use_bias: Any, output_gate: OutputGate | None) -> bool | str:
    """The projections that have a bias: True for all that there are, False for none, else letters
    of them."""
    if not isinstance(use_bias, str):
        return as_bool(use_bias, "use_bias")
    letters = PROJECTIONS + GATE * (output_gate is not None)
    if set(use_bias) - set(letters) or len(set(use_bias)) < len(use_bias):
        raise ValueError(f"use_bias: got {use_bias!r}, wanted True, False, or letters of"
                         f" {letters!r}, each once")
    named = "".join(name for name in letters if name in use_bias)
    return {letters: True, "": False}.get(named, named)


def biased_projections(use_bias: bool | str, output_gate: OutputGate | None) -> str:
    letters = PROJECTIONS + GATE * (output_gate is not None)
    return use_bias if isinstance(use_bias, str) else letters * use_bias


def as_softcap(softcap: Any) -> float | None:
    """None for infinity, which caps nothing."""
    if softcap is None:
        return None
    number = as_float(softcap, "softcap", "a number above 0")
    if not number > 0:
        raise ValueError(f"softcap: got {softcap}, wanted a number above 0")
    return None if number == math.inf else number


def as_window(window: Any) -> Window | None:
    """None for a window that is open on both sides."""
    left, right = as_sides(window)
    return None if left is right is None else (left, right)


def as_alibi(alibi: ArrayLike | None, num_heads: int) -> tuple[float, ...] | None:
    if alibi is None:
        return None
    slopes = as_array(alibi, "alibi")
    check_kind(slopes, "alibi", "iuf", "floats")
    if slopes.shape != (num_heads,):
        raise ValueError(f"alibi: got shape {slopes.shape}, wanted {(num_heads,)}, a number for"
                         " each head")
    return tuple(map(float, slopes))


def spelled(settings: LayerSettings) -> list[str]:
    """The constructor's arguments as repr has them: those that are not the defaults."""
    whole, rest = divmod(settings.embed_dim, settings.num_heads)
    plain = {"use_bias": True, "dropout": 0.0, "num_kv_heads": settings.num_heads,
             "head_dim": None if rest else whole,
             "value_head_dim": settings.head_dim, "query_dim": settings.embed_dim,
             "key_dim": settings.embed_dim, "value_dim": settings.key_dim,
             "output_dim": settings.embed_dim,
             **LayerSettings._field_defaults}
    texts = [str(settings.embed_dim), str(settings.num_heads)]
    texts += [f"{name}={getattr(settings, name)!r}" for name, default in plain.items()
              if getattr(settings, name) != default and name != "alibi"]
    texts += ["alibi=..."] * (settings.alibi is not None)  # a number a head
    return [*texts, f"dtype={shown_dtype(settings.dtype)}"]


class HasState(Protocol):
    """The layer, as far as its attributes below need it."""

    _state: Any

    def _set_parameter(self, name: str, array: ArrayLike) -> None: ...


class Parameter:
    """A parameter of the layer as an attribute; assigning checks its shape and type."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.__doc__ = "A parameter, or None; assigning checks its shape and type."

    def __get__(self, layer: HasState | None, owner: type | None = None) -> Any:
        if layer is None:
            return self
        parameter = layer._state.parameters.get(self.name)
        return parameter if parameter is None else shown(numbers_of(parameter))

    def __set__(self, layer: HasState, array: ArrayLike) -> None:
        layer._set_parameter(self.name, array)

    def __delete__(self, layer: HasState) -> None:
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
    def __get__(self, layer: HasState, owner: type) -> T: ...
    def __get__(self, layer: HasState | None, owner: type | None = None) -> Any:
        return self if layer is None else getattr(layer._state.settings, self.name)

    def __set__(self, layer: HasState, value: Never) -> None:
        raise AttributeError(f"{self.name}: got an assignment of {value!r} to a layer that is"
                             f" made, wanted {self.instead}")

    def __delete__(self, layer: HasState) -> None:
        raise AttributeError(f"{self.name}: got deleted, wanted {self.instead}")


class ShownDtype(Setting[np.dtype[Any]]):
    """That of dtype: "bfloat16", the name, where nobody has imported ml_dtypes."""

    def __get__(self, layer: HasState | None, owner: type | None = None) -> Any:
        return self if layer is None else shown_dtype(layer._state.settings.dtype)
