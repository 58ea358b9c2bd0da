"""MultiheadAttention and multi_head_attention_forward of mha.compat.pytorch in halves."""

import pickle

import numpy as np
import pytest
from half_types import BFLOAT16, HALVES

from mha.compat import pytorch as compat

each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
LAYERS = {
    "plain": {},
    "appended": {"add_bias_kv": True, "add_zero_attn": True},
    "separate": {"kdim": 5, "vdim": 7, "bias": False},
    "batch first": {"batch_first": True},
    "dropping": {"dropout": 0.5},
}


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def twins(dtype, options):
    """A layer of halves and one of float32 with the same numbers."""
    half, single = (compat.MultiheadAttention(12, 3, dtype=of, rng=0, **options)
                    for of in (dtype, np.float32))
    state = {name: random(*array.shape, seed=index)
             for index, (name, array) in enumerate(half.named_parameters())}
    half.load_state_dict(state)
    single.load_state_dict(half.state_dict())
    return half, single


@each_half
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layer_computes_in_float32_and_rounds_once(dtype, options, training):
    half, single = (layer.train(training) for layer in twins(dtype, options))
    assert all(array.dtype == dtype for array in half.parameters())
    inputs = [random(4, 2, width, seed=width) for width in (12, half.kdim, half.vdim)]
    rounded = [array.astype(np.float32).astype(dtype).astype(np.float32) for array in inputs]
    blocked = np.triu(np.ones((4, 4), bool), 1) if not options.get("batch_first") else None
    found = half(*[array.astype(np.float32) for array in inputs], attn_mask=blocked)
    wanted = single(*rounded, attn_mask=blocked)
    for ours, right in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_array_equal(ours, right.astype(dtype))
    assert half(*inputs, need_weights=False)[1] is None


@each_half
def test_fast_path_is_taken_where_query_key_and_value_are_one(dtype):
    """Where a row sees no key it gives NaN, the other way the last bias."""
    layer = compat.MultiheadAttention(8, 2, batch_first=True, dtype=dtype, rng=0).eval()
    x = random(1, 3, 8).astype(dtype)
    blocked = np.ones((3, 3), bool)
    output = layer(x, x, x, attn_mask=blocked, need_weights=False)[0]
    assert output.dtype == dtype and np.isnan(output.astype(np.float32)).all()
    apart = layer(x, x.copy(), x, attn_mask=blocked, need_weights=False)[0]
    np.testing.assert_array_equal(apart[0, 0], layer.out_proj.bias)


def test_types_are_changed_and_named():
    layer = compat.MultiheadAttention(12, 3, add_bias_kv=True, rng=0)
    first = layer.state_dict()
    for change, dtype in ((layer.half, np.float16), (layer.float, np.float32),
                          (layer.bfloat16, BFLOAT16), (layer.double, np.float64),
                          (lambda: layer.to("cpu", "bfloat16"), BFLOAT16)):
        assert change() is layer and layer.dtype == dtype
        assert all(array.dtype == dtype for array in layer.state_dict().values())
        assert layer(*[random(3, 1, 12)] * 3)[0].dtype == dtype
    again = pickle.loads(pickle.dumps(layer))
    assert again.dtype == BFLOAT16
    layer.load_state_dict(first)
    np.testing.assert_array_equal(layer.bias_k, first["bias_k"].astype(BFLOAT16))
    drawn = compat.MultiheadAttention(12, 3, add_bias_kv=True, rng=0, dtype="bfloat16")
    np.testing.assert_array_equal(drawn.bias_k, layer.bias_k)


@each_half
def test_function_of_halves_gives_halves(dtype):
    x, packed, out = (random(*shape, seed=3).astype(dtype) for shape in (
        (4, 2, 12), (36, 12), (12, 12)))
    bias_k, bias_v = random(2, 12).astype(dtype)
    static = random(6, 5, 4, seed=4).astype(dtype)

    def call(of, **options):
        arrays = (array.astype(of) for array in (x, x, x))
        return compat.multi_head_attention_forward(
            *arrays, 12, 3, packed.astype(of), None, *(
                options.pop(name, None) for name in ("bias_k", "bias_v")), False, 0.0,
            out.astype(of), None, **options)

    for options in ({}, {"bias_k": bias_k, "bias_v": bias_v},
                    {"static_k": static, "static_v": static}):
        found = call(dtype, **options)
        wanted = call(np.float32, **{name: array.astype(np.float32)
                                     for name, array in options.items()})
        for ours, right in zip(found, wanted, strict=True):
            assert ours.dtype == dtype and right.dtype == np.float32
            np.testing.assert_array_equal(ours, right.astype(dtype))


@pytest.mark.parametrize("shape", [(12,), (1, 12), (1, 1, 12)])
def test_appended_biases_may_lack_their_axes_of_1(shape):
    x, packed, out = random(4, 2, 12), random(36, 12, seed=1), random(12, 12, seed=2)
    biases = random(2, 12, seed=3)
    options = 12, 3, packed, None
    found, wanted = (compat.multi_head_attention_forward(
        x, x, x, *options, *(bias.reshape(of) for bias in biases), False, 0.0, out, None)
        for of in (shape, (1, 1, 12)))
    np.testing.assert_array_equal(found[0], wanted[0])
    assert found[1].shape == (2, 4, 5)
    with pytest.raises(ValueError, match=r"bias_k: got shape \(1, 1, 11\), wanted \(1, 1, 12\)"):
        compat.multi_head_attention_forward(
            x, x, x, *options, biases[0, :11], biases[1], False, 0.0, out, None)
