"""Bad input to the functions of the steps: the documented type, a message that names the argument,
what came and what was wanted, every array untouched, and a process that computes right after."""

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
    Raises,
    T,
    V,
    f,
    number,
    row,
    rows,
)
from half_types import BFLOAT16

import mha


def attend(a, **changed):
    return mha.scaled_dot_product_attention(
        **{"query": a.query, "key": a.key, "value": a.value} | changed)


def add(a, **changed):
    good = {name: getattr(a, name) for name in ("query", "key", "value", "W_q", "W_k", "w_v")}
    return mha.additive_attention(**good | changed)


def project(a, **changed):
    return mha.linear(**{"x": a.x, "weight": a.W, "bias": a.b} | changed)


def split(a, **changed):
    return mha.split_heads(**{"x": a.x, "num_heads": 3} | changed)


def merge(a, **changed):
    return mha.merge_heads(**{"x": a.query} | changed)


def join(a, **changed):
    return mha.merge_attention(**{"outputs": [a.out, a.out], "lses": [a.lse, a.lse]} | changed)


def drop(a, **changed):
    return mha.dropout_mask(**{"shape": (5, 6), "p": 0.5, "seed": 1} | changed)


def set_threads(a, num_threads):
    mha.set_num_threads(num_threads)


def use_threads(a, num_threads):
    with mha.threads(num_threads):
        pass


