"""What belongs to a layer: its own scale, softcap, window and alibi, the parameters sinks and
relative_bias, and which projections have biases."""

import copy
import pickle

import numpy as np
import pytest

import mha
from mha import reference
from mha._functions.options import DEFAULTS

OWN = {"scale": 0.3, "softcap": 5.0, "window": (3, 1), "alibi": mha.alibi_slopes(4)}
LEARNED = {"sinks": (4,), "relative_bias": (4, 7)}
X = np.random.default_rng(0).standard_normal((2, 9, 24))


def layer_of(**options):
    """Its parameters random, those that start at zero too."""
    options = {"dtype": np.float64, "rng": 0, "sinks": True, "relative_bias": 3, **options}
    layer = mha.MultiHeadAttention(24, 4, **options)
    rng = np.random.default_rng(1)
    for name, parameter in layer.parameters().items():
        if not name.startswith("W"):
            parameter[...] = rng.standard_normal(parameter.shape)
    return layer


def wanted_of(layer, x=X, **options):
    return reference.multi_head_attention(x, x, x, **{**layer.parameters(), **options},
                                          num_heads=layer.num_heads,
                                          num_kv_heads=layer.num_kv_heads)


def assert_close(got, wanted):
    assert np.allclose(got, wanted, rtol=0, atol=1e-13 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("names", [(), *((name,) for name in OWN), tuple(OWN)], ids=str)
def test_a_layers_own_options_are_those_of_its_calls(names):
    own = {name: OWN[name] for name in names}
    for learned in ({}, {"sinks": False, "relative_bias": None}):
        layer = layer_of(**own, **learned)
        assert_close(layer(X), wanted_of(layer, **own))
        output, pullback = layer.vjp(X)
        assert np.array_equal(output, layer(X))
        assert pullback(X).alibi is None  # it is not learned
        plain = layer_of(**learned)
        plain.load_parameters(layer.parameters())
        assert np.array_equal(plain(X, **own), layer(X))
        assert np.array_equal(layer.freeze()(X), output)


def test_a_call_overrides_them():
    layer = layer_of(**OWN)
    others = {"scale": 1.1, "softcap": 0.5, "window": (0, 2), "alibi": np.ones(4),
              "sinks": np.arange(4.0), "relative_bias": np.ones((1, 1))}
    for name, value in others.items():
        assert_close(layer(X, **{name: value}), wanted_of(layer, **OWN | {name: value}))
        assert np.array_equal(layer(X, **{name: None}), layer(X))
    off = {"window": (None, None), "softcap": np.inf, "alibi": np.zeros(4),
           "sinks": np.full(4, -np.inf), "relative_bias": np.zeros((1, 1)), "scale": 1 / np.sqrt(6)}
    plain = mha.MultiHeadAttention(24, 4, dtype=np.float64)
    plain.load_parameters({name: array for name, array in layer.parameters().items()
                           if name not in LEARNED})
    assert np.array_equal(layer(X, **off), plain(X))
    bare = mha.MultiHeadAttention(24, 4, softcap=np.inf, window=(None, None))
    assert bare.softcap is bare.window is None and bare._state.options is DEFAULTS


def test_gradients_of_what_it_learns():
    layer = layer_of(**OWN)
    grad_output = np.random.default_rng(2).standard_normal(X.shape)
    pullback = layer.vjp(X)[1]
    exact = reference.multi_head_attention_vjp(
        X, X, X, **layer.parameters(), **OWN, num_heads=4)[1](grad_output)
    got = pullback(grad_output)
    for name in layer.parameters():
        assert_close(getattr(got, name), exact[name])
    given = {"sinks": np.zeros(4), "relative_bias": np.zeros((1, 5)), "alibi": np.ones(4)}
    got = layer.vjp(X, **given)[1](grad_output)
    exact = reference.multi_head_attention_vjp(
        X, X, X, **{**layer.parameters(), **OWN, **given}, num_heads=4)[1](grad_output)
    for name in given:
        assert getattr(got, name).shape == given[name].shape
        assert_close(getattr(got, name), exact[name])
    assert layer.vjp(X, wrt=["alibi"])[1](grad_output).alibi.shape == (4,)


def test_they_start_at_zero_and_are_parameters_like_others():
    layer = mha.MultiHeadAttention(24, 4, sinks=True, relative_bias=3)
    assert list(layer.parameters())[-2:] == list(LEARNED)
    plain = mha.MultiHeadAttention(24, 4)
    assert plain.sinks is plain.relative_bias is None
    for name, shape in LEARNED.items():
        assert layer.parameters()[name] is getattr(layer, name)
        assert getattr(layer, name).shape == shape and not getattr(layer, name).any()
    assert layer.num_parameters == plain.num_parameters + 4 + 28
    before = layer(X)
    layer.sinks[:] = 3  # in place
    changed = layer(X)
    assert not np.allclose(changed, before)
    layer.sinks = np.zeros(4)
    assert np.array_equal(layer(X), before)
    layer.load_parameters({**layer.parameters(), "sinks": np.full(4, 3)})
    assert np.array_equal(layer(X), changed)
    with pytest.raises(ValueError, match="relative_bias"):
        layer.load_parameters({name: array for name, array in layer.parameters().items()
                               if name != "relative_bias"})
    layer.freeze()
    assert not layer.sinks.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        layer.sinks[:] = 0
    with pytest.raises(ValueError, match="sinks: got a change to a frozen layer"):
        layer.sinks = np.zeros(4)
    assert np.array_equal(layer(X), changed) and np.array_equal(layer.unfreeze()(X), changed)


@pytest.mark.parametrize("use_bias", ["qkv", "ovq", True, "qkvo", "", False, "k"])
def test_pickle_copy_and_other_types(use_bias):
    layer = layer_of(**OWN, use_bias=use_bias)
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), copy.copy(layer),
                  layer.astype(np.float64), pickle.loads(pickle.dumps(layer.freeze()))):
        assert np.array_equal(other(X), layer(X))
        assert repr(other).replace(", frozen", "") == repr(layer).replace(", frozen", "")
        assert (other.scale, other.softcap, other.window) == (0.3, 5.0, (3, 1))
        assert other.alibi == tuple(OWN["alibi"])
    single = layer.astype(np.float32)
    assert single.sinks.dtype == np.float32
    assert np.allclose(single(X), layer(X), atol=1e-5)
    deep = copy.deepcopy(layer.unfreeze())
    deep.sinks[:] = 9
    assert not np.array_equal(deep(X), layer(X))


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_pruning(num_kv_heads):
    layer = layer_of(**OWN, use_bias="qv", num_kv_heads=num_kv_heads)
    gated = layer(X, head_gate=[0, 0, 1, 1])
    sinks, table = layer.sinks.copy(), layer.relative_bias.copy()
    layer.prune_heads([0, 1])
    assert np.array_equal(layer.sinks, sinks[2:])
    assert np.array_equal(layer.relative_bias, table[2:])
    assert layer.alibi == tuple(OWN["alibi"][2:])
    assert_close(layer(X), gated)


