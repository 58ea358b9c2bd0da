"""mha.compat.keras' Attention and AdditiveAttention, halves and configs, without Keras."""

import inspect
import json

import numpy as np
import pytest
from half_types import HALVES

from mha.compat import keras as compat


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def softmax(scores):
    exp = np.exp(scores - scores.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


SCORES = {
    "dot": (lambda **options: compat.Attention(**options),
            lambda q, k, scale: q @ k.swapaxes(-1, -2)),
    "scaled": (lambda **options: compat.Attention(use_scale=True, **options),
               lambda q, k, scale: scale[0] * (q @ k.swapaxes(-1, -2))),
    "concat": (lambda **options: compat.Attention(score_mode="concat", **options),
               lambda q, k, scale: scale[0] * np.tanh(q[..., :, None, :] + k[..., None, :, :]
                                                      ).sum(-1)),
    "scaled concat": (lambda **options: compat.Attention(True, "concat", **options),
                      lambda q, k, scale: scale[1] * np.tanh(
                          scale[0] * (q[..., :, None, :] + k[..., None, :, :])).sum(-1)),
    "additive": (lambda **options: compat.AdditiveAttention(**options),
                 lambda q, k, scale: np.tanh(q[..., :, None, :] + k[..., None, :, :]) @ scale[0]),
    "plain additive": (lambda **options: compat.AdditiveAttention(use_scale=False, **options),
                       lambda q, k, scale: np.tanh(q[..., :, None, :] + k[..., None, :, :]
                                                   ).sum(-1)),
}
each_score = pytest.mark.parametrize(("make", "scores"), SCORES.values(), ids=SCORES)


def built(make, query, value, key, **options):
    """A layer whose weights are not those of the start: negative ones among them."""
    layer = make(**options)
    layer.build([query.shape, value.shape, key.shape])
    layer.set_weights([random(*array.shape, seed=7 + index)
                       for index, array in enumerate(layer.get_weights())])
    return layer


@pytest.mark.parametrize("batch", [(2,), (), (2, 3), (0,)])
@each_score
def test_call_is_softmax_of_the_scores(make, scores, batch):
    query, value, key = random(*batch, 5, 4), random(*batch, 6, 3, seed=1), random(*batch, 6, 4,
                                                                                   seed=2)
    layer = built(make, query, value, key, dtype="float64")
    output, weights = layer([query, value, key], return_attention_scores=True)
    expected = softmax(scores(query, key, layer.get_weights()))
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-14)
    np.testing.assert_allclose(output, expected @ value, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(layer([query, value, key]), output)
    np.testing.assert_array_equal(layer.call([query, value, key]), output)
    assert layer.compute_output_shape([query.shape, value.shape]) == output.shape


@each_score
def test_masks(make, scores):
    query, value = random(2, 5, 4), random(2, 6, 4, seed=1)
    layer = built(make, query, value, value, dtype="float64")
    value_mask = np.array([[1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 1, 1]], bool)
    query_mask = np.array([[1, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    visible = value_mask[:, None] & np.tri(5, 6, dtype=bool)
    table = np.where(visible, scores(query, value, layer.get_weights()), -1e9)
    expected = softmax(np.where(visible.any(-1, keepdims=True), table, 0))  # no key: uniform
    value[0, 4:] = np.nan
    options = {"use_causal_mask": True, "return_attention_scores": True}
    output, weights = layer([query, value], [query_mask, value_mask], **options)
    np.testing.assert_allclose(weights[0], expected[0], rtol=0, atol=1e-14)
    seen = visible[1].any(-1)
    np.testing.assert_allclose(weights[1], expected[1], rtol=0, atol=1e-14)
    np.testing.assert_allclose(output[1], np.where(
        query_mask[1][:, None], expected[1] @ value[1], 0), rtol=0, atol=1e-13)
    assert not seen.all() and (output[0, 1] == 0).all() and np.isfinite(output[0]).all()
    for mask in ([None, visible], [None, visible, None]):  # for each query, and a third
        again = layer([query, value], mask, return_attention_scores=True)[1]
        np.testing.assert_array_equal(again, weights)


def test_known_answers():
    """Two keys, of which a query's own has the score 1 and the other 0."""
    query = np.eye(2)[None]
    value = np.array([[[1.0, 2.0], [3.0, 4.0]]])
    e = np.exp(1)
    expected = np.array([[[e, 1], [1, e]]]) / (1 + e)
    output, weights = compat.Attention(dtype="float64")([query, value, query], None, False, True)
    np.testing.assert_allclose(weights, expected, rtol=1e-15)
    np.testing.assert_allclose(output, expected @ value, rtol=1e-15)


def test_weights_of_the_layers():
    shapes = [(2, 3, 400), (2, 4, 400)]
    layer = compat.Attention(use_scale=True, score_mode="concat")
    assert not layer.built and layer.weights == [] and layer.count_params() == 0
    with pytest.raises(ValueError, match="weights: got them before"):
        layer.set_weights([])
    layer.build(shapes)
    assert layer.built and layer.scale == layer.concat_score_weight == 1
    assert [array.shape for array in layer.get_weights()] == [(), ()]
    layer.set_weights([np.array(2), np.array(3.0)])
    assert (layer.scale, layer.concat_score_weight) == (2, 3)
    with pytest.raises(ValueError, match="got 1 arrays, wanted 2: of scale, concat_score_weight"):
        layer.set_weights([np.array(2)])
    additive = compat.AdditiveAttention(seed=0)
    additive.build(shapes)
    bound = np.sqrt(3 / 400)
    assert additive.scale.shape == (400,) and 0.98 * bound < abs(additive.scale).max() <= bound
    plain = compat.Attention()
    plain.build(shapes)
    assert plain.built and plain.weights == []
    plain.set_weights([])


def test_dropout_acts_in_training_alone_and_on_the_weights():
    query, value = random(2, 30, 4), random(2, 40, 4, seed=1)
    for make in (compat.Attention, compat.AdditiveAttention):
        layer = make(dropout=0.25, seed=3, dtype="float64")
        output, plain = layer([query, value], return_attention_scores=True)
        dropped, weights = layer([query, value], training=True, return_attention_scores=True)
        kept = weights != 0
        assert 0.7 < kept.mean() < 0.8
        np.testing.assert_allclose(weights[kept], plain[kept] / 0.75, rtol=1e-12)
        np.testing.assert_allclose(dropped, weights @ value, rtol=0, atol=1e-13)
        assert not np.array_equal(output, dropped)
        again = make(dropout=0.25, seed=3, dtype="float64")
        again.build([query.shape, value.shape])
        again.set_weights(layer.get_weights())
        assert (again([query, value], training=True) != 0).all()
        output, weights = make(dropout=1.0)([query, value], training=True,
                                            return_attention_scores=True)
        assert not output.any() and not weights.any()


def test_masks_that_arrays_carry():
    class Carrying(np.ndarray):
        _keras_mask = None

    query, value = random(2, 3, 4).view(Carrying), random(2, 3, 4, seed=1).view(Carrying)
    value._keras_mask = np.array([[True, True, False]] * 2)
    layer = compat.Attention()
    found = layer([query, value], return_attention_scores=True)
    given = layer([np.asarray(query), np.asarray(value)], [None, value._keras_mask],
                  return_attention_scores=True)
    for array, wanted in zip(found, given):
        np.testing.assert_array_equal(array, wanted)
    assert not found[1][..., 2].any()


def test_compute_mask_is_querys():
    layer, arrays = compat.Attention(), [random(2, 3, 4)] * 2
    assert layer.compute_mask(arrays) is None
    assert layer.compute_mask(arrays, [None, np.ones(3)]) is None
    mask = np.array([True, False, True])
    np.testing.assert_array_equal(layer.compute_mask(arrays, [mask, None]), mask)


LAYERS = {
    "multi_head": lambda **options: compat.MultiHeadAttention(2, 3, **options),
    "gated": lambda **options: compat.MultiHeadAttention(2, 3, use_gate=True, **options),
    "grouped": lambda **options: compat.GroupQueryAttention(3, 4, 2, **options),
}


def called(layer, query, value, key):
    if isinstance(layer, compat.Attention):
        return layer([query, value, key], return_attention_scores=True)
    return layer(query, value, key, return_attention_scores=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("make", [*LAYERS.values(), *(make for make, _ in SCORES.values())],
                         ids=[*LAYERS, *SCORES])
def test_halves_are_computed_in_float32_and_rounded_once(make, dtype):
    query, value, key = (random(2, 5, 6, seed=seed).astype(np.float32) for seed in range(3))
    half = make(dtype=dtype.name)
    if isinstance(half, compat.Attention):
        half.build([query.shape, value.shape, key.shape])
    else:
        half.build(query.shape, value.shape, key.shape)
    assert half.dtype == dtype and all(array.dtype == dtype for array in half.weights)
    half.set_weights([random(*array.shape, seed=index) for index, array in enumerate(half.weights)])
    single = half.from_config({**half.get_config(), "dtype": "float32"})
    if isinstance(half, compat.Attention):
        single.build([query.shape, value.shape, key.shape])
    else:
        single.build(query.shape, value.shape, key.shape)
    single.set_weights(half.get_weights())
    rounded = [array.astype(dtype).astype(np.float32) for array in (query, value, key)]
    for found, wanted in zip(called(half, query, value, key), called(single, *rounded)):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, wanted.astype(dtype))
    assert all(array.dtype == dtype for array in half.get_weights())


@pytest.mark.parametrize("layer", [
    compat.MultiHeadAttention(2, 3, 4, 0.25, False, (2, 5), (1,), 7, use_gate=True, seed=5,
                              dtype="float16", name="first"),
    compat.MultiHeadAttention(2, 3),
    compat.GroupQueryAttention(3, 4, 2, 0.5, sliding_window=2),
    compat.Attention(True, "concat", 0.5, 3, dtype="float64"),
    compat.AdditiveAttention(False, 0.5, seed=4),
], ids=lambda layer: type(layer).__name__)
def test_config_makes_the_same_layer(layer):
    config = json.loads(json.dumps(layer.get_config()))
    again = type(layer).from_config(config)
    assert type(again) is type(layer) and repr(again) == repr(layer)
    assert json.loads(json.dumps(again.get_config())) == config
    assert (again.dtype, again.name, again.seed) == (layer.dtype, layer.name, layer.seed)


def test_configs_of_keras_are_read():
    """As Keras 3.15 writes them: policies and initializers as dicts."""
    policy = {"module": "keras", "class_name": "DTypePolicy", "config": {"name": "float64"},
              "registered_name": None}
    glorot = {"module": "keras.initializers", "class_name": "GlorotUniform",
              "config": {"seed": None}, "registered_name": None}
    zeros = {"module": "keras.initializers", "class_name": "Zeros", "config": {},
             "registered_name": None}
    config = {"name": "x", "trainable": True, "dtype": policy, "num_heads": 2, "key_dim": 3,
              "kernel_initializer": glorot, "bias_initializer": zeros, "kernel_regularizer": None}
    layer = compat.MultiHeadAttention.from_config(config)
    assert (layer.dtype, layer.name, layer.kernel_initializer) == (
        np.float64, "x", "glorot_uniform")
    with pytest.raises(TypeError, match="num_head: got"):
        compat.MultiHeadAttention.from_config({"num_head": 2, "key_dim": 3})


def test_initializers_of_keras_in_configs_want_keras(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "keras", None)
    drawn = {"class_name": "HeNormal", "config": {"seed": None}}
    with pytest.raises(ImportError, match="kernel_initializer: got Keras' HeNormal"):
        compat.MultiHeadAttention.from_config({"num_heads": 2, "key_dim": 3,
                                               "kernel_initializer": drawn})


X = np.ones((1, 2, 6))


@pytest.mark.parametrize(("error", "message", "call"), [
    (ValueError, "score_mode: got 'general', wanted 'dot' or 'concat'",
     lambda: compat.Attention(score_mode="general")),
    (ValueError, "dropout: got 2", lambda: compat.Attention(dropout=2)),
    (TypeError, "dtype: got 'int8'", lambda: compat.Attention(dtype="int8")),
    (TypeError, "score_mode: got", lambda: compat.AdditiveAttention(score_mode="dot")),
    (ValueError, "inputs: got ndarray, wanted a list", lambda: compat.Attention()(X)),
    (ValueError, "inputs: got tuple", lambda: compat.Attention()((X, X))),
    (ValueError, "inputs: got a list of 4", lambda: compat.Attention()([X] * 4)),
    (ValueError, "input_shape: got", lambda: compat.Attention().build([X.shape])),
    (ValueError, "mask: got ndarray, wanted a list", lambda: compat.Attention()([X, X], X)),
    (ValueError, "mask: got a list of 1", lambda: compat.Attention()([X, X], [X])),
    (TypeError, "value: got None", lambda: compat.Attention()([X, None])),
    (ValueError, r"query: got shape \(2,\)", lambda: compat.Attention()([X[0, 0, :2], X])),
    (ValueError, r"key: got shape \(1, 2, 5\)", lambda: compat.Attention()([X, X[..., :5]])),
    (ValueError, r"key: got shape \(1, 1, 6\)", lambda: compat.Attention()([X, X, X[:, :1]])),
    (ValueError, r"query_mask: got shape \(1, 3\), wanted \(1, 2\)",
     lambda: compat.Attention()([X, X], [np.ones((1, 3)), None])),
    (ValueError, r"value_mask: got shape \(1, 3\)",
     lambda: compat.Attention()([X, X], [None, np.ones((1, 3))])),
    (ValueError, "query, key, value: got shapes",
     lambda: compat.Attention()([np.ones((2, 3, 4)), np.ones((3, 3, 4))])),
    (TypeError, "query", lambda: compat.Attention()([[["a"]], X])),
    (TypeError, "key_shape: got int", lambda: compat.MultiHeadAttention(2, 3).compute_output_shape(
        (1, 2, 6), (1, 2, 6), 2)),
])
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_another_width_than_built_for():
    layer = compat.AdditiveAttention()
    layer([X, X])
    with pytest.raises(ValueError, match=r"query: got shape \(1, 2, 5\), wanted 6"):
        layer([X[..., :5], X[..., :5]])


def test_signatures():
    """Keras 3.15's: test-peers compares them with the installed ones."""
    def names(function):
        return [*inspect.signature(function).parameters]
    assert names(compat.Attention) == ["use_scale", "score_mode", "dropout", "seed", "dtype",
                                       "name"]
    assert names(compat.AdditiveAttention) == ["use_scale", "dropout", "seed", "dtype", "name"]
    assert names(compat.Attention.call)[1:] == ["inputs", "mask", "training",
                                                "return_attention_scores", "use_causal_mask"]
