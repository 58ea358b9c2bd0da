"""A layer from a state: `MultiHeadAttention.from_state`."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mha._base.arguments import as_size, check_choice, detached_array, printable
from mha._base.dtypes import hint_of_numpys, is_half, layer_dtype
from mha._functions.multi_head_attention import BIASES, NORMS
from mha._functions.quantised import BITS
from mha._functions.quantised_array import QuantisedArray
from mha._functions.rotary import Layout as RotaryLayout
from mha.parameters import _config as configs
from mha.parameters import _latent
from mha.parameters._layouts import OF_MODELS
from mha.parameters._names import (
    ONE_OF_THEM,
    PLACE,
    advice,
    best_forms,
    check_layer,
    fits,
    flattened,
    layer_indices,
    layout_named,
    left_over,
    looks_like,
    shown,
)
from mha.parameters._own_names import NAME, own_layout, seen_names
from mha.parameters._refused import refusal, unread_keys
from mha.parameters._table import (
    FUSED,
    Array,
    Context,
    Form,
    Layout,
    Pairs,
    Stored,
    matrices_of_blocks,
    pairs,
    shape_of,
    solved,
    spelled,
    taken_out,
    whole_biases,
)

# From the layer's settings by name, checked there, and its parameters: a layer. Matrices whose q8_0
# or q4_0 blocks a layer may keep are QuantisedArrays (in, out).
Make = Callable[[dict[str, Any], dict[str, Any]], Any]

_log = logging.getLogger(__name__)
SIZE_OF = {"num_heads": "heads", "num_kv_heads": "kv_heads", "head_dim": "head_dim"}


class Asked(NamedTuple):
    """The arguments of `from_state` that are the same for all layers."""

    state: Mapping[str, Any]
    layout: Layout
    config: Mapping[str, Any] | None
    sizes: dict[str, int]      # those given
    dtype: DTypeLike | None
    options: dict[str, Any]    # those given
    named: str | None          # the layout, as it was given
    rotary_layout: RotaryLayout
    make: Make


def layers_from_state(state: Mapping[str, Any], layout: str | None, names: Any,
                      transposed: bool | None, prefix: str,
                      config: configs.Config | None, layer_index: int | None,
                      sizes: Mapping[str, int | None], dtype: DTypeLike | None,
                      rotary_layout: RotaryLayout | None,
                      options: Mapping[str, Any | EllipsisType], make: Make, *,
                      latent: bool = False) -> Any:
    """`from_state` of `MultiHeadAttention`, or of `MultiHeadLatentAttention`, checked: what make
    makes, or a list of these."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: got {type(prefix).__name__}, wanted text")
    if not isinstance(state, Mapping):
        raise TypeError(f"state: got {type(state).__name__}, wanted names with arrays")
    if config is None and getattr(state, "is_lazy", False):
        config = getattr(state, "config", None)  # of a folder that was opened
    known_config = None if config is None else configs.of_text(config)
    if names is None:
        known = _layout(layout, known_config, state, prefix)
    elif layout is not None:
        raise ValueError(f"names: got names beside layout {layout!r}, wanted one of the two")
    else:
        known = own_layout(names, transposed)
    check_layer(known, latent)
    if transposed is not None and names is None:
        raise ValueError("transposed: got it without names, wanted it only with names=, since a"
                         " layout says it")
    flat = _flat(state, known)
    given = {name: value for name, value in options.items() if value is not ...}
    asked = Asked(flat, known, known_config,
                  {SIZE_OF[name]: as_size(size, name) for name, size in sizes.items()
                   if size is not None},
                  None if dtype is None else layer_dtype(dtype), given, layout,
                  _rotary_layout(rotary_layout, known, given), make)
    if layer_index is not None:
        index = as_size(layer_index, "layer_index", least=0)
        return _one(asked, prefix.replace(PLACE, str(index)), index)
    if PLACE not in prefix:
        return _one(asked, prefix, None)
    indices = layer_indices(flat, prefix)
    if not indices:
        return [_one(asked, prefix.replace(PLACE, "0"), 0)]  # which is an error
    read, wrong = [], []
    for index in indices:
        try:
            read.append(_one(asked, prefix.replace(PLACE, str(index)), index))
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        others = len(wrong) - 1
        more = f"; and {others} more layer{'s are' if others > 1 else ' is'} wrong" * (others > 0)
        raise ValueError(wrong[0] + more)
    return read


