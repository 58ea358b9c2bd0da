"""However a sequence is cut into calls, the same bits come out: a query alone, a few together or
all at once, whichever kernel takes them."""

import numpy as np
import pytest
from agreement import grouped_inputs
from half_types import HALVES
from option_cases import SCORES

import mha

# (batch, heads, kv_heads, query_len, key_len, head_dim, value_head_dim)
SHAPES = [
    (2, 3, 3, 70, 70, 64, 64),
    (1, 8, 2, 50, 700, 128, 128),
    (1, 4, 2, 33, 513, 40, 72),
    (2, 2, 1, 40, 200, 33, 5),
    (1, 20, 1, 20, 1100, 64, 48),
    (1, 2, 2, 40, 2300, 16, 260),
    (1, 2, 2, 20, 300, 2, 3),
]


def problem(shape, dtype, seed=0):
    query, key, value = grouped_inputs(shape, dtype, seed)
    return 3 * query, key, value


def options_of(shape):
    batch, heads, _, query_len, key_len, *_ = shape
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((heads, query_len, key_len)).astype(np.float32)
    blocking = np.where(rng.random(bias.shape) < 0.3, -np.inf, bias)
    mask = rng.random((batch, heads, query_len, key_len)) < 0.5
    mask[:, :, 3] = False
    lengths = rng.integers(0, key_len + 1, (batch, query_len))
    cases = [{}, {"causal": True}, {"window": (20, 10)}, {"window": (150, 0)}, {"mask": mask},
             {"bias": bias}, {"bias": blocking}, {"key_lengths": lengths}, {"scale": -0.2},
             {"dropout": 0.3, "rng": 5}, {"alibi": rng.standard_normal(heads) ** 2},
             {"relative_bias": rng.standard_normal((heads, 41))},
             {"sinks": 3 * rng.standard_normal(heads), "causal": True}, *SCORES]
    cases += [case | {"bias": bias, "causal": True} for case in SCORES]
    return cases


def of_queries(options, some, shape):
    """The options for a call of these queries alone."""
    query_len, key_len = shape[3:5]
    cut = dict(options)
    for name in ("mask", "bias"):
        if name in cut:
            cut[name] = cut[name][..., some, :]
    if "key_lengths" in cut:
        cut["key_lengths"] = cut["key_lengths"][:, some]
    return cut | {"query_offset": key_len - query_len + some.start}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, *HALVES], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 5])
def test_some_queries_get_what_they_get_among_all(shape, dtype, threads):
    with mha.threads(threads):  # from two on, keys may be cut among them
        compare_cuts(shape, dtype)


def compare_cuts(shape, dtype):
    query, key, value = problem(shape, dtype)
    query_len, key_len = shape[3:5]
    asked = {"return_weights": True, "return_lse": True}
    for options in options_of(shape):
        whole = mha.scaled_dot_product_attention(
            query, key, value, query_offset=key_len - query_len, **asked, **options)
        for count in (1, 2, 3, 4, 7):
            first = 3 if count == 1 else (5 * count) % (query_len - count)
            some = slice(first, first + count)
            if "dropout" in options:  # its mask goes by the number of the query
                some = slice(0, count)
            got = mha.scaled_dot_product_attention(
                query[:, :, some], key, value, **asked, **of_queries(options, some, shape))
            for one, other in zip(got, whole, strict=True):
                assert np.array_equal(one, other[:, :, some]), (options, count)


def test_more_keys_than_a_round_takes():
    """Keys that threads share are taken in rounds of some MiB of scores and sums."""
    query, key, value = problem((1, 16, 1, 1, 90_000, 16, 16), np.float32)
    got = []
    for threads in (1, 5):
        with mha.threads(threads):
            got.append(mha.scaled_dot_product_attention(query, key, value, return_lse=True))
    for one, other in zip(*got, strict=True):
        assert np.array_equal(one, other)
