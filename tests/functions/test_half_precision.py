"""Attention over float16 and bfloat16: what float32 arrays of the same numbers give, rounded once.

float32 itself is held to float64 references elsewhere; here the bits of halves are held to its bits
and, once more, to the reference."""

import subprocess
import sys

import numpy as np
import pytest
from agreement import FLOOR, by_token, relative_error
from half_types import BFLOAT16, HALVES, ROUNDING, same_bits
from option_cases import fit_together, option_cases

import mha
from mha import reference

# (batch, heads, kv_heads, query_len, key_len, head_dim, value_head_dim): every kernel and tail
SHAPES = [(2, 4, 2, 1, 300, 64, 64), (1, 6, 1, 4, 140, 40, 33), (2, 2, 2, 8, 1030, 37, 5),
          (1, 4, 4, 60, 200, 33, 48), (1, 2, 1, 600, 520, 64, 64), (2, 3, 3, 9, 7, 1, 1),
          (2, 16, 1, 1, 130, 17, 20)]
EMPTY = [(0, 2, 1, 3, 4, 5, 6), (1, 2, 1, 0, 4, 5, 6), (1, 2, 1, 3, 0, 5, 6), (1, 2, 1, 3, 4, 0, 6),
         (1, 2, 1, 3, 4, 5, 0)]


def problem(shape, dtype, seed=0):
    batch, heads, kv_heads, query_len, key_len, head_dim, value_head_dim = shape
    rng = np.random.default_rng(seed)
    arrays = (3 * rng.standard_normal((batch, heads, query_len, head_dim)),
              rng.standard_normal((batch, kv_heads, key_len, head_dim)),
              rng.standard_normal((batch, kv_heads, key_len, value_head_dim)))
    return [array.astype(np.float32).astype(dtype) for array in arrays]


def compare(arrays, **options):
    """Halves against float32 arrays of the same numbers: output, weights, lse and gradients."""
    dtype = arrays[0].dtype
    wide = [array.astype(np.float32) for array in arrays]
    asked = {"return_weights": True, "return_lse": True}
    output, weights, lse = mha.scaled_dot_product_attention(*arrays, **asked, **options)
    wanted = mha.scaled_dot_product_attention(*wide, **asked, **options)
    assert weights.dtype == lse.dtype == np.float32
    assert same_bits(output, wanted[0].astype(dtype)), options
    assert np.array_equal(weights, wanted[1]) and np.array_equal(lse, wanted[2])
    mixed = mha.scaled_dot_product_attention(wide[0], *arrays[1:], **options)
    assert mixed.dtype == np.float32
    assert np.array_equal(mixed, mha.scaled_dot_product_attention(*wide, **options))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + EMPTY)
@pytest.mark.parametrize("threads", [1, 4])
def test_float32_rounded_once(shape, dtype, threads):
    with mha.threads(threads):
        for options in ({}, {"causal": True, "query_offset": 3}):
            compare(problem(shape, dtype), **options)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_reference(shape, dtype):
    """One rounding of the output beyond float32's own gate."""
    arrays = problem(shape, dtype)
    exact = reference.scaled_dot_product_attention(*(a.astype(np.float64) for a in arrays))
    got = mha.scaled_dot_product_attention(*arrays).astype(np.float64)
    assert relative_error(got, exact) <= ROUNDING[dtype] + 2 * FLOOR[np.dtype(np.float32)]


CASES = option_cases(np.random.default_rng(0), (2,), 4, 5, 140)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("first", sorted(CASES))
def test_pairs_of_options(dtype, first):
    arrays = problem((2, 4, 2, 5, 140, 24, 20), dtype)
    for one in CASES[first]:
        for second in CASES:
            if first < second and fit_together({first, second}):
                options = {first: one, second: CASES[second][0], "query_offset": 135}
                options |= {first: one} if first == "query_offset" else {}
                if "dropout" in options:
                    options["rng"] = 3
                compare(arrays, **options)


def layouts(array):
    """The same numbers in other strides."""
    wider = np.zeros((*array.shape[:-1], array.shape[-1] + 3), array.dtype)
    wider[..., 1:-2] = array  # rows of odd length, from an odd place
    wider_rows = np.zeros((*array.shape[:-2], 2 * array.shape[-2], array.shape[-1]), array.dtype)
    wider_rows[..., ::2, :] = array
    backwards = np.ascontiguousarray(array[..., ::-1, :])[..., ::-1, :]
    return [by_token(array), wider[..., 1:-2], backwards, wider_rows[..., ::2, :],
            np.asfortranarray(array)]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("query_len", [1, 5, 40])
