"""What a layer is at one moment: its settings and parameters as one value that never changes.

What changes a layer puts another value in its place by one assignment, and a call reads it once;
so calls in other threads see the layer as it was or as it is, never a mix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.arguments import (
    as_array,
    as_bool,
    check_kind,
    no_memory,
)
from mha._base.atomic import Step
from mha._base.dtypes import (
    RAW_BFLOAT16,
    computing_dtype,
    hint_of_numpys,
    is_bfloat16,
    returned,
    rounded,
    shown_dtype,
    stored_dtype,
)
from mha._base.pieces import copied, copy_into, pieces
from mha._functions.dropout import check_rng
from mha._functions.multi_head_attention import (
    BIASES,
    NORMS,
    WEIGHTS,
    known_key_positions,
    prepared_core,
)
from mha._functions.options import AttentionOptions, RandomSource
from mha._functions.packed_weight import PackedWeight, numbers_of, packed_weight
from mha._functions.quantised import BITS, ROWS, Blocks, quantised
from mha._functions.quantised_array import QuantisedArray
from mha._layer import options as layer_options
from mha._layer.settings import LayerSettings, checked_settings


class CallArguments(NamedTuple):
    """What the core takes of a layer, in its order; matrices as they are, or packed."""

    W_q: Any
    W_k: Any
    W_v: Any
    W_o: Any
    W_g: Any  # None without an output gate
    b_q: NDArray[Any] | None
    b_k: NDArray[Any] | None
    b_v: NDArray[Any] | None
    b_o: NDArray[Any] | None
    b_g: NDArray[Any] | None
    num_heads: int
    num_kv_heads: int


class LayerState(NamedTuple):
    """A layer's settings and parameters, and what follows from them."""

    settings: LayerSettings
    parameters: Mapping[str, Any]  # arrays; a matrix that is quantised is a PackedWeight
    packed: tuple[object, ...] | None  # of a frozen layer: W_q to W_g as the core's fast path reads
    call: CallArguments
    options: AttentionOptions  # of a call that gives none
    core: Callable[..., Any]  # _core.multi_head_attention with what the layer prepares heads by


# The core of latent attention has the matrices itself.
NO_ARGUMENTS: Any = ()


def new_state(settings: LayerSettings, parameters: Mapping[str, Any],
              packed: tuple[object, ...] | None = None) -> LayerState:
    """The only way to make one: `call` is what the others say."""
    if settings.is_latent:
        from mha._layer.latent_call import LatentCore

        return LayerState(settings, parameters, packed, NO_ARGUMENTS,
                          layer_options.options_of_layer(settings, parameters),
                          LatentCore(settings, parameters, packed))
    matrices = packed or tuple(map(parameters.get, settings.matrices))
    return LayerState(settings, parameters, packed,
                      call_arguments(settings, matrices, parameters),
                      layer_options.options_of_layer(settings, parameters),
                      core_of(settings, parameters))


def state_of(settings: Mapping[str, Any], parameters: Mapping[str, Any],
             check: Callable[..., Any] = checked_settings) -> LayerState:
    """Of settings, for `check` to make, and parameters that are not checked yet. Where matrices
    (in, out) are q8_0 or q4_0, QuantisedArrays, their blocks are kept, and the layer is frozen."""
    known = check(**settings)
    checked = {name: _kept(known, name, parameters[name]) for name in known.shapes()}
    is_quantised = any(isinstance(parameter, PackedWeight) for parameter in checked.values())
    return with_packed(known, checked) if is_quantised else new_state(known, checked)


def _kept(settings: LayerSettings, name: str, parameter: Any) -> NDArray[Any] | PackedWeight:
    if isinstance(parameter, QuantisedArray) and parameter.shape == settings.shapes()[name]:
        return packed_weight(parameter.blocks(name))
    return checked_parameter(settings, name, np.asarray(parameter))


def core_of(settings: LayerSettings, parameters: Mapping[str, Any]) -> Callable[..., Any]:
    """`prepared_core` of these."""
    if settings.dtype == RAW_BFLOAT16:
        known = settings._replace(dtype=computing_dtype(settings.dtype))
        return functools.partial(_call_of_raw, core_of(known, parameters))
    q_norm, k_norm = map(parameters.get, NORMS)
    return prepared_core(settings.rotary, q_norm, k_norm, settings.norm_eps, settings.norm_offset)


