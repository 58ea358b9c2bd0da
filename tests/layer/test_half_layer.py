"""Projections and layers of float16 and bfloat16: what float32 gives, rounded once at the end."""

import copy
import pickle
import tracemalloc

import numpy as np
import pytest
from half_types import HALVES, same_bits

import mha
from mha import _core

LAYERS = [{}, {"num_kv_heads": 2, "head_dim": 24}, {"use_bias": False, "value_head_dim": 5}]


def random_array(*shape, dtype=np.float32, seed=0):
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return numbers.astype(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 50, 400, 1000])
@pytest.mark.parametrize("shape", [(64, 64), (200, 70), (3, 5), (129, 32)])
def test_projection(rows, shape, dtype):
    x, weight = random_array(rows, shape[0], dtype=dtype), random_array(*shape, dtype=dtype, seed=1)
    bias = random_array(shape[1], dtype=dtype, seed=2)
    wide = [array.astype(np.float32) for array in (x, weight, bias)]
    wanted = mha.linear(*wide)
    assert same_bits(mha.linear(x, weight, bias), wanted.astype(dtype))
    for layout in (weight, np.asfortranarray(weight), weight[::-1].copy()[::-1]):
        assert same_bits(mha.linear(x, layout, bias), wanted.astype(dtype))
        got = _core.linear(wide[0], _core.pack_weight(layout), bias)
        assert got.dtype == np.float32 and np.array_equal(got, wanted)
    output, pullback = mha.linear_vjp(x, weight, bias)
    wide_output, wide_pullback = mha.linear_vjp(*wide)
    assert same_bits(output, wide_output.astype(dtype))
    gradient = random_array(*output.shape, seed=3)
    for one, other in zip(pullback(gradient), wide_pullback(gradient), strict=True):
        assert same_bits(one, other.astype(dtype))


def rows_apart(array):
    wider = np.zeros((len(array), array.shape[1] + 3), array.dtype)
    wider[:, 1:-2] = array
    return wider[:, 1:-2]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 50, 1000])
@pytest.mark.parametrize("layout", [
    rows_apart, np.asfortranarray, lambda x: x[::-1].copy()[::-1],
    lambda x: x[:, ::-1].copy()[:, ::-1],
    lambda x: x.reshape(1, len(x), -1)], ids=["rows apart", "transposed", "rows backwards",
                                              "columns backwards", "three axes"])
def test_layouts_of_rows(rows, layout, dtype):
    x, weight = layout(random_array(rows, 150, dtype=dtype)), random_array(150, 70, seed=1)
    output, pullback = mha.linear_vjp(x, weight)
    wide_output, wide_pullback = mha.linear_vjp(x.astype(np.float32), weight)
    assert same_bits(output, wide_output.astype(dtype))
    assert same_bits(mha.linear(x, weight), output)
    got, wanted = pullback(output), wide_pullback(output.astype(np.float32))
    assert same_bits(got.x, wanted.x.astype(dtype)) and np.array_equal(got.weight, wanted.weight)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rows_are_not_copied(dtype):
    """What comes in and goes out is never there as float32 too, in linear and in the layer."""
    x = np.ones((1, 4000, 512), dtype)
    layer = mha.MultiHeadAttention(512, 8, num_kv_heads=1, head_dim=8, dtype=dtype)
    for call in (lambda: mha.linear(x, layer.W_q), lambda: mha.linear(x[0, :, :64], layer.W_o),
                 lambda: layer(x)):
        call()
        tracemalloc.start()
        output = call()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < output.nbytes + 100_000


@pytest.fixture(params=[(dtype, options) for dtype in HALVES for options in LAYERS], ids=str)
def layers(request):
    """A layer of halves, and one of float32 with the same numbers."""
    dtype, options = request.param
    layer = mha.MultiHeadAttention(48, 4, dtype=dtype, rng=0, **options)
    for name, parameter in layer.parameters().items():
        if name.startswith("b"):
            parameter[...] = random_array(*parameter.shape, dtype=dtype)
    assert layer.dtype == dtype and layer.W_q.dtype == dtype
    return layer, layer.astype(np.float32)


