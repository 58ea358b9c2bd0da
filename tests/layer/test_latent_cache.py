"""MultiHeadLatentAttention with its caches: the same bits however a sequence is cut, both kinds."""

import copy
import pickle

import numpy as np
import pytest
from agreement import relative_error
from latent_layers import KINDS, as_function, in_parts, latent_layer, rows

import mha
from mha import reference

CUTS = [(), (1, 2, 3), (5, 5, 130), (64, 128, 129, 140)]
ABSORBED = [True, False]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("absorbed", ABSORBED)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_any_cut_has_the_same_bits(kind, dtype, absorbed, frozen):
    layer, x = latent_layer(kind, dtype), rows(3, 150, 40, dtype=dtype)
    if frozen:
        layer.freeze()
    whole = in_parts(layer, x, (), layer.new_cache(3, absorbed=absorbed))
    for threads in (1, 2, 3):
        with mha.threads(threads):
            for cuts in CUTS:
                cache = layer.new_cache(3, absorbed=absorbed)
                assert np.array_equal(in_parts(layer, x, cuts, cache), whole), cuts
            alone = [in_parts(layer, one[None], (7,), layer.new_cache(1, absorbed=absorbed))
                     for one in x]
            assert np.array_equal(np.concatenate(alone), whole)
    without = layer(x, causal=True)
    if not absorbed:
        assert np.array_equal(whole, without)
    wide = reference.multi_head_latent_attention(
        x.astype(np.longdouble), **{name: value.astype(np.longdouble) if isinstance(
            value, np.ndarray) else value for name, value in as_function(layer).items()},
        causal=True)
    assert relative_error(whole, wide.astype(np.float64)) < (1e-6 if dtype == np.float32 else 1e-14)


@pytest.mark.parametrize("key", [np.float32(3), np.ones((2, 5), np.float32), None, "x"])
def test_states_that_are_none(key):
    cache = latent_layer().new_cache(2)
    state = cache.__getstate__()
    with pytest.raises(ValueError, match="state: got"):
        cache.__setstate__(state | {"key": key})
    assert cache.key.shape == (2, 1, 0, 40)


@pytest.mark.parametrize("absorbed", ABSORBED)
@pytest.mark.parametrize("padding", ["right", "left"])
def test_lengths_of_their_own(absorbed, padding):
    """Each sequence has the bits that it has alone; weights and lse too."""
    layer, x = latent_layer(), rows(3, 20, 40)
    cache = layer.new_cache(3, absorbed=absorbed)
    got = [[], [], []]
    for lengths, begin, n in (([4, 7, 0], 0, 7), ([9, 3, 1], 7, 9), (None, 16, 1)):
        counts = [n] * 3 if lengths is None else lengths
        piece = rows(3, n, 40, seed=begin)
        output = layer(piece, cache=cache, lengths=lengths, padding=padding)
        for sequence, count in enumerate(counts):
            real = slice(n - count, n) if padding == "left" else slice(count)
            got[sequence].append((piece[sequence, real], output[sequence, real]))
            assert not output[sequence][np.arange(n) >= count].any() or padding == "left"
    assert cache.lengths.tolist() == [14, 11, 2]
    for parts in got:
        x = np.concatenate([given for given, _ in parts])
        alone = layer(x[None], cache=layer.new_cache(1, absorbed=absorbed))
        assert np.array_equal(np.concatenate([output for _, output in parts]), alone[0])


@pytest.mark.parametrize("absorbed", ABSORBED)
def test_options_of_a_call(absorbed):
    layer, x = latent_layer(), rows(2, 12, 40)
    options = {"softcap": 2.0, "window": (4, 0), "alibi": np.array([0, 0.1, 1, 2], np.float32),
               "sinks": np.ones(4, np.float32), "head_gate": np.array([1, 0.5, 0, 2], np.float32)}
    wanted = layer(x, causal=True, return_weights=True, return_lse=True, **options)
    cache = layer.new_cache(2, absorbed=absorbed)
    layer(x[:, :8], cache=cache, **options)
    got = layer(x[:, 8:], cache=cache, return_weights=True, return_lse=True, **options)
    places = np.s_[:, 8:], np.s_[:, :, 8:], np.s_[:, :, 8:]
    for one, other, place in zip(got, wanted, places, strict=True):
        assert relative_error(one, other[place]) < 2e-6
    mask = np.tri(4, 12, 8, dtype=bool)
    cache.truncate(8)
    one = layer(x[:, 8:], cache=cache, mask=mask, scale=0.1, positions=np.arange(3, 7))
    whole = layer(x, causal=True, scale=0.1, positions=[*range(8), *range(3, 7)])
    assert relative_error(one, whole[:, 8:]) < 2e-6


