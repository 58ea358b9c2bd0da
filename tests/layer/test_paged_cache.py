"""Pools of pages: each sequence has the bits that it has alone with a KVCache, whatever comes and
goes beside it."""
import copy
import itertools
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mha

LAYERS = {
    "plain": {}, "grouped, normed and rotated": {"num_kv_heads": 2, "rotary": mha.Rotary(32),
                                                 "qk_norm": "head"},
    "options": {"sinks": True, "softcap": 5.0, "alibi": mha.alibi_slopes(8)},
    "window": {"window": (100, 0), "num_kv_heads": 1, "value_head_dim": 64}}
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, "q8_0")


def rows(n, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((n, 64)).astype(dtype)


def new_layers(name, count=2, **more):
    return [mha.MultiHeadAttention(64, 8, head_dim=32, rng=i, **LAYERS[name], **more).freeze()
            for i in range(count)]


def new_pool(layers, pages=40, **more):
    first = layers[0]
    return mha.PagedCache(pages, first.num_kv_heads, first.head_dim, first.value_head_dim,
                          layers=len(layers), **more)


def alone(layers, dtype, window=None):
    return [layer.new_cache(1, dtype=dtype, window=window) for layer in layers]


def step(layers, pool, ids, caches, counts, seed):
    """Some rows of some sequences through all layers, by the pool and each alone."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    together = x = rows(starts[-1], seed, layers[0].dtype)
    outputs = [x[begin:end] for begin, end in itertools.pairwise(starts)]
    for number, layer in enumerate(layers):
        together = layer(together, starts=starts, cache=pool[number], sequences=ids)
        for s, id in enumerate(ids):
            if counts[s]:
                outputs[s] = layer(outputs[s][None], cache=caches[id][number])[0]
    np.testing.assert_array_equal(together, np.concatenate(outputs))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_the_bits_of_each_sequence_alone(name, dtype, threads):
    """Prompts and single tokens in one call; sequences come, go and take each other's pages."""
    layers = new_layers(name)
    rng = np.random.default_rng(3)
    for window in (None, 101):
        pool = new_pool(layers, dtype=dtype, window=window)
        ids = [pool.new() for _ in range(3)]
        caches = {id: alone(layers, dtype, window) for id in ids}
        with mha.threads(threads):
            for seed in range(10):
                chosen = rng.permutation(ids)[:rng.integers(1, 4)].tolist()
                counts = rng.choice([0, 1, 1, 3, 127, 150, 260], len(chosen)).tolist()
                step(layers, pool, chosen, caches, counts, seed)
                lengths = [caches[id][0].lengths[0] for id in ids]
                np.testing.assert_array_equal(pool.lengths(ids), lengths)
                if seed % 4 == 3:
                    pool.free(ids.pop(0))
                    ids.append(pool.new())
                    caches[ids[-1]] = alone(layers, dtype, window)
        for id in ids:
            pool.free(id)
        assert pool.pages_free == pool.pages


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_layers_of_other_types(dtype):
    layers = new_layers("grouped, normed and rotated", dtype=dtype)
    pool = new_pool(layers, dtype=dtype)
    ids = [pool.new(), pool.new()]
    caches = {id: alone(layers, dtype) for id in ids}
    for seed, counts in enumerate(([5, 130], [1, 1], [200, 0])):
        step(layers, pool, ids, caches, counts, seed)


@given(st.lists(st.tuples(st.sampled_from(["grow", "fork", "free", "truncate", "reserve", "new"]),
                          st.integers(0, 2**16)), min_size=5, max_size=25))
@settings(max_examples=40, deadline=None)
def test_any_course_of_things(course):
    """Forks share pages, and copy what they write; no page is lost or had twice."""
    layers = new_layers("plain")
    pool = new_pool(layers, pages=9)
    ids, caches = [pool.new()], {0: alone(layers, np.float32)}
    for seed, (what, number) in enumerate(course):
        id = ids[number % len(ids)]
        length = int(pool.lengths([id])[0])
        before = repr(pool), pool.lengths(ids).tolist()
        try:
            if what == "grow":
                chosen = ids[number % len(ids):][:3]
                step(layers, pool, chosen, caches, [(number + s) % 140 for s in range(len(chosen))],
                     seed)
            elif what == "fork":
                ids.append(pool.fork(id))
                caches[ids[-1]] = copy.deepcopy(caches[id])
            elif what == "free" and len(ids) > 1:
                ids.remove(id)
                pool.free(id)
            elif what == "truncate":
                pool.truncate(id, number % (length + 1))
                for cache in caches[id]:
                    cache.truncate([number % (length + 1)])
            elif what == "reserve":
                pool.reserve([id], number % 300)
            elif what == "new":
                ids.append(pool.new())
                caches[ids[-1]] = alone(layers, np.float32)
        except MemoryError:
            assert (repr(pool), pool.lengths(ids).tolist()) == before
        np.testing.assert_array_equal(pool.lengths(ids),
                                      [caches[id][0].lengths[0] for id in ids])
        held = [page for of in pool._state.sequences.values() for page in of.pages]
        assert sorted({*held} | {*pool._state.free}) == [*range(9)]
        assert not {*held} & {*pool._state.free}
        assert all(held.count(page) == pool._state.uses.get(page, 1) for page in held)


def test_forks_take_no_pages_until_they_write():
    layer = new_layers("plain", 1)[0]
    pool = new_pool([layer], pages=6)
    first = pool.new()
    layer(rows(200), starts=[0, 200], cache=pool[0], sequences=[first])
    second = pool.fork(first)
    assert pool.pages_free == 4
    x = rows(2, 1)
    apart = layer(x, starts=[0, 1, 2], cache=pool[0], sequences=[first, second])
    assert pool.pages_free == 3 and pool.lengths([first, second]).tolist() == [201, 201]
    cache = layer.new_cache(1)
    layer(rows(200)[None], cache=cache)
    for row, output in zip(x, apart):
        np.testing.assert_array_equal(layer(row[None, None], cache=copy.copy(cache))[0, 0], output)
    pool.free(first)
    pool.free(second)
    assert pool.pages_free == 6


def test_a_window_gives_pages_back():
    layer = new_layers("plain", 1)[0]
    pool = new_pool([layer], pages=5, window=130)
    id = pool.new()
    for _ in range(12):
        layer(rows(100), starts=[0, 100], cache=pool[0], sequences=[id])
        assert pool.pages_free >= 1
    assert pool.lengths([id]).tolist() == [1200]
    pool.truncate(id, 1100)
    with pytest.raises(ValueError, match="length: got 900, wanted a longer one"):
        pool.truncate(id, 900)
    with pytest.raises(ValueError, match=r"window: got \(200, 0\) with a cache of window 130"):
        layer(rows(1), starts=[0, 1], cache=pool[0], sequences=[id], window=(200, 0))


def test_pages_that_a_window_drops_are_whole_until_the_call_is_done():
    """What a failed call would have dropped, `truncate` may go back to."""
    layer = new_layers("plain", 1)[0]
    pool = new_pool([layer], pages=6, window=130)
    first, second = pool.new(), pool.new()
    x = rows(600)
    layer(x[:380], starts=[0, 380], cache=pool[0], sequences=[first])
    before, held = pool._state, pool._key.copy()
    with pytest.raises(ValueError, match="softcap: got"):
        layer(x[:261], starts=[0, 1, 261], cache=pool[0], sequences=[first, second], softcap=-1)
    with pytest.raises(MemoryError, match="pages: got 561 positions more"):
        layer(x[:561], starts=[0, 1, 561], cache=pool[0], sequences=[first, second])
    assert pool._state is before
    for page in before.sequences[first].pages[:2]:
        np.testing.assert_array_equal(pool._key[:, page], held[:, page])
    layer(x[:401], starts=[0, 1, 401], cache=pool[0], sequences=[first, second])
    assert pool.pages_free == 0  # second has the page that first has dropped
    assert pool.lengths([first, second]).tolist() == [381, 400]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_failed_call_leaves_the_numbers_of_forks(order):
    layer = new_layers("plain", 1)[0]
    pool = new_pool([layer])
    ids = [pool.new()]
    x = rows(100)
    layer(x, starts=[0, 100], cache=pool[0], sequences=ids)
    ids.append(pool.fork(ids[0]))
    pool.truncate(ids[1], 50)
    before, held = pool._state, pool._key[:, :, :, :100].copy()
    chosen = [ids[i] for i in order]
    with pytest.raises(ValueError, match="head_gate: got"):
        layer(x[:11], starts=[0, 1, 11], cache=pool[0], sequences=chosen, head_gate=np.ones(3))
    assert pool._state is before
    page = before.sequences[ids[0]].pages[0]
    np.testing.assert_array_equal(pool._key[0, page, :, :100], held[0, page])


def test_a_length_grows_with_the_last_layer():
    layers = new_layers("plain")
    pool = new_pool(layers)
    id = pool.new()
    layers[0](rows(5), starts=[0, 5], cache=pool[0], sequences=[id])
    assert pool.lengths([id]).tolist() == [0]
    layers[1](rows(5), starts=[0, 5], cache=pool[1], sequences=[id])
    assert pool.lengths([id]).tolist() == [5]
    layers[0](rows(3), starts=[0, 3], cache=pool[0], sequences=[id])
    pool.truncate(id, 5)  # what layer 0 alone has is forgotten, too
    caches = {id: alone(layers, np.float32)}
    for cache, layer in zip(caches[id], layers):
        layer(rows(5)[None], cache=cache)
    step(layers, pool, [id], caches, [2], 7)


def test_lse_gates_and_options_of_a_call():
    layer = new_layers("plain", 1)[0]
    pool, id = new_pool([layer]), 0
    assert pool.new() == id
    cache = layer.new_cache(1)
    for n in (140, 1):
        x, gate = rows(n, n), np.linspace(0, 2, 8, dtype=np.float32)
        got = layer(x, starts=[0, n], cache=pool[0], sequences=[id], return_lse=True,
                    head_gate=gate, window=(60, 0), softcap=3.0)
        wanted = layer(x[None], cache=cache, return_lse=True, head_gate=gate, window=(60, 0),
                       softcap=3.0)
        for one, other in zip(got, wanted):
            np.testing.assert_array_equal(one, other[0])


def test_memory():
    pool, plain = (mha.PagedCache(10, 8, 64, layers=3, dtype=dtype)
                   for dtype in ("q8_0", np.float32))
    assert plain.nbytes == 2 * 3 * 10 * 8 * 128 * 64 * 4
    assert pool.nbytes < 0.28 * plain.nbytes and pool.dtype == "q8_0"
    assert repr(pool).startswith("PagedCache(10, 8, 64, layers=3, page_len=128, dtype=q8_0,")


BAD_CALLS = [
    ({"sequences": None}, ValueError, "sequences: got none"),
    ({"sequences": [0]}, ValueError, "sequences: got 1 ids, wanted 2"),
    ({"sequences": [0, 0]}, ValueError, r"sequences: got \[0\] twice"),
    ({"sequences": [0, 7]}, ValueError, r"sequences: got \[7\], wanted ids"),
    ({"sequences": 3}, TypeError, "sequences: got int"),
    ({"starts": None}, ValueError, "sequences: got some without starts"),
    ({"starts": [0, 5]}, ValueError, "starts: got 5 at last, wanted 3"),
    ({"cache": None}, ValueError, "sequences: got some without a cache"),
    ({"cache": mha.KVCache(2, 8, 32)}, TypeError, "cache: got KVCache with starts"),
    ({"cache": mha.PagedCache(2, 8, 32)}, TypeError, "cache: got PagedCache with starts"),
    ({"cache": mha.PagedCache(2, 4, 32)[0]}, ValueError, "cache: got kv_heads"),
    ({"cache": mha.PagedCache(2, 8, 32, dtype=np.float64)[0]}, TypeError, "cache: got float64"),
    ({"mask": np.ones((3, 3), bool)}, ValueError, "mask: got one for a ragged batch"),
    ({"bias": np.ones((3, 3))}, ValueError, "bias: got one for a ragged batch"),
    ({"return_weights": True}, ValueError, "return_weights: got one with starts"),
    ({"key": rows(3)}, ValueError, "key: got one with starts"),
    ({"training": True}, ValueError, "training: got True with a cache"),
    ({"empty_rows": "uniform"}, ValueError, "empty_rows: got \"uniform\" with a cache"),
    ({"key_lengths": [1]}, ValueError, "key_lengths: got one with a cache"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS)
def test_bad_calls_change_nothing(change, error, message):
    layer = new_layers("plain", 1)[0]
    pool = new_pool([layer])
    ids = [pool.new(), pool.new()]
    before = pool._state
    good = {"starts": [0, 1, 3], "cache": pool[0], "sequences": ids}
    with pytest.raises(error, match=message):
        layer(rows(3), **{**good, **change})
    assert pool._state is before
    assert layer(rows(3), **good).shape == (3, 64)


def test_bad_pools_and_ids():
    for arguments, error, message in (
            ({"pages": 0}, ValueError, "pages: got 0"),
            ({"page_len": 100}, ValueError, "page_len: got 100, wanted a multiple of 128"),
            ({"layers": 0}, ValueError, "layers: got 0"),
            ({"window": 0}, ValueError, "window: got"),
            ({"dtype": "q4_0"}, TypeError, "dtype: got 'q4_0'"),
            ({"head_dim": 40, "dtype": "q8_0"}, ValueError, "head_dim: got 40"),
            ({"pages": 10**15}, MemoryError, "pages: got 1000000000000000, which make")):
        with pytest.raises(error, match=message):
            mha.PagedCache(**{"pages": 4, "kv_heads": 2, "head_dim": 32, **arguments})
    pool = mha.PagedCache(4, 2, 32)
    id = pool.new()
    pool.free(id)
    assert pool.new() == id + 1  # ids are not used again
    for call in (pool.free, pool.fork, lambda id: pool.truncate(id, 0),
                 lambda id: pool.lengths([id]), lambda id: pool.reserve([id], 1)):
        with pytest.raises(ValueError, match="got"):
            call(id)
        with pytest.raises(TypeError, match="got"):
            call("0")
    with pytest.raises(ValueError, match=r"counts: got \[-1\]"):
        pool.reserve([id + 1], -1)
    with pytest.raises(ValueError, match="length: got 3, wanted at most 0"):
        pool.truncate(id + 1, 3)
    with pytest.raises(MemoryError, match="pages: got 513 positions more"):
        pool.reserve([id + 1], 513)
    assert pool.pages_free == 4
    with pytest.raises(IndexError, match="layer: got 1"):
        pool[1]
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="PagedCache: got a copy or pickle"):
            way(pool)


def test_forks_leave_what_is_reserved_but_not_written():
    """They share the pages that hold positions, and no others."""
    [layer] = layers = new_layers("plain", 1)
    pool = new_pool(layers, pages=5)
    first = pool.new()
    layer(rows(10), starts=[0, 10], cache=pool[0], sequences=[first])
    pool.reserve([first], 3 * 128 - 10)
    assert pool.pages_free == 2
    fork = pool.fork(first)
    pool.free(fork)
    for begin in range(0, 3 * 128 - 10, 64):
        count = min(64, 3 * 128 - 10 - begin)
        layer(rows(count), starts=[0, count], cache=pool[0], sequences=[first])
    assert pool.pages_free == 2


def test_shared_pages_are_named_where_there_is_no_room_for_copies():
    [layer] = layers = new_layers("plain", 1)
    pool = new_pool(layers, pages=2)
    first = pool.new()
    layer(rows(10), starts=[0, 10], cache=pool[0], sequences=[first])
    fork = pool.fork(first)
    with pytest.raises(MemoryError, match="beside copies of pages that sequences share"):
        layer(rows(2), starts=[0, 1, 2], cache=pool[0], sequences=[first, fork])
    assert pool.lengths([first, fork]).tolist() == [10, 10]
    for id in (first, fork):
        layer(rows(1), starts=[0, 1], cache=pool[0], sequences=[id])


def test_a_wrong_option_gives_no_pages_back():
    [layer] = layers = new_layers("plain", 1)
    pool = new_pool(layers, pages=2, window=4)
    first = pool.new()
    layer(rows(200), starts=[0, 200], cache=pool[0], sequences=[first])
    for options in ({"alibi": [1.0]}, {"head_gate": [1.0]}, {"sinks": np.ones(3)}):
        with pytest.raises(ValueError):
            layer(rows(60), starts=[0, 60], cache=pool[0], sequences=[first], **options)
        assert pool.pages_free == 0
    pool.truncate(first, 100)
    assert pool.lengths([first]).tolist() == [100]


def test_reserving_keeps_the_way_back():
    [layer] = layers = new_layers("plain", 1)
    pool = new_pool(layers, pages=4, window=4)
    first = pool.new()
    layer(rows(129), starts=[0, 129], cache=pool[0], sequences=[first])
    layer(rows(5), starts=[0, 5], cache=pool[0], sequences=[first])
    pool.reserve([first], 1)
    pool.truncate(first, 129)
