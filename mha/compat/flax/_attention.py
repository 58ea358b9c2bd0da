"""What Linen's layer and NNX' share: parameter trees, the cache, and attention with them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._base.arguments import check_kind, detached_array
from mha._base.dtypes import RAW_BFLOAT16, is_half, widened
from mha._base.pieces import copied, pieces
from mha._functions.heads import merge_heads
from mha._functions.scaled_dot_product_attention import scaled_dot_product_attention
from mha.compat._shared.dtypes import as_float_dtype, as_own, own_copy, to_compute
from mha.compat._shared.projections import (
    Projection,
    as_visible,
    over_scores,
    project_and_attend,
)

Array = NDArray[Any]
Initializer = Callable[..., Any]
Parameters = Mapping[str, Mapping[str, Array]]
Shapes = dict[str, dict[str, tuple[int, ...]]]

NORM_EPS = 1e-6  # of Flax' LayerNorm
# The standard deviation of a standard normal number that is drawn again beyond 2.
TRUNCATED_DEVIATION = 0.87962566103423978


class Cache(NamedTuple):
    """Keys and values (batch..., max_length, heads, head_dim), of which the first `length` are
    there."""

    key: Array
    value: Array
    length: int


class Attended(NamedTuple):
    """What a call gives: the weights where they are asked for, the cache where one is given."""

    output: Array
    weights: Array | None
    cache: Cache | None


def parameter_shapes(inputs: tuple[int, int, int], *, num_heads: int, num_kv_heads: int,
                     head_dim: int, out_features: int, use_bias: bool,
                     normalize_qk: bool) -> Shapes:
    """The tree of all parameters, for inputs of these widths, in Flax' order."""
    shapes: Shapes = {}
    for name, width, heads in zip(("query", "key", "value"), inputs,
                                  (num_heads, num_kv_heads, num_kv_heads)):
        shapes[name] = {"kernel": (width, heads, head_dim), "bias": (heads, head_dim)}
    if normalize_qk:
        shapes |= {"query_ln": {"scale": (head_dim,)}, "key_ln": {"scale": (head_dim,)}}
    shapes["out"] = {"kernel": (num_heads, head_dim, out_features), "bias": (out_features,)}
    if not use_bias:
        for part in shapes.values():
            part.pop("bias", None)
    return shapes


def drawn_parameters(shapes: Shapes, generator: np.random.Generator, dtype: DTypeLike,
                     initializers: Mapping[tuple[str, str], Initializer | None]
                     ) -> dict[str, dict[str, Array]]:
    """The start: kernels by LeCun's rule, truncated normal, biases 0, scales 1.

    initializers, by ("out" or "", "kernel" or "bias"), are functions of a generator, a shape (in,
    out) or (out,), and a dtype. JAX' own, which Flax exports too, get a key of JAX instead.
    """
    def drawn(part: str, name: str, shape: tuple[int, ...]) -> Array:
        if name == "scale":
            return np.ones(shape, dtype)
        inputs = 2 if part == "out" else 1
        outputs = math.prod(shape[inputs:] if name == "kernel" else shape)
        flat = (math.prod(shape[:inputs]), outputs) if name == "kernel" else (outputs,)
        initializer = initializers["out" if part == "out" else "", name]
        if initializer is not None:
            array = real_array(initializer(_key_for(initializer, generator), flat, dtype), name)
        elif name == "bias":
            array = np.zeros(flat)
        else:
            array = _truncated_normal(generator, flat,
                                      TRUNCATED_DEVIATION * math.sqrt(flat[0]))
        return own_copy(array.reshape(shape), np.dtype(dtype))

    return {part: {name: drawn(part, name, shape) for name, shape in own.items()}
            for part, own in shapes.items()}


def _key_for(initializer: Initializer, generator: np.random.Generator) -> Any:
    """What an initializer draws from: the words of a key for a function of JAX."""
    function = getattr(initializer, "func", initializer)  # of a functools.partial
    is_of_jax = (getattr(function, "__module__", None) or "").split(".")[0] == "jax"
    return generator.integers(2**32, size=2, dtype=np.uint32) if is_of_jax else generator


def _truncated_normal(generator: np.random.Generator, shape: tuple[int, ...],
                      divisor: float) -> Array:
    """Standard normal numbers, drawn again until all are within 2; divided."""
    numbers = np.empty(shape)
    for piece in pieces(numbers):
        numbers[piece] = generator.standard_normal(numbers[piece].shape)
    is_drawn_again = True
    while is_drawn_again:
        is_drawn_again = False
        for piece in pieces(numbers):
            beyond = np.abs(numbers[piece]) > 2
            if beyond.any():
                numbers[piece][beyond] = generator.standard_normal(int(beyond.sum()))
                is_drawn_again = True
    for piece in pieces(numbers):
        numbers[piece] /= divisor
    return numbers


