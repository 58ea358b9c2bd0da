"""What is copied or cast is so in pieces, between which signal handlers run, with NumPy's bits."""

import copy
import pickle
import signal
import sys
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import mha
from mha import _core
from mha._base import dtypes as half_precision
from mha._base import pieces
from mha._layer import cache_state

RANDOM = np.random.default_rng(0)


# The core's arguments and results.

def handled_during(call):
    """What the call gives, and how often a handler ran meanwhile, of a signal that comes again and
    again. NumPy's own copy of an array lets it run once, behind its end."""
    count = [0]

    def handler(number, frame):
        count[0] += 1

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
    try:
        count[0] = 0
        result = call()
        return result, count[0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def narrow(dtype, *shape):
    return RANDOM.integers(-100, 100, shape).astype(dtype)


X = narrow(np.int8, 4000, 4000)
FLOATS, SWAPPED = X.astype(np.float32), X.astype(">f4")
HALVES = half_precision.rounded(FLOATS, half_precision.RAW_BFLOAT16)
SMALL = X.reshape(4, 1000, 4000).astype(np.float16)
ONES = np.ones((1, 4000), np.float32)
# Each converts 16 million numbers, and computes with them as little as it can.
CONVERSIONS = {
    "x of int8": lambda: mha.linear(X, np.ones((4000, 1))),
    "x swapped": lambda: mha.linear(SWAPPED, np.ones((4000, 1), np.float32)),
    "a weight of int8": lambda: mha.linear(np.ones((1, 4000)), X),
    "a bias of int16": lambda: mha.scaled_dot_product_attention(
        np.ones((4000, 1)), np.ones((4000, 1)), np.ones((4000, 1)), bias=X),
    "heads of float16": lambda: mha.merge_heads(SMALL),
    "a bias of halves without a type": lambda: mha.scaled_dot_product_attention(
        ONES.T, ONES.T, ONES.T, bias=HALVES),
    "rounding": lambda: _core.round_numbers(FLOATS, np.empty(FLOATS.shape, np.float16)),
}


@pytest.mark.skipif(sys.platform == "win32", reason="no setitimer")
@pytest.mark.parametrize("name", CONVERSIONS)
def test_signal_handlers_run_between_the_pieces_of_a_conversion(name):
    call = CONVERSIONS[name]
    wanted = call()
    got, handled = handled_during(call)
    assert wanted is got is None or np.array_equal(got, wanted)
    assert handled > 10  # NumPy in one go: at most 6


@pytest.mark.skipif(sys.platform == "win32", reason="no setitimer")
def test_a_handler_may_raise_between_the_pieces():
    """What it raises comes out as it is, whatever NumPy's own errors become."""
    def handler(number, frame):
        raise MemoryError("of the handler")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3e-3)
        with pytest.raises(MemoryError, match=r"^of the handler$"):
            CONVERSIONS["x of int8"]()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Arrays by columns, of numbers that are not cast: the core copies them, and asks for signals.

def attend_by_columns(queries=FLOATS.T, threads=1):
    with mha.threads(threads):
        return mha.scaled_dot_product_attention(queries, ONES, ONES[:, :1])


@pytest.mark.skipif(sys.platform == "win32", reason="no setitimer")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_handler_may_raise_in_the_middle_of_a_copy_by_columns(threads):
    class OfHandlerError(Exception):
        pass

    def handler(number, frame):
        raise OfHandlerError

    wanted = attend_by_columns(np.ascontiguousarray(FLOATS.T))
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3e-3)
        with pytest.raises(OfHandlerError):
            attend_by_columns(threads=threads)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert np.array_equal(attend_by_columns(threads=threads), wanted)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64,
                                   "datetime64[s]", "S4", "V8"])
@pytest.mark.parametrize("axes", [(0, 1, 3, 2), (3, 1, 0, 2), (1, 3, 2, 0)])
def test_merging_heads_by_columns_of_any_type(axes, dtype):
    """Large ones and small ones, and addresses that are no multiple of a number's size."""
    for shape in ((2, 3, 5, 6), (2, 4, 70, 300)):
        numbers = np.arange(np.prod(shape)).reshape(shape) % 999
        heads = np.ascontiguousarray(numbers.astype("S4" if dtype == "V8" else dtype).astype(dtype)
                                     .transpose(axes)).transpose(np.argsort(axes))
        raw = np.zeros(heads.nbytes + 4, np.int8)[4:]
        raw[:] = np.ascontiguousarray(heads.transpose(axes)).view(np.int8).ravel()
        odd = raw.view(heads.dtype).reshape(heads.transpose(axes).shape)
        wanted = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(shape[0], shape[2], -1)
        for given in (heads, odd.transpose(np.argsort(axes))):
            assert mha.merge_heads(given).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("order", ["C", "F", "K", "A"])
@pytest.mark.parametrize(("of", "to"), [
    (np.int8, np.float64), (np.float32, np.float32), (">f8", np.float32), (np.float16, np.float64),
    (ml_dtypes.bfloat16, np.float32), (np.float64, np.float16)])
def test_a_copy_is_numpys(of, to, order):
    whole = RANDOM.standard_normal((3, 500, 700)).astype(of)
    for array in (whole, whole.T, whole[:, ::-2], whole.swapaxes(0, 1), whole[1:2, 3:4],
                  np.broadcast_to(whole[:1], whole.shape)):
        got, wanted = pieces.copied(array, to, order), array.astype(to, order)
        assert got.dtype == wanted.dtype and got.strides == wanted.strides
        assert got.tobytes() == wanted.tobytes()
        assert not np.may_share_memory(got, array)


