"""mha.compat.onnx by answers made by hand; tests/peers/ compares it with ONNX Runtime and onnx.

A query of zeros gives every key that it sees the same weight, so that outputs are means of values.
"""

import pydoc
import subprocess
import sys

import numpy as np
import pytest

from mha.compat import onnx as compat
from mha.compat.onnx import attention, flex_attention, microsoft, rotary_embedding, tensor_scatter

CAPPED = 2 * np.tanh(0.5)


def column(*numbers, dtype=np.float64):
    """One head of width 1: (1, 1, len, 1)."""
    return np.array(numbers, dtype).reshape(1, 1, -1, 1)


def means(*numbers):
    """Attention's values by one head of width 1, as the means that the test wants."""
    return pytest.approx(np.array(numbers, float))


def attended(query_len, values, **options):
    """Outputs of queries of zeros."""
    outputs = attention(column(*[0] * query_len), column(*[1] * len(values)), column(*values),
                        **options)
    return outputs.Y.ravel()


# Attention


def test_every_key_is_seen_without_options():
    assert attended(1, [1, 2, 6]) == means(3)


@pytest.mark.parametrize(("options", "wanted"), [
    ({"is_causal": 1}, (1, 1.5)),
    ({"left_window_size": 0}, (3, 4)),
    ({"right_window_size": 0}, (1, 1.5)),
    ({"left_window_size": 0, "right_window_size": 1}, (1.5, 4)),
    ({"is_causal": 1, "left_window_size": 0, "right_window_size": 1}, (1, 2)),
    ({"nonpad_kv_seqlen": [2]}, (1.5, 1.5)),
    ({"nonpad_kv_seqlen": [2], "is_causal": 1}, (1, 1.5)),
    ({"nonpad_kv_seqlen": [3], "is_causal": 1}, (1.5, 3)),
    ({"nonpad_kv_seqlen": [1], "is_causal": 1}, (0, 1)),  # the first query stands before all keys
    ({"nonpad_kv_seqlen": [3], "left_window_size": 0}, (4, 6)),
    ({"attn_mask": np.array([[True, False, True], [False, False, False]])}, (3.5, 0)),
    ({"attn_mask": np.array([[0, -np.inf, 0], [-np.inf, 0, 0]])}, (3.5, 4)),
    ({"attn_mask": np.array([True, True])}, (1.5, 1.5)),  # what lies behind a mask is hidden
    ({"attn_mask": np.array([[0.0, 0.0]])}, (1.5, 1.5)),
    ({"attn_mask": np.array([[1, 1]])}, (1.5, 1.5)),  # numbers, that are added
    ({"attn_mask": np.array([[True], [False]])}, (1, 0)),
    ({"attn_mask": np.array([[True, False, True]]), "is_causal": 1}, (1, 1)),
    ({"attn_mask": np.log([[2, 1, 1]])}, (2.5, 2.5)),  # weights 1/2, 1/4, 1/4
])
def test_what_is_seen(options, wanted):
    assert attended(2, [1, 2, 6], **options) == means(*wanted)


def test_past_stands_in_front():
    past = {"past_key": column(5, 5), "past_value": column(10, 20)}
    assert attended(2, [3, 7], **past, is_causal=1) == means(11, 10)
    assert attended(1, [3], **past, left_window_size=1) == means(11.5)
    _, key, value, qk = attention(column(0), column(1), column(3), **past)
    assert key.ravel().tolist() == [5, 5, 1] and value.ravel().tolist() == [10, 20, 3]
    assert qk is None


@pytest.mark.parametrize(("mode", "wanted"), [
    (0, [[2, 4], [4, 8]]), (1, [[CAPPED * 2, 4 * np.tanh(1)], [4 * np.tanh(1), 4 * np.tanh(2)]]),
    (2, [[CAPPED * 2 + 1, -np.inf], [4 * np.tanh(1) + 1, 4 * np.tanh(2) - 1]]),
    (3, [[1, 0], [0.5, 0.5]])])