def checked_parameters(tree: Mapping[str, Any], shapes: Shapes) -> dict[str, dict[str, Array]]:
    """The tree's arrays, after checking that it has these names and shapes and no other."""
    found = {(part, name): array for part, own in tree.items()
             for name, array in (own.items() if isinstance(own, Mapping) else {"": own}.items())}
    wanted = {(part, name): shape for part, own in shapes.items() for name, shape in own.items()}
    if found.keys() != wanted.keys():
        missing, unexpected = (sorted(".".join(path).rstrip(".") for path in paths) for paths in (
            wanted.keys() - found.keys(), found.keys() - wanted.keys()))
        raise ValueError(f"params: missing {missing}, unexpected {unexpected}; wanted exactly"
                         f" {['.'.join(path) for path in wanted]}")
    checked: dict[str, dict[str, Array]] = {part: {} for part in shapes}
    for (part, name), shape in wanted.items():
        array = real_array(found[part, name], f"{part}.{name}")
        if array.shape != shape:
            raise ValueError(f"{part}.{name}: got shape {array.shape}, wanted {shape}")
        checked[part][name] = array
    return checked


def real_array(array: ArrayLike, name: str) -> Array:
    """An array of floats, halves too; ints as float32."""
    array = detached_array(array, name)
    if array.dtype == RAW_BFLOAT16:
        array = widened(array)
    check_kind(widened(array), name, "biuf", "float16, bfloat16, float32 or float64")
    is_float = is_half(array.dtype) or array.dtype in (np.float32, np.float64)
    return array if is_float else copied(array, np.float32)


def checked_inputs(inputs_q: ArrayLike, inputs_k: ArrayLike | None,
                   inputs_v: ArrayLike | None) -> tuple[Array, Array, Array]:
    """Query, key and value (batch..., len, width): key by default query, value by default key."""
    if inputs_k is None and inputs_v is not None:
        raise ValueError("inputs_v: got an array without inputs_k, wanted inputs_k, which inputs_v"
                         " defaults to")
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    query, key, value = (real_array(array, name) for array, name in (
        (inputs_q, "inputs_q"), (inputs_k, "inputs_k"), (inputs_v, "inputs_v")))
    if query.ndim < 2:
        raise ValueError(f"inputs_q: got shape {query.shape}, wanted (batch..., len, width)")
    if key.shape[:-2] != query.shape[:-2] or key.ndim < 2:
        raise ValueError(f"inputs_k: got shape {key.shape}, wanted the batch axes of inputs_q"
                         f" {query.shape}")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"inputs_v: got shape {value.shape}, wanted that of inputs_k {key.shape}"
                         " but for the last axis")
    return query, key, value


def chosen_dtype(dtype: DTypeLike | None, *arrays: Array) -> np.dtype[Any]:
    """The type of the result: the one given, or the widest of the arrays'."""
    if dtype is not None:
        return as_float_dtype(dtype)
    types = {array.dtype for array in arrays}
    halves = {of for of in types if is_half(of)}
    if len(halves) > 1:  # neither float16 nor bfloat16 holds the other's numbers
        types = types - halves | {np.dtype(np.float32)}
    return np.result_type(*types)


def merged(name: str, layers: Any, calls: Any) -> Any:
    """An option that may be given to the layer or to the call."""
    if layers is None and calls is None:
        raise ValueError(f"{name}: got None, wanted True or False, from the layer or the call")
    return layers if calls is None else calls


def generator_of(key: Any, name: str) -> np.random.Generator:
    """The generator of a key: an int, an array of ints, a key of JAX, the next one of a stream
    (flax.nnx.Rngs), or a generator itself."""
    try:
        if callable(key):
            key = key()
        if str(getattr(key, "dtype", "")).startswith("key<"):  # whose words JAX alone tells
            key = sys.modules["jax"].random.key_data(key)
        if not isinstance(key, (int, np.random.Generator)):
            key = np.asarray(key)
        return np.random.default_rng(key)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: got {type(key).__name__}, wanted an int, an array of ints or a"
                        f" numpy.random.Generator ({error})") from None


def empty_cache(shape: tuple[int, ...], dtype: DTypeLike) -> Cache:
    """Of zeros (batch..., max_length, heads, head_dim)."""
    return Cache(np.zeros(shape, dtype), np.zeros(shape, dtype), 0)


