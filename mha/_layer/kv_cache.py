"""KVCache: the keys and values of the positions so far, for decoding a token or a piece at a time.

What a cache holds at one moment is one value (`CacheState`), put in place by one assignment. Rows
are first written behind the lengths of that value, where nothing is read, so that whatever fails,
or is interrupted, before the assignment leaves the cache as it was. A signal handler may call a
method in the middle of another one. Then the first to finish has changed the cache, and the other
one raises: before each write it looks whether the value is still the one that it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import setitem
from typing import TYPE_CHECKING, Any, Never, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._base.arguments import (
    as_array,
    as_branches,
    as_int_array,
    as_lengths,
    as_size,
    checked_lengths,
)
from mha._base.atomic import Step, assign, one_go, take
from mha._base.dtypes import (
    RAW_BFLOAT16,
    cache_dtype,
    check_beside,
    columns_of,
    is_bfloat16,
    numbers_of_element,
    shown,
)
from mha._base.keywords import (
    checks_keywords,
    missing_attribute,
    names_its_keywords,
    unknown_keyword,
)
from mha._layer.cache_pickle import from_pickle, to_pickle
from mha._layer.cache_room import extended
from mha._layer.cache_state import (
    NOWHERE,
    AnyCache,
    CacheState,
    changed_meanwhile,
    checked_window,
    clearing,
    first_needed,
    least_length,
    most_columns,
    moves,
    read_only,
    resized,
    writes,
    zeros,
)

__all__ = ["KVCache"]

Array = NDArray[Any]
Append = Callable[[Array, Array], None]
T = TypeVar("T")


class KVCache(AnyCache):
    """Keys and values of the positions so far, for attention that goes on behind them.

    Parameters
    ----------
    batch : int
        Sequences; each has a length of its own.
    kv_heads, head_dim : int
    value_head_dim : int, by default head_dim
    capacity : int
        Positions to reserve; beyond them the cache grows by doubling.
    dtype : numpy.float32, numpy.float64, numpy.float16, "bfloat16" or "q8_0"
        In which keys and values are stored; what is appended is rounded once. "bfloat16" needs
        ml_dtypes only where key and value are looked at. "q8_0" takes 0.27 of float32's memory:
        blocks of 32 columns of one head and position share a float16 scale (head_dim and
        value_head_dim are multiples of 32), and key and value are float32 copies. A block with a
        number that is not finite, or beyond 8.3 million, is NaN.
    window : int, optional
        Keeps what attention with window=(window - 1, 0) needs, also after `truncate` back to the
        lengths before the last append or layer's call. The next one first drops whole blocks of
        128 positions that no sequence needs any more. Holds fewer than 2 * max(window, 128)
        positions, plus the spread of the lengths and what one call appends.
    keep_first : int, by default 0
        With a window: so many positions from 0 on stay, too, and every query sees them ("attention
        sinks"). They keep their positions. The cache holds that many more, in blocks of 128.

    Attributes
    ----------
    lengths (batch,): positions so far, dropped ones too; start: the position of column 0 of key
    (batch, kv_heads, longest - start, head_dim) and value, read-only views that hold until the
    cache changes, with zeros behind shorter sequences; capacity, nbytes, and the parameters above.
    With keep_first, once something has been dropped, `key_parts()` and `value_parts()` take the
    place of key and value.

    Calls
    -----
    `layer(x, cache=cache)` appends the rows of x and attends to all positions so far.
    `mha.scaled_dot_product_attention` takes key and value as they are, with
    key_lengths=cache.lengths - cache.start where lengths differ. One thread at a time.

    Raises
    ------
    ValueError: a size out of range. TypeError: a size that is not an int, another dtype.
    MemoryError: a capacity that cannot be had. ImportError: key or value of a bfloat16 cache where
    ml_dtypes has not been imported.

    Source: Shazeer 2019, "Fast Transformer Decoding"; the window as in Beltagy et al. 2020,
    keep_first as in Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks".

    >>> cache = mha.KVCache(batch=2, kv_heads=8, head_dim=64)
    >>> cache.append(np.ones((2, 8, 5, 64)), np.ones((2, 8, 5, 64)), lengths=[5, 3])
    >>> cache.lengths, cache.key.shape
    (array([5, 3]), (2, 8, 5, 64))
    """

    __module__ = "mha"  # where users import it from, and so do pickles
    __slots__ = ("__weakref__", "_fits", "_state", "_window")

    @checks_keywords
    def __init__(self, batch: int, kv_heads: int, head_dim: int,
                 value_head_dim: int | None = None, *, capacity: int = 0,
                 dtype: DTypeLike = np.float32, window: int | None = None,
                 keep_first: int = 0) -> None:
        batch, kv_heads = as_size(batch, "batch"), as_size(kv_heads, "kv_heads")
        head_dim = as_size(head_dim, "head_dim")
        value_head_dim = as_size(value_head_dim, "value_head_dim", head_dim)
        columns = as_size(capacity, "capacity", least=0)
        known_dtype = cache_dtype(dtype)
        of_block = numbers_of_element(known_dtype, head_dim=head_dim, value_head_dim=value_head_dim)
        self._window = checked_window(window, keep_first)
        self._fits: Any = None  # the settings of the layer that it was last checked against
        most = most_columns(self._window)
        columns = columns if most is None else min(columns, most)
        heads = batch, kv_heads
        self._state = CacheState(
            zeros((*heads, columns, head_dim // of_block), known_dtype),
            zeros((*heads, columns, value_head_dim // of_block), known_dtype),
            read_only(np.zeros(batch, np.int64)), 0, 0, 0, 0)

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return self._state.key.shape[0]

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self._state.key.shape[1]

    @property
    def _arrays(self) -> tuple[Array, Array]:
        return self._state.key, self._state.value

    @property
    def capacity(self) -> int:
        """Positions that there is memory for."""
        return self._state.key.shape[2]

    @property
    def lengths(self) -> Array:
        """Positions so far (batch,), dropped ones too; read-only."""
        return self._state.lengths

    @property
    def start(self) -> int:
        """The position of column 0 of key and value, or of the second of their parts: a multiple of
        128, 0 until something has been dropped."""
        return self._state.start

    @property
    def key(self) -> Array:
        """(batch, kv_heads, longest - start, head_dim), read-only, until the cache changes."""
        return read_only(shown(self._in_one_piece("key").held()[0]))

    @property
    def value(self) -> Array:
        """(batch, kv_heads, longest - start, value_head_dim), read-only, until the cache changes.
        """
        return read_only(shown(self._in_one_piece("value").held()[1]))

    def key_parts(self) -> tuple[Array, Array]:
        """key in two parts: the first positions, and those from start on.

        Returns
        -------
        Views (batch, kv_heads, keep_first, head_dim), without columns as long as nothing has been
        dropped, and (batch, kv_heads, longest - start, head_dim); read-only, until the cache
        changes.

        Raises
        ------
        ImportError: of a bfloat16 cache where ml_dtypes has not been imported.

        Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks".

        >>> cache = mha.KVCache(1, 8, 64, window=100, keep_first=4)
        >>> for _ in range(3):
        ...     cache.append(np.ones((1, 8, 200, 64)), np.ones((1, 8, 200, 64)))
        >>> [part.shape for part in cache.key_parts()], cache.start
        ([(1, 8, 4, 64), (1, 8, 344, 64)], 256)
        """
        return self._parts(0)

    def value_parts(self) -> tuple[Array, Array]:
        """value in two parts, (batch, kv_heads, len, value_head_dim), as `key_parts` has key.

        Raises
        ------
        ImportError: of a bfloat16 cache where ml_dtypes has not been imported.

        Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks".

        >>> cache = mha.KVCache(1, 8, 64, window=100, keep_first=4)
        >>> [part.shape for part in cache.value_parts()]
        [(1, 8, 0, 64), (1, 8, 0, 64)]
        """
        return self._parts(1)

    @names_its_keywords
    def append(self, key: ArrayLike, value: ArrayLike, lengths: ArrayLike | None = None,
               **unknown: Never) -> None:
        """Put key (batch, kv_heads, n, head_dim) and value behind what is there.

        lengths (batch,), or one int for all, says how many of the n positions are real, the first
        ones; the others are not stored. A cache with a window first drops what these positions
        do not need; what they need stays until the next ones come, so that `truncate` may take
        them back.

        Raises
        ------
        ValueError: shapes that do not fit, lengths outside [0, n]. TypeError: arrays that are not
        numbers. MemoryError: no room for more. The cache is as it was then. RuntimeError: a signal
        handler changed the cache meanwhile, which is as the handler left it.

        Source: Shazeer 2019, "Fast Transformer Decoding", section 2.4.

        >>> cache = mha.KVCache(1, 8, 64)
        >>> cache.append(np.ones((1, 8, 5, 64)), np.ones((1, 8, 5, 64)))
        >>> cache.key.shape
        (1, 8, 5, 64)
        """
        if unknown:
            raise unknown_keyword(KVCache.append, unknown)
        keys, values = as_array(key, "key"), as_array(value, "value")
        before = self._state
        of_bfloat16 = is_bfloat16(keys.dtype) or is_bfloat16(values.dtype)
        n = keys.shape[2] if keys.ndim == 4 else -1
        for array, like, name in ((keys, before.key, "key"), (values, before.value, "value")):
            check_beside(array, like.dtype, name)
            if of_bfloat16:
                check_beside(array, RAW_BFLOAT16, name)
            heads, columns = like.shape[:2], columns_of(like)
            if array.shape != (*heads, n, columns):
                length = "n" if name == "key" else n
                raise ValueError(f"{name}: got shape {array.shape}, wanted"
                                 f" ({heads[0]}, {heads[1]}, {length}, {columns})")
        counts = checked_lengths(lengths, before.key.shape[0], n)
        self._extend(before, n, counts, False, lambda after, append: append(keys, values))

    @checks_keywords
    def truncate(self, lengths: ArrayLike) -> None:
        """Forget all positions from lengths (batch,), or one int for all, on.

        Raises
        ------
        ValueError: lengths beyond those that are there, or, with a window, so short that dropped
        positions would be needed. TypeError: no ints. The cache is as it was then.

        Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".

        >>> cache = mha.KVCache(1, 8, 64)
        >>> cache.append(np.ones((1, 8, 5, 64)), np.ones((1, 8, 5, 64)))
        >>> cache.truncate([3])
        >>> cache.lengths
        array([3])
        """
        before = self._state
        new = as_lengths(lengths, before.lengths.size)
        if (new < 0).any() or (new > before.lengths).any():
            raise ValueError(f"lengths: got {new.tolist()}, wanted lengths from 0 to those that are"
                             f" there, {before.lengths.tolist()}")
        self._publish_and_clear(self._shortened(before, new, f"lengths: got {new.tolist()}"),
                                before)

    @checks_keywords
    def keep(self, start: ArrayLike, indices: ArrayLike, lengths: ArrayLike | None = None) -> None:
        """Keep some of the positions from `start` on, and forget the others.

        So a tree of tokens that were guessed becomes the branch that was right.

        Parameters
        ----------
        start : ints (batch,), or one for all
            Where the tree begins. What stands before stays.
        indices : ints (batch, k)
            Row i of sequence b at start[b] + indices[b, i] becomes the one at start[b] + i.
        lengths : ints (batch,), or one for all, by default k
            How many of the k count, the first ones; the others may be anything.

        Afterwards the cache is as if these rows had been appended one behind the other. For that
        the call with the whole tree takes its mask and its positions (docs/decoding.md).

        Raises
        ------
        ValueError: shapes that do not fit, positions that are not there or named twice, and, with a
        window, a start in front of what it has dropped. TypeError: no ints. The cache is as it was
        then.

        Source: Miao et al. 2024, "SpecInfer", section 4.

        >>> cache = mha.KVCache(1, 8, 64)
        >>> cache.append(np.ones((1, 8, 5, 64)), np.ones((1, 8, 5, 64)))
        >>> cache.keep(2, [[0, 2]])  # a list of positions for each sequence
        >>> cache.lengths
        array([4])
        """
        before = self._state
        begins = as_lengths(start, before.lengths.size, "start")
        if (begins < 0).any() or (begins > before.lengths).any():
            raise ValueError(f"start: got {begins.tolist()}, wanted positions from 0 to the lengths"
                             f" that are there, {before.lengths.tolist()}")
        chosen = as_branches(indices, lengths, before.lengths - begins)
        if (begins < before.start).any():
            raise ValueError(f"start: got {begins.tolist()}, wanted at least {before.start}: what"
                             " stood before is dropped")
        new = begins + np.array([len(branch) for branch in chosen])
        after = self._shortened(before, new, f"start: got {begins.tolist()}, with indices lengths"
                                             f" of {new.tolist()}")
        if before.moved is not None:  # the branch stands where rows that are appended do
            after = after._replace(moved=np.where(before.moved < begins, before.moved, NOWHERE))
        self._publish_and_clear(after, before, moves(before, begins, chosen))

    @checks_keywords
    def select(self, indices: ArrayLike) -> None:
        """Make the sequences of these indices the batch, in their order.

        key (batch, kv_heads, len, head_dim) becomes key[indices], and value likewise: indices are
        ints in [0, batch), some several times, some not at all. Takes as much memory again while it
        copies.

        Raises
        ------
        ValueError: no indices, or some out of range. TypeError: no ints. MemoryError: no room for
        the new batch. The cache is as it was then.

        Source: beam search as in Sutskever et al. 2014, section 3.2.

        >>> cache = mha.KVCache(2, 8, 64)
        >>> cache.select([1, 1, 0])
        >>> cache.batch
        3
        """
        before = self._state
        chosen, (batch, _, columns, _) = as_int_array(indices, "indices"), before.key.shape
        if chosen.ndim != 1 or not chosen.size:
            raise ValueError(f"indices: got shape {chosen.shape}, wanted one index or more in a"
                             " row")
        if (chosen < 0).any() or (chosen >= batch).any():
            raise ValueError(f"indices: got {chosen.tolist()}, wanted indices into {batch}"
                             " sequences")
        self._publish(resized(before, chosen.tolist(), columns), before)

    def reset(self) -> None:
        """Forget all positions; the memory stays reserved.

        >>> cache = mha.KVCache(2, 8, 64, capacity=100)
        >>> cache.reset()
        >>> cache.lengths, cache.capacity
        (array([0, 0]), 100)
        """
        before = self._state
        after = before._replace(lengths=read_only(np.zeros_like(before.lengths)), shortest=0,
                                longest=0, start=0, first=0, kept=0)
        self._publish_and_clear(after, before)

    def _extend(self, before: CacheState, n: int, counts: Array | None, left: bool,
                use: Callable[[CacheState, Append], T], moved: Array | None = None) -> T:
        """use(after, store_rows), and then the cache has n positions more than before; where
        anything fails it is as it was. `after` has room for them, and is without what they do not
        need; store_rows(key, value) writes them there: (batch, kv_heads, n, head_dim).
        counts (batch,): of sequence b the first counts[b] rows are real, or, where left, the last
        ones; None: all n. moved (batch,): in which sequences some of them stand elsewhere.
        """
        after = extended(before, self._window, n, counts, moved)

        def store_rows(key: Array, value: Array) -> None:
            for array, where, numbers in writes(before, after, key, value, counts, left):
                # One expression, in which no signal handler runs: mha/_base/atomic.py.
                if not (self._state is before and setitem(array, where, numbers) is None):
                    raise changed_meanwhile()

        try:
            result = use(after, store_rows)
            # Ctrl-C before this leaves the cache as it was, behind it with the new rows.
            self._publish(after, before)
        except BaseException:
            self._take_back(after)
            raise
        return result

    def _read(self, before: CacheState, use: Callable[[CacheState, Append], T]) -> T:
        """use(before, append): nothing is appended."""
        result = use(before, _append_nothing)
        self._check_unchanged(before)
        return result

    def _check_unchanged(self, before: CacheState) -> None:
        """A RuntimeError where the cache was changed while its state was copied."""
        if self._state is not before:
            raise changed_meanwhile()

    def _in_one_piece(self, name: str) -> CacheState:
        state = self._state
        if state.kept:
            raise ValueError(f"{name}: got a cache that has dropped positions behind the first"
                             f" {self.keep_first}, wanted {name}_parts(), which are two arrays")
        return state

    def _parts(self, which: int) -> tuple[Array, Array]:
        state = self._state
        held = shown(state.held()[which])
        first = held[:, :, :self.keep_first if state.kept else 0]
        return read_only(first), read_only(held[:, :, state.kept:])

    def _shortened(self, before: CacheState, lengths: Array, given: str) -> CacheState:
        """The state with these lengths, none above those before; a ValueError about what was given
        where dropped positions would be needed."""
        shortest, longest = int(lengths.min()), int(lengths.max())
        if before.start > first_needed(shortest, self.window):
            least = least_length(before, self.window)
            raise ValueError(f"{given}, wanted at least {least}: what stood before {before.start}"
                             f" is dropped, and a window of {self.window} needs it. A cache goes"
                             " back over its last call; to go back farther keep a copy.copy() of"
                             " it from before")
        return before._replace(lengths=read_only(lengths), shortest=shortest, longest=longest)

    def _publish_and_clear(self, after: CacheState, before: CacheState,
                           moving: Sequence[Step] = ()) -> None:
        """`_publish`, and in the same go rows that move and zeros behind the rows of `after`."""
        if not self._cleared(before, (assign, self, "_state", after), *moving,
                             *clearing(before, after)):
            raise changed_meanwhile()

    def _cleared(self, before: CacheState, *steps: Step) -> bool:
        """Take these steps if the state is the one before; whether it was."""
        ready = one_go(*steps)
        return self._state is before and take(ready) is not None

    def _take_back(self, after: CacheState) -> None:
        """Zeros again for the rows of a call that failed, which views of longer sequences show."""
        while True:
            now = self._state
            if self._cleared(now, *clearing(after, now)):
                return

    @classmethod
    def _new_memory(cls) -> Memory:
        """What pickle fills with a memory's state."""
        return Memory.__new__(Memory)

    def __copy__(self) -> Self:
        other, state = self.__class__.__new__(self.__class__), self._state
        other._state = resized(state, None, state.key.shape[2])
        other._window, other._fits = self._window, self._fits
        self._check_unchanged(state)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = memo[id(self)] = self.__copy__()
        return other

    def __getstate__(self) -> dict[str, Any]:
        state = self._state
        pickled = to_pickle(state, self._window)
        self._check_unchanged(state)
        return pickled

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        """Of what `__getstate__` gave; all else is a ValueError."""
        try:
            state, window = from_pickle(KVCache, **pickled)
        except MemoryError:
            raise
        except Exception as error:  # whatever strange objects raise
            raise ValueError(f"state: got one that does not fit together ({error}), wanted what"
                             " pickling a KVCache gives") from error
        self._fits = None  # first: it must not outlive the state that was checked
        self._state, self._window = state, window

    if not TYPE_CHECKING:  # checkers know the names
        __getattr__ = missing_attribute

    def __repr__(self) -> str:
        widths = f"{self.head_dim}"
        if self.value_head_dim != self.head_dim:
            widths += f", value_head_dim={self.value_head_dim}"
        window = "" if self.window is None else f", window={self.window}"
        window += f", keep_first={self.keep_first}" * (self.keep_first > 0)
        return (f"{type(self).__name__}({self.batch}, {self.kv_heads}, {widths},"
                f" capacity={self.capacity}, dtype={self.dtype}{window},"
                f" lengths={self.lengths.tolist()})")


class Memory(KVCache):
    """An encoder's keys and values: `MultiHeadAttention.new_memory` fills it, once."""

    __module__ = "mha"
    __slots__ = ()

    @names_its_keywords
    def append(self, key: ArrayLike, value: ArrayLike, lengths: ArrayLike | None = None,
               **unknown: Never) -> None:
        """Raises a ValueError: a memory is filled already."""
        raise ValueError("cache: got an append to a memory, wanted a new_cache()")

    def _fill(self, key: Array, value: Array, counts: Array | None) -> None:
        """Its positions, once; as those that `KVCache.append` takes."""
        self._extend(self._state, key.shape[2], counts, False,
                     lambda after, append: append(key, value))

    def __reduce__(self) -> tuple[Any, ...]:
        return KVCache._new_memory, (), self.__getstate__()


def _append_nothing(key: Array, value: Array) -> None:
    pass
