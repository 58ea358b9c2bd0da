"""Caches in blocks of 8 bits: the blocks of the gguf package, and the bits of attention to the
numbers that they stand for."""
import copy
import pickle

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mha
from mha._base.dtypes import Q8_0

OF_GGUF = gguf.GGMLQuantizationType.Q8_0
LAYERS = {"a head a key head": {}, "grouped": {"num_kv_heads": 2},
          "one key head": {"num_kv_heads": 1, "head_dim": 32, "value_head_dim": 64},
          "odd number of blocks": {"head_dim": 96}, "wide": {"head_dim": 160, "num_kv_heads": 2},
          "window": {"window": (150, 0), "sinks": True}, "alibi": {"alibi": mha.alibi_slopes(8)}}


def new_layer(name="a head a key head", **more):
    return mha.MultiHeadAttention(128, 8, rng=0, **{"head_dim": 64, **LAYERS[name], **more})


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def dequantised(array):
    """What gguf's blocks of it stand for."""
    blocks = gguf.quants.quantize(np.ascontiguousarray(array, np.float32), OF_GGUF)
    return gguf.quants.dequantize(blocks, OF_GGUF)


def attended(layer, x, key, value, first):
    """What a layer gives for rows that stand behind `first` others, all keys there."""
    heads = mha.split_heads(mha.linear(x, layer.W_q, layer.b_q), layer.num_heads)
    merged = mha.merge_heads(mha.scaled_dot_product_attention(
        heads, key, value, causal=True, query_offset=first, window=layer.window,
        sinks=layer.sinks, alibi=layer.alibi))
    return mha.linear(merged, layer.W_o, layer.b_o)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_the_bits_of_a_float32_cache_of_its_numbers(name, batch, threads):
    layer = new_layer(name)
    cache = layer.new_cache(batch, dtype="q8_0")
    x = rows(batch, 700, 128)
    key = mha.split_heads(mha.linear(x, layer.W_k, layer.b_k), layer.num_kv_heads)
    value = mha.split_heads(mha.linear(x, layer.W_v, layer.b_v), layer.num_kv_heads)
    key, value = dequantised(key), dequantised(value)
    first = 0
    with mha.threads(threads):
        for n in (1, 1, 2, 3, 150, 1, 4, 9, 30, 1, 90, 1, 300, 1, 2, 1):
            new = slice(first, first + n)
            got = layer(x[:, new], cache=cache)
            first += n
            np.testing.assert_array_equal(
                got, attended(layer, x[:, new], key[:, :, :first], value[:, :, :first], new.start))
    np.testing.assert_array_equal(cache.key, key[:, :, :first])
    np.testing.assert_array_equal(cache.value, value[:, :, :first])


@given(st.integers(0, 2**32), st.integers(-20, 6))
@settings(max_examples=60, deadline=None)
def test_the_blocks_of_gguf(seed, exponent):
    """Zeros, equal largest magnitudes of either sign, halves between two numbers."""
    rng = np.random.default_rng(seed)
    key = (rng.standard_normal((1, 2, 4, 96)) * 10.0**exponent).astype(np.float32)
    key[0, 0, 0, :32], key[0, 1, 1] = 0, np.sign(key[0, 1, 1])
    key[0, 1, 2] = np.round(key[0, 1, 2], 1)
    cache = mha.KVCache(1, 2, 96, dtype="q8_0")
    cache.append(key, key[..., ::-1])
    assert cache.key.tobytes() == dequantised(key).tobytes()
    assert cache.value.tobytes() == dequantised(key[..., ::-1]).tobytes()
    stored = cache._state.key[:, :, :4].view(np.uint8)
    assert stored.tobytes() == gguf.quants.quantize(key, OF_GGUF).tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_layers_of_other_types(dtype):
    layer = new_layer(dtype=dtype)
    x = rows(2, 40, 128).astype(dtype)
    cache, plain = layer.new_cache(2, dtype="q8_0"), layer.new_cache(2)
    for part in (slice(0, 30), slice(30, 31), slice(31, 40)):
        got = layer(x[:, part], cache=cache)
        wanted = layer(x[:, part], cache=plain)
        assert got.dtype == dtype
        assert np.abs(got - wanted).max() < 0.02
    assert np.abs(cache.key - plain.key).max() < 0.02


