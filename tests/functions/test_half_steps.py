"""The steps beside attention and projections in float16 and bfloat16: computed in float32, rounded
once. Against float64, half an ulp of the halves beyond the gate of float32."""

import numpy as np
import pytest
from agreement import FLOOR, as_tuple, relative_error
from half_types import BFLOAT16, HALVES, ROUNDING, same_bits

import mha
from mha import reference

SMALLEST = {HALVES[0]: 2.0**-24, BFLOAT16: 2.0**-133}  # what subnormal numbers are apart


def assert_rounded(got, exact, plain, dtype):
    """Of the exact numbers, and those of plain NumPy in float32."""
    assert got.dtype == dtype and got.shape == exact.shape
    gate = max(2 * relative_error(plain, exact), FLOOR[np.dtype(np.float32)])
    allowed = gate * np.abs(exact).max(initial=0)
    half_ulp = np.maximum(ROUNDING[dtype] * (np.abs(exact) + allowed), SMALLEST[dtype] / 2)
    assert (np.abs(got.astype(np.float64) - exact) <= half_ulp + allowed).all()


def random_halves(seed, dtype, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in shapes]


def as_type(arrays, dtype):
    return [array.astype(dtype) for array in arrays]


def check(function, oracle, arrays, dtype, **options):
    got = as_tuple(function(*arrays, **options))
    exact = as_tuple(oracle(*as_type(arrays, np.float64), **options))
    plain = as_tuple(oracle(*as_type(arrays, np.float32), **options))
    assert_rounded(got[0], exact[0], plain[0], dtype)
    for one, wanted, other in zip(got[1:], exact[1:], plain[1:], strict=True):
        assert one.dtype == np.float32  # weights, and lse
        assert relative_error(one, wanted) <= max(2 * relative_error(other, wanted), 2e-6)


def additive_arrays(dtype, heads, query_len, key_len, hidden=8):
    batch = (2, *([heads] if heads else []))
    arrays = random_halves(0, np.float32, (*batch, query_len, 20), (*batch, key_len, 30),
                           (*batch, key_len, 4), (20, hidden), (30, hidden), (hidden,))
    arrays[3] /= 5
    arrays[4] /= 6
    return as_type(arrays, dtype)


ADDITIVE_OPTIONS = [{}, {"causal": True, "query_offset": 3}, {"key_lengths": [1, 2]},
                    {"dropout": 0.3, "rng": 4}, {"empty_rows": "uniform", "key_lengths": [0, 1]},
                    {"return_weights": True}]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("lengths", [(1, 40), (3, 2), (30, 140), (0, 3), (3, 0)])
@pytest.mark.parametrize("heads", [0, 3])
def test_additive_attention(dtype, lengths, heads):
    query_len, key_len = lengths
    arrays = additive_arrays(dtype, heads, query_len, key_len)
    for options in ADDITIVE_OPTIONS:
        if key_len >= max(options.get("key_lengths", [0])):
            check(mha.additive_attention, reference.additive_attention, arrays, dtype, **options)
    apart = [np.repeat(array, 2, -1)[..., ::2] if array.ndim > 2 else array for array in arrays]
    assert same_bits(mha.additive_attention(*apart), mha.additive_attention(*arrays))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("lengths", [(1, 40), (30, 140), (0, 3), (3, 0)])
