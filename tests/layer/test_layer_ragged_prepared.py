"""Ragged batches through layers that norm and turn their heads: positions begin with 0 in each
sequence."""

import copy
import itertools

import numpy as np
import pytest
from agreement import relative_error
from half_types import HALVES, same_bits

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


@pytest.mark.parametrize("qk_norm", [None, "head", "width"])
def test_gradients_are_the_sums_of_those_one_by_one(qk_norm):
    layer, x = layer_and_rows(qk_norm=qk_norm, norm_offset=0.5, dtype=np.float64)
    rng = np.random.default_rng(2)
    for parameter in layer.parameters().values():
        parameter += 0.1 * rng.standard_normal(parameter.shape)
    output, pullback = layer.vjp(x, starts=STARTS, causal=True)
    grad_output = rng.standard_normal(output.shape)
    got = pullback(grad_output)
    sums, of_query = {}, []
    for first, end in itertools.pairwise(STARTS):
        alone = layer.vjp(x[first:end], causal=True)[1](grad_output[first:end])
        of_query.append(alone.query)
        for name in layer.parameters():
            sums[name] = sums.get(name, 0) + getattr(alone, name)
    assert relative_error(got.query, np.concatenate(of_query)) < 1e-13
    for name, total in sums.items():
        assert relative_error(getattr(got, name), total) < 1e-12, name
    for name in ("query", "k_norm", "W_q") if qk_norm else ("query", "W_q"):
        only = layer.vjp(x, starts=STARTS, causal=True, wrt=[name])[1](grad_output)
        assert [one for one in only._fields if getattr(only, one) is not None] == [name]
        assert np.array_equal(getattr(only, name), getattr(got, name))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("qk_norm", [None, "width"])
def test_half_layers_give_each_sequence_its_own_bits(dtype, qk_norm):
    layer, x = layer_and_rows(qk_norm=qk_norm, dtype=dtype, sinks=True)
    halves, gate = x.astype(dtype), [1.5, 0.0, -1.0, 0.3]
    for one in (layer, copy.deepcopy(layer).freeze()):
        for rows in (halves, x, x.astype(np.float64)):
            got = one(rows, starts=STARTS, causal=True, head_gate=gate)
            assert same_bits(got, layer.vjp(rows, starts=STARTS, causal=True, head_gate=gate)[0])
            for first, end in itertools.pairwise(STARTS):
                assert same_bits(got[first:end], one(rows[first:end], causal=True,
                                                     head_gate=gate))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_of_half_layers_are_those_of_float32_rounded(dtype):
    layer, x = layer_and_rows(qk_norm="head", dtype=dtype, sinks=True, relative_bias=3)
    options = {"starts": STARTS, "causal": True, "head_gate": np.float32([1.5, 0.0, -1.0, 0.3])}
    halves = x.astype(dtype)
    output, pullback = layer.vjp(halves, **options)
    _, wide_pullback = layer.astype(np.float32).vjp(halves.astype(np.float32), **options)
    alone = layer.vjp(halves[:7], causal=True, head_gate=options["head_gate"])[1](output[:7])
    wide = wide_pullback(output)
    for name, one in pullback(output)._asdict().items():
        other = getattr(wide, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == getattr(alone, name).dtype, name
            assert np.array_equal(one, other.astype(one.dtype)), name
    assert layer.vjp(x, **options)[1](output).query.dtype == np.float32


def test_no_rows():
    layer, x = layer_and_rows(qk_norm="width")
    output, pullback = layer.vjp(x[:0], starts=[0, 0])
    gradients = pullback(output)
    assert gradients.query.shape == output.shape == (0, 64)
    assert not gradients.q_norm.any() and not gradients.W_k.any()


def test_positions_do_not_go_with_starts():
    layer, x = layer_and_rows(qk_norm="head")
    for function in (layer, layer.vjp):
        with pytest.raises(ValueError, match="positions: got one with starts, wanted none"):
            function(x, starts=STARTS, positions=np.arange(len(x)))