def _call_of_raw(core: Callable[..., Any], *arguments: Any, dtype: np.dtype[Any],
                 save: bool = False, **options: Any) -> Any:
    """A call of a layer whose parameters were made without ml_dtypes. As long as nobody imports it,
    the output is float32, with the numbers of bfloat16."""
    results = core(*arguments, dtype=known_dtype(dtype, save), save=save, **options)
    first, *others = results if isinstance(results, tuple) else (results,)
    output = returned(first, dtype) if first.dtype == np.float32 else first
    return (output, *others) if others else output


def known_dtype(dtype: np.dtype[Any], has_gradients: bool) -> np.dtype[Any]:
    """The layer's type; float32 in place of bfloat16 where nobody has imported ml_dtypes."""
    known: Any = shown_dtype(dtype)
    if not isinstance(known, str):
        return known
    if has_gradients:
        raise ImportError("vjp: got a bfloat16 layer, wanted ml_dtypes for its gradients: pip"
                          " install ml_dtypes, and import it")
    return computing_dtype(dtype)


def core_at(state: LayerState, positions: ArrayLike | None, key_positions: ArrayLike | None,
            key_is_query: bool) -> Callable[..., Any]:
    """`state.core` at the positions of a call."""
    if not state.settings.is_latent:  # LatentCore checks its positions itself
        key_positions = known_key_positions(state.settings.rotary, positions, key_positions,
                                            key_is_query)
    return functools.partial(state.core, positions=positions, key_positions=key_positions)


def call_arguments(settings: LayerSettings, matrices: tuple[object, ...],
                   parameters: Mapping[str, Any]) -> CallArguments:
    return CallArguments._make([*matrices, *map(parameters.get, BIASES), settings.num_heads,
                                settings.num_kv_heads])


def plain_call(state: LayerState) -> CallArguments:
    """`state.call` with the matrices as arrays, which the gradients read too."""
    matrices = tuple(numbers_of(state.parameters[name]) if name in state.parameters else None
                     for name in WEIGHTS)
    return call_arguments(state.settings, matrices, state.parameters)


def xavier_uniform(settings: LayerSettings, rng: RandomSource) -> dict[str, NDArray[Any]]:
    """Weights uniform in +-sqrt(6 / (in + out)), norms 1 with their offset, all else zero."""
    check_rng(rng)
    generator = np.random.default_rng(rng)
    dtype: Any = computing_dtype(settings.dtype)
    start = {}
    for name, shape in settings.shapes().items():
        try:
            start[name] = np.empty(shape, dtype)
        except (ValueError, OverflowError, MemoryError):
            raise no_memory(name, shape) from None
        if name.endswith("_norm"):
            start[name].fill(1 - settings.norm_offset)
        elif name not in settings.matrices:
            start[name].fill(0)
        else:
            for piece in pieces(start[name]):  # in the order of its rows, as in one call
                part = start[name][piece]
                generator.random(out=part, dtype=dtype)
                part -= dtype.type(0.5)
                part *= dtype.type(2 * math.sqrt(6 / sum(shape)))
        start[name] = rounded(start[name], settings.dtype)
    return start


def frozen(state: LayerState) -> LayerState:
    """With read-only copies of the parameters, the matrices packed."""
    if state.packed is not None:
        return state
    return with_packed(state.settings, {
        name: own_copy(parameter) for name, parameter in state.parameters.items()})


def own_copy(parameter: Any) -> Any:
    """A copy of an array; a packed weight, which never changes, is its own."""
    return parameter if isinstance(parameter, PackedWeight) else copied(parameter, order="C")


def with_packed(settings: LayerSettings, parameters: dict[str, Any]) -> LayerState:
    """The state of a frozen layer, whose these arrays are from now on."""
    packed = []
    for name in settings.matrices:
        parameter = parameters.get(name)
        packed.append(None if parameter is None
                      else parameter._core_weight if isinstance(parameter, PackedWeight)
                      else _core.pack_weight(parameter))
    for parameter in parameters.values():
        if not isinstance(parameter, PackedWeight):
            parameter.flags.writeable = False
    return new_state(settings, parameters, tuple(packed))


def unfrozen(state: LayerState) -> LayerState:
    if state.packed is None:
        return state
    return new_state(state.settings, {
        name: parameter.unpack() if isinstance(parameter, PackedWeight)
        else copied(parameter, order="C") for name, parameter in state.parameters.items()})