ATTENTION = [
    *rows(attend, "query", WRONG_ARRAYS), *rows(attend, "key", WRONG_ARRAYS[:6]),
    *rows(attend, "bias", WRONG_ARRAYS[1:6]), *rows(attend, "alibi", WRONG_ARRAYS[1:3]),
    *rows(attend, "relative_bias", WRONG_ARRAYS[1:3]), *rows(attend, "sinks", WRONG_ARRAYS[1:3]),
    *rows(attend, "scale", WRONG_NUMBERS), *rows(attend, "softcap", WRONG_NUMBERS[:5]),
    *rows(attend, "dropout", WRONG_NUMBERS[:5]), *rows(attend, "causal", WRONG_FLAGS),
    *rows(attend, "return_weights", WRONG_FLAGS), *rows(attend, "return_lse", WRONG_FLAGS[:1]),
    row(attend, "query", f(8), V, "shape (8,)", "2-D (len, dim)"),
    row(attend, "query", 1.0, V, "shape ()", "2-D (len, dim)"),
    *([row(attend, "query", np.ones((1,) * 64), V, "64 axes", "at most 32: reshape it")]
      if int(np.__version__.split(".")[0]) >= 2 else []),  # NumPy 1 makes no such array itself
    row(attend, "key", f(2, 6, 8), V, "3 axes", "4 as query has"),
    row(attend, "value", f(6, 3), V, "2 axes", "4 as query has"),
    row(attend, "key", f(2, 2, 6, 7), V, "head_dim 7", "8 as query has"),
    row(attend, "key", f(2, 3, 6, 8), V, "3 heads", "a divisor of query's 4",
        value=f(2, 3, 6, 3)),
    row(attend, "key", f(2, 0, 6, 8), V, "0 heads", "a divisor", value=f(2, 0, 6, 3)),
    row(attend, "value", f(2, 1, 6, 3), V, "1 heads", "2 as key has"),
    row(attend, "value", f(2, 2, 7, 3), V, "length 7", "6 as key has"),
    row(attend, "key", f(1, 2, 6, 8), V, "shape (1, 2, 6, 8)", "the batch axes (2,) of query"),
    row(attend, "value", f(3, 2, 6, 3), V, "shape (3, 2, 6, 3)", "the batch axes (2,)"),
    row(attend, "query", f(2, 4, 5, 8) > 0, T, "an array of bool", "float32",
        key=f(2, 2, 6, 8) > 0, value=f(2, 2, 6, 3) > 0),
    row(attend, "query", f(2, 4, 5, 8).astype(np.float16), T, "an array of float16",
        "bfloat16 as another array has", key=f(2, 2, 6, 8).astype(BFLOAT16)),
    row(attend, "key", np.ones((2, 2, 6, 8), np.uint16), T, "an array of uint16", "bfloat16",
        query=f(2, 4, 5, 8).astype(BFLOAT16)),
    row(attend, "value", np.ones((2, 2, 6, 3), bool), T, "an array of bool", "bfloat16",
        query=f(2, 4, 5, 8).astype(BFLOAT16)),
    row(attend, "mask", f(5, 6), T, "an array of float32", "bool with True = attend; write mask"
           " != 0 where 1 means attend, mask == 0 where 1 means blocked, or bias="),
    row(attend, "mask", [[1] * 6] * 5, T, "an array of int64", "bool"),
    row(attend, "mask", [[0.0, -np.inf] * 3] * 5, T, "an array of float64", "give it as bias="),
    row(attend, "mask", np.broadcast_to(np.float32(-1), (1 << 30, 1 << 30)), T, "float32",
        "or bias= for an additive mask"),  # too large to look at
    row(attend, "mask", "no", T, "an array of <U2", "bool"),
    row(attend, "mask", [[True], [True, False]], V, "list", "an array"),
    row(attend, "mask", f(4, 6) > 0, V, "shape (4, 6)", "broadcasts to the scores (2, 4, 5, 6)"),
    row(attend, "mask", f(1, 2, 4, 5, 6) > 0, V, "shape (1, 2, 4, 5, 6)", "(2, 4, 5, 6)"),
    row(attend, "mask", number(HUGE, 5, 6, dtype=np.bool_), V, f"shape ({HUGE}, 5, 6)", "scores"),
    row(attend, "mask", Raises(ValueError("boom")), V, "Raises", "an array"),
    row(attend, "bias", f(5, 6) > 0, T, "an array of bool", "floats; a bool mask goes to mask="),
    row(attend, "bias", f(2, 5, 6), V, "shape (2, 5, 6)", "broadcasts to the scores (2, 4, 5, 6)"),
    row(attend, "bias", 1j * f(5, 6), T, "an array of complex64", "float32"),
    row(attend, "alibi", f(3), V, "shape (3,)", "(4,), a number for each head"),
    row(attend, "alibi", f(4, 1), V, "shape (4, 1)", "(4,), a number for each head"),
    row(attend, "alibi", 0.5, V, "shape ()", "(4,), a number for each head"),
    row(attend, "alibi", f(4) > 0, T, "an array of bool", "floats"),
    row(attend, "alibi", 1j * f(4), T, "an array of complex64", "float32"),
    row(attend, "alibi", number(HUGE), V, f"shape ({HUGE},)", "(4,)"),
    row(attend, "relative_bias", f(4, 6), V, "shape (4, 6)", "(4, 2r + 1)"),
    row(attend, "relative_bias", f(4, 0), V, "shape (4, 0)", "(4, 2r + 1)"),
    row(attend, "relative_bias", f(2, 7), V, "shape (2, 7)", "(4, 2r + 1), or (1, 2r + 1)"),
    row(attend, "relative_bias", f(7), V, "shape (7,)", "(4, 2r + 1), or (1, 2r + 1)"),
    row(attend, "relative_bias", f(4, 7) > 0, T, "an array of bool", "floats"),
    row(attend, "relative_bias", number(1, 2**60 + 1), M, f"shape (1, {2**60 + 1})", "fits"),
    row(attend, "sinks", f(1, 4), V, "shape (1, 4)", "(4,), a number for each head"),
    row(attend, "sinks", 1j * f(4), T, "an array of complex64", "float32"),
    row(attend, "empty_rows", "uniform", V, '"uniform" with sinks', '"zeros"', sinks=f(4)),
    row(attend, "key_lengths", [3, 7], V, "7", "lengths in [0, 6]"),
    row(attend, "key_lengths", [-1, 3], V, "-1", "lengths in [0, 6]"),
    row(attend, "key_lengths", np.array([1, 2**64 - 1], np.uint64), V, str(2**64 - 1),
        "lengths in [0, 6]"),
    row(attend, "key_lengths", [3.0, 6.0], T, "an array of float64", "integers"),
    row(attend, "key_lengths", [True, False], T, "an array of bool", "integers"),
    row(attend, "key_lengths", ["3", "6"], T, "an array of <U1", "integers"),
    row(attend, "key_lengths", [10**30, 1], T, "an array of object", "integers"),
    row(attend, "key_lengths", [[1], [1, 2]], V, "list", "an array"),
    row(attend, "key_lengths", 3, V, "shape ()", "(2,) (the batch axes) or (2, 5)"),
    row(attend, "key_lengths", np.uint64(3), V, "shape ()", "(2,) (the batch axes) or (2, 5)"),
    row(attend, "key_lengths", [3], V, "shape (1,)", "(2,) (the batch axes) or (2, 5)"),
    row(attend, "key_lengths", np.ones((2, 6), int), V, "shape (2, 6)", "(2,) (the batch axes)"),
    row(attend, "query_offset", None, V, "None", "the position of query 0 among the keys",
        key_lengths=[3, 6], causal=True),
    row(attend, "query_offset", None, V, "None", "the position of query 0 among the keys",
        key_lengths=[3, 6], window=(1, None)),
    row(attend, "query_offset", None, V, "None", "the position of query 0 among the keys",
        key_lengths=[3, 6], alibi=f(4)),
    row(attend, "query_offset", None, V, "None", "the position of query 0 among the keys",
        key_lengths=[3, 6], relative_bias=f(1, 3)),
    row(attend, "query_offset", 1.0, T, "an array of float64", "integers"),
    row(attend, "query_offset", True, T, "bool", "an int"),
    row(attend, "query_offset", np.True_, T, "an array of bool", "integers"),
    row(attend, "query_offset", [1, 2, 3], V, "shape (3,)", "an int or (2,) (the batch axes)"),
    row(attend, "query_offset", np.ones((2, 4), int), V, "shape (2, 4)", "an int or (2,)"),
    row(attend, "window", 3, T, "int", "a pair (left, right)"),
    row(attend, "window", "12", T, "str", "a pair (left, right)"),
    row(attend, "window", np.array([1, 2]), T, "numpy.ndarray", "a pair (left, right)"),
    row(attend, "window", (1,), V, "1 entries", "two (left, right)"),
    row(attend, "window", [1, 2, 3], V, "3 entries", "two (left, right)"),
    row(attend, "window", (-1, 2), V, "-1", "at least 0"),
    row(attend, "window", (1, -2), V, "-2", "at least 0"),
    *rows(attend, "window", [((value, 1), *others) for value, *others in WRONG_INTS]),
    row(attend, "scale", float("nan"), V, "nan", "a finite number"),
    row(attend, "scale", float("inf"), V, "inf", "a finite number"),
    row(attend, "scale", np.float32("-inf"), V, "-inf", "a finite number"),
    row(attend, "scale", -3e38, V, "-3e+38", "a finite number of at most 1.7e38 in float32"),
    row(attend, "softcap", 0, V, "0", "a number above 0"),
    row(attend, "softcap", -1.0, V, "-1.0", "a number above 0"),
    row(attend, "softcap", float("nan"), V, "nan", "a number above 0"),
    row(attend, "softcap", float("-inf"), V, "-inf", "a number above 0"),
    row(attend, "softcap", 1e39, V, "1e+39", "a finite number in float32"),
    row(attend, "softcap", 1e-40, V, "1e-40", "a larger number: scale / softcap overflows"),
    row(attend, "softcap", 1e-20, V, "1e-20", "a larger number", scale=1e30),
    row(attend, "empty_rows", "nan", V, "'nan'", '"zeros" or "uniform"'),
    row(attend, "empty_rows", None, T, "NoneType", '"zeros" or "uniform"'),
    row(attend, "empty_rows", b"zeros", T, "bytes", '"zeros" or "uniform"'),
    row(attend, "dropout", 1, V, "1", "a probability in [0, 1)"),
    row(attend, "dropout", -0.1, V, "-0.1", "a probability in [0, 1)"),
    row(attend, "dropout", float("nan"), V, "nan", "a probability in [0, 1)"),
    row(attend, "dropout", None, T, "NoneType", "a number"),
    *rows(attend, "rng", WRONG_RNGS), *rows(attend, "rng", WRONG_RNGS, dropout=0.5),
    row(attend, "query", number(2, 4, HUGE, 8), M, f"shape (2, 4, {HUGE}, 8)", TOO_LARGE),
    row(attend, "query", number(2, 4, HUGE, 8, dtype=np.int8), M, "shape (2, 4,", TOO_LARGE),
    row(attend, "key", number(2, 2, HUGE, 8), M, f"shape (2, 2, {HUGE}, 8)", TOO_LARGE,
        value=number(2, 2, HUGE, 3)),
    ("attend", lambda a: attend(a, query=np.broadcast_to(a.row[0], (2, 4, HUGE, 8))), M, "output",
     f"shape (2, 4, {HUGE}, 3)", TOO_LARGE),
    ("attend", lambda a: attend(a, query=f(2**40, 0), key=f(2**40, 0), value=f(2**40, 0),
                      return_weights=True), M, "weights", f"shape ({2**40}, {2**40})", TOO_LARGE),
    ("attend", lambda a: attend(a, query=f(2**47, 0), key=f(1, 0), value=f(1, 0), return_lse=True),
     M, "lse", f"shape ({2**47},)", TOO_LARGE),
    ("attend", lambda a: attend(a, query=f(HUGE, 1, 0), key=f(HUGE, 1, 0), value=f(HUGE, 1, 0),
                      key_lengths=number(HUGE, dtype=np.int8)),
     M, "key_lengths", f"shape ({HUGE},)", TOO_LARGE),
]

