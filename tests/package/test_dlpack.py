"""bfloat16 by DLPack, of which NumPy knows nothing: taken without a copy, freed once, checked."""

import gc
import subprocess
import sys

import numpy as np
import pytest
from dlpack_capsules import Bfloat16Tensor, ForgedTensor, LikeTorch, Plain, Versioned
from half_types import BFLOAT16, same_bits

import mha
from mha import _core
from mha._base.arguments import as_array

KINDS = [(Bfloat16Tensor, Plain), (Bfloat16Tensor, Versioned), (LikeTorch, Plain),
         (LikeTorch, Versioned)]


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0].__name__} {kind[1].__name__}")
def tensor_of(request):
    made, kind = request.param
    return lambda halves, **changes: made(halves, kind, **changes)


def random_halves(*shape, seed=0):
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return numbers.astype(BFLOAT16)


LAYOUTS = [lambda x: x, lambda x: x[::2], lambda x: x[::-1, 1:-2], lambda x: x.T,
           lambda x: x[:0], lambda x: x[:, None, :3], lambda x: np.broadcast_to(x[:1], x.shape),
           lambda x: x[1, 2:3].reshape(())]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_arrays_are_views(tensor_of, layout):
    halves = LAYOUTS[layout](random_halves(7, 9))
    tensor = tensor_of(halves)
    for convert in (as_array, _core.as_array):
        array = convert(tensor, "x")
        assert array.dtype == BFLOAT16 and same_bits(array, halves)
        assert not array.flags.writeable
        assert array.size == 0 or array.ctypes.data == halves.ctypes.data
        assert tensor.deleted == tensor.taken - 1
        part = array[..., :1] if array.ndim else array.view()
        del array
        gc.collect()
        assert tensor.deleted == tensor.taken - 1  # the part keeps it
        del part
        gc.collect()
        assert tensor.deleted == tensor.taken


def test_without_strides(tensor_of):
    halves = random_halves(3, 4)
    assert same_bits(as_array(tensor_of(halves, strides=None), "x"), halves)
    offset = tensor_of(halves, byte_offset=8, shape=[2, 4], strides=None)
    assert same_bits(as_array(offset, "x"), halves.ravel()[4:].reshape(2, 4))


def test_wherever_arrays_are_taken(tensor_of):
    """Functions, the layer, its parameters, caches: as with arrays of ml_dtypes, freed after."""
    made = taken_everywhere(tensor_of)
    gc.collect()
    assert all(tensor.deleted == tensor.taken > 0 for tensor in made)


def taken_everywhere(tensor_of):
    made = []

    def given(array):
        made.append(tensor_of(array))
        return made[-1]

    query, x, weight = random_halves(2, 3, 5, 8), random_halves(2, 3, 8), random_halves(8, 8)
    layer = mha.MultiHeadAttention(8, 2, dtype=BFLOAT16, rng=0)
    rotary = mha.Rotary(4)
    cases = [
        (lambda q: mha.scaled_dot_product_attention(q, q, q), query),
        (lambda q: mha.scaled_dot_product_attention_varlen(q, q, q, [0, 2]), x),
        (lambda w: mha.linear(x, w), weight), (lambda rows: mha.linear(rows, weight), x),
        (lambda w: mha.additive_attention(x, x, x, w, weight, weight[0]), weight),
        (rotary, query), (mha.merge_heads, query), (lambda a: mha.split_heads(a, 2), x),
        (lambda a: mha.merge_attention([a, a], [np.zeros((2, 3), np.float32)] * 2)[0], x),
        (layer, x), (lambda a: layer(a, cache=layer.new_cache(2)), x),
        (lambda a: layer(x, cache=layer.new_memory(a)), x),
        (lambda w: mha.multi_head_attention(x, x, x, w, w, w, w, num_heads=2), weight)]
    for function, array in cases:
        assert same_bits(function(given(array)), function(array))
    wide = mha.MultiHeadAttention(8, 2)
    assert np.array_equal(wide(given(x)), wide(x.astype(np.float32)))
    wide(given(x), cache=wide.new_cache(2))
    layer.W_q = given(weight)
    assert same_bits(layer.W_q, weight)
    layer.load_parameters({name: given(parameter.copy())
                           for name, parameter in layer.parameters().items()})
    for dtype in (BFLOAT16, np.float32, np.float64):
        cache = mha.KVCache(2, 3, 8, dtype=dtype)
        cache.append(given(query), given(query))
        assert np.array_equal(cache.key.astype(np.float64), query.astype(np.float64))
    return made


def test_the_way_back_keeps_it(tensor_of):
    tensor = tensor_of(random_halves(6, 8))
    output, pullback = mha.scaled_dot_product_attention_vjp(tensor, tensor, tensor)
    assert pullback(output).query.dtype == BFLOAT16
    assert tensor.taken - tensor.deleted == 1  # of an object that stands three times
    del pullback
    gc.collect()
    assert tensor.taken == tensor.deleted
    assert all(sys.getrefcount(capsule) == 3 for capsule in tensor.capsules)  # the list's, and ours


