"""Guesses that are taken back: after truncate to anything from the lengths before the last call on,
a cache with a window goes on with the bits of plain decoding."""

import ml_dtypes
import numpy as np
import pytest
from cached_calls import WAYS, guess

import mha

LENGTH = 420  # of each sequence: more than three blocks of keys


def random_layer(**options):
    return mha.MultiHeadAttention(24, 4, num_kv_heads=2, rng=0, **options)


def random_x(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal((*shape, 24)).astype(np.float32)


def plain(layer, x, window, dtype=None):
    """One call over everything, on an empty cache of that type."""
    return layer(x, cache=layer.new_cache(len(x), dtype=dtype), window=(window - 1, 0))


def test_a_guess_across_a_blocks_edge():
    layer, x = random_layer(), random_x(1, 140)
    cache = layer.new_cache(1, window=4)
    layer(x[:, :129], cache=cache)
    layer(x[:, 129:130].repeat(5, axis=1), cache=cache)
    cache.truncate(130)
    wanted = layer(x, causal=True, window=(3, 0))
    assert np.array_equal(layer(x[:, 130:], cache=cache), wanted[:, 130:])


@pytest.mark.parametrize("window", [1, 4, 127, 128, 129])
@pytest.mark.parametrize("n", [2, 5, 130])
def test_all_rows_of_the_last_call_can_be_taken_back_at_every_length(window, n):
    layer, x, noise = random_layer(), random_x(1, 262 + n), random_x(1, n, seed=2)
    cache, wanted = layer.new_cache(1, window=window), plain(layer, x, window)
    for at in (*range(122, 137), *range(250, 262)):  # beside edges of blocks
        cache = layer.new_cache(1, window=window)
        layer(x[:, :at - 1], cache=cache)
        layer(x[:, at - 1:at], cache=cache)  # drops what a prompt needed
        layer(noise, cache=cache)
        assert cache.capacity < 2 * max(window, 128) + max(n, at - 1)
        cache.truncate(at)
        got = layer(x[:, at:at + n], cache=cache)
        assert np.array_equal(got, wanted[:, at:at + n]), at


@pytest.mark.parametrize("dtype", [None, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("window", [1, 20, 128, 200])
def test_speculative_decoding_of_a_ragged_batch(window, padding, dtype):
    """Each call brings guesses to some sequences, of which some first ones are right."""
    layer, rng = random_layer(), np.random.default_rng(window)
    x = random_x(3, LENGTH)
    whole = plain(layer, x, window, dtype)
    cache, at = layer.new_cache(3, window=window, dtype=dtype), np.zeros(3, int)
    while at.min() + 70 < LENGTH:
        right = guess(layer, cache, x, whole, at, padding, rng)
        cache = WAYS[rng.integers(len(WAYS))](cache)
        if rng.random() < 0.3:
            order = rng.integers(0, 3, 3)
            cache.select(order)
            x, whole, at, right = x[order], whole[order], at[order], right[order]
        at += right
        cache.truncate(at)
        assert cache.lengths.tolist() == at.tolist()
        assert cache.start % 128 == 0 and cache.capacity < (
            2 * max(window, 128) + 2 * (np.ptp(at) + 60))
    assert cache.start > 0 or window == 200


def test_the_error_says_how_far_back_a_cache_goes():
    cache = mha.KVCache(1, 2, 3, window=10)
    for n in (300, 5):
        cache.append(np.ones((1, 2, n, 3)), np.ones((1, 2, n, 3)))
    cache.truncate(265)
    with pytest.raises(ValueError, match=r"lengths: got \[264\], wanted at least 265: .* copy"):
        cache.truncate(264)
