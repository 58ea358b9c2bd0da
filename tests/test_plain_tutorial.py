"""The plain tutorial's arithmetic: shapes at every step, parameter counts, configurations.

Its GPT-3 configuration needs 2.4 GB of weights and is run by tests/large_layer.py.
"""

import numpy as np
import pytest

import mha

# (embed_dim, num_heads): head size 64 in each.
CONFIGURATIONS = {"Transformer": (512, 8), "BERT-base": (768, 12), "GPT-2": (768, 12)}


def test_number_of_parameters():
    layer = mha.MultiHeadAttention(512, 8, use_bias=False)
    assert layer.num_parameters == 4 * 512**2 == 1_048_576
    assert sum(parameter.size for parameter in layer.parameters().values()) == 1_048_576
    # One head or eight: the heads share the width, so the count stays.
    assert mha.MultiHeadAttention(512, 1, use_bias=False).num_parameters == 1_048_576


def test_trace():
    """(2, 4, 512) -> (2, 8, 4, 64) -> (2, 4, 512), and the steps give what the layer gives."""
    layer = mha.MultiHeadAttention(512, 8, use_bias=False, rng=0)
    x = np.random.default_rng(1).standard_normal((2, 4, 512), np.float32)
    query, key, value = (mha.linear(x, weight) for weight in (layer.W_q, layer.W_k, layer.W_v))
    assert query.shape == key.shape == value.shape == (2, 4, 512)
    heads = [mha.split_heads(array, 8) for array in (query, key, value)]
    assert [array.shape for array in heads] == [(2, 8, 4, 64)] * 3
    attended = mha.scaled_dot_product_attention(*heads)
    assert attended.shape == (2, 8, 4, 64) and attended[:, 0].shape == (2, 4, 64)
    merged = mha.merge_heads(attended)
    assert merged.shape == (2, 4, 512)
    output = mha.linear(merged, layer.W_o)
    assert output.shape == (2, 4, 512)
    np.testing.assert_allclose(layer(x), output, rtol=0, atol=2e-6 * np.abs(output).max())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations(name):
    embed_dim, num_heads = CONFIGURATIONS[name]
    layer = mha.MultiHeadAttention(embed_dim, num_heads, rng=0)
    assert layer.head_dim == 64
    assert layer.num_parameters == 4 * embed_dim**2 + 4 * embed_dim
    x = np.random.default_rng(1).standard_normal((2, 10, embed_dim), np.float32)
    causal = name == "GPT-2"
    output, weights = layer(x, causal=causal, return_weights=True)
    assert weights.shape == (2, num_heads, 10, 10)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    wanted = in_float64(x, layer, causal)
    assert output.dtype == np.float32 and output.shape == wanted.shape
    assert np.abs(output - wanted).max() <= 2e-6 * np.abs(wanted).max()


def in_float64(x, layer, causal):
    """The tutorial's five steps, head by head."""
    x = x.astype(float)
    W_q, W_k, W_v, W_o = (weight.astype(float)
                          for weight in (layer.W_q, layer.W_k, layer.W_v, layer.W_o))
    heads = []
    for start in range(0, layer.embed_dim, layer.head_dim):
        columns = slice(start, start + layer.head_dim)
        query, key, value = (x @ weight[:, columns] for weight in (W_q, W_k, W_v))
        scores = query @ key.swapaxes(-1, -2) / np.sqrt(layer.head_dim)
        if causal:
            scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
        exponentials = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(exponentials / exponentials.sum(-1, keepdims=True) @ value)
    return np.concatenate(heads, axis=-1) @ W_o


def test_number_of_heads_must_divide_the_width():
    with pytest.raises(ValueError, match=r"embed_dim: got 512, wanted a multiple of num_heads"):
        mha.MultiHeadAttention(512, 7)


def test_scores_grow_with_the_square_of_the_length():
    layer = mha.MultiHeadAttention(64, 8, rng=0)
    for length in (4, 8, 16):
        weights = layer(np.ones((1, length, 64), np.float32), return_weights=True)[1]
        assert weights.size == 8 * length**2