def test_qk_matmul_output(mode, wanted):
    if mode == 3:
        query, options = column(0, 0), {}
    else:
        query, options = column(1, 2), {"scale": 2, "softcap": 4,
                                        "attn_mask": np.array([[1.0, -1.0]])}
    outputs = attention(query, column(1, 2), column(0, 0), is_causal=1, return_qk=True,
                        qk_matmul_output_mode=mode, **options)
    np.testing.assert_allclose(outputs.qk_matmul_output, [[wanted]])


@pytest.mark.parametrize("mode", range(4))
def test_qk_matmul_output_of_groups(mode):
    """Heads 0 and 1 of the query share key head 0."""
    query, key = np.ones((1, 4, 1, 1), np.float16), np.array([1, 2]).reshape(1, 2, 1, 1)
    key = key.astype(np.float16)
    outputs = attention(query, key, key, return_qk=True, qk_matmul_output_mode=mode)
    assert outputs.Y.ravel().tolist() == [1, 1, 2, 2]
    assert outputs.qk_matmul_output.dtype == np.float16
    wanted = [1, 1, 1, 1] if mode == 3 else [1, 1, 2, 2]
    assert outputs.qk_matmul_output.ravel().tolist() == wanted


def test_three_dimensions_are_the_heads_side_by_side():
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, heads, length, size)) for heads, length, size in (
        (6, 4, 8), (3, 5, 8), (3, 5, 7)))
    side_by_side = [array.swapaxes(1, 2).reshape(2, array.shape[2], -1)
                    for array in (query, key, value)]
    four = attention(query, key, value, is_causal=1)
    three = attention(*side_by_side, q_num_heads=6, kv_num_heads=3, is_causal=1)
    assert three.Y.shape == (2, 4, 42)
    np.testing.assert_array_equal(three.Y.reshape(2, 4, 6, 7).swapaxes(1, 2), four.Y)
    np.testing.assert_array_equal(three.present_value, value)
    with_heads = attention(query, key, value, q_num_heads=6, kv_num_heads=3, is_causal=1)
    np.testing.assert_array_equal(with_heads.Y, four.Y)


def test_types_and_precision():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, 2, 5, 8)).astype(np.float32) for _ in range(3)]
    exact = attention(*(array.astype(np.float64) for array in arrays)).Y
    single = attention(*arrays).Y
    double = attention(*arrays, softmax_precision=11).Y
    assert single.dtype == double.dtype == np.float32
    np.testing.assert_array_equal(double, exact.astype(np.float32))
    assert abs(single - exact).max() > 0
    for precision in (1, 10, 16):
        np.testing.assert_array_equal(attention(*arrays, softmax_precision=precision).Y, single)
    halves = [array.astype(np.float16) for array in arrays]
    assert attention(*halves).Y.dtype == np.float16
    assert attention(*arrays[:2], halves[2]).Y.dtype == np.float32
    assert attention(*halves[:2], arrays[2]).Y.dtype == np.float16  # as query and key


def test_nan_behind_a_mask_stays_there():
    value = column(1, np.nan)
    assert attention(column(0), column(1, np.nan), value,
                     np.array([[True, False]])).Y.ravel() == means(1)


