"""Ragged batches through layers that norm and turn their heads: positions begin with 0 in each
sequence."""

import itertools

import numpy as np
import pytest

import mha

STARTS = [0, 7, 7, 40, 105]


def layer_and_rows(**settings):
    layer = mha.MultiHeadAttention(64, 4, num_kv_heads=2, rotary=mha.Rotary(16), rng=0, **settings)
    return layer, np.random.default_rng(1).standard_normal((STARTS[-1], 64)).astype(np.float32)


@pytest.mark.parametrize("qk_norm", [None, "head", "width"])
def test_each_sequence_has_its_own_bits(qk_norm):
    layer, x = layer_and_rows(qk_norm=qk_norm)
    got = layer(x, starts=STARTS, causal=True)
    for first, end in itertools.pairwise(STARTS):
        assert np.array_equal(got[first:end], layer(x[first:end], causal=True))


def test_gradients_are_turned_back():
    layer, x = layer_and_rows()
    output, pullback = layer.vjp(x, starts=STARTS, causal=True)
    grad_output = np.random.default_rng(2).standard_normal(output.shape).astype(np.float32)
    got = pullback(grad_output)
    sums = {name: np.zeros(layer.parameters()[name].shape) for name in ("W_q", "W_k", "b_q")}
    for first, end in itertools.pairwise(STARTS):
        _, pullback_alone = layer.astype(np.float64).vjp(x[first:end], causal=True)
        alone = pullback_alone(grad_output[first:end])
        np.testing.assert_allclose(got.query[first:end], alone.query, rtol=2e-5, atol=2e-5)
        for name in sums:
            sums[name] += getattr(alone, name)
    for name, total in sums.items():
        np.testing.assert_allclose(getattr(got, name), total, rtol=2e-4, atol=2e-4)


def test_what_does_not_go_together():
    layer, x = layer_and_rows(qk_norm="head")
    with pytest.raises(ValueError, match="starts: got some for gradients of a layer with qk_norm"):
        layer.vjp(x, starts=STARTS)
    with pytest.raises(ValueError, match="positions: got one with starts, wanted none"):
        layer(x, starts=STARTS, positions=np.arange(len(x)))