def test_gradients_of_additive_attention(dtype, lengths):
    """Those of float32 arrays with the same numbers, rounded once, each in its argument's type."""
    arrays = additive_arrays(dtype, 2, *lengths)
    wide = as_type(arrays, np.float32)
    mixed = [wide[i] if i in (1, 5) else array for i, array in enumerate(arrays)]
    options = {"causal": True, "query_offset": 5}
    wanted_output, wide_pullback = mha.additive_attention_vjp(*wide, **options)
    gradient = random_halves(1, dtype, wanted_output.shape)[0]
    wanted = wide_pullback(gradient.astype(np.float32))
    for given in (arrays, mixed):
        output, pullback = mha.additive_attention_vjp(*given, **options)
        result = dtype if given is arrays else np.float32
        assert output.dtype == result and np.array_equal(output, wanted_output.astype(result))
        for array, one, other in zip(given, pullback(gradient), wanted, strict=True):
            assert one.dtype == array.dtype
            assert np.array_equal(one, other.astype(array.dtype), equal_nan=True)
    key_gradient = mha.additive_attention_vjp(*arrays, wrt=["key"])[1](gradient)
    assert key_gradient.key.dtype == dtype and key_gradient.query is None


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("shape", [(1, 8), (30, 40), (2, 5, 8), (2, 3, 50, 24), (2, 0, 8)])
def test_rotary(dtype, layout, shape):
    rotary = mha.Rotary(8, layout=layout, magnitude=1.3)
    (x,) = random_halves(2, dtype, shape)
    positions = np.arange(shape[-2]) * 1001 - 7
    exact = rotary(x.astype(np.float64), positions)
    for given in (x, np.asfortranarray(x), np.repeat(x, 2, -2)[..., ::2, :]):
        got = rotary(given, positions)
        assert_rounded(got, exact, exact, dtype)
        assert same_bits(got[..., 8:], x[..., 8:])
    output, pullback = rotary.vjp(x, positions)
    assert same_bits(output, got)
    (gradient,) = random_halves(3, dtype, shape)
    exact = rotary.vjp(x.astype(np.float64), positions)[1](gradient.astype(np.float64)).x
    assert_rounded(pullback(gradient).x, exact, exact, dtype)
    with mha.threads(3):
        assert same_bits(rotary(x, positions), got)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 7), (2, 3, 5, 40), (2, 0, 8), (5, 0)])
@pytest.mark.parametrize("parts", [1, 2, 9])
def test_merged_parts(dtype, shape, parts):
    outputs = random_halves(4, dtype, *[shape] * parts)
    lses = random_halves(5, np.float32, *[shape[:-1]] * parts)
    lses[0][...] = -np.inf if parts > 1 else 0
    check(lambda *arrays: mha.merge_attention(arrays, lses),
          lambda *arrays: reference.merge_attention(
              arrays, [lse.astype(arrays[0].dtype) for lse in lses]), outputs, dtype)
    backwards = [output[..., ::-1].copy()[..., ::-1] for output in outputs]
    assert same_bits(*(mha.merge_attention(given, lses)[0] for given in (backwards, outputs)))


def test_types_of_merged_parts():
    """Halves while all outputs are, whatever lses there are that float32 holds."""
    for dtype in HALVES:
        half, lse = np.ones((2, 3), dtype), np.ones(2, np.float32)

        def types(outputs, lses):
            return [result.dtype for result in mha.merge_attention(outputs, lses)]
        assert types([half, half], [lse, lse]) == [dtype, np.float32]
        assert types([half, half], [lse.astype(dtype)] * 2) == [dtype, np.float32]
        assert types([half, half.astype(np.float32)], [lse, lse]) == [np.float32] * 2
        assert types([half, half], [lse, lse.astype(np.float64)]) == [np.float64] * 2
    eights = np.full((2, 3), 8, np.int8)
    output, _ = mha.merge_attention([np.ones((2, 3), np.float16), eights], [np.ones(2, "f4")] * 2)
    assert output.dtype == np.float16 and (output == 4.5).all()


def test_merged_parts_of_large_numbers():
    """The mean of largest numbers is the largest number; beyond them is infinity."""
    for dtype, largest in zip(HALVES, (65504, 3.38e38), strict=True):
        most = np.full((2, 20), largest).astype(dtype)
        got, _ = mha.merge_attention([most] * 7, [np.zeros(2, np.float32)] * 7)
        assert same_bits(got, most)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_heads(dtype):
    (x,) = random_halves(6, dtype, (2, 5, 24))
    heads = mha.split_heads(x, 3)
    assert np.shares_memory(heads, x) and heads.dtype == dtype
    assert same_bits(mha.merge_heads(heads), x)
    assert same_bits(mha.merge_heads(heads.copy()), x)
