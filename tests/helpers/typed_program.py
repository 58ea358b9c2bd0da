"""A program with types, as users write it. `make lint` checks it with mypy and with pyright's
strict rules; test_typed_program.py runs it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import mha

Array = NDArray[Any]


def train_layer(layer: mha.MultiHeadAttention, x: Array, target: Array) -> None:
    """A step of a training loop; its gradients need no test for None."""
    output, pullback = layer.vjp(x, causal=True)
    gradients = pullback(output - target)
    layer.W_q -= 0.1 * gradients.W_q
    layer.W_k -= 0.1 * gradients.W_k
    layer.W_v -= 0.1 * gradients.W_v
    layer.W_o -= 0.1 * gradients.W_o
    before: Array = 0.5 * gradients.query
    assert before.shape == x.shape
    if gradients.b_o is not None and layer.b_o is not None:  # a layer need not have biases
        layer.b_o -= 0.1 * gradients.b_o


def train_latent_layer(layer: mha.MultiHeadLatentAttention, x: Array) -> Array:
    """The same of latent attention, whose queries may have one matrix or two; and a token."""
    output, pullback = layer.vjp(x, causal=True)
    gradients = pullback(output)
    layer.W_uk -= 0.1 * gradients.W_uk
    if gradients.W_q is not None and layer.W_q is not None:
        layer.W_q -= 0.1 * gradients.W_q
    cache: mha.KVCache = layer.new_cache(len(x), absorbed=True)
    token, lse = layer(x[:, :1], cache=cache, return_lse=True)
    assert lse.shape == (len(x), layer.num_heads, 1)
    return token


def train_projection(x: Array, weight: Array, grad: Array) -> tuple[Array, Array]:
    """The output's shape is checked; a gradient that was not wanted is None."""
    output, pullback = mha.linear_vjp(x, weight)
    assert output.shape == grad.shape
    gradients = pullback(grad)
    only_x = mha.linear_vjp(x, weight, wrt=["x"])[1](grad)
    assert only_x.weight is None
    return 2 * gradients.x, weight - 0.1 * gradients.weight


def every_pullback(x: Array, square: Array) -> list[Array]:
    """The gradients of the other functions, each times a number."""
    heads = mha.split_heads(x, 2)
    attention = mha.scaled_dot_product_attention_vjp(heads, heads, heads)[1](np.ones_like(heads))
    additive = mha.additive_attention_vjp(
        x, x, x, square, square, square[0])[1](np.ones_like(x))
    whole = mha.multi_head_attention_vjp(
        x, x, x, square, square, square, square, num_heads=2)[1](np.ones_like(x))
    rows, starts = x[0], np.array([0, len(x[0])])
    by_rows = mha.split_heads(rows[None], 2)[0].swapaxes(0, 1)
    varlen = mha.scaled_dot_product_attention_varlen_vjp(
        by_rows, by_rows, by_rows, starts)[1](np.ones_like(by_rows))
    rotary, turned = mha.Rotary(x.shape[-1] // 2), np.ones_like(heads)
    return [2 * attention.query, 2 * attention.key, 2 * attention.value, 2 * additive.W_q,
            2 * additive.w_v, 2 * whole.W_o, 2 * whole.value, 2 * varlen.query,
            2 * rotary.vjp(heads)[1](turned).x]


def results(layer: mha.MultiHeadAttention, x: Array) -> tuple[Array, Array, Array]:
    """What is returned beside the output is in the call's type."""
    output: Array = layer(x)
    output, weights = layer(x, return_weights=True)
    output, lse = layer(x, return_lse=True)
    output, weights, lse = layer(x, return_weights=True, return_lse=True)
    return output, weights, lse


def decoded(layer: mha.MultiHeadAttention, x: Array) -> list[Array]:
    """A layer, and again over the cache that it has filled."""
    cache: mha.KVCache = layer.new_cache(1, window=5, keep_first=2)
    output: Array = layer(x, cache=cache)
    again, lse = layer(x, cache=cache, append=False, return_lse=True)
    cache.keep(1, [[1]])
    first, others = cache.key_parts()
    return [output, again, lse, first, others]


def main() -> None:
    layer = mha.MultiHeadAttention(8, 2, use_bias=True, rng=0)
    x = np.random.default_rng(0).standard_normal((1, 3, 8), np.float32)
    train_layer(layer, x, np.zeros_like(x))
    latent = mha.MultiHeadLatentAttention(8, 2, kv_rank=4, nope_dim=4, rope_dim=2,
                                          value_head_dim=4, rng=0)
    assert train_latent_layer(latent, x).shape == (1, 1, 8)
    train_projection(x, np.ones((8, 4), np.float32), np.ones((1, 3, 4), np.float32))
    assert all(gradient.any() for gradient in every_pullback(x, np.eye(8, dtype=np.float32)))
    assert [array.ndim for array in results(layer, x)] == [3, 4, 3]
    assert [array.shape[-1] for array in decoded(layer, x)] == [8, 8, 3, 4, 4]
    print("types: passed")


if __name__ == "__main__":
    main()
