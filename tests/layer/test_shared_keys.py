"""append=False: a layer attends to the keys and values that another one has left in a cache, in the
places of its last rows (Gemma 3n's later layers), with the bits of one call over everything."""

import copy
import functools
import pickle

import numpy as np
import pytest

import mha
from mha import reference

WIDTH, LENGTH = 24, 300


def random_layer(seed, dtype=np.float32, **options):
    return mha.MultiHeadAttention(WIDTH, 4, num_kv_heads=2, dtype=dtype, rng=seed, **options)


def two_layers(dtype=np.float32, **options):
    """The layer that fills the cache, one that attends to it, and the two in one: query and output
    of the second, keys and values of the first."""
    early, late = random_layer(0, dtype, **options), random_layer(1, dtype, **options)
    both = copy.deepcopy(late)
    for name in ("W_k", "W_v", "b_k", "b_v"):
        setattr(both, name, getattr(early, name))
    return early, late, both


def random_x(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal((*shape, WIDTH)).astype(np.float32)


OPTIONS = {"plain": {}, "rotary": {"rotary": mha.Rotary(6)},
           "normed": {"rotary": mha.Rotary(4), "qk_norm": "head"},
           "gated": {"output_gate": "element", "rotary": mha.Rotary(6)},
           "window": {"window": (40, 0)}, "alibi": {"alibi": mha.alibi_slopes(4)},
           "biased": {"relative_bias": 7, "sinks": True, "softcap": 5.0}}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPTIONS)
def test_any_cut_gives_the_bits_of_one_call(name, dtype):
    early, late, both = two_layers(dtype, **OPTIONS[name])
    x, y = random_x(2, LENGTH), random_x(2, LENGTH, seed=2)
    wanted = both(y, x, causal=True)
    for size in (1, 7, 130, LENGTH):
        cache, outputs = early.new_cache(2), []
        for at in range(0, LENGTH, size):
            early(x[:, at:at + size], cache=cache)
            before = cache.lengths.tolist()
            outputs.append(late(y[:, at:at + size], cache=cache, append=False))
            assert cache.lengths.tolist() == before
        assert np.array_equal(np.concatenate(outputs, axis=1), wanted)


def test_against_the_reference_in_float64():
    early, late, _ = two_layers(np.float64, rotary=mha.Rotary(6))
    x, y = random_x(2, 20), random_x(2, 5, seed=2)
    cache = early.new_cache(2)
    early(x, cache=cache)
    got = late(y, cache=cache, append=False)
    query = late.rotary(mha.split_heads(y @ late.W_q, 4), positions=np.arange(15, 20))
    attended = reference.scaled_dot_product_attention(query, cache.key, cache.value, causal=True)
    wanted = mha.merge_heads(attended) @ late.W_o
    assert np.abs(got - wanted).max() <= 1e-14 * np.abs(wanted).max()


@pytest.mark.parametrize("padding", ["right", "left"])
def test_ragged_rows_stand_at_the_end_of_each_sequence(padding):
    early, late, both = two_layers(rotary=mha.Rotary(6), window=(30, 0))
    x, y = random_x(3, 150), random_x(3, 150, seed=2)
    wanted = both(y, x, causal=True)
    cache = early.new_cache(3)
    early(x, cache=cache, lengths=[150, 100, 7])
    counts = [4, 0, 2]
    rows = np.full((3, 5, WIDTH), np.nan, np.float32)
    for i, count in enumerate(counts):
        first = 5 - count if padding == "left" else 0
        end = int(cache.lengths[i])
        rows[i, first:first + count] = y[i, end - count:end]
    got = late(rows, cache=cache, append=False, lengths=counts, padding=padding)
    for i, count in enumerate(counts):
        first = 5 - count if padding == "left" else 0
        end = int(cache.lengths[i])
        assert np.array_equal(got[i, first:first + count], wanted[i, end - count:end])
        assert not np.delete(got[i], range(first, first + count), axis=0).any()


@pytest.mark.parametrize("dtype", [np.float16, "q8_0"])
def test_of_narrow_caches(dtype):
    wide = functools.partial(mha.MultiHeadAttention, 64, 2, rng=0)
    early, late = wide(), wide(rotary=mha.Rotary(32))
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 2, 140, 64)).astype(np.float32)
    cache, shown = early.new_cache(2, dtype=dtype), early.new_cache(2)
    early(x, cache=cache)
    shown.append(cache.key, cache.value)  # the numbers that are stored
    for n in (1, 5, 140):
        rows = y[:, -n:]
        assert np.array_equal(late(rows, cache=cache, append=False),
                              late(rows, cache=shown, append=False))


def test_a_wider_layer_beside_a_narrow_cache():
    early, late, _ = two_layers(np.float64)
    cache, copied = early.new_cache(1, dtype=np.float32), early.new_cache(1)
    early(random_x(1, 140), cache=cache)
    copied.append(cache.key, cache.value)
    for n in (1, 20):
        rows = random_x(1, n)
        assert np.array_equal(late(rows, cache=cache, append=False),
                              late(rows, cache=copied, append=False))


