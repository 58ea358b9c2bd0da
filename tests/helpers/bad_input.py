"""Bad calls as rows of a table, and how one is checked; used by the test_bad_input files."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

import mha

V, T, M = ValueError, TypeError, MemoryError
HUGE = 2**45  # rows that no machine has the memory for


def f(*shape):
    return np.ones(shape, np.float32)


def number(*shape, dtype=np.float32):
    """One number broadcast to a shape."""
    return np.broadcast_to(dtype(1), shape)


def fresh_arrays():
    """The good arguments of every function, made anew for each case."""
    rng = np.random.default_rng(0)

    def random(*shape):
        return rng.random(shape, np.float32)

    layer = mha.MultiHeadAttention(12, 4, rng=0)
    cache, windowed = layer.new_cache(2), layer.new_cache(2, window=10)
    layer(random(2, 5, 12), cache=cache, lengths=[5, 2])
    for x in np.split(random(2, 300, 12), [299], axis=1):  # the last call drops what is not needed
        layer(x, cache=windowed)
    return SimpleNamespace(
        cache=cache, windowed=windowed, memory=layer.new_memory(random(2, 5, 12), None, [5, 3]),
        query=random(2, 4, 5, 8), key=random(2, 2, 6, 8), value=random(2, 2, 6, 3),
        out=random(2, 4, 5, 3), lse=random(2, 4, 5), row=random(5, 8),
        readonly=np.frombuffer(bytes(480), np.float32).reshape(2, 4, 5, 3),
        x=random(2, 5, 12), W=random(12, 12), b=random(12),
        W_q=random(8, 7), W_k=random(8, 7), w_v=random(7), w_k=random(8),
        layer=layer, frozen=mha.MultiHeadAttention(12, 4, rng=0).freeze())


def contents(a):
    """Every array bit for bit, with its shape, strides and flags."""
    arrays = {name: array for name, array in vars(a).items() if isinstance(array, np.ndarray)}
    for owner in ("layer", "frozen"):
        arrays |= {owner + name: array for name, array in getattr(a, owner).parameters().items()}
    for owner in ("cache", "windowed", "memory"):
        cache = getattr(a, owner)
        arrays |= {owner + name: getattr(cache, name) for name in ("key", "value", "lengths")}
        arrays[owner] = np.array([cache.start, cache.capacity, cache.nbytes])
    return {name: (array.tobytes(), array.dtype, array.shape, array.strides, str(array.flags))
            for name, array in arrays.items()}


def answer():
    """What a good call computes; the same after every bad one."""
    a = fresh_arrays()
    return (mha.scaled_dot_product_attention(a.query, a.key, a.value, causal=True).tobytes()
            + a.layer(a.x).tobytes())


GOOD_ANSWER = answer()


def check(case):
    """Runs one row: (label, call, type, argument, what came, what was wanted)."""
    _, call, error, name, came, wanted = case
    a = fresh_arrays()
    before = contents(a)
    threads = mha.get_num_threads()
    with pytest.raises(error) as raised:
        call(a)
    message = str(raised.value)
    assert type(raised.value) is error
    said = re.fullmatch(r"([\w, ]+?): got (.+?), wanted (.+)", message, re.DOTALL)
    assert said, f"not of the form 'name: got ..., wanted ...': {message}"
    assert said[1] == name
    assert came in message and wanted in message.split("wanted", 1)[1], message
    assert contents(a) == before
    assert mha.get_num_threads() == threads
    assert answer() == GOOD_ANSWER


def row(call, name, value, error, came, wanted, /, **others):
    """`call` with one bad argument, given as it is or as a function of the fresh arrays."""
    def bad_call(a):
        return call(a, **{name: value(a) if is_function(value) else value}, **others)

    label = f"{call.__name__}-{name}-{came}".replace(" ", "_")
    return label, bad_call, error, name, came, wanted


def is_function(value):
    return getattr(value, "__name__", "") == "<lambda>"


def rows(call, name, values, /, **others):
    """A row for each (value, type, what came, what was wanted)."""
    return [row(call, name, *value, **others) for value in values]


def labels(table):
    return [f"{index}-{case[0]}" for index, case in enumerate(table)]


class Raises:
    """An argument whose conversion raises."""

    def __init__(self, error):
        self.error = error

    def __array__(self, dtype=None, copy=None):
        raise self.error

    def __index__(self):
        raise self.error

    def __float__(self):
        raise self.error


REAL = "float32, float64 or integers"
TOO_LARGE = "one that fits in memory"
NOT_MADE = "an array, but NumPy could not make one: "
WRONG_ARRAYS = [
    (None, T, "None", "an array"),
    ("text", T, "an array of <U4", REAL),
    ([[1.0], [1.0, 2.0]], V, "list", NOT_MADE),
    (1j * f(2, 4, 5, 8), T, "an array of complex64", REAL),
    (f(2, 4, 5, 8).astype(object), T, "an array of object", REAL),
    (Raises(ValueError("boom")), V, "Raises", NOT_MADE + "boom"),
    (b"bytes", T, "an array of |S5", REAL),
    (f(2, 4, 5, 8).astype(np.longdouble), T, f"an array of {np.dtype(np.longdouble)}", REAL),
    (np.zeros((2, 4, 5, 8), [("real", "f4")]), T, "an array of [('real', '<f4')]", REAL),
    (np.zeros((2, 4, 5, 8), "M8[s]"), T, "an array of datetime64[s]", REAL),
    (np.zeros((2, 4, 5, 8), "m8[s]"), T, "an array of timedelta64[s]", REAL),
    ({"a": 1}, T, "an array of object", REAL),
    (Raises(TypeError("boom")), T, "Raises", NOT_MADE + "boom"),
]
WRONG_NUMBERS = [
    ("1", T, "str", "a number"),
    (True, T, "bool", "a number"),
    (1j, T, "complex", "a number"),
    (np.array("1.5"), T, "numpy.ndarray", "a number"),
    (10**400, V, "an int too large for a float", "a finite number"),
    (f(1), T, "numpy.ndarray", "a number"),
    (np.bool_(True), T, "numpy.bool", "a number"),
    ([1.0], T, "list", "a number"),
    (np.array(1j), T, "numpy.ndarray", "a number"),
    (np.datetime64(1, "s"), T, "numpy.datetime64", "a number"),
    (np.str_("1.5"), T, "numpy.str_", "a number"),
    (Raises(TypeError()), T, "Raises", "a number"),
]
WRONG_INTS = [
    ("1", T, "str", "an int"),
    (1.0, T, "float", "an int"),
    (True, T, "bool", "an int"),
    (np.bool_(True), T, "bool", "an int"),
    (f(1), T, "ndarray", "an int"),
    (np.float32(1), T, "float32", "an int"),
    (1j, T, "complex", "an int"),
    (Raises(TypeError()), T, "Raises", "an int"),
]
WRONG_FLAGS = [
    (1, T, "int", "True or False"),
    (None, T, "NoneType", "True or False"),
    ("yes", T, "str", "True or False"),
    (f(1), T, "ndarray", "True or False"),
]
WRONG_RNGS = [
    ("7", T, "str", "None, an int or a numpy.random.Generator"),
    (True, T, "bool", "None, an int or a numpy.random.Generator"),
    (7.0, T, "float", "None, an int or a numpy.random.Generator"),
    (np.random.RandomState(0), T, "RandomState", "a numpy.random.Generator"),
    (-1, V, "-1", "an int in [0, 2**64)"),
    (2**64, V, str(2**64), "an int in [0, 2**64)"),
]
