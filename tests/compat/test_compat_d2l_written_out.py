"""Section 11.5 of the book writes the layer out as a class: what such classes name is there in each
form, under the changed imports that `mha.compat.d2l` lists, and gives the adapter's own numbers.
"""

import inspect

import numpy as np
import pytest

import mha
from mha.compat.d2l import jax, mxnet, tensorflow, torch

WIDTH, HEADS, LENGTHS = 12, 3, [3, 2]
GENERATOR = np.random.default_rng(0)
X, Y = (GENERATOR.standard_normal((2, length, WIDTH), np.float32) for length in (4, 6))
NAMES = ("W_q", "W_k", "W_v", "W_o")


def pytorch_class():
    from mha.compat.d2l import torch as d2l
    from mha.compat.d2l import torch as torch_
    from mha.compat.d2l.torch import nn

    class Written(d2l.Module):
        def __init__(self, width, heads, dropout, bias):
            super().__init__()
            self.heads, self.pool = heads, d2l.DotProductAttention(dropout)
            for name in NAMES:
                setattr(self, name, nn.LazyLinear(width, bias=bias))

        def forward(self, *inputs):
            *arrays, lengths = inputs
            split = [self.to_heads(getattr(self, name)(array))
                     for name, array in zip(NAMES, arrays)]
            if lengths is not None:
                lengths = torch_.repeat_interleave(lengths, repeats=self.heads, dim=0)
            return self.W_o(self.from_heads(self.pool(*split, lengths)))

    @d2l.add_to_class(Written)
    def to_heads(self, features):
        batch, length, _ = features.shape
        heads = features.reshape(batch, length, self.heads, -1).permute(0, 2, 1, 3)
        return heads.reshape(batch * self.heads, length, -1)

    @d2l.add_to_class(Written)
    def from_heads(self, heads):
        _, length, head_dim = heads.shape
        apart = heads.reshape(-1, self.heads, length, head_dim).permute(0, 2, 1, 3)
        return apart.reshape(-1, length, self.heads * head_dim)

    return Written(WIDTH, HEADS, 0.5, True).eval()


def tensorflow_class():
    from mha.compat.d2l import tensorflow as d2l
    from mha.compat.d2l import tensorflow as tf

    class Written(d2l.Module):
        def __init__(self, width, heads, dropout, bias):
            super().__init__()
            self.heads, self.pool = heads, d2l.DotProductAttention(dropout)
            for name in NAMES:
                setattr(self, name, tf.keras.layers.Dense(width, use_bias=bias))

        def call(self, *inputs, **kwargs):
            *arrays, lengths = inputs
            split = [self.to_heads(getattr(self, name)(array))
                     for name, array in zip(NAMES, arrays)]
            if lengths is not None:
                lengths = tf.repeat(lengths, repeats=self.heads, axis=0)
            return self.W_o(self.from_heads(self.pool(*split, lengths, **kwargs)))

    @d2l.add_to_class(Written)
    def to_heads(self, features):
        batch, length, _ = features.shape
        heads = tf.reshape(features, shape=(batch, length, self.heads, -1))
        return tf.reshape(tf.transpose(heads, perm=(0, 2, 1, 3)), (batch * self.heads, length, -1))

    @d2l.add_to_class(Written)
    def from_heads(self, heads):
        _, length, head_dim = heads.shape
        apart = tf.reshape(heads, shape=(-1, self.heads, length, head_dim))
        return tf.reshape(tf.transpose(apart, perm=(0, 2, 1, 3)),
                          shape=(-1, length, self.heads * head_dim))

    return Written(WIDTH, HEADS, 0.5, True)


def jax_class():
    import numpy as jnp

    from mha.compat.d2l import jax as d2l
    from mha.compat.d2l.jax import nn

    class Written(nn.Module):
        width: int
        heads: int
        dropout: float
        bias: bool = False

        def setup(self):
            self.pool = d2l.DotProductAttention(self.dropout)
            for name in NAMES:
                setattr(self, name, nn.Dense(self.width, use_bias=self.bias))

        @nn.compact
        def __call__(self, *inputs, training=False):
            *arrays, lengths = inputs
            split = [self.to_heads(getattr(self, name)(array))
                     for name, array in zip(NAMES, arrays)]
            if lengths is not None:
                lengths = jnp.repeat(lengths, self.heads, axis=0)
            attended, weights = self.pool(*split, lengths, training=training)
            return self.W_o(self.from_heads(attended)), weights

    @d2l.add_to_class(Written)
    def to_heads(self, features):
        batch, length, _ = features.shape
        heads = jnp.transpose(features.reshape((batch, length, self.heads, -1)), (0, 2, 1, 3))
        return heads.reshape((batch * self.heads, length, -1))

    @d2l.add_to_class(Written)
    def from_heads(self, heads):
        _, length, head_dim = heads.shape
        apart = jnp.transpose(heads.reshape((-1, self.heads, length, head_dim)), (0, 2, 1, 3))
        return apart.reshape((-1, length, self.heads * head_dim))

    return Written(WIDTH, HEADS, 0.5, bias=True)


