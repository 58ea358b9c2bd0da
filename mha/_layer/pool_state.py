"""What a PagedCache holds at one moment: whose pages are whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mha._layer.cache_state import first_needed

Array = NDArray[Any]


class Pages(NamedTuple):
    """A sequence: position p lies in page pages[p // page_len - first]; before what is dropped, in
    pages[p // page_len]."""

    pages: tuple[int, ...] = ()
    first: int = 0                 # pages that are dropped, behind those that a pool keeps
    lengths: tuple[int, ...] = ()  # positions that each layer has appended
    moved: int | None = None       # from where on rows may stand elsewhere, as of `CacheState`

    @property
    def has_moved(self) -> bool:
        """Whether some row that is there may stand elsewhere."""
        return self.moved is not None and self.moved < max(self.lengths)


class PageWindow(NamedTuple):
    """Which positions a pool keeps once others follow; pages have page_len."""

    size: int | None  # what a query needs, its own position among them; None: all
    keep_first: int   # and so many from 0 on
    page_len: int

    @property
    def first_pages(self) -> int:
        """Those that the first positions stand in."""
        return -(-self.keep_first // self.page_len)

    def start(self, sequence: Pages) -> int:
        """The first position behind what is dropped."""
        return (self.first_pages + sequence.first) * self.page_len if sequence.first else 0


class PoolState(NamedTuple):
    sequences: dict[int, Pages]
    free: tuple[int, ...]        # pages, the next one last
    uses: dict[int, int]         # of how many sequences a page is, where it is of more than one


class Growth(NamedTuple):
    """Which positions sequences are to have room for: begins[i] to begins[i] + counts[i]."""

    ids: list[int]
    begins: list[int]
    counts: list[int]
    page_len: int


def with_sequence(state: PoolState, id: int, sequence: Pages) -> PoolState:
    return state._replace(sequences={**state.sequences, id: sequence})


def without(state: PoolState, pages: Sequence[int]) -> PoolState:
    """One use less of each of these pages; those of no more uses are free."""
    uses, free = dict(state.uses), []
    for page in pages:
        left = uses.pop(page, 1) - 1
        if left > 1:
            uses[page] = left
        elif left == 0:
            free.append(page)
    return state._replace(free=(*state.free, *free), uses=uses)


def with_room(state: PoolState, growth: Growth) -> tuple[PoolState, list[tuple[int, int]]]:
    """With pages of their own for the positions; and what is to be copied, from page to page: those
    that others share. New pages are such as no sequence of the state has, and a page that several
    share is copied for each: where the call fails, all of them have what they had."""
    copies: list[tuple[int, int]] = []
    free = len(state.free)
    for id, begin, count in zip(growth.ids, growth.begins, growth.counts, strict=True):
        sequence = state.sequences[id]
        pages = list(sequence.pages)
        first = begin // growth.page_len - sequence.first
        end = -(-(begin + count) // growth.page_len) - sequence.first
        shared = [i for i in range(first, min(end, len(pages)))
                  if count and state.uses.get(pages[i], 1) > 1]
        missing = max(0, end - len(pages)) if count else 0
        needed = len(shared) + missing
        if not needed:
            continue
        left = len(state.free) - needed
        if left < 0:
            shares = ", beside copies of pages that sequences share" * bool(shared or copies)
            raise MemoryError(f"pages: got {sum(growth.counts)} positions more, wanted so many that"
                              f" {free} free pages of {growth.page_len} hold them{shares}: free(id)"
                              " gives those of a sequence back")
        taken = state.free[left:]
        state = state._replace(free=state.free[:left])
        for i, page in zip(shared, taken):
            copies.append((pages[i], page))
            pages[i] = page
        pages += taken[len(shared):]
        state = with_sequence(state, id, sequence._replace(pages=tuple(pages)))
    return without(state, [old for old, _ in copies]), copies


def without_unneeded(state: PoolState, ids: list[int], window: PageWindow) -> PoolState:
    """Without the pages of these sequences that none of their next rows sees."""
    kept = window.first_pages
    for id in ids if window.size is not None else ():
        sequence = state.sequences[id]
        needed = first_needed(min(sequence.lengths), window.size) // window.page_len
        dropped = min(needed - sequence.first - kept, len(sequence.pages) - kept)
        if dropped > 0:
            rest = sequence._replace(pages=sequence.pages[:kept] + sequence.pages[kept + dropped:],
                                     first=sequence.first + dropped)
            state = without(with_sequence(state, id, rest), sequence.pages[kept:kept + dropped])
    return state


def tables_of(sequences: list[Pages]) -> Array:
    """(sequences, most): pages, 0 behind those of a sequence."""
    pages = [sequence.pages for sequence in sequences]
    tables = np.zeros((len(pages), max(map(len, pages), default=0)), np.int64)
    for row, of_sequence in zip(tables, pages, strict=True):
        row[:len(of_sequence)] = of_sequence
    return tables
