"""Past and present: keys and values behind each other, or in a buffer that past
and present share, and the beams of a search."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mha._base.arguments import as_array, as_exact_int_array
from mha._base.pieces import copied
from mha.compat.onnx._heads import check_pair, joined


class Cache(NamedTuple):
    """present_key and present_value as the operator returns them, and the keys and values that are
    attended to (batch, heads, total_len, size), of which past_len are from earlier steps."""

    present_key: NDArray[Any]
    present_value: NDArray[Any]
    key: NDArray[Any]
    value: NDArray[Any]
    past_len: int


def with_past(key: NDArray[Any], value: NDArray[Any], past_key: Any, past_value: Any,
              past_sequence_length: Any = None, cache_indirection: Any = None) -> Cache:
    """The new keys and values behind those of the past, which are all rows of past_key, or the
    first past_sequence_length of a buffer (batch, heads, max_len, size)."""
    check_pair(past_key, past_value, "past_key, past_value")
    if past_sequence_length is None:
        present_key = joined(past_key, "past_key", key)
        present_value = joined(past_value, "past_value", value)
        past_len = present_key.shape[2] - key.shape[2]
    else:
        past_len = one_int(past_sequence_length, "past_sequence_length")
        present_key = written(past_key, "past_key", key, past_len)
        present_value = written(past_value, "past_value", value, past_len)
    total_len = past_len + key.shape[2]
    seen = present_key[:, :, :total_len], present_value[:, :, :total_len]
    if cache_indirection is not None:
        rows = _rows_of_beams(cache_indirection, len(key), past_len, total_len)
        seen = _gathered(seen[0], rows), _gathered(seen[1], rows)
    return Cache(present_key, present_value, *seen, past_len)


def one_int(value: Any, name: str) -> int:
    array = as_exact_int_array(value, name)
    if array.size != 1:
        raise ValueError(f"{name}: got shape {array.shape}, wanted one int")
    return int(array.item())


def written(buffer: Any, name: str, new: NDArray[Any], past_len: int) -> NDArray[Any]:
    """A copy of the buffer (batch, heads, max_len, size) with the new rows at past_len."""
    if buffer is None:
        raise ValueError(f"{name}: got None beside past_sequence_length, wanted the buffer (batch,"
                         " num_heads, max_sequence_length, head_size)")
    buffer = as_array(buffer, name)
    wanted = (*new.shape[:2], "max_sequence_length", new.shape[3])
    if buffer.ndim != 4 or (*buffer.shape[:2], wanted[2], buffer.shape[3]) != wanted:
        raise ValueError(f"{name}: got shape {buffer.shape}, wanted {wanted}")
    room = buffer.shape[2] - new.shape[2]
    if not 0 <= past_len <= room:
        raise ValueError(f"past_sequence_length: got {past_len}, wanted 0 to {room}, so that"
                         f" {new.shape[2]} new rows fit in the {buffer.shape[2]} of {name}")
    present = copied(buffer, order="C")
    present[:, :, past_len:past_len + new.shape[2]] = new
    return present


def _rows_of_beams(cache_indirection: Any, batch_beams: int, past_len: int,
                   total_len: int) -> NDArray[Any]:
    """(batch * beams, total_len): which row of the cache holds position k of row i's sequence. New
    positions are a row's own."""
    beams = as_exact_int_array(cache_indirection, "cache_indirection")
    if (beams.ndim != 3 or beams.shape[0] * beams.shape[1] != batch_beams
            or beams.shape[2] < past_len):
        raise ValueError(f"cache_indirection: got shape {beams.shape}, wanted (batch, beam_width,"
                         f" max_sequence_length) with {batch_beams} sequences in the first two"
                         f" axes and at least {past_len} positions")
    width = beams.shape[1]
    beams = beams[:, :, :past_len]
    if beams.size and not 0 <= beams.min() <= beams.max() < width:
        raise ValueError(f"cache_indirection: got {beams.min()} to {beams.max()}, wanted beams, 0"
                         f" to {width - 1}")
    rows = np.repeat(np.arange(batch_beams)[:, None], total_len, axis=1)
    first = np.arange(len(beams))[:, None, None] * width
    rows[:, :past_len] = (first + beams).reshape(batch_beams, past_len)
    return rows


def _gathered(cache: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    """(batch, heads, len, size), position k of row i taken from row rows[i, k]."""
    heads_apart = cache.swapaxes(1, 2)  # (batch, len, heads, size)
    return heads_apart[rows, np.arange(rows.shape[1])].swapaxes(1, 2)
