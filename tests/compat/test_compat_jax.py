"""mha.compat.jax without JAX: known answers, layouts, and errors.

`make test-peers` compares it with jax.nn itself.
"""

import numpy as np
import pytest

from mha import reference
from mha.compat import jax as compat


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def heads_first(*arrays):
    return [array.swapaxes(1, 2) for array in arrays]


def assert_close(ours, expected, tolerance=1e-12):
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * abs(expected).max())


@pytest.mark.parametrize(("options", "meaning"), [
    ({}, {}), ({"scale": 0.3}, {"scale": 0.3}), ({"implementation": "xla"}, {}),
    ({"is_causal": True}, {"causal": True, "query_offset": 0}),
    ({"local_window_size": 2}, {"window": (2, 2), "query_offset": 0}),
    ({"local_window_size": (1, 0)}, {"window": (1, 0), "query_offset": 0}),
    ({"key_value_seq_lengths": [2, 9]}, {"key_lengths": [2, 7]})])
def test_options_are_mhas(options, meaning):
    query, key, value = random(2, 5, 6, 8), random(2, 7, 3, 8, seed=1), random(2, 7, 3, 8, seed=2)
    expected, lse = reference.scaled_dot_product_attention(
        *heads_first(query, key, value), empty_rows="uniform", return_lse=True, **meaning)
    assert_close(compat.dot_product_attention(query, key, value, **options),
                 expected.swapaxes(1, 2))
    output, residual = compat.dot_product_attention(query, key, value, return_residual=True,
                                                    **options)
    assert_close(output, expected.swapaxes(1, 2))
    seen = np.isfinite(lse.swapaxes(1, 2))
    assert_close(residual[seen], lse.swapaxes(1, 2)[seen])
    assert (residual[~seen] == compat.EMPTY_RESIDUAL).all()


def test_without_keys_the_residual_is_minus_infinity():
    query, key = random(2, 5, 4, 8), random(2, 0, 4, 8)
    _, residual = compat.dot_product_attention(query, key, key, return_residual=True)
    assert (residual == -np.inf).all()


def test_bias_and_mask_lie_over_heads_first():
    query, key = random(2, 5, 4, 8), random(2, 7, 4, 8, seed=1)
    bias, mask = random(1, 4, 5, 7, seed=2), random(2, 1, 5, 7, seed=3) < 0.5
    expected = reference.scaled_dot_product_attention(
        *heads_first(query, key, key), bias=bias, mask=mask, empty_rows="uniform")
    assert_close(compat.dot_product_attention(query, key, key, bias, mask),
                 expected.swapaxes(1, 2))


def test_three_axes_are_a_batch_of_one():
    query, key = random(5, 6, 8), random(7, 2, 8, seed=1)
    output, residual = compat.dot_product_attention(query, key, key, return_residual=True)
    batched = compat.dot_product_attention(query[None], key[None], key[None], return_residual=True)
    np.testing.assert_array_equal(output, batched[0][0])
    np.testing.assert_array_equal(residual, batched[1][0])
    mask = random(6, 5, 7, seed=2) < 0.5
    np.testing.assert_array_equal(
        compat.dot_product_attention(query, key, key, mask=mask),
        compat.dot_product_attention(query[None], key[None], key[None], mask=mask[None])[0])


def test_queries_beyond_their_length_are_zeros():
    query = random(2, 5, 4, 8)
    output, residual = compat.dot_product_attention(
        query, query, query, query_seq_lengths=[3, 9], return_residual=True)
    whole = compat.dot_product_attention(query, query, query)
    assert not output[0, 3:].any()
    np.testing.assert_array_equal(output[0, :3], whole[0, :3])
    np.testing.assert_array_equal(output[1], whole[1])
    assert (residual[0, 3:] == compat.EMPTY_RESIDUAL).all()
    assert (abs(residual[1]) < 100).all()


def test_a_query_without_keys_gets_the_mean():
    query, value = random(1, 2, 1, 8), random(1, 3, 1, 8, seed=1)
    output = compat.dot_product_attention(query, value, value, mask=np.zeros((1, 1, 1, 1), bool))
    assert_close(output, np.broadcast_to(value.mean(axis=1, keepdims=True), output.shape))


def test_types_stay():
    for dtype in (np.float16, np.float32, np.float64):
        x = random(1, 3, 2, 4).astype(dtype)
        before = x.copy()
        output, residual = compat.dot_product_attention(x, x, x, return_residual=True,
                                                        query_seq_lengths=[2])
        assert output.dtype == residual.dtype == dtype
        np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize(("error", "message", "shapes", "options"), [
    (ValueError, r"query: got shape \(3, 4\), wanted \(batch, len, heads", [(3, 4)] * 3, {}),
    (ValueError, r"value: got shape", [(1, 3, 2, 4), (1, 3, 2, 4), (1, 3, 2, 5)], {}),
    (ValueError, "key", [(1, 3, 2, 4), (1, 3, 2, 5), (1, 3, 2, 5)], {}),
    (ValueError, "heads", [(1, 3, 4, 4), (1, 3, 3, 4), (1, 3, 3, 4)], {}),
    (ValueError, "batch|key", [(2, 3, 2, 4), (3, 3, 2, 4), (3, 3, 2, 4)], {}),
    (ValueError, r"mask: got shape \(2, 3, 3\), wanted one that broadcasts to the scores"
     r" \(1, 1, 3, 3\)", [(1, 3, 1, 4)] * 3, {"mask": np.ones((2, 3, 3), bool)}),
    (TypeError, "mask: got .*int64", [(1, 3, 1, 4)] * 3, {"mask": np.ones((3, 3), np.int64)}),
    (ValueError, r"bias: got shape", [(1, 3, 1, 4)] * 3, {"bias": np.ones((2, 3))}),
    (ValueError, r"query_seq_lengths: got shape \(2,\), wanted \(1,\)", [(1, 3, 1, 4)] * 3,
     {"query_seq_lengths": [1, 2]}),
    (TypeError, r"key_value_seq_lengths: got an array of float64", [(1, 3, 1, 4)] * 3,
     {"key_value_seq_lengths": [1.0]}),
    (ValueError, "implementation: got 'cudnn', wanted None or 'xla'", [(1, 3, 1, 4)] * 3,
     {"implementation": "cudnn"}),
    (ValueError, "window", [(1, 3, 1, 4)] * 3, {"local_window_size": -1}),
    (TypeError, "key_lengths: got a keyword .*wanted key_value_seq_lengths=", [(1, 3, 1, 4)] * 3,
     {"key_lengths": [1]}),
    (TypeError, "causal: got a keyword .*wanted is_causal=", [(1, 3, 1, 4)] * 3,
     {"causal": True}),
    (TypeError, "return_lse: got a keyword .*wanted return_residual=", [(1, 3, 1, 4)] * 3,
     {"return_lse": True}),
    (TypeError, "attn_mask: got a keyword .*wanted mask=, bool", [(1, 3, 1, 4)] * 3,
     {"attn_mask": None}),
])
def test_errors(error, message, shapes, options):
    with pytest.raises(error, match=message):
        compat.dot_product_attention(*(np.ones(shape) for shape in shapes), **options)
