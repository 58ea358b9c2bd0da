"""What all caches share, what a KVCache holds at one moment, and how that is copied and written
behind its end."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mha._base.arguments import as_size
from mha._base.atomic import Step, assign
from mha._base.dtypes import Q8_0, columns_of, rounded, shown_dtype
from mha._base.pieces import FEW, PIECE, copied, copy_into, pieces

Array = NDArray[Any]

# The kernels sum in blocks of so many keys, aligned to key 0: whoever drops whole blocks keeps the
# order of every sum, and with it the bits.
BLOCK = 128
NOWHERE = 2**62  # behind all positions


class CacheWindow(NamedTuple):
    """Which positions a cache keeps once others follow."""

    size: int | None     # what a query needs, its own position among them; None: all
    keep_first: int = 0  # and so many from 0 on

    @property
    def first_columns(self) -> int:
        """Columns of the blocks in which the first ones stand."""
        return -(-self.keep_first // BLOCK) * BLOCK


def checked_window(window: Any, keep_first: Any) -> CacheWindow:
    size = None if window is None else as_size(window, "window")
    first = as_size(keep_first, "keep_first", least=0)
    if size is None and first:
        raise ValueError(f"keep_first: got {first} without a window, wanted window= too: a cache"
                         " without one keeps all")
    return CacheWindow(size, first)


class AnyCache:
    """What KVCache and PagedCache share: arrays of keys (..., head_dim) and values (...,
    value_head_dim), a window, and a state that changes by one assignment."""

    __slots__ = ()
    _state: Any
    _window: Any

    @property
    def _arrays(self) -> tuple[Array, Array]:
        """Of keys and of values."""
        raise NotImplementedError

    @property
    def head_dim(self) -> int:
        """Columns of a head's keys."""
        return columns_of(self._arrays[0])

    @property
    def value_head_dim(self) -> int:
        """Columns of a head's values."""
        return columns_of(self._arrays[1])

    @property
    def dtype(self) -> Any:
        """The type in which keys and values are stored; "q8_0"; "bfloat16", the name, where
        ml_dtypes has not been imported."""
        return shown_dtype(self._stored)

    @property
    def _stored(self) -> np.dtype[Any]:
        return self._arrays[0].dtype

    @property
    def window(self) -> int | None:
        """How many positions a query needs, its own among them; None: all."""
        return self._window.size

    @property
    def keep_first(self) -> int:
        """How many positions from 0 on stay though the window has left them behind."""
        return self._window.keep_first

    @property
    def nbytes(self) -> int:
        """Bytes of memory for keys and values."""
        return sum(array.nbytes for array in self._arrays)

    def _publish(self, after: Any, before: Any) -> None:
        """Compare and swap: the state becomes `after`; a RuntimeError where it is not `before`."""
        # One expression, in which no signal handler runs: mha/_base/atomic.py.
        if not (self._state is before and assign(self, "_state", after) is None):
            raise changed_meanwhile()


class CacheState(NamedTuple):
    """The position p >= start of every sequence stands in column first + p - start of both arrays.
    Where what lies between has been dropped, the positions p < kept stand right before them."""

    key: Array      # (batch, kv_heads, columns, head_dim)
    value: Array    # (batch, kv_heads, columns, value_head_dim)
    lengths: Array  # (batch,) int64, read-only: positions so far, dropped ones too
    shortest: int   # of lengths
    longest: int
    start: int      # the first position that is held
    first: int      # its column
    kept: int = 0   # so many from position 0 on; 0 as long as start is 0
    # (batch,): from where on rows may stand elsewhere, along one of several position axes. None: no
    # row does.
    moved: Array | None = None

    @property
    def dropped(self) -> int:
        """How many positions are missing in front of start."""
        return self.start - self.kept

    @property
    def has_moved(self) -> bool:
        """Whether some row that is there may stand elsewhere."""
        return self.moved is not None and bool((self.moved < self.lengths).any())

    def held(self) -> tuple[Array, Array]:
        """Views of key and value: what is kept of the first positions, and from position start to
        the longest sequence's last."""
        columns = slice(self.first - self.kept, self.first + self.longest - self.start)
        return self.key[:, :, columns], self.value[:, :, columns]