OUT = [
    row(attend, "out", [1.0], T, "list", "a NumPy array"),
    row(attend, "out", lambda a: a.out.astype(np.float64), T, "an array of float64", "float32"),
    row(attend, "out", lambda a: a.out.astype(">f4"), T, "an array of >f4", "native float32"),
    row(attend, "out", lambda a: a.out.astype(np.int32), T, "an array of int32", "float32"),
    row(attend, "out", lambda a: a.out[0], V, "shape (4, 5, 3)", "(2, 4, 5, 3)"),
    row(attend, "out", f(2, 4, 5, 8), V, "shape (2, 4, 5, 8)", "(2, 4, 5, 3)"),
    row(attend, "out", lambda a: a.readonly, V, "a read-only array", "can be written to"),
    row(attend, "out", lambda a: np.lib.stride_tricks.as_strided(
        a.out, (2, 4, 5, 3), (0, 60, 12, 4)), V, "strides (0, 60, 12, 4)", "each element its own"),
    row(attend, "out", lambda a: np.lib.stride_tricks.as_strided(
        a.out, (2, 4, 5, 3), (48, 12, 4, 4)), V, "strides (48, 12, 4, 4)", "each element its own"),
    row(attend, "out", lambda a: np.zeros((2, 4, 3, 5), np.float32).swapaxes(2, 3),
        V, "strides", "a contiguous last axis"),
    row(attend, "out", lambda a: np.zeros(481, np.uint8)[1:].view(np.float32).reshape(
        2, 4, 5, 3), V, "strides", "aligned memory"),
    row(attend, "out", lambda a: a.query[..., :3], V, "memory of query", "an array of its own"),
    ("attend", lambda a: attend(a, query=(big := f(2, 4, 12, 8))[:, :, :5], key=big[:, :2, 5:11],
                      value=(v := f(2, 4, 6, 3))[:, :2], out=v[:, :, 1:]),
     V, "out", "memory of value", "an array of its own"),
    ("attend", lambda a: attend(a, query=a.row, key=a.row, value=memoryview(a.row), out=a.row),
     V, "out", "memory of query", "an array of its own"),
    ("attend", lambda a: attend(a, query=a.row, key=a.row, value=memoryview(w := f(5, 8)),
                      out=np.asarray(w)), V, "out", "memory of value", "an array of its own"),
    ("attend", lambda a: attend(a, query=a.row, key=a.row, value=a.row, out=(w := f(5, 8)),
                      bias=w[:, :5]), V, "out", "memory of bias", "an array of its own"),
]