def test_strides(dtype, query_len):
    arrays = problem((2, 4, 2, query_len, 150, 32, 20), dtype)
    wanted = mha.scaled_dot_product_attention(*arrays)
    for views in zip(*map(layouts, arrays), strict=True):
        assert same_bits(mha.scaled_dot_product_attention(*views), wanted)
    repeated = [np.broadcast_to(array[:1, :, :1], array.shape) for array in arrays]
    copies = [array.copy() for array in repeated]
    assert same_bits(mha.scaled_dot_product_attention(*repeated),
                     mha.scaled_dot_product_attention(*copies))
    swapped = [array.astype(array.dtype.newbyteorder(">")) if dtype == np.float16 else array
               for array in arrays]
    assert same_bits(mha.scaled_dot_product_attention(*swapped), wanted)
    out = np.zeros_like(layouts(wanted)[1])
    assert mha.scaled_dot_product_attention(*arrays, out=out) is out
    assert same_bits(out, wanted)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("query_len", [1, 5, 40])
def test_numbers_that_are_not_finite(dtype, query_len):
    """NaN and infinity behind a mask do not count; what a query sees does."""
    query, key, value = problem((1, 4, 2, query_len, 150, 32, 20), dtype)
    wanted = mha.scaled_dot_product_attention(query, key[:, :, :100], value[:, :, :100])
    key[:, :, 100:], value[:, :, 100:] = np.nan, np.inf
    got = mha.scaled_dot_product_attention(query, key, value, key_lengths=[100])
    assert same_bits(got, wanted)
    value[:, 0, 3, 2] = np.inf
    got = mha.scaled_dot_product_attention(query, key, value, key_lengths=[100])
    assert np.isposinf(got[:, :2, :, 2].astype(np.float32)).all()
    largest = np.full_like(value, np.finfo(np.float16).max if dtype == np.float16 else 3.3e38)
    got = mha.scaled_dot_product_attention(query, np.zeros_like(key), largest)
    assert same_bits(got, np.full_like(got, largest[0, 0, 0, 0]))


def test_beyond_float16_is_infinite():
    """Without a warning, which filterwarnings makes an error."""
    value = np.full((30, 2), 60000, np.float16)
    got = mha.scaled_dot_product_attention(value * np.float16(0), value, value, dropout=0.5, rng=4)
    assert np.isposinf(got).any() and np.isfinite(got).any()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:4] + EMPTY)
@pytest.mark.parametrize("threads", [1, 4])
def test_gradients(shape, dtype, threads):
    """Those of float32 arrays of the same numbers, rounded once."""
    _, heads, _, query_len, key_len, *_ = shape
    rng = np.random.default_rng(1)
    arrays = problem(shape, dtype)
    wide = [array.astype(np.float32) for array in arrays]
    options = {"bias": rng.standard_normal((heads, query_len, key_len)).astype(np.float32),
               "alibi": rng.random(heads).astype(np.float32), "causal": True,
               "sinks": rng.random(heads).astype(np.float32), "query_offset": 20}
    with mha.threads(threads):
        output, pullback = mha.scaled_dot_product_attention_vjp(*arrays, **options)
        wide_output, wide_pullback = mha.scaled_dot_product_attention_vjp(*wide, **options)
        assert same_bits(output, wide_output.astype(dtype))
        gradient = rng.standard_normal(output.shape).astype(np.float32).astype(dtype)
        got, wanted = pullback(gradient), wide_pullback(gradient.astype(np.float32))
    for name, one, other in zip(got._fields, got, wanted, strict=True):
        if name in ("query", "key", "value"):
            assert same_bits(one, other.astype(dtype)), name
        else:
            assert one is other is None or np.array_equal(one, other), name


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_of_mixed_types(dtype):
    query, key, value = problem((1, 4, 2, 30, 150, 32, 20), dtype)
    query = query.astype(np.float32)
    output, pullback = mha.scaled_dot_product_attention_vjp(query, key, value)
    got = pullback(np.ones_like(output))
    assert output.dtype == got.query.dtype == np.float32
    assert got.key.dtype == got.value.dtype == dtype


def test_result_types():
    """As NumPy's result_type; bfloat16 gives way to float32 and float64."""
    def result(*types):
        return mha.scaled_dot_product_attention(*(np.ones((3, 4), kind) for kind in types)).dtype
    half, single, double = np.float16, np.float32, np.float64
    assert result(half, half, half) == half and result(BFLOAT16, BFLOAT16, BFLOAT16) == BFLOAT16
    assert result(half, np.int8, half) == half and result(half, half, np.int16) == single
    assert result(half, half, np.int64) == double and result(half, bool, half) == half
    assert result(single, BFLOAT16, BFLOAT16) == single == result(BFLOAT16, BFLOAT16, single)
    assert result(double, BFLOAT16, BFLOAT16) == double
    for types in ((half, BFLOAT16, half), (BFLOAT16, np.uint16, BFLOAT16), (single, half, BFLOAT16),
                  (BFLOAT16, BFLOAT16, np.int8), (BFLOAT16, BFLOAT16, bool)):
        with pytest.raises(TypeError, match="bfloat16"):
            result(*types)