def attend(parameters: Parameters, inputs: tuple[Array, Array, Array], *,
           dtype: DTypeLike | None, mask: ArrayLike | None = None, causal: bool = False,
           dropout: float = 0.0, shared_dropout: bool = True,
           generator: np.random.Generator | None = None, cache: Cache | None = None,
           return_weights: bool = False, rounds_weights: bool = True) -> Attended:
    """Attend: query (batch..., query_len, width) -> output (batch..., query_len, out_features).

    Halves are computed in float32; the output is rounded once, and the weights if rounds_weights.
    With a cache, query, key and value are one position, which is written behind those that are
    there; the query sees all of them.
    """
    chosen = chosen_dtype(dtype, *inputs, *(array for part in parameters.values()
                                            for array in part.values()))
    parts = {name: {key: to_compute(as_own(array, chosen)) for key, array in part.items()}
             for name, part in parameters.items()}
    projections = [Projection(parts[name]["kernel"], parts[name].get("bias"), input_axes)
                   for name, input_axes in (("query", 1), ("key", 1), ("value", 1), ("out", 2))]
    batch, query_len = inputs[0].shape[:-2], inputs[0].shape[-2]
    query, key, value = (to_compute(as_own(array, chosen)).reshape(
        math.prod(batch), *array.shape[-2:]) for array in inputs)
    heads, kv_heads = (parts[name]["kernel"].shape[1] for name in ("query", "key"))
    key_len = key.shape[1] if cache is None else cache.key.shape[-3]
    scores = batch, (heads,), (query_len,), (key_len,)
    options: dict[str, Any] = {
        "mask": None if mask is None else over_scores(as_visible(mask, "mask"), "mask", scores),
        "causal": causal, "query_offset": 0, "empty_rows": "uniform", "dropout": dropout,
        "rng": int(generator.integers(2**64, dtype=np.uint64)) if generator and dropout else None,
        "return_weights": return_weights}
    shared = bool(dropout) and shared_dropout
    if cache is None and "query_ln" not in parts and not shared:
        found = project_and_attend(projections, query, key, value, num_heads=heads,
                                   num_kv_heads=kv_heads, **options)
    else:
        apart = [projection(array).reshape(*array.shape[:2], *projection.kernel.shape[1:])
                 for projection, array in zip(projections, (query, key, value))]
        for index, name in ((0, "query_ln"), (1, "key_ln")):
            if name in parts:
                apart[index] = _layer_norm(apart[index], parts[name]["scale"])
        if cache is not None:
            cache = _appended(cache, batch, *apart)
            apart[1:] = (to_compute(as_own(array, chosen)).reshape(
                math.prod(batch), *array.shape[-3:]) for array in cache[:2])
            options["key_lengths"] = [cache.length] * math.prod(batch)
        found = _attend_apart(projections[3], apart, shared, options)
    output, weights = found if return_weights else (found, None)
    if weights is not None:
        weights = weights.reshape(*batch, *weights.shape[1:])
        weights = as_own(weights, chosen) if rounds_weights else weights
    output = as_own(output, chosen)
    return Attended(output.reshape(*batch, query_len, output.shape[-1]), weights, cache)


def _attend_apart(of_output: Projection, apart: list[Array], shared_dropout: bool,
                  options: dict[str, Any]) -> Any:
    """The figure from the heads on: query, key and value (batch, len, heads, head_dim)."""
    function = with_shared_dropout if shared_dropout else scaled_dot_product_attention
    found = function(*(array.swapaxes(1, 2) for array in apart), **options)
    attended, *weights = found if options["return_weights"] else (found,)
    output = of_output(merge_heads(attended))
    return (output, *weights) if weights else output


def _layer_norm(x: Array, scale: Array) -> Array:
    """x (..., head_dim) with mean 0 and variance 1, times scale (Ba et al. 2016, section 3)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + NORM_EPS) * scale


def _appended(cache: Cache, batch: tuple[int, ...], query: Array, key: Array,
              value: Array) -> Cache:
    """Another cache with one position more; query, key and value (batch, 1, heads, head_dim)."""
    *cached_batch, max_length, kv_heads, head_dim = cache.key.shape
    own = tuple(cached_batch)
    if own != batch or query.shape[1] != 1 or key.shape[1:] != (1, kv_heads, head_dim):
        raise ValueError(f"inputs_q: got {(*batch, query.shape[1])} queries and"
                         f" {(*batch, *key.shape[1:])} as key, wanted one position a call, as the"
                         f" cache is {cache.key.shape}: {(*own, 1)} and"
                         f" {(*own, 1, kv_heads, head_dim)}")
    if not 0 <= cache.length < max_length:
        raise ValueError(f"cache: got {cache.length} positions of {max_length}, wanted room for one"
                         " more")
    written = []
    for cached, new in ((cache.key, key), (cache.value, value)):
        appended = copied(cached)
        appended[..., cache.length, :, :] = new[:, 0].reshape(*batch, kv_heads, head_dim)
        written.append(appended)
    return Cache(written[0], written[1], cache.length + 1)


def with_shared_dropout(query: Array, key: Array, value: Array, *, mask: Array | None,
                        bias: Array | None = None, key_lengths: list[int] | None = None,
                        return_weights: bool, **options: Any) -> Any:
    """Attention, head by head, so that one seed drops the same weights of all."""
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    scores = (*query.shape[:3], key.shape[2])
    masks, biases = (None if array is None else np.broadcast_to(array, scores)
                     for array in (mask, bias))
    found = [scaled_dot_product_attention(
        query[item, head], key[item, head // groups], value[item, head // groups],
        mask=None if masks is None else masks[item, head],
        bias=None if biases is None else biases[item, head],
        key_lengths=None if key_lengths is None else key_lengths[item], return_weights=True,
        **options) for item, head in np.ndindex(query.shape[0], heads)]
    output = np.empty((*query.shape[:3], value.shape[3]), query.dtype)
    weights = np.empty(scores, query.dtype)
    for place, (head_output, head_weights) in zip(np.ndindex(query.shape[:2]), found):
        output[place], weights[place] = head_output, head_weights
    return (output, weights) if return_weights else output
