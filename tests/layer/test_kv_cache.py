"""KVCache against plain concatenation, sequence by sequence."""

import copy
import pickle
import weakref

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interrupts import interrupts_of

import mha
from mha._layer import cache_state

HEADS, HEAD_DIM, VALUE_HEAD_DIM = 2, 3, 5


def new_cache(batch=3, **options):
    return mha.KVCache(batch, HEADS, HEAD_DIM, VALUE_HEAD_DIM, **options)


def rows_of(rng, batch, n, dtype=np.float32):
    return (rng.standard_normal((batch, HEADS, n, HEAD_DIM)).astype(dtype),
            rng.standard_normal((batch, HEADS, n, VALUE_HEAD_DIM)).astype(dtype))


def contents(cache):
    """All that can be seen of it."""
    return [cache.key.tobytes(), cache.value.tobytes(), cache.lengths.tolist(), cache.start,
            cache.capacity, cache.nbytes, cache.dtype, cache.window, repr(cache)]


class Concatenated:
    """The same by concatenation: for each sequence its keys and values (heads, length, d)."""

    def __init__(self, batch):
        self.sequences = [[np.zeros((HEADS, 0, d), np.float32)
                           for d in (HEAD_DIM, VALUE_HEAD_DIM)] for _ in range(batch)]

    def append(self, key, value, counts):
        for i, pair in enumerate(self.sequences):
            for j, new in enumerate((key, value)):
                pair[j] = np.concatenate([pair[j], new[i, :, :counts[i]]], axis=1)

    def truncate(self, lengths):
        self.sequences = [[array[:, :length] for array in pair]
                          for pair, length in zip(self.sequences, lengths, strict=True)]

    def select(self, indices):
        self.sequences = [list(self.sequences[i]) for i in indices]

    def lengths(self):
        return [pair[0].shape[1] for pair in self.sequences]


def assert_same(cache, wanted):
    lengths, start = wanted.lengths(), cache.start
    assert cache.batch == len(lengths)
    assert cache.lengths.tolist() == lengths
    assert start % 128 == 0
    assert start <= max(0, min(lengths) - (cache.window or max(lengths) + 1) + 1)
    for j, array in enumerate((cache.key, cache.value)):
        assert array.shape[2] == max(lengths) - start
        assert not array.flags.writeable
        assert array.strides[-1] == array.itemsize or not array.size
        for i, length in enumerate(lengths):
            assert np.array_equal(array[i, :, :length - start], wanted.sequences[i][j][:, start:])
            assert not array[i, :, length - start:].any()


STEPS = st.lists(st.tuples(
    st.sampled_from(["append", "append", "append", "ragged", "ragged", "truncate", "select",
                     "reset"]),
    st.sampled_from([0, 1, 1, 7, 40, 128, 300]), st.integers(0, 2**32)), max_size=12)


@example([("ragged", 300, 6), ("select", 0, 116), ("append", 0, 0)], 128, 0, 3)
@settings(max_examples=150, deadline=None)
@given(steps=STEPS, window=st.sampled_from([None, 1, 20, 128, 200]),
       capacity=st.sampled_from([0, 5, 400]), batch=st.integers(1, 3))
def test_any_sequence_of_changes(steps, window, capacity, batch):
    cache, wanted = new_cache(batch, capacity=capacity, window=window), Concatenated(batch)
    last = np.zeros(batch, int)  # the lengths before the last append
    for name, n, seed in steps:
        rng = np.random.default_rng(seed)
        lengths = np.array(wanted.lengths())
        if name in ("append", "ragged"):
            key, value = rows_of(rng, len(lengths), n)
            counts = rng.integers(0, n + 1, len(lengths)) if name == "ragged" else None
            key.flags.writeable = False
            last = lengths
            cache.append(key, value, counts)
            wanted.append(key, value, np.full(len(lengths), n) if counts is None else counts)
            spread = np.ptp(wanted.lengths())
            if window is not None:
                assert cache.capacity < 2 * max(window, 128) + spread + n
            assert max(wanted.lengths()) - cache.start <= cache.capacity
        elif name == "truncate":
            shorter = np.maximum(lengths - rng.integers(0, n + 1, len(lengths)), 0)
            if cache.start > max(0, shorter.min() - (window or 0) + 1):
                assert (shorter < last).any()
                before = contents(cache)
                with pytest.raises(ValueError, match="dropped"):
                    cache.truncate(shorter)
                assert contents(cache) == before
                continue
            cache.truncate(shorter)
            wanted.truncate(shorter)
            last = np.minimum(last, shorter)
        elif name == "select":
            indices = rng.integers(0, len(lengths), rng.integers(1, 4))
            cache.select(indices)
            wanted.select(indices)
            last = last[indices]
        else:
            cache.reset()
            wanted, last = Concatenated(len(lengths)), np.zeros_like(lengths)
        assert_same(cache, wanted)
    assert_same(pickle.loads(pickle.dumps(cache)), wanted)
    assert_same(copy.copy(cache), wanted)