X = np.ones((2, 3, 4, 8), np.float32)


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"K": X[0]}, ValueError, "Q, K, V: got shapes"),
    ({"Q": X[0], "K": X[0], "V": X[0]}, ValueError, "q_num_heads: got None"),
    ({"Q": X[0], "K": X[0], "V": X[0], "q_num_heads": 3}, ValueError, "num_heads: got 3"),
    ({"q_num_heads": 2}, ValueError, "q_num_heads: got 2"),
    ({"kv_num_heads": 2}, ValueError, "kv_num_heads: got 2"),
    ({"past_key": X}, ValueError, "past_key, past_value: got one"),
    ({"past_key": X[:1], "past_value": X}, ValueError, "past_key: got shape"),
    ({"past_key": X, "past_value": X[..., :4]}, ValueError, "past_value: got shape"),
    ({"past_key": X, "past_value": X, "nonpad_kv_seqlen": [1, 1]}, ValueError, "nonpad_kv_seqlen"),
    ({"nonpad_kv_seqlen": [1, 5]}, ValueError, r"nonpad_kv_seqlen: got \[1, 5\]"),
    ({"nonpad_kv_seqlen": [1, 2, 3]}, ValueError, "nonpad_kv_seqlen: got shape"),
    ({"nonpad_kv_seqlen": [1.5, 2]}, TypeError, "nonpad_kv_seqlen"),
    ({"attn_mask": X[:, :2, :, 0]}, ValueError, "attn_mask: got shape"),
    ({"attn_mask": np.ones((4, 5))}, ValueError, "attn_mask: got shape"),
    ({"attn_mask": np.array(["a"])}, TypeError, "attn_mask: got an array of"),
    ({"left_window_size": -2}, ValueError, "left_window_size: got -2"),
    ({"right_window_size": -3}, ValueError, "right_window_size: got -3"),
    ({"qk_matmul_output_mode": 4}, ValueError, "qk_matmul_output_mode: got 4"),
    ({"softmax_precision": 2}, ValueError, "softmax_precision: got 2"),
    ({"softcap": -1.0}, ValueError, "softcap"),
    ({"Q": X.astype(complex)}, TypeError, "Q: got an array of complex128, wanted floats"),
    ({"V": X.astype(int)}, TypeError, "V: got an array of int64, wanted floats"),
    ({"K": X[:, :2], "V": X[:, :2], "return_qk": True}, ValueError, "key: got 2 heads"),
])
def test_attention_refuses(options, error, words):
    with pytest.raises(error, match=words):
        attention(**{"Q": X, "K": X, "V": X} | options)


# FlexAttention


def flexed(values, **options):
    """Outputs of two queries of zeros."""
    return flex_attention(column(0, 0), column(*[1] * len(values)), column(*values),
                          **options).ravel()


@pytest.mark.parametrize(("options", "wanted"), [
    ({}, (3, 3)),
    ({"score_mod": lambda scores: scores + np.log([2, 1, 1])}, (2.5, 2.5)),
    ({"score_mod": lambda scores: np.where(np.tri(2, 3), scores, -np.inf)}, (1, 1.5)),
    ({"score_mod": lambda scores: np.where([[0], [1]], scores, -np.inf)}, (0, 3)),  # none seen
    ({"prob_mod": lambda weights: weights * [[0.5], [2]]}, (1.5, 6)),
    ({"score_mod": lambda scores: np.where([0, 1, 1], scores, -np.inf),
      "prob_mod": lambda weights: np.where([1, 1, 0], weights, 0)}, (1, 1)),
])
def test_flex_attention(options, wanted):
    assert flexed([1, 2, 6], **options) == means(*wanted)


def test_scores_that_functions_are_given():
    found = {}

    def shown(name, array):
        found[name] = array
        return array

    query, key = np.float32([1, 2]).reshape(1, 2, 1, 1), np.float32([3, 5]).reshape(1, 1, 2, 1)
    flex_attention(query, key, key, scale=0.5, score_mod=lambda array: shown("scores", array),
                   prob_mod=lambda array: shown("weights", array))
    assert found["scores"].tolist() == [[[[1.5, 2.5]], [[3, 5]]]]
    assert found["weights"].dtype == np.float32
    np.testing.assert_allclose(found["weights"].sum(-1), 1, rtol=1e-6)
    flex_attention(query, key, key, softmax_precision=11,
                   prob_mod=lambda array: shown("double", array))
    assert found["double"].dtype == np.float64
    flexed([1], score_mod=lambda array: shown("of doubles", array))
    assert found["of doubles"].dtype == np.float64


