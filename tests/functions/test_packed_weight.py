"""mha.pack: weights packed once, which give the bits of the arrays that they were."""
import copy
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mha
from mha._base.dtypes import RAW_BFLOAT16

TYPES = [np.float16, np.float32, np.float64]


def draw(rng, shape, dtype):
    return (rng.standard_normal(shape) * 4).astype(dtype)


@pytest.mark.parametrize("of_x", TYPES)
@pytest.mark.parametrize("of_weight", [*TYPES, np.int16])
def test_the_bits_of_the_array(of_x, of_weight):
    """Of any two types: float64 beside a float32 weight computes in float64, as with the array."""
    rng = np.random.default_rng(1)
    for width, out in ((0, 3), (1, 1), (40, 33), (129, 64), (300, 100), (7, 0)):
        weight, bias = draw(rng, (width, out), of_weight), draw(rng, out, of_x)
        packed = mha.pack(weight)
        for rows in (0, 1, 2, 5, 9, 40):
            x = draw(rng, (rows, width), of_x)
            got, wanted = mha.linear(x, packed, bias), mha.linear(x, weight, bias)
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted)


@given(st.integers(0, 2**32), st.integers(0, 200), st.integers(0, 200), st.sampled_from(TYPES),
       st.sampled_from([1, 2]))
@settings(max_examples=60, deadline=None)
def test_unpack_gives_it_back(seed, width, out, dtype, threads):
    """Every bit: zeros of either sign, denormal numbers, infinity, NaN."""
    rng = np.random.default_rng(seed)
    weight = draw(rng, (width, out), dtype)
    info = np.finfo(dtype)
    strange = [0, -0.0, info.tiny, info.smallest_subnormal, -info.max, np.inf, -np.inf, np.nan]
    weight.ravel()[::3] = np.resize(np.array(strange, dtype), weight.ravel()[::3].shape)
    with mha.threads(threads):
        packed = mha.pack(weight)
        assert packed.shape == weight.shape and packed.dtype == dtype
        assert packed.unpack().tobytes() == weight.tobytes()
        assert pickle.loads(pickle.dumps(packed)).unpack().tobytes() == weight.tobytes()


def test_layouts_and_types():
    rng = np.random.default_rng(2)
    weight = draw(rng, (70, 90), np.float32)
    for same in (np.asfortranarray(weight), weight.astype(">f4"), np.repeat(weight, 2, 1)[:, ::2]):
        assert mha.pack(same).unpack().tobytes() == weight.tobytes()
    rounded = mha.pack(weight, dtype=np.float16)
    assert rounded.dtype == np.float16
    assert rounded.unpack().tobytes() == weight.astype(np.float16).tobytes()
    assert rounded.nbytes < 0.6 * 96 * 90 * 4 and mha.pack(weight).nbytes >= weight.nbytes
    assert mha.pack(rounded) is rounded and mha.pack(rounded, dtype="float16") is rounded
    assert mha.pack(rounded, dtype=np.float64).dtype == np.float64
    assert mha.pack(weight.astype(int)).dtype == np.float64
    weight[:] = 0
    assert rounded.unpack().any(), "packing copies"


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(3)
    weight = draw(rng, (40, 50), np.float32).astype(ml_dtypes.bfloat16)
    x = draw(rng, (4, 40), np.float32)
    for packed in (mha.pack(weight), mha.pack(weight.astype(np.float32), dtype="bfloat16"),
                   mha.pack(weight.view(RAW_BFLOAT16))):
        assert packed.dtype == ml_dtypes.bfloat16
        assert packed.unpack().tobytes() == weight.tobytes()
        assert np.array_equal(mha.linear(x, packed), mha.linear(x, weight))
    assert pickle.loads(pickle.dumps(packed)).dtype == ml_dtypes.bfloat16


def test_gradients():
    """That of x, as by the array; that of a bias where it is wanted."""
    rng = np.random.default_rng(4)
    x, weight, bias = draw(rng, (9, 40), "f4"), draw(rng, (40, 50), "f4"), draw(rng, 50, "f4")
    packed = mha.pack(weight)
    output, pullback = mha.linear_vjp(x, packed, bias)
    same, whole = mha.linear_vjp(x, weight, bias)
    assert np.array_equal(output, same)
    gradients, wanted = pullback(np.cos(output)), whole(np.cos(output))
    assert np.array_equal(gradients.x, wanted.x)
    assert gradients.weight is None and gradients.bias is None
    pullback = mha.linear_vjp(x, packed, bias, wrt=["bias"])[1]
    assert np.array_equal(pullback(np.cos(output)).bias, wanted.bias)
    with pytest.raises(ValueError, match=r"wrt: got 'weight', wanted names out of x, bias"):
        mha.linear_vjp(x, packed, bias, wrt=["x", "weight"])


