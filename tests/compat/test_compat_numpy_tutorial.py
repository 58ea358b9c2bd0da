"""The NumPy tutorial: its printed numbers and golden data, by the plain API and by its adapter."""

from pathlib import Path

import numpy as np
import pytest

import mha
from mha.compat import numpy_tutorial as tutorial

GOLDEN = dict(np.load(Path(__file__).parent.parent / "data" / "numpy_tutorial.npz"))
WEIGHTS = ("W_q", "W_k", "W_v", "W_o")
INPUTS = [GOLDEN[name] for name in ("query", "key", "value")]


def assert_agrees(got, wanted, bound=1e-12):
    """As near as bound, relative to the largest entry."""
    assert got.dtype == np.float64 and got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= bound * np.abs(wanted).max()


def written_out(query, key, value, mask=None):
    """The tutorial's formula in long double, as an independent reference."""
    query, key, value = (np.asarray(array, np.longdouble) for array in (query, key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(np.longdouble(query.shape[-1]))
    if mask is not None:
        scores = np.where(np.asarray(mask) == 0, scores, -1e9)
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    return (weights @ value).astype(float), weights.astype(float)


def test_printed_numbers():
    layer = tutorial.MultiHeadAttention(d_model=12, num_heads=3, seed=42)
    generator = np.random.RandomState(101)
    query, key, value = (generator.rand(2, length, 12) for length in (4, 5, 5))
    mask = np.zeros((2, 4, 5), int)
    mask[0, :, -1] = 1
    mask[1, :, 0] = 1
    output, weights = layer.forward(query, key, value, mask=mask)
    assert output.shape == (2, 4, 12) and weights.shape == (2, 3, 4, 5)
    np.testing.assert_allclose(output[0, 0, :2], [-9.07586562, -4.04548241], rtol=0, atol=5e-9)
    np.testing.assert_allclose(weights[0, 0, 0], [0.1166861, 0.72532315, 0.0676062, 0.09038456, 0],
                               rtol=0, atol=5e-9)
    assert (weights[0, :, :, -1] == 0).all() and (weights[1, :, :, 0] == 0).all()


def test_golden_data_by_adapter():
    layer = tutorial.MultiHeadAttention(12, 3, seed=42)
    for name in WEIGHTS:
        assert np.array_equal(getattr(layer, name), GOLDEN[name])
    output, weights = layer.forward(*INPUTS, GOLDEN["blocked_mask"])
    assert_agrees(output, GOLDEN["output"])
    assert_agrees(weights, GOLDEN["weights"])
    assert_agrees(layer.forward(*INPUTS)[0], GOLDEN["output_unmasked"])


def test_golden_data_by_plain_api():
    mask = mha.masks.from_blocked(GOLDEN["blocked_mask"])[:, None]
    output, weights = mha.multi_head_attention(
        *INPUTS, *(GOLDEN[name] for name in WEIGHTS), num_heads=3, mask=mask, return_weights=True)
    assert_agrees(output, GOLDEN["output"])
    assert_agrees(weights, GOLDEN["weights"])

    layer = mha.MultiHeadAttention(12, 3, use_bias=False, dtype=np.float64)
    layer.load_parameters({name: GOLDEN[name] for name in WEIGHTS})
    assert_agrees(layer(*INPUTS, mask=mask), GOLDEN["output"])
    assert_agrees(layer(*INPUTS), GOLDEN["output_unmasked"])


@pytest.mark.parametrize("seed", [42, None])
def test_global_random_state_is_untouched(seed):
    np.random.seed(5)
    before = np.random.get_state()
    tutorial.MultiHeadAttention(12, 3, seed=seed)
    after = np.random.get_state()
    assert before[0] == after[0] and before[2:] == after[2:]
    assert np.array_equal(before[1], after[1])


def test_without_a_seed_weights_are_fresh():
    np.random.seed(5)
    first = tutorial.MultiHeadAttention(12, 3).W_q
    np.random.seed(5)
    second = tutorial.MultiHeadAttention(12, 3).W_q
    assert not np.array_equal(first, second)


def test_attributes():
    layer = tutorial.MultiHeadAttention(12, 3, seed=0)
    assert (layer.d_model, layer.num_heads, layer.d_k, layer.d_v) == (12, 3, 4, 4)
    x = np.arange(2 * 5 * 12.0).reshape(2, 5, 12)
    heads = layer.split_heads(x, 2)
    assert heads.shape == (2, 3, 5, 4)
    assert np.array_equal(heads[1, 2], x[1, :, 8:12])
    layer.W_o = np.zeros((12, 12))
    assert not layer.forward(x, x, x)[0].any()


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (2, 3, 2)])
def test_attention_in_every_rank(batch):
    generator = np.random.default_rng(1)
    query, key, value = (generator.standard_normal((*batch, *size))
                         for size in ((4, 8), (5, 8), (5, 6)))
    mask = generator.integers(0, 2, (4, 5))
    for given in (None, mask, mask.astype(bool), mask * 3.0):
        output, weights = tutorial.scaled_dot_product_attention(query, key, value, given)
        wanted_output, wanted_weights = written_out(query, key, value, given)
        assert_agrees(output, wanted_output)
        assert_agrees(weights, wanted_weights)


@pytest.mark.parametrize("mask_shape", [(5,), (4, 5), (1, 5), (4, 1), (3, 1, 5), (1, 4, 5),
                                        (2, 1, 1, 5), (2, 3, 4, 5), (2, 1, 4, 5)])
