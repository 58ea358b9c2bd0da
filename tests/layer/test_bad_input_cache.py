"""Bad input to a KVCache and to layers with one: as test_bad_input.py."""

import numpy as np
import pytest
from bad_input import REAL, WRONG_INTS, M, T, V, check, f, labels, row, rows

import mha


def make(a, **changed):
    return mha.KVCache(**{"batch": 2, "kv_heads": 4, "head_dim": 3} | changed)


def append(a, **changed):
    a.cache.append(**{"key": f(2, 4, 5, 3), "value": f(2, 4, 5, 3)} | changed)


def append_to_memory(a, **changed):
    a.memory.append(**{"key": f(2, 4, 5, 3), "value": f(2, 4, 5, 3)} | changed)


def truncate(a, lengths):
    a.cache.truncate(lengths)


def truncate_window(a, lengths):
    a.windowed.truncate(lengths)


def keep(a, **changed):
    a.cache.keep(**{"start": [3, 1], "indices": [[0], [0]]} | changed)


def keep_window(a, **changed):
    a.windowed.keep(**{"start": 299, "indices": [[0], [0]]} | changed)


def select(a, indices):
    a.cache.select(indices)


def call(a, **changed):
    return a.layer(**{"query": a.x, "cache": a.cache} | changed)


def call_again(a, **changed):
    return a.layer(**{"query": a.x[:, :2], "cache": a.cache, "append": False} | changed)


def call_window_again(a, **changed):
    return a.layer(**{"query": a.x[:, :1], "cache": a.windowed, "append": False} | changed)


def call_window(a, **changed):
    return a.layer(**{"query": a.x, "cache": a.windowed} | changed)


def call_memory(a, **changed):
    return a.layer(**{"query": a.x, "cache": a.memory} | changed)


def call_without(a, **changed):
    return a.layer(a.x, **changed)


def other_widths(a, **changed):
    layer = mha.MultiHeadAttention(12, 4, query_dim=12, key_dim=11)
    return layer(a.x, **changed)


def new_cache(a, **changed):
    return a.layer.new_cache(**{"batch": 2} | changed)


def new_memory(a, **changed):
    return a.layer.new_memory(**{"key": a.x} | changed)


LENGTHS = [
    ([6, 0], V, "[6, 0]", "lengths in [0, 5]"), ([-1, 0], V, "[-1, 0]", "lengths in [0, 5]"),
    ([1], V, "shape (1,)", "(2,)"), ([[1, 2]], V, "shape (1, 2)", "(2,)"),
    ([1.0, 2.0], T, "an array of float64", "ints"), ([True, False], T, "an array of bool", "ints"),
    ("ab", T, "an array of <U2", "ints"), (2**63, V, str(2**63 - 1), "lengths in [0, 5]")]
DECIDED = [
    ("key_lengths", [5, 5]), ("query_offset", 0)]
