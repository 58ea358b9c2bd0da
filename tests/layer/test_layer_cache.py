"""Layers with a cache: one call over everything gives the same bits, however it is cut."""

import functools
import signal
import sys

import numpy as np
import pytest
from cached_calls import in_pieces, pieces
from interrupts import interrupts_of
from option_cases import SCORES

import mha
from mha import reference
from mha._functions.options import DEFAULTS
from mha._layer import cache_state, cached_call, kv_cache

LENGTH = 150  # more than one block of keys
LAYERS = [{}, {"num_kv_heads": 2, "head_dim": 40, "value_head_dim": 3}, {"use_bias": False}]


def random_layer(dtype=np.float32, **options):
    layer = mha.MultiHeadAttention(24, 4, dtype=dtype, rng=0, **options)
    rng = np.random.default_rng(0)
    for name, parameter in layer.parameters().items():
        if name.startswith("b"):
            parameter[...] = rng.standard_normal(parameter.shape)
    return layer


def random_x(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal((*shape, 24)).astype(np.float32)


def options_of(name):
    rng = np.random.default_rng(2)
    return {"none": {}, "window": {"window": (20, 0)}, "wide window": {"window": (140, 3)},
            "bias": {"bias": rng.standard_normal((1, 4, LENGTH, LENGTH))},
            "mask": {"mask": rng.random((LENGTH, LENGTH)) < 0.5},
            "gate": {"head_gate": rng.standard_normal(4)},
            "all": {"window": (60, None), "softcap": 3.0, "scale": -0.4,
                    "bias": rng.standard_normal((LENGTH, LENGTH)),
                    "mask": rng.random((2, 1, LENGTH, LENGTH)) < 0.7,
                    "head_gate": rng.standard_normal(4)},
            **{str(scores): scores for scores in SCORES}}[name]


OPTIONS = ["none", "window", "wide window", "bias", "mask", "gate", "all", *map(str, SCORES)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 7, None, LENGTH])
@pytest.mark.parametrize("name", OPTIONS)
def test_any_cut_gives_the_bits_of_one_call(name, size, dtype):
    options, x = options_of(name), random_x(2, LENGTH)
    for changed in LAYERS:
        layer = random_layer(dtype, **changed)
        wanted = layer(x, causal=True, **options)
        got = in_pieces(layer, x, layer.new_cache(2), size, **options)
        assert got.dtype == dtype
        assert np.array_equal(got, wanted)