ADDITIVE = [
    *rows(add, "query", WRONG_ARRAYS[:3]), *rows(add, "W_q", WRONG_ARRAYS[:6]),
    *rows(add, "W_k", WRONG_ARRAYS[:2]), *rows(add, "w_v", WRONG_ARRAYS[:2]),
    row(add, "query", f(8), V, "shape (8,)", "2-D (len, dim)"),
    row(add, "W_q", f(9, 7), V, "shape (9, 7)", "8 rows, the last axis of query"),
    row(add, "W_k", f(9, 7), V, "shape (9, 7)", "8 rows, the last axis of key"),
    row(add, "W_k", f(8, 6), V, "6 columns", "7 as W_q has"),
    row(add, "W_q", f(7), V, "shape (7,)", "(in, out)"),
    row(add, "w_v", f(6), V, "shape (6,)", "(7,)"),
    row(add, "w_v", f(7, 1), V, "shape (7, 1)", "(7,)"),
    row(add, "mask", f(5, 6), T, "an array of float32", "bool with True = attend"),
    row(add, "key_lengths", [7, 0], V, "7", "lengths in [0, 6]"),
    row(add, "empty_rows", "none", V, "'none'", '"zeros" or "uniform"'),
    row(add, "dropout", 1.5, V, "1.5", "a probability in [0, 1)"),
    row(add, "rng", "seed", T, "str", "None, an int or a numpy.random.Generator"),
    row(add, "return_weights", 1, T, "int", "True or False"),
]

