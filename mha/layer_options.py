"""What of attention's options belongs to a layer: its own scale, softcap, window and alibi, and the
parameters sinks and relative_bias. A call's value takes the place of the layer's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha.arguments import as_array, as_bool, as_float, as_int, check_kind
from mha.half_precision import computing_dtype
from mha.keywords import meant_by_place
from mha.options import (
    DEFAULTS,
    LAYER,
    AttentionOptions,
    LayerKeywords,
    RandomSource,
    Window,
    some_options,
)

OWN = ("scale", "softcap", "window", "alibi")
LEARNED = ("sinks", "relative_bias")
PROJECTIONS = "qkvo"
OF_PADDING = ("attention_mask", "key_lengths", "key_padding_mask", "padding_mask",
              "src_key_padding_mask", "valid_lens")  # ours, and others'


def options_of_layer(settings: Any, parameters: Mapping[str, NDArray[Any]]) -> AttentionOptions:
    """The record of a call that gives none: the defaults' own where the layer has none either."""
    own = {name: getattr(settings, name) for name in OWN}
    own |= {name: parameters.get(name) for name in LEARNED}
    if all(value is None for value in own.values()):
        return DEFAULTS
    if own["alibi"] is not None:
        own["alibi"] = np.array(own["alibi"], computing_dtype(settings.dtype))
    return DEFAULTS._replace(**own)


def call_options(call: Callable[..., Any], given: LayerKeywords, more: tuple[Never, ...],
                 own: AttentionOptions, dropout: float, training: Any,
                 rng: RandomSource) -> AttentionOptions:
    """Those of a call, before the layer's own, with its dropout where it trains."""
    if training is False and rng is None and not given and not more:
        return own
    chosen = some_options(call, given, LAYER, more)
    if own is not DEFAULTS:
        replaced: dict[str, Any] = {
            name: value for name, value in given.items() if value is not None}
        chosen = own._replace(**replaced)
    if training is not False and as_bool(training, "training"):
        return chosen._replace(dropout=dropout, rng=rng)
    return chosen if rng is None else chosen._replace(rng=rng)


def explain(call: Callable[..., Any], error: Exception, places: Mapping[str, Any],
            cache: Any) -> None:
    """Raises the error of a layer's call again where it can say what was meant: an option that came
    in the place of key or value, padding beside a cache."""
    name, hint = str(error).split(":")[0], ""
    if cache is not None and name in OF_PADDING:
        hint = ('with a cache lengths= says how many rows of the call are real, padding="left" that'
                " the padding comes before them")
    elif places.get(name) is not None:
        hint = meant_by_place(call, places[name])
    if hint:
        raise type(error)(f"{error}; {hint}") from None


def wanted_of_call(wanted: set[str], wrt: object, given: LayerKeywords) -> set[str]:
    """Without the gradient of the layer's own alibi, which is not learned, unless wrt names it."""
    return wanted if wrt is not None or given.get("alibi") is not None else wanted - {"alibi"}


def as_projections(use_bias: Any) -> bool | str:
    """The projections that have a bias: True for all four, False for none, else letters of qkvo."""
    if not isinstance(use_bias, str):
        return as_bool(use_bias, "use_bias")
    if set(use_bias) - set(PROJECTIONS) or len(set(use_bias)) < len(use_bias):
        raise ValueError(f"use_bias: got {use_bias!r}, wanted True, False, or letters of"
                         f" {PROJECTIONS!r}, each once")
    named = "".join(name for name in PROJECTIONS if name in use_bias)
    return {PROJECTIONS: True, "": False}.get(named, named)


def biased_projections(use_bias: bool | str) -> str:
    return use_bias if isinstance(use_bias, str) else PROJECTIONS * use_bias


def as_scale(scale: Any) -> float | None:
    if scale is None:
        return None
    number = as_float(scale, "scale", "a finite number")
    if not math.isfinite(number):
        raise ValueError(f"scale: got {scale}, wanted a finite number")
    return number


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
    if window is None:
        return None
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window: got {type(window).__name__}, wanted a pair (left, right)")
    if len(window) != 2:
        raise ValueError(f"window: got {len(window)} entries, wanted two (left, right)")
    left, right = (None if side is None else as_int(side, "window") for side in window)
    for side in (left, right):
        if side is not None and side < 0:
            raise ValueError(f"window: got {side}, wanted at least 0")
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


def as_farthest(relative_bias: Any) -> int | None:
    if relative_bias is None:
        return None
    farthest = as_int(relative_bias, "relative_bias")
    if farthest < 0:
        raise ValueError(f"relative_bias: got {farthest}, wanted at least 0: the distance at which"
                         " the table ends")
    return farthest
