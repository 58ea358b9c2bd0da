"""Additive attention: w_v . tanh(query W_q + key W_k)."""

import itertools

import numpy as np
import pytest
from agreement import assert_accurate

import mha
from mha import reference

GOLDEN = np.load("tests/data/d2l.npz")


def random_arguments(rng, dtype, batch=(2,), heads=(), kv_heads=(), query_len=5, key_len=40,
                     hidden=8):
    shapes = ((*batch, *heads, query_len, 20), (*batch, *kv_heads, key_len, 3),
              (*batch, *kv_heads, key_len, 4), (20, hidden), (3, hidden), (hidden,))
    arguments = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    arguments[3] /= dtype(20**0.5)  # scores stay of order 1
    arguments[5] /= dtype(max(hidden, 1) ** 0.5)
    return arguments


def check(arguments, **options):
    assert_accurate(mha.additive_attention, reference.additive_attention, arguments,
                    {"return_weights": True, **options})


def test_golden_data():
    names = ("query", "key", "value", "W_q", "W_k", "w_v")
    output, weights = mha.additive_attention(
        *(GOLDEN["additive_" + name] for name in names),
        key_lengths=GOLDEN["additive_valid_lens"], return_weights=True)
    assert np.abs(output - GOLDEN["additive_output"]).max() < 2e-6 * np.abs(output).max()
    assert np.abs(weights - GOLDEN["additive_weights"]).max() < 2e-6


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("hidden", [0, 1, 8, 300])
def test_against_the_reference(dtype, hidden):
    rng = np.random.default_rng(hidden)
    for batch, heads, kv_heads in (((), (), ()), ((2,), (), ()), ((2,), (4,), (2,)),
                                   ((2, 3), (2,), (1,))):
        for query_len, key_len in ((1, 1), (30, 140), (0, 3), (3, 0)):
            check(random_arguments(rng, dtype, batch, heads, kv_heads, query_len, key_len, hidden))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_options(dtype):
    rng = np.random.default_rng(0)
    arguments = random_arguments(rng, dtype, heads=(2,), kv_heads=(1,))
    cases = {"mask": rng.random((5, 40)) < 0.3, "key_lengths": [0, 30], "causal": True,
             "query_offset": 2, "empty_rows": "uniform", "dropout": 0.3}
    for one, other in itertools.combinations(cases, 2):
        check(arguments, **{"rng": 3, "query_offset": 1, one: cases[one], other: cases[other]})


def test_a_column_vector_is_not_a_vector():
    arguments = random_arguments(np.random.default_rng(1), np.float32)
    with pytest.raises(ValueError, match=r"w_v: got shape \(8, 1\), wanted \(8,\)"):
        mha.additive_attention(*arguments[:5], arguments[5][:, None])