LINEAR = [
    *rows(project, "x", WRONG_ARRAYS[:6]), *rows(project, "weight", WRONG_ARRAYS[:4]),
    *rows(project, "bias", WRONG_ARRAYS[2:3]),
    row(project, "x", 1.0, V, "shape ()", "(..., in)"),
    row(project, "x", f(2, 5, 12) > 0, T, "an array of bool", "float32, float64 or integers"),
    row(project, "weight", f(12), V, "shape (12,)", "(in, out)"),
    row(project, "weight", f(1, 12, 12), V, "shape (1, 12, 12)", "(in, out)"),
    row(project, "weight", f(11, 12), V, "shape (11, 12)", "12 rows, the last axis of x"),
    row(project, "bias", f(11), V, "shape (11,)", "(12,)"),
    row(project, "bias", f(1, 12), V, "shape (1, 12)", "(12,)"),
    row(project, "bias", 1j * f(12), T, "an array of complex64", "float32, float64 or integers"),
    row(project, "x", number(HUGE, 12), M, f"shape ({HUGE}, 12)", TOO_LARGE),
    ("linear", lambda a: project(a, x=np.broadcast_to(a.b, (HUGE, 12))), M, "output",
     f"shape ({HUGE}, 12)", TOO_LARGE),
]

HEADS = [
    *rows(split, "num_heads", WRONG_INTS),
    row(split, "x", None, T, "None", "an array"),
    row(split, "x", [[1.0], [1.0, 2.0]], V, "list", "an array"),
    row(split, "x", f(12), V, "shape (12,)", "(..., len, num_heads * d)"),
    row(split, "x", f(*[1] * 32), V, "shape (1, 1", "(..., len, num_heads * d)"),
    row(split, "num_heads", 5, V, "5", "a divisor of the last axis of x (2, 5, 12)"),
    row(split, "num_heads", 0, V, "0", "at least 1"),
    row(split, "num_heads", -3, V, "-3", "at least 1"),
    row(split, "num_heads", 2**61, V, str(2**61), "a divisor of the last axis of x (2, 5, 12)"),
    row(split, "num_heads", 2**70, V, str(2**70), "at most 9223372036854775807"),
    row(split, "num_heads", 2**61, M, f"shape (2, {2**61}, 5, 0)", TOO_LARGE, x=f(2, 5, 0)),
    *rows(merge, "x", [WRONG_ARRAYS[0], WRONG_ARRAYS[2], WRONG_ARRAYS[5], WRONG_ARRAYS[-1]]),
    row(merge, "x", "text", V, "shape ()", "(..., heads, len, d)"),
    row(merge, "x", f(5, 12), V, "shape (5, 12)", "(..., heads, len, d)"),
    ("merge", lambda a: merge(a, x=number(4, HUGE, 3)), M, "output", f"shape ({HUGE}, 12)",
     TOO_LARGE),
]

JOINED = [
    row(join, "outputs", 5, T, "int", "a sequence of arrays"),
    row(join, "outputs", None, T, "NoneType", "a sequence of arrays"),
    row(join, "lses", 1.5, T, "float", "a sequence of arrays"),
    row(join, "outputs", [None, None], T, "None", "an array"),
    row(join, "lses", [None, None], T, "None", "an array"),
    row(join, "lses", lambda a: [a.lse], V, "1 for 2 outputs", "one for each, at least one"),
    row(join, "lses", [], V, "0 for 0 outputs", "one for each, at least one", outputs=[]),
    row(join, "outputs", lambda a: [a.out, a.out[0]], V, "shape (4, 5, 3) at 1", "(2, 4, 5, 3)"),
    row(join, "outputs", [f(3), f(3)], V, "shape (3,)", "(..., query_len, value_head_dim)"),
    row(join, "lses", lambda a: [a.lse, a.lse[0]], V, "shape (4, 5) at 1", "(2, 4, 5)"),
    row(join, "lses", lambda a: [a.lse, a.out], V, "shape (2, 4, 5, 3) at 1", "(2, 4, 5)"),
    row(join, "outputs", lambda a: [a.out, 1j * a.out], T, "an array of complex64", "float32"),
    row(join, "outputs", lambda a: [a.out > 0] * 2, T, "an array of bool", "float32"),
    row(join, "lses", lambda a: [a.lse.astype(object)] * 2, T, "an array of object", "float32"),
    row(join, "outputs", lambda a: [a.out, Raises(ValueError("boom"))], V, "Raises", "boom"),
    ("join", lambda a: join(a, outputs=[number(HUGE, 3)], lses=[number(HUGE)]), M, "outputs",
     f"shape ({HUGE}, 3)", TOO_LARGE),
]