def most_columns(window: CacheWindow) -> int | None:
    """What a cache with a window grows to while all sequences are equally long, one by one."""
    if window.size is None:
        return None
    return window.first_columns + 2 * max(window.size, BLOCK) - 1


def first_needed(length: int, window: int | None) -> int:
    """The first position that the next query of a sequence of this length may see."""
    return 0 if window is None else max(0, length - window + 1)


def least_length(state: CacheState, window: int | None) -> int:
    """The shortest that a sequence may become: the window of its next query begins at start."""
    return 0 if window is None or state.start == 0 else state.start + window - 1


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any], asked: str | None = None) -> Array:
    """Zeros: what was in that memory before must not show. asked: what an error begins with."""
    try:
        return np.zeros(shape, dtype)
    except (ValueError, OverflowError, MemoryError):
        asked = asked or f"capacity: got {shape[2]} positions,"
        raise MemoryError(f"{asked} {shown_dtype(dtype)} of shape {shape}, wanted what fits in"
                          " memory") from None


def changed_meanwhile() -> RuntimeError:
    """Where a signal handler, say, has changed a cache that a call is changing."""
    return RuntimeError("cache: got changed by one call in the midst of another, wanted one call at"
                        " a time")


def read_only(array: Array) -> Array:
    array.setflags(write=False)
    return array


def resized(state: CacheState, sequences: list[int] | None, columns: int) -> CacheState:
    """These sequences, or all, in new arrays of so many columns."""
    return resized_from(state, sequences, columns, state.start, state.kept)


def resized_from(state: CacheState, sequences: list[int] | None, columns: int, start: int,
                 kept: int) -> CacheState:
    """The same without the positions before start, but for the first `kept`, which all sequences
    have."""
    lengths = state.lengths if sequences is None else read_only(state.lengths[sequences])
    shortest, longest = int(lengths.min()), int(lengths.max())
    arrays = []
    for array in (state.key, state.value):
        new = zeros((len(lengths), array.shape[1], columns, array.shape[3]), array.dtype)
        first = slice(state.first - state.kept, state.first - state.kept + kept)
        copy_into(new[:, :, :kept], array[sequences or slice(None), :, first])
        seen, behind = array[:, :, state.first + start - state.start:], new[:, :, kept:]
        if sequences is None and shortest == longest:
            rows = slice(longest - start)
            copy_into(behind[:, :, rows], seen[:, :, rows])
        else:  # each up to its end: behind it may stand what a call in progress has written
            for to, (of, length) in enumerate(zip(sequences or range(len(lengths)), lengths)):
                rows = slice(length - start)
                copy_into(behind[to, :, rows], seen[of, :, rows])
        arrays.append(new)
    return CacheState(arrays[0], arrays[1], lengths, shortest, longest, start, kept, kept,
                      state.moved if state.moved is None or sequences is None
                      else state.moved[sequences])


# (array, where, numbers): what array[where] becomes.
Write = tuple[Any, Any, Array]


