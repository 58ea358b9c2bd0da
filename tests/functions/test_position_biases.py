"""Slopes of ALiBi and T5's buckets: against the papers' formulas, and where these are in doubt."""

import math

import numpy as np
import pytest

import mha
from mha import reference


def test_slopes_of_the_paper():
    """Section 3: 1/2, 1/4 ... for 8 heads, and their square roots among them for 16."""
    assert np.array_equal(mha.alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    assert np.allclose(mha.alibi_slopes(16), 2.0 ** (-np.arange(1, 17) / 2), rtol=1e-15)
    assert np.array_equal(mha.alibi_slopes(1), [2.0**-8])
    assert np.array_equal(mha.alibi_slopes(4, max_bias=4), [0.5, 0.25, 0.125, 0.0625])


@pytest.mark.parametrize("heads", [3, 5, 6, 7, 12, 20, 40, 71, 112])
def test_slopes_for_other_numbers_of_heads(heads):
    """Those of the power of two below, then every other one of twice as many."""
    power = 2 ** math.floor(math.log2(heads))
    wanted = [*mha.alibi_slopes(power), *mha.alibi_slopes(2 * power)[::2][:heads - power]]
    assert np.array_equal(mha.alibi_slopes(heads), wanted)


def bucket_by_logarithms(distance, bidirectional, buckets, max_distance):
    """As the paper's authors and others compute it: in float32 by PyTorch, here in float64 and
    rounded up where that is a matter of its last digits."""
    bucket = 0
    if bidirectional:
        buckets //= 2
        bucket = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return bucket + distance
    steps = (math.log(distance / exact) / math.log(max_distance / exact)) * (buckets - exact)
    return bucket + min(exact + math.floor(steps + 1e-9), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [
    (32, 128), (32, 20), (8, 16), (5, 3), (33, 1000), (64, 256), (4, 2), (320, 800)])
def test_buckets_of_t5(bidirectional, buckets, max_distance):
    table = np.arange(buckets)[:, None] * [1.0, -1.0]
    expanded = mha.t5_relative_bias(table, bidirectional=bidirectional, max_distance=max_distance) \
        if max_distance > buckets // (4 if bidirectional else 2) else None
    if expanded is None:
        with pytest.raises(ValueError, match="max_distance: got"):
            mha.t5_relative_bias(table, bidirectional=bidirectional, max_distance=max_distance)
        return
    wanted = [bucket_by_logarithms(distance, bidirectional, buckets, max_distance)
              for distance in range(-max_distance, max_distance + 1)]
    assert np.array_equal(expanded, [wanted, np.negative(wanted)])
    for beyond in (max_distance + 1, 100 * max_distance):  # what the ends stand for
        assert wanted[0] == bucket_by_logarithms(-beyond, bidirectional, buckets, max_distance)
        assert wanted[-1] == bucket_by_logarithms(beyond, bidirectional, buckets, max_distance)


def test_attention_of_t5():
    """The table by buckets for each pair, as T5 adds it to the scores, and its gradient."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, 4, length, 8)) for length in (150, 170, 170))
    table = rng.standard_normal((32, 4))
    at = np.array([[bucket_by_logarithms(j - i, True, 32, 128) for j in range(170)]
                   for i in range(150)])
    options = {"scale": 1.0, "query_offset": 0}
    bias = table.T[:, at][None]
    wanted, bias_pullback = reference.scaled_dot_product_attention_vjp(
        query, key, value, bias=bias, **options)
    expanded, table_pullback = mha.t5_relative_bias_vjp(table, bidirectional=True)
    output, pullback = mha.scaled_dot_product_attention_vjp(
        query, key, value, relative_bias=expanded, **options)
    assert np.allclose(output, wanted, rtol=0, atol=1e-13)
    grad_output = rng.standard_normal(output.shape)
    grad_bias = bias_pullback(grad_output)["bias"][0]
    grad_table = np.zeros((32, 4))
    np.add.at(grad_table, at, np.moveaxis(grad_bias, 0, -1))
    got = table_pullback(pullback(grad_output).relative_bias).table
    assert np.allclose(got, grad_table, rtol=0, atol=1e-12 * np.abs(grad_table).max())


def test_types_and_shapes():
    table = np.ones((32, 3), np.float32)
    expanded, pullback = mha.t5_relative_bias_vjp(table, bidirectional=False, max_distance=50)
    assert expanded.dtype == np.float32 and expanded.shape == (3, 101)
    assert pullback(expanded.tolist()).table.dtype == np.float32
    assert pullback(expanded).table.sum() == expanded.size
    assert mha.t5_relative_bias(table.astype(int).tolist(), bidirectional=True).dtype == float


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: mha.alibi_slopes(2**63), MemoryError, "num_heads: got shape"),
    (lambda: mha.alibi_slopes(4, 10**400), ValueError, "max_bias: got 1"),
    (lambda: mha.alibi_slopes(0), ValueError, "num_heads: got 0, wanted at least 1"),
    (lambda: mha.alibi_slopes(2.0), TypeError, "num_heads: got float, wanted an int"),
    (lambda: mha.alibi_slopes(4, max_bias="8"), TypeError, "max_bias: got str, wanted a finite"),
    (lambda: mha.alibi_slopes(4, max_bias=math.inf), ValueError, "max_bias: got inf, wanted a fin"),
    (lambda: mha.alibi_slopes(4, max=1), TypeError, "max: got a keyword"),
    (lambda: mha.t5_relative_bias(np.ones(32), bidirectional=True), ValueError,
     r"table: got shape \(32,\), wanted \(buckets, heads\)"),
    (lambda: mha.t5_relative_bias(np.ones((3, 8)), bidirectional=True), ValueError,
     "table: .*at least 4 buckets"),
    (lambda: mha.t5_relative_bias(np.ones((32, 8)) * 1j, bidirectional=True), TypeError,
     "table: got an array of complex128"),
    (lambda: mha.t5_relative_bias(np.ones((32, 8)), bidirectional=1), TypeError,
     "bidirectional: got int, wanted True or False"),
    (lambda: mha.t5_relative_bias(np.ones((32, 8)), bidirectional=True, max_distance=8),
     ValueError, "max_distance: got 8, wanted at least 9"),
    (lambda: mha.t5_relative_bias(np.ones((32, 8)), bidirectional=True, max_distance=9.5),
     TypeError, "max_distance: got float"),
    (lambda: mha.t5_relative_bias_vjp(np.ones((32, 8)), bidirectional=True)[1](np.ones((8, 9))),
     ValueError, r"grad_expanded: got shape \(8, 9\), wanted \(8, 257\)"),
])
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
