"""block_table: position p of sequence s is row p % page_block_size of page
block_table[s, p // page_block_size]. Pools are (num_blocks, page_block_size, kv_heads, columns)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mha import _core
from mha._base.arguments import as_int_array, detached_array
from mha.compat._shared.tensors import is_tensor
from mha.compat.flash_attn._calls import RaggedCall, slopes_of

Array = NDArray[Any]

PAGES = "(num_blocks, page_block_size, kv_heads, head_dim)"
READ_IN_PLACE = 128  # of whose multiples a page must be for the core


def as_table(block_table: Any, sequences: int) -> Array:
    """(sequences, most). Entries that nobody needs may be anything, so none is looked at here."""
    table = as_int_array(detached_array(block_table, "block_table"), "block_table")
    if table.ndim != 2 or len(table) != sequences:
        raise ValueError(f"block_table: got shape {table.shape}, wanted ({sequences},"
                         " max_num_blocks_per_seq), a row for each sequence of q")
    return table


def check_pages(table: Array, lengths: Array, pool: Any) -> None:
    """The pages of positions 0 to lengths[s] of each sequence are there."""
    pages, page_len = int(pool.shape[0]), int(pool.shape[1])
    most = table.shape[1] * page_len
    if lengths.max(initial=0) > most:
        raise ValueError(f"block_table: got rows of {table.shape[1]} pages of {page_len}, wanted"
                         f" enough for {lengths.max()} positions")
    needed = np.arange(table.shape[1]) * page_len < lengths[:, None]
    wrong = np.argwhere(needed & ((table < 0) | (table >= pages)))
    if len(wrong):
        s, i = wrong[0].tolist()
        raise ValueError(f"block_table: got {table[s, i]} at [{s}, {i}], wanted a page from 0 to"
                         f" {pages - 1}, since sequence {s} has {lengths[s]} positions")


def check_unshared(table: Array, held: Array, new_len: int, pool: Array) -> None:
    """Positions held[s] to held[s] + new_len lie where nothing else does: a page that sequences
    share, with room behind what they share, would get one's keys over another's."""
    pages, page_len = pool.shape[:2]
    if not new_len:
        return
    written = places(table, held[:, None] + np.arange(new_len), page_len)
    counts = np.clip(held[:, None] - np.arange(table.shape[1]) * page_len, 0, page_len)
    full = np.zeros(pages, np.int64)  # how many rows of each page are held
    np.maximum.at(full, table[counts > 0], counts[counts > 0])
    rows = written[0] * page_len + written[1]
    over = written[1] < full[written[0]]
    _, firsts = np.unique(rows, return_index=True)
    over |= ~np.isin(np.arange(rows.size), firsts).reshape(rows.shape)
    if over.any():
        s = int(np.argwhere(over)[0, 0])
        raise ValueError(f"block_table: got page {written[0][over][0]}, into which k and v of"
                         f" sequence {s} would be written over another position, wanted a page of"
                         " its own: a copy of one that is shared")


def places(table: Array, positions: Array, page_len: int) -> tuple[Array, Array]:
    """Pages and rows of them of positions (sequences, len)."""
    columns = positions // max(1, page_len)
    return table[np.arange(len(table))[:, None], columns], positions % max(1, page_len)


def gathered(pools: tuple[Any, ...], table: Array, key_starts: Array) -> list[Any]:
    """Rows (total_len, kv_heads, columns) of each pool, one sequence behind the other: a copy,
    through which gradients of tensors go."""
    sequences = np.repeat(np.arange(len(table)), np.diff(key_starts))
    positions = np.arange(key_starts[-1]) - key_starts[sequences]
    page_len = max(1, int(pools[0].shape[1]))
    where: tuple[Any, ...] = table[sequences, positions // page_len], positions % page_len
    if is_tensor(pools[0]):
        import torch

        where = tuple(map(torch.from_numpy, where))
    return [pool[where] for pool in pools]


class PagedCall(RaggedCall):
    """The same of keys and values in pools, without a backward pass."""

    def __init__(self, *arguments: Any, table: Array) -> None:
        super().__init__(*arguments)
        self.table = table

    def forward(self, query: Array, key: Array, value: Array, *, save: bool = False) -> Any:
        """(output, lse). Pools that the core does not read where they lie are gathered."""
        assert not save
        if not _are_read_in_place(query, key, value):
            return super().forward(query, *gathered((key, value), self.table, self.starts[1]))
        if not self.by_sequence:
            return self._paged(query, key, value, *self.starts, self.table,
                               slopes_of(self.slopes, 0))
        found = [self._paged(query[rows], key, value, np.array([0, rows.stop - rows.start]),
                             np.array([0, columns.stop - columns.start]), self.table[s:s + 1],
                             slopes_of(self.slopes, s))
                 for s, (rows, columns) in enumerate(self.rows())]
        outputs, lses = zip(*found, strict=True)
        return np.concatenate(outputs), np.concatenate(lses, axis=1)

    def _paged(self, query: Array, key: Array, value: Array, query_starts: Array,
               key_starts: Array, table: Array, slopes: Array | None) -> Any:
        return _core.scaled_dot_product_attention_varlen(
            query, key.swapaxes(1, 2), value.swapaxes(1, 2), query_starts, key_starts,
            self.options._replace(alibi=slopes), return_lse=True, page_tables=table)


def _are_read_in_place(query: Array, key: Array, value: Array) -> bool:
    page_len = key.shape[1]
    return page_len > 0 and page_len % READ_IN_PLACE == 0 and all(
        pool.dtype == query.dtype and pool.dtype.isnative and pool.flags.aligned
        and pool.strides[3] == pool.itemsize for pool in (key, value))
