"""Bad input to multi_head_attention, the layer and the masks: as test_bad_input.py."""

import bad_input
import numpy as np
import pytest
from bad_input import (
    HUGE,
    TOO_LARGE,
    WRONG_ARRAYS,
    WRONG_FLAGS,
    WRONG_INTS,
    WRONG_NUMBERS,
    WRONG_RNGS,
    M,
    T,
    V,
    f,
    number,
    row,
    rows,
)

import mha

COMPLEX = 1j * f(12, 12)


def figure(a, **changed):
    good = {"query": a.x, "key": a.x, "value": a.x, "W_q": a.W, "W_k": a.W, "W_v": a.W, "W_o": a.W,
            "num_heads": 4}
    return mha.multi_head_attention(**good | changed)


def figure_vjp(a, **changed):
    good = {"query": a.x, "key": a.x, "value": a.x, "W_q": a.W, "W_k": a.W, "W_v": a.W, "W_o": a.W,
            "num_heads": 4}
    return mha.multi_head_attention_vjp(**good | changed)


def figure_of_one(a, **changed):
    return figure(a, **{"query": a.x[0], "key": a.x[0], "value": a.x[0]} | changed)


def make(a, **changed):
    return mha.MultiHeadAttention(**{"embed_dim": 12, "num_heads": 4} | changed)


def call(a, **changed):
    return a.layer(**{"query": a.x} | changed)


def call_frozen(a, **changed):
    return a.frozen(**{"query": a.x} | changed)


def assign(a, **changed):
    for name, array in changed.items():
        setattr(a.layer, name, array)


def assign_frozen(a, **changed):
    for name, array in changed.items():
        setattr(a.frozen, name, array)


def assign_without_bias(a, **changed):
    layer = mha.MultiHeadAttention(12, 4, use_bias=False)
    for name, array in changed.items():
        setattr(layer, name, array)


def load(a, **changed):
    a.layer.load_parameters(**changed)


def load_one(a, **changed):
    a.layer.load_parameters(a.layer.parameters() | changed)


def load_frozen(a, mapping):
    a.frozen.load_parameters(mapping)


def convert(a, dtype):
    return a.layer.astype(dtype)


def causal(a, **changed):
    return mha.masks.causal(**{"query_len": 5} | changed)


def window(a, **changed):
    return mha.masks.sliding_window(**{"query_len": 5, "window": (1, 0)} | changed)


def from_lengths(a, **changed):
    return mha.masks.from_lengths(**{"key_lengths": [3, 6], "key_len": 6} | changed)


def from_attend(a, mask):
    return mha.masks.from_attend(mask)


def from_blocked(a, mask):
    return mha.masks.from_blocked(mask)


HUGE_HEADS = [(-2**70, V, str(-2**70), "at least 1"),
              (2**70, V, str(2**70), "at most 9223372036854775807")]