def test_other_functions_take_it():
    """The layer's function and additive attention read weights; their gradients want arrays."""
    rng = np.random.default_rng(5)
    x, weights = draw(rng, (2, 7, 24), "f4"), [draw(rng, (24, 24), "f4") for _ in range(4)]
    packed = [mha.pack(weight) for weight in weights]
    assert np.array_equal(mha.multi_head_attention(x, x, x, *packed, num_heads=4),
                          mha.multi_head_attention(x, x, x, *weights, num_heads=4))
    heads, w_v = x[:, None], draw(rng, 24, "f4")
    assert np.array_equal(mha.additive_attention(heads, heads, heads, *packed[:2], w_v),
                          mha.additive_attention(heads, heads, heads, *weights[:2], w_v))
    with pytest.raises(TypeError, match="W_q: got a packed weight, wanted an array"):
        mha.multi_head_attention_vjp(x, x, x, *packed, num_heads=4)


def test_it_cannot_be_changed():
    packed = mha.pack(np.ones((3, 4)))
    assert copy.copy(packed) is packed and copy.deepcopy([packed])[0] is packed
    for name in ("shape", "dtype", "nbytes", "_core_weight", "other"):
        with pytest.raises(AttributeError):
            setattr(packed, name, None)
        with pytest.raises(AttributeError):
            delattr(packed, name)
    with pytest.raises(AttributeError, match="a PackedWeight cannot be changed"):
        packed.__setstate__((np.ones((2, 2)),))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(mha.pack(np.zeros((1, 1))), protocol))
        assert again.unpack() == 0
    assert repr(packed) == "PackedWeight(shape=(3, 4), dtype=float64)"
    with pytest.raises(TypeError, match=r"PackedWeight: got a call, wanted mha\.pack"):
        mha.PackedWeight(np.ones((3, 4)))


def test_no_rows_and_very_many_columns():
    packed = mha.pack(np.empty((0, 1 << 40), np.int8))
    assert packed.shape == (0, 1 << 40) and packed.nbytes == 0


def test_many_threads_use_it_at_once():
    rng = np.random.default_rng(6)
    weight, x = draw(rng, (200, 300), "f4"), draw(rng, (30, 200), "f4")
    packed, wanted, wrong = mha.pack(weight), mha.linear(x, weight), []

    def work():
        for _ in range(50):
            if not np.array_equal(mha.linear(x, packed), wanted):
                wrong.append("other bits")

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: mha.pack(np.ones(3)), ValueError, r"weight: got shape \(3,\), wanted \(in, out\)"),
    (lambda: mha.pack(np.ones((2, 3, 4))), ValueError, r"weight: got shape \(2, 3, 4\)"),
    (lambda: mha.pack("x"), TypeError, "weight: got an array of"),
    (lambda: mha.pack(np.ones((2, 2), complex)), TypeError, "weight: got an array of complex"),
    (lambda: mha.pack(np.ones((2, 2)), dtype=int), TypeError, "dtype: got .*int.*, wanted"),
    (lambda: mha.pack(np.ones((2, 2)), dtype="q9_9"), TypeError,
     "dtype: got 'q9_9', wanted .*; or \"q8_0\" or \"q4_0\""),
    (lambda: mha.linear(np.ones((2, 5)), mha.pack(np.ones((3, 4)))), ValueError,
     r"weight: got shape \(3, 4\), wanted 5 rows"),
    (lambda: mha.linear(mha.pack(np.ones((3, 4))), np.ones((4, 5))), TypeError,
     "x: got a packed weight"),
    (lambda: mha.linear(np.ones((2, 3)), mha.pack(np.ones((3, 4))), mha.pack(np.ones((1, 4)))),
     TypeError, "bias: got a packed weight, wanted an array"),
    (lambda: mha.scaled_dot_product_attention(*[mha.pack(np.ones((3, 4)))] * 3), TypeError,
     "query: got a packed weight"),
    (lambda: np.asarray(mha.pack(np.ones((3, 4)))), TypeError, r"unpack\(\) makes an array of it"),
    (lambda: mha.split_heads(mha.pack(np.ones((3, 4))), 2), TypeError, r"x: got .*unpack\(\)"),
    (lambda: mha.reference.linear(np.ones((2, 3)), mha.pack(np.ones((3, 4)))), TypeError,
     r"PackedWeight: got one where an array is wanted: unpack\(\)"),
    (lambda: mha.multi_head_attention_vjp(*[np.ones((2, 3))] * 3, *[mha.pack(np.eye(3))] * 4,
                                          num_heads=1),
     TypeError, r"W_q: got a packed weight, wanted an array: unpack\(\) makes one of it"),
    (lambda: mha.linear(np.ones((2, 3)), np.ones(1).__array_struct__), TypeError,
     "weight: got a capsule, wanted an array"),
], ids=range(15))
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
