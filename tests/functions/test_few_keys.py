"""Attention over few keys, of many heads: a kernel whose lanes are heads, or keys of one wide head
after the other. A call that also wants weights takes another kernel; both must give the same bits.
Numbers are those of the reference."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from option_cases import option_cases

import mha


def draw(rng, batch, heads, kv_heads, query_len, key_len, head_dim, value_dim, dtype):
    """query, key, value."""
    return [rng.standard_normal((batch, *shape)).astype(dtype)
            for shape in ((heads, query_len, head_dim), (kv_heads, key_len, head_dim),
                          (kv_heads, key_len, value_dim))]


def compare(arrays, **options):
    """Output and lse, beside a call that wants weights too."""
    attend = mha.scaled_dot_product_attention
    output, _, lse = attend(*arrays, return_weights=True, return_lse=True, **options)
    np.testing.assert_array_equal(attend(*arrays, **options), output)
    for got, wanted in zip(attend(*arrays, return_lse=True, **options), (output, lse), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("head_dim", [1, 3, 8, 31, 32, 33, 64, 80, 130])
def test_the_bits_of_the_other_kernels(head_dim, dtype, threads):
    rng = np.random.default_rng(head_dim)
    with mha.threads(threads):
        for key_len in (1, 2, 5, 8, 16, 17, 63, 64, 65):
            for batch, heads, kv_heads, query_len in ((7, 8, 8, 1), (5, 6, 3, 1), (4, 4, 4, 3),
                                                      (3, 7, 7, 4), (2, 9, 9, 6)):
                compare(draw(rng, batch, heads, kv_heads, query_len, key_len, head_dim,
                             head_dim // 2 + 1, dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("heads", [1, 2, 3, 16])
def test_heads_side_by_side(heads, dtype):
    """Lanes of one batch item and of several, and empty ones."""
    rng = np.random.default_rng(8)
    for batch in (1, 2, 3, 8):
        for key_len in range(1, 16):
            arrays = [rng.standard_normal((batch, length, heads, 7)).astype(dtype).swapaxes(1, 2)
                      for length in (1, key_len, key_len)]
            wanted = mha.scaled_dot_product_attention(*map(np.ascontiguousarray, arrays))
            np.testing.assert_array_equal(mha.scaled_dot_product_attention(*arrays), wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("query_len", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("key_len", "columns"), [(2, 4096), (7, 1200), (12, 1024), (14, 595),
                                                  (15, 513), (20, 600), (33, 301)])
def test_wide_keys(key_len, columns, query_len, dtype):
    """More than 64 KB a head, as rows, heads side by side and columns."""
    rng = np.random.default_rng(key_len)
    for batch, heads, value_dim in ((2, 8, columns), (3, 4, 9)):
        query, key, value = draw(rng, batch, heads, heads, query_len, key_len, columns, value_dim,
                                 dtype)
        compare((query, key, value))
        compare((query, key, value), causal=True, query_offset=key_len - 2)
        wanted = mha.scaled_dot_product_attention(query, key, value)
        for axes in ((1, 2), (2, 3)):
            turned = [np.ascontiguousarray(array.swapaxes(*axes)).swapaxes(*axes)
                      for array in (key, value)]
            np.testing.assert_array_equal(mha.scaled_dot_product_attention(query, *turned), wanted)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (2, 2), (6, 3)])
@pytest.mark.parametrize("batch", [(30,), (5, 7), (2, 3, 4), (1, 20, 1)])
def test_lanes_of_several_batch_axes(batch, heads, kv_heads):
    """Masks and biases of some axes alone, and lengths that tell batch items apart."""
    rng = np.random.default_rng(12)
    query, key, value = (rng.standard_normal((*batch, count, length, 9)).astype(np.float32)
                         for count, length in ((heads, 2), (kv_heads, 5), (kv_heads, 5)))
    for shape in ((2, 5), (heads, 1, 5), (*batch, 1, 1, 5), (*batch[:-1], 1, heads, 2, 5)):
        compare((query, key, value), mask=rng.random(shape) < 0.7)
        compare((query, key, value), bias=rng.standard_normal(shape).astype(np.float32))
    compare((query, key, value), key_lengths=rng.integers(0, 6, batch))
    compare((query[..., ::-1, :, :], key[..., ::-1, :, :], value))


@pytest.mark.parametrize("head_dim", [40, 80])
@pytest.mark.parametrize("query_len", [1, 2, 3, 4, 6])
def test_positions_and_lengths(query_len, head_dim):
    rng = np.random.default_rng(query_len)
    arrays = draw(rng, 6, 8, 8, query_len, 9, head_dim, head_dim, np.float32)
    for options in ({"causal": True}, {"causal": True, "query_offset": 4}, {"window": (2, 1)},
                    {"key_lengths": rng.integers(0, 10, 6)}, {"scale": 0.3}, {"scale": 0.0},
                    {"key_lengths": rng.integers(0, 10, (6, query_len)), "causal": True,
                     "query_offset": rng.integers(0, 9, 6)}):
        compare(arrays, **options)


@pytest.mark.parametrize("head_dim", [40, 80])
@pytest.mark.parametrize("query_len", [1, 3, 5])
def test_each_option(query_len, head_dim):
    """Those that this kernel refuses, too."""
    rng = np.random.default_rng(8)
    arrays = draw(rng, 6, 8, 8, query_len, 9, head_dim, head_dim, np.float32)
    for name, values in option_cases(rng, (6,), 8, query_len, 9).items():
        for value in values:
            other = {"dropout": 0.3} if name == "dropout_offsets" else {}
            compare(arrays, **{name: value}, **other, rng=1 if "dropout" in name else None)


@pytest.mark.parametrize("head_dim", [20, 64, 72, 80, 128])
@pytest.mark.parametrize("query_len", [1, 2, 3, 4, 6])
def test_rows_that_lie_apart(query_len, head_dim):
    """As projections store them, and with numbers between two rows."""
    rng = np.random.default_rng(head_dim)
    arrays = draw(rng, 5, 8, 8, query_len, 7, head_dim, head_dim, np.float32)
    wanted = mha.scaled_dot_product_attention(*arrays)
    by_positions = [np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2) for array in arrays]
    wider = [np.concatenate([array, array], axis=-1)[..., :head_dim] for array in arrays]
    for query, key, value in (by_positions, wider, (arrays[0], by_positions[1], wider[2])):
        compare((query, key, value))
        np.testing.assert_array_equal(mha.scaled_dot_product_attention(query, key, value), wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (96, 96), (128, 70), (72, 80),
                                                     (101, 77), (161, 161)])
@pytest.mark.parametrize("key_len", [3, 12, 24, 33, 64])
def test_wide_heads(key_len, head_dim, value_dim, dtype):
    """Read as they lie, up to three queries of a key head; also heads 4,096 bytes apart, and more
    than the last cache holds."""
    rng = np.random.default_rng(key_len)
    for batch, heads, kv_heads, query_len in ((5, 7, 7, 1), (3, 8, 8, 2), (3, 16, 8, 1),
                                              (2, 24, 8, 1), (1, 17, 17, 3), (40, 16, 16, 1)):
        arrays = draw(rng, batch, heads, kv_heads, query_len, key_len, head_dim, value_dim, dtype)
        compare(arrays)
        compare([arrays[0], arrays[1].astype(np.float32), arrays[2]])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "query_len"), [
    (13, 13, 4), (13, 13, 5), (9, 9, 7), (3, 3, 8), (8, 2, 1), (6, 3, 2), (1, 1, 3), (2, 1, 1)])
def test_a_head_after_the_other(heads, kv_heads, query_len, dtype, threads):
    """All queries of a wide head together: keys that fill one vector, a part of it, or several."""
    rng = np.random.default_rng(query_len)
    with mha.threads(threads):
        for key_len in (2, 4, 6, 8, 11, 15, 16, 17, 24, 31, 32, 40, 64):
            for batch, head_dim, value_dim in ((1, 64, 64), (3, 128, 70), (2, 259, 101)):
                arrays = draw(rng, batch, heads, kv_heads, query_len, key_len, head_dim, value_dim,
                              dtype)
                compare(arrays)
                compare(arrays, causal=True, query_offset=key_len // 2)


@pytest.mark.parametrize("key_len", [7, 8, 16, 30])
@pytest.mark.parametrize(("heads", "kv_heads", "query_len"), [(5, 5, 4), (6, 3, 2), (3, 3, 6),
                                                              (4, 1, 1)])
def test_options_of_a_head_after_the_other(heads, kv_heads, query_len, key_len):
    rng = np.random.default_rng(key_len)
    query, key, value = draw(rng, 4, heads, kv_heads, query_len, key_len, 128, 96, np.float32)
    for name, values in option_cases(rng, (4,), heads, query_len, key_len).items():
        for option in values:
            other = {"dropout": 0.3} if name == "dropout_offsets" else {}
            compare((query, key, value), **{name: option}, **other,
                    rng=1 if "dropout" in name else None)
    query[1, 2, 0, 3], key[2, 0, 1], value[3, 0, 5] = np.nan, np.inf, -np.inf
    compare((query, key, value), mask=rng.random((query_len, key_len)) < 0.7)
    query[:], value[:] = 1, 3e38
    compare((query, np.zeros_like(key), value))
    assert np.isfinite(mha.scaled_dot_product_attention(query, np.zeros_like(key), value)).all()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_shape(data):
    size = st.integers
    batch, kv_heads, group = (data.draw(size(0, most)) for most in (9, 20, 3))
    query_len, key_len = data.draw(size(0, 9)), data.draw(size(0, 66))
    head_dim, value_dim = data.draw(size(0, 140)), data.draw(size(0, 140))
    rng = np.random.default_rng(data.draw(size(0, 99)))
    arrays = draw(rng, batch, kv_heads * max(group, 1), kv_heads, query_len, key_len, head_dim,
                  value_dim, data.draw(st.sampled_from([np.float32, np.float64])))
    if data.draw(st.booleans()):  # as projections store them
        arrays = [np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2) for array in arrays]
    compare(arrays, causal=data.draw(st.booleans()))


@pytest.mark.parametrize("head_dim", [20, 64, 68])
@pytest.mark.parametrize("query_len", [2, 4])
def test_outputs_that_lie_apart(query_len, head_dim):
    rng = np.random.default_rng(9)
    arrays = draw(rng, 5, 8, 8, query_len, 6, head_dim, head_dim, np.float32)
    wanted = mha.scaled_dot_product_attention(*arrays)
    out = np.empty((5, query_len, 8, head_dim + 4), np.float32)[..., :head_dim].swapaxes(1, 2)
    assert mha.scaled_dot_product_attention(*arrays, out=out) is out
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("head_dim", [32, 64])
def test_numbers_that_are_not_finite(head_dim):
    """Those behind the causal mask do not count; a row's own stay its own; sums of large values
    that pass the largest number are taken again."""
    rng = np.random.default_rng(10)
    query, key, value = draw(rng, 6, 8, 8, 3, 8, head_dim, head_dim, np.float32)
    query[1, 2, 0, 3], key[2, 3, 1], value[3, 4, 5] = np.nan, np.inf, -np.inf
    key[:, :, -1], value[:, :, -1] = np.nan, np.nan
    compare((query, key, value), causal=True, query_offset=4)
    output = mha.scaled_dot_product_attention(query, key, value, causal=True, query_offset=4)
    assert np.isnan(output[1, 2, 0]).all() and np.isfinite(output[1, 2, 1:]).all()
    assert np.isneginf(output[3, 4, 1:]).all() and np.isfinite(output[[0, 4, 5]]).all()
    query[:], value[:] = 1, 3e38
    compare((query, np.zeros_like(key), value))
    assert np.isfinite(mha.scaled_dot_product_attention(query, np.zeros_like(key), value)).all()


def test_gradients_use_its_statistics():
    rng = np.random.default_rng(11)
    query, key, value = draw(rng, 6, 8, 8, 2, 7, 24, 24, np.float64)
    output, pullback = mha.scaled_dot_product_attention_vjp(query, key, value)
    np.testing.assert_array_equal(output, mha.scaled_dot_product_attention(query, key, value))
    _, wanted = mha.reference.scaled_dot_product_attention_vjp(query, key, value)
    grad = np.cos(output)
    for name, got in zip(("query", "key", "value"), pullback(grad), strict=False):
        np.testing.assert_allclose(got, wanted(grad)[name], rtol=0, atol=1e-13)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-6), (np.float64, 1e-14)])
def test_beside_the_reference(dtype, tolerance):
    rng = np.random.default_rng(12)
    for query_len, key_len, head_dim in ((1, 1, 64), (1, 12, 64), (3, 7, 64), (4, 8, 64),
                                         (8, 16, 128)):
        arrays = draw(rng, 5, 12, 4 if query_len == 1 else 12, query_len, key_len, head_dim,
                      head_dim, dtype)
        wanted = mha.reference.scaled_dot_product_attention(
            *(array.astype(np.longdouble) if dtype == np.float64 else array.astype(np.float64)
              for array in arrays))
        np.testing.assert_allclose(mha.scaled_dot_product_attention(*arrays), wanted, rtol=0,
                                   atol=tolerance)
