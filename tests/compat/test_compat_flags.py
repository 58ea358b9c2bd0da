"""Flags of all adapters as numbers and as NumPy has them, and a dropout of 1, which drops all."""

import numpy as np
import pytest

from mha.compat import d2l, jax, keras, onnx, pytorch_notebook
from mha.compat.d2l import jax as d2l_jax
from mha.compat.d2l import mxnet as d2l_mxnet
from mha.compat.d2l import tensorflow as d2l_tensorflow
from mha.compat.flax import linen, nnx
from mha.compat.onnx import microsoft

X = np.random.default_rng(0).normal(size=(2, 5, 8))
HEADS = X.reshape(2, 5, 2, 4)
CACHES = np.cos(X[0, :, :2]), np.sin(X[0, :, :2])
POSITIONS = np.arange(10).reshape(2, 5) % 5
WEIGHTS = np.random.default_rng(1).normal(size=(8, 24))


def keras_layer(cls=keras.MultiHeadAttention, sizes=(2, 4), **options):
    return cls(*sizes, seed=0, dtype="float64", **options)


def linen_weights(**options):
    layer = linen.MultiHeadDotProductAttention(num_heads=2)
    return layer.apply(layer.init(0, X), X, mutable=["intermediates"], **options)[1]


def nnx_layer(**options):
    return nnx.MultiHeadAttention(2, 8, rngs=0, decode=False, **options)


def sown(**options):
    layer = nnx_layer()
    layer(X, **options)
    return nnx.pop(layer)


def grouped(**options):
    return microsoft.group_query_attention(X, X, X, None, None, [4, 4], 5, *CACHES, num_heads=2,
                                           kv_num_heads=2, **options)


# The name of a flag, and a call that takes it.
FLAGGED = [
    ("use_causal_mask", lambda **flag: keras_layer()(X, X, **flag)),
    ("return_attention_scores", lambda **flag: keras_layer()(X, X, **flag)),
    ("training", lambda **flag: keras_layer(dropout=0.5)(X, X, **flag)),
    ("use_causal_mask", lambda **flag: keras_layer(keras.GroupQueryAttention, (4, 2, 1))(
        X, X, **flag)),
    ("is_causal", lambda **flag: jax.dot_product_attention(HEADS, HEADS, HEADS, **flag)),
    ("return_residual", lambda **flag: jax.dot_product_attention(HEADS, HEADS, HEADS, **flag)),
    ("sow_weights", linen_weights),
    ("sow_weights", sown),
    ("is_causal", lambda **flag: nnx_layer()(X, **flag)),
    ("is_causal", lambda **flag: onnx.attention(HEADS, HEADS, HEADS, **flag).Y),
    ("return_qk", lambda **flag: onnx.attention(HEADS, HEADS, HEADS, **flag).qk_matmul_output),
    ("unidirectional", lambda **flag: microsoft.multi_head_attention(
        X, X, X, num_heads=2, **flag).output),
    ("return_qk", lambda **flag: microsoft.multi_head_attention(X, X, X, num_heads=2, **flag).qk),
    ("unidirectional", lambda **flag: microsoft.attention(
        X, WEIGHTS, num_heads=2, **flag).output),
    ("do_rotary", lambda **flag: microsoft.attention(X, WEIGHTS, num_heads=2, **flag).output),
    ("output_qk", lambda **flag: microsoft.decoder_masked_multi_head_attention(
        *[X[:, :1]] * 3, num_heads=2, **flag).qk),
    ("causal", lambda **flag: grouped(**flag).output),
    ("do_rotary", lambda **flag: grouped(**flag).output),
    ("rotary_interleaved", lambda **flag: grouped(do_rotary=1, **flag).output),
    ("interleaved", lambda **flag: onnx.rotary_embedding(
        HEADS.swapaxes(1, 2), *CACHES, POSITIONS, **flag)),
    ("interleaved", lambda **flag: microsoft.rotary_embedding(
        HEADS.swapaxes(1, 2), POSITIONS, *CACHES, **flag)),
]


def leaves(found):
    """The arrays in it, in one list."""
    if isinstance(found, dict):
        found = tuple(found.values())
    return [found] if not isinstance(found, tuple) else [
        leaf for part in found for leaf in leaves(part)]


