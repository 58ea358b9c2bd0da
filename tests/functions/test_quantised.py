"""Packed weights in blocks of 8 or 4 bits: the numbers of the gguf package, and the bits of the
float32 array that they stand for."""
import pickle

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mha
from mha._functions.quantised import quantised

TYPES = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_0": gguf.GGMLQuantizationType.Q4_0}


def theirs(weight, kind):
    """What the gguf package makes of it: blocks lie along rows there."""
    rows = np.ascontiguousarray(weight.T)
    return gguf.quants.dequantize(gguf.quants.quantize(rows, TYPES[kind]), TYPES[kind]).T


@pytest.mark.parametrize("kind", TYPES)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 70), st.integers(-12, 4))
@settings(max_examples=60, deadline=None)
def test_the_numbers_of_gguf(kind, seed, blocks, out, exponent):
    """Zeros, equal largest magnitudes of either sign, halves between two numbers."""
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((32 * blocks, out)) * 10.0**exponent).astype(np.float32)
    weight[:32, ::3] = np.round(weight[:32, ::3], 1)
    weight[:32, 1::4] = np.sign(weight[:32, 1::4])
    weight[-32:, ::5] = 0
    packed = mha.pack(weight, dtype=kind)
    assert packed.unpack().tobytes() == np.ascontiguousarray(theirs(weight, kind)).tobytes()
    assert packed.dtype == kind and packed.shape == weight.shape


@pytest.mark.parametrize("kind", TYPES)
def test_every_scale(kind):
    """All finite float16 numbers as the scale of a block."""
    scales = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    scales = scales[np.isfinite(scales)].reshape(1, -1)
    numbers = np.resize(np.arange(-8, 8, dtype=np.int8), (32, scales.size))
    packed = object.__new__(mha.PackedWeight)
    packed.__setstate__((kind, numbers, scales))
    wanted = numbers.astype(np.float32) * scales.astype(np.float32)
    assert packed.unpack().tobytes() == wanted.tobytes()
    for rows in (np.eye(32, dtype=np.float32), *np.eye(32, dtype=np.float32)[:, None]):
        np.testing.assert_array_equal(mha.linear(rows, packed), mha.linear(rows, wanted))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", TYPES)
def test_the_bits_of_the_float32_array(kind, threads):
    rng = np.random.default_rng(1)
    for width, out in ((32, 1), (64, 33), (128, 128), (160, 100), (544, 300), (1056, 130), (0, 5),
                       (32, 0)):
        packed = mha.pack(rng.standard_normal((width, out), np.float32), dtype=kind)
        array, bias = packed.unpack(), rng.standard_normal(out, np.float32)
        for rows in (0, 1, 2, 3, 4, 5, 8, 9, 20, 97, 300):
            x = rng.standard_normal((rows, width), np.float32)
            with mha.threads(threads):
                for same in (x, np.asfortranarray(x), x.astype(np.float16)):
                    np.testing.assert_array_equal(mha.linear(same, packed, bias),
                                                  mha.linear(same, array, bias))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("columns", [128, 416, 1000, 2048, 5000])
def test_one_row_whose_panels_threads_share(kind, columns):
    """A task takes up to 16 panels, the last one fewer."""
    rng = np.random.default_rng(columns)
    packed = mha.pack(rng.standard_normal((96, columns), np.float32), dtype=kind)
    x = rng.standard_normal((1, 96), np.float32)
    wanted = mha.linear(x, packed.unpack())
    for threads in (1, 2, 3, 5, 8):
        with mha.threads(threads):
            np.testing.assert_array_equal(mha.linear(x, packed), wanted)


@pytest.mark.parametrize("kind", TYPES)
def test_other_uses(kind):
    rng = np.random.default_rng(2)
    weight, x = (rng.standard_normal(shape, np.float32) for shape in ((64, 64), (3, 5, 64)))
    packed = mha.pack(weight, dtype=kind)
    array = packed.unpack()
    output, pullback = mha.linear_vjp(x, packed)
    same, whole = mha.linear_vjp(x, array)
    assert np.array_equal(output, same)
    assert np.array_equal(pullback(np.cos(output)).x, whole(np.cos(output)).x)
    np.testing.assert_array_equal(
        mha.multi_head_attention(x, x, x, *[packed] * 4, num_heads=4),
        mha.multi_head_attention(x, x, x, *[array] * 4, num_heads=4))
    again = pickle.loads(pickle.dumps(packed, 1))
    assert again.dtype == kind and again.unpack().tobytes() == array.tobytes()
    assert mha.pack(packed) is packed and mha.pack(packed, dtype=kind) is packed
    assert mha.pack(packed, dtype=np.float32).unpack().tobytes() == array.tobytes()
    assert repr(packed) == f"PackedWeight(shape=(64, 64), dtype={kind})"
    for dtype in (np.float16, np.float64):
        single = weight.astype(dtype).astype(np.float32)
        assert mha.pack(weight.astype(dtype), dtype=kind).unpack().tobytes() == mha.pack(
            single, dtype=kind).unpack().tobytes()