def _layout(given: Any, config: Mapping[str, Any] | None, state: Mapping[Any, Any],
            prefix: str) -> Layout:
    """That given, or that of the config's model."""
    if given is not None:
        return layout_named(given)
    model = None if config is None else config.get("model_type")
    if isinstance(model, str) and model in OF_MODELS:
        return OF_MODELS[model]
    why = refusal(model)
    if why is not None:
        raise ValueError(f"layout: got none, and model_type {model!r} in config, which has {why}")
    got = "no config" if config is None else "no model_type in config" if model is None else (
        f"model_type {model!r} in config, which has no layout here")
    first = prefix.replace(PLACE, "0")
    under = {name.removeprefix(first) for name in map(str, state) if name.startswith(first)}
    alike, own = looks_like(under), seen_names(under)
    raise ValueError(printable(
        f"layout: got none, and {got}, wanted {ONE_OF_THEM}, or names="
        + f"; {own}" * bool(own) + f"; state has the names of {' or '.join(alike)}" * bool(alike)))


def _rotary_layout(given: RotaryLayout | None, layout: Layout,
                   options: Mapping[str, Any]) -> RotaryLayout:
    if given is None:
        return layout.rotary_layout
    check_choice(given, "rotary_layout", "half", "interleaved")
    if "rotary" in options:
        raise ValueError(f"rotary_layout: got {given!r} beside rotary=, wanted one of the two:"
                         " mha.Rotary(..., layout=...) has its own")
    if "rotary" not in layout.settings:
        raise ValueError(f"rotary_layout: got {given!r} with layout {layout.name!r}, which reads no"
                         " rotary embeddings of a config, wanted rotary=")
    return given


def _flat(state: Mapping[str, Any], layout: Layout) -> Mapping[str, Any]:
    if layout.nested and not getattr(state, "is_lazy", False):
        return flattened(state)
    for name in state:
        if not isinstance(name, str):
            raise TypeError(f"state: got the name {name!r}, wanted text")
    return state


def _one(asked: Asked, prefix: str, layer_index: int | None) -> Any:
    """The layer under a prefix; one ValueError for all that is wrong with it."""
    layout = asked.layout
    under = {name.removeprefix(prefix) for name in asked.state if name.startswith(prefix)}
    forms = best_forms(layout, under)
    problems, arrays = _found(asked, forms[0], prefix, under)
    form, sizes, wrong_sizes = _fitting(asked, forms, arrays, prefix)
    problems += wrong_sizes
    # What a config says is computed for sizes that the arrays have, too, however large it says.
    context = Context(asked.config or {}, prefix, layer_index, {} if wrong_sizes else sizes,
                      layout.full_every, asked.rotary_layout)
    options, wrong_options = _options(asked, context, under)
    problems += wrong_options
    if not problems:
        _log.debug("%s under %r: %s; options %s", layout.name, prefix,
                   shown(f"{name} {array.shape}" for name, array in arrays.items()), options)
        try:
            return _assembled(asked, form, arrays, context, options)
        except ValueError as error:
            problems.append(str(error))
    found = shown(f"{name} {array.shape}" for name, array in arrays.items())
    if not under and asked.state:
        found += f", but elsewhere {shown(asked.state)}"
    hints = advice(layout, under, asked.state, prefix)
    if layout.name != NAME and not fits(layout, under):
        hints += filter(None, [seen_names(under)])
    raise ValueError(printable("; ".join([
        f"state: got what does not fit {_shown_layout(layout)} under prefix {prefix!r}",
        *problems, f"found {found}", *hints])))


