"""Arrays in the blocks of llama.cpp's files: the bits of the gguf package, and weights of them that
are not quantised once more."""
import pickle
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mha
from mha._functions.quantised import BITS, quantised
from mha._functions.quantised_array import KINDS, PIECE, QuantisedArray

TYPES = {kind: getattr(gguf.GGMLQuantizationType, kind.upper()) for kind in KINDS}
# Bytes of a block's scales, two for each float16.
SCALES = {"q8_0": [0], "q4_0": [0], "q4_k": [0, 2], "q6_k": [208]}


def theirs(data, kind):
    with np.errstate(invalid="ignore"):
        return gguf.quants.dequantize(data, TYPES[kind])


def of(kind, data):
    """The array (rows, n) of blocks (rows, bytes)."""
    return QuantisedArray(kind, theirs(data, kind).shape, data)


def draw(kind, seed, rows, blocks):
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * KINDS[kind].nbytes),
                                                dtype=np.uint8)


def with_scales(kind, data, scales):
    """The blocks with such scales, float16 (blocks,)."""
    blocks = data.copy().reshape(-1, KINDS[kind].nbytes)
    for place in SCALES[kind]:
        of_each = np.resize(scales, len(blocks)).astype("<f2")
        blocks[:, place:place + 2] = of_each[:, None].view(np.uint8)
    return blocks.reshape(data.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_as_large_as_those_of_gguf(kind):
    assert KINDS[kind][:2] == gguf.GGML_QUANT_SIZES[TYPES[kind]]


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(0, 2**32), st.integers(0, 9), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_the_bits_of_gguf(kind, seed, rows, blocks):
    """Any bytes, so any scale, NaN and infinity among them."""
    data = draw(kind, seed, rows, blocks)
    shape = rows, blocks * KINDS[kind].numbers
    array = QuantisedArray(kind, shape, data)
    wanted = theirs(data, kind) if data.size else np.empty(shape, np.float32)
    assert array.unpack().tobytes() == wanted.tobytes()
    assert np.asarray(array).tobytes() == wanted.tobytes()
    assert array.T.unpack().tobytes() == wanted.T.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_every_scale(kind):
    """All 2^16 of them, NaN and infinities too, beside numbers that are all there are."""
    scales = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    data = draw(kind, 1, 1 << 8, 1 << 8)
    data[:, :KINDS[kind].nbytes] = 0
    data[:, -KINDS[kind].nbytes:] = 255
    data = with_scales(kind, data, scales)
    assert of(kind, data).unpack().tobytes() == theirs(data, kind).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_large_array(kind):
    for data in (draw(kind, 2, 2, PIECE // KINDS[kind].numbers + 3),
                 draw(kind, 2, PIECE // KINDS[kind].numbers + 3, 2)):
        array, wanted = of(kind, data), theirs(data, kind)
        assert array.unpack().tobytes() == wanted.tobytes()
        assert array.T.unpack().tobytes() == wanted.T.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_memory(kind):
    """Beside the numbers there are those of a piece or two."""
    array = of(kind, np.zeros((2048, 2048 // KINDS[kind].numbers * KINDS[kind].nbytes), np.uint8))
    ways = [array.unpack, array.T.unpack, *([array.T.blocks] if kind in BITS else [])]
    for way in ways:
        tracemalloc.start()
        found = way()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        size = found.nbytes if way is not ways[-1] or kind not in BITS else found.numbers.nbytes
        assert most < size + 20 * PIECE


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("shape", [(64, 33), (32, 1), (5 * 32, PIECE // 160 + 7)])
def test_what_gguf_quantises_is_what_mha_does(kind, shape):
    """The numbers and scales of its bytes are those of `mha.pack`, and nothing is rounded again."""
    weight = np.random.default_rng(3).standard_normal(shape, np.float32)
    weight[:32, 0] = 0
    data = gguf.quants.quantize(np.ascontiguousarray(weight.T), TYPES[kind])
    array = QuantisedArray(kind, shape[::-1], data).T
    blocks, wanted = array.blocks(), quantised(weight, kind)
    assert blocks.kind == kind
    assert blocks.numbers.tobytes() == wanted.numbers.tobytes()
    assert blocks.scales.tobytes() == wanted.scales.tobytes()
    packed = mha.pack(array)
    assert packed.dtype == kind and packed.shape == shape
    assert packed.unpack().tobytes() == array.unpack().tobytes()


@pytest.mark.parametrize("kind", BITS)
def test_blocks_that_nobody_would_quantise_so(kind):
    """Every number and finite scale, negative ones and -128 among them, is kept as it is."""
    scales = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    data = with_scales(kind, draw(kind, 4, 1 << 9, 1 << 6), scales[np.isfinite(scales)])
    array = of(kind, data)
    packed = mha.pack(array.T)
    assert packed.unpack().tobytes() == array.T.unpack().tobytes()
    x = np.random.default_rng(5).standard_normal((3, packed.shape[0]), np.float32)
    np.testing.assert_array_equal(mha.linear(x, packed), mha.linear(x, array.unpack().T))
    np.testing.assert_array_equal(mha.linear(x, packed), mha.linear(x, array.T))


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite(kind, scale):
    """Their numbers can be read, but make no packed weight."""
    data = draw(kind, 6, 40, 2)
    data = with_scales(kind, data, np.array([1.0] * 7 + [scale], np.float16))
    array = of(kind, data)
    assert array.unpack().tobytes() == theirs(data, kind).tobytes()
    with pytest.raises(ValueError, match="weight: got scales that are not finite, wanted finite"):
        mha.pack(array.T)


@pytest.mark.parametrize("kind", KINDS)
def test_other_types_and_the_other_axis(kind):
    data = with_scales(kind, draw(kind, 7, 512, 2), np.array([0.01, 0.5], np.float16))
    array = of(kind, data)
    numbers = theirs(data, kind)
    for dtype in (np.float16, np.float32, np.float64, "q8_0", "q4_0"):
        for one, weight in ((array.T, numbers.T), (array, numbers)):
            if dtype != kind or one is array:
                packed = mha.pack(one, dtype=dtype)
                assert packed.unpack().tobytes() == mha.pack(weight, dtype=dtype).unpack().tobytes()
                assert packed.dtype == dtype
    if kind in BITS:
        with pytest.raises(ValueError, match=rf"weight: got {kind} blocks along the output axis"):
            mha.pack(array)
        with pytest.raises(TypeError, match="weight: got QuantisedArray"):
            array.blocks()
    else:
        assert mha.pack(array.T).dtype == mha.pack(array).dtype == np.float32
        with pytest.raises(TypeError, match=r"wanted one \(in, out\) of q8_0 or q4_0 blocks"):
            array.T.blocks()


ROWS = [0, 6, -1, -7, np.int64(3), np.array(2), slice(None), slice(1, 5), slice(-2, None),
        slice(None, None, -2), slice(5, 2), slice(3, 99), [4, 0, 4], [-1, -7], [], [[1], [-2]],
        np.array([[0, 1, 2], [6, 6, 6]], np.uint8), np.array([5, -5], np.int8),
        np.zeros((0, 3), int)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS, ids=repr)
def test_rows_are_those_of_all_numbers(kind, rows):
    array = of(kind, draw(kind, 10, 7, 2))
    found, wanted = array[rows], array.unpack()[rows]
    assert found.dtype == np.float32 and found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()
    found[...] = 1  # a copy
    assert array[rows].tobytes() == wanted.tobytes()


def test_rows_take_no_more_memory_than_they_need():
    array = of("q8_0", np.zeros((5000, 10 * 34), np.uint8))
    tracemalloc.start()
    array[[7, 4000]]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 50_000


def test_wrong_rows():
    """As of NumPy's arrays they are IndexErrors; so iteration ends."""
    array = of("q8_0", draw("q8_0", 11, 7, 2))
    for rows in (7, -8, [0, 7], np.array([[-8]]), 1 << 70, [1 << 64]):
        with pytest.raises(IndexError):
            array[rows]
    for rows in (0.0, [1.0], True, [True] * 7, None, ..., "a", (1, 2), (0, slice(None)), ()):
        with pytest.raises(IndexError, match="wanted an int, a slice or an array of ints"):
            array[rows]
    assert np.stack(list(array)).tobytes() == array.unpack().tobytes()
    cube = QuantisedArray("q8_0", (2, 3, 32), draw("q8_0", 9, 6, 1))
    for other in (array.T, cube):
        with pytest.raises(IndexError, match=r"rows: got some of QuantisedArray\(shape="):
            other[0]


def test_what_it_says_of_itself():
    data = draw("q4_k", 8, 3, 2)
    array = of("q4_k", data)
    for same in (array, array.T.T, pickle.loads(pickle.dumps(array))):
        assert (same.shape, same.ndim, same.size, len(same)) == ((3, 512), 2, 1536, 3)
        assert same.dtype == "q4_k" and same.nbytes == data.nbytes
        assert repr(same) == "QuantisedArray(shape=(3, 512), dtype=q4_k)"
    assert array.T.shape == (512, 3)
    assert np.asarray(array, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy: got False"):
        np.array(array, copy=False) if np.__version__ >= "2" else array.__array__(copy=False)
    rows = np.array([2, 0, 2])
    assert array.in_rows(rows).unpack().tobytes() == array.unpack()[rows].tobytes()
    cube = QuantisedArray("q8_0", (2, 3, 32), draw("q8_0", 9, 6, 1))
    assert cube.unpack().shape == (2, 3, 32)
    with pytest.raises(ValueError, match=r"\.T: got shape \(2, 3, 32\)"):
        cube.T  # noqa: B018
