"""What the operators share: heads, caches of keys and values, rotations, and the scores."""

from __future__ import annotations

from typing import Any, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from mha._base.arguments import as_array, check_kind
from mha._base.dtypes import halves_as_float32, widened
from mha._base.pieces import converted
from mha._functions.heads import merge_heads, split_heads
from mha._functions.options import AttentionKeywords
from mha._functions.rotary import Layout
from mha._functions.scaled_dot_product_attention import scaled_dot_product_attention
from mha.compat._shared.flags import as_flag
from mha.compat._shared.rotary_tables import rotated_by_tables

PRECISIONS = {1: "FLOAT", 10: "FLOAT16", 11: "DOUBLE", 16: "BFLOAT16"}  # of onnx.TensorProto
RAW, CAPPED, MASKED, WEIGHTS = range(4)  # the stages of scores, as qk_matmul_output_mode counts

Outputs = TypeVar("Outputs", bound=type)


def public(outputs: Outputs) -> Outputs:
    """The named tuple, of a private file, names the package that users import it from, and so do
    pickles; its type hints are looked up before."""
    outputs.__annotations__ = get_type_hints(outputs)
    outputs.__module__ = outputs.__module__.rpartition(".")[0]
    return outputs


def attend(query: NDArray[Any], key: NDArray[Any], value: NDArray[Any], stage: int | None,
           options: AttentionKeywords) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """The output (batch, heads, len, size), and the scores of `stage` or None for None."""
    if stage == WEIGHTS:
        return scaled_dot_product_attention(query, key, value, return_weights=True, **options)
    output = scaled_dot_product_attention(query, key, value, **options)
    return output, None if stage is None else _scores(query, key, stage, options)


def _scores(query: NDArray[Any], key: NDArray[Any], stage: int,
            options: AttentionKeywords) -> NDArray[Any]:
    """The reference's, since attention itself never stores scores and nobody asks for them but to
    look at them."""
    from mha.reference import dot_product_scores, mask_scores

    visibility: dict[str, Any] = dict(options)
    scale, softcap = visibility.pop("scale"), visibility.pop("softcap")
    visibility.pop("sinks", None)  # which weights alone know of
    key = np.repeat(key, query.shape[1] // max(key.shape[1], 1), axis=1)
    scores = dot_product_scores(halves_as_float32(query), halves_as_float32(key), scale=scale,
                                softcap=None if stage == RAW else softcap)
    return mask_scores(scores, **visibility)[0] if stage == MASKED else scores


def floats(*named: tuple[str, Any]) -> list[NDArray[Any]]:
    """The arrays, of floats, as the operators' inputs are."""
    arrays = [as_array(given, name) for name, given in named]
    for (name, _), array in zip(named, arrays):
        check_kind(widened(array), name, "f", "floats")
    return arrays


def in_precision(precision: int | None, *arrays: NDArray[Any]) -> list[NDArray[Any]]:
    """The arrays in float64 where the precision is that; float32 is the least anyway."""
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"softmax_precision: got {precision}, wanted one of {PRECISIONS}")
    if precision is None or PRECISIONS[precision] != "DOUBLE":
        return list(arrays)
    return [converted(widened(array), np.float64) for array in arrays]


def joined(past: Any, name: str, new: NDArray[Any]) -> NDArray[Any]:
    """past (batch, heads, past_len, d), or None, with new (batch, heads, len, d) behind it."""
    if past is None:
        return new
    past = as_array(past, name)
    wanted = (*new.shape[:2], "past_len", new.shape[3])
    if past.ndim != 4 or (*past.shape[:2], "past_len", past.shape[3]) != wanted:
        raise ValueError(f"{name}: got shape {past.shape}, wanted {wanted}")
    return np.concatenate((past, new), axis=2)


def check_pair(first: Any, second: Any, names: str) -> None:
    if (first is None) != (second is None):
        raise ValueError(f"{names}: got one of them, wanted both or neither")


def by_head(array: NDArray[Any], name: str, num_heads: int | None) -> NDArray[Any]:
    """(batch, num_heads, len, size), from that or (batch, len, num_heads * size)."""
    if array.ndim == 3:
        if num_heads is None:
            raise ValueError(f"{name}: got None, wanted the number of heads, which inputs of 3"
                             " dimensions do not show")
        return split_heads(array, num_heads)
    if array.ndim != 4 or num_heads not in (None, array.shape[1]):
        raise ValueError(f"{name}: got {num_heads} with an input of shape {array.shape}, wanted 3"
                         " dimensions, or 4 with as many heads in axis 1")
    return array


def with_bias(heads: list[NDArray[Any]], bias: Any, count: int) -> list[NDArray[Any]]:
    """Query, key and value (batch, num_heads, len, size), the first `count` of them with their part
    of the bias (hidden + hidden + v_hidden,), or None, added."""
    if bias is None:
        return heads
    bias = as_array(bias, "bias")
    widths = [array.shape[1] * array.shape[3] for array in heads]
    if bias.shape != (sum(widths),):
        raise ValueError(f"bias: got shape {bias.shape}, wanted ({sum(widths)},)")
    parts = np.split(bias, np.cumsum(widths)[:-1])
    added = [array + part.reshape(array.shape[1], 1, -1)
             for array, part in zip(heads[:count], parts)]
    return added + heads[count:]


def rotated(x: NDArray[Any], cos_cache: NDArray[Any], sin_cache: NDArray[Any],
            position_ids: NDArray[Any] | None, *, num_heads: int | None, dims: int,
            interleaved: Any) -> NDArray[Any]:
    """x with the first dims columns of its heads (0: all) rotated by the rows of the caches at
    position_ids (batch, len), or by caches (batch, len, dims / 2)."""
    heads = by_head(x, "num_heads", num_heads)
    batch, _, length, head_size = heads.shape
    dims = checked_rotary_dims(dims, head_size)
    rows = (batch, length) if position_ids is None else cos_cache.shape[:1]
    for name, cache in (("cos_cache", cos_cache), ("sin_cache", sin_cache)):
        if cache.shape != (*rows, dims // 2):
            raise ValueError(f"{name}: got shape {cache.shape}, wanted {(*rows, dims // 2)}")
    if position_ids is not None:
        positions = _checked_positions(position_ids, (batch, length), len(cos_cache))
        cos_cache, sin_cache = cos_cache[positions], sin_cache[positions]
    layout: Layout = "interleaved" if as_flag(interleaved, "interleaved") else "half"
    rotated = rotated_by_tables(heads, cos_cache, sin_cache, layout)
    return rotated if x.ndim == 4 else merge_heads(rotated)


def checked_rotary_dims(dims: int, head_size: int) -> int:
    """How many columns of a head rotate: all for 0."""
    dims = dims or head_size
    if dims % 2 or not 0 < dims <= head_size:
        raise ValueError(f"rotary_embedding_dim: got {dims}, wanted an even number of at most the"
                         f" head_size {head_size}")
    return dims


def _checked_positions(position_ids: NDArray[Any], shape: tuple[int, int],
                       length: int) -> NDArray[Any]:
    check_kind(position_ids, "position_ids", "iu", "integers")
    if position_ids.shape != shape:
        raise ValueError(f"position_ids: got shape {position_ids.shape}, wanted {shape}")
    if position_ids.size and not 0 <= position_ids.min() <= position_ids.max() < length:
        raise ValueError(f"position_ids: got {position_ids.min()} to {position_ids.max()}, wanted"
                         f" rows of the caches, 0 to {length - 1}")
    return position_ids