def test_memory():
    weight = np.ones((1024, 1024), np.float32)
    assert mha.pack(weight, dtype="q8_0").nbytes <= 0.28 * weight.nbytes
    assert mha.pack(weight, dtype="q4_0").nbytes <= 0.15 * weight.nbytes


def test_pieces_of_a_large_weight():
    weight = np.random.default_rng(3).standard_normal((32, 40_000), np.float32)
    weight = np.tile(weight, (3, 1))
    blocks = quantised(weight, "q8_0")
    assert (blocks.numbers[:32] == blocks.numbers[64:]).all()
    assert (blocks.scales[0] == blocks.scales[2]).all()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("weight", "error", "message"), [
    (np.ones((33, 4), np.float32), ValueError, "weight: got 33 rows, wanted a multiple of 32"),
    (np.ones(32, np.float32), ValueError, r"weight: got shape \(32,\), wanted \(in, out\)"),
    (np.full((32, 4), np.nan, np.float32), ValueError, "not finite"),
    (np.full((32, 4), -np.inf, np.float32), ValueError, "not finite"),
    (np.full((32, 4), 1e37, np.float32), ValueError, "whose scale is beyond float16"),
    (np.ones((32, 4), complex), TypeError, "weight: got"),
], ids=range(6))
def test_bad_weights(weight, error, message, kind):
    with pytest.raises(error, match=message):
        mha.pack(weight, dtype=kind)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("size", [1e-300, 1e-40, 1e-9, 1, 1e30, 1e300])
def test_numbers_of_any_size_raise_no_warning(kind, size):
    """Those near 0 become 0; larger ones than the blocks can hold are one error."""
    rows = np.full((1, 1, 3, 32), size)
    with np.errstate(all="raise"):
        if size > 1e9:
            with pytest.raises(ValueError, match=r"not finite|beyond float16"):
                mha.pack(rows[0, 0].T, dtype=kind)
        else:
            assert abs(mha.pack(rows[0, 0].T, dtype=kind).unpack()).max() <= size * 1.01
        cache = mha.KVCache(1, 1, 32, dtype="q8_0")
        cache.append(rows, rows)
        assert size > 1e9 or abs(cache.key).max() <= size * 1.01


def test_no_memory():
    weight = np.broadcast_to(np.float32(1), (1 << 40, 1 << 20))
    for more, action in (({}, "pack"), ({"dtype": "q8_0"}, "quantise")):
        with pytest.raises(MemoryError, match=f"^weight: no memory to {action} it"):
            mha.pack(weight, **more)


def test_float64_is_refused():
    packed = mha.pack(np.ones((32, 4), np.float32), dtype="q8_0")
    with pytest.raises(TypeError, match="weight: got a quantised weight, wanted x in float32 or a"):
        mha.linear(np.ones((2, 32)), packed)


@pytest.mark.parametrize("call", [mha.linear, mha.linear_vjp])
def test_float64_beside_a_quantised_weight(call):
    packed = mha.pack(np.ones((32, 4), np.float32), dtype="q8_0")
    x, bias = np.ones((2, 32), np.float32), np.ones(4)
    for arguments in ((x.astype(float), packed), (x.astype(int), packed)):
        with pytest.raises(TypeError, match="got a quantised weight, wanted x in float32"):
            call(*arguments)
    call(x, packed, bias)


def test_a_weight_that_nobody_filled():
    empty = object.__new__(mha.PackedWeight)
    for use in (repr, lambda packed: packed.unpack(), lambda packed: packed.nbytes, pickle.dumps):
        with pytest.raises(AttributeError, match="got a PackedWeight that nobody filled"):
            use(empty)


def test_what_a_pickle_claims_is_checked():
    numbers, scales = np.ones((64, 4), np.int8), np.ones((2, 4), np.float16)
    swapped = object.__new__(mha.PackedWeight)
    swapped.__setstate__(("q8_0", numbers, scales.astype(">f2")))
    np.testing.assert_array_equal(swapped.unpack(), np.ones((64, 4)))
    for state in (("q9", numbers, scales), ([], numbers, scales), ("q8_0", numbers),
                  ("q8_0", numbers, scales * np.float16(np.inf)), ("q8_0", numbers[:33], scales),
                  ("q8_0", numbers.astype(np.int16), scales), ("q4_0", numbers * 100, scales),
                  ("q8_0", numbers, scales[:1]), ("q8_0", None, scales), (), (None,), ({},)):
        with pytest.raises(ValueError, match="wanted what pickling a PackedWeight gives"):
            object.__new__(mha.PackedWeight).__setstate__(state)
