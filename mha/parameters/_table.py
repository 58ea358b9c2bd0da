"""What a layout is: the names of a framework's arrays, their axes, and the parameters they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mha._base.pieces import copied, copy_into
from mha._functions.quantised_array import QuantisedArray
from mha._functions.rotary import Layout as RotaryLayout

Array = NDArray[Any]
Sizes = Mapping[str, int]
Pairs = tuple[tuple[str, str], ...]

# The axes of mha's parameters, each by the axes that are merged in it. A norm has those of its
# array; a table of biases by distance has its own functions.
AXES = {
    "W_q": ("query_dim", "heads head_dim"), "b_q": ("heads head_dim",),
    "W_k": ("key_dim", "kv_heads head_dim"), "b_k": ("kv_heads head_dim",),
    "W_v": ("value_dim", "kv_heads value_head_dim"), "b_v": ("kv_heads value_head_dim",),
    "W_o": ("heads value_head_dim", "output_dim"), "b_o": ("output_dim",),
    "W_g": ("query_dim", "heads value_head_dim"), "b_g": ("heads value_head_dim",),
    "sinks": ("heads",),
    # Of latent attention. head_dim columns are nope_dim + rope_dim, kv_dim are those of a head's
    # key that do not rotate and then its value, latent_dim are kv_rank + rope_dim.
    "W_dq": ("query_dim", "query_rank"), "b_dq": ("query_rank",),
    "W_uq": ("query_rank", "heads head_dim"),
    "W_dkv": ("query_dim", "latent_dim"), "b_dkv": ("latent_dim",),
    "W_ukv": ("kv_rank", "heads kv_dim"),
}
EQUAL_HEADS = (("heads", "kv_heads"), ("head_dim", "value_head_dim"))
# The axes along which parameters stand beside each other: query, key and value; query and gate.
FUSED = {"3": 3, "2": 2}
BESIDE = "3 heads head_dim"  # all heads of one before those of the next
# The same of heads that are fewer for key and value: all of the query's, the key's, the value's; or
# for each head of the key its query heads, itself and the value's.
ALL_HEADS, GROUPS = "all_heads", "heads_by_group"
BESIDE_FEWER, BY_GROUP = f"{ALL_HEADS} head_dim", f"{GROUPS} head_dim"


class Stored(NamedTuple):
    """One array of a state."""

    holds: tuple[str, ...]  # the parameters in it: several, in the order of the fused axis
    axes: tuple[str, ...]   # of the array, each by the axes that are merged in it, outermost first
    optional: bool = False
    # For what is no matter of axes alone: from the state's array to the parameter, and back.
    read: Callable[[Array, Context], Array] | None = None
    write: Callable[[Array], Array] | None = None
    in_layer_0: str = ""   # where layers share the first one's: how a prefix has their number
    never_under: str = ""  # a part of prefixes under which there is none

    @property
    def atoms(self) -> list[str]:
        """Its axes before they are merged."""
        return " ".join(self.axes).split()

    @property
    def fused(self) -> str | None:
        """The axis along which its parameters stand beside each other."""
        return next((atom for atom in self.atoms if atom in FUSED), None)

    @property
    def joined(self) -> str | None:
        """The axis along which the heads of its parameters stand, where these may be of two counts.
        """
        return next((atom for atom in self.atoms if atom in (ALL_HEADS, GROUPS)), None)


class Context(NamedTuple):
    """What may decide how a layer is read."""

    config: Mapping[str, Any]
    prefix: str
    layer_index: int | None
    sizes: Sizes
    full_every: int | None  # the layout's
    rotary_layout: RotaryLayout


Form = Mapping[str, Stored]
Setting = Callable[[Context], Any]


class Layout(NamedTuple):
    """How a framework keeps the parameters of an attention layer."""

    name: str
    forms: tuple[Form, ...]  # by names behind the prefix; the first that fits is written
    settings: Mapping[str, Setting] = {}  # options that its configs decide
    needs: tuple[str, ...] = ()           # those of them that have no default
    constants: Mapping[str, Any] = {}     # options that are always so
    passed_over: tuple[str, ...] = ()     # patterns of names that no parameter comes from
    unsupported: Mapping[str, str] = {}   # names and keys of configs, and what to do instead
    model_types: tuple[str, ...] = ()     # what configs call its models
    nested: bool = False                  # a tree of mappings
    full_every: int | None = None  # of sliding layers every n-th attends to all, by default
    rotary_layout: RotaryLayout = "half"
    latent: bool = False                  # of latent attention
    partial_biases: tuple[str, ...] = ()  # of "qkvo", which models have beside all or none
    biases: Mapping[str, str] = {"attention_bias": "qkvo", "qkv_bias": "qkvo"}  # keys of configs
    equal: Pairs = (("query_dim", "key_dim"), ("query_dim", "value_dim"),
                    ("head_dim", "value_head_dim"))  # sizes that its models have no two of


def linear(letter: str, name: str, *, bias: bool | None = True) -> dict[str, Stored]:
    """PyTorch's Linear: weight (out, in), bias; bias=None where it may be absent."""
    weight = {f"{name}.weight": Stored((f"W_{letter}",), AXES[f"W_{letter}"][::-1])}
    if bias is False:
        return weight
    return weight | {f"{name}.bias": Stored((f"b_{letter}",), AXES[f"b_{letter}"], bias is None)}


