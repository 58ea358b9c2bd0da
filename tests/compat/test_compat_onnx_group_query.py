"""GroupQueryAttention of com.microsoft beside loops in float64; tests/peers/ compares it with ONNX
Runtime. The loops know a sequence's whole history, and no cache."""

import numpy as np
import pytest

from mha.compat.onnx import microsoft

BATCH, HEADS, KV_HEADS, SIZE, LONGEST = 2, 6, 2, 10, 24
RNG = np.random.default_rng(0)
QUERY = RNG.normal(size=(BATCH, LONGEST, HEADS * SIZE))
KEY, VALUE = RNG.normal(size=(2, BATCH, LONGEST, KV_HEADS * SIZE))
COSINE, SINE = RNG.normal(size=(2, 40, 3))  # of 6 columns
BIAS = RNG.normal(size=(BATCH, HEADS, LONGEST, LONGEST))
SINK = RNG.normal(size=HEADS)
NORMS = RNG.normal(size=(2, SIZE))


def group_query_attention(*inputs, **options):
    return microsoft.group_query_attention(*inputs, num_heads=HEADS, kv_num_heads=KV_HEADS,
                                           **options)


def turned(row, position, interleaved):
    row = row.copy()
    for c in range(3):
        a, b = (2 * c, 2 * c + 1) if interleaved else (c, c + 3)
        cosine, sine = COSINE[position, c], SINE[position, c]
        row[a], row[b] = row[a] * cosine - row[b] * sine, row[b] * cosine + row[a] * sine
    return row


def prepared(row, norm, position, options):
    """A head's row of a query or key as attention sees it."""
    if norm is not None:
        row = row / np.sqrt((row**2).mean() + 1e-3) * norm
    if options.get("do_rotary"):
        row = turned(row, position, options.get("rotary_interleaved"))
    return row


def exactly(b, position, known, options, norms=(None, None), bias=None, sink=None):
    """The output (HEADS, SIZE) of the query at this position of sequence b, of which so many
    positions are known."""
    outputs = np.empty((HEADS, SIZE))
    window = options.get("local_window_size", -1)
    first = 0 if window == -1 else max(0, position + 1 - window)
    last = position + 1 if options.get("causal", 1) else known
    for h in range(HEADS):
        g = h // (HEADS // KV_HEADS)
        query = prepared(QUERY[b, position].reshape(HEADS, SIZE)[h], norms[0], position, options)
        scores, values = [], []
        for j in range(first, last):
            key = prepared(KEY[b, j].reshape(KV_HEADS, SIZE)[g], norms[1], j, options)
            score = query @ key * options.get("scale", SIZE**-0.5)
            cap = options.get("softcap")
            score = cap * np.tanh(score / cap) if cap else score
            scores.append(score + (0 if bias is None else bias[b, h, position, j]))
            values.append(VALUE[b, j].reshape(KV_HEADS, SIZE)[g])
        others = [] if sink is None else [sink[h]]
        weights = np.exp(scores) / np.exp([*scores, *others]).sum()
        outputs[h] = weights @ np.array(values)
    return outputs.reshape(-1)


def rows_of(array, starts, count):
    """count rows of each sequence from its start on."""
    return np.stack([array[b, start:start + count] for b, start in enumerate(starts)])


OPTIONS = [
    {}, {"do_rotary": 1}, {"do_rotary": 1, "rotary_interleaved": 1}, {"local_window_size": 4},
    {"softcap": 1.5, "scale": 0.7}, {"smooth_softmax": 1}, {"sink": SINK}, {"bias": BIAS},
    {"norms": NORMS, "qk_norm_epsilon": 1e-3}, {"norms": NORMS, "do_rotary": 1,
                                                "q_norm_epsilon": 1e-3, "k_norm_epsilon": 1e-3},
    {"local_window_size": 3, "bias": BIAS, "sink": SINK, "do_rotary": 1, "softcap": 2.0},
]


def run(new, past, total_lens, query_lens, options):
    """One call, with NaN in new rows beyond query_lens."""
    options = dict(options)
    bias, sink = options.pop("bias", None), options.pop("sink", None)
    norms = options.pop("norms", (None, None))
    total_lens, query_lens = np.array(total_lens), np.array(query_lens)
    starts, count = total_lens - query_lens, query_lens.max()
    inputs = [rows_of(array, starts, count) for array in new]
    for array in inputs:
        array[np.arange(count) >= query_lens[:, None]] = np.nan
    if bias is not None:
        bias = np.stack([BIAS[b, :, start:start + count] for b, start in enumerate(starts)])
    caches = None, None
    if options.get("do_rotary"):  # of no more positions than there are
        caches = COSINE[:total_lens.max()], SINE[:total_lens.max()]
    return group_query_attention(*inputs, *past, total_lens - 1, LONGEST, *caches, None, bias, sink,
                                 None, None, *norms, query_lens, **options)


