"""What of attention's options belongs to a layer: its own scale, softcap, window and alibi, and the
parameters sinks and relative_bias. A call's value takes the place of the layer's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Never

import numpy as np
from numpy.typing import NDArray

from mha._base.arguments import as_bool
from mha._base.dtypes import computing_dtype
from mha._base.keywords import meant_by_place
from mha._functions.options import (
    DEFAULTS,
    LAYER,
    AttentionOptions,
    LayerKeywords,
    RandomSource,
    some_options,
)

OWN = ("scale", "softcap", "window", "alibi")
LEARNED = ("sinks", "relative_bias")
OF_PADDING = ("attention_mask", "key_lengths", "key_padding_mask", "padding_mask",
              "src_key_padding_mask", "valid_lens")  # ours, and others'


def options_of_layer(settings: Any, parameters: Mapping[str, NDArray[Any]]) -> AttentionOptions:
    """The record of a call that gives none: the defaults' own where the layer has none either."""
    own: dict[str, Any] = {name: getattr(settings, name, None) for name in OWN}  # as far as it has
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


def wanted_of_call(wanted: set[str], wrt: object, given: LayerKeywords,
                   quantised: Collection[str]) -> set[str]:
    """Without the gradients of the layer's own alibi, which is not learned, unless wrt names it,
    and of matrices that are quantised, which wrt must not name."""
    named = sorted(wanted.intersection(quantised)) if wrt is not None else []
    if named:
        raise ValueError(f"wrt: got {named}, which are quantised, wanted others: unfreeze() makes"
                         " float arrays of them")
    plain = wanted if wrt is not None or given.get("alibi") is not None else wanted - {"alibi"}
    return plain.difference(quantised)
