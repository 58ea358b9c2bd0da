"""mha.compat.keras without Keras: known answers, round trips, shapes and errors.

`make test-peers` compares it with Keras itself.
"""

import pickle
import subprocess
import sys

import numpy as np
import pytest

from mha import reference
from mha.compat import keras as compat

LAYERS = [lambda **options: compat.MultiHeadAttention(2, 3, dtype="float64", seed=0, **options),
          lambda **options: compat.GroupQueryAttention(3, 4, 2, dtype="float64", seed=0, **options)]
each_layer = pytest.mark.parametrize("make", LAYERS, ids=["multi_head", "grouped"])


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def assert_close(ours, expected, tolerance=1e-12):
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * abs(expected).max())


def built(make, *shapes, **options):
    """A layer whose biases are not zero."""
    layer = make(**options)
    layer.build(*shapes)
    layer.set_weights([random(*array.shape, seed=index)
                       for index, array in enumerate(layer.get_weights())])
    return layer


def figure(layer, query, value, key, **options):
    """The plain reference with the layer's weights: output and weights per head."""
    W_q, b_q, W_k, b_k, W_v, b_v, W_o, b_o = layer.get_weights()
    return reference.multi_head_attention(
        query, key, value, *(W.reshape(len(W), -1) for W in (W_q, W_k, W_v)),
        W_o.reshape(-1, W_o.shape[-1]), b_q=b_q.ravel(), b_k=b_k.ravel(), b_v=b_v.ravel(),
        b_o=b_o, num_heads=W_q.shape[1], num_kv_heads=W_k.shape[1], return_weights=True,
        **options)


@each_layer
def test_call_is_the_figure(make):
    query, value, key = random(2, 5, 6), random(2, 4, 7, seed=1), random(2, 4, 8, seed=2)
    layer = built(make, query.shape, value.shape, key.shape)
    output, scores = layer(query, value, key, return_attention_scores=True)
    expected, expected_scores = figure(layer, query, value, key)
    assert_close(output, expected)
    assert_close(scores, expected_scores)
    assert_close(layer.call(query, value, key), expected)
    causal = layer(query, value, key, use_causal_mask=True)
    assert_close(causal, figure(layer, query, value, key, causal=True, query_offset=0)[0])


def test_value_comes_before_key():
    query, value = random(2, 5, 6), random(2, 4, 6, seed=1)
    layer = built(LAYERS[0], query.shape, value.shape)
    assert_close(layer(query, value), figure(layer, query, value, value)[0])
    key = random(2, 4, 6, seed=2)
    assert_close(layer(query, value, key), figure(layer, query, value, key)[0])


@each_layer
def test_weights_have_keras_order_and_shapes(make):
    layer = make(use_gate=True)
    assert not layer.built
    assert layer.get_weights() == [] and layer.count_params() == 0
    layer(np.ones((1, 2, 6)), np.ones((1, 3, 7)), np.ones((1, 3, 8)))
    heads, kv_heads = (2, 2) if make is LAYERS[0] else (4, 2)
    assert [array.shape for array in layer.get_weights()] == [
        (6, heads, 3), (heads, 3), (8, kv_heads, 3), (kv_heads, 3), (6, heads, 3), (heads, 3),
        (7, kv_heads, 3), (kv_heads, 3), (heads, 3, 6), (6,)]
    assert layer.count_params() == sum(array.size for array in layer.get_weights())
    assert {array.dtype for array in layer.get_weights()} == {np.dtype(np.float64)}


@each_layer
def test_weights_come_back_as_they_were_set(make):
    layer = make()
    layer.build((None, None, 6), (None, None, 7))
    sent = [random(*array.shape, seed=index) for index, array in enumerate(layer.get_weights())]
    layer.set_weights(sent)
    sent[0][:] = 0  # a copy was taken
    found = layer.get_weights()
    assert all((one == random(*one.shape, seed=index)).all() for index, one in enumerate(found))
    found[1][:] = 7
    assert (layer.weights[1] != 7).all()


