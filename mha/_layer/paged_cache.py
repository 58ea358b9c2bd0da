"""PagedCache: one pool of pages for the keys and values of many sequences and all layers.

What a pool holds at one moment is one value (`PoolState`), put in place by one assignment. Rows are
first written where no sequence of that value reads, so that whatever fails before the assignment
leaves the pool as it was.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import setitem
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._base.arguments import as_int, as_ints, as_lengths, as_size
from mha._base.dtypes import cache_dtype, numbers_of_element, rounded
from mha._base.keywords import checks_keywords
from mha._functions.options import as_sides
from mha._layer.cache_state import (
    BLOCK,
    AnyCache,
    changed_meanwhile,
    checked_window,
    first_needed,
    zeros,
)
from mha._layer.pool_state import (
    Growth,
    Pages,
    PageWindow,
    PoolState,
    tables_of,
    with_room,
    with_sequence,
    without,
    without_unneeded,
)

__all__ = ["PagedCache"]

Array = NDArray[Any]


class PagedCache(AnyCache):
    """Keys and values of many sequences, of all layers of a model, in pages of one pool.

    Sequences come and go, and grow one by one; each takes as many pages as it needs. Sequences with
    the same beginning share its pages.

    Parameters
    ----------
    pages : int
        How many there are, for all sequences together.
    kv_heads, head_dim : int
    value_head_dim : int, by default head_dim
    layers : int
        A page holds the keys and values of its positions for so many layers.
    page_len : int
        Positions of a page: a multiple of 128.
    dtype : numpy.float32, numpy.float64, numpy.float16, "bfloat16" or "q8_0"
        As of `mha.KVCache`.
    window : int, optional
        Keeps what attention with window=(window - 1, 0) needs: pages that no next row may see go
        back to the pool when a sequence grows.
    keep_first : int, by default 0
        As of `mha.KVCache`: the pages of so many first positions of a sequence stay, too.

    Attributes
    ----------
    pages_free : how many pages no sequence has; nbytes : of all pages. And the parameters above.

    Calls
    -----
    layer(x, starts=starts, cache=pool[i], sequences=ids), with i the number of the layer, appends
    rows starts[s] to starts[s + 1] of x to sequence ids[s], and attends to all positions of it so
    far. Prompts and single tokens may stand in one call. One thread at a time.

    Raises
    ------
    ValueError: a size out of range. TypeError: a size that is not an int, another dtype.
    MemoryError: pages that cannot be had.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention".

    >>> pool = mha.PagedCache(pages=100, kv_heads=8, head_dim=64, layers=2)
    >>> ids = [pool.new(), pool.new()]
    >>> layer = mha.MultiHeadAttention(512, 8)
    >>> layer(np.ones((7, 512)), starts=[0, 5, 7], cache=pool[0], sequences=ids).shape
    (7, 512)
    """

    __module__ = "mha"  # where users import it from
    __slots__ = ("__weakref__", "_key", "_next_id", "_state", "_value", "_window")

    @checks_keywords
    def __init__(self, pages: int, kv_heads: int, head_dim: int, value_head_dim: int | None = None,
                 *, layers: int = 1, page_len: int = BLOCK, dtype: DTypeLike = np.float32,
                 window: int | None = None, keep_first: int = 0) -> None:
        pages, kv_heads = as_size(pages, "pages"), as_size(kv_heads, "kv_heads")
        head_dim, layers = as_size(head_dim, "head_dim"), as_size(layers, "layers")
        value_head_dim = as_size(value_head_dim, "value_head_dim", head_dim)
        page_len = as_size(page_len, "page_len")
        if page_len % BLOCK:
            raise ValueError(f"page_len: got {page_len}, wanted a multiple of {BLOCK}")
        stored = cache_dtype(dtype)
        of_block = numbers_of_element(stored, head_dim=head_dim, value_head_dim=value_head_dim)
        self._window = PageWindow(*checked_window(window, keep_first), page_len)
        shape = layers, pages, kv_heads, page_len
        asked = f"pages: got {pages}, which make"
        self._key = zeros((*shape, head_dim // of_block), stored, asked)
        self._value = zeros((*shape, value_head_dim // of_block), stored, asked)
        self._state = PoolState({}, tuple(range(pages))[::-1], {})
        self._next_id = 0

    @property
    def pages(self) -> int:
        """Pages in all."""
        return self._key.shape[1]

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self._key.shape[2]

    @property
    def _arrays(self) -> tuple[Array, Array]:
        return self._key, self._value

    @property
    def layers(self) -> int:
        """Layers that a page has room for."""
        return self._key.shape[0]

    @property
    def page_len(self) -> int:
        """Positions of a page."""
        return self._key.shape[3]

    @property
    def pages_free(self) -> int:
        """Pages that no sequence has."""
        return len(self._state.free)

    def new(self) -> int:
        """A sequence of no positions; its id, which no other one ever has.

        >>> pool = mha.PagedCache(4, 8, 64)
        >>> pool.new(), pool.new()
        (0, 1)
        """
        return self._add(Pages(lengths=(0,) * self.layers))

    @checks_keywords
    def fork(self, id: int) -> int:
        """A sequence that begins as this one; its id.

        They share the pages that hold its positions: one is copied when either of the two writes
        into it, which takes a page more than `reserve` knew before.

        Raises
        ------
        ValueError: an id that is unknown or freed. TypeError: no int.

        >>> pool = mha.PagedCache(4, 8, 64)
        >>> pool.fork(pool.new())
        1
        """
        sequence = self._sequence(self._state, id)
        held = -(-max(sequence.lengths) // self.page_len) - sequence.first
        return self._add(sequence._replace(pages=sequence.pages[:max(held, 0)]))

    @checks_keywords
    def free(self, id: int) -> None:
        """Give the pages of a sequence back; its id is then unknown.

        Raises
        ------
        ValueError: an id that is unknown or freed. TypeError: no int. Nothing has changed then.

        >>> pool = mha.PagedCache(4, 8, 64)
        >>> pool.free(pool.new())
        """
        before = self._state
        sequence = self._sequence(before, id)
        others = {key: value for key, value in before.sequences.items() if key != id}
        self._publish(without(before._replace(sequences=others), sequence.pages), before)

    @checks_keywords
    def lengths(self, ids: Collection[int]) -> Array:
        """Positions of these sequences so far, (sequences,): those that all layers have.

        Raises
        ------
        ValueError: ids that are unknown or freed. TypeError: no ints.

        Source: Kwon et al. 2023, section 4.

        >>> pool = mha.PagedCache(4, 8, 64)
        >>> pool.lengths([pool.new()])
        array([0])
        """
        state = self._state
        return np.array([min(self._sequence(state, id).lengths) for id in as_ints(ids, "ids")],
                        np.int64)

    @checks_keywords
    def truncate(self, id: int, length: int) -> None:
        """Forget the positions of a sequence from `length` on, in all layers.

        Those that only some layers have appended are forgotten, too. Pages that it does not need
        any more go back.

        Raises
        ------
        ValueError: an unknown id; a length beyond those that are there, or, with a window, one that
        needs positions of pages that went back. TypeError: no ints. Nothing has changed then.

        Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".

        >>> pool = mha.PagedCache(4, 8, 64)
        >>> pool.truncate(pool.new(), 0)
        """
        length = as_size(length, "length", least=0)
        before = self._state
        sequence = self._sequence(before, id)
        if length > min(sequence.lengths):
            raise ValueError(f"length: got {length}, wanted at most {min(sequence.lengths)}, which"
                             " are there")
        start = self._window.start(sequence)
        if first_needed(length, self.window) < start:
            raise ValueError(f"length: got {length}, wanted a longer one: what stood before {start}"
                             f" went back to the pool, and a window of {self.window} needs it")
        kept = max(0, -(-length // self.page_len) - sequence.first)
        after = with_sequence(before, id, sequence._replace(
            pages=sequence.pages[:kept], lengths=(length,) * self.layers))
        self._publish(without(after, sequence.pages[kept:]), before)

    @checks_keywords
    def reserve(self, ids: Collection[int], counts: ArrayLike) -> None:
        """Make sure that the next counts[i] positions of sequence ids[i] fit, in all layers.

        counts are ints (sequences,), or one for all. A page that the sequence shares is copied.

        Raises
        ------
        MemoryError: more pages than are free. ValueError: ids that are unknown or there twice,
        negative counts. TypeError: no ints. Nothing has changed then.

        Source: Kwon et al. 2023, section 4.

        >>> pool = mha.PagedCache(4, 8, 64)
        >>> pool.reserve([pool.new()], 200)
        >>> pool.pages_free
        2
        """
        given = as_ints(ids, "ids")
        more = as_lengths(counts, len(given), "counts")
        before = self._state
        known = self._checked_ids(before, given, "ids")
        if (more < 0).any():
            raise ValueError(f"counts: got {more.tolist()}, wanted none below 0")
        begins = [min(before.sequences[id].lengths) for id in known]
        before, after = self._grow(before, known, begins, more.tolist())
        self._publish(after, before)  # with all that `truncate` may go back to, if there is room

    def __getitem__(self, layer: int) -> PagedLayer:
        """What a layer's call takes as cache=: its keys and values of all sequences.

        >>> mha.PagedCache(4, 8, 64, layers=2)[1]
        PagedCache(4, 8, 64, layers=2, page_len=128, dtype=float32, pages_free=4)[1]
        """
        index = as_int(layer, "layer")
        if not -self.layers <= index < self.layers:
            raise IndexError(f"layer: got {index}, wanted one of {self.layers} layers")
        return PagedLayer(self, index % self.layers)

    def __repr__(self) -> str:
        widths = f"{self.head_dim}"
        if self.value_head_dim != self.head_dim:
            widths += f", {self.value_head_dim}"
        window = "" if self.window is None else f", window={self.window}"
        window += f", keep_first={self.keep_first}" * (self.keep_first > 0)
        return (f"PagedCache({self.pages}, {self.kv_heads}, {widths}, layers={self.layers},"
                f" page_len={self.page_len}, dtype={self.dtype}{window},"
                f" pages_free={self.pages_free})")

    def __reduce__(self) -> Any:
        raise TypeError("PagedCache: got a copy or pickle, wanted fork(id) of its sequences")

    def _add(self, sequence: Pages) -> int:
        before, id = self._state, self._next_id
        uses = before.uses | {page: before.uses.get(page, 1) + 1 for page in sequence.pages}
        after = with_sequence(before._replace(uses=uses), id, sequence)
        self._next_id = id + 1
        self._publish(after, before)
        return id

    @staticmethod
    def _sequence(state: PoolState, id: int) -> Pages:
        known = state.sequences.get(as_int(id, "id"))
        if known is None:
            raise ValueError(f"id: got {id}, wanted that of a sequence of new() or fork() that is"
                             " not freed")
        return known

    def _checked_ids(self, state: PoolState, ids: Collection[int], name: str) -> list[int]:
        known = as_ints(ids, name)
        unknown = [id for id in known if id not in state.sequences]
        if unknown:
            raise ValueError(f"{name}: got {unknown}, wanted ids of new() or fork() that are not"
                             " freed")
        if len({*known}) < len(known):
            twice = sorted({id for id in known if known.count(id) > 1})
            raise ValueError(f"{name}: got {twice} twice, wanted each sequence once in a call")
        return known

    def _grow(self, before: PoolState, ids: list[int], begins: list[int],
              counts: list[int]) -> tuple[PoolState, PoolState]:
        """The state, and it with room for positions begins[i] to begins[i] + counts[i] of sequence
        ids[i]. Where there is none, pages that no next row sees are given back before."""
        growth = Growth(ids, begins, counts, self.page_len)
        try:
            state, copies = with_room(before, growth)
        except MemoryError:
            dropped = without_unneeded(before, ids, self._window)
            state, copies = with_room(dropped, growth)
            self._publish(dropped, before)
            before = dropped
        for old, new in copies:  # nobody reads the new ones yet
            for array in (self._key, self._value):
                array[:, new] = array[:, old]
        return before, state


class Rows(NamedTuple):
    """Where the rows of a ragged call go, and what their sequences then see."""

    after: PoolState
    before: PoolState
    positions: Array     # (rows,)
    tables: Array        # (sequences, most): pages
    query_offset: Array  # (sequences,): where the first row stands among the keys of its pages
    key_starts: Array    # (sequences + 1,): how many keys each sequence has, added up
    dropped: Array       # (sequences,): positions that have no page any more
    places: tuple[Any, ...]  # of the rows in (pages, heads, positions, columns)


class PagedLayer:
    """The keys and values of one layer of a pool."""

    __slots__ = ("_index", "pool")

    def __init__(self, pool: PagedCache, index: int) -> None:
        self.pool = pool
        self._index = index

    @property
    def window(self) -> int | None:
        return self.pool.window

    @property
    def keep_first(self) -> int:
        return self.pool.keep_first

    @property
    def key(self) -> Array:
        """The pool (pages, kv_heads, page_len, head_dim), or blocks of it."""
        return self.pool._key[self._index]

    @property
    def value(self) -> Array:
        return self.pool._value[self._index]

    def __repr__(self) -> str:
        return f"{self.pool!r}[{self._index}]"

    def have_moved(self, ids: Collection[int]) -> bool:
        """Whether some row of these sequences stood elsewhere, as of `Pages`."""
        state = self.pool._state
        return any(state.sequences[id].has_moved
                   for id in self.pool._checked_ids(state, ids, "sequences"))

    def rows(self, ids: Collection[int], starts: Array, given: Array | None = None) -> Rows:
        """Room for rows starts[s] to starts[s + 1] of sequence ids[s], at given (axes, rows)."""
        before = self.pool._state
        known, counts = self._checked(before, ids, starts)
        begins = [before.sequences[id].lengths[self._index] for id in known]
        before, state = self.pool._grow(before, known, begins, counts.tolist())
        state = without_unneeded(state, known, self.pool._window)
        sequences = [state.sequences[id] for id in known]
        rows = self._rows_of(state, before, sequences, np.array(begins, np.int64), starts)
        elsewhere = np.zeros(starts[-1]) if given is None else (given != rows.positions).any(axis=0)
        moved = [part.any() for part in np.split(elsewhere, starts[1:-1])][:counts.size]
        return rows._replace(after=state._replace(sequences=state.sequences | {
            id: self._grown(sequence, int(count), bool(moves))
            for id, sequence, count, moves in zip(known, sequences, counts, moved, strict=True)}))

    def last_rows(self, ids: Collection[int], starts: Array, window: Any) -> Rows:
        """Rows starts[s] to starts[s + 1] are the last ones that sequence ids[s] has."""
        state = self.pool._state
        known, counts = self._checked(state, ids, starts)
        sequences = [state.sequences[id] for id in known]
        left, _ = as_sides(window)
        begins = []
        for sequence, count in zip(sequences, counts.tolist(), strict=True):
            length = sequence.lengths[self._index]
            if count > length:
                raise ValueError(f"query: got {count} rows of a sequence with append=False, wanted"
                                 f" at most those that it has, {length}")
            begins.append(length - count)
            start = self.pool._window.start(sequence)
            if count and left is not None and max(0, begins[-1] - left) < start:
                raise ValueError(f"query: got {count} rows of a sequence with append=False, wanted"
                                 f" fewer: what stood before {start} went back to the pool, and a"
                                 " window of the first one needs it")
        return self._rows_of(state, state, sequences, np.array(begins, np.int64), starts)

    def _checked(self, state: PoolState, ids: Collection[int],
                 starts: Array) -> tuple[list[int], Array]:
        """The ids, and how many rows each has."""
        known, counts = self.pool._checked_ids(state, ids, "sequences"), np.diff(starts)
        if len(known) != counts.size:
            raise ValueError(f"sequences: got {len(known)} ids, wanted {counts.size}, one for each"
                             " sequence of starts")
        return known, counts

    def _rows_of(self, after: PoolState, before: PoolState, sequences: list[Pages], first: Array,
                 starts: Array) -> Rows:
        """Rows of these sequences, the first of each at the position first[s]."""
        tables, counts, page_len = tables_of(sequences), np.diff(starts), self.pool.page_len
        dropped = np.array([sequence.first for sequence in sequences], np.int64)
        of = np.repeat(np.arange(counts.size), counts)  # (rows,): which sequence
        positions = np.arange(starts[-1]) - starts[of] + first[of]
        pages = tables[of, positions // page_len - dropped[of]]
        query_offset = first - dropped * page_len
        return Rows(after, before, positions, tables, query_offset,
                    np.concatenate([[0], np.cumsum(query_offset + counts)]), dropped * page_len,
                    (pages, slice(None), positions % page_len))

    def _grown(self, sequence: Pages, count: int, moves: bool) -> Pages:
        lengths = list(sequence.lengths)
        lengths[self._index] += count
        moved = sequence.moved if sequence.has_moved else None
        if moves and moved is None:
            moved = lengths[self._index] - count
        return sequence._replace(lengths=tuple(lengths), moved=moved)

    def write(self, rows: Rows, key: Array, value: Array) -> None:
        """key and value (rows, kv_heads, columns), where nobody reads yet."""
        array: Any
        for array, numbers in ((self.key, key), (self.value, value)):
            stored = rounded(numbers, array.dtype)
            # One expression, in which no signal handler runs: mha/_base/atomic.py.
            if not (self.pool._state is rows.before
                    and setitem(array, rows.places, stored) is None):
                raise changed_meanwhile()

    def publish(self, rows: Rows) -> None:
        """From now on the sequences have these rows."""
        self.pool._publish(rows.after, rows.before)