HALVES = np.ones((3, 4), np.uint16)
HOSTILE = {
    "2 device": {"device": 2}, "device": {"device": -1}, "negative axes": {"axes": -1},
    "many axes": {"axes": 2**31 - 1}, "33 axes": {"axes": 33}, "no shape": {"shape": None},
    "negative shape": {"shape": [3, -4]},
    "lowest shape": {"shape": [-2**63, 1]}, "huge shape": {"shape": [2**62, 2**62]},
    "wrapping shape": {"shape": [2**32, 2**32]}, "beyond": {"shape": [2**62, 1]},
    "huge behind nothing": {"shape": [0, 2**63 - 1]},
    "no data": {"data": None}, "no data but an offset": {"data": None, "byte_offset": 64},
    "huge strides": {"strides": [2**62, 1]}, "lowest strides": {"strides": [-2**63, 1]},
    "lowest bytes": {"strides": [-2**62, 1]}, "reach": {"strides": [2**61, 2**61]},
    "far strides": {"strides": [2**56, 1]}, "before all memory": {"strides": [-2**50, 1]},
    "far offset": {"byte_offset": 2**63}, "offset of 2^57": {"byte_offset": 2**57},
    "odd offset": {"byte_offset": 1}, "huge offset": {"byte_offset": 2**64 - 2},
    "odd data": {"data": HALVES.ctypes.data + 1}, "version": {"version": (2, 0)},
    "version 0": {"version": (0, 8)}}


def check_is_refused(tensor):
    for call in (lambda: mha.linear(tensor, np.ones((4, 2), np.float32)),
                 lambda: as_array(tensor, "x")):
        with pytest.raises(ValueError, match=r"x: got .* DLPack"):
            call()
    assert tensor.capsules and tensor.taken == tensor.deleted == 0


@pytest.mark.thorough
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_capsules(tensor_of, case):
    tensor = tensor_of(HALVES, **HOSTILE[case])
    if case.startswith("version") and tensor.kind is Plain:
        return
    check_is_refused(tensor)
    gc.collect()
    assert tensor.taken == tensor.deleted == 0


NUMPYS_TYPES = [np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64, np.uint8,
                np.uint16, np.uint32, np.uint64, bool]


@pytest.mark.parametrize("kind", [Plain, Versioned])
@pytest.mark.parametrize("dtype", NUMPYS_TYPES)
def test_hostile_capsules_of_other_types(dtype, kind):
    """Of objects that offer nothing else: NumPy would take them unchecked."""
    for case, changes in HOSTILE.items():
        if not (case.startswith("version") and kind is Plain) and not (
                case.startswith("odd") and np.dtype(dtype).itemsize == 1):
            check_is_refused(ForgedTensor(np.ones((3, 4), dtype), kind, **changes))


@pytest.mark.parametrize("kind", [Plain, Versioned])
@pytest.mark.parametrize("dtype", NUMPYS_TYPES)
def test_arrays_of_other_types_are_views(dtype, kind):
    numbers = (10 * np.random.default_rng(0).standard_normal((7, 9))).astype(dtype)
    for layout in LAYOUTS:
        array = layout(numbers)
        tensor = ForgedTensor(array, kind)
        taken = as_array(tensor, "x")
        assert taken.dtype == dtype and np.array_equal(taken, array)
        assert not taken.flags.writeable
        assert taken.size == 0 or taken.ctypes.data == array.ctypes.data
        assert (tensor.taken, tensor.deleted) == (1, 0)
        del taken
        assert (tensor.taken, tensor.deleted) == (1, 1)


@pytest.mark.parametrize("device", [3, 11, 13])
def test_memory_that_the_cpu_shares(tensor_of, device):
    """Of CUDA and ROCm, as NumPy takes it."""
    assert same_bits(as_array(tensor_of(HALVES, device=device), "x"), HALVES.view(BFLOAT16))


@pytest.mark.parametrize("change", [
    {"lanes": 0}, {"lanes": 2}, {"bits": 0}, {"bits": 4}, {"bits": 128}, {"code": 3},
    {"code": 5, "bits": 64}, {"code": 7, "bits": 8}, {"code": 17, "bits": 4}, {"code": 255},
    {"code": 4}, {"code": 4, "bits": 8}], ids=str)
def test_types_that_are_not_taken(change):
    tensor = ForgedTensor(np.ones((3, 4), np.float32), **change)
    for call in (lambda: mha.linear(tensor, np.ones((4, 2), np.float32)),
                 lambda: as_array(tensor, "x")):
        with pytest.raises(TypeError, match=r"x: got elements of DLPack's type \d+ of \d+ bits"):
            call()
    assert tensor.taken == 0


