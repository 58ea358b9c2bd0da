"""Attention and AdditiveAttention of mha.compat.keras against Keras' own; halves and configs of all
its layers.

Keras multiplies matrices of float64 in float32, so that nothing is compared in float64 here:
tests/compat has the formulas.
"""

import inspect
import os

os.environ["KERAS_BACKEND"] = "torch"  # before the first import of keras in this process

import keras
import ml_dtypes
import numpy as np
import pytest
from configurations import COUNT
from gate import assert_agrees
from keras.src import backend

from mha.compat import keras as compat

pytestmark = [pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy"),
              pytest.mark.filterwarnings("ignore:You are using a softmax over axis")]

LAYERS = {"MultiHeadAttention": {"num_heads": 2, "key_dim": 4, "use_gate": True},
          "GroupQueryAttention": {"head_dim": 4, "num_query_heads": 4, "num_key_value_heads": 2},
          "Attention": {"use_scale": True, "score_mode": "concat"},
          "AdditiveAttention": {}}
each_layer = pytest.mark.parametrize("name", LAYERS)


def layer_case(seed):
    """The name and arguments of a layer, and the inputs, masks and options of one call."""
    rng = np.random.default_rng(seed)
    name = ("Attention", "AdditiveAttention")[seed % 2]
    arguments = {"use_scale": bool(rng.random() < 0.5)}
    if name == "Attention":
        arguments["score_mode"] = ("dot", "concat")[int(rng.integers(2))]
    batch = tuple(int(size) for size in rng.integers(1, 5, 1 + (rng.random() < 0.3)))
    query_len, key_len, dim, value_dim = (int(size) for size in rng.integers(1, 18, 4))
    has_key = rng.random() < 0.6
    inputs = [rng.normal(size=(*batch, query_len, dim)),
              rng.normal(size=(*batch, key_len, value_dim if has_key else dim))]
    if has_key:
        inputs.append(rng.normal(size=(*batch, key_len, dim)))
    masks = None
    if len(batch) == 1 and rng.random() < 0.6:
        value_mask = rng.random((*batch, key_len)) < 0.7
        value_mask[:, 0] = True
        masks = [rng.random((*batch, query_len)) < 0.7 if rng.random() < 0.5 else None,
                 value_mask if rng.random() < 0.7 else None]
    options = {"use_causal_mask": bool(rng.random() < 0.4)}
    return name, arguments, inputs, masks, options


def keras_layer(name, arguments, shapes, dtype, seed):
    """A layer of Keras, Attention or AdditiveAttention, with weights other than the first."""
    layer = getattr(keras.layers, name)(**arguments, dtype=dtype)
    layer.build(shapes)
    rng = np.random.default_rng(seed)
    layer.set_weights([rng.normal(size=array.shape) for array in layer.get_weights()])
    return layer


def call_keras(layer, inputs, masks, options):
    inputs = [backend.convert_to_tensor(array, str(layer.compute_dtype)) for array in inputs]
    if masks is not None:
        masks = [None if mask is None else backend.convert_to_tensor(mask) for mask in masks]
    found = layer(inputs, mask=masks, return_attention_scores=True, **options)
    return [array.detach().numpy() for array in found]


def our_twin(layer, name, shapes, dtype):
    ours = getattr(compat, name).from_config({**layer.get_config(), "dtype": dtype})
    if isinstance(ours, compat.Attention):
        ours.build(shapes)
    else:
        ours.build(*shapes)
    ours.set_weights(layer.get_weights())
    return ours


@pytest.mark.parametrize("seed", range(COUNT))
def test_layer_is_keras(seed):
    name, arguments, inputs, masks, options = layer_case(seed)
    shapes = [array.shape for array in inputs]
    case = (name, arguments, shapes, options)
    inputs = [array.astype(np.float32) for array in inputs]
    single = keras_layer(name, arguments, shapes, "float32", seed)
    found = [our_twin(single, name, shapes, dtype)(inputs, masks, return_attention_scores=True,
                                                   **options) for dtype in ("float32", "float64")]
    theirs = call_keras(single, inputs, masks, options)
    for in_single, in_double, of_keras in zip(*found, theirs, strict=True):
        assert_agrees(in_single, of_keras, in_double, case)
    assert single.compute_output_shape(shapes) == our_twin(
        single, name, shapes, "float32").compute_output_shape(shapes) == found[0][0].shape


