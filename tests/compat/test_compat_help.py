"""What the adapters show of themselves: their repr, and help()."""

import importlib.util
import inspect
import pydoc
import sys

import pytest

from mha import compat
from mha.compat import flex, keras, numpy_tutorial, pytorch, pytorch_notebook
from mha.compat import jax as jax_nn
from mha.compat.d2l import jax, mxnet, tensorflow, torch
from mha.compat.flash_attn import bert_padding, flash_attn_interface
from mha.compat.flax import linen, nnx

D2L = [torch, tensorflow, jax, mxnet]
each_form = pytest.mark.parametrize("form", D2L, ids=[form.__name__ for form in D2L])


@pytest.mark.parametrize("missing", ["torch", "threadpoolctl"])
def test_what_cannot_be_imported_is_not_listed(monkeypatch, missing):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *rest: None if name == missing else find_spec(name, *rest))
    assert {"torch": "transformers"}.get(missing, missing) not in dir(compat)
    assert set(dir(compat)) >= {"d2l", "flax", "jax", "keras", "onnx", "pytorch"}


@pytest.mark.parametrize(("layer", "wanted"), [
    (numpy_tutorial.MultiHeadAttention(12, 3), "MultiHeadAttention(d_model=12, num_heads=3)"),
    (pytorch_notebook.MultiHeadAttention(64, 4),
     "MultiHeadAttention(d_model=64, num_heads=4, dropout=0.1)"),
    (pytorch.MultiheadAttention(64, 4), "MultiheadAttention(64, 4)"),
    (pytorch.MultiheadAttention(64, 4, 0.1, False, True, True, 32, 16, batch_first=True),
     "MultiheadAttention(64, 4, dropout=0.1, bias=False, add_bias_kv=True, add_zero_attn=True,"
     " kdim=32, vdim=16, batch_first=True)"),
    (keras.MultiHeadAttention(8, 64), "MultiHeadAttention(num_heads=8, key_dim=64, value_dim=64)"),
    (keras.GroupQueryAttention(64, 8, 2, 0.1, sliding_window=4, use_gate=True),
     "GroupQueryAttention(head_dim=64, num_query_heads=8, num_key_value_heads=2, dropout=0.1,"
     " sliding_window=4, use_gate=True)"),
    (keras.Attention(True, "concat", 0.5),
     "Attention(use_scale=True, score_mode=concat, dropout=0.5)"),
    (keras.Attention(), "Attention()"),
    (keras.AdditiveAttention(False), "AdditiveAttention(use_scale=False)"),
    (linen.MultiHeadDotProductAttention(8, qkv_features=16, decode=True),
     "MultiHeadDotProductAttention(num_heads=8, qkv_features=16, decode=True)"),
    (nnx.MultiHeadAttention(8, 16, rngs=0, num_kv_heads=2),
     "MultiHeadAttention(num_heads=8, in_features=16, num_kv_heads=2)"),
    (nnx.MultiHeadAttention(2, 4, rngs=0).query, "Part(kernel=(4, 2, 2), bias=(2, 2))"),
])
def test_repr(layer, wanted):
    assert repr(layer) == wanted


@each_form
def test_repr_of_the_books_layers(form):
    sizes = (100, 100, 100) if form is tensorflow else ()
    layer = form.MultiHeadAttention(*sizes, 100, 5, 0.5)
    assert repr(layer) == ("MultiHeadAttention(num_hiddens=100, num_heads=5, bias=False,"
                           " attention=DotProductAttention(dropout=0.5))")
    layer.attention = None
    assert repr(layer).endswith("attention=None)")
    additive = form.AdditiveAttention(*sizes[:2], 8, 0.1)
    assert repr(additive) == "AdditiveAttention(num_hiddens=8, dropout=0.1)"


FUNCTIONS = [jax_nn, flex, bert_padding, flash_attn_interface]
WITH_LAYERS = [keras, linen, nnx, numpy_tutorial, pytorch, pytorch_notebook, *D2L]


@pytest.mark.parametrize("module", [*FUNCTIONS, *WITH_LAYERS], ids=lambda module: module.__name__)
def test_help_shows_annotations_as_they_are_written(module):
    for name in module.__all__:
        text = pydoc.plain(pydoc.render_doc(getattr(module, name)))
        assert "_SupportsArray" not in text, name
        assert "**unknown" not in text, name


@pytest.mark.parametrize("module", WITH_LAYERS, ids=lambda module: module.__name__)
def test_calls_of_layers_say_what_they_take(module):
    layer = next(value for name, value in vars(module).items()
                 if name.lower() == "multiheadattention")
    call = next(getattr(layer, name) for name in ("forward", "call", "__call__")
                if hasattr(layer, name))
    assert "ArrayLike" in str(inspect.signature(call))


def test_what_is_missing_is_said(monkeypatch):
    """Without PyTorch, as where the quick tests run."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "mha.compat.transformers", raising=False)
    monkeypatch.delitem(sys.modules, "mha.compat.pytorch._tensors", raising=False)
    with pytest.raises(ImportError, match="pip install torch; arrays go to mha"):
        pytorch.functional_attention(None, None, None)
    with pytest.raises(ImportError, match=r"mha\.compat\.transformers: .*pip install torch trans"):
        compat.transformers.register()
