"""How a function or layer that someone else wrote is constructed and called, and its weights.

Everything goes by the names of parameters and attributes, as `NAMES` spells them.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np

from mha.mistakes import HEADS

HEAD_DIM = 8  # the head size of what is constructed here


class CannotTestError(Exception):
    """The tested code does not get as far as a comparison; the message says why."""


NAMES = {
    "W_q": ("wq", "wquery"), "W_k": ("wk", "wkey"), "W_v": ("wv", "wvalue"),
    "W_o": ("wo", "wout", "woutput"), "b_q": ("bq", "bquery"), "b_k": ("bk", "bkey"),
    "b_v": ("bv", "bvalue"), "b_o": ("bo", "bout", "boutput"),
    "num_heads": ("numheads", "nheads", "heads", "h", "nhead", "numheadsq"),
    "d_model": ("dmodel", "embeddim", "numhiddens", "hiddensize", "hiddendim", "dim", "modeldim",
                "embedsize", "nembd", "d", "width", "keysize", "querysize", "valuesize"),
    "dropout": ("dropout", "p", "dropoutrate", "dropoutp"), "seed": ("seed", "rng"),
    "valid_lens": ("validlens", "validlen", "keylengths"), "training": ("training",),
}


def _known(name):
    plain = name.lower().replace("_", "")
    return next((known for known, spellings in NAMES.items() if plain in spellings), None)


def parameters_named(function):
    """{our name: its name} of the function's parameters that are known."""
    try:
        return {_known(name): name for name in inspect.signature(function).parameters
                if _known(name)}
    except (TypeError, ValueError):
        return {}


def signature(function):
    """The name of the mask parameter or None, the other arguments to give, how many inputs."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None, {}, 3
    mask = next((p.name for p in parameters if "mask" in p.name.lower()), None)
    others = {p.name: False if _known(p.name) == "training" else None for p in parameters
              if _known(p.name) in ("training", "valid_lens")}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
                  and p.name != mask and _known(p.name) is None]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return mask, others, 3 if len(positional) >= 3 or variadic else 1


def construct(layer_class):
    """An instance with d_model 24 and 3 heads."""
    values = {"d_model": HEADS * HEAD_DIM, "num_heads": HEADS, "dropout": 0.0, "seed": 0}
    given, unknown = {}, []
    for parameter in inspect.signature(layer_class).parameters.values():
        if _known(parameter.name) in values:
            given[parameter.name] = values[_known(parameter.name)]
        elif parameter.default is parameter.empty and "VAR" not in parameter.kind.name:
            unknown.append(parameter.name)
    if unknown:
        raise CannotTestError(f"cannot construct {layer_class.__name__}: what is"
                               f" {', '.join(unknown)}? Construct it, and diagnose the instance")
    try:
        return layer_class(**given)
    except Exception as error:
        raise CannotTestError(f"constructing {layer_class.__name__} raised"
                               f" {type(error).__name__}: {error}") from None


def opened(layer):
    """How a layer is called, its weights as matrices by name, and its number of heads."""
    if inspect.isroutine(layer) or isinstance(layer, functools.partial):
        generator, width = np.random.default_rng(0), HEADS * HEAD_DIM
        own = parameters_named(layer)
        weights = {name: generator.normal(size=(width,) * (1 if name[0] == "b" else 2)) / 5
                   for name in own if name[:2] in ("W_", "b_")}
        given = {own[name]: array for name, array in weights.items()}
        if "num_heads" in own:
            given[own["num_heads"]] = HEADS
        return functools.partial(layer, **given), weights, HEADS
    if hasattr(layer, "eval"):
        layer.eval()
    called = next((getattr(layer, name) for name in ("__call__", "forward", "call")
                   if hasattr(layer, name)), None)
    found = {_known(name): getattr(layer, name) for name in dir(layer) if _known(name)}
    missing = [name for name in ("W_q", "W_k", "W_v", "W_o", "num_heads") if name not in found]
    if called is None or missing:
        raise CannotTestError(
            f"cannot test {type(layer).__name__}: found no attribute {', '.join(missing)}"
            if missing else f"cannot test {type(layer).__name__}: it has no __call__ or forward")
    weights = dict(_matrices(found))
    unset = [name for name in ("W_q", "W_k", "W_v", "W_o") if name not in weights]
    if unset:
        raise CannotTestError(f"cannot test {type(layer).__name__}: {', '.join(unset)} hold no"
                              " numbers yet; call the layer once, and diagnose the instance")
    return called, weights, int(found["num_heads"])


def _matrices(found) -> Iterator[tuple[str, Any]]:
    """Fill the layer's weights with numbers large enough to tell mistakes apart, and name them."""
    generator = np.random.default_rng(1)
    for name in ("W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o"):
        held = found.get(name)
        for inner in ("weight", "W", "weights"):  # a linear layer of its own
            if hasattr(held, inner) and name[0] == "W":
                bias = getattr(held, "bias", getattr(held, "b", None))
                if isinstance(bias, np.ndarray):
                    bias[...] = generator.normal(size=bias.shape)
                    yield "b" + name[1:], bias.astype(float).reshape(-1)
                held = getattr(held, inner)
                break
        for part in held if isinstance(held, (list, tuple)) else [held]:
            if isinstance(part, np.ndarray) and part.flags.writeable:
                scale = 1 if name[0] == "b" else part.shape[-2] ** -0.5
                part[...] = generator.normal(size=part.shape) * scale
        if held is None or (matrix := np.asarray(held, float)).ndim not in (1, 2, 3):
            continue
        if matrix.ndim == 3:  # one matrix a head
            matrix = (matrix.reshape(-1, matrix.shape[-1]) if name == "W_o"
                      else np.concatenate(list(matrix), axis=-1))
        yield name, matrix.reshape(-1) if name[0] == "b" else matrix