def mxnet_class():
    from mha.compat.d2l import mxnet as d2l
    from mha.compat.d2l.mxnet import nn, npx
    npx.set_np()

    class Written(d2l.Module):
        def __init__(self, width, heads, dropout, bias):
            super().__init__()
            self.heads, self.pool = heads, d2l.DotProductAttention(dropout)
            for name in NAMES:
                setattr(self, name, nn.Dense(width, use_bias=bias, flatten=False))

        def forward(self, *inputs):
            *arrays, lengths = inputs
            split = [self.to_heads(getattr(self, name)(array))
                     for name, array in zip(NAMES, arrays)]
            if lengths is not None:
                lengths = lengths.repeat(self.heads, axis=0)
            return self.W_o(self.from_heads(self.pool(*split, lengths)))

    @d2l.add_to_class(Written)
    def to_heads(self, features):
        batch, length, _ = features.shape
        heads = features.reshape(batch, length, self.heads, -1).transpose(0, 2, 1, 3)
        return heads.reshape(batch * self.heads, length, -1)

    @d2l.add_to_class(Written)
    def from_heads(self, heads):
        _, length, head_dim = heads.shape
        apart = heads.reshape(-1, self.heads, length, head_dim).transpose(0, 2, 1, 3)
        return apart.reshape(-1, length, self.heads * head_dim)

    layer = Written(WIDTH, HEADS, 0.5, True)
    layer.initialize()
    return layer


CLASSES = {torch: pytorch_class, tensorflow: tensorflow_class, jax: jax_class, mxnet: mxnet_class}
each_form = pytest.mark.parametrize("form", CLASSES, ids=[form.__name__ for form in CLASSES])


@each_form
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_a_layer_written_out_gives_the_numbers_of_mha(form, lengths):
    lengths = None if lengths is None else form.tensor(lengths)
    written = CLASSES[form]()
    output = written(X, Y, Y, lengths)
    output = output[0] if form is jax else output
    layer = mha.MultiHeadAttention(WIDTH, HEADS, rng=0)
    for name in NAMES:
        linear = getattr(written, name)
        linear.bias = GENERATOR.standard_normal(WIDTH)
        setattr(layer, name, linear.kernel)
        setattr(layer, "b" + name[1:], linear.bias)
    output = written(X, Y, Y, lengths)
    output = output[0] if form is jax else output
    form.check_shape(output, (2, 4, WIDTH))
    wanted = layer(X, Y, key_lengths=lengths)
    assert output.dtype == np.float32
    np.testing.assert_allclose(output, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@each_form
def test_dropout_of_a_layer_written_out_acts_as_in_its_framework(form):
    written = CLASSES[form]()

    def changes(**options):
        one, other = (written(X, Y, Y, None, **options) for _ in range(2))
        return not np.array_equal(*((one[0], other[0]) if form is jax else (one, other)))

    assert not changes()
    if form is torch:
        written.train()
        assert written.pool.training and changes()
    elif form is not mxnet:
        assert changes(training=True) and not changes(training=False)


def test_parameters_of_a_layer_written_out_go_flaxs_way():
    written = jax_class()
    (output, _), variables = written.init_with_output(3, X, Y, Y, None)
    assert sorted(variables["params"]) == sorted(NAMES)
    assert np.array_equal(jax_class().apply(variables, X, Y, Y, None)[0], output)


def test_the_books_way_of_transposing_may_replace_ours():
    """Its cells may be run on the imported class, too."""
    class Imported(torch.MultiHeadAttention):
        pass

    layer = Imported(WIDTH, HEADS, 0.0, rng=0).eval()
    wanted = layer(X, Y, Y, torch.tensor(LENGTHS))
    written = type(pytorch_class())
    Imported.heads = HEADS
    Imported.transpose_qkv, Imported.transpose_output = written.to_heads, written.from_heads
    assert np.array_equal(layer(X, Y, Y, torch.tensor(LENGTHS)), wanted)
    features = torch.ones((2, 4, WIDTH))
    assert np.array_equal(layer.transpose_output(layer.transpose_qkv(features)), features)


def test_every_array_of_the_pytorch_form_can_permute():
    arrays = [torch.ones((2, 3, 4)), torch.normal(0, 1, (2, 3, 4)), torch.tensor([[[1.0]]]),
              torch.reshape(np.ones(8), (2, 2, 2)), torch.masked_softmax(np.ones((1, 2, 3)), None),
              torch.nn.LazyLinear(5)(np.ones((1, 2, 3))), torch.DotProductAttention(0.0)(X, Y, Y)]
    for array in arrays:
        assert array.permute(2, 0, 1).shape == array.shape[2:] + array.shape[:2]
    assert str(inspect.signature(torch.ones)) == str(inspect.signature(mxnet.ones))


def test_dense_of_mxnet_flattens_unless_told():
    x = np.ones((2, 3, 5), np.float32)
    assert mxnet.nn.Dense(4)(x).shape == (2, 4)
    assert mxnet.nn.Dense(4, flatten=False)(x).shape == (2, 3, 4)
    assert mxnet.nn.Dense(4).bias is not None and mxnet.nn.Dense(4, use_bias=False).bias is None


def test_weights_made_in_a_call_are_refused():
    class Forgetful(jax.nn.Module):
        @jax.nn.compact
        def __call__(self, x):
            return jax.nn.Dense(3)(x)

    with pytest.raises(RuntimeError, match=r"make it in setup\(self\)"):
        Forgetful()(X)
    assert jax.nn.Dense(3)(X).shape == (2, 4, 3)  # outside of calls as before


@each_form
def test_a_class_without_a_call_says_so(form):
    class Nothing(form.Module):
        pass

    with pytest.raises(NotImplementedError, match=r"Nothing has no (forward|call|__call__)"):
        Nothing()(X)