@pytest.mark.parametrize("size", [1, 7, None])
def test_a_windows_cache_gives_the_same_bits(size):
    """Over several blocks of keys, so that some are dropped; mask and bias lose their columns."""
    layer, x = random_layer().freeze(), random_x(2, 500)
    rng = np.random.default_rng(2)
    for window, more in ((1, {}), (50, {"head_gate": rng.standard_normal(4)}), (130, {}),
                         (50, {"bias": rng.standard_normal((500, 500)),
                               "mask": rng.random((2, 1, 500, 500)) < 0.8})):
        cache = layer.new_cache(2, window=window)
        wanted = layer(x, causal=True, window=(window - 1, 0), **more)
        assert np.array_equal(in_pieces(layer, x, cache, size, **more), wanted)
        assert cache.start > 0
        cache.reset()
        got = in_pieces(layer, x, cache, size, window=(window - 1, None), **more)
        assert np.array_equal(got, wanted)
        narrow = layer(x, causal=True, window=(window // 2, 0))
        cache.reset()
        assert np.array_equal(in_pieces(layer, x, cache, size, window=(window // 2, 0)), narrow)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("window", [None, 30])
def test_a_ragged_batch(padding, window):
    """Three sequences, each with another number of rows in each call, are those three alone."""
    layer, rng = random_layer(num_kv_heads=2), np.random.default_rng(3)
    x, options = random_x(3, 700), {} if window is None else {"window": (window - 1, 0)}
    alone = [layer(one[None], causal=True, return_lse=True, **options) for one in x]
    cache, at = layer.new_cache(3, window=window), np.zeros(3, int)
    for call in range(25):
        n = int(rng.integers(1, 50)) if call % 3 else 1
        counts = rng.integers(0, n + 1, 3)
        rows = np.full((3, n, 24), np.nan, np.float32)
        real = [slice(n - count, None) if padding == "left" else slice(count) for count in counts]
        for i, here in enumerate(real):
            rows[i, here] = x[i, at[i]:at[i] + counts[i]]
        output, weights, lse = layer(rows, cache=cache, lengths=counts, padding=padding,
                                     return_weights=True, return_lse=True)
        for i, here in enumerate(real):
            now = slice(at[i], at[i] + counts[i])
            assert np.array_equal(output[i, here], alone[i][0][0, now])
            assert np.array_equal(lse[i, :, here], alone[i][1][0, :, now])
            others = np.setdiff1d(np.arange(n), np.arange(n)[here])
            assert not output[i, others].any() and not weights[i, :, others].any()
            assert (lse[i, :, others] == -np.inf).all()
        at += counts
        assert cache.lengths.tolist() == at.tolist()
        assert np.isfinite(cache.key).all() and np.isfinite(cache.value).all()
    # Without lengths, from unequal ends.
    output = layer(np.stack([x[i, end:end + 9] for i, end in enumerate(at)]), cache=cache)
    for i, end in enumerate(at):
        assert np.array_equal(output[i], alone[i][0][0, end:end + 9])


def test_after_select_and_truncate():
    layer, x = random_layer(), random_x(3, 60)
    cache = layer.new_cache(3)
    layer(x[:, :40], cache=cache, lengths=[40, 25, 33])
    cache.select([2, 0, 2, 1])
    cache.truncate([33, 20, 10, 25])
    more = random_x(4, 30, seed=5)
    got = np.concatenate([layer(more[:, :1], cache=cache), layer(more[:, 1:], cache=cache)], axis=1)
    for i, (of, length) in enumerate([(2, 33), (0, 20), (2, 10), (1, 25)]):
        whole = np.concatenate([x[of, :length], more[i]])
        assert np.array_equal(got[i], layer(whole, causal=True)[length:])


@pytest.mark.parametrize("window", [None, 20])
def test_weights_and_lse_have_a_column_for_every_position(window):
    layer, x = random_layer(np.float64), random_x(2, 400)
    cache, calls = layer.new_cache(2, window=window), []
    options = {} if window is None else {"window": (window - 1, 0)}
    for begin, end in pieces(400, None, np.random.default_rng(0)):
        output, weights, lse = layer(x[:, begin:end], cache=cache, return_weights=True,
                                     return_lse=True)
        assert weights.shape == (2, 4, end - begin, end)
        calls.append((output, np.pad(weights, [(0, 0)] * 3 + [(0, 400 - end)]), lse))
    got = [np.concatenate(results, axis=axis)
           for results, axis in zip(zip(*calls, strict=True), (1, 2, 2), strict=True)]
    wanted = layer(x, causal=True, return_weights=True, return_lse=True, **options)
    for one, other in zip(got, wanted, strict=True):
        assert np.array_equal(one, other)


def test_against_the_reference():
    layer, x = random_layer(np.float64, num_kv_heads=2), random_x(2, 300)
    got = in_pieces(layer, x, layer.new_cache(2), None, window=(70, 0), softcap=2.0)
    wanted = reference.multi_head_attention(
        *3 * [x.astype(float)], **layer.parameters(), num_heads=4, num_kv_heads=2, causal=True,
        window=(70, 0), softcap=2.0)
    assert np.abs(got - wanted).max() < 1e-13 * np.abs(wanted).max()


def test_one_sequence():
    layer, x = random_layer(), random_x(50)
    wanted = layer(x, causal=True, return_weights=True, return_lse=True)
    cache = layer.new_cache(1)
    first = layer(x[:30], cache=cache)
    rest = layer(x[30:], cache=cache, return_weights=True, return_lse=True)
    assert np.array_equal(np.concatenate([first, rest[0]]), wanted[0])
    assert np.array_equal(rest[1], wanted[1][:, 30:])
    assert np.array_equal(rest[2], wanted[2][:, 30:])
    assert layer(x[:3], cache=cache, lengths=2).shape == (3, 24)
    assert cache.lengths.tolist() == [52]


def test_nothing_to_append():
    layer = random_layer()
    for cache in (layer.new_cache(2), layer.new_cache(2, window=3)):
        assert layer(random_x(2, 0), cache=cache).shape == (2, 0, 24)
        assert not layer(random_x(2, 3), cache=cache, lengths=[0, 0]).any()
        assert cache.lengths.tolist() == [0, 0]


def test_a_narrower_cache():
    """All ways of cutting agree with one call on an empty cache of that type."""
    layer, x = random_layer(np.float64), random_x(2, 90)
    wanted = layer(x, cache=layer.new_cache(2, dtype=np.float32))
    assert wanted.dtype == np.float64
    for size in (1, 7, None):
        cache = layer.new_cache(2, dtype=np.float32)
        assert np.array_equal(in_pieces(layer, x, cache, size), wanted)
    exact = layer(x, causal=True)
    assert 0 < np.abs(wanted - exact).max() < 1e-6 * np.abs(exact).max()


def test_any_input():
    layer, x = random_layer(), np.arange(2 * 5 * 24).reshape(2, 5, 24)
    wanted = layer(x, causal=True)
    for given in (x.tolist(), x.astype(float), x.astype(np.float32)[:, :, ::-1][:, :, ::-1]):
        assert np.array_equal(layer(given, cache=layer.new_cache(2)), wanted)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_memory_is_an_encoders_keys_and_values(frozen):
    layer = random_layer(query_dim=10, key_dim=24, value_dim=11, num_kv_heads=2)
    layer = layer.freeze() if frozen else layer
    rng = np.random.default_rng(4)
    query, value = rng.standard_normal((3, 9, 10)), rng.standard_normal((3, 200, 11))
    key = random_x(3, 200)
    key[1, 170:] = value[1, 170:] = np.nan
    lengths = [200, 170, 0]
    memory = layer.new_memory(key, value, lengths, key_positions=np.arange(200))
    options = {"softcap": 2.0, "return_weights": True, "return_lse": True,
               "head_gate": rng.standard_normal(4), "mask": rng.random((9, 200)) < 0.8}
    wanted = layer(query, key, value, key_lengths=lengths, **options)
    for one, other in zip(layer(query, cache=memory, **options), wanted, strict=True):
        assert np.array_equal(one, other)
    decoded = np.concatenate([
        layer(query[:, i:i + 1], cache=memory, **options | {"mask": options["mask"][i:i + 1]})[0]
        for i in range(9)], axis=1)
    assert np.array_equal(decoded, wanted[0])
    ragged = layer(query, cache=memory, lengths=[9, 2, 5], padding="left")
    assert np.array_equal(ragged[1, 7:], layer(query, cache=memory)[1, 7:])
    assert not ragged[1, :7].any()
    memory.select([1, 1])
    beams = layer(query[:2], cache=memory)
    whole = layer(query[:2], key[[1, 1]], value[[1, 1]], key_lengths=[170, 170])
    assert np.array_equal(beams, whole)


def test_a_memory_of_one_sequence():
    layer, key = random_layer(), random_x(30)
    memory = layer.new_memory(key, key_lengths=20)
    query = random_x(5, seed=7)
    assert np.array_equal(layer(query, cache=memory), layer(query, key, key_lengths=20))


def fails_before(core, *arguments, **options):
    raise KeyboardInterrupt


def fails_after(core, *arguments, **options):
    """After all steps: the rows are written, and nobody has seen them."""
    core(*arguments, **options)
    raise KeyboardInterrupt


@pytest.mark.parametrize("at", [0, 1, 2])  # writes: nothing, the keys, all
@pytest.mark.parametrize("options", [{}, {"window": 8}, {"capacity": 500}])
def test_what_fails_leaves_the_cache_as_it_was(at, options, monkeypatch):
    def interrupted(*arguments):
        yield from list(cache_state.writes(*arguments))[:at]
        raise KeyboardInterrupt

    layer, x = random_layer(), random_x(2, 400)
    cache, other = layer.new_cache(2, **options), layer.new_cache(2, **options)
    for one in (cache, other):
        layer(x[:, :200], cache=one, lengths=[200, 190])
    before = repr(cache), cache.key.tobytes(), cache.value.tobytes(), cache.start
    for lengths in (None, [3, 200]):
        with monkeypatch.context() as patched:
            patched.setattr(kv_cache, "writes", interrupted)
            with pytest.raises(KeyboardInterrupt):
                layer(x[:, 200:], cache=cache, lengths=lengths)
            with pytest.raises(ValueError, match="head_gate"):
                layer(x[:, 200:], cache=cache, lengths=lengths, head_gate=[1, 2])
        for failing in (fails_before, fails_after):
            with monkeypatch.context() as patched:
                core = functools.partial(failing, layer._state.core)
                patched.setattr(layer, "_state", layer._state._replace(core=core))
                with pytest.raises(KeyboardInterrupt):
                    layer(x[:, 200:], cache=cache, lengths=lengths)
        assert (repr(cache), cache.key.tobytes(), cache.value.tobytes(), cache.start) == before
    assert np.array_equal(layer(x[:, 200:], cache=cache), layer(x[:, 200:], cache=other))


def interrupted_at(name, call):
    """The call, interrupted as it enters a Python function of this name."""
    def trace(frame, event, argument):
        if frame.f_code.co_name == name:
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(before)


def test_an_interrupted_call_has_not_appended():
    layer, x = random_layer(), random_x(2, 5)

    def filled():
        cache = layer.new_cache(2, window=8)
        layer(x, cache=cache)
        return cache

    def contents(cache):
        return repr(cache), cache.key.tobytes(), cache.value.tobytes()

    *interrupted, last = interrupts_of(lambda cache: layer(x[:, :1], cache=cache), filled, "call")
    assert len(interrupted) > 5
    assert {contents(cache) for cache in interrupted} == {contents(filled())}
    assert last.lengths.tolist() == [6, 6]


def test_an_interrupt_before_the_last_step_leaves_zeros_behind():
    layer, x = random_layer(), random_x(2, 3)
    cache = layer.new_cache(2, capacity=9)
    layer(x, cache=cache, lengths=[3, 1])
    before = cache.lengths.tolist(), cache.key.tobytes(), cache.value.tobytes()
    heads = np.ones((2, *cache.key.shape[1:2], 3, cache.head_dim), np.float32)
    values = np.ones((*heads.shape[:3], cache.value_head_dim), np.float32)
    for call in (lambda: layer(x, cache=cache, lengths=[0, 2]),
                 lambda: cache.append(heads, values, [0, 2])):
        interrupted_at("_publish", call)
        assert (cache.lengths.tolist(), cache.key.tobytes(), cache.value.tobytes()) == before


class Changing:
    """An array whose conversion changes the cache."""

    def __init__(self, array, change):
        self.array, self.change = array, change

    def __array__(self, dtype=None, copy=None):
        self.change()
        return self.array


@pytest.mark.parametrize("name", ["head_gate", "alibi", "sinks", "positions"])
def test_arguments_that_change_the_cache_do_so_before_the_call(name):
    layer, x = random_layer(rotary=mha.Rotary(6)), random_x(1, 6)
    array = np.arange(5, 7) if name == "positions" else np.ones(layer.num_heads, np.float32)
    cache, other = layer.new_cache(1), layer.new_cache(1)
    for one in (cache, other):
        layer(x[:, :3], cache=one)
    changing = Changing(array, lambda: layer(x[:, :2], cache=cache))
    got = layer(x[:, 3:5], cache=cache, **{name: changing})
    layer(x[:, :2], cache=other)
    assert np.array_equal(got, layer(x[:, 3:5], cache=other, **{name: array}))
    assert cache.lengths == other.lengths == [7]
    assert np.array_equal(cache.key, other.key)


def test_a_cache_that_another_call_changes_is_said_to_be(monkeypatch):
    layer, x = random_layer(), random_x(1, 6)
    cache = layer.new_cache(1, capacity=20)

    def placed(*arguments):
        monkeypatch.undo()
        layer(x, cache=cache)
        return cached_call._placed(*arguments)

    monkeypatch.setattr(cached_call, "_placed", placed)
    with pytest.raises(RuntimeError, match="cache: got changed by one call in the midst of anoth"):
        layer(x[:, :2], cache=cache)
    assert cache.lengths == [6]


def test_a_memory_with_what_a_layer_switches_off():
    layer = random_layer(window=(1, 1), alibi=[0.5, 0.2, 0.1, 0.0])
    query, key = random_x(2, 3), random_x(2, 9, seed=1)
    memory, off = layer.new_memory(key), {"window": (None, None), "alibi": np.zeros(4)}
    assert np.array_equal(layer(query, cache=memory, **off), layer(query, key, **off))


def test_ctrl_c_in_the_middle_of_a_call():
    layer, x = random_layer(), random_x(1, 20_000)
    cache = layer.new_cache(1)
    layer(x[:, :50], cache=cache)
    before = cache.key.tobytes(), cache.value.tobytes()

    def call_until_interrupted():
        while True:
            layer(x, cache=cache)
            cache.truncate(50)

    interrupt = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            call_until_interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, interrupt)
    cache.truncate(50)  # where it came between the two
    assert (cache.key.tobytes(), cache.value.tobytes()) == before


def test_a_wrong_option_is_found_before_the_cache_changes():
    layer, x = random_layer(), random_x(2, 5)
    cache = layer.new_cache(2)
    for wrong in ({"bias": np.ones((5, 5), bool)}, {"head_gate": [1.0]}, {"scale": np.nan}):
        with pytest.raises((ValueError, TypeError)):
            layer(x, cache=cache, **wrong)
        assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_same_bits_at_any_thread_count(threads):
    layer, x = random_layer(), random_x(2, 300)
    wanted = layer(x, causal=True)
    with mha.threads(threads):
        assert np.array_equal(in_pieces(layer, x, layer.new_cache(2), None), wanted)


def test_the_core_takes_a_cache_that_fits_alone():
    """Rows that are appended must show in what attention reads."""
    layer, x = random_layer(), random_x(2, 3)
    good = {"cached_key": np.zeros((2, 4, 9, 6), np.float32),
            "cached_value": np.zeros((2, 4, 9, 6), np.float32), "append": lambda key, value: None}

    def call(**changed):
        return mha._core.multi_head_attention(x, x, x, *layer._state.call, None, DEFAULTS,
                                              **good | changed)

    assert call().shape == x.shape
    for name, array in ((name, array) for name in ("cached_key", "cached_value") for array in (
            np.zeros((2, 4, 9, 6)), np.zeros((2, 4, 9, 6), ">f4"), np.zeros((2, 4, 9, 7), "f4"),
            np.zeros((2, 3, 9, 6), "f4"), np.zeros((1, 4, 9, 6), "f4"), np.zeros((4, 9, 6), "f4"))):
        with pytest.raises(ValueError, match=name):
            call(**{name: array})
    with pytest.raises(ValueError, match="cached_value: got length 8, wanted 9"):
        call(cached_value=np.zeros((2, 4, 8, 6), np.float32))
    with pytest.raises(ValueError, match="cached_key: got one with save"):
        call(save=True)
    with pytest.raises(TypeError, match="not callable"):
        call(append=3)
