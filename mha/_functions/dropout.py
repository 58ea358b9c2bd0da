"""Dropout on the attention weights: the public mask, and the seed of a call."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mha import _core
from mha._base.arguments import as_ints, as_seed, no_memory
from mha._base.keywords import checks_keywords
from mha._functions.options import DEFAULTS, AttentionOptions, RandomSource

__all__ = ["dropout_mask"]


@checks_keywords
def dropout_mask(shape: Sequence[int], p: float, seed: int, *,
                 offsets: Sequence[int] = (0, 0, 0, 0)) -> NDArray[np.bool_]:
    """The mask that `dropout=p, rng=seed` applies to the attention weights: True = kept.

    Parameters
    ----------
    shape : tuple of int
        The shape of the weights: (query_len, key_len), (batch, query_len, key_len) or
        (..., heads, query_len, key_len).
    p : float
        The probability of dropping a weight, in [0, 1).
    seed : int
        The key of the generator, in [0, 2**64).
    offsets : four ints >= 0 (batch, head, query, key)
        Which of a larger mask the first ones here are: `dropout_offsets` of attention.

    Returns
    -------
    numpy.ndarray of bool, shaped `shape`.

    Raises
    ------
    ValueError: p outside [0, 1), a negative or too large seed, fewer than two axes, offsets that
    are not four or negative. TypeError: shape or offsets not of ints, p no number, seed no int.

    Notes
    -----
    Philox4x32-7 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"): the seed is
    the key, (key index // 8, query index, head, batch index) the counter, and each of the eight
    16-bit words of a result, low first, decides one key: kept iff word >= round(65536 p).

    >>> mha.dropout_mask((4, 10), p=0.5, seed=7).shape
    (4, 10)
    """
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise TypeError(f"shape: got {shape!r}, wanted a tuple of ints") from None
    firsts = tuple(as_ints(offsets, "offsets"))
    if any(size >= 2**63 for size in sizes):  # the core counts in int64
        raise no_memory("shape", sizes)
    return _core.dropout_mask(sizes, p, as_seed(seed, "seed"), firsts)


class DrawnOptions:
    """The options of one call with the seed in rng's place, for `with`. Nothing is drawn where
    there is no dropout; and where the call fails, a Generator stands where it stood."""

    __slots__ = ("options", "source", "state")

    def __init__(self, options: AttentionOptions) -> None:
        self.source: np.random.BitGenerator | None = None
        self.options = options
        dropout = options.dropout
        if options.rng is None and type(dropout) is float and dropout == 0.0:
            return
        self._draw(options.dropout, options.rng)

    def _draw(self, dropout: Any, rng: RandomSource) -> None:
        if isinstance(dropout, (int, float, np.number)) and dropout == 0:
            check_rng(rng)
            self.options = self.options._replace(rng=None)
            return
        if isinstance(rng, (np.random.Generator, np.random.BitGenerator)):
            self.source = np.random.default_rng(rng).bit_generator
            self.state = self.source.state
        self.options = self.options._replace(rng=seed_from(rng))

    def __enter__(self) -> AttentionOptions:
        return self.options

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        if raised is not None and self.source is not None:
            self.source.state = self.state


def drawn(options: AttentionOptions) -> DrawnOptions:
    """For `with drawn(options) as drawn_options`; quickly, where there are none."""
    return NOTHING_DRAWN if options is DEFAULTS else DrawnOptions(options)


def seed_from(rng: RandomSource) -> int:
    """The 64-bit seed of one call: None draws fresh entropy, an int is the seed, and a NumPy
    Generator (or anything `numpy.random.default_rng` takes) gives one uint64."""
    check_rng(rng)
    if rng is None:
        return int.from_bytes(os.urandom(8), "little")
    if isinstance(rng, (int, np.integer)):
        return int(rng)
    return int(np.random.default_rng(rng).integers(2**64, dtype=np.uint64))


def check_rng(rng: object) -> None:
    """Raise unless rng is None, an int that is a seed, or a source of random numbers."""
    if rng is None:
        return
    if isinstance(rng, (int, np.integer)) and not isinstance(rng, bool):
        as_seed(rng, "rng")
    elif not isinstance(
            rng, (np.random.Generator, np.random.BitGenerator, np.random.SeedSequence)):
        raise TypeError(
            f"rng: got {type(rng).__name__}, wanted None, an int or a numpy.random.Generator")


NOTHING_DRAWN = DrawnOptions(DEFAULTS)
