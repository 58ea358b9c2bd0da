"""What a KVCache holds at one moment, and how it is copied and written behind its end."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mha.one_go import Step

Array = NDArray[Any]

# The kernels sum in blocks of so many keys, aligned to key 0: whoever drops whole blocks keeps the
# order of every sum, and with it the bits.
BLOCK = 128


class CacheState(NamedTuple):
    """The position p of every sequence stands in column first + p - start of both arrays."""

    key: Array      # (batch, kv_heads, columns, head_dim)
    value: Array    # (batch, kv_heads, columns, value_head_dim)
    lengths: Array  # (batch,) int64, read-only: positions so far, dropped ones too
    shortest: int   # of lengths
    longest: int
    start: int      # the first position that is held
    first: int      # its column

    def held(self) -> tuple[Array, Array]:
        """Views of key and value from position start to the longest sequence's last."""
        columns = slice(self.first, self.first + self.longest - self.start)
        return self.key[:, :, columns], self.value[:, :, columns]


def most_columns(window: int) -> int:
    """What a cache with a window grows to while all sequences are equally long, one by one."""
    return 2 * max(window, BLOCK) - 1


def first_needed(length: int, window: int | None) -> int:
    """The first position that the next query of a sequence of this length may see."""
    return 0 if window is None else max(0, length - window + 1)


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros: what was in that memory before must not show."""
    try:
        return np.zeros(shape, dtype)
    except (ValueError, OverflowError, MemoryError):
        raise MemoryError(f"capacity: got {shape[2]} positions, {dtype} of shape {shape}, wanted"
                          " what fits in memory") from None


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def copied(state: CacheState, sequences: list[int] | None, columns: int) -> CacheState:
    """These sequences, or all, in new arrays of so many columns."""
    lengths = state.lengths if sequences is None else read_only(state.lengths[sequences])
    shortest, longest = int(lengths.min()), int(lengths.max())
    held = longest - state.start
    arrays = []
    for array in (state.key, state.value):
        seen = array[:, :, state.first:state.first + held]
        new = zeros((len(lengths), array.shape[1], columns, array.shape[3]), array.dtype)
        if sequences is None:
            new[:, :, :held] = seen
        else:
            for to, sequence in enumerate(sequences):
                new[to, :, :held] = seen[sequence]
        arrays.append(new)
    return CacheState(arrays[0], arrays[1], lengths, shortest, longest, state.start, 0)


def write_ragged(state: CacheState, key: Array, value: Array, counts: Array | None,
                 left: bool) -> None:
    """Each sequence's rows behind its own length: all n, or the first or, where left, the last
    counts (batch,) of them."""
    batch, n = key.shape[0], key.shape[2]
    column = (state.lengths + (state.first - state.start))[:, None] + np.arange(n)  # (batch, n)
    if counts is None:
        of = np.arange(batch)[:, None]
        state.key[of, :, column] = key.swapaxes(1, 2)
        state.value[of, :, column] = value.swapaxes(1, 2)
        return
    padding = n - counts if left else np.zeros_like(counts)
    behind = np.arange(n) - padding[:, None]  # (batch, n): which of the sequence's rows it is
    of, row = np.nonzero((behind >= 0) & (behind < counts[:, None]))
    column = column[of, row] - padding[of]
    state.key[of, :, column] = key[of, :, row]
    state.value[of, :, column] = value[of, :, row]


def clearing(state: CacheState, lengths: Array) -> list[Step]:
    """Zeros behind these lengths, which views up to longer sequences' ends would show."""
    before = state.start - state.first
    columns = [slice(new - before, old - before)
               for old, new in zip(state.lengths.tolist(), lengths.tolist())]
    return [(np.ndarray.__setitem__, array, (sequence, slice(None), behind), 0)
            for array in (state.key, state.value) for sequence, behind in enumerate(columns)
            if behind.start < behind.stop]