@pytest.mark.parametrize("window", [1, 40, 128])
def test_a_window_keeps_what_the_rows_of_the_last_call_see(window):
    early, late, both = two_layers()
    x, y = random_x(1, 420), random_x(1, 420, seed=2)
    wanted = both(y, x, causal=True, window=(window - 1, 0))
    cache, at = early.new_cache(1, window=window), 0
    for n in (129, 1, 60, 1, 130, 2, 97):
        early(x[:, at:at + n], cache=cache)
        for changed in (cache, copy.copy(cache), pickle.loads(pickle.dumps(cache))):
            got = late(y[:, at:at + n], cache=changed, append=False)
            assert np.array_equal(got, wanted[:, at:at + n])
        at += n
    assert cache.start > 0
    with pytest.raises(ValueError, match=r"query: got \[419\] rows with append=False, wanted fewer:"
                                         r" .* is dropped"):
        late(y[:, 1:], cache=cache, append=False)


def test_weights_lse_masks_and_biases():
    early, late, both = two_layers()
    x, y, rng = random_x(2, 140), random_x(2, 140, seed=2), np.random.default_rng(0)
    mask, bias = rng.random((140, 140)) < 0.7, rng.standard_normal((140, 140))
    wanted = both(y, x, causal=True, mask=mask, bias=bias, return_weights=True, return_lse=True)
    cache = early.new_cache(2)
    early(x, cache=cache)
    got = late(y[:, -9:], cache=cache, append=False, mask=mask[-9:], bias=bias[-9:],
               return_weights=True, return_lse=True)
    for one, whole, axis in zip(got, wanted, (1, 2, 2), strict=True):
        assert np.array_equal(one, np.take(whole, range(131, 140), axis))


def test_of_a_pool():
    early, late, both = two_layers(rotary=mha.Rotary(6))
    for window in (None, 40):
        options = {} if window is None else {"window": (window - 1, 0)}
        pool = mha.PagedCache(8, 2, 6, window=window)
        ids, at = [pool.new(), pool.new()], np.zeros(2, int)
        x, y = random_x(2, LENGTH), random_x(2, LENGTH, seed=2)
        wanted = both(y, x, causal=True, **options)
        for counts in ([150, 3], [1, 1], [0, 130], [1, 100], [60, 0], [10, 5]):
            starts = np.concatenate([[0], np.cumsum(counts)])
            now = [slice(a, a + n) for a, n in zip(at, counts, strict=True)]
            rows = [np.concatenate([of[i, one] for i, one in enumerate(now)]) for of in (x, y)]
            early(rows[0], starts=starts, cache=pool[0], sequences=ids)
            before = pool._state
            got = late(rows[1], starts=starts, cache=pool[0], sequences=ids, append=False)
            assert pool._state is before
            assert np.array_equal(got, np.concatenate([wanted[i, one]
                                                       for i, one in enumerate(now)]))
            at += counts
        if window is not None:
            with pytest.raises(ValueError, match="query: got 200 rows of a sequence with append=F"):
                late(y[0, :200], starts=[0, 200], cache=pool[0], sequences=ids[:1], append=False)
        with pytest.raises(ValueError, match="query: got 223 rows of a sequence with append=False,"
                                             " wanted at most those that it has, 222"):
            late(y[0, :223], starts=[0, 223], cache=pool[0], sequences=ids[:1], append=False)


def test_errors_change_nothing():
    early, late, _ = two_layers()
    x = random_x(2, 5)
    cache = early.new_cache(2)
    early(x, cache=cache, lengths=[5, 2])
    before = cache.key.tobytes(), cache.lengths.tolist()
    with pytest.raises(ValueError, match=r"query: got \[3, 3\] rows with append=False"):
        late(x[:, :3], cache=cache, append=False)
    with pytest.raises(ValueError, match=r"append: got False without a cache, wanted cache=pool\["):
        late(x[0], starts=[0, 5], append=False)
    assert (cache.key.tobytes(), cache.lengths.tolist()) == before
    assert late(x[:, :0], cache=cache, append=False).shape == (2, 0, WIDTH)


def test_the_layer_needs_no_width_of_keys():
    """A layer whose queries are wider than what the keys came from."""
    early = random_layer(0)
    late = mha.MultiHeadAttention(24, 4, num_kv_heads=2, query_dim=40, rng=1)
    cache = early.new_cache(1)
    early(random_x(1, 9), cache=cache)
    rows = np.ones((1, 2, 40), np.float32)
    assert late(rows, cache=cache, append=False).shape == (1, 2, 24)
    with pytest.raises(ValueError, match="cache: got a new_cache\\(\\) for query_dim, key_dim"):
        late(rows, cache=cache)


def test_a_pool_beside_a_layer_whose_keys_are_of_another_width():
    """W_k and W_v are not used, whatever their width."""
    early = random_layer(0)
    late = mha.MultiHeadAttention(WIDTH, 4, num_kv_heads=2, key_dim=7, value_dim=5, rng=1)
    pool, cache, x = mha.PagedCache(4, 2, 6), early.new_cache(1), random_x(1, 9)
    id = pool.new()
    early(x[0], starts=[0, 9], cache=pool[0], sequences=[id])
    early(x, cache=cache)
    got = late(x[0], starts=[0, 9], cache=pool[0], sequences=[id], append=False)
    assert np.array_equal(got, late(x, cache=cache, append=False)[0])
    with pytest.raises(ValueError, match="starts: got some for query_dim, key_dim and value_dim"):
        late(x[0], starts=[0, 9], cache=pool[0], sequences=[id])
