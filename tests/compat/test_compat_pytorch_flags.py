"""Flags and probabilities as PyTorch takes them, in the adapter of its attention."""

import itertools

import numpy as np
import pytest

from mha.compat import pytorch as compat


@pytest.mark.parametrize("flag", [True, 1, np.True_, np.int64(1)], ids=repr)
def test_flags_of_the_functional(flag):
    query = np.ones((2, 3, 4, 8), np.float32) * np.arange(4, dtype=np.float32)[:, None]
    attend = compat.scaled_dot_product_attention
    assert np.array_equal(attend(query, query, query, is_causal=flag),
                          attend(query, query, query, is_causal=True))
    assert np.array_equal(attend(query, query[:, :1], query, enable_gqa=flag),
                          attend(query, query[:, :1], query, enable_gqa=True))
    for name, wrong in itertools.product(("is_causal", "enable_gqa"), ("yes", 2, 1.0, [])):
        with pytest.raises(TypeError, match=f"{name}: got .*, wanted True or False"):
            attend(query, query, query, **{name: wrong})


def test_a_dropout_of_all():
    query = np.ones((2, 3, 4, 8), np.float32)
    assert not compat.scaled_dot_product_attention(query, query, query, dropout_p=1.0).any()
    layer = compat.MultiheadAttention(8, 2, dropout=1.0)
    layer.out_proj.bias[:] = 3
    output, weights = layer(query[0], query[0], query[0])
    assert (output == 3).all() and not weights.any()
    assert (layer.eval()(query[0], query[0], query[0])[0] != 3).any()
    for wrong in (1.01, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"dropout_p: got .*wanted a number in \[0, 1\]"):
            compat.scaled_dot_product_attention(query, query, query, dropout_p=wrong)
    with pytest.raises(TypeError, match="dropout_p: got str"):
        compat.scaled_dot_product_attention(query, query, query, dropout_p="0.5")
