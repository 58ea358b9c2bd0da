"""Heads that share a key head and have few queries are computed as more queries of one head: the
bits are those of heads that share none."""
import numpy as np
import pytest
from option_cases import option_cases

import mha

BATCH, KEY_LEN = 2, 70


def draw(rng, group, query_len, dtype, head_dim=20):
    """query, key, value: three key heads."""
    return [rng.standard_normal((BATCH, heads, length, head_dim)).astype(dtype)
            for heads, length in ((3 * group, query_len), (3, KEY_LEN), (3, KEY_LEN))]


def compare(arrays, group, **options):
    """Output, weights and lse."""
    query, key, value = arrays
    own = [np.repeat(array, group, axis=1) for array in (key, value)]
    for more in ({}, {"return_weights": True, "return_lse": True}):
        got, wanted = (mha.scaled_dot_product_attention(query, *each, **options, **more)
                       for each in ((key, value), own))
        for left, right in zip(got if more else [got], wanted if more else [wanted], strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("group", [2, 5, 8])
def test_the_bits_of_heads_of_their_own(group, dtype, threads):
    rng = np.random.default_rng(group)
    with mha.threads(threads):
        for query_len in (3, 4, 5, 9, 12, 17, 23, 40, 47, 48, 50):
            arrays = draw(rng, group, query_len, dtype)
            compare(arrays, group)
            compare(arrays, group, causal=True, query_offset=KEY_LEN - query_len)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("query_len", [1, 2, 3, 4, 7])
def test_one_and_a_few_queries(query_len, dtype, threads):
    """A token of heads that fill vectors, half of one, or less; also as projections store them."""
    rng = np.random.default_rng(query_len)
    with mha.threads(threads):
        for group in (3, 4, 7, 8, 12, 16, 32):
            for key_len in (1, 2, 12, 48, 49, 256, 257):
                query, key, value = (
                    rng.standard_normal((3, length, heads, 20)).astype(dtype).swapaxes(1, 2)
                    for heads, length in ((2 * group, query_len), (2, key_len), (2, key_len)))
                compare((query, key, value), group)
                compare([np.ascontiguousarray(each) for each in (query, key, value)], group,
                        key_lengths=rng.integers(0, key_len + 1, 3))
                out = np.empty((3, query_len, 2 * group, 20), dtype).swapaxes(1, 2)
                mha.scaled_dot_product_attention(query, key, value, out=out)
                np.testing.assert_array_equal(out, mha.scaled_dot_product_attention(
                    query, key, value))


@pytest.mark.parametrize("query_len", [1, 4, 11, 20])
def test_each_option(query_len):
    """Those that tell heads or queries apart, too."""
    rng = np.random.default_rng(query_len)
    arrays = draw(rng, 4, query_len, np.float32)
    for name, values in option_cases(rng, (BATCH,), 12, query_len, KEY_LEN).items():
        for value in values:
            other = {"dropout": 0.3} if name == "dropout_offsets" else {}
            compare(arrays, 4, **{name: value}, **other, rng=1 if "dropout" in name else None)


@pytest.mark.parametrize("query_len", [1, 4, 11, 20])
def test_positions(query_len):
    """A query stands where it stood in its head."""
    rng = np.random.default_rng(query_len)
    arrays = draw(rng, 4, query_len, np.float32)
    offsets = rng.integers(-9, KEY_LEN, BATCH)
    lengths = rng.integers(0, KEY_LEN + 1, (BATCH, query_len))
    for options in ({"causal": True, "query_offset": -2}, {"causal": True, "query_offset": offsets},
                    {"window": (5, 2), "query_offset": offsets}, {"key_lengths": lengths[:, 0]},
                    {"key_lengths": lengths, "causal": True, "query_offset": 40},
                    {"causal": True, "query_offset": 40, "softcap": 3.0, "scale": 0.7}):
        compare(arrays, 4, **options)


def test_rows_that_lie_apart():
    """As projections store them, where no stride leads from head to head; NaN and infinity."""
    rng = np.random.default_rng(1)
    arrays = draw(rng, 4, 11, np.float32)
    arrays[0][1, 2, 3, 4], arrays[2][0, 1, 30, 2] = np.nan, np.inf
    wanted = mha.scaled_dot_product_attention(*arrays, causal=True, query_offset=50)
    for swapped in ([0], [1, 2], [0, 1, 2]):
        given = list(arrays)
        for i in swapped:
            given[i] = np.ascontiguousarray(arrays[i].swapaxes(1, 2)).swapaxes(1, 2)
        np.testing.assert_array_equal(mha.scaled_dot_product_attention(
            *given, causal=True, query_offset=50), wanted)
    compare(arrays, 4, causal=True, query_offset=50)