def test_it_grows_by_doubling_and_in_place_otherwise():
    cache, rng = new_cache(1), np.random.default_rng(0)
    capacities = []
    for _ in range(65):
        cache.append(*rows_of(rng, 1, 1))
        capacities.append(cache.capacity)
    assert sorted(set(capacities)) == [1, 2, 4, 8, 16, 32, 64, 128]
    reserved = new_cache(1, capacity=65)
    memory = reserved._state.key
    for _ in range(65):
        reserved.append(*rows_of(rng, 1, 1))
    assert reserved._state.key is memory
    assert reserved.nbytes == 65 * HEADS * (HEAD_DIM + VALUE_HEAD_DIM) * 4


@pytest.mark.parametrize("window", [1, 100, 500])
def test_a_window_stays_under_its_bound(window):
    cache, rng = new_cache(1, window=window), np.random.default_rng(0)
    n = 0
    while n < 100_000:
        step = int(rng.integers(1, 40))
        cache.append(*rows_of(rng, 1, step))
        n += step
        assert cache.capacity < 2 * max(window, 128) + step
    assert n - cache.start >= window - 1


def test_a_long_prompt_does_not_stay_in_a_windows_memory():
    cache, rng = new_cache(1, window=64), np.random.default_rng(0)
    cache.append(*rows_of(rng, 1, 5000))
    assert cache.start == 0  # all 5000 may still attend
    cache.append(*rows_of(rng, 1, 1))
    assert cache.start > 4700 and cache.capacity < 257


@pytest.mark.parametrize("window", [1, 5, 100, 300])
@pytest.mark.parametrize("n", [1, 7, 40])
def test_attention_over_a_windows_cache_gives_the_bits_of_one_call(window, n):
    cache, rng = new_cache(2, window=window), np.random.default_rng(0)
    key, value = rows_of(rng, 2, 600)
    query = rng.standard_normal(key.shape).astype(np.float32)
    short = [560, 600]  # of the second sequence, rows from 560 on are no real ones
    options = {"causal": True, "window": (window - 1, 0)}
    wanted = mha.scaled_dot_product_attention(query, key, value, **options)
    for first in range(0, 600, n):
        rows = slice(first, min(first + n, 600))
        counts = np.clip(np.array(short[::-1]) - first, 0, rows.stop - first)
        before = cache.lengths
        cache.append(key[:, :, rows], value[:, :, rows], counts)
        got = mha.scaled_dot_product_attention(
            query[:, :, rows], cache.key, cache.value, key_lengths=cache.lengths - cache.start,
            query_offset=before - cache.start, **options)
        for sequence, count in enumerate(counts):
            assert np.array_equal(got[sequence, :, :count],
                                  wanted[sequence, :, rows][:, :count]), (first, sequence)


@pytest.mark.parametrize("forget", [lambda cache: cache.truncate([30, 0, 3]),
                                    lambda cache: cache.reset()])
def test_an_interrupt_leaves_a_cache_whole(forget):
    def filled():
        cache, (key, value) = new_cache(), rows_of(np.random.default_rng(0), 3, 40)
        cache.append(key, value)
        return cache

    def seen_later(cache):
        """Rows of a longest sequence show what is behind the others."""
        before = contents(cache)
        cache.append(*rows_of(np.random.default_rng(1), 3, 20), lengths=[20, 0, 1])
        return before + contents(cache)

    before, after = filled(), filled()
    forget(after)
    wanted = seen_later(before), seen_later(after)
    found = [wanted.index(seen_later(cache)) for cache in interrupts_of(forget, filled)]
    assert found == sorted(found) and set(found) == {0, 1}


def test_types():
    cache = new_cache(1, dtype=np.float64)
    key, value = rows_of(np.random.default_rng(0), 1, 4, np.float64)
    cache.append(key.tolist(), value.astype(np.float32))
    cache.append(np.ones(key.shape, np.int8), value[:, :, ::-1])
    assert cache.dtype == np.float64
    assert np.array_equal(cache.key[:, :, :4], key) and (cache.key[:, :, 4:] == 1).all()
    assert np.array_equal(cache.value[:, :, :4], value.astype(np.float32))
    assert np.array_equal(cache.value[:, :, 4:], value[:, :, ::-1])


def test_appending_itself():
    cache = new_cache(1, capacity=8)
    key, value = rows_of(np.random.default_rng(0), 1, 4)
    cache.append(key, value)
    cache.append(cache.key, cache.value)
    cache.append(cache.key, cache.value)  # which makes it grow
    assert np.array_equal(cache.key, np.concatenate(4 * [key], axis=2))
    assert np.array_equal(cache.value, np.concatenate(4 * [value], axis=2))


