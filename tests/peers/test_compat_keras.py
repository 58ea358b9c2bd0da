"""mha.compat.keras against Keras itself, over random configurations.

Keras attends in float32, whatever the layer's dtype, where it neither returns the weights nor drops
any nor has more than three axes; everything else it computes in float64 where the layer has it.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before the first import of keras in this process

import keras
import numpy as np
import pytest
from configurations import COUNT
from gate import assert_agrees, assert_same
from keras.src import backend

from mha.compat import keras as compat

pytestmark = [pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy"),
              pytest.mark.filterwarnings("ignore:You are using a softmax over axis")]

ATTENDED_IN_SINGLE = 1e-6
AXES = (None, None, (1,), 2, (-2,), (2, 1))


def random_mask(rng, shape):
    mask = rng.random(shape) < 0.7
    if rng.random() < 0.3:
        mask[..., 0, :] = False  # a query that sees nothing
    return mask if rng.random() < 0.7 else mask.astype(np.int32)


def padding(rng, probability, batch, length):
    if rng.random() > probability:
        return None
    return np.arange(length) < rng.integers(0, length + 1, (batch, 1))


def layer_case(seed):
    """The name and arguments of a layer, and the arrays and options of one call."""
    rng = np.random.default_rng(seed)
    grouped = seed % 3 == 0
    common = {"use_bias": bool(rng.random() < 0.7), "use_gate": bool(rng.random() < 0.3),
              "dropout": 0.5 if rng.random() < 0.15 else 0.0,
              "sliding_window": int(rng.integers(1, 7)) if rng.random() < 0.3 else None}
    sizes = {}
    batch, query_len, key_len = (int(size) for size in rng.integers(1, 18, 3))
    query_shape, key_shape = (batch, query_len), (batch, key_len)
    heads = int(rng.integers(1, 5))
    axes = (1,)
    if grouped:
        name, kv_heads = "GroupQueryAttention", heads
        heads *= int(rng.integers(1, 4))
        sizes = {"head_dim": int(rng.integers(1, 17)), "num_query_heads": heads,
                 "num_key_value_heads": kv_heads}
    else:
        name = "MultiHeadAttention"
        sizes = {"num_heads": heads, "key_dim": int(rng.integers(1, 17)),
                 "value_dim": int(rng.integers(1, 17)) if rng.random() < 0.5 else None,
                 "output_shape": [None, 5, (2, 3)][rng.integers(3)]}
        if seed % 3 == 1 and rng.random() < 0.7:
            sizes["attention_axes"] = given = AXES[rng.integers(len(AXES))]
            axes = {None: (1, 2), 2: (2,), (-2,): (2,)}.get(given, given)
            other = [int(size) for size in rng.integers(1, 6, 2)]
            query_shape = (batch, query_len, other[0])
            key_shape = (batch, key_len, other[1])
            if len(axes) == 1:  # the axis not attended over is shared
                shared = 3 - axes[0]
                key_shape = tuple(query_shape[axis] if axis == shared else key_shape[axis]
                                  for axis in range(3))
            if axes != (1,):
                common["sliding_window"] = None
    query_dim, key_dim, value_dim = (int(size) for size in rng.integers(1, 20, 3))
    query = rng.normal(size=(*query_shape, query_dim))
    value = rng.normal(size=(*key_shape, value_dim))
    key = rng.normal(size=(*key_shape, key_dim)) if rng.random() < 0.6 else None
    options = {"return_attention_scores": bool(rng.random() < 0.4)}
    masks = {}
    if axes == (1,):
        options["use_causal_mask"] = bool(rng.random() < 0.4)
        masks = {"query_mask": padding(rng, 0.2, batch, query_len),
                 "value_mask": padding(rng, 0.3, batch, key_len),
                 "key_mask": padding(rng, 0.2, batch, key_len)}
    if rng.random() < 0.5:
        ends = (*(query_shape[axis] for axis in axes), *(key_shape[axis] for axis in axes))
        leading = [(), (batch,)]
        if len(query_shape) == 2 and not any(mask is not None for mask in masks.values()):
            leading += [(batch, 1), (1, heads), (batch, heads)]
        options["attention_mask"] = random_mask(rng, (*leading[rng.integers(len(leading))], *ends))
    return name, {**sizes, **common}, (query, value, key), masks, options


def keras_layer(name, arguments, arrays, dtype, seed):
    """A layer of Keras whose biases, which start at zero, are not."""
    layer = getattr(keras.layers, name)(**arguments, dtype=dtype)
    query, value, key = arrays
    layer.build(query.shape, value.shape, None if key is None else key.shape)
    rng = np.random.default_rng(seed)
    layer.set_weights([array if array.ndim > 2 else rng.normal(size=array.shape)
                       for array in layer.get_weights()])
    return layer


def call_keras(layer, arrays, masks, options):
    query, value, key = (None if array is None else backend.convert_to_tensor(
        array.astype(str(layer.compute_dtype))) for array in arrays)
    if masks.get("query_mask") is not None and hasattr(layer, "query_dense"):
        backend.set_keras_mask(query, backend.convert_to_tensor(masks["query_mask"]))
        masks = {**masks, "query_mask": None}
    found = layer(query, value, key, **masks, **options)
    return [array.detach().numpy() for array in (found if isinstance(found, tuple) else (found,))]


def our_twin(layer, name, arguments, arrays, dtype):
    ours = getattr(compat, name)(**arguments, dtype=dtype)
    query, value, key = arrays
    ours.build(query.shape, value.shape, None if key is None else key.shape)
    ours.set_weights(layer.get_weights())
    return ours


def call_ours(layer, arrays, masks, options):
    query, value, key = arrays
    found = layer(query, value, key, **masks, **options)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("seed", range(COUNT))
def test_layer_is_keras(seed):
    name, arguments, arrays, masks, options = layer_case(seed)
    case = (name, arguments, [None if array is None else array.shape for array in arrays], options)
    arrays = [None if array is None else array.astype(np.float32) for array in arrays]
    single = keras_layer(name, arguments, arrays, "float32", seed)
    double = getattr(keras.layers, name)(**arguments, dtype="float64")
    double.build(*(array.shape for array in arrays[:2]),
                 None if arrays[2] is None else arrays[2].shape)
    double.set_weights(single.get_weights())
    ours = our_twin(single, name, arguments, arrays, "float32")
    exact = our_twin(single, name, arguments, arrays, "float64")
    quick = (not arguments["dropout"] and not options["return_attention_scores"]
             and arrays[0].ndim == 3)
    found = [call_ours(layer, arrays, masks, options) for layer in (ours, exact)]
    theirs = [call_keras(layer, arrays, masks, options) for layer in (single, double)]
    assert len(found[0]) == len(theirs[0])
    for in_single, in_double, keras_single, keras_double in zip(*found, *theirs):
        assert_same(in_double, keras_double, case, *([ATTENDED_IN_SINGLE] if quick else []))
        assert_agrees(in_single, keras_single, in_double, case)
    shapes = [None if array is None else array.shape for array in arrays]
    assert ours.compute_output_shape(*shapes) == found[0][0].shape
    if shapes[0][-1] == shapes[1][-1]:  # which Keras' grouped layer wants
        assert ours.compute_output_shape(*shapes) == tuple(single.compute_output_shape(*shapes))


def test_cases_cover_every_feature():
    """A generator that stopped making a kind of case would let every comparison pass."""
    cases = [layer_case(seed) for seed in range(200)]
    assert sum(name == "GroupQueryAttention" for name, *_ in cases) > 50
    for feature in ("use_gate", "sliding_window", "dropout"):
        assert sum(bool(arguments[feature]) for _, arguments, *_ in cases) > 20, feature
    assert sum(arrays[0].ndim == 4 for _, _, arrays, *_ in cases) > 30
    assert sum(arrays[2] is None for _, _, arrays, *_ in cases) > 40
    for mask in ("query_mask", "value_mask", "key_mask"):
        assert sum(masks.get(mask) is not None for *_, masks, _ in cases) > 20, mask
    shown = [options.get("attention_mask") for *_, options in cases]
    assert {mask.ndim for mask in shown if mask is not None} >= {2, 3, 4, 5}
    assert sum(bool(options.get("use_causal_mask")) for *_, options in cases) > 30
    assert sum(options["return_attention_scores"] for *_, options in cases) > 50


def test_weights_go_back_to_keras_to_the_bit():
    for name, arguments in (("MultiHeadAttention", {"num_heads": 2, "key_dim": 3, "value_dim": 4}),
                            ("GroupQueryAttention", {"head_dim": 3, "num_query_heads": 4,
                                                     "num_key_value_heads": 2})):
        for use_gate in (False, True):
            for use_bias in (False, True):
                shapes = (2, 5, 6), (2, 7, 8), (2, 7, 9)
                ours = getattr(compat, name)(**arguments, use_gate=use_gate, use_bias=use_bias)
                theirs = getattr(keras.layers, name)(**arguments, use_gate=use_gate,
                                                     use_bias=use_bias)
                ours.build(*shapes)
                theirs.build(*shapes)
                assert [array.shape for array in ours.get_weights()] == [
                    tuple(array.shape) for array in theirs.weights]
                assert ours.count_params() == theirs.count_params()
                theirs.set_weights(ours.get_weights())
                for sent, kept in zip(ours.get_weights(), theirs.get_weights()):
                    np.testing.assert_array_equal(sent, kept)


def test_start_is_drawn_from_keras_distributions():
    theirs = keras.layers.MultiHeadAttention(8, 16, use_gate=True)
    ours = compat.MultiHeadAttention(8, 16, use_gate=True, seed=0)
    for layer in (theirs, ours):
        layer.build((2, 3, 96), (2, 3, 64))
    for drawn, wanted in zip(ours.get_weights(), theirs.get_weights()):
        assert drawn.std() == pytest.approx(wanted.std(), rel=0.05)
        assert abs(drawn).max() == pytest.approx(abs(wanted).max(), rel=1e-2)


def test_initializers_of_keras_are_taken():
    ours = compat.MultiHeadAttention(2, 3, kernel_initializer=keras.initializers.Constant(0.5),
                                     bias_initializer=keras.initializers.Ones())
    ours.build((2, 3, 4), (2, 3, 4))
    assert all((array == (0.5 if array.ndim == 3 else 1)).all() for array in ours.get_weights())


INITIALIZERS = [
    keras.initializers.GlorotUniform, keras.initializers.GlorotNormal, keras.initializers.HeNormal,
    keras.initializers.HeUniform, keras.initializers.LecunNormal, keras.initializers.LecunUniform,
    keras.initializers.Orthogonal, keras.initializers.RandomNormal,
    keras.initializers.RandomUniform, keras.initializers.TruncatedNormal,
    keras.initializers.VarianceScaling]


@pytest.mark.parametrize("name", ["MultiHeadAttention", "GroupQueryAttention"])
@pytest.mark.parametrize("make", INITIALIZERS, ids=lambda make: make.__name__)
def test_random_initializers_of_keras_draw_as_in_keras(make, name):
    """The bits of Keras: the same for all kernels from one seed, others for each without."""
    sizes = {"num_heads": 2, "key_dim": 4}
    if name == "GroupQueryAttention":
        sizes = {"head_dim": 4, "num_query_heads": 2, "num_key_value_heads": 2}
    for seed in (3, None):
        keras.utils.set_random_seed(0)
        given = make() if seed is None else make(seed=seed)
        layers = [getattr(module, name)(**sizes, kernel_initializer=given, bias_initializer=(
            keras.initializers.RandomNormal(seed=5))) for module in (keras.layers, compat)]
        for layer in layers:
            keras.utils.set_random_seed(1)
            layer.build((2, 3, 6), (2, 3, 6))
        theirs, ours = (layer.get_weights() for layer in layers)
        for drawn, wanted in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(drawn, wanted)
        query, key, value, _ = ours[::2]
        assert (query == key).all() == (key == value).all() == (seed is not None)


def test_initializers_are_taken_as_classes_and_with_axes_of_their_own():
    for initializer in (keras.initializers.Ones, keras.initializers.HeNormal(
            seed=1, input_axes=[1], output_axes=[0, 2])):
        theirs = keras.layers.MultiHeadAttention(2, 3, kernel_initializer=initializer)
        ours = compat.MultiHeadAttention(2, 3, kernel_initializer=initializer)
        for layer in (theirs, ours):
            layer.build((2, 3, 4), (2, 3, 4))
        for drawn, wanted in zip(ours.get_weights(), theirs.get_weights(), strict=True):
            np.testing.assert_array_equal(drawn, wanted)


@pytest.mark.parametrize("flag", [0, 1, np.False_, np.True_, None])
@pytest.mark.parametrize("name", ["use_causal_mask", "return_attention_scores"])
def test_flags_are_taken_as_keras_takes_them(name, flag):
    arrays = (*np.random.default_rng(0).normal(size=(2, 2, 3, 4)).astype(np.float32), None)
    arguments = {"num_heads": 2, "key_dim": 3}
    theirs = keras_layer("MultiHeadAttention", arguments, arrays, "float32", 0)
    ours = our_twin(theirs, "MultiHeadAttention", arguments, arrays, "float32")
    found = call_ours(ours, arrays, {}, {name: flag})
    for array, wanted in zip(found, call_keras(theirs, arrays, {}, {name: flag}), strict=True):
        np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["MultiHeadAttention", "GroupQueryAttention"])
def test_a_dropout_of_1_drops_all(name):
    arguments = {"num_heads": 2, "key_dim": 3, "dropout": 1.0, "use_gate": True}
    if name == "GroupQueryAttention":
        arguments = {"head_dim": 3, "num_query_heads": 2, "num_key_value_heads": 1,
                     "dropout": 1.0}
    arrays = (*np.random.default_rng(0).normal(size=(2, 2, 3, 4)).astype(np.float32), None)
    theirs = keras_layer(name, arguments, arrays, "float32", 0)
    ours = our_twin(theirs, name, arguments, arrays, "float32")
    options = {"training": True, "return_attention_scores": True}
    found, wanted = call_ours(ours, arrays, {}, options), call_keras(theirs, arrays, {}, options)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*was passed an input with a mask attached:UserWarning")
@pytest.mark.filterwarnings("ignore:Exception encountered when calling:UserWarning")
@pytest.mark.parametrize("use_causal_mask", [True, False])
@pytest.mark.parametrize("name", ["MultiHeadAttention", "GroupQueryAttention"])
def test_masks_that_tensors_carry_are_heeded(name, use_causal_mask):
    """What Embedding(mask_zero=True) gives knows its padding, which Keras' layers hide."""
    arguments = {"num_heads": 2, "key_dim": 3}
    if name == "GroupQueryAttention":
        arguments = {"head_dim": 3, "num_query_heads": 2, "num_key_value_heads": 1}
    words = [np.array([[1, 2, 3, 0, 0], [3, 3, 1, 1, 2], [1, 0, 0, 0, 0]]),
             np.array([[5, 4, 0], [3, 0, 0], [2, 1, 1]])]
    query, value = (keras.layers.Embedding(6, 8, mask_zero=True)(word) for word in words)
    theirs = getattr(keras.layers, name)(**arguments)
    options = {"use_causal_mask": use_causal_mask, "return_attention_scores": True}
    wanted = theirs(query, value, **options)
    query, value = (keras.ops.stop_gradient(array) for array in (query, value))
    for array, word in zip((query, value), words):
        backend.set_keras_mask(array, backend.convert_to_tensor(word != 0))
    ours = getattr(compat, name)(**arguments)
    ours.build(query.shape, value.shape)
    ours.set_weights(theirs.get_weights())
    given = {"query_mask": words[0] != 0, "value_mask": words[1] != 0}
    for found, same, right in zip(ours(query, value, **options), ours(
            query.numpy(), value.numpy(), **given, **options), wanted, strict=True):
        np.testing.assert_array_equal(found, same)
        np.testing.assert_allclose(found, right.detach(), rtol=0, atol=1e-6)


def test_keras_ignores_a_query_mask_that_is_given():
    """Why ours, which heeds it, is compared with the mask on the tensor. Once this fails, the
    docstring of the adapter can lose a line."""
    arrays = (np.ones((2, 3, 4), np.float32),) * 2 + (None,)
    layer = keras_layer("MultiHeadAttention", {"num_heads": 2, "key_dim": 3}, arrays, "float32", 0)
    mask = np.array([[True, True, False]] * 2)
    given = layer(arrays[0], arrays[1], query_mask=mask, return_attention_scores=True)[1]
    assert (given.detach().numpy()[:, :, 2] > 0).all()