def linears(names: Mapping[str, str], *, bias: bool | None = True) -> dict[str, Stored]:
    """One for each letter of "qkvo"."""
    return {stored: how for letter, name in names.items()
            for stored, how in linear(letter, name, bias=bias).items()}


def fused(name: str, columns: str, *, bias: bool | None = True,
          transposed: bool = True) -> dict[str, Stored]:
    """Query, key and value in one weight (out, in), or not transposed (in, out), and bias, whose
    columns are those of the three as `columns` orders the axes."""
    axes = (columns, "query_dim") if transposed else ("query_dim", columns)
    weight = {f"{name}.weight": Stored(("W_q", "W_k", "W_v"), axes)}
    if bias is False:
        return weight
    return weight | {f"{name}.bias": Stored(("b_q", "b_k", "b_v"), (columns,), bias is None)}


def whole_biases(layout: Layout, form: Form, there: set[str], wanted: str = "") -> set[str]:
    """Of the biases that a form may have, the fewest names that the layout's models have together
    with those that are there and those of the letters that are wanted."""
    biases = {name: {held[-1] for held in stored.holds} for name, stored in form.items()
              if stored.optional and stored.holds[0].startswith("b_")}
    known = [set(), *({name for name, letters in biases.items() if letters <= set(partial)}
                      for partial in layout.partial_biases), set(biases)]
    needed = {name for name, letters in biases.items() if name in there or letters <= set(wanted)}
    return next(names for names in known if needed <= names)


def axes_of(parameter: str, stored: Stored) -> tuple[str, ...]:
    """Of mha's array of the parameter."""
    if parameter in ("W_g", "b_g") and "heads" in stored.axes:  # one number a head
        return ("query_dim", "heads")[parameter == "b_g":]
    return AXES.get(parameter, stored.axes)


def pairs(layout: Layout, form: Form) -> Pairs:
    """The sizes that a layout and its fused arrays make equal: (query's, another's)."""
    found = list(layout.equal)
    for stored in form.values():
        first, *others = [" ".join(axes_of(name, stored)).split() for name in stored.holds]
        found += [pair for other in others for pair in zip(first, other, strict=True)
                  if len(set(pair)) == 2 and not (stored.joined and pair == ("heads", "kv_heads"))]
    return tuple(dict.fromkeys(found))


def solved(shapes: Iterable[tuple[Stored, tuple[int, ...]]], known: Sizes,
           equal: Pairs) -> dict[str, int]:
    """The sizes that follow from the arrays' shapes and what is known; that they all fit is
    another question."""
    sizes = {**FUSED, **known}
    arrays = list(shapes)
    before = -1
    while before < len(sizes):
        before = len(sizes)
        for stored, shape in arrays:
            for axis, length in zip(stored.axes, shape, strict=True):
                unknown = [atom for atom in axis.split() if atom not in sizes]
                rest = math.prod(sizes[atom] for atom in axis.split() if atom in sizes)
                if len(unknown) == 1 and rest > 0 and length >= rest and length % rest == 0:
                    sizes[unknown[0]] = length // rest
            for one, other in (*equal, *(pair[::-1] for pair in equal)):
                if one in sizes:
                    sizes.setdefault(other, sizes[one])
        sizes = with_joined(sizes)
    return sizes


def with_joined(sizes: Sizes) -> dict[str, int]:
    """The sizes with those of the axes where all heads stand, or the heads that follow of these."""
    found, known = dict(sizes), sizes.keys()
    for joined in (ALL_HEADS, GROUPS):
        if {"heads", "kv_heads"} <= known:
            found[joined] = sizes["heads"] + 2 * sizes["kv_heads"]
        elif {"heads", joined} <= known and sizes[joined] > sizes["heads"]:
            found["kv_heads"] = (sizes[joined] - sizes["heads"]) // 2
    return found