def writes(before: CacheState, after: CacheState, key: Array, value: Array, counts: Array | None,
           left: bool) -> Iterator[Write]:
    """What puts each sequence's rows behind its length before: all n, or the first or, where left,
    the last counts (batch,) of them. Rounded as they are stored, a piece at a time."""
    if after.key.dtype == Q8_0:
        key, value = rounded(key, Q8_0), rounded(value, Q8_0)
    pairs, n = ((after.key, key), (after.value, value)), key.shape[2]
    column_of_0 = after.first - after.start
    is_one_piece = key.size + value.size <= FEW
    if counts is None and before.shortest == before.longest:
        begin = before.longest + column_of_0
        behind = slice(None), slice(None), slice(begin, begin + n)
        for array, numbers in pairs:
            if is_one_piece:
                yield array, behind, rounded(numbers, array.dtype)
            else:
                yield from _in_pieces(array[behind], numbers)
    elif counts is None and is_one_piece:
        of = np.arange(len(before.lengths))[:, None]
        column = (before.lengths + column_of_0)[:, None] + np.arange(n)
        for array, numbers in pairs:
            apart = _apart(numbers, array)  # NumPy 1.26 does not look for that with arrays of ints
            yield array, (of, slice(None), column), rounded(apart, array.dtype).swapaxes(1, 2)
    else:
        of, row, column = _places(before.lengths + column_of_0, n, counts, left)
        for array, numbers in pairs:
            yield from _rows_in_pieces(array, numbers, of, row, column)


def _in_pieces(rows: Array, numbers: Array) -> Iterator[Write]:
    numbers = _apart(numbers, rows)
    for piece in pieces(rows, numbers.itemsize):
        yield rows, piece, rounded(numbers[piece], rows.dtype)


def _places(begins: Array, n: int, counts: Array | None,
            left: bool) -> tuple[Array, Array, Array]:
    """Of which sequence each real row is, which of its n rows, and the column that it goes to:
    begins[b] for the first one of sequence b."""
    lengths = np.full(len(begins), n) if counts is None else counts
    padding = n - lengths if left else np.zeros_like(lengths)
    behind = np.arange(n) - padding[:, None]  # (batch, n): which of the sequence's real rows
    of, row = np.nonzero((behind >= 0) & (behind < lengths[:, None]))
    return of, row, (begins - padding)[of] + row


def _rows_in_pieces(array: Array, numbers: Array, of: Array, row: Array,
                    column: Array) -> Iterator[Write]:
    _, heads, _, width = array.shape
    numbers = _apart(numbers, array)
    row_bytes = heads * width * max(array.itemsize, numbers.itemsize)  # 0 of latents' values
    step = max(1, PIECE // max(1, row_bytes))
    for i in range(0, len(of), step):
        some = slice(i, i + step)
        yield (array, (of[some], slice(None), column[some]),
               rounded(numbers[of[some], :, row[some]], array.dtype))


def _apart(numbers: Array, array: Array) -> Array:
    """The numbers, or a copy where a write into the array might change those of a later piece."""
    return copied(numbers) if np.may_share_memory(numbers, array) else numbers


def moves(state: CacheState, begins: Array, chosen: list[Array]) -> list[Step]:
    """What puts the rows begins[b] + chosen[b] of each sequence behind begins[b], in that order.
    They are copied now: steps of one sequence may go over rows of another place."""
    steps: list[Step] = []
    for sequence, (begin, branch) in enumerate(zip(begins.tolist(), chosen, strict=True)):
        stay = int((branch == np.arange(len(branch))).cumprod().sum())  # where they are already
        column = state.first + begin - state.start
        to = sequence, slice(None), slice(column + stay, column + len(branch))
        for array in (state.key, state.value) if stay < len(branch) else ():
            rows = array[sequence].take(column + branch[stay:], axis=1)
            steps.append((operator.setitem, array, to, rows))
    return steps


def clearing(written: CacheState, kept: CacheState) -> list[Step]:
    """Zeros behind the rows of `kept`, as far as those of `written` go: views up to longer
    sequences' ends would show them. Nothing where `kept` has other arrays."""
    if kept.key is not written.key:
        return []
    ends, old_ends = ((of.lengths + (of.first - of.start)).tolist() for of in (kept, written))
    columns = [*map(slice, ends, old_ends)]
    return [(operator.setitem, array, (sequence, slice(None), behind), 0)
            for array in (written.key, written.value) for sequence, behind in enumerate(columns)
            if behind.start < behind.stop]