def _found(asked: Asked, form: Form, prefix: str,
           under: set[str]) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with the names, and the arrays of those that are right."""
    layout, problems, arrays, missing = asked.layout, [], {}, []
    for name, stored in form.items():
        full = prefix + name
        if full not in asked.state and stored.in_layer_0:
            full = re.sub(stored.in_layer_0, "0", prefix, count=1) + name
        if full in asked.state:
            try:
                arrays[name] = _as_floats(asked.state[full], full)
            except (TypeError, ValueError) as error:
                problems.append(str(error))
        elif not stored.optional and not (stored.never_under and stored.never_under in prefix):
            missing.append(name)
    there = {name for name in form if prefix + name in asked.state}
    wanted = configs.biases(asked.config or {}, layout, asked.named)
    missing += sorted(whole_biases(layout, form, there, wanted) - there)
    others = sorted(left_over(layout, form, under))
    cures = [f"{name}: wanted {layout.unsupported[name]}" for name in others
             if name in layout.unsupported]
    others = [name for name in others if name not in layout.unsupported]
    problems += [f"missing {shown(missing)}"] * bool(missing)
    problems += [f"left over {shown(others)}"] * bool(others)
    return [*problems, *cures], arrays


def _as_floats(value: Any, name: str) -> Array | QuantisedArray:
    if isinstance(value, QuantisedArray):
        return value
    array = detached_array(value, name)
    try:
        layer_dtype(_native(array))
    except TypeError:
        raise TypeError(f"{name}: got an array of {array.dtype}, wanted float16, bfloat16, float32"
                        f" or float64{hint_of_numpys(array.dtype)}") from None
    return array


def _native(array: Array | QuantisedArray) -> np.dtype[Any]:
    if isinstance(array, QuantisedArray):
        return np.dtype(np.float32)
    return array.dtype.newbyteorder("=")


def _shown_layout(layout: Layout) -> str:
    return NAME if layout.name == NAME else f"layout {layout.name!r}"


def _fitting(asked: Asked, forms: list[Form], arrays: Mapping[str, Array],
             prefix: str) -> tuple[Form, dict[str, int], list[str]]:
    """Of forms of the same names the one that fits the shapes, with the sizes that follow and what
    is wrong with them. Forms differ in what is transposed."""
    read = [(form, *_sizes(asked, form, arrays, prefix)) for form in forms]
    right = [fitting for fitting in read if not fitting[2]]
    if len(right) > 1:
        form, sizes, _ = right[0]
        return form, sizes, ["transposed: needed, since the shapes fit both ways, wanted"
                             " transposed=True for weights (out, in), as PyTorch's Linear has them,"
                             " or False for (in, out), as in x @ W"]
    return (right or read)[0]


def _sizes(asked: Asked, form: Form, arrays: Mapping[str, Array],
           prefix: str) -> tuple[dict[str, int], list[str]]:
    """The sizes of the layer, and what is wrong with the shapes."""
    problems = []
    known = dict(asked.sizes)
    try:
        of_config = (_latent.sizes(asked.config or {}) if asked.layout.latent
                     else configs.sizes(asked.config or {}, prefix))
        known = of_config | known
    except (TypeError, ValueError) as error:
        problems.append(str(error))
    right = {name: array for name, array in arrays.items()
             if array.ndim == len(form[name].axes)}
    equal = pairs(asked.layout, form)
    sizes = solved([(form[name], array.shape) for name, array in right.items()], known, equal)
    if asked.layout.latent:
        problems += _latent.contradictions(asked.config or {}, form)
    named_alone = asked.layout.name == NAME and not {"heads", "head_dim"} & known.keys()
    if ("heads" not in sizes or named_alone) and right:
        problems.append("num_heads: needed and given nowhere, wanted num_heads= or config=")
        return sizes, problems
    problems += [f"{other} is {sizes[other]}, wanted {sizes[one]} as {one}" for one, other in equal
                 if {one, other} <= sizes.keys() and sizes[one] != sizes[other]]
    for name, array in arrays.items():
        if shape_of(form[name].axes, sizes) != array.shape:
            problems.append(f"{prefix}{name}: got shape {array.shape}, wanted"
                            f" {spelled(form[name].axes, sizes)}"
                            f"{_why(name, form, right, known, equal)}")
        elif array.size == 0:
            problems.append(f"{prefix}{name}: got shape {array.shape}, wanted sizes of at least 1")
    return sizes, problems


def _why(name: str, form: Form, arrays: Mapping[str, Array], known: Mapping[str, int],
         equal: Pairs) -> str:
    """What may be wrong with an array's shape: heads that do not divide it, or it is transposed."""
    array, axes = arrays.get(name), form[name].axes
    if array is None:
        return ""
    transposed = {other: arrays[other].shape for other in arrays} | {name: array.shape[::-1]}
    sizes = solved([(form[other], shape) for other, shape in transposed.items()], known, equal)
    if array.ndim == 2 and all(shape_of(form[other].axes, sizes) == shape
                               for other, shape in transposed.items()):
        return "; its transpose fits: give .T of it"
    for axis, length in zip(axes, array.shape, strict=True):
        atoms = axis.split()
        heads = next((known[atom] for atom in ("heads", "kv_heads") if atom in atoms
                      and atom in known), 0)
        parts = math.prod(FUSED[atom] for atom in atoms if atom in FUSED)
        if heads and length % (heads * parts):
            return f"; {heads} heads do not divide {length // parts}"
    return ""


