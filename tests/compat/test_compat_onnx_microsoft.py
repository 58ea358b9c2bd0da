"""Operators of com.microsoft beside NumPy in float64, those cases too that ONNX Runtime's CPU
provider refuses; tests/peers/ compares the others with ONNX Runtime. GroupQueryAttention has a file
of its own."""

import numpy as np
import pytest

from mha.compat.onnx import microsoft

BATCH, HEADS, LEN, PAST, SIZE, HIDDEN = 2, 3, 4, 5, 8, 6
WIDTH = HEADS * SIZE
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, LEN, HIDDEN))
WEIGHTS, BIAS = RNG.normal(size=(HIDDEN, 3 * WIDTH)), RNG.normal(size=3 * WIDTH)
PAST_KV = RNG.normal(size=(2, BATCH, HEADS, PAST, SIZE))
SCORES = (BATCH, HEADS, LEN, PAST + LEN)


def by_head(array):
    return array.reshape(*array.shape[:2], HEADS, -1).swapaxes(1, 2)


def merged(heads):
    return heads.swapaxes(1, 2).reshape(heads.shape[0], heads.shape[2], -1)


def attended(query, key, value, added=0.0, scale=None):
    """Attention written out, `added` to the scores."""
    scores = query @ np.swapaxes(key, -1, -2) * (scale or query.shape[-1]**-0.5) + added
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


def projected(x=X):
    return [by_head(part) for part in np.split(x @ WEIGHTS + BIAS, 3, axis=-1)]


def behind_past(query, key, value):
    return query, *(np.concatenate(pair, axis=2) for pair in zip(PAST_KV, (key, value)))


def triangle(query_len=LEN, key_len=PAST + LEN):
    return np.where(np.tri(query_len, key_len, key_len - query_len), 0, -np.inf)


# Attention


def attention(*inputs, x=X, **options):
    inputs = [x, WEIGHTS, BIAS, *inputs]
    return microsoft.attention(*inputs, num_heads=HEADS, **options)


def assert_near(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-10)


def test_attention_behind_a_past():
    output, present = attention(None, PAST_KV, unidirectional=1)
    query, key, value = behind_past(*projected())
    assert_near(output, merged(attended(query, key, value, triangle())))
    assert_near(present, [key, value])
    without = microsoft.attention(X, WEIGHTS, num_heads=HEADS, unidirectional=1)
    assert_near(without.output, merged(attended(
        *(by_head(part) for part in np.split(X @ WEIGHTS, 3, axis=-1)), triangle(key_len=LEN))))


def padded(ends, starts=(0, 0)):
    columns = np.arange(PAST + LEN)
    padding = (columns >= np.array(ends)[:, None]) | (columns < np.array(starts)[:, None])
    return np.where(padding, -7.0, 0)[:, None, None]


PAIRS = RNG.random((BATCH, LEN, PAST + LEN)) < 0.6
LONGEST = RNG.random((BATCH, 1, 12, 12)) < 0.6


@pytest.mark.parametrize(("mask", "added"), [
    ([9, 4], padded([9, 4])), ([9, 8, 0, 3], padded([9, 8], [0, 3])),
    ([7, 4, 0, 0, 0, 0, 0, 0], padded([7, 4])),
    (PAIRS[:, 0], np.where(PAIRS[:, :1], 0, -7.0)[:, None]),
    (PAIRS, np.where(PAIRS, 0, -7.0)[:, None]),
    (LONGEST, np.where(LONGEST[:, :, PAST:PAST + LEN, :PAST + LEN], 0, -7.0)),
    (np.zeros((BATCH, 1)), 0), (np.zeros((1, 1)), 0)])
def test_masks_of_attention(mask, added):
    bias = RNG.normal(size=SCORES)
    mask = np.array(mask).astype(np.int32)
    got = attention(mask, PAST_KV, bias, mask_filter_value=-7.0)
    assert_near(got.output, merged(attended(*behind_past(*projected()), added + bias)))


def test_attention_in_a_buffer_has_the_bits_of_concatenation():
    buffer = np.pad(PAST_KV, [(0, 0)] * 3 + [(0, 6), (0, 0)], constant_values=np.nan)
    before = buffer.copy()
    output, present = attention(None, buffer, None, [PAST], past_present_share_buffer=1,
                                unidirectional=1)
    wanted = attention(None, PAST_KV, unidirectional=1)
    np.testing.assert_array_equal(output, wanted.output)
    np.testing.assert_array_equal(present[..., :PAST + LEN, :], wanted.present)
    assert present.shape == buffer.shape
    np.testing.assert_array_equal(buffer, before)
    empty = attention(None, buffer, None, [0], past_present_share_buffer=1)
    np.testing.assert_array_equal(empty.output, attention().output)


