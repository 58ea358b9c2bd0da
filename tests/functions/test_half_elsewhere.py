"""float16 and bfloat16 in the reference and in the adapter of PyTorch."""

import numpy as np
import pytest
from dlpack_capsules import LikeTorch
from half_types import BFLOAT16, HALVES, same_bits

import mha
from mha import reference
from mha.compat.pytorch import MultiheadAttention, scaled_dot_product_attention


def random_halves(dtype, *shape, seed=0):
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return numbers.astype(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_reference_computes_in_float32(dtype):
    x, weight = random_halves(dtype, 2, 3, 5, 8), random_halves(dtype, 8, 8, seed=1)
    wide, wide_weight = x.astype(np.float32), weight.astype(np.float32)
    rows, wide_rows = x[:, 0], wide[:, 0]
    grad = wide.copy()  # for x.T @ x of one array NumPy takes another function of BLAS
    for got, wanted in (
            (reference.linear(x, weight), reference.linear(wide, wide_weight)),
            (reference.scaled_dot_product_attention(x, x, x),
             reference.scaled_dot_product_attention(wide, wide, wide)),
            (reference.multi_head_attention(rows, rows, rows, *[weight] * 4, num_heads=2),
             reference.multi_head_attention(*[wide_rows] * 3, *[wide_weight] * 4, num_heads=2)),
            (reference.rotary(x, mha.Rotary(4)), reference.rotary(wide, mha.Rotary(4))),
            (reference.merge_attention([x, x], [wide[..., 0]] * 2)[0],
             reference.merge_attention([wide, wide], [wide[..., 0]] * 2)[0]),
            (reference.linear_vjp(x, weight)[1](grad)["weight"],
             reference.linear_vjp(wide, wide_weight)[1](grad)["weight"])):
        assert got.dtype == np.float32 and np.array_equal(got, wanted)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_function_of_pytorch(dtype):
    query, mask = random_halves(dtype, 2, 3, 5, 8), random_halves(dtype, 5, 5, seed=1)
    wanted = mha.scaled_dot_product_attention(query, query, query, bias=mask)
    assert same_bits(scaled_dot_product_attention(query, query, query, mask), wanted)
    if dtype == BFLOAT16:  # tensors that NumPy cannot make arrays of
        tensor = LikeTorch(query)
        got = scaled_dot_product_attention(tensor, tensor, tensor, LikeTorch(mask))
        assert same_bits(got, wanted)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_layer_of_pytorch(dtype):
    """Which is float32: halves are cast to it, parameters too."""
    layer = MultiheadAttention(8, 2, batch_first=True, rng=0)
    x, mask = random_halves(dtype, 2, 5, 8), random_halves(dtype, 5, 5, seed=1)
    state = {name: array.astype(dtype) for name, array in layer.state_dict().items()}
    layer.load_state_dict(state)
    assert np.array_equal(layer.in_proj_weight, state["in_proj_weight"].astype(np.float32))
    wide = x.astype(np.float32)
    wanted, weights = layer(wide, wide, wide, attn_mask=mask.astype(np.float32))
    got, got_weights = layer(x, x, x, attn_mask=mask)
    assert got.dtype == np.float32
    assert np.array_equal(got, wanted) and np.array_equal(got_weights, weights)