def test_what_is_not_finite_spoils_only_those_who_see_it():
    layer = new_layer()
    x = rows(2, 8, 128)
    cache, other = (layer.new_cache(2, dtype="q8_0") for _ in range(2))
    layer(x[:, :5], cache=cache)
    layer(x[:, :5], cache=other)
    bad = x[:, 5:6].copy()
    bad[1, 0, 3] = np.nan
    got, wanted = layer(bad, cache=cache), layer(x[:, 5:6], cache=other)
    np.testing.assert_array_equal(got[0], wanted[0])
    assert np.isnan(got[1]).all() and np.isnan(cache.key[1, :, 5]).all()
    np.testing.assert_array_equal(cache.key[0], other.key[0])
    for large in (np.inf, 9e6):
        key = np.ones((1, 1, 2, 64), np.float32)
        key[0, 0, 1, 40] = large
        held = mha.KVCache(1, 1, 64, dtype="q8_0")
        held.append(key, key)
        np.testing.assert_array_equal(np.isnan(held.key[0, 0]), [[False] * 64,
                                                                 [False] * 32 + [True] * 32])


def test_ragged_rows_windows_and_all_that_changes_a_cache():
    layer = new_layer("window")
    x = rows(3, 600, 128)
    cache, plain = (mha.KVCache(3, 8, 64, window=151, dtype=dtype)
                    for dtype in ("q8_0", np.float32))
    for first, n, lengths in ((0, 300, [300, 7, 120]), (300, 1, None), (301, 130, [1, 130, 0])):
        part = x[:, first:first + n]
        key, value = (mha.split_heads(mha.linear(part, W, b), 8)
                      for W, b in ((layer.W_k, layer.b_k), (layer.W_v, layer.b_v)))
        output = layer(part, cache=cache, lengths=lengths)
        plain.append(dequantised(key), dequantised(value), lengths)
        np.testing.assert_array_equal(cache.key, plain.key)
        np.testing.assert_array_equal(cache.value, plain.value)
        assert cache.start == plain.start and np.isfinite(output).all()
    copies = [copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    for other in copies:
        assert repr(other) == repr(cache) and other.dtype == "q8_0"
        np.testing.assert_array_equal(other.key, cache.key)
    for change in (lambda held: held.truncate(held.lengths - 1),
                   lambda held: held.select([2, 0, 0]), lambda held: held.reset()):
        change(cache)
        change(plain)
        np.testing.assert_array_equal(cache.value, plain.value)
        np.testing.assert_array_equal(cache.lengths, plain.lengths)


def test_memory():
    small, plain = (mha.KVCache(2, 8, 128, capacity=1024, dtype=dtype)
                    for dtype in ("q8_0", np.float32))
    assert small.nbytes / plain.nbytes < 0.28 and small.capacity == plain.capacity


def test_bad_input():
    with pytest.raises(ValueError, match="head_dim: got 48, wanted a multiple of 32 for q8_0"):
        mha.KVCache(1, 8, 48, dtype="q8_0")
    with pytest.raises(ValueError, match="value_head_dim: got 40, wanted a multiple of 32"):
        mha.MultiHeadAttention(128, 2, head_dim=64, value_head_dim=40).new_cache(1, dtype="q8_0")
    for dtype in ("q4_0", "q8"):
        with pytest.raises(TypeError, match=f"dtype: got '{dtype}', wanted"):
            mha.KVCache(1, 8, 64, dtype=dtype)
    cache = mha.KVCache(1, 2, 64, dtype="q8_0")
    with pytest.raises(ValueError, match="key: got shape"):
        cache.append(rows(1, 2, 3, 2), rows(1, 2, 3, 2))
    state = cache.__getstate__()
    for change in ({"value": np.zeros((1, 2, 0, 2), Q8_0)[:, :1]},
                   {"key": np.zeros((1, 2, 0, 2), np.dtype([("other", np.uint8, 34)]))}):
        with pytest.raises(ValueError, match="wanted what pickling a KVCache gives"):
            mha.KVCache(1, 2, 64).__setstate__({**state, **change})


def test_blocks_are_no_input_of_functions():
    """Nothing but caches has them."""
    blocks = np.zeros((1, 8, 5, 2), Q8_0)
    query = rows(1, 8, 3, 64)
    with pytest.raises(TypeError, match="key: got an array of"):
        mha.scaled_dot_product_attention(query, blocks, query)
    with pytest.raises(TypeError, match="x: got an array of"):
        mha.linear(blocks, rows(2, 3))
