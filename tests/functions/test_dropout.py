"""The Philox dropout mask: known answers, the reference, statistics, and what the kernels do."""

import numpy as np
import pytest

import mha
from mha import reference

# Random123's published philox4x32-7 result for a counter and key of zeros, as 16-bit words.
ZERO_WORDS = [0xb709, 0x5f6f, 0x3f64, 0x0d89, 0x1f81, 0x4f12, 0x0a48, 0x4f73]


def test_known_answer():
    for threshold in sorted([*ZERO_WORDS, 1, 65535]):
        kept = mha.dropout_mask((1, 8), threshold / 65536, seed=0)
        assert kept.tolist() == [[word >= threshold for word in ZERO_WORDS]]


@pytest.mark.parametrize("shape", [(3, 5), (4, 3, 17), (2, 3, 4, 40), (2, 2, 3, 4, 9), (0, 5),
                                   (5, 0)])
def test_against_the_reference(shape):
    for p, seed in ((0.1, 0), (0.5, 2**64 - 1), (0.99, 123456789012345), (0, 1), (0.999999, 5)):
        got = mha.dropout_mask(shape, p, seed)
        assert got.dtype == bool
        assert np.array_equal(got, reference.dropout_mask(shape, p, seed))


def test_kept_fraction_and_independence():
    kept = mha.dropout_mask((4, 8, 256, 256), 0.3, seed=1)
    deviation = np.sqrt(0.3 * 0.7 / kept.size)
    assert abs(kept.mean() - 0.7) < 5 * deviation
    for axis in range(4):  # neighbours along every axis are uncorrelated
        one, other = np.take(kept, range(1, kept.shape[axis]), axis), np.take(
            kept, range(kept.shape[axis] - 1), axis)
        assert abs((one & other).mean() - 0.49) < 5 * np.sqrt(0.49 * 0.51 / one.size)
    assert (mha.dropout_mask((256, 256), 0.3, 1) != mha.dropout_mask((256, 256), 0.3, 2)).any()


def test_attention_drops_what_the_mask_says():
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 2, 3, 200, 8))
    query = rng.standard_normal((2, 3, 50, 8))
    output, weights = mha.scaled_dot_product_attention(query, key, value, dropout=0.25, rng=7,
                                                       return_weights=True)
    assert np.allclose(weights.sum(axis=-1), 1)  # returned before dropout
    kept = weights * mha.dropout_mask(weights.shape, 0.25, 7) / 0.75
    assert np.abs(output - kept @ value).max() < 1e-14


@pytest.mark.parametrize("offsets", [(0, 0, 0, 8), (1, 2, 30, 0), (1, 1, 5, 3), (0, 3, 49, 77)])
def test_a_part_drops_what_the_whole_would(offsets):
    whole = mha.dropout_mask((3, 5, 100, 300), 0.4, 7)
    for shape in ((2, 2, 1, 200), (1, 1, 3, 70), (2, 2, 50, 129), (1, 2, 9, 1)):
        at = tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True))
        kept = mha.dropout_mask(shape, 0.4, 7, offsets=offsets)
        assert np.array_equal(kept, whole[at])
        assert np.array_equal(kept, reference.dropout_mask(shape, 0.4, 7, offsets=offsets))
        # All weights are 1 / key_len, and values one-hot: the output tells which were kept.
        query, key = np.zeros((*shape[:3], 4)), np.zeros((*shape[:2], shape[3], 4))
        value = np.broadcast_to(np.eye(shape[3]), (*shape[:2], shape[3], shape[3]))
        output = mha.scaled_dot_product_attention(query, key, value, dropout=0.4, rng=7,
                                                  dropout_offsets=offsets)
        assert np.array_equal(output != 0, kept)


@pytest.mark.parametrize(("offsets", "message"), [
    ((1, 2, 3), "offsets: got 3 entries, wanted four"), ((0, 0, 0, -1), "offsets: got -1, wanted"),
    (5, "offsets: got int, wanted a list of ints"), ((True, 0, 0, 0), "offsets: got bool, wanted"),
    ("abcd", "offsets: got str, wanted"), ((0, 0, 0, 2**32), "offsets: got 4294967296, wanted at")])
def test_offsets_that_are_none(offsets, message):
    with pytest.raises((ValueError, TypeError), match=message):
        mha.dropout_mask((3, 4), 0.5, 1, offsets=offsets)


def test_rng():
    query = np.random.default_rng(1).standard_normal((10, 8))

    def attend(rng, dropout=0.5):
        return mha.scaled_dot_product_attention(query, query, query, dropout=dropout, rng=rng)

    assert np.array_equal(attend(3), attend(3))
    assert np.array_equal(attend(np.int64(3)), attend(3))
    assert not np.array_equal(attend(None), attend(None))
    one, other = np.random.default_rng(5), np.random.default_rng(5)
    assert np.array_equal(attend(one), attend(int(other.integers(2**64, dtype=np.uint64))))
    assert one.bit_generator.state == other.bit_generator.state
    attend(one, dropout=0.0)  # nothing is drawn without dropout
    assert one.bit_generator.state == other.bit_generator.state
    state = np.random.get_state()[1].tolist()
    attend(None)
    assert np.random.get_state()[1].tolist() == state


def test_a_call_that_fails_draws_nothing():
    rng = np.random.default_rng(1)
    state = rng.bit_generator.state
    x, layer = np.ones((2, 4, 8), np.float32), mha.MultiHeadAttention(8, 2, dropout=0.5)
    for call in (lambda: mha.scaled_dot_product_attention(x, x, x, dropout=1.5, rng=rng),
                 lambda: mha.scaled_dot_product_attention(x, x, x[:1], dropout=0.5, rng=rng),
                 lambda: mha.scaled_dot_product_attention_vjp(x, x, x[:1], dropout=0.5, rng=rng),
                 lambda: layer(x, x[:1], training=True, rng=rng),
                 lambda: layer.vjp(x, x[:1], training=True, rng=rng.bit_generator)):
        with pytest.raises(ValueError, match="got"):
            call()
        assert rng.bit_generator.state == state
    layer(x, training=True, rng=rng)
    assert rng.bit_generator.state != state