def test_a_capsule_that_somebody_took():
    class Twice(ForgedTensor):
        def __dlpack__(self, **options):
            return self.capsules[0] if self.capsules else super().__dlpack__(**options)

    tensor = Twice(np.ones((3, 4), np.float32))
    first = as_array(tensor, "x")
    with pytest.raises(TypeError, match=r'x: got <capsule object "used_dltensor_versioned" at .*>'
                                        r" from the __dlpack__ of Twice, wanted a capsule named"):
        as_array(tensor, "x")
    assert np.array_equal(first, np.ones((3, 4)))


@pytest.mark.parametrize("change", [{"name": b"used_dltensor"}, {"name": b"dltens"}, {"lanes": 2},
                                    {"bits": 8}, {"code": 5}, {"code": 200}], ids=str)
def test_other_capsules(tensor_of, change):
    """What is no bfloat16 gets the error that it always had."""
    tensor = tensor_of(HALVES, **change)
    for call in (lambda: mha.linear(tensor, np.ones((4, 2), np.float32)),
                 lambda: as_array(tensor, "x")):
        with pytest.raises((TypeError, ValueError, RuntimeError, BufferError)):
            call()


def test_no_capsule():
    class Strange:
        def __init__(self, answer):
            self.answer = answer

        def __dlpack__(self, **options):
            if isinstance(self.answer, BaseException):
                raise self.answer
            return self.answer

        def __dlpack_device__(self):
            return 1, 0

    for answer in (None, 3, "dltensor", ValueError("no"), RuntimeError("no"), TypeError("no")):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            mha.linear(Strange(answer), np.ones((4, 2)))
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            as_array(Strange(answer), "x")
    with pytest.raises(KeyboardInterrupt):
        mha.linear(Strange(KeyboardInterrupt()), np.ones((4, 2)))


def test_no_deleter(tensor_of):
    tensor = tensor_of(random_halves(3, 4))
    tensor.has_no_deleter = True
    assert same_bits(as_array(tensor, "x"), tensor.bits.view(BFLOAT16))
    gc.collect()
    assert tensor.taken == 1


WITHOUT = """
import sys
sys.path.insert(0, "tests/helpers")
sys.modules["ml_dtypes"] = None
import gc
import numpy as np
from dlpack_capsules import LikeTorch
import mha
numbers = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
numbers = (bits.astype(np.uint32) << 16).view(np.float32)
tensor, query = LikeTorch(bits), np.ones((2, 5, 8), np.float32)
for call in (lambda x: mha.scaled_dot_product_attention(query, x, x),
             lambda x: mha.linear(query[:, :, :5], x[0] if x is numbers else LikeTorch(bits[0])),
             mha.MultiHeadAttention(8, 2, rng=0), mha.MultiHeadAttention(8, 2, rng=0).freeze(),
             mha.MultiHeadAttention(8, 2, rng=0, dtype="bfloat16"),
             lambda x: (lambda layer: layer(x, cache=layer.new_cache(2)))(
                 mha.MultiHeadAttention(8, 2, rng=0)),
             lambda x: (lambda layer: layer(x, cache=layer.new_cache(2)))(
                 mha.MultiHeadAttention(8, 2, rng=0, dtype="bfloat16"))):
    got, wanted = call(tensor), call(numbers)
    assert got.dtype == np.float32 and np.array_equal(got, wanted)
for call in (lambda: mha.scaled_dot_product_attention(tensor, tensor, tensor),
             lambda: mha.linear(tensor, np.ones((8, 2), np.float32)), lambda: mha.Rotary(2)(tensor),
             lambda: mha.split_heads(tensor, 2), lambda: mha.merge_heads(tensor),
             lambda: mha.scaled_dot_product_attention_vjp(query, tensor, query)[1](query)):
    try:
        call()
    except ImportError as error:
        assert "pip install ml_dtypes" in str(error)
    else:
        raise AssertionError("shown without ml_dtypes")
gc.collect()
assert tensor.taken == tensor.deleted > 10
"""


def test_without_ml_dtypes():
    """bfloat16 is computed with, and only where a result would be of it is the package missing."""
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_comes_out_is_lent_to_others(dtype):
    """Results own what they show: another library takes them by DLPack without a copy."""
    layer = mha.MultiHeadAttention(8, 2, dtype=dtype, rng=0)
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(dtype)
    results = [*layer(x, return_weights=True, return_lse=True), layer.W_q]
    output, pullback = layer.vjp(x)
    gradients = pullback(output)
    for array in [*results, output, gradients.query, gradients.W_q]:
        taken = np.from_dlpack(array)
        assert np.shares_memory(taken, array) and taken.tobytes() == array.tobytes()
        assert taken.dtype == array.dtype and array.__dlpack_device__() == (1, 0)