def test_flex_attention_alone_is_attention():
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, heads, 5, 8)).astype(np.float32)
                         for heads in (6, 3, 3))
    right = attention(query, key, value).Y
    np.testing.assert_array_equal(flex_attention(query, key, value), right)
    for name in ("score_mod", "prob_mod"):
        got = flex_attention(query, key, value, **{name: lambda array: array})
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)
    hidden = value.copy()
    hidden[:, :, 3:] = np.nan
    got = flex_attention(query, key, hidden,
                         score_mod=lambda array: np.where(np.arange(5) < 3, array, -np.inf))
    np.testing.assert_allclose(got, attention(query, key[:, :, :3], value[:, :, :3]).Y, rtol=1e-5,
                               atol=1e-6)


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"Q": X[0]}, ValueError, "Q, K, V: got shapes"),
    ({"K": X[..., :2], "score_mod": abs}, ValueError, "Q, K, V: got shapes"),
    ({"V": X[:, :, :1], "score_mod": abs}, ValueError, "Q, K, V: got shapes"),
    ({"V": X.astype(int)}, TypeError, "V: got an array of int64"),
    ({"score_mod": lambda scores: scores[..., :1]}, ValueError, "score_mod: got shape"),
    ({"prob_mod": lambda weights: weights > 0}, TypeError, "prob_mod: got an array of bool"),
    ({"softmax_precision": 2}, ValueError, "softmax_precision: got 2"),
])
def test_flex_attention_refuses(options, error, words):
    with pytest.raises(error, match=words):
        flex_attention(**{"Q": X, "K": X, "V": X} | options)


# MultiHeadAttention


def seen(query_len, values, **options):
    """As `attended`, of com.microsoft's operator."""
    query, key, value = (np.array(numbers, np.float32).reshape(1, -1, 1)
                         for numbers in ([0] * query_len, [1] * len(values), values))
    return microsoft.multi_head_attention(query, key, value, num_heads=1, **options)


@pytest.mark.parametrize(("options", "wanted"), [
    ({}, (3, 3)),
    ({"unidirectional": 1}, (1, 1.5)),
    ({"key_padding_mask": [2]}, (1.5, 1.5)),
    ({"key_padding_mask": [2, 9, 9, 9, 9]}, (1.5, 1.5)),
    ({"key_padding_mask": [[1, 0, 1]]}, (3.5, 3.5)),
    ({"key_padding_mask": [[[1, 0, 1], [0, 1, 0]]]}, (3.5, 2)),
    ({"key_padding_mask": [[0, 0, 0]], "mask_filter_value": -8.0}, (3, 3)),  # not hidden
    ({"key_padding_mask": [[1, 0, 0]], "mask_filter_value": -np.log(2)}, (2.5, 2.5)),
    ({"attention_bias": np.log([[[[2, 1, 1]]]])}, (2.5, 2.5)),
    ({"attention_bias": [[[[0, 0, -np.inf]]]], "key_padding_mask": [[0, 1, 1]]}, (2, 2)),
    ({"bias": [9, 9, 4]}, (7, 7)),
])
def test_multi_head_attention(options, wanted):
    assert seen(2, [1, 2, 6], **options).output.ravel() == means(*wanted)


def test_past_of_multi_head_attention():
    past = {"past_key": column(5, 5), "past_value": column(10, 20)}
    output, key, value, qk = seen(2, [3, 7], **past, unidirectional=1, return_qk=True,
                                  bias=[1, 2, 0])
    assert key.ravel().tolist() == [5, 5, 3, 3] and value.ravel().tolist() == [10, 20, 3, 7]
    assert qk.tolist() == [[[[5, 5, 3, -np.inf], [5, 5, 3, 3]]]]
    weight = np.exp(-2)
    assert output.ravel() == means((30 + 3 * weight) / (2 + weight),
                                   (30 + 10 * weight) / (2 + 2 * weight))


