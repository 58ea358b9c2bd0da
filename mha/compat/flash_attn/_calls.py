"""Calls of the core, in flash-attention's layouts: (batch, len, heads, head_dim), or ragged
(total_len, heads, head_dim)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mha import _core
from mha._functions.options import AttentionOptions

Array = NDArray[Any]


def slopes_of(slopes: Array | None, s: int) -> Array | None:
    """Those of one sequence, (heads,); of no sequences, none."""
    if slopes is None or slopes.ndim == 1:
        return slopes
    return slopes[s] if len(slopes) else None


def by_token(q: Array, k: Array, v: Array, options: AttentionOptions) -> tuple[Array, Array]:
    """Output (batch, query_len, heads, head_dim) and lse (batch, heads, query_len) of arrays."""
    query, key, value = (array.swapaxes(1, 2) for array in (q, k, v))
    output, lse = _core.scaled_dot_product_attention(query, key, value, options, return_lse=True)
    return np.ascontiguousarray(output.swapaxes(1, 2)), lse


class RaggedCall:
    """Attention of a ragged batch, one call of the core: or one a sequence, where slopes are those
    of sequences. Forward and backward take and give arrays (total_len, heads, head_dim)."""

    def __init__(self, query_starts: Array, key_starts: Array, slopes: Array | None,
                 options: AttentionOptions) -> None:
        self.starts = query_starts, key_starts
        self.by_sequence = slopes is not None and slopes.ndim == 2 and len(slopes) > 0
        self.slopes, self.options = slopes, options

    def forward(self, query: Array, key: Array, value: Array, *, save: bool = False) -> Any:
        """(output, lse); with save ((output, lse), what backward takes)."""
        if not self.by_sequence:
            return _core.scaled_dot_product_attention_varlen(
                query, key, value, *self.starts,
                self.options._replace(alibi=slopes_of(self.slopes, 0)),
                return_lse=True, save=save)
        found = [self._sequence(s, query[rows], key[columns], value[columns], save=save)
                 for s, (rows, columns) in enumerate(self.rows())]
        results, saved = zip(*found, strict=True) if save else (found, None)
        outputs, lses = zip(*results, strict=True)
        output = np.concatenate([output[0].swapaxes(0, 1) for output in outputs])
        joined = np.ascontiguousarray(output), np.concatenate([lse[0] for lse in lses], axis=1)
        return (joined, saved) if save else joined

    def backward(self, saved: Any, grad_output: Array, grad_lse: Array | None,
                 wanted: set[str]) -> dict[str, Array | None]:
        """The gradients of query, key and value by name."""
        if not self.by_sequence:
            return _core.scaled_dot_product_attention_varlen_backward(saved, grad_output, grad_lse,
                                                                      wanted)
        found = [_core.scaled_dot_product_attention_backward(
            one, grad_output[rows].swapaxes(0, 1)[None],
            None if grad_lse is None else grad_lse[None, :, rows], wanted)
            for one, (rows, _) in zip(saved, self.rows(), strict=True)]
        return {name: np.concatenate([np.asarray(one[name])[0].swapaxes(0, 1) for one in found])
                for name in wanted}

    def rows(self) -> Iterator[tuple[slice, slice]]:
        """Those of each sequence's queries and keys."""
        bounds = map(itertools.pairwise, self.starts)
        for (q_begin, q_end), (k_begin, k_end) in zip(*bounds, strict=True):
            yield slice(q_begin, q_end), slice(k_begin, k_end)

    def _sequence(self, s: int, *rows: Array, save: bool) -> Any:
        options = self.options._replace(alibi=slopes_of(self.slopes, s))
        if options.dropout:
            options = options._replace(dropout_offsets=(s, 0, 0, 0))
        query, key, value = (array.swapaxes(0, 1)[None] for array in rows)
        return _core.scaled_dot_product_attention(query, key, value, options, return_lse=True,
                                                  save=save)