def test_attention_reads_it_where_it_is():
    """Behind a shorter sequence's end may stand anything."""
    cache, rng = new_cache(2, capacity=64), np.random.default_rng(0)
    key, value = rows_of(rng, 2, 20)
    cache.append(key, value, [20, 9])
    cache._state.key[1, :, 9:] = cache._state.value[1, :, 9:] = np.nan
    query = rng.standard_normal((2, 4, 6, HEAD_DIM)).astype(np.float32)
    got = mha.scaled_dot_product_attention(query, cache.key, cache.value,
                                           key_lengths=cache.lengths)
    for i, length in enumerate((20, 9)):
        wanted = mha.reference.scaled_dot_product_attention(
            *(array[i:i + 1].astype(float) for array in (query, key[:, :, :length],
                                                         value[:, :, :length])))
        assert np.abs(got[i] - wanted[0]).max() < 2e-6


def test_a_cache_can_be_referred_to_weakly():
    layer = mha.MultiHeadAttention(6, 2)
    for make in (new_cache, lambda: layer.new_cache(1), lambda: layer.new_memory(np.ones((2, 6))),
                 lambda: mha.MultiHeadAttention(6, 2)):
        whole = make()
        reference, dictionary = weakref.ref(whole), weakref.WeakKeyDictionary({whole: 1})
        assert reference() is whole and dictionary[whole] == 1
        del whole
        assert reference() is None and not dictionary


def test_copies_are_apart():
    cache, rng = new_cache(2, window=300, capacity=40), np.random.default_rng(0)
    cache.append(*rows_of(rng, 2, 7), [7, 2])
    before = contents(cache)
    for other in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert contents(other) == before
        other.append(*rows_of(rng, 2, 3))
        other.truncate(1)
        assert contents(cache) == before
    pair = copy.deepcopy([cache, cache])
    assert pair[0] is pair[1]


def test_pickles_hold_what_is_seen_alone():
    cache = new_cache(1, capacity=1000)
    cache.append(*rows_of(np.random.default_rng(0), 1, 1))
    assert len(pickle.dumps(cache)) < 1000


def pickled(**changed):
    cache = new_cache(2)
    cache.append(*rows_of(np.random.default_rng(0), 2, 4))
    return cache.__getstate__() | changed


@pytest.mark.parametrize("state", [
    None, {}, pickled(key=None), pickled(value=np.zeros((2, 2, 3, 5), np.float32)),
    pickled(key=np.zeros((2, 2, 4, 3))), pickled(lengths=[5, 5]), pickled(lengths=[-1, 4]),
    pickled(lengths=[4]), pickled(start=128), pickled(start=-128), pickled(capacity=3),
    pickled(window=0), pickled(more=1), pickled(key=np.zeros((2, 2, 4, 3), "U1")),
    pickled(start=128, lengths=[132, 132]), pickled(lengths=["a", "b"])], ids=str)
def test_a_wrong_pickle_is_refused(state):
    fresh = mha.KVCache.__new__(mha.KVCache)
    with pytest.raises(ValueError, match="state: got one that does not fit together"):
        fresh.__setstate__(state)


def test_repr():
    assert repr(mha.KVCache(2, 8, 64)) == (
        "KVCache(2, 8, 64, capacity=0, dtype=float32, lengths=[0, 0])")
    assert repr(new_cache(1, capacity=9, dtype=float, window=4)) == (
        "KVCache(1, 2, 3, value_head_dim=5, capacity=9, dtype=float64, window=4, lengths=[0])")


def test_what_it_shows_is_read_only():
    cache = new_cache(1)
    for name in ("lengths", "start", "key", "value", "capacity", "window", "batch", "other"):
        with pytest.raises(AttributeError):
            setattr(cache, name, 1)
    with pytest.raises(ValueError, match="read-only"):
        cache.lengths[0] = 5


@pytest.mark.parametrize("capacity", [2**62, 2**80, 10**14])
def test_a_capacity_that_cannot_be_had(capacity):
    with pytest.raises(MemoryError, match=f"capacity: got {capacity} positions.*wanted what fits"):
        mha.KVCache(1, 8, 128, capacity=capacity)


def failing(*_):
    raise MemoryError("capacity: got more, wanted less")


@pytest.mark.parametrize("options", [{}, {"window": 4}])
def test_what_fails_leaves_it_as_it_was(options, monkeypatch):
    cache, rng = new_cache(2, capacity=8, **options), np.random.default_rng(0)
    cache.append(*rows_of(rng, 2, 8), [8, 3])
    key, value = rows_of(rng, 2, 300, np.float64)
    before = contents(cache)
    with monkeypatch.context() as patched:
        patched.setattr(cache_state, "zeros", failing)
        for change in (lambda: cache.append(key, value), lambda: cache.select([0, 1, 1])):
            with pytest.raises(MemoryError):
                change()
            assert contents(cache) == before
    value[-1, -1, 0] = 1e300  # a RuntimeWarning, here an error, after the keys were written
    for counts in (None, [1, 2]):
        with pytest.raises(RuntimeWarning):
            cache.append(key[:, :, :2], value[:, :, :2], counts)
        assert contents(cache) == before