@pytest.mark.parametrize("dims", [0, 4])
def test_attention_rotates(dims):
    def turned(heads):
        columns = dims or SIZE
        angles = (PAST + np.arange(LEN))[:, None] / 10000 ** (np.arange(0, columns, 2) / columns)
        first, second = heads[..., :columns // 2], heads[..., columns // 2:columns]
        return np.concatenate([first * np.cos(angles) - second * np.sin(angles),
                               second * np.cos(angles) + first * np.sin(angles),
                               heads[..., columns:]], axis=-1)

    query, key, value = projected()
    output, present = attention(None, PAST_KV, do_rotary=1, rotary_embedding_dim=dims)
    query, key, value = behind_past(turned(query), turned(key), value)
    assert_near(output, merged(attended(query, key, value)))
    assert_near(present[0], key)


def test_values_of_another_size_have_no_present():
    sizes = [WIDTH, WIDTH, 2 * HEADS]
    weights = WEIGHTS[:, :sum(sizes)]
    output, present = microsoft.attention(X, weights, num_heads=HEADS, qkv_hidden_sizes=sizes,
                                          scale=0.3)
    parts = [by_head(part) for part in np.split(X @ weights, np.cumsum(sizes)[:2], axis=-1)]
    assert_near(output, merged(attended(*parts, scale=0.3)))
    assert present is None


def test_halves_are_rounded_once():
    """Keys and values too, which a later step reads."""
    x, weights, bias = (array.astype(np.float16) for array in (X, WEIGHTS, BIAS))
    output, present = microsoft.attention(x, weights, bias, num_heads=HEADS)
    query, key, value = (by_head(part) for part in np.split(
        x.astype(float) @ weights.astype(float) + bias.astype(float), 3, axis=-1))
    assert output.dtype == present.dtype == np.float16
    np.testing.assert_array_equal(present, np.stack([key, value]).astype(np.float16))
    exact = merged(attended(query, *present.astype(float)))
    np.testing.assert_allclose(output, exact, rtol=2**-10, atol=2e-5)
    assert (output != exact.astype(np.float16)).sum() <= output.size // 100


@pytest.mark.parametrize(("inputs", "options", "words"), [
    ([], {"x": X[0]}, "input, weights: got shapes"),
    ([], {"x": X[..., :5]}, "input, weights: got shapes"),
    ([], {"qkv_hidden_sizes": [WIDTH, WIDTH]}, "qkv_hidden_sizes: got"),
    ([], {"qkv_hidden_sizes": [WIDTH - 3, WIDTH + 3, WIDTH]}, "qkv_hidden_sizes: got"),
    ([], {"qkv_hidden_sizes": [WIDTH, WIDTH, WIDTH - 3]}, "qkv_hidden_sizes: got"),
    ([np.ones((BATCH, LEN + 1), int)], {}, "mask_index: got shape"),
    ([np.ones((BATCH, 1, 3, 3), int)], {}, "mask_index: got shape"),
    ([np.ones((BATCH, 1, 9, 9), int)], {"unidirectional": 1}, "mask_index: got shape"),
    ([None, PAST_KV[:, :1]], {}, "past: got shape"),
    ([None, PAST_KV[0]], {}, "past: got shape"),
    ([None, PAST_KV, np.ones(SCORES)[..., 1:]], {}, "attention_bias: got shape"),
    ([None, PAST_KV, None, 3], {}, "past_sequence_length: got 3 with past_present_share_buffer=0"),
    ([None, PAST_KV], {"past_present_share_buffer": 1}, "past_sequence_length: got None"),
    ([None, None, None, 3], {"past_present_share_buffer": 1}, "past_sequence_length: got 3"),
    ([None, PAST_KV, None, 3], {"past_present_share_buffer": 1},
     "past_sequence_length: got 3, wanted 0 to 1"),
    ([None, PAST_KV, None, -1], {"past_present_share_buffer": 1}, "past_sequence_length: got -1"),
    ([], {"do_rotary": 1, "rotary_embedding_dim": 3}, "rotary_embedding_dim: got 3"),
])
def test_attention_refuses(inputs, options, words):
    with pytest.raises(ValueError, match=words):
        attention(*inputs, **options)


# DecoderMaskedMultiHeadAttention


STEP = RNG.normal(size=(3, BATCH, 1, WIDTH))


def step(*inputs, **options):
    return microsoft.decoder_masked_multi_head_attention(*inputs, num_heads=HEADS, **options)


def test_a_step_behind_a_past():
    mask = np.array([[1, 0, 1, 1, 0, 1], [1] * 6])
    bias = RNG.normal(size=(BATCH, HEADS, 1, PAST + 1))
    output, present_key, present_value, qk = step(*STEP, mask, bias, *PAST_KV, bias=BIAS,
                                                  mask_filter_value=-3.0, output_qk=1, scale=0.5)
    query, key, value = behind_past(*(by_head(part + own) for part, own in zip(
        STEP, np.split(BIAS, 3))))
    added = np.where(mask, 0, -3.0)[:, None, None] + bias
    assert_near(output, merged(attended(query, key, value, added, scale=0.5)))
    assert_near([present_key, present_value], [key, value])
    assert_near(qk, query @ np.swapaxes(key, -1, -2) * 0.5 + added)
    first = step(*STEP)
    assert_near(first.output, STEP[2])
    assert_near(first.present_key, by_head(STEP[1]))
    assert first.qk is None


def test_packed_steps_and_buffers_have_the_same_bits():
    wanted = step(*STEP, past_key=PAST_KV[0], past_value=PAST_KV[1], bias=BIAS)
    packed = step(np.concatenate(STEP, axis=-1), past_key=PAST_KV[0], past_value=PAST_KV[1],
                  bias=BIAS)
    for got, right in zip(packed[:3], wanted):
        np.testing.assert_array_equal(got, right)
    buffers = np.pad(PAST_KV, [(0, 0)] * 3 + [(0, 3), (0, 0)], constant_values=np.nan)
    shared = step(*STEP, None, None, *buffers, PAST, bias=BIAS, past_present_share_buffer=1)
    np.testing.assert_array_equal(shared.output, wanted.output)
    np.testing.assert_array_equal(shared.present_value[:, :, :PAST + 1], wanted.present_value)
    assert np.isnan(buffers[..., PAST:, :]).all()


def test_cross_attention_has_all_keys():
    bias = RNG.normal(size=(1, 1, 1, PAST))
    output, present_key, _, _ = step(STEP[0], *PAST_KV, None, bias, bias=BIAS)
    query = by_head(STEP[0] + BIAS[:WIDTH])
    assert_near(output, merged(attended(query, *PAST_KV, bias)))
    np.testing.assert_array_equal(present_key, PAST_KV[0])


@pytest.mark.parametrize("shares_buffer", [False, True])
@pytest.mark.parametrize(("width", "sources"), [
    (2, [[0, 1, 1, 0, 1], [1, 1, 0, 0, 1]]), (1, [[0] * 5, [1] * 5])])
def test_beams_read_each_others_past(width, sources, shares_buffer):
    """Consecutive sequences are beams of one search; each position says whose key and value it
    has, as a number within the search."""
    beams = np.pad(np.reshape(sources, (-1, width, PAST)) % width, [(0, 0), (0, 0), (0, 1)])
    seen = PAST_KV.copy()
    for row in range(BATCH):
        for position in range(PAST):
            seen[:, row, :, position] = PAST_KV[:, sources[row][position], :, position]
    past, length = PAST_KV, None
    if shares_buffer:
        past, length = np.pad(PAST_KV, [(0, 0)] * 3 + [(0, 1), (0, 0)]), PAST
    got = step(*STEP, None, None, *past, length, width, beams,
               past_present_share_buffer=int(shares_buffer))
    right = step(*STEP, None, None, *seen)
    np.testing.assert_array_equal(got.output, right.output)
    np.testing.assert_array_equal(got.present_key[:, :, :PAST], PAST_KV[0])
    layers = microsoft.multi_head_attention(*STEP, None, None, None, *past, length, beams,
                                            num_heads=HEADS)
    np.testing.assert_array_equal(layers.output, right.output)


@pytest.mark.parametrize(("inputs", "options", "words"), [
    ([X, X, X], {}, "query: got shape"),
    ([STEP[0][:, 0]], {}, "query: got shape"),
    ([STEP[0], STEP[1]], {}, "key, value: got one"),
    ([STEP[0], STEP[1], PAST_KV[1]], {}, "value: got shape"),
    ([STEP[0], X, X], {}, "key: got shape"),
    ([STEP[0], *PAST_KV, None, None, *PAST_KV], {}, "past_key: got one beside a key"),
    ([*STEP, np.ones((BATCH, 1), int), None, *PAST_KV], {}, "mask_index: got shape"),
    ([*STEP, None, None, *PAST_KV, 3], {}, "past_sequence_length: got 3"),
    ([*STEP, None, None, *PAST_KV], {"past_present_share_buffer": 1}, "past_sequence_length"),
    ([*STEP, None, None, *PAST_KV, 5], {"past_present_share_buffer": 1},
     "past_sequence_length: got 5, wanted 0 to 4"),
    ([*STEP, None, None, *PAST_KV, [3, 3]], {"past_present_share_buffer": 1},
     "past_sequence_length: got shape"),
    ([*STEP, None, None, *PAST_KV, None, 2], {}, "beam_width: got 2 without"),
    ([*STEP, None, None, *PAST_KV, None, 1, np.zeros((1, 2, 5), int)], {}, "beam_width: got 1"),
    ([*STEP, None, None, *PAST_KV, None, 2, np.full((1, 2, 5), 2)], {},
     "cache_indirection: got 2 to 2"),
    ([*STEP, None, None, *PAST_KV, None, 2, np.zeros((1, 2, 4), int)], {},
     "cache_indirection: got shape"),
    ([*STEP], {"bias": BIAS[1:]}, "bias: got shape"),
])
def test_a_step_refuses(inputs, options, words):
    with pytest.raises(ValueError, match=words):
        step(*inputs, **options)
