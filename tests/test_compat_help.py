"""What the adapters show of themselves: their repr, and help()."""

import inspect
import pydoc

import pytest

from mha.compat import numpy_tutorial, pytorch, pytorch_notebook
from mha.compat.d2l import jax, mxnet, tensorflow, torch

D2L = [torch, tensorflow, jax, mxnet]
each_form = pytest.mark.parametrize("form", D2L, ids=[form.__name__ for form in D2L])


@pytest.mark.parametrize(("layer", "wanted"), [
    (numpy_tutorial.MultiHeadAttention(12, 3), "MultiHeadAttention(d_model=12, num_heads=3)"),
    (pytorch_notebook.MultiHeadAttention(64, 4),
     "MultiHeadAttention(d_model=64, num_heads=4, dropout=0.1)"),
    (pytorch.MultiheadAttention(64, 4), "MultiheadAttention(64, 4)"),
    (pytorch.MultiheadAttention(64, 4, 0.1, False, True, True, 32, 16, batch_first=True),
     "MultiheadAttention(64, 4, dropout=0.1, bias=False, add_bias_kv=True, add_zero_attn=True,"
     " kdim=32, vdim=16, batch_first=True)"),
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


@pytest.mark.parametrize("module", [numpy_tutorial, pytorch, pytorch_notebook, *D2L],
                         ids=lambda module: module.__name__)
def test_help_shows_annotations_as_they_are_written(module):
    for name in module.__all__:
        text = pydoc.plain(pydoc.render_doc(getattr(module, name)))
        assert "_SupportsArray" not in text, name
    layer = next(value for name, value in vars(module).items()
                 if name.lower() == "multiheadattention")
    call = next(getattr(layer, name) for name in ("forward", "call", "__call__")
                if hasattr(layer, name))
    assert "ArrayLike" in str(inspect.signature(call))