def test_parts_are_read_and_set():
    layer = built(LAYERS[0], (2, 3, 6), (2, 3, 6))
    assert layer.query_dense.kernel.shape == (6, 2, 3)
    assert layer.output_dense.kernel.shape == (2, 3, 6)
    layer.value_dense.kernel = np.zeros((6, 2, 3))
    layer.value_dense.bias = np.zeros((2, 3))
    assert_close(layer(random(2, 3, 6), random(2, 3, 6)),
                 np.broadcast_to(layer.output_dense.bias, (2, 3, 6)))
    assert layer.key_dense.bias.shape == (2, 3)


def test_seed_draws_the_start():
    shapes = (1, 2, 30), (1, 2, 30)
    one, same, other = (compat.MultiHeadAttention(2, 15, seed=seed) for seed in (1, 1, 2))
    for layer in (one, same, other):
        layer.build(*shapes)
    np.testing.assert_array_equal(one.weights[0], same.weights[0])
    assert (one.weights[0] != other.weights[0]).any()
    bound = np.sqrt(6 / 60)
    assert 0.95 * bound < abs(one.weights[0]).max() <= bound
    assert not one.weights[1].any()


class Stateless:
    """An initializer as Keras writes them: the same numbers at every call, kept axes in a config;
    without a seed it takes a new one."""

    seeds = iter(range(100, 200))

    def __init__(self, seed=None, input_axes=None, output_axes=None):
        self.given, self.seed = seed, next(self.seeds) if seed is None else seed
        self.input_axes, self.output_axes = input_axes, output_axes

    def get_config(self):
        return {"seed": self.given, "input_axes": self.input_axes, "output_axes": self.output_axes}

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def __call__(self, shape, dtype=None):
        if self.input_axes is not None:
            assert [*self.input_axes, *self.output_axes] == list(range(len(shape)))
        inputs = [shape[axis] for axis in self.input_axes or ()]
        return random(*shape, seed=self.seed) / np.prod(inputs)


@each_layer
def test_an_initializer_of_keras_draws_each_kernel_anew(make):
    shapes = (2, 3, 6), (2, 3, 6)
    layer = make(kernel_initializer=Stateless(), use_bias=False, use_gate=True)
    layer.build(*shapes)
    kernels = layer.get_weights()
    firsts = [array.ravel()[0] * np.prod(array.shape[:-2 if index < 4 else -1])
              for index, array in enumerate(kernels)]
    assert len(set(np.round(firsts, 9))) == len(kernels) == 5
    seeded = make(kernel_initializer=Stateless(seed=7), use_bias=False)
    seeded.build(*shapes)
    query, _, _, output = seeded.get_weights()
    assert_close(query, random(*query.shape, seed=7) / 6)
    assert_close(output, random(*output.shape, seed=7) / np.prod(output.shape[:2]))


def test_masks_that_arrays_carry_are_heeded_where_none_is_given():
    """As tensors of Keras carry them, in an attribute."""
    class Carrying(np.ndarray):
        pass

    x = random(2, 5, 6)
    mask = np.arange(5) < np.array([[3], [4]])
    carrying = x.view(Carrying)
    carrying._keras_mask = mask
    layer = built(LAYERS[0], x.shape, x.shape)
    assert_close(layer(carrying, carrying), layer(x, x, query_mask=mask, value_mask=mask))
    other = np.arange(5) < 2
    assert_close(layer(x, carrying, value_mask=np.tile(other, (2, 1))),
                 layer(x, x, value_mask=np.tile(other, (2, 1))))
    assert_close(layer(x, x, carrying), layer(x, x, key_mask=mask))


def test_initializers_may_be_functions():
    layer = compat.MultiHeadAttention(2, 3, bias_initializer=lambda shape, dtype: np.ones(shape),
                                      kernel_initializer="zeros")
    output = layer(np.ones((1, 2, 6)), np.ones((1, 2, 6)))
    assert output.tolist() == np.ones((1, 2, 6)).tolist()