@pytest.mark.parametrize("shape", [(), (0, 5), (3,), (1, 2000), (2000, 1), (7, 1, 300), (40, 50)])
def test_pieces_cover_all_once_and_none_is_large(shape, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 1000)
    for order in "CF":
        array = np.zeros(shape, np.float32, order)
        for piece in pieces.pieces(array, 8):
            array[piece] += 1
            assert array[piece].size <= 125
        assert (array == 1).all()


# Layers and caches.

class Counting:
    """itertools for mha._base.pieces, which counts the pieces of what is cut."""

    def __init__(self):
        self.count = 0

    def product(self, *ranges):
        for where in np.ndindex(*map(len, ranges)):
            self.count += 1
            yield tuple(slices[i] for slices, i in zip(ranges, where, strict=True))


def counted(call, monkeypatch):
    """What the call gives, and how many pieces of 256 bytes it took."""
    counting = Counting()
    with monkeypatch.context() as patched:
        for module in (pieces, cache_state, half_precision):
            patched.setattr(module, "FEW", 16)
        for module in (pieces, cache_state):
            patched.setattr(module, "PIECE", 256)
        patched.setattr(pieces, "itertools", counting)
        return call(), counting.count


def layer(dtype=np.float32, **options):
    return mha.MultiHeadAttention(32, 4, rng=0, dtype=dtype, **options)


def numbers_of(owner):
    """All that a layer or a cache holds, bit by bit; or arrays by name."""
    if isinstance(owner, mha.KVCache):
        return owner.lengths.tolist(), owner.key.tobytes(), owner.value.tobytes()
    held = owner if isinstance(owner, dict) else owner.parameters()
    return {name: (array.dtype, array.shape, array.strides, array.tobytes())
            for name, array in held.items()}


def cache(dtype=np.float32, window=None, lengths=(40, 40)):
    made = mha.KVCache(2, 2, 8, dtype=dtype, window=window)
    made.append(*np.linspace(-9, 9, 2560).reshape(2, 2, 2, 40, 8), lengths)
    return made


def appended(dtype, counts=None, **options):
    made = cache(dtype, **options)
    made.append(*np.linspace(-8, 7, 1024).reshape(2, 2, 2, 16, 8), counts)
    return made


def after(call, owner):
    call(owner)
    return owner


HELD, STATE = layer(), layer().to_state("pytorch")
COPIES = {  # and the bytes of what comes out
    "new": (layer, 16384), "new of halves": (partial(layer, np.float16), 16384),
    "new of doubles": (partial(layer, np.float64), 32768),
    "astype": (lambda: HELD.astype(np.float64), 32768),
    "astype to halves": (lambda: HELD.astype(np.float16), 8192),
    "from halves": (lambda: layer(ml_dtypes.bfloat16).astype(np.float32), 16384),
    "freeze": (lambda: after(lambda new: new.freeze(), layer()), 32768),
    "unfreeze": (lambda: layer().freeze().unfreeze(), 49152),
    "prune": (lambda: layer().prune_heads([1]), 28672),
    "load": (lambda: after(lambda new: new.load_parameters(HELD.astype(float).parameters()),
                           layer()), 49152),
    "deep copy": (lambda: copy.deepcopy(HELD), 16384),
    "to state": (lambda: HELD.to_state("pytorch"), 16384),
    "from state": (lambda: mha.MultiHeadAttention.from_state(STATE, "pytorch", num_heads=4), 16384),
    **{f"{name} of {np.dtype(dtype)}": (call, 2048 * np.dtype(dtype).itemsize)
       for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
       for name, call in {
           "append": partial(appended, dtype),
           "append with a window": partial(appended, dtype, window=3),
           "select": lambda dtype=dtype: after(lambda new: new.select([1, 0, 1]), cache(dtype)),
           "copy": lambda dtype=dtype: copy.copy(cache(dtype)),
           "pickle": lambda dtype=dtype: pickle.loads(pickle.dumps(cache(dtype))),
       }.items()},
}


@pytest.mark.parametrize("name", COPIES)
def test_layers_and_caches_are_copied_in_pieces(name, monkeypatch):
    call, size = COPIES[name]
    wanted = numbers_of(call())
    got, count = counted(call, monkeypatch)
    assert numbers_of(got) == wanted
    assert count >= size // 256


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("counts", [None, [16, 0], [3, 9]])
def test_appending_to_unequal_lengths_in_pieces(dtype, counts, monkeypatch):
    call = partial(appended, dtype, counts, lengths=(40, 13))
    assert numbers_of(counted(call, monkeypatch)[0]) == numbers_of(call())


@pytest.mark.parametrize("lengths", [(40, 40), (40, 13)])
def test_appending_views_of_itself_in_pieces(lengths, monkeypatch):
    def call():
        made = mha.KVCache(2, 2, 8, capacity=200)
        made.append(*np.linspace(-9, 9, 2560).reshape(2, 2, 2, 40, 8), lengths)
        made.append(made.key, made.value)
        return made

    assert numbers_of(counted(call, monkeypatch)[0]) == numbers_of(call())