def quantised_names(state: LayerState) -> list[str]:
    return [name for name, parameter in state.parameters.items()
            if isinstance(parameter, PackedWeight)]


def kinds_of_blocks(state: LayerState) -> list[str]:
    """As repr shows them."""
    return sorted({str(state.parameters[name].dtype) for name in quantised_names(state)})


def in_blocks(state: LayerState, kind: str, names: Collection[str]) -> LayerState:
    """Frozen, in float32, with these matrices quantised."""
    if not isinstance(kind, str) or kind not in BITS:
        error = ValueError if isinstance(kind, str) else TypeError
        raise error(f"kind: got {kind!r}, wanted one of {', '.join(map(repr, BITS))}")
    if state.settings.dtype == np.float64:
        raise TypeError("quantize: got a float64 layer, wanted one of float32 or halves:"
                        " astype(numpy.float32) gives one")
    float32 = np.dtype(np.float32)
    parameters: dict[str, Any] = {}
    for name, parameter in state.parameters.items():
        is_kept = isinstance(parameter, PackedWeight) and (
            name not in names or parameter.dtype == kind)
        parameters[name] = (
            parameter if is_kept
            else packed_weight(quantised(numbers_of(parameter), kind, name)) if name in names
            else in_type(numbers_of(parameter), float32))
    return with_packed(state.settings._replace(dtype=float32), parameters)


def in_dtype(state: LayerState, dtype: np.dtype[Any]) -> LayerState:
    """Unfrozen copies of the parameters in the dtype."""
    return new_state(state.settings._replace(dtype=dtype),
                     {name: in_type(numbers_of(parameter), dtype)
                      for name, parameter in state.parameters.items()})