@each_layer
def test_padding_hides_keys(make):
    query, value = random(2, 5, 6), random(2, 4, 6, seed=1)
    layer = built(make, query.shape, value.shape)
    real = np.arange(4) < [[3], [2]]
    expected = figure(layer, query, value, value, key_lengths=[3, 2])[0]
    for mask in ({"value_mask": real}, {"key_mask": real.astype(int)},
                 {"attention_mask": real[:, None]}, {"attention_mask": real[:, None, None]},
                 {"value_mask": real, "attention_mask": np.ones((5, 4), bool)}):
        assert_close(layer(query, value, **mask), expected)


@each_layer
def test_sliding_window_counts_the_token_itself(make):
    x = random(2, 7, 6)
    layer = built(make, x.shape, x.shape, sliding_window=2)
    scores = layer(x, x, return_attention_scores=True)[1]
    assert ((scores != 0) == (abs(np.subtract.outer(range(7), range(7))) < 2)).all()
    causal = layer(x, x, return_attention_scores=True, use_causal_mask=True)[1]
    assert ((causal != 0) == np.tri(7, k=0) * (1 - np.tri(7, k=-2))).all()


def test_queries_without_keys_get_the_mean_or_zeros():
    x = random(2, 3, 6)
    layer = built(LAYERS[0], x.shape, x.shape)
    nothing = np.zeros((3, 3), bool)
    even = figure(layer, x, x, x, mask=nothing, empty_rows="uniform")[0]
    assert_close(layer(x, x, attention_mask=nothing), even)
    assert_close(layer(x, x, query_mask=np.zeros((2, 3), bool)), even)
    output, scores = layer(x, x, attention_mask=nothing, return_attention_scores=True)
    assert not scores.any()
    assert_close(output, np.broadcast_to(layer.output_dense.bias, output.shape))


def test_gate_multiplies_before_the_output():
    x = random(2, 3, 6)
    layer = built(LAYERS[0], x.shape, x.shape, use_gate=True)
    weights = layer.get_weights()
    weights[4][:] = 0
    weights[5][:] = [[np.log(3.0)] * 3, [-1000] * 3]  # a gate of 3/4; the second head is shut
    layer.set_weights(weights)
    output = layer(x, x)
    weights[8][:] *= np.array([0.75, 0])[:, None, None]
    plain = built(LAYERS[0], x.shape, x.shape)
    plain.set_weights([*weights[:4], *weights[6:]])
    assert_close(output, plain(x, x))


def test_attention_axes_choose_what_is_attended_over():
    x = random(2, 3, 4, 6)
    layer = built(LAYERS[0], x.shape, x.shape, attention_axes=2)
    output, scores = layer(x, x, return_attention_scores=True)
    assert scores.shape == (2, 3, 2, 4, 4)
    rows = built(LAYERS[0], (2, 4, 6), (2, 4, 6))
    for row in range(3):
        assert_close(output[:, row], rows(x[:, row], x[:, row]))
    columns = built(LAYERS[0], x.shape, x.shape, attention_axes=1)
    assert_close(columns(x, x, use_causal_mask=True)[:, :, 1],
                 built(LAYERS[0], (2, 3, 6), (2, 3, 6))(x[:, :, 1], x[:, :, 1],
                                                        use_causal_mask=True))
    everything = built(LAYERS[0], x.shape, x.shape)
    output, scores = everything(x, x, return_attention_scores=True)
    assert scores.shape == (2, 2, 3, 4, 3, 4)
    flat = rows(x.reshape(2, 12, 6), x.reshape(2, 12, 6))
    assert_close(output, flat.reshape(output.shape))
    assert everything.attention_axes == (1, 2)


def test_axes_go_back_to_their_places():
    x = random(2, 3, 4, 5, 6)
    layer = built(LAYERS[0], x.shape, x.shape, attention_axes=(1, 2))
    rows = built(LAYERS[0], (2, 12, 6), (2, 12, 6))
    output = layer(x, x)
    for column in range(5):
        one = x[:, :, :, column].reshape(2, 12, 6)
        assert_close(output[:, :, :, column], rows(one, one).reshape(2, 3, 4, 6))


