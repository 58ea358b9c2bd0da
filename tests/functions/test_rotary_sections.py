"""Rotary embeddings whose tokens stand at several positions: which pair turns by which axis."""

import copy
import pickle

import numpy as np
import pytest
from agreement import assert_accurate, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

import mha
from mha import _core, reference

QWEN2_VL, QWEN3_VL = (16, 24, 24), (24, 20, 20)


def axes_of(sections, section_layout):
    """The rule, pair by pair."""
    count = len(sections)
    if section_layout == "split":
        ends = np.cumsum(sections)
        return [next(axis for axis in range(count) if pair < ends[axis])
                for pair in range(sum(sections))]
    return [pair % count if pair // count < sections[pair % count] else 0
            for pair in range(sum(sections))]


def turned(x, positions, rotary):
    """float64: x (batch, heads, len, d) by positions (axes, batch, len)."""
    output = x.astype(np.float64)
    half = rotary.dims // 2
    for pair, axis in enumerate(axes_of(rotary.sections, rotary.section_layout)):
        angle = positions[axis].astype(np.float64)[:, None] * rotary.frequencies[pair]
        cosine, sine = rotary.magnitude * np.cos(angle), rotary.magnitude * np.sin(angle)
        a, b = (pair, pair + half) if rotary.layout == "half" else (2 * pair, 2 * pair + 1)
        output[..., a] = x[..., a] * cosine - x[..., b] * sine
        output[..., b] = x[..., b] * cosine + x[..., a] * sine
    return output


def test_which_pair_turns_by_which_axis():
    """At 1 along one axis and 0 along the others only its pairs turn."""
    for options, wanted in (
            ({"sections": (1, 2, 1)}, [0, 1, 1, 2]),
            ({"sections": [2, 1, 1], "section_layout": "interleaved"}, [0, 1, 2, 0]),
            ({"sections": (1, 3), "section_layout": "interleaved"}, [0, 1, 0, 1]),
            ({"sections": (3, 1), "section_layout": "interleaved"}, [0, 1, 0, 0]),
            ({"sections": (1, 1, 1, 1)}, [0, 1, 2, 3])):
        rotary = mha.Rotary(8, frequencies=[1, 1, 1, 1], **options)
        for axis in range(len(rotary.sections)):
            positions = np.zeros((len(rotary.sections), 1), int)
            positions[axis] = 1
            row = rotary(np.array([[1.0] * 4 + [0.0] * 4]), positions)[0]
            assert [pair for pair in range(4) if row[pair] != 1] == [
                pair for pair in range(4) if wanted[pair] == axis]


def test_the_sections_of_qwen3_vl_come_in_turns():
    """24 pairs of time, 20 of rows and 20 of columns: t h w t h w ... t t t t."""
    assert axes_of(QWEN3_VL, "interleaved") == [0, 1, 2] * 20 + [0] * 4
    assert axes_of(QWEN2_VL, "split") == [0] * 16 + [1] * 24 + [2] * 24


@st.composite
def calls(draw):
    sections = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=4)))
    pairs = sum(sections)
    rotary = mha.Rotary(2 * pairs, base=draw(st.sampled_from([100.0, 1e4])), sections=sections,
                        layout=draw(st.sampled_from(["half", "interleaved"])), magnitude=1.25,
                        section_layout=draw(st.sampled_from(["split", "interleaved"])))
    batch, heads, length = (draw(st.integers(least, 3)) for least in (0, 1, 0))
    head_dim = 2 * pairs + draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x = rng.standard_normal((batch, heads, length, head_dim))
    positions = rng.integers(-2000, 2000, (len(sections), batch, length))
    return rotary, x, positions


@settings(deadline=None)
@given(calls())
def test_against_numpy(call):
    rotary, x, positions = call
    wanted = turned(x, positions, rotary)
    np.testing.assert_allclose(rotary(x, positions), wanted, rtol=0, atol=5e-12)
    for dtype, size in ((np.float32, 1e-6), (np.float16, 2e-3)):
        got = rotary(x.astype(dtype), positions)
        assert got.dtype == dtype
        np.testing.assert_allclose(got, turned(x.astype(dtype), positions, rotary), rtol=0,
                                   atol=size * 10)
    output, pullback = rotary.vjp(x, positions)
    assert np.array_equal(output, rotary(x, positions))
    back = pullback(output).x  # turned there and back: the magnitude's square
    np.testing.assert_allclose(back[..., :rotary.dims],
                               1.25**2 * x[..., :rotary.dims], rtol=0, atol=1e-13)


