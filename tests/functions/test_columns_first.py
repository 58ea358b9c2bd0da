"""Keys and values stored (head_dim, len), as caches of some libraries are: the core reads them as
they lie, or transposes copies. The bits are those of contiguous ones."""
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mha


def columns_first(array):
    """The same numbers, whose columns are stored before their positions."""
    return np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)


def draw(rng, query_shape, key_shape, value_dim, dtype):
    """query, key, value."""
    return [rng.standard_normal(shape).astype(dtype)
            for shape in (query_shape, key_shape, (*key_shape[:-1], value_dim))]


def compare(query, key, value, **options):
    """Keys, values and both of them by columns, beside rows."""
    results = {"return_weights": True, "return_lse": True}
    attend = mha.scaled_dot_product_attention
    plain = attend(query, key, value, **options)
    wanted = attend(query, key, value, **results, **options)
    for turns_key, turns_value in itertools.product((False, True), repeat=2):
        inputs = (query, columns_first(key) if turns_key else key,
                  columns_first(value) if turns_value else value)
        np.testing.assert_array_equal(attend(*inputs, **options), plain)
        for got, one in zip(attend(*inputs, **results, **options), wanted, strict=True):
            np.testing.assert_array_equal(got, one)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("query_len", [1, 2, 3, 7, 12, 17, 50, 130])
def test_the_bits_of_rows(query_len, dtype, threads):
    rng = np.random.default_rng(query_len)
    arrays = draw(rng, (2, 4, query_len, 36), (2, 2, 700, 36), 21, dtype)
    with mha.threads(threads):
        compare(*arrays)
        compare(*arrays, mask=rng.random((query_len, 700)) < 0.6, softcap=3.0)
        compare(*arrays, causal=True, query_offset=700 - query_len, window=(40, 0))


