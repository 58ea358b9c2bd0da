"""One key, which has all the weight (csrc/core/attention/one_key.c): the output is its value."""

import numpy as np
import pytest

import mha

# (batch, heads, kv_heads, query_len, head_dim, value_head_dim)
SHAPES = [(1, 1, 1, 1, 32, 32), (2, 4, 2, 3, 64, 40), (1, 6, 1, 70, 33, 100), (3, 2, 2, 5, 259, 65),
          (1, 1, 1, 2, 65536, 40), (1, 1, 1, 2, 40, 65537), (2, 1, 1, 3, 31, 64),
          (60, 16, 16, 1, 1, 1), (40, 8, 2, 7, 1, 2), (3, 5, 1, 2, 8, 31), (2, 2, 2, 9000, 3, 5)]


def arrays(shape, dtype, lie="one behind the other", seed=0):
    batch, heads, kv_heads, query_len, head_dim, value_head_dim = shape
    rng = np.random.default_rng(seed)

    def draw(heads, length, columns):
        if lie == "side by side":
            return rng.standard_normal((batch, length, heads, columns)).astype(dtype).swapaxes(1, 2)
        return rng.standard_normal((batch, heads, length, columns)).astype(dtype)
    return (draw(heads, query_len, head_dim), draw(kv_heads, 1, head_dim),
            draw(kv_heads, 1, value_head_dim))


def assert_as_with_scores(*inputs, **options):
    """The call that also wants the log-sum-exp computes scores and weights: the same bits."""
    with np.errstate(all="ignore"):
        wanted, _ = mha.scaled_dot_product_attention(*inputs, return_lse=True, **options)
        got = mha.scaled_dot_product_attention(*inputs, **options)
    np.testing.assert_array_equal(got, wanted)
    there = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(got[there]), np.signbit(wanted[there]))
    return got


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("lie", ["one behind the other", "side by side"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_is_the_value(shape, lie, dtype):
    query, key, value = arrays(shape, dtype, lie)
    got = assert_as_with_scores(query, key, value)
    values = np.repeat(value, shape[1] // shape[2], axis=1)
    np.testing.assert_array_equal(got, np.broadcast_to(values, got.shape))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1.0])
@pytest.mark.parametrize("where", ["query", "key", "value", "query and key"])
@pytest.mark.parametrize("columns", [(48, 35), (1, 1), (5, 7)])
def test_numbers_that_are_not_finite(columns, where, number, dtype):
    """Scores of NaN or infinity, and sums that pass the largest number, are computed."""
    query, key, value = arrays((2, 4, 2, 6, *columns), dtype)
    number = np.finfo(dtype).max / 2 if number == 1 else number
    if "query" in where:
        query[0, 1, 2, -1] = query[1, 3, :, 0] = number
    if "key" in where:
        key[0, 0, 0, columns[0] // 12] = key[1, 1, 0, 0] = -number
    if where == "value":
        value[0, 1, 0, -1] = value[1, 0, 0, columns[1] // 6] = number
    assert_as_with_scores(query, key, value)
    assert_as_with_scores(query, key, value, scale=1e-30)
    assert_as_with_scores(query, key, value, scale=-3.0)


@pytest.mark.parametrize("head", [0, 1, 2])
def test_tasks_that_end_within_a_head(head):
    query, key, value = arrays((1, 3, 3, 9000, 3, 5), np.float32)
    key[0, head, 0, 1] = np.inf
    assert not (assert_as_with_scores(query, key, value)[0, head] == value[0, head]).any()


@pytest.mark.parametrize(("scale", "dtype"), [
    (0.0, np.float32), (-1.0, np.float32), (1e30, np.float32), (1e38, np.float32),
    (-1e38, np.float64), (1e300, np.float64)])
def test_scales(scale, dtype):
    assert_as_with_scores(*arrays((2, 2, 2, 3, 64, 64), dtype), scale=scale)


@pytest.mark.parametrize("columns", [32, 1])
def test_negative_zeros(columns):
    query, key, value = arrays((1, 2, 2, 3, columns, columns), np.float32)
    value[..., ::2] = -0.0
    assert not np.signbit(assert_as_with_scores(query, key, value)[..., ::2]).any()


@pytest.mark.parametrize("options", [
    {"mask": np.array([[True], [False], [True]])}, {"causal": True}, {"key_lengths": [0, 1]},
    {"causal": True, "query_offset": -1}, {"bias": np.full((3, 1), -np.inf)}, {"softcap": 2.0},
    {"sinks": np.array([0.0, 1.0])}, {"window": (0, 0)}], ids=str)
def test_options_hide_the_key_or_take_its_weight(options):
    query, key, value = arrays((2, 2, 2, 3, 40, 40), np.float32)
    got = assert_as_with_scores(query, key, value, **options)
    wanted = mha.reference.scaled_dot_product_attention(
        *(array.astype(np.float64) for array in (query, key, value)), **options)
    np.testing.assert_allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("columns", [64, 2])
def test_threads(columns, threads):
    query, key, value = arrays((40, 8, 4, 1920 // columns, columns, columns), np.float32)
    query[3, 2, 7, -1] = np.inf
    with mha.threads(threads):
        assert_as_with_scores(query, key, value)