@pytest.mark.parametrize(("given", "ends"), [(None, (6,)), (5, (5,)), ((2, 4), (2, 4))])
def test_output_shape(given, ends):
    layer = compat.MultiHeadAttention(2, 3, output_shape=given)
    assert layer.compute_output_shape((None, 5, 6), (None, 4, 7)) == (None, 5, *ends)
    assert layer(np.ones((2, 5, 6)), np.ones((2, 4, 7))).shape == (2, 5, *ends)


def test_dropout_acts_in_training_alone():
    x = random(4, 40, 6)
    layer = built(LAYERS[0], x.shape, x.shape, dropout=0.5)
    quiet = layer(x, x)
    np.testing.assert_array_equal(layer(x, x), quiet)
    np.testing.assert_array_equal(layer(x, x, training=False), quiet)
    assert (layer(x, x, training=True) != quiet).any()
    _, scores = layer(x, x, training=True, return_attention_scores=True)
    assert_close(scores.sum(axis=-1), np.ones(scores.shape[:-1]))  # as before dropout


def test_inputs_are_cast_and_stay():
    x = random(2, 3, 6)
    before = x.copy()
    layer = compat.MultiHeadAttention(2, 3, seed=0)
    assert layer(x, x).dtype == np.float32
    assert layer(x.astype(np.float16), np.ones((2, 3, 6), int)).dtype == np.float32
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0)])
def test_zero_lengths(lengths):
    layer = compat.MultiHeadAttention(2, 3)
    query, value = (np.ones((2, length, 6)) for length in lengths)
    assert layer(query, value).shape == (2, lengths[0], 6)