FIGURE = [
    *rows(figure, "query", WRONG_ARRAYS[:6]), *rows(figure, "W_q", WRONG_ARRAYS[:4]),
    *rows(figure, "W_o", WRONG_ARRAYS[:4]), *rows(figure, "b_k", WRONG_ARRAYS[1:4]),
    *rows(figure, "head_gate", WRONG_ARRAYS[1:4]), *rows(figure, "num_heads", WRONG_INTS),
    *rows(figure, "num_kv_heads", WRONG_INTS), *rows(figure, "scale", WRONG_NUMBERS[:5]),
    row(figure, "query", f(12), V, "shape (12,)", "(batch, len, dim) or (len, dim)"),
    row(figure, "key", f(5, 12), V, "shape (5, 12)", "the same number of axes"),
    row(figure, "value", f(3, 5, 12), V, "shape (3, 5, 12)", "the batch axes (2,) of query"),
    row(figure, "value", f(2, 6, 12), V, "length 6", "5 as key has"),
    row(figure, "W_q", f(11, 12), V, "shape (11, 12)", "12 rows, the last axis of query"),
    row(figure, "W_k", f(11, 12), V, "shape (11, 12)", "12 rows, the last axis of key"),
    row(figure, "W_v", f(12), V, "shape (12,)", "(in, out)"),
    row(figure, "W_q", f(12, 10), V, "10 columns", "a multiple of num_heads (4)"),
    row(figure, "W_k", f(12, 10), V, "10 columns", "a multiple of num_heads (4)"),
    row(figure, "W_v", f(12, 9), V, "9 columns", "a multiple of num_kv_heads (2)",
        num_kv_heads=2, W_k=f(12, 6)),
    row(figure, "W_k", f(12, 8), V, "head_dim 2", "3 as W_q gives"),
    row(figure, "W_o", f(11, 12), V, "shape (11, 12)", "12 rows, num_heads * value_head_dim"),
    row(figure, "b_q", f(11), V, "shape (11,)", "(12,)"),
    row(figure, "b_o", f(1, 12), V, "shape (1, 12)", "(12,)"),
    row(figure, "head_gate", f(3), V, "shape (3,)", "(4,)"),
    row(figure, "num_heads", None, T, "NoneType", "an int"),
    row(figure, "num_heads", 0, V, "0", "at least 1"),
    row(figure, "num_kv_heads", 3, V, "3", "a divisor of num_heads (4)"),
    row(figure, "num_kv_heads", -4, V, "-4", "at least 1"),
    row(figure, "mask", f(2, 5, 5) > 0, V, "3 dimensions", "write mask[:, None]"),
    row(figure, "bias", f(4, 5, 5), V, "3 dimensions", "write bias[:, None]"),
    row(figure_of_one, "mask", f(4, 5, 5) > 0, V, "3 dimensions", "write mask[:, None]"),
    row(figure_of_one, "mask", f(2, 1, 5, 5) > 0, V, "shape (2, 1, 5, 5)", "the scores (4, 5, 5)"),
    row(figure_vjp, "mask", f(2, 5, 5) > 0, V, "3 dimensions", "write mask[:, None]"),
    row(figure_vjp, "bias", f(4, 5, 5), V, "3 dimensions", "write bias[:, None]"),
    row(figure, "mask", f(5, 4) > 0, V, "shape (5, 4)", "broadcasts to the scores (2, 4, 5, 5)"),
    *rows(figure, "num_heads", HUGE_HEADS), *rows(figure, "num_kv_heads", HUGE_HEADS),
    row(figure, "num_kv_heads", 2**61, V, str(2**61), "a divisor of num_heads (4)"),
    ("figure", lambda a: figure(a, num_heads=2**61), V, "W_q", "12 columns",
     f"a multiple of num_heads ({2**61})"),
    row(figure, "mask", f(5, 5), T, "an array of float32", "bool with True = attend"),
    row(figure, "key_lengths", [6, 0], V, "6", "lengths in [0, 5]"),
    row(figure, "window", (-1, 0), V, "-1", "at least 0"),
    row(figure, "dropout", 1.0, V, "1.0", "a probability in [0, 1)"),
    row(figure, "rng", "7", T, "str", "None, an int or a numpy.random.Generator"),
    row(figure, "query", number(2, HUGE, 12), M, f"shape (2, {HUGE}, 12)", TOO_LARGE),
    ("figure", lambda a: figure(a, W_q=f(12, 0), W_k=f(12, 0), num_heads=2**60, num_kv_heads=1), V,
     "num_heads", str(2**60), "with a value_head_dim of 12"),
    ("figure", lambda a: figure(a, W_o=number(12, 2**57)), M, "output", f"shape (2, 5, {2**57})",
     TOO_LARGE),
]

CONSTRUCTOR = [
    *rows(make, "embed_dim", WRONG_INTS), *rows(make, "num_heads", WRONG_INTS[:3]),
    *rows(make, "head_dim", WRONG_INTS[:3]),
    *rows(make, "use_bias", [*WRONG_FLAGS[:2], *WRONG_FLAGS[3:]]),
    *rows(make, "sinks", WRONG_FLAGS),
    row(make, "use_bias", "qkx", V, "'qkx'", "letters of 'qkvo'"),
    row(make, "use_bias", "qq", V, "'qq'", "each once"),
    row(make, "scale", float("inf"), V, "inf", "a finite number"),
    row(make, "scale", "1", T, "str", "a finite number"),
    row(make, "scale", True, T, "bool", "a finite number"),
    row(make, "scale", 10**400, V, str(10**400), "a finite number"),
    row(make, "softcap", 0, V, "0", "a number above 0"),
    row(make, "softcap", float("nan"), V, "nan", "a number above 0"),
    row(make, "softcap", [1], T, "list", "a number above 0"),
    row(make, "window", 3, T, "int", "a pair (left, right)"),
    row(make, "window", (1, 2, 3), V, "3 entries", "two (left, right)"),
    row(make, "window", (-1, None), V, "-1", "at least 0"),
    row(make, "window", (1.5, None), T, "float", "an int"),
    row(make, "alibi", f(3), V, "shape (3,)", "(4,), a number for each head"),
    row(make, "alibi", f(4) > 0, T, "an array of bool", "floats"),
    row(make, "relative_bias", -1, V, "-1", "at least 0"),
    row(make, "relative_bias", True, T, "bool", "an int"),
    row(make, "relative_bias", 1.0, T, "float", "an int"),
    row(make, "relative_bias", HUGE, M, "relative_bias", TOO_LARGE),
    *rows(make, "rng", WRONG_RNGS),
    row(make, "embed_dim", None, T, "NoneType", "an int"),
    row(make, "embed_dim", 0, V, "0", "at least 1"),
    row(make, "embed_dim", 13, V, "13", "a multiple of num_heads (4)"),
    row(make, "num_heads", -4, V, "-4", "at least 1"),
    row(make, "num_kv_heads", 3, V, "3", "a divisor of num_heads (4)"),
    row(make, "query_dim", 0, V, "0", "at least 1"),
    row(make, "dropout", 1, V, "1", "a number in [0, 1)"),
    row(make, "dropout", -0.5, V, "-0.5", "a number in [0, 1)"),
    row(make, "dropout", float("nan"), V, "nan", "a number in [0, 1)"),
    row(make, "dropout", "0.5", T, "str", "a number in [0, 1)"),
    row(make, "dropout", None, T, "NoneType", "a number in [0, 1)"),
    row(make, "dropout", 1j, T, "complex", "a number in [0, 1)"),
    row(make, "dropout", True, T, "bool", "a number in [0, 1)"),
    row(make, "dtype", np.uint16, T, "uint16", "float16, bfloat16, float32 or float64"),
    row(make, "dtype", None, T, "None", "float32 or float64"),
    row(make, "dtype", "single precision", T, "'single precision'", "float32 or float64"),
    row(make, "dtype", 5, T, "5", "float32 or float64"),
    row(make, "dtype", "f4,(", T, "'f4,('", "float32 or float64"),
    row(make, "dtype", {}, T, "{}", "float32 or float64"),
    ("make", lambda a: make(a, embed_dim=2**70), M, "W_q", f"shape ({2**70}, {2**70})", TOO_LARGE),
    ("make", lambda a: make(a, output_dim=HUGE), M, "W_o", f"shape (12, {HUGE})", TOO_LARGE),
    row(convert, "dtype", int, T, "int", "float32 or float64"),
    row(convert, "dtype", "x", T, "'x'", "float32 or float64"),
]

