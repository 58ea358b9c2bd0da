"""Public classes name the module that users import them from, and their types can be looked up."""

import importlib
import inspect
import pickle
import pickletools
import typing

import numpy as np
import pytest

import mha

PICKLED = {
    "a layer": lambda: mha.MultiHeadAttention(8, 2, rotary=mha.Rotary(4), rng=0),
    "a cache": lambda: mha.KVCache(1, 2, 4),
    "a memory": lambda: mha.MultiHeadAttention(8, 2, rng=0).new_memory(np.ones((1, 3, 8))),
    "a Rotary": lambda: mha.Rotary(4, frequencies=[1.0, 0.1]),
    "PyTorch's layer": lambda: mha.compat.pytorch.MultiheadAttention(8, 2),
    "Keras's layer": lambda: mha.compat.keras.MultiHeadAttention(2, 4),
    "ONNX Runtime's outputs": lambda: mha.compat.onnx.microsoft.GroupQueryAttentionOutputs(
        1, 2, 3, None),
    "Keras's additive layer": lambda: mha.compat.keras.AdditiveAttention(seed=0),
    "ONNX's outputs": lambda: mha.compat.onnx.AttentionOutputs(1, 2, 3, None),
}


@pytest.mark.parametrize("name", PICKLED)
def test_pickles_name_public_modules_alone(name):
    """So that modules inside can move without breaking them."""
    importlib.import_module("mha.compat.pytorch")
    importlib.import_module("mha.compat.keras")
    importlib.import_module("mha.compat.onnx")
    pickled = pickle.dumps(PICKLED[name]())
    words = [word for _, word, _ in pickletools.genops(pickled) if isinstance(word, str)]
    modules = {word for word in words if word.split(".")[0] == "mha"}
    assert modules and not any("._" in module for module in modules)
    assert type(pickle.loads(pickled)).__module__ in modules


TYPED = ["mha", "mha.masks", "mha.testing", "mha.reference", "mha.parameters", "mha.plot",
         "mha.view", "mha.importance", "mha.compat.d2l.torch", "mha.compat.d2l.jax",
         "mha.compat.d2l.mxnet", "mha.compat.d2l.tensorflow", "mha.compat.flax.linen",
         "mha.compat.flash_attn.flash_attn_interface", "mha.compat.flash_attn.bert_padding",
         "mha.compat.flax.nnx", "mha.compat.flex", "mha.compat.jax", "mha.compat.keras",
         "mha.compat.numpy_tutorial",
         "mha.compat.onnx", "mha.compat.onnx.microsoft", "mha.compat.pytorch",
         "mha.compat.pytorch_notebook"]


@pytest.mark.parametrize("module", TYPED)
def test_type_hints_can_be_looked_up(module):
    public = importlib.import_module(module)
    for name in public.__all__:
        thing = getattr(public, name)
        for described in (thing, *(vars(thing).values() if inspect.isclass(thing) else ())):
            if inspect.isclass(described) or inspect.isfunction(described):
                typing.get_type_hints(described)
