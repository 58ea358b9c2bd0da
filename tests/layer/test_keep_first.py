"""keep_first: the first positions stay visible when the window of a cache has left them behind
("attention sinks", Xiao et al. 2023), with the bits of one call over everything under a mask."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
from cached_calls import WAYS, guess, in_pieces, pieces
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import interrupts_of

import mha
from mha import reference

WIDTH, LENGTH = 24, 700


def random_layer(dtype=np.float32, **options):
    options = {"num_kv_heads": 2} | options
    return mha.MultiHeadAttention(WIDTH, 4, dtype=dtype, rng=0, **options)


def random_x(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal((*shape, WIDTH)).astype(np.float32)


def visible(length, window, keep_first):
    """(length, length): what each row sees."""
    i, j = np.arange(length)[:, None], np.arange(length)
    return (j <= i) & ((j < keep_first) | (j > i - window))


def plain(layer, x, window, keep_first, dtype=None, **options):
    """One call over everything; beside a narrow cache on an empty one of its type."""
    mask = visible(x.shape[1], window, keep_first)
    mask = mask & options.pop("mask", True)
    if dtype is None:
        return layer(x, causal=True, mask=mask, **options)
    return layer(x, cache=layer.new_cache(len(x), dtype=dtype), mask=mask, **options)


@pytest.mark.parametrize("size", [1, 7, 128, None, LENGTH])
@pytest.mark.parametrize(("window", "keep_first"), [
    (1, 1), (40, 4), (40, 128), (128, 130), (200, 5), (300, 300)])
def test_any_cut_gives_the_bits_of_one_call_under_a_mask(size, window, keep_first):
    layer, x = random_layer(rotary=mha.Rotary(6)), random_x(1, LENGTH)
    cache = layer.new_cache(1, window=window, keep_first=keep_first)
    got = in_pieces(layer, x, cache, size, most=90)
    assert np.array_equal(got, plain(layer, x, window, keep_first))
    if size != LENGTH and LENGTH - window > -(-keep_first // 128) * 128 + 128:
        assert cache.start > 0


def options_of(name):
    rng = np.random.default_rng(2)
    return {"alibi": {"alibi": mha.alibi_slopes(4)},
            "relative bias": {"relative_bias": rng.standard_normal((4, 2 * 300 + 1))},
            "near relative bias": {"relative_bias": rng.standard_normal((1, 7))},
            "both": {"alibi": mha.alibi_slopes(4), "relative_bias": rng.standard_normal((4, 99))},
            "sinks": {"sinks": rng.standard_normal(4), "softcap": 3.0, "scale": -0.4},
            "bias": {"bias": rng.standard_normal((1, 4, LENGTH, LENGTH))},
            "mask": {"mask": rng.random((LENGTH, LENGTH)) < 0.5},
            "block mask": {"mask": mha.BlockMask.strided(LENGTH, stride=3)
                           | mha.BlockMask.sliding_window(LENGTH, window=(5, 0))},
            "gate": {"head_gate": rng.standard_normal(4)},
            "narrower window": {"window": (20, 0)}}[name]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 17, None])
@pytest.mark.parametrize("name", ["alibi", "relative bias", "near relative bias", "both", "sinks",
                                  "bias", "mask", "block mask", "gate", "narrower window"])
def test_with_every_option(name, size, dtype):
    layer, x, given = random_layer(dtype), random_x(2, LENGTH), options_of(name)
    window = given.get("window", (49, 0))[0] + 1
    whole = {name: value for name, value in given.items() if name != "window"}
    if name == "block mask":
        whole = {"mask": given["mask"].to_dense()}
    wanted = plain(layer, x, window, 5, **whole)
    cache = layer.new_cache(2, window=50, keep_first=5)
    assert np.array_equal(in_pieces(layer, x, cache, size, most=90, **given), wanted)
    assert cache.start > 128


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, "q8_0"])
@pytest.mark.parametrize("size", [1, 9, None])
def test_of_narrow_caches(size, dtype):
    layer = mha.MultiHeadAttention(64, 2, rng=0, rotary=mha.Rotary(32))
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 64)).astype(np.float32)
    cache = layer.new_cache(2, dtype=dtype, window=60, keep_first=7)
    got = in_pieces(layer, x, cache, size, most=90)
    assert np.array_equal(got, plain(layer, x, 60, 7, dtype))
    assert cache.start > 128


def test_a_wider_layer_beside_a_narrow_cache():
    layer, x = random_layer(np.float64), random_x(2, LENGTH)
    cache = layer.new_cache(2, dtype=np.float32, window=60, keep_first=7)
    assert np.array_equal(in_pieces(layer, x, cache, 30), plain(layer, x, 60, 7, np.float32))
    assert cache.start > 128


def test_weights_and_lse():
    layer, x = random_layer(), random_x(2, LENGTH)
    cache = layer.new_cache(2, window=40, keep_first=4)
    whole = plain(layer, x, 40, 4, return_weights=True, return_lse=True)
    for begin, end in ((0, 300), (300, 301), (301, 690), (690, 700)):
        got = layer(x[:, begin:end], cache=cache, return_weights=True, return_lse=True)
        assert np.array_equal(got[0], whole[0][:, begin:end])
        assert np.array_equal(got[1], whole[1][:, :, begin:end, :end])
        assert np.array_equal(got[2], whole[2][:, :, begin:end])
    assert cache.start > 128


def test_against_the_reference_in_float64():
    layer, x = random_layer(np.float64, num_kv_heads=4), random_x(1, 420).astype(np.float64)
    cache = layer.new_cache(1, window=30, keep_first=3)
    got = in_pieces(layer, x, cache, 20)
    heads = [mha.split_heads(x @ W, 4) for W in (layer.W_q, layer.W_k, layer.W_v)]
    attended = reference.scaled_dot_product_attention(*heads, mask=visible(420, 30, 3))
    wanted = mha.merge_heads(attended) @ layer.W_o
    assert cache.start > 0
    assert np.abs(got - wanted).max() <= 1e-13 * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", [None, np.float16])
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize(("window", "keep_first"), [(1, 3), (20, 128), (128, 5)])
def test_guesses_of_a_ragged_batch(window, keep_first, padding, dtype):
    """As in test_guesses.py: some first rows of a call are right, the others are taken back, by
    truncate or by keep; sequences change places; caches are copied."""
    layer, rng = random_layer(), np.random.default_rng(window)
    x = random_x(3, LENGTH)
    whole = plain(layer, x, window, keep_first, dtype)
    cache = layer.new_cache(3, window=window, keep_first=keep_first, dtype=dtype)
    at = np.zeros(3, int)
    while at.min() + 70 < LENGTH:
        right = guess(layer, cache, x, whole, at, padding, rng)
        cache = WAYS[rng.integers(len(WAYS))](cache)
        if rng.random() < 0.5:
            indices = np.tile(np.arange(max(1, right.max())), (3, 1))
            cache.keep(at, indices[:, :right.max()], right)
            at += right
        else:
            at += right
            cache.truncate(at)
        if rng.random() < 0.3:
            order = rng.integers(0, 3, 3)
            cache.select(order)
            x, whole, at = x[order], whole[order], at[order]
        assert cache.lengths.tolist() == at.tolist()
        assert cache.capacity < (-(-keep_first // 128) * 128 + 2 * max(window, 128)
                                 + 2 * (np.ptp(at) + 60))
    assert cache.start > 0


def contents(cache):
    state = cache._state
    return [array.tobytes() for array in state.held()], state[3:], repr(cache)


def test_a_shared_layer_sees_the_first_positions_too():
    early, late = random_layer(), mha.MultiHeadAttention(WIDTH, 4, num_kv_heads=2, rng=1)
    both = copy.deepcopy(late)
    both.W_k, both.W_v = early.W_k, early.W_v
    x, y = random_x(1, LENGTH), random_x(1, LENGTH, seed=2)
    wanted = both(y, x, causal=True, mask=visible(LENGTH, 30, 4))
    cache = early.new_cache(1, window=30, keep_first=4)
    for begin, end in pieces(LENGTH, 23, None):
        early(x[:, begin:end], cache=cache)
        before = contents(cache)
        got = late(y[:, begin:end], cache=cache, append=False)
        assert np.array_equal(got, wanted[:, begin:end])
        assert contents(cache) == before
    assert cache.start > 128


@settings(max_examples=100, deadline=None)
@given(keep_first=st.sampled_from([1, 5, 128, 129]), window=st.sampled_from([1, 20, 128, 200]),
       seed=st.integers(0, 2**32), capacity=st.sampled_from([0, 5, 900]))
def test_what_it_holds(keep_first, window, seed, capacity):
    """Parts against plain concatenation; the bound of its capacity."""
    rng, blocks = np.random.default_rng(seed), -(-keep_first // 128) * 128
    cache = mha.KVCache(2, 2, 3, 5, window=window, keep_first=keep_first, capacity=capacity)
    keys, values = np.zeros((2, 2, 0, 3), np.float32), np.zeros((2, 2, 0, 5), np.float32)
    for _ in range(12):
        n = int(rng.choice([0, 1, 7, 40, 128, 300]))
        key, value = (rng.standard_normal((2, 2, n, d)).astype(np.float32) for d in (3, 5))
        cache.append(key, value)
        keys, values = np.concatenate([keys, key], axis=2), np.concatenate([values, value], axis=2)
        length, start = keys.shape[2], cache.start
        assert start % 128 == 0 and start <= max(0, length - n - window + 1)
        assert cache.capacity < blocks + 2 * max(window, 128) + n
        for parts, whole in ((cache.key_parts(), keys), (cache.value_parts(), values)):
            assert np.array_equal(parts[0], whole[:, :, :keep_first if start else 0])
            assert np.array_equal(parts[1], whole[:, :, start:])
            assert not any(part.flags.writeable for part in parts)
        if start == 0:
            assert np.array_equal(cache.key, keys) and np.array_equal(cache.value, values)
        else:
            assert start > blocks
            with pytest.raises(ValueError, match=r"key: got a cache that has dropped positions"
                                                 rf" behind the first {keep_first}, wanted key_pa"):
                cache.key  # noqa: B018
            with pytest.raises(ValueError, match=r"wanted value_parts\(\)"):
                cache.value  # noqa: B018
    for other in (copy.copy(cache), pickle.loads(pickle.dumps(cache))):
        assert contents(other)[1:] == contents(cache)[1:]
        assert np.array_equal(other.key_parts()[1], cache.key_parts()[1])
        assert other.keep_first == keep_first
    cache.reset()
    assert cache.start == 0 and cache.key.shape[2] == 0


def test_errors():
    with pytest.raises(ValueError, match="keep_first: got 4 without a window, wanted window= too"):
        mha.KVCache(1, 1, 2, keep_first=4)
    with pytest.raises(ValueError, match="keep_first: got -1, wanted at least 0"):
        mha.KVCache(1, 1, 2, window=4, keep_first=-1)
    with pytest.raises(TypeError, match="keep_first: got float, wanted an int"):
        random_layer().new_cache(1, window=4, keep_first=1.0)
    cache = mha.KVCache(1, 1, 2, window=10, keep_first=4)
    for n in (300, 100, 5):
        cache.append(np.ones((1, 1, n, 2)), np.ones((1, 1, n, 2)))
    before, start = contents(cache), cache.start
    assert start > 128
    with pytest.raises(ValueError, match=f"lengths: got .*, wanted at least {start + 9}"):
        cache.truncate(start + 8)
    with pytest.raises(ValueError, match=f"start: got .*, wanted at least {start}: what stood bef"):
        cache.keep(2, [[0, 1]])
    assert contents(cache) == before
    layer = random_layer()
    cache = layer.new_cache(1, window=10, keep_first=4)
    layer(random_x(1, 300), cache=cache)
    layer(random_x(1, 9), cache=cache)
    before = contents(cache)
    with pytest.raises(ValueError, match="window: got"):
        layer(random_x(1, 300), cache=cache, window=(10, 0))
    with pytest.raises(ValueError, match="mask: got 3 columns"):
        layer(random_x(1, 300), cache=cache, mask=np.ones((300, 3), bool))
    with pytest.raises(KeyboardInterrupt):
        layer(random_x(1, 300), cache=cache, bias=Stops())
    assert contents(cache) == before
    state = {**cache.__getstate__(), "start": 128}
    with pytest.raises(ValueError, match="state: got one that does not fit together"):
        mha.KVCache.__new__(mha.KVCache).__setstate__(state)


@pytest.mark.parametrize("step", ["call", "line"])
def test_control_c_while_positions_are_dropped(step):
    def filled():
        cache = mha.KVCache(2, 1, 2, window=3, keep_first=4)
        rows = np.random.default_rng(0).standard_normal((2, 1, 259, 2))
        cache.append(rows, rows)
        return cache

    def append(cache):
        rows = np.random.default_rng(1).standard_normal((2, 1, 300, 2))
        cache.append(rows, rows, lengths=[300, 290])

    before, after = filled(), filled()
    append(after)
    assert after.start > before.start == 0
    states = [contents(before), contents(after)]
    for cache in interrupts_of(append, filled, step):
        assert contents(cache) in states


class Stops:
    def __array__(self, *arguments, **options):
        raise KeyboardInterrupt


def test_what_is_hidden_may_be_anything():
    """NaN between the first positions and the window reaches nobody."""
    layer, x = random_layer(), random_x(1, 200)
    x[0, 5:100] = np.nan
    cache = layer.new_cache(1, window=50, keep_first=5)
    layer(x[:, :150], cache=cache)
    for rows in (x[:, 150:151], x[:, 151:]):
        assert np.isfinite(layer(rows, cache=cache)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, "q8_0"])
@pytest.mark.parametrize("page_len", [128, 256])
@pytest.mark.parametrize("name", ["plain", "distances"])
def test_of_a_pool(name, page_len, dtype):
    """Each sequence has the bits that it has alone, and the pages between go back."""
    options = {} if name == "plain" else {"alibi": mha.alibi_slopes(4), "relative_bias": 9}
    layer = mha.MultiHeadAttention(128, 4, num_kv_heads=2, rng=0, **options)
    if name == "distances":
        layer.relative_bias[...] = np.random.default_rng(1).standard_normal((4, 19))
    pool = mha.PagedCache(24, 2, 32, window=60, keep_first=7, page_len=page_len, dtype=dtype)
    rng = np.random.default_rng(0)
    ids = [pool.new(), pool.new(), pool.new()]
    alone = {id: layer.new_cache(1, window=60, keep_first=7, dtype=dtype) for id in ids}
    for _ in range(30):
        counts = rng.choice([0, 1, 2, 40, 150], 3).tolist()
        starts = np.concatenate([[0], np.cumsum(counts)])
        rows = rng.standard_normal((starts[-1], 128)).astype(np.float32)
        got = layer(rows, starts=starts, cache=pool[0], sequences=ids)
        again = layer(rows, starts=starts, cache=pool[0], sequences=ids, append=False)
        assert np.array_equal(again, got)
        for id, begin, count in zip(ids, starts[:-1], counts, strict=True):
            now = slice(begin, begin + count)
            assert np.array_equal(got[now], layer(rows[now][None], cache=alone[id])[0])
            shorter = int(pool.lengths([id])[0] - rng.integers(min(3, count + 1)))
            pool.truncate(id, shorter)
            alone[id].truncate(shorter)
        if rng.random() < 0.3:
            ids[1] = pool.fork(ids[0])
            alone[ids[1]] = copy.copy(alone[ids[0]])
    assert (pool.lengths(ids) > 3 * page_len).any()
    held = [len(pool._state.sequences[id].pages) for id in ids]
    assert max(held) <= 1 + -(-(60 + 2 * 150) // page_len) + 1
    for id in [*pool._state.sequences]:
        pool.free(id)
    assert pool.pages_free == 24


def test_of_a_pool_with_many_first_positions():
    layer = random_layer()
    pool, x = mha.PagedCache(9, 2, 6, window=20, keep_first=200), random_x(900)
    id, cache = pool.new(), layer.new_cache(1, window=20, keep_first=200)
    for begin, end in pieces(900, 61, None):
        got = layer(x[begin:end], starts=[0, end - begin], cache=pool[0], sequences=[id])
        assert np.array_equal(got, layer(x[None, begin:end], cache=cache)[0])
    assert pool.pages_free >= 5
    with pytest.raises(ValueError, match="length: got 700, wanted a longer one: what stood before"):
        pool.truncate(id, 700)
    with pytest.raises(ValueError, match="keep_first: got 4 without a window"):
        mha.PagedCache(9, 2, 6, keep_first=4)
    assert "window=20, keep_first=200" in repr(pool)