@pytest.mark.parametrize(("use_bias", "names", "is_shown"), [
    ("qkv", ["b_q", "b_k", "b_v"], "qkv"), ("ovq", ["b_q", "b_v", "b_o"], "qvo"),
    ("qkvo", ["b_q", "b_k", "b_v", "b_o"], True), ("", [], False)])
def test_projections_with_biases(use_bias, names, is_shown):
    layer = layer_of(use_bias=use_bias, sinks=False, relative_bias=None)
    assert list(layer.parameters())[4:] == names
    assert layer.use_bias == is_shown
    assert_close(layer(X), wanted_of(layer))
    for letter in "qkvo":
        bias = getattr(layer, "b_" + letter)
        assert (bias is not None) == ("b_" + letter in names)
    for name in {"b_q", "b_k", "b_v", "b_o"} - set(names):
        with pytest.raises(ValueError, match=f"{name}: got a bias for a layer without, wanted use"):
            setattr(layer, name, np.zeros(24))


def test_repr():
    layer = mha.MultiHeadAttention(24, 4, use_bias="qkv", scale=1, window=[3, None], softcap=30,
                                   alibi=mha.alibi_slopes(4), sinks=True, relative_bias=8)
    assert repr(layer) == (
        "MultiHeadAttention(24, 4, use_bias='qkv', scale=1.0, softcap=30.0, window=(3, None),"
        " sinks=True, relative_bias=8, alibi=..., dtype=float32)")


def test_steps_know_them():
    layer = layer_of(**OWN)
    found = reference.steps(layer, X)
    assert_close(found["output"], layer(X))
    assert_close(found["weights"], layer(X, return_weights=True)[1])
    assert_close(reference.steps(layer, X, window=(None, None))["output"],
                 layer(X, window=(None, None)))


def test_dropout_and_training():
    layer = layer_of(**OWN, dropout=0.5)
    assert np.array_equal(layer(X), layer(X, rng=1))
    assert_close(layer(X, training=True, rng=1), wanted_of(layer, **OWN, dropout=0.5, rng=1))