def test_absorbed_holds_a_latent_a_position():
    layer = latent_layer()
    x = rows(2, 200, 40)
    cache = layer.new_cache(2, capacity=200)
    layer(x, cache=cache)
    assert cache.nbytes == 2 * 200 * (32 + 8) * 4
    assert cache.key.shape == (2, 1, 200, 40) and cache.value.shape == (2, 1, 200, 32)
    assert (cache.kv_heads, cache.head_dim, cache.value_head_dim) == (1, 40, 32)
    assert np.shares_memory(cache.value, cache.key)
    assert [part.shape for part in cache.value_parts()] == [(2, 1, 0, 32), (2, 1, 200, 32)]
    assert np.array_equal(cache.value_parts()[1], cache.value)
    assert np.array_equal(cache.value, cache.key[..., :32]) and not cache.value.flags.writeable
    compressed = x @ layer.W_dkv + layer.b_dkv
    wanted = reference.rms_norm(compressed[..., :32], layer.kv_norm)
    assert relative_error(cache.value[:, 0], wanted) < 1e-6
    assert relative_error(cache.key[:, 0, :, 32:], layer.rotary(compressed[..., 32:])) < 2e-6
    expanded = layer.new_cache(2, absorbed=False)
    layer(x, cache=expanded)
    assert expanded.key.shape == (2, 4, 200, 24) and expanded.value.shape == (2, 4, 200, 12)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, "bfloat16"])
@pytest.mark.parametrize("absorbed", ABSORBED)
def test_what_a_cache_does(absorbed, dtype):
    layer, x = latent_layer(), rows(3, 40, 40)

    def after(cache):
        return layer(x[:cache.batch, 20:21], cache=cache)

    cache = layer.new_cache(3, absorbed=absorbed, dtype=dtype)
    layer(x[:, :30], cache=cache)
    cache.truncate([20, 20, 20])
    once = layer.new_cache(3, absorbed=absorbed, dtype=dtype)
    layer(x[:, :20], cache=once)
    for other in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)),
                  pickle.loads(pickle.dumps(cache, 2))):
        assert type(other) is type(cache) and other.lengths.tolist() == [20] * 3
        assert other.capacity == cache.capacity and other.nbytes == cache.nbytes
        assert other.value_head_dim == cache.value_head_dim
        assert np.array_equal(after(other), after(copy.copy(once)))
    cache.select([2, 0, 0])
    got = layer(x[[2, 0, 0], 20:21], cache=cache)
    assert np.array_equal(got, after(copy.copy(once))[[2, 0, 0]])
    cache.reset()
    assert cache.lengths.tolist() == [0] * 3
    assert np.array_equal(layer(x[:, :20], cache=cache), layer(x[:, :20], cache=layer.new_cache(
        3, absorbed=absorbed, dtype=dtype)))


@pytest.mark.parametrize("absorbed", ABSORBED)
def test_half_layers_with_caches(absorbed):
    layer, x = latent_layer().astype(np.float16), rows(2, 30, 40).astype(np.float16)
    wide = layer.astype(np.float32)
    cache = layer.new_cache(2, absorbed=absorbed)
    assert cache.dtype == np.float16
    got = in_parts(layer, x, (4, 5), cache)
    narrow = wide.new_cache(2, absorbed=absorbed, dtype=np.float16)
    wanted = in_parts(wide, x.astype(np.float32), (4, 5), narrow)
    assert np.array_equal(got, wanted.astype(np.float16))
    double = layer.astype(np.float64)
    cache = double.new_cache(2, absorbed=absorbed, dtype=np.float32)
    assert relative_error(in_parts(double, x.astype(np.float64), (4,), cache),
                          double(x.astype(np.float64), causal=True)) < 1e-6


def test_one_sequence_and_empty_calls():
    layer, x = latent_layer(), rows(1, 9, 40)
    for absorbed in ABSORBED:
        cache, other = (layer.new_cache(1, absorbed=absorbed) for _ in range(2))
        whole = layer(x, cache=cache)
        assert np.array_equal(layer(x[0], cache=other), whole[0])
        assert layer(x[:, :0], cache=cache).shape == (1, 0, 40)
        assert cache.lengths.tolist() == [9]


@pytest.mark.parametrize("absorbed", ABSORBED)
def test_guesses_and_positions_that_are_there(absorbed):
    """keep(), append=False, and what sees the first positions for good."""
    layer, x = latent_layer(), rows(2, 12, 40)
    cache, plain = (layer.new_cache(2, absorbed=absorbed) for _ in range(2))
    layer(x[:, :8], cache=cache)
    tree = np.tri(4, 12, 8, dtype=bool)
    tree[2:, 9] = False  # rows 2 and 3 are another branch behind row 0
    layer(x[:, 8:], cache=cache, mask=tree, positions=[8, 9, 9, 10])
    cache.keep(8, [[0, 2, 3]] * 2)
    layer(x[:, [*range(9), 10, 11]], cache=plain)
    assert np.array_equal(cache.key, plain.key) and np.array_equal(cache.value, plain.value)
    assert np.array_equal(layer(x[:, 1:2], cache=cache), layer(x[:, 1:2], cache=plain))
    again = layer(x[:, [10, 11, 1]], cache=cache, append=False)
    whole = layer(x[:, [*range(9), 10, 11, 1]], cache=layer.new_cache(2, absorbed=absorbed))
    assert np.array_equal(again, whole[:, 9:]) and cache.lengths.tolist() == [12, 12]