def places_of(joined: str, sizes: Sizes) -> list[Array]:
    """Where along such an axis the heads of query, key and value are."""
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    places = np.arange(heads + 2 * kv_heads)
    if joined == ALL_HEADS:
        return np.split(places, [heads, heads + kv_heads])
    if heads % kv_heads:
        raise ValueError(f"num_kv_heads: got {kv_heads}, wanted one that divides num_heads {heads}")
    groups = places.reshape(kv_heads, -1)
    return [groups[:, :-2].ravel(), groups[:, -2], groups[:, -1]]


def shape_of(axes: Iterable[str], sizes: Sizes) -> tuple[int, ...] | None:
    """None where a size is not known."""
    try:
        return tuple(math.prod(sizes[atom] for atom in axis.split()) for axis in axes)
    except KeyError:
        return None


def spelled(axes: Iterable[str], sizes: Sizes) -> str:
    """As an error shows a shape: (heads 4 * head_dim 16, query_dim 64)."""
    return "(" + ", ".join(" * ".join(
        atom if atom in FUSED else f"{atom} {sizes.get(atom, '?')}"
        for atom in axis.split()) for axis in axes) + ")"


def taken_out(stored: Stored, array: Array, sizes: Sizes) -> dict[str, Array]:
    """The parameters in an array of a state, as mha shapes them: new arrays."""
    atoms = stored.atoms
    split = array.reshape([sizes[atom] for atom in atoms])
    parts: Any = split[None]
    if stored.fused is not None:
        parts = np.moveaxis(split, atoms.index(stored.fused), 0)
        atoms.remove(stored.fused)
    elif stored.joined is not None:
        at = atoms.index(stored.joined)
        parts = [split.take(places, at) for places in places_of(stored.joined, sizes)]
        atoms[at] = "heads"
    order = [atoms.index(atom) for atom in " ".join(axes_of(stored.holds[0], stored)).split()]
    found = {}
    for name, part in zip(stored.holds, parts, strict=True):
        shape = shape_of(axes_of(name, stored), sizes)
        assert shape is not None
        found[name] = copied(part.transpose(order), order="C").reshape(shape)
    return found


def matrices_of_blocks(stored: Stored, array: QuantisedArray,
                       sizes: Sizes) -> dict[str, QuantisedArray] | None:
    """The same of an array of blocks that lie along the input axis: they stay whole, since all that
    a layout orders are the outputs. None where they lie along another axis."""
    axes = stored.axes
    if array.is_weight:
        array, axes = array.T, axes[::-1]
    if len(axes) != 2 or axes[1] != axes_of(stored.holds[0], stored)[0]:
        return None
    biases = {f"b{name[1:]}": name for name in stored.holds}  # whose only axis are the outputs
    places = taken_out(stored._replace(holds=tuple(biases), axes=axes[:1]),
                       np.arange(array.shape[0]), sizes)
    return {name: array.in_rows(places[bias]).T for bias, name in biases.items()}


def put_in(stored: Stored, parameters: Mapping[str, Array], sizes: Sizes) -> Array:
    """The array of a state that holds these parameters; the inverse of `taken_out`."""
    atoms = ["heads" if atom == stored.joined else atom for atom in stored.atoms]
    fused_at = None if stored.fused is None else atoms.index(stored.fused)
    rest = [atom for atom in atoms if atom != stored.fused]
    order = [" ".join(axes_of(stored.holds[0], stored)).split().index(atom) for atom in rest]
    parts = [parameters[name].reshape([sizes[atom] for atom in " ".join(
        axes_of(name, stored)).split()]).transpose(order) for name in stored.holds]
    if stored.joined is not None:
        at = atoms.index("heads")
        together = np.concatenate(parts, at).take(
            np.argsort(np.concatenate(places_of(stored.joined, sizes))), at)
    elif fused_at is None:
        together = copied(parts[0], order="C")
    else:
        lengths = list(parts[0].shape)
        lengths.insert(fused_at, len(parts))
        together = np.empty(lengths, parts[0].dtype)
        for to, part in zip(np.moveaxis(together, fused_at, 0), parts, strict=True):
            copy_into(to, part)
    shape = shape_of(stored.axes, sizes)
    assert shape is not None
    return together.reshape(shape)