def _options(asked: Asked, context: Context,
             under: set[str]) -> tuple[dict[str, Any], list[str]]:
    """The options that the layout, the config and the caller give, the last before the others."""
    layout, given, problems = asked.layout, asked.options, []
    options = dict(layout.constants)
    problems += _unsupported(layout, context.config, given, under)
    for name, read in layout.settings.items():
        if name in given:
            continue
        if asked.config is None and name in layout.needs:
            problems.append(f"{name}: needed and given nowhere, wanted config= or {name}=")
        elif {"heads", "head_dim"} <= context.sizes.keys():
            try:
                options[name] = read(context)
            except (TypeError, ValueError, OverflowError, MemoryError) as error:
                problems.append(f"{name}: {error}; or give {name}=")
    return {**options, **given}, problems


def _unsupported(layout: Layout, config: Mapping[str, Any], given: Mapping[str, Any],
                 under: set[str]) -> list[str]:
    """What a config asks for that mha has not, and models of another layout."""
    problems = []
    for key, cure in layout.unsupported.items():
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value:
            problems.append(f"config: {key} is {value!r}, which is not supported, wanted {cure}")
    problems += unread_keys(layout, config, given) if layout.name != NAME else []
    model = config.get("model_type")
    owner = OF_MODELS.get(model) if isinstance(model, str) else None
    if owner is not None and layout.name not in (owner.name, NAME):
        cure = f"try layout={owner.name!r}" if fits(owner, under) else "wanted its own config"
        problems.append(f"config: model_type is {model!r}: {cure}")
    why = refusal(model) if layout.name != NAME else None
    return problems + [f"config: model_type is {model!r}, which has {why}"] * (why is not None)


def _assembled(asked: Asked, form: Form, arrays: Mapping[str, Array], context: Context,
               options: dict[str, Any]) -> Any:
    """The layer whose arrays fit."""
    sizes = dict(context.sizes)
    parameters: dict[str, Any] = {}
    for name, array in arrays.items():
        parameters |= _parameters(form[name], array, context)
    if asked.layout.latent:
        parameters = _latent.apart(parameters, sizes)
    letters = "".join(name[-1] for name in BIASES if name in parameters)
    norms = [len(parameters[name]) for name in NORMS if name in parameters]
    per_head = "head_dim" in {axis for stored in form.values() for axis in stored.axes
                              if stored.holds[0] in NORMS}
    relative_bias = parameters.get("relative_bias")
    dtype = _common_dtype(parameters) if asked.dtype is None else asked.dtype
    settings = _latent.settings(parameters, sizes) if asked.layout.latent else {
        "embed_dim": sizes["query_dim"], "num_heads": sizes["heads"],
        "num_kv_heads": sizes["kv_heads"], "head_dim": sizes["head_dim"],
        "value_head_dim": sizes["value_head_dim"], "query_dim": None, "key_dim": sizes["key_dim"],
        "value_dim": sizes["value_dim"], "output_dim": sizes["output_dim"], "use_bias": letters,
        "sinks": "sinks" in parameters,
        "relative_bias": None if relative_bias is None else relative_bias.shape[1] // 2,
        "qk_norm": ("head" if per_head else "width") if norms else None,
        "output_gate": _kind_of_gate(parameters)}
    settings |= {"dtype": dtype, **options}
    may_keep = BITS if asked.dtype is None and dtype == np.float32 else ()
    return asked.make(settings, {
        name: array.unpack() if isinstance(array, QuantisedArray) and array.dtype not in may_keep
        else array for name, array in parameters.items()})


def _kind_of_gate(parameters: Mapping[str, Any]) -> str | None:
    if "W_g" not in parameters:
        return None
    return "element" if parameters["W_g"].shape[1] == parameters["W_o"].shape[0] else "head"


def _parameters(stored: Stored, array: Any, context: Context) -> dict[str, Any]:
    if isinstance(array, QuantisedArray):
        matrices = None if stored.read else matrices_of_blocks(stored, array, context.sizes)
        if matrices is not None:
            return matrices
        array = array.unpack()
    if stored.read is not None:
        try:
            return {stored.holds[0]: stored.read(array, context)}
        except (TypeError, MemoryError) as error:  # what the config says is as wrong as a value
            raise ValueError(str(error)) from error
    return taken_out(stored, array, context.sizes)


def _common_dtype(parameters: Mapping[str, Any]) -> Any:
    """That of the arrays; of several, one that holds the numbers of all."""
    types = {layer_dtype(_native(array)) for array in parameters.values()}
    if len(types) == 1:
        return types.pop()
    return np.float64 if any(not is_half(dtype) and dtype == np.float64 for dtype in types
                             ) else np.float32
