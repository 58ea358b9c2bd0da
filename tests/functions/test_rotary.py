"""Rotary embeddings: known answers, exact angles at any position, gradients, configs."""

import copy
import math
import pickle
from decimal import Decimal, localcontext

import numpy as np
import pytest
from agreement import assert_accurate, relative_error

import mha
from mha import reference

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")


def cosine_and_sine(angle):
    """Of a Decimal, by Taylor's series after whole turns are taken away."""
    with localcontext(prec=80):
        x = angle % (2 * PI)
        terms, term, k = [Decimal(1)], Decimal(1), 0
        while abs(term) > Decimal(10) ** -60 or k < 20:
            k += 1
            term = term * x / k
            terms.append(term)
        cosine = sum(terms[i] * (-1) ** (i // 2) for i in range(0, len(terms), 2))
        sine = sum(terms[i] * (-1) ** (i // 2) for i in range(1, len(terms), 2))
        return cosine, sine


def turned(position, frequency, **options):
    """(cosine, sine) as the core has them."""
    rotary = mha.Rotary(2, frequencies=[frequency], **options)
    return rotary(np.array([[1.0, 0.0]]), positions=[position])[0]


def test_known_answers():
    half, interleaved = mha.Rotary(4), mha.Rotary(4, layout="interleaved")
    assert half.frequencies.tolist() == [1.0, 0.01]
    cos1, sin1, cos2, sin2 = math.cos(3), math.sin(3), math.cos(0.03), math.sin(0.03)
    x = np.array([[1.0, 2.0, 3.0, 4.0, 5.0]])
    np.testing.assert_allclose(half(x, [3]), [[
        cos1 - 3 * sin1, 2 * cos2 - 4 * sin2, 3 * cos1 + sin1, 4 * cos2 + 2 * sin2, 5]], 1e-15)
    np.testing.assert_allclose(interleaved(x, [3]), [[
        cos1 - 2 * sin1, 2 * cos1 + sin1, 3 * cos2 - 4 * sin2, 4 * cos2 + 3 * sin2, 5]], 1e-15)
    assert np.array_equal(half(x), x)  # position 0


@pytest.mark.parametrize("position", [0, 1, -1, 7, 1000, 10**6, -(10**6), 10**12, 2**53,
                                      2**63 - 1, -(2**63)])
def test_cosine_and_sine_are_exact_at_any_position(position):
    """Within 0.75 ulp of the exact product's, however far: 10^6 is as exact as 1."""
    rng = np.random.default_rng(abs(position) % 1000)
    frequencies = [1.0, 0.1, 10000.0**-0.5, 1e-4, 3e-7, 2.5, 1e6, 1e300, math.pi / 2,
                   *rng.random(40), *(10.0 ** rng.uniform(-9, 0, 40))]
    for frequency in frequencies:
        with localcontext(prec=400):
            angle = Decimal(frequency) * position % (2 * Decimal(str(PI)))
        if abs(frequency * position) > 1e40:  # PI has too few digits here
            continue
        exact = cosine_and_sine(angle)
        for got, wanted in zip(turned(position, frequency), exact, strict=True):
            # 2^-60 is for angles of 2^80 turns that come near a zero.
            error = abs(Decimal(float(got)) - wanted)
            allowed = Decimal("0.75") * Decimal(math.ulp(float(wanted))) + Decimal(2) ** -60
            assert error <= allowed, (frequency, position, got, wanted)


def test_huge_frequencies_are_reduced_exactly():
    """1e300 radians a position: against whole numbers of 2^-1200 turns."""
    bits = 1400
    pi = machin(bits)
    for frequency in (1e300, 1.7e308, 1e100, 3.3e40, 2.0**63):
        numerator, denominator = frequency.as_integer_ratio()
        turn = (numerator << 2 * bits) // (2 * pi * denominator) % (1 << bits)
        angle = Decimal(turn) / Decimal(2) ** bits * 2 * PI
        for got, wanted in zip(turned(1, frequency), cosine_and_sine(angle), strict=True):
            assert abs(Decimal(float(got)) - wanted) < Decimal(2) ** -53, frequency


def machin(bits):
    """pi * 2^bits, by 4 (4 atan(1/5) - atan(1/239))."""
    def inverse_tangent(n):
        power = total = (1 << bits + 20) // n
        sign, k = 1, 1
        while power:
            power //= n * n
            sign, k = -sign, k + 2
            total += sign * (power // k)
        return total
    return 4 * (4 * inverse_tangent(5) - inverse_tangent(239)) >> 20


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(5, 8), (3, 7, 10), (2, 3, 65, 64), (2, 2, 3, 9, 130),
                                   (1, 1, 1, 2), (2, 4, 300, 33)])
def test_against_the_reference(layout, dtype, shape):
    rng = np.random.default_rng(0)
    rotary = mha.Rotary(shape[-1] // 4 * 2 or 2, layout=layout, magnitude=1.3, base=500.0)
    x = rng.standard_normal(shape).astype(dtype)
    batch = shape[:-3] if len(shape) >= 4 else shape[:-2]
    for positions in (None, rng.integers(-50, 50, shape[-2]),
                      rng.integers(-10**6, 10**6, (*batch, shape[-2])),
                      np.arange(shape[-2])[::-1], np.zeros((*batch, shape[-2]), np.uint8)):
        kept = x.copy()
        assert_accurate(lambda x, p=positions: rotary(x, p),
                        lambda x, p=positions: reference.rotary(x, rotary, p), [x], {})
        assert np.array_equal(x, kept)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_scores_depend_on_the_distance_alone_and_norms_stay(layout):
    rng = np.random.default_rng(0)
    rotary = mha.Rotary(32, layout=layout)
    query, key = rng.standard_normal((2, 1, 40))
    def score(query_position, key_position):
        return float((rotary(query[None], [query_position])[0]
                      * rotary(key[None], [key_position])[0]).sum())
    for distance in (0, 1, -3, 1000):
        scores = [score(start + distance, start) for start in (0, 5, -77, 10**6, 10**15)]
        np.testing.assert_allclose(scores, scores[0], atol=1e-14)
    turned_key = rotary(key[None], [12345])
    assert abs(np.linalg.norm(turned_key) - np.linalg.norm(key)) < 1e-14
    assert np.array_equal(turned_key[0, 32:], key[32:])


def test_layouts_are_equal_up_to_the_order_of_columns():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 9, 16))
    order = np.arange(16).reshape(8, 2).T.ravel()  # even columns, then odd ones
    half, interleaved = mha.Rotary(16), mha.Rotary(16, layout="interleaved")
    assert np.array_equal(interleaved(x)[..., order], half(x[..., order]))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_gradient_by_complex_step(layout):
    rng = np.random.default_rng(0)
    rotary = mha.Rotary(6, layout=layout, magnitude=0.7)
    x, positions = rng.standard_normal((2, 3, 4, 7)), rng.integers(-99, 99, (2, 4))
    output, pullback = rotary.vjp(x, positions)
    assert np.array_equal(output, rotary(x, positions))
    grad_output = rng.standard_normal(x.shape)
    gradient = pullback(grad_output).x
    direction = rng.standard_normal(x.shape)
    stepped = reference.rotary(x + 1e-200j * direction, rotary, positions).imag / 1e-200
    assert np.isclose((gradient * direction).sum(), (grad_output * stepped).sum(), rtol=1e-12)
    wanted = reference.rotary_vjp(x, rotary, positions)[1](grad_output)
    assert relative_error(gradient, wanted) < 1e-15
    assert np.array_equal(pullback(grad_output).x, gradient)
    # Turned there and back: the numbers that went in, times the magnitude's square.
    np.testing.assert_allclose(pullback(output).x[..., :6], 0.49 * x[..., :6], atol=1e-15)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_strided_and_empty_arrays(dtype):
    rng = np.random.default_rng(0)
    rotary = mha.Rotary(4)
    x = rng.standard_normal((6, 5, 4, 8)).astype(dtype)
    for view in (x[::2], x[:, ::-1], x[..., ::2], x.swapaxes(1, 2), x[..., 4:],
                 np.broadcast_to(x[:1], x.shape), x.T.copy().T):
        assert np.array_equal(rotary(view), rotary(np.ascontiguousarray(view)))
    for shape in ((0, 4), (2, 0, 4), (0, 2, 3, 4), (2, 0, 3, 4)):
        assert rotary(np.ones(shape, dtype)).shape == shape
        output, pullback = rotary.vjp(np.ones(shape, dtype))
        assert pullback(output).x.shape == shape
    positions = np.arange(20)[::4]
    assert np.array_equal(rotary(x[0, 0, :], [3, 1, 2, 0]),
                          rotary(x[0, 0, :], np.array([[3, 9], [1, 9], [2, 9], [0, 9]])[:, 0]))
    assert rotary(x.swapaxes(1, 2), positions).shape == (6, 4, 5, 8)


def test_types_and_special_numbers():
    rotary = mha.Rotary(2)
    assert rotary(np.array([[1, 2]])).dtype == np.float64
    assert rotary([[1.0, 2.0]]).dtype == np.float64
    got = rotary(np.array([[np.nan, 1.0, 5.0], [np.inf, 1.0, 5.0]], np.float32))
    assert np.isnan(got[0, 0]) and np.isinf(got[1, 0]) and (got[:, 2] == 5).all()
    largest = np.finfo(np.float32).max
    assert np.isfinite(rotary(np.full((5, 2), 0.7 * largest, np.float32))).all()


@pytest.mark.parametrize(("call", "message"), [
    (lambda: mha.Rotary(3), "dims: got 3, wanted an even number"),
    (lambda: mha.Rotary(0), "dims: got 0"),
    (lambda: mha.Rotary(2**40), "dims: got 1099511627776, wanted an even number of columns from"),
    (lambda: mha.Rotary("4"), "dims: got str, wanted an int"),
    (lambda: mha.Rotary(4, base=0), "base: got 0, wanted a finite number above 0"),
    (lambda: mha.Rotary(4, base=math.nan), "base: got nan"),
    (lambda: mha.Rotary(4, base="1"), "base: got str, wanted a finite number"),
    (lambda: mha.Rotary(4, base=10**400), "base: got 1000"),
    (lambda: mha.Rotary(4, layout="llama"), 'layout: got \'llama\', wanted "half" or'),
    (lambda: mha.Rotary(4, layout=None), "layout: got None"),
    (lambda: mha.Rotary(4, magnitude=math.inf), "magnitude: got inf, wanted a finite number"),
    (lambda: mha.Rotary(4, frequencies=[1]), r"frequencies: got shape \(1,\), wanted \(2,\)"),
    (lambda: mha.Rotary(4, frequencies=[1, math.inf]), "frequencies: got one that is not finite"),
    (lambda: mha.Rotary(4, frequencies=[True, False]), "frequencies: got an array of bool"),
    (lambda: mha.Rotary(4, theta=3), "theta: got a keyword that Rotary does not have, wanted base"),
    (lambda: mha.Rotary(4)(np.ones((3, 2))), r"rotary: got 4 dims, wanted at most head_dim \(2\)"),
    (lambda: mha.Rotary(2)(np.ones(2)), r"x: got shape \(2,\), wanted 2-D"),
    (lambda: mha.Rotary(2)(np.ones((3, 2), complex)), "x: got an array of complex128"),
    (lambda: mha.Rotary(2)(None), "x: got None, wanted an array"),
    (lambda: mha.Rotary(2)(np.ones((3, 2)), [1, 2]),
     r"positions: got shape \(2,\), wanted \(3,\)$"),
    (lambda: mha.Rotary(2)(np.ones((5, 4, 3, 2)), np.ones((4, 3), int)),
     r"positions: got shape \(4, 3\), wanted \(3,\) or \(5, 3\)"),
    (lambda: mha.Rotary(2)(np.ones((3, 2)), 5), r"positions: got shape \(\), wanted \(3,\)$"),
    (lambda: mha.Rotary(2)(np.ones((3, 2)), [0.0, 1.0, 2.0]),
     "positions: got an array of float64, wanted integers"),
    (lambda: mha.Rotary(2)(np.ones((1, 2)), [2**63]), "positions: got 9223372036854775808, wanted"),
    (lambda: mha.Rotary(2).vjp(np.ones((3, 2)))[1](np.ones((2, 2))),
     r"grad_output: got shape \(2, 2\), wanted \(3, 2\)"),
    (lambda: mha.Rotary(2).vjp(np.ones((3, 2)))[1](None), "grad_output: got None"),
])
def test_bad_input(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_it_is_a_value():
    one, same = mha.Rotary(8, base=500), mha.Rotary(8, base=500.0)
    assert one == same and hash(one) == hash(same) and len({one, same}) == 1
    for other in (mha.Rotary(8), mha.Rotary(6, base=500), mha.Rotary(8, base=500, magnitude=2),
                  mha.Rotary(8, base=500, layout="interleaved"), 8):
        assert one != other
    scaled = mha.Rotary(4, frequencies=[1, 0.5], layout="interleaved", magnitude=1.5)
    for rotary in (one, scaled):
        assert pickle.loads(pickle.dumps(rotary)) == rotary == copy.deepcopy(rotary)
        assert repr(pickle.loads(pickle.dumps(rotary))) == repr(rotary)
        assert copy.copy(rotary) is rotary
        with pytest.raises(AttributeError, match="base: got an assignment"):
            rotary.base = 3
        with pytest.raises(AttributeError):
            del rotary.magnitude
        with pytest.raises(ValueError, match="read-only"):
            rotary.frequencies[0] = 3
    assert one.base == 500 and scaled.base is None and scaled.dims == 4
    assert repr(one) == "Rotary(8, base=500, layout='half')"
    assert repr(scaled) == ("Rotary(4, frequencies=[1, ..., 0.5], layout='interleaved', "
                            "magnitude=1.5)")


def test_frequencies_are_powers_rounded_once():
    for dims, base in ((128, 10000.0), (64, 500000.0), (6, 1e6), (256, 3.7)):
        frequencies = mha.Rotary(dims, base=base).frequencies
        with localcontext(prec=60):
            exact = [(Decimal(base).ln() * Decimal(-2 * c) / dims).exp() for c in range(dims // 2)]
        assert frequencies.tolist() == [float(frequency) for frequency in exact]