@pytest.mark.parametrize("key_len", [0, 1, 15, 16, 17, 127, 128, 129, 513])
@pytest.mark.parametrize("head_dim", [1, 2, 31, 32, 33, 64, 100])
def test_sizes_around_those_of_tiles(key_len, head_dim):
    rng = np.random.default_rng(key_len + head_dim)
    for query_len, value_dim in ((1, head_dim), (5, 1), (20, 3)):
        compare(*draw(rng, (3, query_len, head_dim), (3, key_len, head_dim), value_dim, np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("key_len", [1, 3, 4, 5, 7, 8, 9, 11, 12, 17, 26, 33, 50, 63, 64, 65])
def test_few_keys_of_many_heads(key_len, dtype):
    rng = np.random.default_rng(key_len)
    for query_len in (1, 2, 3):
        for head_dim, value_dim in ((8, 8), (21, 3), (32, 1), (64, 64), (80, 96), (101, 70)):
            arrays = draw(rng, (5, 8, query_len, head_dim), (5, 4, key_len, head_dim), value_dim,
                          dtype)
            compare(*arrays)
            compare(*arrays, mask=rng.random((query_len, key_len)) < 0.6)


def test_few_keys_from_memory():
    """More than caches hold: the next ones are prefetched."""
    rng = np.random.default_rng(8)
    for query_len in (1, 2):
        compare(*draw(rng, (60, 16, query_len, 128), (60, 16, 15, 128), 128, np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value_dim", [1, 2, 3, 5, 7, 15, 16, 17])
@pytest.mark.parametrize("key_len", [30, 66, 200, 530])
def test_narrow_values(key_len, value_dim, dtype):
    """Fewer columns than a vector, also where some sums are not finite."""
    rng = np.random.default_rng(key_len + value_dim)
    for query_len in (1, 2, 4):
        query, key, value = draw(rng, (2, query_len, 24), (2, key_len, 24), value_dim, dtype)
        compare(query, key, value)
        value[1, 7], mask = np.inf, np.ones((query_len, key_len), bool)
        mask[:, 7] = False
        compare(query, key, value, mask=mask)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("query_len", range(1, 10))
def test_threads_share_the_keys_of_a_head(query_len, dtype):
    rng = np.random.default_rng(query_len)
    arrays = draw(rng, (1, query_len, 32), (1, 9000, 32), 16, dtype)
    for threads in (1, 2, 3):
        with mha.threads(threads):
            compare(*arrays)


def test_each_worker_copies_a_head_for_many_queries():
    rng = np.random.default_rng(0)
    arrays = draw(rng, (1, 3, 1100, 48), (1, 3, 1030, 48), 40, np.float32)
    for threads in (1, 2, 5):
        with mha.threads(threads):
            compare(*arrays, causal=True)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape(data):
    size = st.integers
    batch, kv_heads, group = (data.draw(size(1, most)) for most in (3, 3, 5))
    query_len, key_len = data.draw(size(0, 60)), data.draw(size(0, 300))
    head_dim, value_dim = data.draw(size(0, 70)), data.draw(size(0, 70))
    rng = np.random.default_rng(data.draw(size(0, 99)))
    arrays = draw(rng, (batch, kv_heads * group, query_len, head_dim),
                  (batch, kv_heads, key_len, head_dim), value_dim,
                  data.draw(st.sampled_from([np.float32, np.float64])))
    options = {}
    if data.draw(st.booleans()):
        options["bias"] = rng.standard_normal((1, kv_heads * group, query_len, key_len))
    if data.draw(st.booleans()):
        options["key_lengths"] = rng.integers(0, key_len + 1, batch)
    if data.draw(st.booleans()):
        options["sinks"] = rng.standard_normal(kv_heads * group)
    compare(*arrays, **options)


@pytest.mark.parametrize(("query_len", "key_len"), [(3, 300), (1, 600)])
def test_numbers_that_are_not_finite(query_len, key_len):
    """NaN behind a mask does not count; sums that pass the largest number are taken again."""
    rng = np.random.default_rng(3)
    query, key, value = draw(rng, (2, query_len, 40), (2, key_len, 40), 40, np.float32)
    for hidden in (107, 7):
        mask = rng.random((query_len, key_len)) < 0.5
        mask[:, [7, 107]] = False
        key[:, hidden], value[:, hidden] = np.nan, np.inf
        compare(query, key, value, mask=mask)
    huge = np.full_like(value, 3e38)
    compare(query, np.zeros_like(key), huge)
    assert np.isfinite(mha.scaled_dot_product_attention(
        query, columns_first(np.zeros_like(key)), columns_first(huge))).all()


def test_every_second_position_and_negative_strides():
    """What is neither by rows nor by columns is copied."""
    rng = np.random.default_rng(4)
    query, key, value = draw(rng, (2, 3, 24), (2, 90, 24), 24, np.float32)
    wanted = mha.scaled_dot_product_attention(query, key, value)
    for turn in (lambda array: np.repeat(columns_first(array), 2, axis=-2)[:, ::2],
                 lambda array: columns_first(array[..., ::-1].copy())[..., ::-1],
                 lambda array: columns_first(array[:, ::-1].copy())[:, ::-1]):
        assert np.array_equal(turn(key), key)
        np.testing.assert_array_equal(
            mha.scaled_dot_product_attention(query, turn(key), turn(value)), wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_gradients(dtype):
    rng = np.random.default_rng(5)
    arrays = draw(rng, (2, 2, 70, 40), (2, 2, 150, 40), 24, dtype)
    outputs = []
    for inputs in (arrays, [arrays[0], *map(columns_first, arrays[1:])],
                   list(map(columns_first, arrays))):
        output, pullback = mha.scaled_dot_product_attention_vjp(*inputs)
        outputs.append([output, *pullback(np.cos(output))])
    for others in outputs[1:]:
        for one, other in zip(outputs[0], others, strict=True):
            np.testing.assert_array_equal(one, other)


def test_beside_the_reference():
    rng = np.random.default_rng(6)
    query, key, value = draw(rng, (2, 4, 1, 64), (2, 4, 1000, 64), 64, np.float32)
    got = mha.scaled_dot_product_attention(query, columns_first(key), columns_first(value))
    wanted = mha.reference.scaled_dot_product_attention(
        *(array.astype(np.float64) for array in (query, key, value)))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(3, 70, 130), (1, 8, 8), (2, 9, 65), (130, 200), (5, 4, 16),
                                   (3, 18, 9), (67, 128), (67, 5)])
def test_copies_of_what_lies_by_columns(dtype, shape):
    """mha.linear copies its x, of any type."""
    rng = np.random.default_rng(7)
    x = rng.integers(0, 2, shape).astype(dtype)
    weight = rng.integers(-3, 3, (shape[-1], 5)).astype(np.float32)
    np.testing.assert_array_equal(mha.linear(columns_first(x), weight), mha.linear(x, weight))