def test_layouts_of_multi_head_attention():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(2, 5, 3, 4)).astype(np.float32) for _ in range(3)]
    query, key, value = (array.reshape(2, 5, 12) for array in arrays)
    by_head = [array.swapaxes(1, 2) for array in arrays]
    packed = np.stack(arrays, axis=3)
    bias = rng.normal(size=36).astype(np.float32)

    def output(*inputs, **options):
        return microsoft.multi_head_attention(*inputs, num_heads=3, **options).output

    wanted = output(query, key, value)
    np.testing.assert_array_equal(
        wanted.reshape(2, 5, 3, 4).swapaxes(1, 2), attention(*by_head).Y)
    np.testing.assert_array_equal(output(query, *by_head[1:]), wanted)
    np.testing.assert_array_equal(output(query, packed[:, :, :, 1:]), wanted)
    np.testing.assert_array_equal(output(packed), wanted)
    added = output(*(array + part for array, part in zip((query, key, value), np.split(bias, 3))))
    np.testing.assert_array_equal(output(query, key, value, bias), added)
    np.testing.assert_array_equal(output(packed, None, None, bias), added)
    np.testing.assert_array_equal(output(query, *by_head[1:], bias),
                                  output(query + bias[:12], key, value))
    np.testing.assert_array_equal(output(query, key, value, scale=0), wanted)
    half = output(query, key, value, scale=0.25)
    assert abs(half - wanted).max() > 0.01


Q = np.ones((2, 4, 6), np.float32)


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"key": None}, ValueError, "query, key, value: got dimensions"),
    ({"value": None}, ValueError, "query, key, value: got dimensions"),
    ({"query": np.ones((2, 4, 2, 2, 3)), "key": None, "value": None}, ValueError,
     r"query: got shape \(2, 4, 2, 2, 3\), wanted"),
    ({"key": np.ones((2, 4, 2, 3, 3)), "value": None}, ValueError, "key: got shape"),
    ({"key": np.ones((2, 4, 2, 2, 3)), "value": None, "bias": np.ones(18)}, ValueError,
     "bias: got one beside packed"),
    ({"bias": np.ones(12)}, ValueError, r"bias: got shape \(12,\), wanted \(18,\)"),
    ({"value": Q.astype(int)}, TypeError, "value: got an array of int64, wanted floats"),
    ({"num_heads": 4}, ValueError, "num_heads: got 4"),
    ({"num_heads": 0}, ValueError, "num_heads: got 0"),
    ({"key_padding_mask": np.ones((2, 5), int)}, ValueError, "key_padding_mask: got shape"),
    ({"key_padding_mask": np.ones((2, 4))}, TypeError, "key_padding_mask: got an array"),
    ({"attention_bias": np.ones((2, 3, 4, 4))}, ValueError, "attention_bias: got shape"),
    ({"past_value": np.ones((2, 2, 4, 3))}, ValueError, "past_key, past_value: got one"),
    ({"past_sequence_length": [3]}, ValueError, "past_key: got None beside"),
    ({"cache_indirection": np.ones((2, 2, 4), int)}, ValueError, "cache_indirection: got shape"),
])
def test_multi_head_attention_refuses(options, error, words):
    with pytest.raises(error, match=words):
        microsoft.multi_head_attention(
            **{"query": Q, "key": Q, "value": Q, "num_heads": 2} | options)


# RotaryEmbedding: by a quarter of a turn at position 1, (a, b) becomes (-b, a)

COSINE, SINE = np.array([[1.0, 1], [0, 0]]), np.array([[0.0, 0], [1, 1]])
HEAD = np.array([[[[1, 2, 3, 4, 5]]]], np.float32)