def exact_rows(total_lens, query_lens, options):
    options = dict(options)
    of_scores = {name: options.pop(name) for name in ("bias", "sink", "norms") if name in options}
    if options.get("smooth_softmax") == 1:
        of_scores["sink"] = np.zeros(HEADS)
    return [[exactly(b, position, total, options, **of_scores)
             for position in range(total - count, total)]
            for b, (total, count) in enumerate(zip(total_lens, query_lens))]


NOTHING = np.full((BATCH, KV_HEADS, LONGEST, SIZE), np.nan)
CALLS = [([7, 5], [7, 5]), ([8, 9], [1, 4]), ([8, 14], [0, 5]), ([14, 15], [6, 1])]


def calls(past, options, new=(QUERY, KEY, VALUE)):
    """Outputs of calls behind each other; each cache is the next call's past."""
    for total_lens, query_lens in CALLS:
        output, *past, _ = run(new, past, total_lens, query_lens, options)
        yield total_lens, query_lens, output, past


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_sequences_in_calls(options):
    """Each of its own length, right padded; NaN in padding and in caches goes nowhere."""
    for total_lens, query_lens, output, past in calls([NOTHING, NOTHING], options):
        for b, wanted in enumerate(exact_rows(total_lens, query_lens, options)):
            np.testing.assert_allclose(output[b, :len(wanted)], np.reshape(
                wanted, (-1, HEADS * SIZE)), rtol=1e-10, atol=1e-10)
            assert not output[b, len(wanted):].any()
        for b, total in enumerate(total_lens):
            value = VALUE[b, :total].reshape(total, KV_HEADS, SIZE).swapaxes(0, 1)
            np.testing.assert_array_equal(past[1][b, :, :total], value)
            assert not past[1][b, :, total:].any()


@pytest.mark.parametrize("options", [
    {}, {"do_rotary": 1}, {"bias": BIAS}, {"sink": SINK, "softcap": 2.0}])
@pytest.mark.parametrize(("capacity", "window"), [(3, 3), (6, 3), (9, 3), (6, 6)])
def test_window_caches_have_the_last_positions(capacity, window, options):
    options = {**options, "local_window_size": window}
    cache = NOTHING[:, :, :capacity]
    whole = calls([NOTHING, NOTHING], options)
    windowed = calls([cache, cache], {**options, "sliding_window_cache": 1})
    for (totals, counts, right, long), (_, _, output, short) in zip(whole, windowed, strict=True):
        for b, count in enumerate(counts):
            np.testing.assert_allclose(output[b, :count], right[b, :count], rtol=1e-12,
                                       atol=1e-12)
        for b, total in enumerate(totals):
            kept = total
            while kept > capacity:  # what is dropped is dropped at once
                kept -= capacity - window + 1
            assert min(total, window) <= kept <= capacity
            for all_rows, last_rows in zip(long, short):
                np.testing.assert_array_equal(last_rows[b, :, :kept],
                                              all_rows[b, :, total - kept:total])
                assert not last_rows[b, :, kept:].any()


def test_bits_do_not_depend_on_how_a_sequence_is_cut():
    new = [array[:1].astype(np.float32) for array in (QUERY, KEY, VALUE)]
    whole = group_query_attention(*new, None, None, [LONGEST - 1], LONGEST, COSINE, SINE,
                                  do_rotary=1)
    past, outputs = (None, None), []
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 19), (19, LONGEST)):
        part = [array[:, start:stop] for array in new]
        output, *past, _ = group_query_attention(*part, *past, [stop - 1], stop, COSINE, SINE,
                                                 do_rotary=1)
        outputs.append(output)
    np.testing.assert_array_equal(np.concatenate(outputs, axis=1), whole.output)
    np.testing.assert_array_equal(past[0], whole.present_key)


def test_packed_and_shared_keys():
    new = [array[:, :5] for array in (QUERY, KEY, VALUE)]
    wanted = group_query_attention(*new, None, None, [4, 4], 5)
    packed = group_query_attention(np.concatenate(new, axis=-1), None, None, None, None, [4, 4], 5)
    for got, right in zip(packed[:3], wanted):
        np.testing.assert_array_equal(got, right)
    nothing = np.empty((BATCH, 0, KV_HEADS * SIZE))
    shared = group_query_attention(new[0][:, 3:], nothing, nothing, *wanted[1:3], [4, 4], 5)
    np.testing.assert_array_equal(shared.output, wanted.output[:, 3:])
    np.testing.assert_array_equal(shared.present_key, wanted.present_key)