CACHES = [np.float16, "bfloat16"]


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("window", [None, 140])
def test_cache_of_halves(dtype, window):
    """Half the memory; however a sequence is cut, the bits of one call on an empty such cache."""
    layer = mha.MultiHeadAttention(24, 4, num_kv_heads=2, rng=0)
    x = np.random.default_rng(0).standard_normal((2, 300, 24)).astype(np.float32)
    cache = layer.new_cache(2, dtype=dtype, capacity=300, window=window)
    assert 2 * cache.nbytes == layer.new_cache(2, capacity=300, window=window).nbytes
    whole = layer(x, cache=layer.new_cache(2, dtype=dtype, window=window))
    assert whole.dtype == np.float32
    at = 0
    for size in (1, 7, 1, 60, 131, 2, 98):
        assert np.array_equal(layer(x[:, at:at + size], cache=cache), whole[:, at:at + size])
        at += size
    assert at == 300


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("given", [np.float32, np.float64, np.int64])
def test_cache_rounds_once(dtype, given):
    """To the nearest, ties to even: float64 not by way of float32."""
    if given == np.int64 and dtype == BFLOAT16:
        return
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((1, 1, 4000, 2)) * 10.0 ** rng.integers(-9, 5, (1, 1, 4000, 2))
    ties = numbers.astype(np.float32).astype(dtype).astype(np.float64)
    ties *= 1 + ROUNDING[dtype] * (1 + 1e-12 * rng.integers(-1, 2, ties.shape))
    key = np.concatenate([numbers, ties], 2).astype(given)
    cache = mha.KVCache(1, 1, 2, dtype=dtype)
    cache.append(key, key)
    stored, exact = cache.key.astype(np.float64), key.astype(np.float64)
    step = np.abs(np.spacing(cache.key.astype(np.float32))).astype(np.float64)
    step *= 2.0**13 if dtype == np.float16 else 2.0**16
    assert cache.key.dtype == dtype
    small = np.abs(exact) < 60000
    lowest = 2.0**-24 if dtype == np.float16 else 0
    assert (np.abs(stored - exact)[small] <= (np.maximum(step, lowest) / 2)[small]).all()


def test_cache_takes_its_own_type():
    cache = mha.KVCache(1, 1, 2, dtype=BFLOAT16)
    halves = np.ones((1, 1, 3, 2), BFLOAT16)
    cache.append(halves, halves)
    assert same_bits(np.array(cache.key), halves)
    for wrong in (np.float16, np.uint16, np.int64, bool):
        with pytest.raises(TypeError, match="bfloat16"):
            cache.append(halves.astype(wrong), halves.astype(wrong))
    with pytest.raises(TypeError, match="float16"):
        mha.KVCache(1, 1, 2, dtype=np.float16).append(halves, halves)
    with pytest.raises(TypeError, match="uint16"):
        mha.KVCache(1, 1, 2, dtype=np.uint16)


WITHOUT = """
import pickle, sys
import numpy as np
import mha
layer = mha.MultiHeadAttention(24, 4, rng=0)
cache = layer.new_cache(1, dtype="bfloat16")
layer(np.ones((1, 5, 24), np.float32), cache=cache)
cache = pickle.loads(pickle.dumps(cache))
layer(np.ones((1, 1, 24), np.float32), cache=cache)
assert cache.dtype == "bfloat16" and cache.lengths == 6 and "bfloat16" in repr(cache)
try:
    cache.key
except ImportError as error:
    assert "ml_dtypes" in str(error)
else:
    raise AssertionError("shown without ml_dtypes")
assert "ml_dtypes" not in sys.modules
"""


def test_without_ml_dtypes():
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)


HALF_LAYOUTS = {
    "heads side by side": lambda array: np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2),
    "by columns": lambda array: np.ascontiguousarray(array.swapaxes(2, 3)).swapaxes(2, 3),
    "with gaps": lambda array: np.repeat(array, 3, 2)[:, :, ::3],
    "backwards": lambda array: np.ascontiguousarray(array[:, ::-1, :, ::-1])[:, ::-1, :, ::-1],
    "swapped": lambda array: (array.astype(array.dtype.newbyteorder()) if array.dtype == np.float16
                              else array),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", HALF_LAYOUTS)
@pytest.mark.parametrize("length", [7, 9000])
def test_grad_output_of_halves_in_any_layout(length, layout, dtype):
    """As contiguous ones: NaN, infinity, the smallest and the largest numbers too. 9,000 queries
    are more than 1 MB."""
    rng = np.random.default_rng(7)
    query, grad_output = rng.standard_normal((2, 2, 3, length, 10)).astype(dtype)
    key, value = rng.standard_normal((2, 2, 3, 5, 10)).astype(dtype)
    grad_output.reshape(-1)[:4] = np.array([np.inf, np.nan, 1e-7, 6e4]).astype(dtype)
    _, back = mha.scaled_dot_product_attention_vjp(query, key, value)
    stored = HALF_LAYOUTS[layout](grad_output)
    np.testing.assert_array_equal(stored.astype(np.float32), grad_output.astype(np.float32))
    for got, wanted in zip(back(stored)[:3], back(grad_output)[:3], strict=True):
        np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32))