def test_layer(layers):
    layer, wide = layers
    x = random_array(2, 30, 48, dtype=layer.dtype)
    wanted = wide(x.astype(np.float32), causal=True).astype(layer.dtype)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(layer).freeze()))
    for one in (layer, copy.deepcopy(layer).freeze(), copied, copied.unfreeze()):
        assert one.dtype == layer.dtype and same_bits(one(x, causal=True), wanted)
    for name, parameter in wide.parameters().items():
        layer._set_parameter(name, parameter)
    assert same_bits(layer(x, causal=True), wanted)
    layer.load_parameters(wide.parameters())
    assert same_bits(layer(x, causal=True), wanted)
    for number in (np.float32, np.float64):
        assert same_bits(layer(x.astype(number), causal=True), wanted)


def test_gradients(layers):
    layer, wide = layers
    x = random_array(2, 30, 48, dtype=layer.dtype)
    output, pullback = layer.vjp(x, window=(7, 2))
    wide_output, wide_pullback = wide.vjp(x.astype(np.float32), window=(7, 2))
    assert same_bits(output, wide_output.astype(layer.dtype))
    gradient = random_array(*output.shape, seed=1)
    for one, other in zip(pullback(gradient), wide_pullback(gradient), strict=True):
        assert one is other is None or same_bits(one, other.astype(layer.dtype))


def test_cache(layers):
    layer, _ = layers
    x = random_array(2, 30, 48, dtype=layer.dtype)
    for one in (layer, copy.deepcopy(layer).freeze()):
        whole, cache = one(x, cache=one.new_cache(2)), one.new_cache(2)
        cut = [one(x[:, begin:end], cache=cache) for begin, end in ((0, 1), (1, 9), (9, 30))]
        assert cache.dtype == layer.dtype and same_bits(np.concatenate(cut, axis=1), whole)
        assert np.abs(whole.astype(float) - one(x, causal=True).astype(float)).max() < 0.05
    assert layer(x[:, :3], cache=layer.new_memory(x)).dtype == layer.dtype
    with pytest.raises(TypeError, match=r"dtype: got float32, wanted .* or a narrower one"):
        layer.new_cache(2, dtype=np.float32)
    with pytest.raises(TypeError, match=r"cache: got float32, wanted .* or a narrower one"):
        layer(x, cache=layer.astype(np.float32).new_cache(2))


def test_start_and_astype():
    """A start drawn in float32 and rounded; float64 parameters are rounded once."""
    wide = mha.MultiHeadAttention(48, 4, rng=0)
    for dtype in HALVES:
        half = mha.MultiHeadAttention(48, 4, rng=0, dtype=dtype)
        assert same_bits(half.W_q, wide.W_q.astype(dtype))
        assert same_bits(wide.astype(np.float64).astype(dtype).W_v, half.W_v)
        assert same_bits(mha.MultiHeadAttention(48, 4, rng=0, dtype=str(dtype)).W_o, half.W_o)
    with pytest.raises(TypeError, match=r"dtype: got .*uint16"):
        wide.astype(np.uint16)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_query_and_key_that_share_their_memory(dtype):
    """Rows of halves are turned into numbers once for all projections of the same array."""
    layer = mha.MultiHeadAttention(16, 4, key_dim=32, dtype=dtype, rng=0)
    numbers = random_array(500 * 32, dtype=dtype)
    query, key = numbers[:500 * 16].reshape(1, 500, 16), numbers.reshape(1, 500, 32)
    wanted = layer(query.copy(), key.copy())
    for threads in (1, 2, 5):
        with mha.threads(threads):
            assert same_bits(layer(query, key), wanted)
            assert same_bits(layer.vjp(query, key)[0], wanted)