def test_rotary_with_sections():
    rotary = mha.Rotary(8, sections=(2, 1, 1))
    layer, x = latent_layer("plain", np.float64, rotary=rotary), rows(2, 6, 40, dtype=np.float64)
    positions = np.random.default_rng(0).integers(0, 9, (3, 2, 6))
    wanted = reference.multi_head_latent_attention(x, **as_function(layer), positions=positions,
                                                   causal=True)
    assert relative_error(layer(x, positions=positions, causal=True), wanted) < 1e-14
    for absorbed in ABSORBED:
        cache = layer.new_cache(2, absorbed=absorbed)
        parts = [layer(x[:, a:b], cache=cache, positions=positions[..., a:b])
                 for a, b in ((0, 4), (4, 6))]
        assert relative_error(np.concatenate(parts, axis=1), wanted) < 1e-14
        other = pickle.loads(pickle.dumps(cache))
        for one in (cache, other):
            with pytest.raises(ValueError, match="positions: got none, wanted those"):
                layer(x, cache=one)


def test_what_is_refused():
    layer, x = latent_layer(), rows(2, 5, 40)
    cache = layer.new_cache(2)
    plain = mha.MultiHeadAttention(40, 1, head_dim=40, value_head_dim=32, rng=0)
    refused = [
        (lambda: plain(x, cache=cache), "cache: got one of latents, wanted one of the layer's own"),
        (lambda: layer(x, cache=plain.new_cache(2)), "cache: got kv_heads, head_dim and"),
        (lambda: latent_layer(kv_rank=16)(x, cache=cache), "cache: got kv_heads, head_dim and"),
        (lambda: cache.append(cache.key, cache.value), "cache: got an append to a latent cache"),
        (lambda: layer(x, x, cache=cache), "key: got one with a cache"),
        (lambda: layer(x, cache=cache, key_lengths=[5, 5]), "key_lengths: got one with a cache"),
        (lambda: layer(x[0], cache=cache), "cache: got one of 2 sequences, wanted 1"),
        (lambda: layer(x, cache=cache, padding="both"), "padding: got 'both'"),
        (lambda: cache.truncate(9), "lengths: got"),
        (lambda: cache.__setstate__({**cache.__getstate__(), "kv_rank": 40}), "state: got no"),
        (lambda: cache.__setstate__([]), "state: got no latents of"),
        (lambda: cache.__setstate__({**cache.__getstate__(), "more": 1}), "state: got one that"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    assert cache.lengths.tolist() == [0, 0]
    wanted = "dtype: got '{}', wanted float16, bfloat16, float32 or float64$"
    for absorbed, sizes in ((True, {"rope_dim": 32}), (False, {"rope_dim": 16})):
        with pytest.raises(TypeError, match=wanted.format("q8_0")):
            latent_layer(value_head_dim=32, **sizes).new_cache(2, absorbed=absorbed, dtype="q8_0")
        for dtype in ("q8_0", "q4_0"):  # whose sizes do not fit
            with pytest.raises(TypeError, match=wanted.format(dtype)):
                latent_layer().new_cache(2, absorbed=absorbed, dtype=dtype)
    for absorbed in ABSORBED:
        with pytest.raises(TypeError, match="dtype: got float64, wanted float32"):
            layer.new_cache(2, absorbed=absorbed, dtype=np.float64)
    with pytest.raises(TypeError, match="absorbed: got int, wanted True or False"):
        layer.new_cache(2, absorbed=1)
    kept = mha.KVCache(2, 4, 24, 12, window=4, keep_first=2)
    with pytest.raises(ValueError, match="cache: got keep_first 2 for latent attention"):
        layer(x, cache=kept)
    with pytest.raises(ValueError, match="append: got False without a cache"):
        layer(x, append=False)
    pool = mha.PagedCache(4, 1, 40, 32)
    with pytest.raises(TypeError, match="cache: got PagedLayer"):
        layer(x, cache=pool[0])
    wide = latent_layer(kv_rank=64, rope_dim=32, num_heads=1, nope_dim=32, value_head_dim=64)
    blocks = mha.KVCache(2, 1, 64, 64, dtype="q8_0")
    with pytest.raises(TypeError, match="cache: got q8_0 for latent attention"):
        wide(x, cache=blocks)


def test_a_call_that_fails_leaves_the_cache():
    layer, x = latent_layer(), rows(2, 5, 40)
    for absorbed in ABSORBED:
        cache = layer.new_cache(2, absorbed=absorbed)
        layer(x, cache=cache)
        before = cache.key.copy()
        with pytest.raises(ValueError, match="mask: got 9 columns"):
            layer(x, cache=cache, mask=np.ones((5, 9), bool))
        with pytest.raises(ValueError, match="sinks"):
            layer(x, cache=cache, sinks=np.ones(7, np.float32))
        assert cache.lengths.tolist() == [5, 5] and np.array_equal(cache.key, before)
