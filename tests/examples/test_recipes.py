"""The functions of docs/recipes.md compute what the page says, in float64 and step by step."""

import numpy as np
import pytest
from code_of_pages import names_of

import mha


@pytest.fixture(scope="module")
def names():
    return names_of("docs/recipes.md")


def heads_of(x, W, heads):
    return (x @ W).reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def turned(x, positions):
    """Column c with column c + dims / 2, by positions * 10000^(-2c / dims)."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[:, None] * 10000.0 ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * np.cos(angles) - second * np.sin(angles),
                           second * np.cos(angles) + first * np.sin(angles)], axis=-1)


def attention(query, key, value):
    """Causal; each key head serves as many query heads."""
    group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(heads, group, axis=1) for heads in (key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    merged = (weights / weights.sum(axis=-1, keepdims=True) @ value).swapaxes(1, 2)
    return merged.reshape(*merged.shape[:2], -1)


def test_a_norm_behind_the_rotation(names):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 9, 48))
    W = [rng.standard_normal((48, out)) for out in (48, 16, 16)] + [rng.standard_normal((48, 48))]
    positions = rng.integers(-50, 50, 9)
    query, key = (turned(heads_of(x, W[i], heads), positions) for i, heads in ((0, 6), (1, 2)))
    query, key = (heads / np.sqrt((heads**2).mean(axis=-1, keepdims=True) + 1e-6)
                  for heads in (query, key))
    wanted = attention(query, key, heads_of(x, W[2], 2)) @ W[3]
    got = names["attend"](x, *W, 6, 2, mha.Rotary(8), positions)
    assert np.allclose(got, wanted, atol=1e-12 * abs(wanted).max())


def test_values_of_the_first_layer(names):
    x = np.random.default_rng(2).standard_normal((2, 9, 48))
    layers = [mha.MultiHeadAttention(48, 6, num_kv_heads=2, use_bias=False, rotary=mha.Rotary(8),
                                     rng=i, dtype=np.float64) for i in range(2)]
    first, value = names["attend_to_both"](x, None, layers[0], 0.3)
    assert np.allclose(first, layers[0](x, causal=True), atol=1e-12)
    assert np.allclose(value, heads_of(x, layers[0].W_v, 2), atol=1e-12)
    second, same = names["attend_to_both"](first, value, layers[1], 0.3)
    assert same is value
    one = layers[1]
    query, key = (turned(heads_of(first, W, heads), np.arange(9))
                  for W, heads in ((one.W_q, 6), (one.W_k, 2)))
    mixed = 0.3 * heads_of(first, one.W_v, 2) + 0.7 * value
    wanted = attention(query, key, mixed) @ one.W_o
    assert np.allclose(second, wanted, atol=1e-12 * abs(wanted).max())
