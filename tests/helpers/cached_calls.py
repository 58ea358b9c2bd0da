"""Calls with a cache for the tests: a sequence in pieces, and guesses that are taken back."""

import copy
import pickle

import numpy as np

import mha


def itself(cache):
    return cache


WAYS = [itself, copy.copy, lambda cache: pickle.loads(pickle.dumps(cache))]  # to the same cache


def pieces(length, size, rng, most=60):
    """Bounds of pieces of this size, or of any below `most`."""
    at = 0
    while at < length:
        step = int(rng.integers(1, most)) if size is None else size
        yield at, min(at + step, length)
        at += step


def rows_of(scores, begin, end):
    """Of a mask or a bias over everything, what a piece of the queries sees."""
    if isinstance(scores, mha.BlockMask):
        return scores[begin:end, :end]
    return scores[..., begin:end, :end]


def in_pieces(layer, x, cache, size, seed=0, most=60, **options):
    """The results of all calls joined along the queries."""
    calls = []
    for begin, end in pieces(x.shape[1], size, np.random.default_rng(seed), most):
        own = {name: rows_of(given, begin, end) if name in ("mask", "bias") else given
               for name, given in options.items()}
        calls.append(layer(x[:, begin:end], cache=cache, **own))
    return np.concatenate(calls, axis=1)


def guess(layer, cache, x, whole, at, padding, rng):
    """One call of guesses behind the lengths `at` of a ragged batch, up to 60 for a sequence. Some
    first ones are right, with the bits of `whole`: how many, of each sequence."""
    batch, length, width = x.shape
    n = int(rng.choice([1, 2, 9, 60]))
    counts = np.minimum(rng.integers(0, n + 1, batch), length - at)
    right = np.array([rng.integers(0, count + 1) for count in counts])
    rows = np.full((batch, n, width), np.nan, np.float32)
    firsts = n - counts if padding == "left" else np.zeros(batch, int)
    for i, first in enumerate(firsts):
        rows[i, first:first + counts[i]] = rng.standard_normal((counts[i], width))
        rows[i, first:first + right[i]] = x[i, at[i]:at[i] + right[i]]
    output = layer(rows, cache=cache, lengths=counts, padding=padding)
    for i, first in enumerate(firsts):
        assert np.array_equal(output[i, first:first + right[i]], whole[i, at[i]:at[i] + right[i]])
    return right