@pytest.mark.parametrize(("name", "call"), FLAGGED, ids=[
    f"{index}-{name}" for index, (name, _) in enumerate(FLAGGED)])
def test_flags_are_what_they_are_worth(name, call):
    wanted = {value: leaves(call(**{name: value})) for value in (False, True)}
    assert [getattr(array, "shape", None) for array in wanted[False]] != [
        getattr(array, "shape", None) for array in wanted[True]] or not all(
            np.array_equal(*pair) for pair in zip(*wanted.values()))
    for value, given in ((False, (0, np.False_, np.int64(0), np.array(False), None)),
                         (True, (1, np.True_, np.int64(1), np.array(True)))):
        for flag in given:
            for got, right in zip(leaves(call(**{name: flag})), wanted[value], strict=True):
                np.testing.assert_array_equal(got, right)
    for wrong in ("True", 2, [True], np.array([True, False]), 0.5):
        with pytest.raises(TypeError, match=rf"^{name}: got .*, wanted True or False"):
            call(**{name: wrong})


# A dropout of 1


@pytest.mark.parametrize("use_gate", [False, True])
@pytest.mark.parametrize("cls", [keras.MultiHeadAttention, keras.GroupQueryAttention])
def test_keras_layers_keep_the_last_bias_alone(cls, use_gate):
    sizes = (2, 4) if cls is keras.MultiHeadAttention else (4, 2, 1)
    layer = keras_layer(cls, sizes, dropout=1.0, use_gate=use_gate, bias_initializer=(
        lambda shape, dtype: np.arange(np.prod(shape)).reshape(shape)))
    output, scores = layer(X, X, training=True, return_attention_scores=True)
    np.testing.assert_array_equal(output, np.broadcast_to(np.arange(8.0), X.shape))
    np.testing.assert_array_equal(layer(X, X, training=1), output)
    np.testing.assert_allclose(scores.sum(-1), 1, rtol=1e-12)  # before dropout
    again, _ = layer(X, X, return_attention_scores=True)
    assert abs(again - output).max() > 0.1
    unbiased = keras_layer(cls, sizes, dropout=True, use_bias=False)
    assert not unbiased(X, X, training=True).any()


@pytest.mark.parametrize("form", [d2l, d2l_tensorflow, d2l_jax, d2l_mxnet])
def test_the_books_layers_give_zeros_and_keep_the_weights(form):
    training = {} if form in (d2l, d2l_mxnet) else {"training": True}
    for layer in (form.DotProductAttention(1.0), form.AdditiveAttention(
            **({"key_size": 8, "query_size": 8} if form is d2l_tensorflow else {}),
            num_hiddens=4, dropout=1)):
        output = layer(X, X, X, **training)
        output = output[0] if form is d2l_jax else output
        assert output.shape == X.shape and output.any() == (form is d2l_mxnet)  # which never drops
        np.testing.assert_allclose(layer.attention_weights.sum(-1), 1, rtol=1e-6)


def test_the_notebooks_layer_keeps_the_last_bias_alone():
    layer = pytorch_notebook.MultiHeadAttention(8, 2, dropout=1.0, rng=0)
    layer.W_o.bias = np.arange(8.0)
    output, weights = layer(X, X, X)
    np.testing.assert_array_equal(output, np.broadcast_to(np.arange(8.0), X.shape))
    assert not weights.any()  # the notebook's are those after dropout
    assert layer.eval()(X, X, X)[1].sum() == pytest.approx(2 * 2 * 5)


def test_what_is_no_probability_is_an_error_and_flax_takes_no_1():
    for made in (lambda p: keras_layer(dropout=p), lambda p: d2l.DotProductAttention(p),
                 lambda p: pytorch_notebook.MultiHeadAttention(8, 2, p)):
        for wrong in (1.5, -0.1, float("nan")):
            with pytest.raises(ValueError, match=r"^dropout: got .*, wanted a number in \[0, 1\]"):
                made(wrong)
    for made in (lambda p: nnx_layer(dropout_rate=p),
                 lambda p: linen.MultiHeadDotProductAttention(2, dropout_rate=p)):
        with pytest.raises(ValueError, match=r"^dropout_rate: got 1.0, wanted .* \[0, 1\)"):
            made(1.0)
