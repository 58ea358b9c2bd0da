"""A state from a layer: `MultiHeadAttention.to_state`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mha._functions.multi_head_attention import BIASES
from mha.parameters import _latent
from mha.parameters._names import as_tree, check_layer, layout_named, shown
from mha.parameters._table import (
    AXES,
    FUSED,
    Array,
    Form,
    Layout,
    pairs,
    put_in,
    shape_of,
    whole_biases,
    with_joined,
)

OPTIONS = ("scale", "softcap", "window", "alibi", "rotary", "norm_offset")


def state_of_layer(settings: Any, parameters: dict[str, Array], layout: str,
                   prefix: str) -> dict[str, Any]:
    """`to_state`, of the layer's settings and parameters."""
    known = layout_named(layout)
    check_layer(known, settings.is_latent)
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: got {type(prefix).__name__}, wanted text")
    sizes = _sizes(settings)
    if known.latent:
        parameters = _latent.together(parameters, sizes)
    wrong_options = _wrong_options(known, settings)
    first: list[str] = []
    for form in known.forms:
        problems = [*_wrong_parameters(known, form, parameters, sizes), *wrong_options]
        if not problems:
            break
        first = first or problems
    else:
        raise ValueError(f"layer: got one that layout {known.name!r} cannot hold: "
                         + "; ".join(first))
    flat = _stored(known, form, parameters, sizes, prefix)
    return as_tree(flat) if known.nested else flat


def _sizes(settings: Any) -> dict[str, int]:
    if settings.is_latent:
        return {**FUSED, **_latent.sizes_of(settings)}
    names = ("head_dim", "value_head_dim", "query_dim", "key_dim", "value_dim", "output_dim")
    return with_joined({**FUSED, "heads": settings.num_heads, "kv_heads": settings.num_kv_heads,
                        **{name: getattr(settings, name) for name in names}})


def _wrong_parameters(layout: Layout, form: Form, parameters: dict[str, Array],
                      sizes: dict[str, int]) -> list[str]:
    """What of the parameters and their sizes the form has no place for."""
    held = {name for stored in form.values() for name in stored.holds}
    problems = [f"no place for {shown(sorted(parameters.keys() - held))}"] * bool(
        parameters.keys() - held)
    needed = {name for stored in form.values() if not stored.optional and not stored.never_under
              for name in stored.holds} - set(BIASES)
    problems += [f"the layer has no {shown(sorted(needed - parameters.keys()))}"] * bool(
        needed - parameters.keys())
    problems += [f"{other} is {sizes[other]}, wanted {sizes[one]} as {one}"
                 for one, other in pairs(layout, form) if sizes[one] != sizes[other]]
    for stored in form.values():  # norms of a head and of the width have one name
        name = stored.holds[0]
        if name.endswith("_norm") and name in parameters:
            wanted = math.prod(sizes[atom] for atom in stored.atoms)
            if parameters[name].shape != (wanted,):
                problems.append(f"{name} has shape {parameters[name].shape}, wanted ({wanted},)")
    if "W_g" in held & parameters.keys() and parameters["W_g"].shape != shape_of(
            AXES["W_g"], sizes):
        problems.append("the layer has a gate a head, wanted one a column")
    return problems


def _wrong_options(layout: Layout, settings: Any) -> list[str]:
    """Options of the layer that no config of the layout says."""
    default = {"scale": 1 / math.sqrt(settings.head_dim)}
    problems = []
    for name in OPTIONS:
        got = getattr(settings, name, None)
        got = None if got == default.get(name, 0.0) else got
        wanted = layout.constants.get(name) or None
        if name == "scale" and wanted == default["scale"]:
            wanted = None
        if name not in layout.settings and got != wanted:
            problems.append(f"{name} is {got}, wanted {wanted}")
    wanted = layout.constants.get("norm_eps", settings.norm_eps)
    problems += [f"norm_eps is {settings.norm_eps}, wanted {wanted}"] * (
        settings.norm_eps != wanted)
    if (settings.rotary is not None and "rotary" in layout.settings
            and settings.rotary.layout != layout.rotary_layout):
        problems.append(f"rotary rotates pairs of columns that are {settings.rotary.layout!r},"
                        f" wanted {layout.rotary_layout!r}")
    return problems


def _stored(layout: Layout, form: Form, parameters: dict[str, Array], sizes: dict[str, int],
            prefix: str) -> dict[str, Array]:
    """The form's arrays; biases that it must have and the layer has not are zeros."""
    dtype = parameters["W_o"].dtype
    flat = {}
    there = {name for name, stored in form.items() if parameters.keys() & set(stored.holds)}
    there |= whole_biases(layout, form, there)
    for name, stored in form.items():
        if name not in there and (stored.optional or stored.never_under):
            continue
        held = {own: parameters[own] if own in parameters else _zeros(own, sizes, dtype)
                for own in stored.holds}
        flat[prefix + name] = (put_in(stored, held, sizes) if stored.write is None
                               else stored.write(held[stored.holds[0]]))
    return flat


def _zeros(bias: str, sizes: dict[str, int], dtype: np.dtype[Any]) -> Array:
    return np.zeros(shape_of(AXES[bias], sizes) or (), dtype)
