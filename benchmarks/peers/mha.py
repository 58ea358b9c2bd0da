"""This library."""

import numpy as np

import mha

from .language_model import training_of


def prepare(work, arrays, threads):
    mha.set_num_threads(threads)
    if work.kind == "model":
        return {"": training_of(work).step}
    if work.kind == "decoder":
        return {"": decoder(work, arrays)}
    if work.kind == "linear":
        x, weight = arrays["x"], arrays["weight"]
        if work.gradients:  # the backward pass alone
            _, pullback = mha.linear_vjp(x, weight, wrt=["x", "weight"])
            return {"": lambda: pullback(arrays["grad_output"])[:2]}
        return {"": lambda: mha.linear(x, weight)}
    if work.kind == "layer":
        width, heads = work.shape[2:]
        layer = mha.MultiHeadAttention(width, heads, use_bias=False, dtype=np.dtype(work.dtype))
        layer.load_parameters({name: arrays[name] for name in ("W_q", "W_k", "W_v", "W_o")})
        if work.gradients:
            layer.dropout = work.dropout
            return {"": lambda: step(layer.vjp, arrays["x"], grad_output=arrays["grad_output"],
                                     training=True, rng=1)}
        layer.freeze()
        x, memory = arrays["x"], arrays.get("memory")
        if memory is not None:
            return {"": lambda: layer(x, memory)}
        return {"": lambda: layer(x, causal=work.causal)}
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    options = {"causal": True} if work.causal else {}
    for name in ("mask", "bias"):
        if name in arrays:
            options[name] = arrays[name]
    if work.mask_mod:
        options["mask"] = mha.BlockMask.from_dense(arrays["mask"])
    if work.gradients:
        # No peer is asked for the gradient of a bias.
        return {"": lambda: step(mha.scaled_dot_product_attention_vjp, query, key, value,
                                 grad_output=arrays["grad_output"], dropout=work.dropout, rng=1,
                                 wrt=["query", "key", "value"], **options)}
    if work.weights:
        options["return_weights"] = True
    return {"": lambda: mha.scaled_dot_product_attention(query, key, value, **options)}


def decoder(work, arrays):
    """One token through layers with caches, which are one position shorter again afterwards."""
    batch, positions, width, heads, layers = work.shape
    stack = []
    for number in range(layers):
        layer = mha.MultiHeadAttention(width, heads, use_bias=False, dtype=np.dtype(work.dtype))
        layer.load_parameters({name: arrays[name][number] for name in layer.parameters()})
        cache = layer.freeze().new_cache(batch, positions)
        cache.append(arrays["keys"][number], arrays["values"][number])
        stack.append((layer, cache))

    def token():
        x = arrays["x"]
        for layer, cache in stack:
            x = layer(x, cache=cache)
        for _, cache in stack:
            cache.truncate(positions - 1)
        return x

    return token


def step(vjp, *inputs, grad_output, **options):
    """The gradients of a step, that of the query first."""
    _, pullback = vjp(*inputs, **options)
    return tuple(pullback(grad_output))


def to_numpy(result):
    return result[0] if isinstance(result, tuple) else result
