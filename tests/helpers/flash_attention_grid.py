"""flash-attention's own parameter grid, and its formula written out, one sequence at a time.

The formula takes arrays of NumPy in float64, or tensors of PyTorch, which can differentiate it.
"""

import itertools
import random

HEADS = {"mha": (6, 6), "gqa": (6, 2), "mqa": (6, 1)}
HEAD_DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
LENGTHS = [(1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256)]
LONG = [(1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048), (3, 799), (127, 513)]
CACHES = [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (128, 128)]
LONG_CACHES = [(64, 2048), (16, 20000), (1, 128 * 1024), (16, 128 * 1024)]


def grid(lengths, count, seed, **axes):
    """`count` draws: each (lengths, head_dim, kind of heads) with one value of each axis. The first
    ones go through all values of all axes."""
    draw = random.Random(seed)
    combinations = list(itertools.product(*axes.values()))
    draw.shuffle(combinations)
    cases = []
    for i in range(count):
        chosen = dict(zip(axes, combinations[i % len(combinations)], strict=True))
        kind = list(HEADS)[i % 3]
        cases.append({"lengths": lengths[i % len(lengths)], "kind": kind,
                      "head_dim": HEAD_DIMS[i % len(HEAD_DIMS)], **chosen})
    return cases


def name_of(case):
    return "-".join(str(value) for value in case.values())


def window_of(local, key_len, seed):
    draw = random.Random(seed)
    return (draw.randrange(key_len), draw.randrange(key_len)) if local else (-1, -1)


def visible(xp, query_len, key_len, causal, window):
    """(query_len, key_len), True where a query sees a key; aligned to the lower right."""
    distance = xp.arange(key_len)[None, :] - xp.arange(query_len)[:, None] - (key_len - query_len)
    seen = distance == distance
    if causal:
        seen = seen & (distance <= 0)
    if window[0] >= 0:
        seen = seen & (distance >= -window[0])
    if window[1] >= 0:
        seen = seen & (distance <= window[1])
    return distance, seen


def attention(xp, q, k, v, causal=False, window=(-1, -1), softcap=0.0, slopes=None, scale=None):
    """q (query_len, heads, d), k and v (key_len, kv_heads, d): output (query_len, heads, d), lse
    and weights (heads, query_len, ...). xp is numpy or torch."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    owner = [head // group for head in range(heads)]
    scores = xp.einsum("qhd,khd->hqk", q, k[:, owner]) * (scale or q.shape[2] ** -0.5)
    if softcap:
        scores = softcap * xp.tanh(scores / softcap)
    distance, seen = visible(xp, len(q), len(k), causal, window)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * abs(distance)
    infinity = float("inf")
    scores = xp.where(seen, scores, -infinity)
    empty = ~seen.any(-1)
    largest = scores.max(-1) if xp.__name__ == "numpy" else scores.max(-1).values
    largest = xp.where(empty, 0.0, largest)
    powers = xp.exp(scores - largest[:, :, None])
    sums = powers.sum(-1)
    weights = powers / xp.where(empty, 1.0, sums)[:, :, None]
    lse = xp.where(empty, -infinity, xp.log(xp.where(empty, 1.0, sums)) + largest)
    return xp.einsum("hqk,khd->qhd", weights, v[:, owner]), lse, weights


def rotated(xp, x, cosine, sine, interleaved):
    """x (len, heads, d) with its first columns rotated by tables (len, dims / 2)."""
    dims = 2 * cosine.shape[1]
    first, second = ((slice(0, dims, 2), slice(1, dims, 2)) if interleaved
                     else (slice(0, dims // 2), slice(dims // 2, dims)))
    result = xp.zeros_like(x) + x
    cosine, sine = cosine[:, None], sine[:, None]
    result[..., first] = x[..., first] * cosine - x[..., second] * sine
    result[..., second] = x[..., first] * sine + x[..., second] * cosine
    return result