DROPOUT_MASK = [
    *rows(drop, "p", WRONG_NUMBERS[:7]),
    row(drop, "p", None, T, "NoneType", "a number"),
    row(drop, "p", 1.0, V, "1.0", "a probability in [0, 1)"),
    row(drop, "p", -1e-9, V, "-1e-09", "a probability in [0, 1)"),
    row(drop, "p", float("nan"), V, "nan", "a probability in [0, 1)"),
    row(drop, "shape", 5, T, "5", "a tuple of ints"),
    row(drop, "shape", None, T, "None", "a tuple of ints"),
    row(drop, "shape", "56", T, "'56'", "a tuple of ints"),
    row(drop, "shape", (5.0, 6), T, "(5.0, 6)", "a tuple of ints"),
    row(drop, "shape", (5,), V, "1 axes", "2 to 32"),
    row(drop, "shape", (1,) * 33, V, "33 axes", "2 to 32"),
    row(drop, "shape", (5, -6), V, "-6", "at least 0"),
    row(drop, "shape", (HUGE, 2**10), M, f"shape ({HUGE}, 1024)", TOO_LARGE),
    row(drop, "shape", (HUGE, HUGE), M, f"shape ({HUGE}, {HUGE})", TOO_LARGE),
    row(drop, "shape", (2**62, 0, 5), M, f"shape ({2**62}, 0, 5)", TOO_LARGE),
    row(drop, "shape", (2**70, 0), M, f"shape ({2**70}, 0)", TOO_LARGE),
    row(drop, "seed", None, T, "NoneType", "an int in [0, 2**64)"),
    row(drop, "seed", 1.0, T, "float", "an int in [0, 2**64)"),
    row(drop, "seed", True, T, "bool", "an int in [0, 2**64)"),
    row(drop, "seed", -1, V, "-1", "an int in [0, 2**64)"),
    row(drop, "seed", 2**64, V, str(2**64), "an int in [0, 2**64)"),
]

THREADS = [
    *rows(set_threads, "num_threads", WRONG_INTS), *rows(use_threads, "num_threads", WRONG_INTS),
    row(set_threads, "num_threads", None, T, "NoneType", "an int"),
    row(set_threads, "num_threads", 0, V, "0", "at least 1"),
    row(set_threads, "num_threads", -2, V, "-2", "at least 1"),
    row(use_threads, "num_threads", 0, V, "0", "at least 1"),
    row(use_threads, "num_threads", None, T, "NoneType", "an int"),
]

TABLE = ATTENTION + OUT + ADDITIVE + LINEAR + HEADS + JOINED + DROPOUT_MASK + THREADS


@pytest.mark.parametrize("case", TABLE, ids=bad_input.labels(TABLE))
def test_bad_call(case):
    bad_input.check(case)


@pytest.mark.parametrize("name", ["query", "mask", "bias", "alibi", "relative_bias", "sinks",
                                  "key_lengths", "query_offset", "scale", "softcap", "dropout"])
def test_what_an_argument_raises_itself_arrives(name):
    """Only ValueError and TypeError get the argument's name; others pass as they are."""
    a = bad_input.fresh_arrays()
    with pytest.raises(ZeroDivisionError, match=r"^boom$"):
        attend(a, **{name: Raises(ZeroDivisionError("boom"))})
    assert bad_input.answer() == bad_input.GOOD_ANSWER


@pytest.mark.parametrize("offset", [np.uint64(1), np.array(1, np.uint64), np.array([1, 1], ">u8")])
def test_unsigned_query_offset(offset):
    a = bad_input.fresh_arrays()
    np.testing.assert_array_equal(attend(a, causal=True, query_offset=offset),
                                  attend(a, causal=True, query_offset=1))


@pytest.mark.parametrize("offset", [2**64 - 1, np.uint64(2**64 - 1), [2**64 - 1, 2**63], 10**30])
def test_query_offset_beyond_every_key(offset):
    a = bad_input.fresh_arrays()
    np.testing.assert_array_equal(attend(a, causal=True, query_offset=offset), attend(a))