@pytest.mark.parametrize(("interleaved", "size", "dims", "wanted"), [
    (0, 4, 0, [-3, -4, 1, 2]), (1, 4, 0, [-2, 1, -4, 3]), (0, 5, 4, [-3, -4, 1, 2, 5]),
    (True, 5, 4, [-2, 1, -4, 3, 5])])
def test_rotary_embedding(interleaved, size, dims, wanted):
    x = HEAD[..., :size]
    options = {"interleaved": interleaved, "rotary_embedding_dim": dims}
    turned = rotary_embedding(x, COSINE, SINE, [[1]], **options)
    assert turned.dtype == np.float32 and turned.ravel().tolist() == wanted
    given = rotary_embedding(x, COSINE[1:, None], SINE[1:, None], **options)
    np.testing.assert_array_equal(given, turned)
    side_by_side = rotary_embedding(np.concatenate([x[0], x[0]], -1), COSINE, SINE, [[1]],
                                    num_heads=2, **options)
    assert side_by_side.tolist() == [[wanted * 2]]
    theirs = microsoft.rotary_embedding(x, [1], COSINE, SINE, **options)
    np.testing.assert_array_equal(theirs, turned)


def test_positions_of_com_microsoft():
    x = np.tile(np.float32([1, 2]), (2, 2, 1))  # (batch, len, head_size)
    turned = microsoft.rotary_embedding(x, [[0, 1], [1, 0]], COSINE[:, :1], SINE[:, :1])
    assert turned.tolist() == [[[1, 2], [-2, 1]], [[-2, 1], [1, 2]]]
    counted = microsoft.rotary_embedding(x, 0, COSINE[:, :1], SINE[:, :1], is_packed_batching=1)
    assert counted.tolist() == [[[1, 2], [-2, 1]]] * 2


def test_halves_turn_in_float32():
    cosine = sine = np.full((1, 1, 1), np.float16(0.7))
    x = np.array([[[[3, 5]]]], np.float16)
    exact = np.float32(np.float16(0.7)) * np.array([-2, 8], np.float32)
    turned = rotary_embedding(x, cosine, sine)
    assert turned.dtype == np.float16
    np.testing.assert_array_equal(turned.ravel(), exact.astype(np.float16))


@pytest.mark.parametrize(("inputs", "options", "error", "words"), [
    ((HEAD[0, 0], COSINE, SINE), {}, ValueError, "shape"),
    ((HEAD[0], COSINE, SINE), {}, ValueError, "num_heads: got None"),
    ((HEAD, COSINE, SINE, [[1]]), {}, ValueError, "rotary_embedding_dim: got 5"),
    ((HEAD, COSINE, SINE, [[1]]), {"rotary_embedding_dim": 6}, ValueError,
     "rotary_embedding_dim: got 6"),
    ((HEAD, COSINE, SINE, [[1]]), {"rotary_embedding_dim": 2}, ValueError, "cos_cache: got shape"),
    ((HEAD[..., :4], COSINE, SINE[:1], [[1]]), {}, ValueError, "sin_cache: got shape"),
    ((HEAD[..., :4], COSINE, SINE), {}, ValueError, "cos_cache: got shape"),
    ((HEAD[..., :4], COSINE, SINE, [[2]]), {}, ValueError, "position_ids: got 2 to 2"),
    ((HEAD[..., :4], COSINE, SINE, [[-1]]), {}, ValueError, "position_ids: got -1"),
    ((HEAD[..., :4], COSINE, SINE, [1]), {}, ValueError, "position_ids: got shape"),
    ((HEAD[..., :4], COSINE, SINE, [[0.5]]), {}, TypeError, "position_ids"),
    ((HEAD[..., :4].astype(int), COSINE, SINE, [[0]]), {}, TypeError, "X: got an array of int64"),
])
def test_rotary_embedding_refuses(inputs, options, error, words):
    with pytest.raises(error, match=words):
        rotary_embedding(*inputs, **options)