def test_cases_cover_every_feature():
    cases = [layer_case(seed) for seed in range(200)]
    assert sum(arguments["use_scale"] for _, arguments, *_ in cases) > 50
    assert sum(arguments.get("score_mode") == "concat" for _, arguments, *_ in cases) > 20
    assert sum(inputs[0].ndim == 4 for _, _, inputs, *_ in cases) > 30
    assert sum(len(inputs) == 2 for _, _, inputs, *_ in cases) > 40
    for index in range(2):
        assert sum(masks is not None and masks[index] is not None
                   for *_, masks, _ in cases) > 20, index
    assert sum(options["use_causal_mask"] for *_, options in cases) > 30


@pytest.mark.parametrize("make", ["Attention", "AdditiveAttention"])
def test_a_query_that_sees_no_key_gets_the_mean(make):
    rng = np.random.default_rng(0)
    inputs = list(rng.normal(size=(2, 2, 5, 4)).astype(np.float32))
    masks = [None, np.array([[False] * 5, [False, True, True, True, False]])]
    theirs = getattr(keras.layers, make)()
    wanted = call_keras(theirs, inputs, masks, {"use_causal_mask": True})
    ours = our_twin(theirs, make, [array.shape for array in inputs], "float32")
    found = ours(inputs, masks, return_attention_scores=True, use_causal_mask=True)
    for array, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(array, right, rtol=0, atol=1e-6)


@each_layer
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_those_of_keras_to_their_rounding(name, dtype):
    """Keras rounds after each step, ours once."""
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(2, 9, 16)).astype(dtype) for _ in range(3)]
    shapes = [array.shape for array in inputs]
    theirs = getattr(keras.layers, name)(**LAYERS[name], dtype=dtype)
    if isinstance(theirs, keras.layers.Attention):
        theirs.build(shapes)
    else:
        theirs.build(*shapes)
    ours, exact = (our_twin(theirs, name, shapes, of) for of in (dtype, "float64"))
    tensors = [backend.convert_to_tensor(array.astype(np.float32), dtype) for array in inputs]
    packed = isinstance(ours, compat.Attention)
    found = ours(inputs) if packed else ours(*inputs)
    same = ours(tensors) if packed else ours(*tensors)
    right = exact(inputs) if packed else exact(*inputs)
    wanted = theirs(tensors) if packed else theirs(*tensors)
    np.testing.assert_array_equal(found.view(np.uint16), same.view(np.uint16))
    assert found.dtype == dtype and str(wanted.dtype) == f"torch.{dtype}"
    half_a_unit = ml_dtypes.finfo(dtype).eps / 2
    error, their_error = (abs(array.astype(np.float64) - right).max() / abs(right).max() for array
                          in (found, wanted.detach().float().numpy()))
    assert error <= 2 * half_a_unit
    assert error <= their_error


@each_layer
def test_configs_go_both_ways(name):
    arguments = {**LAYERS[name], "dropout": 0.25, "seed": 3, "dtype": "float16", "name": "here"}
    ours = getattr(compat, name)(**arguments)
    theirs = getattr(keras.layers, name).from_config(ours.get_config())
    again = getattr(compat, name).from_config(theirs.get_config())
    assert again.get_config() == ours.get_config()
    assert repr(again) == repr(ours)
    wanted = theirs.get_config().keys() - {"trainable"}
    assert ours.get_config().keys() == wanted


def test_initializers_of_keras_go_through_configs():
    ours = compat.MultiHeadAttention(2, 3, kernel_initializer=keras.initializers.Constant(0.5))
    for again in (compat.MultiHeadAttention.from_config(ours.get_config()),
                  compat.MultiHeadAttention.from_config(
                      keras.layers.MultiHeadAttention.from_config(ours.get_config()).get_config())):
        again.build((1, 2, 6), (1, 2, 6))
        assert (again.query_dense.kernel == 0.5).all()


@each_layer
def test_signatures_are_those_of_keras(name):
    """Names, order and defaults; Keras' **kwargs are dtype and name here."""
    theirs, ours = (getattr(module, name) for module in (keras.layers, compat))
    for method in ("__init__", "call", "build", "compute_output_shape", "compute_mask"):
        if not hasattr(ours, method):
            continue
        of_keras, here = ({parameter.name: parameter.default for parameter in inspect.signature(
            getattr(of, method)).parameters.values()} for of in (theirs, ours))
        for left in ("kwargs", "dtype", "name", "args"):
            of_keras.pop(left, None)
            here.pop(left, None)
        if name == "AdditiveAttention":
            here.pop("seed", None)  # among Keras' **kwargs
        if method == "call" and name != "Attention":
            continue
        assert list(of_keras.items()) == list(here.items()), method
