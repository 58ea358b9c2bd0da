"""This library's narrow weights and caches: the calls of a piece of work are variants of each
other, by what holds the numbers."""

from functools import partial

import numpy as np

import mha

CACHED_DEPTH = 512


def prepare(work, arrays, threads):
    mha.set_num_threads(threads)
    makers = {"row": row, "rows": rows, "cache": caches, "sequences": sequences}
    return makers[work.kind](work)


def weight(depth, columns, dtype):
    """Packed; what its numbers are takes no part in how fast it is read."""
    some = np.random.default_rng(0).standard_normal((depth, 64), np.float32)
    return mha.pack(np.tile(some, columns // 64), dtype=dtype)


def row(work):
    """One row times a weight, and by one thread times one that stays in a cache, and times the
    least one, which shows what a call takes beside its products."""
    depth, columns, cached_columns = work.shape
    x = np.ones((1, depth), np.float32)
    large = weight(depth, columns, work.dtype)
    calls = {"": lambda: mha.linear(x, large)}

    def by_one_thread(x, packed):
        with mha.threads(1):
            return mha.linear(x, packed)

    for name, shape in (("cached", (CACHED_DEPTH, cached_columns)), ("call", (32, 64))):
        calls[name] = partial(by_one_thread, x[:, :shape[0]].copy(), weight(*shape, work.dtype))
    return calls


def rows(work):
    count, depth, columns = work.shape
    x = np.random.default_rng(1).standard_normal((count, depth), np.float32)
    return {dtype: partial(mha.linear, x, weight(depth, columns, dtype))
            for dtype in ("float32", "q8_0", "q4_0")}


def caches(work):
    """A token through a layer so narrow that attention to what its cache holds is nearly all."""
    heads, head_dim, positions = work.shape
    layer = mha.MultiHeadAttention(64, heads, head_dim=head_dim, rng=0).freeze()
    random = np.random.default_rng(0)
    x = random.standard_normal((1, 64), np.float32)
    shape = (1, heads, min(positions, 512), head_dim)
    key, value = (random.standard_normal(shape, np.float32) for _ in "kv")

    def token(cache):
        output = layer(x, cache=cache)
        cache.truncate(positions)
        return output

    calls = {}
    for dtype in ("float32", "q8_0"):
        cache = layer.new_cache(1, positions + 1, dtype=dtype)
        for first in range(0, positions, 512):
            count = min(positions - first, 512)
            cache.append(key[:, :, :count], value[:, :, :count])
        calls[dtype] = partial(token, cache)
    return calls


def sequences(work):
    """A token of each sequence through all layers, in one call a layer or one by one; both with the
    same bits. Caches are one position shorter again afterwards."""
    if not hasattr(mha, "PagedCache"):
        raise NotImplementedError("this mha has no PagedCache")
    count, least, most, width, layers = work.shape
    lengths = [int(length) for length in np.linspace(least, most, count)]
    random = np.random.default_rng(0)
    prompts = [random.standard_normal((length, width), np.float32) for length in lengths]
    tokens = [random.standard_normal((1, width), np.float32) for _ in lengths]
    stack = [mha.MultiHeadAttention(width, width // 64, rng=number).freeze()
             for number in range(layers)]
    pages = layers * sum(length // 128 + 1 for length in lengths)
    pool = mha.PagedCache(pages, width // 64, 64, layers=layers)
    ids = [pool.new() for _ in lengths]
    own_caches = [[layer.new_cache(1, length + 1) for layer in stack] for length in lengths]

    def run_together(inputs):
        x = np.concatenate(inputs)
        starts = np.cumsum([0, *map(len, inputs)])
        for number, layer in enumerate(stack):
            x = x + layer(x, starts=starts, cache=pool[number], sequences=ids)
        return x

    def run_alone(inputs):
        outputs = []
        for x, own in zip(inputs, own_caches):
            for layer, cache in zip(stack, own):
                x = x + layer(x, cache=cache)
            outputs.append(x)
        return np.concatenate(outputs)

    def together():
        output = run_together(tokens)
        for name, length in zip(ids, lengths):
            pool.truncate(name, length)
        return output

    def alone():
        output = run_alone(tokens)
        for own, length in zip(own_caches, lengths):
            for cache in own:
                cache.truncate(length)
        return output

    run_together(prompts)
    run_alone(prompts)
    if not np.array_equal(together(), alone()):
        raise ValueError("sequences together have other bits than one by one")
    return {"together": together, "alone": alone}