@pytest.mark.parametrize(("error", "message", "call"), [
    (ValueError, "num_heads: got 0", lambda: compat.MultiHeadAttention(0, 3)),
    (TypeError, "key_dim: got float", lambda: compat.MultiHeadAttention(2, 3.0)),
    (ValueError, "sliding_window: got 0",
     lambda: compat.MultiHeadAttention(2, 3, sliding_window=0)),
    (ValueError, "dropout: got 1.5", lambda: compat.MultiHeadAttention(2, 3, dropout=1.5)),
    (ValueError, "kernel_regularizer: got 'l2', wanted None",
     lambda: compat.MultiHeadAttention(2, 3, kernel_regularizer="l2")),
    (TypeError, "dtype: got 'int32'", lambda: compat.MultiHeadAttention(2, 3, dtype="int32")),
    (ValueError, "num_query_heads: got 4", lambda: compat.GroupQueryAttention(3, 4, 3)),
    (ValueError, "kernel_initializer: got 'he_normal'",
     lambda: compat.MultiHeadAttention(2, 3, kernel_initializer="he_normal").build(
         (1, 2, 6), (1, 2, 6))),
    (ValueError, "attention_axes: got",
     lambda: compat.MultiHeadAttention(2, 3, attention_axes=2).build((1, 2, 6), (1, 2, 6))),
    (ValueError, "key_shape: got", lambda: compat.MultiHeadAttention(2, 3).build(
        (1, 2, 6), (1, 2, 6), (1, 3, 6))),
    (ValueError, "weights: got them before", lambda: compat.MultiHeadAttention(2, 3).set_weights(
        [])),
    (TypeError, "mask: got a keyword .*wanted attention_mask=, True = attend",
     lambda: compat.MultiHeadAttention(2, 3)(np.ones((1, 2, 6)), np.ones((1, 2, 6)), mask=None)),
    (TypeError, "value: got nothing", lambda: compat.MultiHeadAttention(2, 3)(np.ones((1, 2, 6)))),
    (TypeError, "value: got None",
     lambda: compat.MultiHeadAttention(2, 3)(np.ones((1, 2, 6)), None)),
    (TypeError, "causal: got a keyword .*wanted use_causal_mask=",
     lambda: compat.GroupQueryAttention(3, 4, 2)(np.ones((1, 2, 6)), np.ones((1, 2, 6)),
                                                 causal=True)),
    (TypeError, "embed_dim: got a keyword .*wanted key_dim=, the width of one head",
     lambda: compat.MultiHeadAttention(2, 3, embed_dim=6)),
    (TypeError, "num_kv_heads: got a keyword .*wanted num_key_value_heads=",
     lambda: compat.GroupQueryAttention(3, 4, 2, num_kv_heads=2)),
])
def test_errors_of_making_a_layer(error, message, call):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("error", "message", "shapes", "options"), [
    (ValueError, r"query: got 2 dimensions", [(3, 6), (3, 6)], {}),
    (ValueError, r"query: got shape \(2, 3, 5\).*last of them 6", [(2, 3, 5), (2, 4, 6)], {}),
    (ValueError, r"value: got shape \(2, 4, 5\)", [(2, 3, 6), (2, 4, 5)], {}),
    (ValueError, r"key: got shape \(3, 4, 6\)", [(2, 3, 6), (3, 4, 6)], {}),
    (ValueError, r"value: got shape", [(2, 3, 6), (2, 4, 6), (2, 5, 6)], {}),
    (ValueError, r"attention_mask: got shape \(4, 3\)", [(2, 3, 6), (2, 4, 6)],
     {"attention_mask": np.ones((4, 3), bool)}),
    (ValueError, r"attention_mask: got shape \(4,\), wanted 2 to 4", [(2, 3, 6), (2, 4, 6)],
     {"attention_mask": np.ones(4, bool)}),
    (ValueError, r"value_mask: got shape \(2, 3\), wanted \(2, 4\)", [(2, 3, 6), (2, 4, 6)],
     {"value_mask": np.ones((2, 3), bool)}),
    (TypeError, "attention_mask", [(2, 3, 6), (2, 4, 6)], {"attention_mask": [["a"] * 4] * 3}),
])
def test_errors_of_a_call(error, message, shapes, options):
    layer = compat.MultiHeadAttention(2, 3)
    layer.build((None, None, 6), (None, None, 6))
    with pytest.raises(error, match=message):
        layer(*(np.ones(shape) for shape in shapes), **options)


@pytest.mark.parametrize("options", [{"use_causal_mask": True},
                                     {"value_mask": np.ones((2, 3), bool)}])
def test_masks_by_position_want_axis_1_alone(options):
    x = np.ones((2, 3, 4, 6))
    with pytest.raises(ValueError, match=r"attention_axes: got \(1, 2\) together with a causal"):
        compat.MultiHeadAttention(2, 3)(x, x, **options)


def test_wrong_weights_change_nothing():
    layer = built(LAYERS[0], (2, 3, 6), (2, 3, 6))
    before = layer.get_weights()
    with pytest.raises(ValueError, match="weights: got 1 arrays, wanted 8: of query, key"):
        layer.set_weights(before[:1])
    with pytest.raises(ValueError, match=r"weights\[7\]: got shape \(5,\), wanted \(6,\)"):
        layer.set_weights([*(2 * array for array in before[:7]), np.ones(5)])
    for now, then in zip(layer.get_weights(), before):
        np.testing.assert_array_equal(now, then)


def test_who_has_projections_is_built():
    layer = built(LAYERS[0], (2, 3, 6), (2, 3, 6))
    x, restored = np.ones((2, 3, 6), np.float32), pickle.loads(pickle.dumps(layer))
    assert restored.built and len(restored.weights) == 8
    np.testing.assert_array_equal(restored(x, x), layer(x, x))  # no weights are drawn again
    restored._projections = {}
    assert not restored.built


def test_keras_is_not_imported():
    code = ("import sys, numpy as np; from mha.compat import keras;"
            "x = np.ones((1, 2, 4)); keras.MultiHeadAttention(2, 3)(x, x);"
            "print('keras' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
