"""Methods of a cache in the middle of each other, as a signal handler may call them: each has its
whole effect or none, and one that has none says so."""

import copy
import pickle

import numpy as np
import pytest
from interrupts import at_every

import mha
from mha._base import pieces
from mha._layer import cache_state

LAYER = mha.MultiHeadAttention(4, 2, num_kv_heads=1, rng=0).freeze()
X = np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)
FILES = {"mha._layer.kv_cache", "mha._layer.cache_state", "mha._layer.cache_room",
         "mha._layer.cache_pickle", "mha._layer.cached_call",
         "mha._base.pieces", "mha._base.atomic"}


def rows(n, seed):
    return np.random.default_rng(seed).standard_normal((3, 1, n, 2)).astype(np.float32)


# What each gives says what it saw; the three sequences stay three.
CALLS = {
    "append": lambda cache: cache.append(rows(2, 1), rows(2, 2)),
    "append some": lambda cache: cache.append(rows(3, 3), rows(3, 4), lengths=[3, 0, 1]),
    "append much": lambda cache: cache.append(rows(17, 5), rows(17, 6)),
    "call": lambda cache: LAYER(X[:, :2], cache=cache).tobytes(),
    "call with padding": lambda cache: LAYER(X[:, 2:4], cache=cache, lengths=[1, 2, 0],
                                             padding="left").tobytes(),
    "truncate": lambda cache: cache.truncate([3, 0, 1]),
    "keep": lambda cache: cache.keep([3, 0, 2], [[1, 2], [1, 0], [0, 0]], [2, 2, 1]),
    "select": lambda cache: cache.select([2, 0, 0]),
    "reset": lambda cache: cache.reset(),
    "copy": lambda cache: seen(copy.copy(cache)),
    "pickle": lambda cache: seen(pickle.loads(pickle.dumps(cache))),
    "call that only reads": lambda cache: LAYER(X[:, :2], cache=cache, append=False).tobytes(),
    "read": lambda cache: real(cache),
}
READING = ("copy", "pickle", "call that only reads", "read")


def seen(cache):
    """All that can be seen; the rows of one more sequence show what is behind the others."""
    return cache.lengths.tolist(), cache.start, cache.key.tobytes(), cache.value.tobytes()


def real(cache):
    """The rows of each sequence: behind them a call in progress may have written already."""
    ends = (cache.lengths - cache.start).tolist()
    return ends, [array[i, :, :end].tobytes() for array in (cache.key, cache.value)
                  for i, end in enumerate(ends)]


def seen_later(cache):
    now = seen(cache)
    cache.append(rows(12, 7), rows(12, 8), lengths=[0, 12, 1])
    return now, seen(cache)


def filled(window):
    cache = mha.KVCache(3, 1, 2, capacity=20, window=window)
    cache.append(rows(6, 9), rows(6, 10), lengths=[6, 2, 3])
    return cache


def tried(name, cache):
    try:
        return CALLS[name](cache)
    except (RuntimeError, ValueError) as error:  # a ValueError: lengths that are not there any more
        return type(error)


def one_after_the_other(window, *names):
    cache = filled(window)
    results = [tried(name, cache) for name in names]
    return results, seen_later(cache)


def check(outer, inner, window, first):
    """At every third line of the outer call."""
    def interrupt(cache):
        inside.append(tried(inner, cache))

    inside, (inner_alone, wanted) = [], one_after_the_other(window, inner)
    allowed = [([RuntimeError, *inner_alone], wanted)]
    allowed.append(one_after_the_other(window, outer, inner))
    results, wanted = one_after_the_other(window, inner, outer)
    allowed.append((results[::-1], wanted))
    for cache, result in at_every("line", lambda cache: tried(outer, cache), interrupt,
                                  lambda: filled(window), FILES, first=first, every=3):
        assert ([result, inside.pop()], seen_later(cache)) in allowed, inner


@pytest.mark.thorough
@pytest.mark.parametrize("outer", [name for name in CALLS if name != "read"])
def test_each_in_the_middle_of_each(outer, monkeypatch):
    for module in (cache_state, pieces):  # so that small arrays have pieces
        monkeypatch.setattr(module, "FEW", 2)
        monkeypatch.setattr(module, "PIECE", 100)
    for i, inner in enumerate(CALLS):
        if not (outer in READING and inner in READING):
            check(outer, inner, (None, 2)[i % 2], i % 3)


def test_the_error_says_what_happened(monkeypatch):
    """What the attack found: an append during select was lost."""
    cache = filled(None)
    selected = cache_state.resized

    def resized(*arguments):
        CALLS["append"](cache)
        return selected(*arguments)

    monkeypatch.setattr(mha._layer.kv_cache, "resized", resized)
    with pytest.raises(RuntimeError, match="cache: got changed by one call in the midst of anothe"):
        cache.select([0, 1, 1])
    assert cache.lengths.tolist() == [8, 4, 5]