@pytest.mark.parametrize("causal", [0, 1])
def test_every_key_is_seen_without_causal(causal):
    new = [array[:, :5] for array in (QUERY, KEY, VALUE)]
    output = group_query_attention(*new, None, None, [4, 2], 5, causal=causal).output
    for b, total in ((0, 5), (1, 3)):
        for position in range(total):
            np.testing.assert_allclose(
                output[b, position], exactly(b, position, total, {"causal": causal}), rtol=1e-10,
                atol=1e-10)
    assert not output[1, 3:].any()


def test_left_padding_by_a_bias():
    """Positions of padding are hidden from all; a query that is padding itself sees none."""
    new = [array[:, :6] for array in (QUERY, KEY, VALUE)]
    bias = np.zeros((BATCH, 1, 6, 6))
    bias[1, ..., :2] = -np.inf
    padded = group_query_attention(*new, None, None, [5, 5], 6, None, None, None, bias)
    alone = group_query_attention(*(array[1:, 2:] for array in new), None, None, [3], 4)
    np.testing.assert_allclose(padded.output[1, 2:], alone.output[0], rtol=1e-12)
    assert not padded.output[1, :2].any()


def test_scores_and_weights():
    new = [array[:, :4] for array in (QUERY, KEY, VALUE)]
    options = {"local_window_size": 2, "smooth_softmax": 1}
    scores = group_query_attention(*new, None, None, [3, 2], 4, qk_output=1, **options).output_qk
    weights = group_query_attention(*new, None, None, [3, 2], 4, qk_output=2, **options).output_qk
    query = new[0].reshape(BATCH, 4, HEADS, SIZE).swapaxes(1, 2)
    key = np.repeat(new[1].reshape(BATCH, 4, KV_HEADS, SIZE).swapaxes(1, 2), 3, axis=1)
    seen = np.tri(4, dtype=bool) & ~np.tri(4, k=-2, dtype=bool)
    wanted = np.where(seen, query @ np.swapaxes(key, -1, -2) / SIZE**0.5, -np.inf)
    wanted[1, ..., 3] = -np.inf
    np.testing.assert_allclose(scores, wanted, rtol=1e-10)
    np.testing.assert_allclose(weights, np.exp(wanted) / (
        1 + np.exp(wanted).sum(-1, keepdims=True)), rtol=1e-10)


def test_position_ids():
    """In a first prompt the first number counts alone, as ONNX Runtime documents it."""
    new = [array[:, :3] for array in (QUERY, KEY, VALUE)]
    ids = np.array([[7, 1, 2], [4, 5, 6]])
    caches = COSINE, SINE
    empty = NOTHING[:, :, :3]

    def keys(position_ids, *query_seqlens):
        others = [None] * 6 if query_seqlens else []
        return group_query_attention(*new, empty, empty, [2, 2], 3, *caches, position_ids, *others,
                                     *query_seqlens, do_rotary=1).present_key

    def wanted(positions):
        return [[[turned(KEY[b, i].reshape(KV_HEADS, SIZE)[g], positions[b][i], False)
                  for i in range(3)] for g in range(KV_HEADS)] for b in range(BATCH)]

    np.testing.assert_allclose(keys(ids), wanted([[7, 8, 9]] * 2), rtol=1e-12)
    np.testing.assert_allclose(keys(ids, [3, 3]), wanted(ids), rtol=1e-12)
    np.testing.assert_allclose(keys(None), wanted([[0, 1, 2]] * 2), rtol=1e-12)


def test_halves():
    """Computed in float32 and rounded once; keys after their rotation."""
    new = [array[:, :5].astype(np.float16) for array in (QUERY, KEY, VALUE)]
    lengths = [4, 4], 5, COSINE, SINE
    output, key, value, _ = group_query_attention(*new, None, None, *lengths, do_rotary=1)
    assert output.dtype == key.dtype == value.dtype == np.float16
    query, *others = (array.astype(float) for array in new)
    exact = group_query_attention(query, *others, None, None, *lengths, do_rotary=1)
    np.testing.assert_array_equal(value, exact.present_value)
    np.testing.assert_allclose(key, exact.present_key, rtol=2**-11, atol=1e-6)
    of_rounded = group_query_attention(
        query, others[0][:, :0], others[1][:, :0], key.astype(float), value.astype(float), *lengths,
        do_rotary=1)
    np.testing.assert_allclose(output, of_rounded.output, rtol=2**-11, atol=2e-6)


def call(**changed):
    names = ("query", "key", "value", "past_key", "past_value", "seqlens_k",
             "total_sequence_length")
    inputs = dict(zip(names, (QUERY[:, :3], KEY[:, :3], VALUE[:, :3], None, None, [2, 2], 3)))
    return microsoft.group_query_attention(
        **{**inputs, "num_heads": HEADS, "kv_num_heads": KV_HEADS, **changed})


