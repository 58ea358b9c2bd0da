"""Arrays that NumPy would take without what they mean: refused in words, by C and Python alike."""

import decimal
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse

import mha

X = np.ones((4, 8))
UNIT = {"unit": "m", "to_value": None}  # as astropy's Quantity
OTHERS = {
    "masked": (np.ma.masked_array(X, X > 2), r"a masked array \(MaskedArray\), wanted .*filled"),
    "csr_matrix": (scipy.sparse.csr_matrix(X), r"a sparse array \(csr_matrix\), .*toarray"),
    "coo_array": (scipy.sparse.coo_array(X), r"a sparse array \(coo_array\), .*toarray"),
    "astropy": (SimpleNamespace(**UNIT, __array__=lambda *_: X), r"a unit \(.*wanted .*\.value"),
    "pint": (SimpleNamespace(units="m", magnitude=X), r"a unit \(.*wanted .*\.magnitude"),
}
TAKERS = {
    "attention": lambda x: mha.scaled_dot_product_attention(X, x, X),
    "bias": lambda x: mha.scaled_dot_product_attention(X, X, X, bias=x),
    "linear": lambda x: mha.linear(x, X.T),
    "layer": lambda x: mha.MultiHeadAttention(8, 2)(x),
    "masks": lambda x: mha.masks.from_blocked(x),
    "parameters": lambda x: setattr(mha.MultiHeadAttention(8, 2), "W_q", x),
    "head_gate": lambda x: mha.MultiHeadAttention(8, 2)(X, head_gate=x),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("taker", TAKERS)
def test_what_would_lose_its_meaning_is_refused(taker, kind):
    array, message = OTHERS[kind]
    with pytest.raises(TypeError, match=r"^\w+: got .*" + message):
        TAKERS[taker](array)


def test_other_subclasses_are_taken():
    for array in (X.view(type("Mine", (np.ndarray,), {})), X.tolist(), memoryview(X)):
        assert mha.scaled_dot_product_attention(array, X, X).shape == (4, 8)


@pytest.mark.parametrize("raised", [RuntimeError, BufferError, NotImplementedError, ValueError])
@pytest.mark.parametrize("taker", TAKERS)
def test_what_numpy_cannot_take_is_an_error_that_names_the_argument(taker, raised):
    class Tensor:
        def __array__(self, *_, **__):
            raise raised("negative bit")

    with pytest.raises(ValueError, match=r"^\w+: got Tensor, wanted an array, .*: negative bit"):
        TAKERS[taker](Tensor())


def test_an_attribute_that_raises():
    class Broken:
        @property
        def nnz(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mha.linear(Broken(), X)
    with pytest.raises(TypeError, match="x: got an array of object"):
        mha.linear(decimal.Decimal(1), X)