CALL = [
    *rows(call, "query", WRONG_ARRAYS[:6]), *rows(call_frozen, "key", WRONG_ARRAYS[1:6]),
    *rows(call, "training", WRONG_FLAGS), *rows(call, "rng", WRONG_RNGS),
    row(call, "query", f(12), V, "shape (12,)", "(batch, len, dim) or (len, dim)"),
    row(call, "query", f(2, 5, 11), V, "last axis of 11", "12, the layer's query_dim"),
    row(call_frozen, "query", f(2, 5, 11), V, "last axis of 11", "12, the layer's query_dim"),
    row(call_frozen, "value", f(2, 5, 10), V, "last axis of 10", "12, the layer's value_dim"),
    row(call, "mask", f(2, 5, 5) > 0, V, "3 dimensions", "write mask[:, None]"),
    row(call, "bias", f(2, 5, 5), V, "3 dimensions", "write bias[:, None]"),
    row(call, "mask", f(5) > 0, V, "1 dimensions", "2 (query_len, key_len) or 4"),
    row(call, "mask", True, V, "0 dimensions", "2 (query_len, key_len) or 4"),
    row(call, "mask", [[True], [True, False]], V, "list", "an array"),
    row(call, "mask", f(5, 5), T, "an array of float32", "bool with True = attend"),
    row(call, "mask", f(5, 4) > 0, V, "shape (5, 4)", "broadcasts to the scores (2, 4, 5, 5)"),
    row(call, "head_gate", f(5), V, "shape (5,)", "(4,)"),
    row(call_frozen, "key_lengths", [5, 6], V, "6", "lengths in [0, 5]"),
    row(call, "query_offset", None, V, "None", "the position of query 0 among the keys",
        key=f(2, 7, 12), key_lengths=[3, 3], causal=True),
    row(call, "causal", 1, T, "int", "True or False"),
    row(call, "empty_rows", "ones", V, "'ones'", '"zeros" or "uniform"'),
]