@pytest.mark.parametrize(("changed", "error", "words"), [
    ({"key": None}, ValueError, "key, value: got one"),
    ({"query": QUERY[..., 1:]}, ValueError, "query: got shape"),
    ({"kv_num_heads": 4}, ValueError, "query: got shape .* num_heads=6, a multiple"),
    ({"key": KEY[:, :2]}, ValueError, "key: got shape"),
    ({"value": VALUE[:, :3, 1:]}, ValueError, "value: got shape"),
    ({"value": VALUE[:, :3].astype(int)}, TypeError, "value: got an array of int64"),
    ({"past_key": NOTHING}, ValueError, "past_key, past_value: got one"),
    ({"past_key": NOTHING[:, :1], "past_value": NOTHING}, ValueError, "past_key: got shape"),
    ({"past_key": NOTHING, "past_value": NOTHING[..., 1:]}, ValueError, "past_value: got shape"),
    ({"past_key": NOTHING, "past_value": NOTHING[:, :, 1:]}, ValueError, "past_value: got shape"),
    ({"past_key": NOTHING[0], "past_value": NOTHING}, ValueError, "past_key: got shape"),
    ({"seqlens_k": [2]}, ValueError, "seqlens_k: got shape"),
    ({"seqlens_k": [2, 3]}, ValueError, r"seqlens_k: got \[2, 3\], wanted 0 to 2"),
    ({"seqlens_k": [2, -1]}, ValueError, "seqlens_k: got"),
    ({"seqlens_k": [2.0, 2.0]}, TypeError, "seqlens_k: got an array"),
    ({"total_sequence_length": [3, 3]}, ValueError, "total_sequence_length: got shape"),
    ({"total_sequence_length": 9, "seqlens_k": [4, 2]}, ValueError, "past_key: got 0 rows"),
    ({"query_seqlens": [4, 0]}, ValueError, "query_seqlens: got"),
    ({"query_seqlens": [3, 3], "causal": 0}, ValueError, "query_seqlens: got it with causal=0"),
    ({"local_window_size": 0}, ValueError, "local_window_size: got 0"),
    ({"local_window_size": 2, "causal": 0}, ValueError, "local_window_size: got 2 with causal=0"),
    ({"qk_output": 3}, ValueError, "qk_output: got 3"),
    ({"do_rotary": 1}, ValueError, "cos_cache, sin_cache: got None"),
    ({"do_rotary": 1, "cos_cache": COSINE, "sin_cache": SINE[:, :2]}, ValueError, "sin_cache"),
    ({"do_rotary": 1, "cos_cache": COSINE[:2], "sin_cache": SINE[:2]}, ValueError,
     "position_ids: got 0 to 2"),
    ({"do_rotary": 1, "cos_cache": COSINE, "sin_cache": SINE,
      "position_ids": np.zeros((BATCH, 2), int)}, ValueError, "position_ids: got shape"),
    ({"attention_bias": np.zeros((BATCH, HEADS, 3, 4))}, ValueError, "attention_bias: got shape"),
    ({"head_sink": SINK[1:]}, ValueError, "head_sink: got shape"),
    ({"q_norm_weight": NORMS[0]}, ValueError, "q_norm_weight, k_norm_weight: got one"),
    ({"q_norm_weight": NORMS[0], "k_norm_weight": NORMS[1, 1:]}, ValueError,
     "k_norm_weight: got shape"),
    ({"q_norm_weight": NORMS[0], "k_norm_weight": NORMS[1], "k_norm_epsilon": 0.0}, ValueError,
     "k_norm_epsilon: got 0"),
    ({"sliding_window_cache": 1}, ValueError, "sliding_window_cache: got 1 with"),
    ({"sliding_window_cache": 1, "local_window_size": 2}, ValueError, "past_key: got 0 rows"),
    ({"sliding_window_cache": 1, "local_window_size": 2, "qk_output": 1}, ValueError,
     "sliding_window_cache: got 1"),
    ({"k_quant_type": "PER_TENSOR"}, NotImplementedError, "k_quant_type: got 'PER_TENSOR'"),
    ({"v_quant_type": "PER_CHANNEL"}, NotImplementedError, "v_quant_type"),
    ({"kv_cache_bit_width": 8}, NotImplementedError, "kv_cache_bit_width: got 8"),
    ({"k_scale": np.ones(1)}, NotImplementedError, "k_scale: got an array"),
    ({"v_scale": np.ones(1)}, NotImplementedError, "v_scale"),
])
def test_what_is_refused(changed, error, words):
    with pytest.raises(error, match=words):
        call(**changed)