CASES = [
    *(case for name in ("batch", "kv_heads", "head_dim", "value_head_dim", "capacity", "window",
                        "keep_first") for case in rows(make, name, WRONG_INTS)),
    row(make, "keep_first", 4, V, "4 without a window", "window= too"),
    row(make, "keep_first", -1, V, "-1", "at least 0"),
    row(make, "batch", 0, V, "0", "at least 1"), row(make, "capacity", -1, V, "-1", "at least 0"),
    row(make, "window", 0, V, "0", "at least 1"),
    row(make, "dtype", np.int32, T, "int32", "float32 or float64"),
    ("capacity", lambda a: make(a, capacity=2**62), M, "capacity", str(2**62), "fits in memory"),
    ("kv_heads", lambda a: make(a, kv_heads=2**62, capacity=1), M, "capacity", str(2**62),
     "fits in memory"),
    row(append, "key", f(2, 4, 3), V, "shape (2, 4, 3)", "(2, 4, n, 3)"),
    row(append, "key", f(3, 4, 5, 3), V, "shape (3, 4, 5, 3)", "(2, 4, n, 3)"),
    row(append, "key", f(2, 4, 5, 2), V, "shape (2, 4, 5, 2)", "(2, 4, n, 3)"),
    row(append, "value", f(2, 4, 4, 3), V, "shape (2, 4, 4, 3)", "(2, 4, 5, 3)"),
    row(append, "value", f(1, 4, 5, 3), V, "shape (1, 4, 5, 3)", "(2, 4, 5, 3)"),
    row(append, "key", 1j * f(2, 4, 5, 3), T, "an array of complex64", REAL),
    row(append, "value", f(2, 4, 5, 3) > 0, T, "an array of bool", REAL),
    *rows(append, "lengths", LENGTHS),
    ("memory", append_to_memory, V, "cache", "an append to a memory", "new_cache()"),
    row(truncate, "lengths", [6, 2], V, "[6, 2]", "that are there, [5, 2]"),
    row(truncate, "lengths", [-1, 2], V, "[-1, 2]", "from 0"),
    row(truncate, "lengths", 3, V, "[3, 3]", "that are there, [5, 2]"),
    row(truncate, "lengths", [1, 2, 3], V, "shape (3,)", "(2,)"),
    row(truncate, "lengths", None, T, "None", "an array"),
    row(truncate_window, "lengths", [300, 130], V, "[300, 130]", "at least 265: what stood"),
    row(truncate_window, "lengths", 0, V, "[0, 0]", "at least 265"),
    row(keep, "start", [3, 3], V, "[3, 3]", "from 0 to the lengths that are there, [5, 2]"),
    row(keep, "start", -1, V, "[-1, -1]", "positions from 0"),
    row(keep, "start", [1, 2, 3], V, "shape (3,)", "(2,)"),
    row(keep, "start", 1.5, T, "an array of float64", "ints"),
    row(keep, "start", None, T, "None", "an array"),
    row(keep, "indices", [[0, 1]], V, "shape (1, 2)", "(2, k)"),
    row(keep, "indices", [0, 0], V, "shape (2,)", "(2, k)"),
    row(keep, "indices", [[0], [1]], V, "[1]", "ints in [0, 1), which the sequence has"),
    row(keep, "indices", [[-1], [0]], V, "[-1]", "ints in [0, 2)"),
    row(keep, "indices", [[1, 1], [0, 1]], V, "[1, 1]", "each position once"),
    row(keep, "indices", [[0.0], [0.0]], T, "an array of float64", "ints"),
    row(keep, "lengths", [2, 0], V, "[2, 0]", "lengths in [0, 1]"),
    row(keep, "lengths", [0.5, 0], T, "an array of float64", "ints"),
    row(keep_window, "start", 255, V, "[255, 255]", "at least 256: what stood before is dropped"),
    row(keep_window, "start", 260, V, "[260, 260], with indices lengths of [261, 261]",
        "at least 265: what stood"),
    row(select, "indices", [2], V, "[2]", "indices into 2 sequences"),
    row(select, "indices", [-1, 0], V, "[-1, 0]", "indices into 2 sequences"),
    row(select, "indices", [], V, "shape (0,)", "one index or more"),
    row(select, "indices", 1, V, "shape ()", "one index or more"),
    row(select, "indices", [[0]], V, "shape (1, 1)", "one index or more"),
    row(select, "indices", [0.0], T, "an array of float64", "ints"),
    row(select, "indices", [True, False], T, "an array of bool", "ints"),
    row(call, "key", f(2, 5, 12), V, "one with a cache", "none: the rows of query"),
    row(call, "value", f(2, 5, 12), V, "one with a cache", "none: the rows of query"),
    row(call, "training", True, V, "True with a cache", "False"),
    row(call, "training", 1, T, "int", "True or False"),
    *(row(call, name, value, V, "one with a cache", "none") for name, value in DECIDED),
    *(row(call_memory, name, value, V, "one with a cache", "none") for name, value in DECIDED),
    row(call, "empty_rows", "uniform", V, '"uniform" with a cache', '"zeros"'),
    row(call, "padding", "middle", V, "'middle'", '"right" or "left"'),
    row(call, "padding", None, T, "NoneType", '"right" or "left"'),
    row(call_without, "padding", f(2), T, "ndarray", '"right" or "left"'),
    row(call_without, "padding", "left", V, "one without a cache", "cache= too"),
    row(call_without, "lengths", [5, 5], V, "some without a cache", "cache= too, or key_lengths="),
    *rows(call, "lengths", LENGTHS),
    row(call_again, "append", 0, T, "int", "True or False"),
    row(call_again, "query", f(2, 3, 12), V, "[3, 3] rows with append=False", "has, [5, 2]"),
    row(call_again, "lengths", [3, 1], V, "[3, 1]", "lengths in [0, 2]"),
    row(call_without, "append", False, V, "False without a cache", "cache= too"),
    row(call_memory, "append", False, V, "False with a memory", "none"),
    row(call_window_again, "query", f(2, 40, 12), V, "[40, 40] rows with append=False", "fewer"),
    row(call, "cache", "cache", T, "str", "one of new_cache()"),
    row(call, "cache", mha.KVCache(3, 4, 3), V, "one of 3 sequences", "2 as query has"),
    row(call, "cache", mha.KVCache(2, 2, 3), V, "(2, 3, 3)", "(4, 3, 3)"),
    row(call, "cache", mha.KVCache(2, 4, 2), V, "(4, 2, 2)", "(4, 3, 3)"),
    row(call, "cache", mha.KVCache(2, 4, 3, 2), V, "(4, 3, 2)", "(4, 3, 3)"),
    row(call, "cache", mha.KVCache(2, 4, 3, dtype=float), T, "float64", "float32"),
    row(other_widths, "cache", mha.KVCache(2, 4, 3), V, "(12, 11, 11)", "new_memory()"),
    row(call, "query", None, T, "None", "an array"),
    row(call, "causal", 7, T, "int", "True or False"),
    row(call, "query", f(12), V, "shape (12,)", "(batch, len, dim) or (len, dim)"),
    row(call, "query", f(2, 5, 11), V, "shape (2, 5, 11)", "a last axis of 12"),
    ("one sequence", lambda a: call(a, query=f(5, 12)), V, "cache", "one of 2 sequences",
     "1 as query has; x[:, i] is no token of each sequence but one sequence: write x[:, i:i + 1]"),
    row(call, "query", f(2, 5, 12).astype(complex), T, "an array of complex128", REAL),
    row(call, "query", f(2, 5, 12) > 0, T, "an array of bool", REAL),
    row(call, "mask", f(2, 5, 10) > 0, V, "3 dimensions", "mask[:, None]"),
    row(call, "bias", f(10), V, "1 dimensions", "bias[:, None]"),
    row(call, "mask", f(5, 5) > 0, V, "5 columns", "10: one for every position"),
    row(call, "bias", f(2, 1, 5, 9), V, "9 columns", "10: one for every position"),
    row(call, "mask", f(4, 10) > 0, V, "shape (4, 10)", "the scores (2, 4, 5, 10)"),
    row(call, "mask", f(5, 10), T, "an array of float32", "bool with True = attend"),
    row(call, "head_gate", f(3), V, "shape (3,)", "(4,)"),
    row(call, "softcap", -1.0, V, "-1.0", "a number above 0"),
    row(call, "rng", "7", T, "str", "None, an int or a numpy.random.Generator"),
    row(call_window, "window", (10, 0), V, "(10, 0) with a cache of window 10", "at most 9"),
    row(call_window, "window", (None, None), V, "(None, None) with a cache", "at most 9"),
    row(call_window, "window", (1.5, 0), T, "float", "an int"),
    row(call_window, "window", 3, T, "int", "a pair (left, right)"),
    row(call_memory, "causal", True, V, "one with a memory", "none"),
    row(call_memory, "window", (1, 0), V, "one with a memory", "none"),
    row(call_memory, "mask", f(5, 4) > 0, V, "4 columns", "5: one for every position"),
    *rows(new_cache, "batch", WRONG_INTS), *rows(new_cache, "capacity", WRONG_INTS),
    row(new_cache, "dtype", np.int8, T, "int8", "float32 or float64"),
    row(new_memory, "key", f(12), V, "shape (12,)", "(batch, len, dim) or (len, dim)"),
    row(new_memory, "key", f(2, 5, 11), V, "shape (2, 5, 11)", "a last axis of 12"),
    row(new_memory, "value", f(2, 4, 12), V, "2 sequences of 4 rows", "2 of 5 as key has"),
    row(new_memory, "key_lengths", [6, 1], V, "[6, 1]", "lengths in [0, 5]"),
    row(new_memory, "key_positions", [1, 2], V, "shape (2,)", "(5,) or (2, 5)"),
    row(new_memory, "key_positions", f(5), T, "an array of float32", "ints"),
]


@pytest.mark.parametrize("case", CASES, ids=labels(CASES))
def test_bad_call(case):
    check(case)