PARAMETERS = [
    *rows(assign, "W_q", WRONG_ARRAYS[2:3] + WRONG_ARRAYS[5:6]),
    row(assign, "W_q", None, T, "None", "an array"),
    row(assign, "b_q", None, T, "None", "an array"),
    row(assign, "W_k", COMPLEX, T, "an array of complex64", "float32"),
    row(assign, "W_v", COMPLEX.astype(str), T, "an array of <U", "float32"),
    row(assign, "W_o", f(12, 12) > 0, T, "an array of bool", "float32"),
    row(assign, "W_q", f(12, 11), V, "shape (12, 11)", "(12, 12)"),
    row(assign, "W_q", f(12), V, "shape (12,)", "(12, 12)"),
    row(assign, "b_o", f(12, 1), V, "shape (12, 1)", "(12,)"),
    row(assign_frozen, "W_q", f(12, 12), V, "a change to a frozen layer", "unfreeze()"),
    row(assign_frozen, "b_o", f(12), V, "a change to a frozen layer", "unfreeze()"),
    row(assign_without_bias, "b_q", f(12), V, "a bias for a layer without", "use_bias=True"),
    row(assign_without_bias, "sinks", f(4), V, "a layer without", "sinks=True"),
    row(assign_without_bias, "relative_bias", f(4, 3), V, "a layer without", "relative_bias=r"),
    row(load, "mapping", None, T, "NoneType", "names with arrays"),
    row(load, "mapping", [1], T, "list", "names with arrays"),
    row(load, "mapping", {}, V, "none for ['W_k'", "exactly ['W_k'"),
    row(load, "mapping", lambda a: a.layer.parameters() | {"w": 1, 3: 1}, V,
        "unknown names [3, 'w']", "exactly"),
    row(load_one, "W_o", f(12, 11), V, "shape (12, 11)", "(12, 12)"),
    row(load_one, "b_o", [[1.0], [1.0, 2.0]], V, "list", "an array"),
    row(load_one, "b_o", "text", T, "an array of <U4", "float32"),
    row(load_frozen, "mapping", {}, V, "a change to a frozen layer", "unfreeze()"),
]

MASKS = [
    *rows(causal, "query_len", WRONG_INTS), *rows(causal, "key_len", WRONG_INTS[:3]),
    *rows(causal, "query_offset", WRONG_INTS), *rows(from_lengths, "key_len", WRONG_INTS),
    *(row(window, "window", (side, None), kind, *texts)
      for side, kind, *texts in WRONG_INTS[:4]),
    row(window, "window", 3, T, "int", "a pair (left, right)"),
    row(window, "window", (1, 2, 3), V, "3 entries", "two (left, right)"),
    ("causal", lambda a: causal(a, query_len=2**61, key_len=0), M, "query_len, key_len",
     f"shape ({2**61}, 0)", TOO_LARGE),
    ("causal", lambda a: causal(a, query_len=0, key_len=2**61), M, "query_len, key_len",
     f"shape (0, {2**61})", TOO_LARGE),
    row(causal, "query_len", None, T, "NoneType", "an int"),
    row(causal, "query_len", -1, V, "-1", "at least 0"),
    row(window, "window", (-1, 0), V, "-1", "at least 0"),
    row(window, "key_len", -2, V, "-2", "at least 0"),
    ("causal", lambda a: causal(a, query_len=2**40), M, "query_len, key_len",
     f"shape ({2**40}, {2**40})", TOO_LARGE),
    ("causal", lambda a: causal(a, key_len=10**30), M, "query_len, key_len",
     f"shape (5, {10**30})", TOO_LARGE),
    row(from_lengths, "key_lengths", None, T, "None", "an array"),
    row(from_lengths, "key_lengths", [1.0], T, "an array of float64", "integers"),
    row(from_lengths, "key_lengths", ["1"], T, "an array of <U1", "integers"),
    row(from_lengths, "key_lengths", [[1], [1, 2]], V, "list", "an array"),
    row(from_lengths, "key_lengths", 3, V, "shape ()", "(batch,) or (batch, query_len)"),
    row(from_lengths, "key_lengths", [[[3]]], V, "shape (1, 1, 1)",
        "(batch,) or (batch, query_len)"),
    row(from_lengths, "key_lengths", [3, 7], V, "values from 3 to 7", "them in [0, 6]"),
    row(from_lengths, "key_lengths", [-1, 3], V, "values from -1 to 3", "them in [0, 6]"),
    row(from_lengths, "key_len", -1, V, "-1", "at least 0"),
    row(from_lengths, "key_len", 2**62, M, f"shape (2, 1, {2**62})", TOO_LARGE),
    row(from_attend, "mask", None, T, "None", "an array"),
    row(from_attend, "mask", ["a"], T, "an array of <U1", "bool, integers or floats"),
    row(from_attend, "mask", [[1], [1, 0]], V, "list", "an array"),
    row(from_attend, "mask", [0.0, -np.inf], V, "numbers other than 0 and 1", "goes to bias="),
    row(from_attend, "mask", [-10000, 0], V, "numbers other than 0 and 1", "goes to bias="),
    row(from_blocked, "mask", [0.5], V, "numbers other than 0 and 1", "goes to bias="),
    row(from_blocked, "mask", [np.nan], V, "numbers other than 0 and 1", "goes to bias="),
    row(from_blocked, "mask", [1j], T, "an array of complex128", "bool, integers or floats"),
]

TABLE = FIGURE + CONSTRUCTOR + CALL + PARAMETERS + MASKS


@pytest.mark.parametrize("case", TABLE, ids=bad_input.labels(TABLE))
def test_bad_call(case):
    bad_input.check(case)