def test_mask_broadcasts(mask_shape):
    generator = np.random.default_rng(2)
    query, key, value = (generator.standard_normal((2, 3, *size))
                         for size in ((4, 8), (5, 8), (5, 6)))
    mask = generator.integers(0, 2, mask_shape)
    output, weights = tutorial.scaled_dot_product_attention(query, key, value, mask)
    wanted_output, wanted_weights = written_out(query, key, value, mask)
    assert_agrees(output, wanted_output)
    assert_agrees(weights, wanted_weights)


def test_batch_axes_broadcast():
    generator = np.random.default_rng(3)
    query = generator.standard_normal((2, 1, 4, 8))
    key, value = generator.standard_normal((3, 5, 8)), generator.standard_normal((5, 6))
    output, weights = tutorial.scaled_dot_product_attention(query, key, value)
    wanted_output, wanted_weights = written_out(query, key, value)
    assert_agrees(output, wanted_output)
    assert_agrees(weights, wanted_weights)
    mask = np.zeros((2, 1, 4, 5))  # more axes than the arrays have
    assert tutorial.scaled_dot_product_attention(key[:, :4], key, value, mask)[0].shape == (
        2, 3, 4, 6)


def test_inputs_need_not_be_contiguous():
    generator = np.random.default_rng(4)
    query = generator.standard_normal((8, 4, 2)).T[::-1]
    key = generator.standard_normal((2, 5, 16))[..., ::-2]
    value = np.broadcast_to(generator.standard_normal((1, 5, 1)), (2, 5, 6))
    output, weights = tutorial.scaled_dot_product_attention(query, key, value)
    wanted_output, wanted_weights = written_out(query, key, value)
    assert_agrees(output, wanted_output)
    assert_agrees(weights, wanted_weights)
    layer = tutorial.MultiHeadAttention(12, 3, seed=42)
    turned = [np.asfortranarray(array) for array in INPUTS]
    assert_agrees(layer.forward(*turned, np.asfortranarray(GOLDEN["blocked_mask"]))[0],
                  GOLDEN["output"])


def test_fully_masked_row_is_uniform():
    mask = GOLDEN["blocked_mask"].copy()
    mask[1, 2] = 1
    layer = tutorial.MultiHeadAttention(12, 3, seed=42)
    output, weights = layer.forward(*INPUTS, mask)
    assert (weights[1, :, 2] == 0.2).all()
    mean = GOLDEN["value"][1].mean(0) @ GOLDEN["W_v"] @ GOLDEN["W_o"]
    np.testing.assert_allclose(output[1, 2], mean, rtol=1e-12, atol=1e-12)


def test_float32_and_integers_are_computed_in_float64():
    for dtype in (np.float32, int):
        query = np.arange(12).reshape(3, 4).astype(dtype) % 5
        output, weights = tutorial.scaled_dot_product_attention(query, query, query)
        wanted_output, wanted_weights = written_out(query, query, query)
        assert_agrees(output, wanted_output)
        assert_agrees(weights, wanted_weights)


@pytest.mark.parametrize("axis", [-1, 0, 1, 2, None])
def test_softmax(axis):
    x = np.random.default_rng(5).standard_normal((3, 4, 5)) * 10 + 1000
    exponentials = np.exp(x.astype(np.longdouble) - 1000)
    wanted = (exponentials / exponentials.sum(axis, keepdims=True)).astype(float)
    assert_agrees(tutorial.softmax(x, axis=axis), wanted)
    assert tutorial.softmax(x.astype(np.float32)).dtype == np.float32
    np.testing.assert_allclose(tutorial.softmax([1, 1, 1, 1]), [0.25] * 4, rtol=0, atol=0)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda layer, x: tutorial.MultiHeadAttention(10, 3), ValueError, "d_model: got 10"),
    (lambda layer, x: tutorial.MultiHeadAttention(12.0, 3), TypeError, "d_model"),
    (lambda layer, x: tutorial.MultiHeadAttention(12, 0), ValueError, "num_heads: got 0"),
    (lambda layer, x: layer.forward(x[0], x, x), ValueError, "Q_in: got shape"),
    (lambda layer, x: layer.forward(x, x[..., :6], x), ValueError, "K_in: got shape"),
    (lambda layer, x: layer.forward(x, x, x, np.zeros((4, 4))), ValueError, "mask: got shape"),
    (lambda layer, x: layer.forward(x, x, x + 1j), TypeError, "V_in: got an array of complex"),
    (lambda layer, x: layer.split_heads(x, 3), ValueError, "x: got shape"),
    (lambda layer, x: tutorial.scaled_dot_product_attention(x[0, 0], x, x), ValueError, "query"),
    (lambda layer, x: tutorial.scaled_dot_product_attention(x, x, x, "mask"), TypeError, "mask"),
    (lambda layer, x: tutorial.scaled_dot_product_attention(x, x[[0, 0, 0]], x), ValueError,
     r"query, key, value: got shapes .*batch axes"),
    (lambda layer, x: tutorial.scaled_dot_product_attention(x, x, x, np.ones((3, 4, 4))),
     ValueError, r"query, key, value, mask: got shapes .*\(3, 4, 4\).*batch axes"),
])
def test_bad_calls(call, error, message):
    layer = tutorial.MultiHeadAttention(12, 3, seed=0)
    with pytest.raises(error, match=message):
        call(layer, np.ones((2, 4, 12)))
