"""The formula as a NumPy user writes it, without copies that can be avoided."""

import numpy as np


def softmax(scores):
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def attend(query, key, value, causal=False, mask=None, bias=None):
    scale = query.dtype.type(query.shape[-1] ** -0.5)
    if key.shape[1] != query.shape[1]:  # grouped heads: as many queries against each key head
        batch, kv_heads, _, width = key.shape
        grouped = query.reshape(batch, kv_heads, -1, width)
        scores = softmax((grouped * scale) @ key.swapaxes(-1, -2))
        return (scores @ value).reshape(*query.shape[:-1], value.shape[-1]), scores
    scores = (query * scale) @ key.swapaxes(-1, -2)
    if bias is not None:
        scores += bias
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    if causal:
        query_len, key_len = scores.shape[-2:]
        visible = np.tri(query_len, key_len, key_len - query_len, dtype=bool)
        scores = np.where(visible, scores, -np.inf)
    weights = softmax(scores)
    return weights @ value, weights


def prepare(work, arrays, threads):
    if work.kind == "attention":
        return {"": lambda: attend(**arrays, causal=work.causal)}
    if work.kind == "decoder":
        return {"": decoder(work, arrays)}
    if work.kind == "linear":
        x, weight, grad = (arrays.get(name) for name in ("x", "weight", "grad_output"))
        return {"": (lambda: x @ weight) if grad is None else lambda: (grad @ weight.T, x.T @ grad)}
    heads = work.shape[3]
    x, memory = arrays["x"], arrays.get("memory", arrays["x"])

    def split(projected):
        batch, length, width = projected.shape
        return projected.reshape(batch, length, heads, width // heads).swapaxes(1, 2)

    def run():
        query, key = split(x @ arrays["W_q"]), split(memory @ arrays["W_k"])
        output, _ = attend(query, key, split(memory @ arrays["W_v"]), work.causal)
        return output.swapaxes(1, 2).reshape(x.shape) @ arrays["W_o"]

    return {"": run}


def decoder(work, arrays):
    """One token through layers with preallocated caches."""
    batch, positions, _, heads, layers = work.shape
    room = ((0, 0), (0, 0), (0, 0), (0, 1), (0, 0))
    keys, values = np.pad(arrays["keys"], room), np.pad(arrays["values"], room)

    def split(projected):
        return projected.reshape(batch, 1, heads, -1).swapaxes(1, 2)

    def token():
        x = arrays["x"]
        for number in range(layers):
            W_q, W_k, W_v, W_o = (arrays[name][number] for name in ("W_q", "W_k", "W_v", "W_o"))
            keys[number, :, :, positions - 1:] = split(x @ W_k)
            values[number, :, :, positions - 1:] = split(x @ W_v)
            output, _ = attend(split(x @ W_q), keys[number], values[number])
            x = output.swapaxes(1, 2).reshape(x.shape) @ W_o
        return x

    return token


def to_numpy(result):
    return result[0] if isinstance(result, tuple) else result