@pytest.mark.parametrize("section_layout", ["split", "interleaved"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_against_the_reference(layout, section_layout, dtype):
    rng = np.random.default_rng(0)
    rotary = mha.Rotary(16, sections=(4, 2, 2), layout=layout, section_layout=section_layout)
    for shape in ((5, 16), (2, 7, 20), (2, 4, 65, 64), (2, 2, 3, 9, 17), (4, 3, 2, 6, 16)):
        x = rng.standard_normal(shape).astype(dtype)
        batch, length = shape[:-3] if len(shape) >= 4 else shape[:-2], shape[-2]
        for positions in (None, rng.integers(-50, 50, length),
                          rng.integers(-10**6, 10**6, (*batch, length)),
                          rng.integers(-10**6, 10**6, (3, length)),
                          rng.integers(-10**6, 10**6, (3, *batch, length))):
            assert_accurate(lambda x, p=positions: rotary(x, p),
                            lambda x, p=positions: reference.rotary(x, rotary, p), [x], {})


@pytest.mark.parametrize("section_layout", ["split", "interleaved"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_gradient_by_complex_step(layout, section_layout):
    rng = np.random.default_rng(0)
    rotary = mha.Rotary(8, sections=(2, 1, 1), layout=layout, section_layout=section_layout)
    x, grad_output, direction = rng.standard_normal((3, 2, 5, 4, 9))
    for positions in (rng.integers(-50, 50, (3, 4)), rng.integers(-50, 50, (3, 2, 4))):
        gradient = rotary.vjp(x, positions)[1](grad_output).x
        stepped = reference.rotary(x + 1e-200j * direction, rotary, positions).imag / 1e-200
        assert np.isclose((gradient * direction).sum(), (grad_output * stepped).sum(), rtol=1e-12)
        wanted = reference.rotary_vjp(x, rotary, positions)[1](grad_output)
        assert relative_error(gradient, wanted) < 1e-14  # whose angles are rounded


@pytest.mark.parametrize("section_layout", ["split", "interleaved"])
def test_alike_axes_have_the_bits_of_no_sections(section_layout):
    rng = np.random.default_rng(0)
    plain = mha.Rotary(128, base=1e6)
    rotary = mha.Rotary(128, base=1e6, sections=QWEN3_VL, section_layout=section_layout)
    x = rng.standard_normal((2, 3, 50, 128)).astype(np.float32)
    for positions in (None, rng.integers(0, 10**9, 50), rng.integers(0, 10**9, (2, 50))):
        wanted = plain(x, positions)
        assert np.array_equal(rotary(x, positions), wanted)
        if positions is not None:
            by_axis = np.stack([positions] * 3)
            assert np.array_equal(rotary(x, by_axis), wanted)


@pytest.mark.parametrize("position", [10**12, 2**53, 2**63 - 1, -(2**63)])
def test_angles_are_as_exact_as_without_sections(position):
    rotary = mha.Rotary(8, sections=(1, 2, 1))
    x = np.random.default_rng(0).standard_normal((1, 8))
    for axis, columns in enumerate(([0, 4], [1, 2, 5, 6], [3, 7])):
        positions = np.zeros((3, 1), np.int64)
        positions[axis] = position
        got = rotary(x, positions)
        assert np.array_equal(got[:, columns], mha.Rotary(8)(x, [position])[:, columns])
        others = [column for column in range(8) if column not in columns]
        assert np.array_equal(got[:, others], x[:, others])


def test_strided_positions_of_any_integer_type():
    rng = np.random.default_rng(0)
    rotary = mha.Rotary(8, sections=(2, 1, 1))
    x = rng.standard_normal((2, 3, 5, 8))
    positions = rng.integers(0, 100, (3, 2, 5))
    wanted = rotary(x, positions)
    last = np.ascontiguousarray(positions.transpose(1, 2, 0))
    for same in (last.transpose(2, 0, 1), positions.astype(np.int8), positions.astype(">u2"),
                 positions.tolist(), np.repeat(positions, 2, axis=2)[..., ::2]):
        assert np.array_equal(rotary(x, same), wanted)
    alike = np.broadcast_to(positions[:, :1], positions.shape)
    assert np.array_equal(rotary(x, alike), rotary(x, positions[:, 0]))


def test_the_same_bits_at_any_number_of_threads():
    rng = np.random.default_rng(0)
    rotary = mha.Rotary(128, sections=QWEN2_VL)
    x = rng.standard_normal((2, 4, 300, 128)).astype(np.float32)
    positions = rng.integers(0, 1000, (3, 2, 300))
    wanted = rotary(x, positions)
    for count in (1, 2, 5):
        with mha.threads(count):
            assert np.array_equal(rotary(x, positions), wanted)


def test_which_reading_positions_have():
    """Three sequences and three axes: (3, len) may be either, and is refused."""
    rotary = mha.Rotary(8, sections=(2, 1, 1))
    rng = np.random.default_rng(0)
    positions = rng.integers(0, 50, (3, 5))
    for shape in ((3, 5, 8), (3, 2, 5, 8)):
        x = rng.standard_normal(shape)
        for call in (rotary, rotary.vjp, lambda x, p: reference.rotary(x, rotary, p)):
            with pytest.raises(ValueError, match=r"^positions: got shape \(3, 5\), .*wanted all"):
                call(x, positions)
        alike = rotary(x, np.stack([positions] * 3))
        assert np.array_equal(alike, mha.Rotary(8)(x, positions))
        every = rotary(x, np.repeat(positions[:, None], 3, axis=1))
        assert np.array_equal(every[1], rotary(x[1], positions))
    many = rng.standard_normal((3, 2, 1, 5, 8))  # two batch axes: no doubt
    assert np.array_equal(rotary(many, positions)[2, 1, 0], rotary(many[2, 1, 0], positions))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: mha.Rotary(8, sections=(2, 1)), r"^sections: got \(2, 1\), wanted two ints or more of"
                                             " at least 1 that sum to 4"),
    (lambda: mha.Rotary(8, sections=(4,)), r"^sections: got \(4,\), wanted two ints or more"),
    (lambda: mha.Rotary(8, sections=(4, 0)), r"^sections: got \(4, 0\), wanted two ints or more"),
    (lambda: mha.Rotary(8, sections=(5, -1)), r"^sections: got \(5, -1\)"),
    (lambda: mha.Rotary(8, sections=()), r"^sections: got \(\)"),
    (lambda: mha.Rotary(8, sections=4), "^sections: got int, wanted a list of ints"),
    (lambda: mha.Rotary(8, sections=(2.0, 2)), "^sections: got float, wanted an int"),
    (lambda: mha.Rotary(8, sections=(2, 2), section_layout="half"),
     '^section_layout: got \'half\', wanted "split" or "interleaved"'),
    (lambda: mha.Rotary(8, section_layout=None), '^section_layout: got None, wanted "split"'),
    (lambda: mha.Rotary(8, sections=(2, 2))(np.ones((5, 8)), np.ones((3, 5), int)),
     r"^positions: got shape \(3, 5\), wanted \(5,\), or the 2 position axes of the rotary's"),
    (lambda: mha.Rotary(8, sections=(2, 2))(np.ones((7, 5, 8)), np.ones((2, 6, 5), int)),
     r"^positions: got shape \(2, 6, 5\), wanted \(5,\) or \(7, 5\), or the 2 position axes of"),
    (lambda: mha.Rotary(8, sections=(2, 2))(np.ones((5, 8)), 3), r"^positions: got shape \(\)"),
    (lambda: mha.Rotary(8)(np.ones((5, 8)), np.ones((2, 5), int)),
     r"^positions: got shape \(2, 5\), wanted \(5,\)$"),
])
def test_bad_input(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_records_that_no_rotary_has():
    """The core looks for itself whether each pair has an axis."""
    x, axes = np.ones((5, 8)), np.array([0, 1, 1, 2]).tobytes()
    frequencies, *record, _, _ = mha.Rotary(8)._record
    _core.rotary(x, (frequencies, *record, axes, 3), None)
    for wrong in ((axes, 2), (axes, 1), (axes, 0), (axes, -3), (axes[:-8], 3), (axes + axes, 3),
                  (b"", 3), (np.array([0, 1, -1, 2]).tobytes(), 3)):
        with pytest.raises(ValueError, match=r"^rotary: got axes that are no axis of positions"):
            _core.rotary(x, (frequencies, *record, *wrong), None)
    for wrong in ((None, 3), (axes, "3"), (axes,), ()):
        with pytest.raises(TypeError):
            _core.rotary(x, (frequencies, *record, *wrong), None)


def test_it_is_a_value():
    rotary = mha.Rotary(8, base=500, sections=[2, 1, 1])
    assert rotary == mha.Rotary(8, base=500, sections=np.array([2, 1, 1]))
    assert rotary.sections == (2, 1, 1) and rotary.section_layout == "split"
    assert mha.Rotary(8).sections is None
    others = [mha.Rotary(8, base=500), mha.Rotary(8, base=500, sections=(1, 2, 1)),
              mha.Rotary(8, base=500, sections=(2, 1, 1), section_layout="interleaved"),
              mha.Rotary(8, base=500, sections=(2, 2))]
    assert len({rotary, *others}) == 5
    for one in (rotary, *others):
        again = pickle.loads(pickle.dumps(one))
        assert again == one == copy.deepcopy(one) and repr(again) == repr(one)
        assert (again.sections, again.section_layout) == (one.sections, one.section_layout)
    assert repr(rotary) == ("Rotary(8, base=500, layout='half', sections=(2, 1, 1), "
                            "section_layout='split')")
    with pytest.raises(AttributeError, match="sections: got an assignment"):
        rotary.sections = None
    # What pickled before there were sections.
    assert mha.Rotary._restored(8, 500.0, "half", None, 1.0) == mha.Rotary(8, base=500)