def test_rotary_embedding_of_com_microsoft_refuses():
    def call(x=HEAD[0, :, :, :4], **options):
        return microsoft.rotary_embedding(x, [[0]], COSINE, SINE, **options)

    with pytest.raises(NotImplementedError, match="scale: got 2"):
        call(scale=2.0)
    with pytest.raises(ValueError, match="num_heads: got 0 with rotary_embedding_dim"):
        call(rotary_embedding_dim=4)
    with pytest.raises(ValueError, match="input, cos_cache: got shapes"):
        call(HEAD[0, 0])


# TensorScatter


@pytest.mark.parametrize(("options", "wanted"), [
    ({}, [[7, 8, 0, 0], [9, 7, 0, 0]]),
    ({"write_indices": [1, 2]}, [[0, 7, 8, 0], [0, 0, 9, 7]]),
    ({"write_indices": [3, 6], "mode": "circular"}, [[8, 0, 0, 7], [0, 0, 9, 7]]),
])
def test_tensor_scatter(options, wanted):
    cache = np.zeros((2, 4), int)
    for shape, axis in (((2, 4), -1), ((2, 4), 1), ((2, 4, 1), -2), ((2, 1, 4), 2)):
        at = cache.reshape(shape)
        update = np.reshape([[7, 8], [9, 7]], [2 if size == 4 else size for size in shape])
        got = tensor_scatter(at, update, axis=axis, **options)
        assert got.reshape(2, 4).tolist() == wanted and got.shape == shape
    assert not cache.any()


def test_a_scattered_cache_is_attended_to_by_lengths():
    rng = np.random.default_rng(0)
    key, value = rng.normal(size=(2, 2, 1, 5, 4))
    query = rng.normal(size=(2, 3, 1, 4))
    caches = [tensor_scatter(np.full((2, 1, 9, 4), np.nan), new) for new in (key, value)]
    got = attention(query, *caches, None, None, None, [5, 5]).Y
    np.testing.assert_array_equal(got, attention(query, key, value).Y)


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"update": np.zeros((2, 3, 1), np.float32)}, TypeError, "update: got an array of float32"),
    ({"update": np.zeros((2, 5, 1))}, ValueError, "update: got shape"),
    ({"update": np.zeros((1, 2, 1))}, ValueError, "update: got shape"),
    ({"axis": 0}, ValueError, "axis: got 0"),
    ({"axis": 3}, ValueError, "axis: got 3"),
    ({"axis": -3}, ValueError, "axis: got -3"),
    ({"mode": "round"}, ValueError, "mode: got 'round'"),
    ({"write_indices": [0, 3]}, ValueError, r"write_indices: got \[0, 3\], wanted 0 to 2"),
    ({"write_indices": [0, -1]}, ValueError, "write_indices: got"),
    ({"write_indices": [0, 0, 0]}, ValueError, "write_indices: got shape"),
])
def test_tensor_scatter_refuses(options, error, words):
    with pytest.raises(error, match=words):
        tensor_scatter(**{"past_cache": np.zeros((2, 4, 1)), "update": np.zeros((2, 2, 1))}
                       | options)


# The module


def test_onnx_is_imported_by_new_ops_alone():
    program = "import sys, mha.compat.onnx; print([name for name in sys.modules if 'onnx' in name])"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True,
                            text=True).stdout
    assert "'onnx" not in loaded and "mha.compat.onnx" in loaded


def test_new_ops_without_onnx(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)  # where it is installed, too
    with pytest.raises(ImportError, match="onnx"):
        compat.new_ops()


def test_help_shows_annotations_as_they_are_written():
    functions = [getattr(microsoft, name) for name in microsoft.__all__ if name.islower()]
    assert len(functions) == 5
    for function in (attention, rotary_embedding, flex_attention, tensor_scatter, *functions):
        assert "_SupportsArray" not in pydoc.plain(pydoc.render_doc(function))