def in_type(parameter: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A copy in the dtype, rounded once."""
    numbers = rounded(parameter, dtype)
    return copied(numbers, dtype) if dtype.itemsize > 2 else copied(numbers, order="C")


def with_dropout(state: LayerState, dropout: float) -> LayerState:
    return new_state(state.settings._replace(dropout=dropout), state.parameters, state.packed)


def check_has(settings: LayerSettings, name: str) -> None:
    """That the layer was made with this parameter."""
    if name not in settings.shapes():
        wanted = settings.wanted_for(name)
        what = "bias" if wanted.startswith("use_bias") else "parameter"
        raise ValueError(f"{name}: got a {what} for a layer without, wanted {wanted}")


def check_not_frozen(state: LayerState, name: str) -> None:
    if state.packed is not None:
        raise ValueError(f"{name}: got a change to a frozen layer, wanted unfreeze() before it")


def arrays_to_load(state: LayerState, mapping: Any) -> dict[str, NDArray[Any]]:
    """The arrays of a mapping with exactly the names of the layer's parameters."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"mapping: got {type(mapping).__name__}, wanted names with arrays")
    names = state.parameters.keys()
    missing = sorted(names - mapping.keys())
    unknown_names = sorted(mapping.keys() - names, key=str)
    if missing or unknown_names:
        got = " and ".join([f"unknown names {unknown_names}"] * bool(unknown_names)
                           + [f"none for {missing}"] * bool(missing))
        raise ValueError(f"mapping: got {got}, wanted exactly {sorted(names)}"
                         f"{_from_state_instead(mapping)}")
    return {name: as_array(mapping[name], name) for name in names}


def _from_state_instead(mapping: Mapping[str, Any]) -> str:
    """What to call where the names are those of another library."""
    from mha.parameters._names import layer_of, looks_like

    layouts = looks_like({*map(str, mapping)})
    return "".join(f"; these are names of {layout!r}: {layer_of(layout)}.from_state(mapping,"
                   f" {layout!r}, num_heads=...) makes a layer of them" for layout in layouts[:1])


def checked_parameter(settings: LayerSettings, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """The array as the layer's parameter of this name, in its type."""
    wanted = settings.shapes()[name]
    if not is_bfloat16(array.dtype):
        wanted_type = f"{shown_dtype(settings.dtype)}{hint_of_numpys(array.dtype)}"
        check_kind(array, name, "iuf", wanted_type)
    if array.shape != wanted:
        hint = "; stored as (out, in)? then give its transpose, .T" * (
            len(wanted) == 2 and array.shape == wanted[::-1])
        raise ValueError(f"{name}: got shape {array.shape}, wanted {wanted}{hint}")
    return array if array.dtype == settings.dtype else in_type(array, settings.dtype)


def with_parameter(state: LayerState, name: str, array: NDArray[Any]) -> LayerState:
    check_not_frozen(state, name)
    checked = checked_parameter(state.settings, name, array)
    return new_state(state.settings, {**state.parameters, name: checked})


def loaded(state: LayerState, arrays: Mapping[str, NDArray[Any]]) -> tuple[LayerState, list[Step]]:
    """With these numbers; and what writes them into the arrays that are there, where each has its
    own."""
    check_not_frozen(state, "mapping")
    old = state.parameters
    copies = {name: copied(checked_parameter(state.settings, name, array), order="C")
              for name, array in arrays.items()}
    alone = {name: _is_alone(old[name], [old[other] for other in old if other != name])
             for name in old}
    return (new_state(state.settings,
                      {name: old[name] if alone[name] else copies[name] for name in old}),
            [(np.ndarray.__setitem__, old[name], ..., array) for name, array in copies.items()
             if alone[name]])


def prunable(state: LayerState, heads: list[int]) -> bool:
    """Whether the layer is quantised; a ValueError where it cannot lose heads as it is."""
    names = quantised_names(state)
    if not names:
        check_not_frozen(state, "heads")
    if "W_o" in names and state.settings.value_head_dim % ROWS:
        raise ValueError(f"heads: got {heads} of a quantised layer with value_head_dim"
                         f" {state.settings.value_head_dim}, wanted a multiple of {ROWS}:"
                         " unfreeze() before it")
    return bool(names)


def pruned(state: LayerState, heads: list[int]) -> LayerState:
    """Without these heads, in new arrays."""
    in_blocks_now, settings = prunable(state, heads), state.settings
    if settings.qk_norm == "width":
        raise ValueError(f"heads: got {heads} of a layer whose norm goes over all heads together,"
                         ' wanted qk_norm="head" or None')
    kept = np.array(heads_that_stay(heads, settings.num_heads))
    key_heads, heads_left = np.unique(kept // (settings.num_heads // settings.num_kv_heads),
                                      return_counts=True)
    if heads_left.min() != heads_left.max():
        raise ValueError(f"heads: got {heads}, which leaves {heads_left.tolist()} heads"
                         " to the key heads, wanted equally many for each that stays")
    chosen = {"q": (kept, settings.head_dim), "k": (key_heads, settings.head_dim),
              "v": (key_heads, settings.value_head_dim), "o": (kept, settings.value_head_dim),
              "g": (kept, 1 if settings.output_gate == "head" else settings.value_head_dim)}
    parameters: dict[str, Any] = {}
    for name, parameter in state.parameters.items():
        if name in NORMS or name == "b_o":
            parameters[name] = copied(numbers_of(parameter), order="C")
        elif name in layer_options.LEARNED:  # a row a head
            parameters[name] = numbers_of(parameter)[kept]
        else:
            those, width = chosen[name[-1]]
            parameters[name] = of_heads(parameter, those.tolist(), width,
                                        0 if name == "W_o" else len(parameter.shape) - 1)
    alibi = settings.alibi and tuple(settings.alibi[head] for head in kept)
    settings = settings._replace(num_heads=len(kept), num_kv_heads=len(key_heads), alibi=alibi)
    return with_packed(settings, parameters) if in_blocks_now else new_state(settings, parameters)


def of_heads(parameter: NDArray[Any] | PackedWeight, heads: list[int], width: int,
             axis: int) -> Any:
    """What belongs to these heads, so many columns, or rows where axis is 0, each."""
    if isinstance(parameter, PackedWeight):
        kind, numbers, scales = parameter._blocks()
        return packed_weight(Blocks(kind, _parts(numbers, heads, width, axis), _parts(
            scales, heads, width if axis else width // ROWS, axis)))
    return _parts(parameter, heads, width, axis)


def _parts(array: NDArray[Any], parts: list[int], width: int, axis: int) -> NDArray[Any]:
    """These parts of the array along the axis, so wide each, side by side."""
    shape = list(array.shape)
    shape[axis] = len(parts) * width
    whole = np.empty(shape, array.dtype)
    before = (slice(None),) * axis
    for to, of in enumerate(parts):
        copy_into(whole[*before, to * width:(to + 1) * width],
                  array[*before, of * width:(of + 1) * width])
    return whole


def heads_that_stay(heads: list[int], num_heads: int) -> list[int]:
    for head in heads:
        if not -num_heads <= head < num_heads:
            raise ValueError(f"heads: got {head}, wanted indices into {num_heads} heads")
    stay = sorted(set(range(num_heads)) - {head % num_heads for head in heads})
    if not stay:
        raise ValueError(f"heads: got all {num_heads}, wanted one to stay")
    return stay


def _is_alone(array: NDArray[Any], others: Collection[NDArray[Any]]) -> bool:
    """Whether each element may surely be written without changing another one."""
    reach = array.itemsize
    axes = sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape,
                                                              strict=True) if size > 1)
    for stride, size in axes:  # each must step over all that the ones before reach
        if stride < reach:
            return False
        reach += stride * (size - 1)
    return array.flags.writeable and not any(
        np.may_share_memory(array, other) for other in others)


def to_pickle(state: LayerState) -> dict[str, Any]:
    later = state.settings._field_defaults  # left out where it is the default, as before there were
    dtype = stored_dtype(state.settings.dtype)  # bfloat16 so that it needs no ml_dtypes
    fields = state.settings._replace(dtype=dtype)._asdict()
    settings = {name: value for name, value in fields.items()
                if name not in later or value != later[name]}
    return {**settings, "_packed": state.packed is not None,
            "_parameters": {name: parameter if isinstance(parameter, PackedWeight)
                            else rounded(parameter, dtype)
                            for name, parameter in state.parameters.items()}}


def from_pickle(pickled: Any, kind: type[Any], checked: Callable[..., Any],
                ) -> tuple[LayerState, dict[str, Any]]:
    """What `to_pickle` gave, and what else was there: a subclass's own attributes. kind is the
    class of the layer's settings, and checked makes them of its fields.

    All else is a ValueError: a layer that does not fit together would compute wrong numbers.
    """
    if not isinstance(pickled, dict) or not all(isinstance(name, str) for name in pickled):
        raise _unfit(f"got {type(pickled).__name__}")
    others = kind._field_defaults | pickled
    names = (*kind._fields, "_packed", "_parameters")
    later = kind._field_defaults
    missing = [name for name in names if name not in later and others.get(name) is None]
    if missing:
        raise _unfit(f"got none for {missing}")
    given = {name: others.pop(name, later.get(name)) for name in names}
    is_frozen, arrays = given.pop("_packed"), given.pop("_parameters")
    if "_state" in others:
        raise _unfit("got an attribute _state")
    try:
        given["dtype"] = np.dtype(given["dtype"]).newbyteorder("=")
        settings = checked(**given)
        state = new_state(settings, _checked_arrays(settings, arrays))
        is_frozen = as_bool(is_frozen, "_packed") or bool(quantised_names(state))
        return frozen(state) if is_frozen else state, others
    except MemoryError:
        raise
    except Exception as error:  # whatever strange objects raise when they are asked for a size
        raise _unfit(f"got one that does not fit together ({error})") from error


def _checked_arrays(settings: LayerSettings, arrays: Any) -> dict[str, Any]:
    shapes = settings.shapes()
    if not isinstance(arrays, dict) or arrays.keys() != shapes.keys():
        raise ValueError(f"wanted parameters {list(shapes)}")
    return {name: _checked_of_pickle(settings, name, arrays[name]) for name in shapes}


def _checked_of_pickle(settings: LayerSettings, name: str, parameter: Any) -> Any:
    wanted = stored_dtype(settings.dtype)
    if isinstance(parameter, PackedWeight):
        if (name not in settings.matrices or wanted != np.float32 or parameter.dtype not in [*BITS]
                or parameter.shape != settings.shapes()[name]):
            raise ValueError(f"{name}: got {parameter}")
        return parameter
    if not isinstance(parameter, np.ndarray) or stored_dtype(
            parameter.dtype.newbyteorder("=")) != wanted:
        raise ValueError(f"{name}: wanted an array of {shown_dtype(wanted)}")
    return checked_parameter(settings, name, np.asarray(parameter))


def _unfit(what: str) -> ValueError:
    return ValueError(f"state: {what}, wanted what pickling a layer gives")
