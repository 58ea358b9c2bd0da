"""mha.compat.flash_attn on NumPy arrays, over flash-attention's own parameter grid, against its
formula in float64; tests/peers/test_compat_flash_attn.py has tensors and gradients."""

import inspect

import flash_attention_grid as grid
import numpy as np
import pytest
from half_types import BFLOAT16

import mha
from mha.compat import flash_attn as fa
from mha.compat.flash_attn import bert_padding

# The rounding of a result, relative to it.
TYPES = {np.dtype(np.float64): 2.0**-53, np.dtype(np.float32): 2.0**-24,
         np.dtype(np.float16): 2.0**-11, BFLOAT16: 2.0**-8}
DENSE = {"causal": (False, True), "local": (False, True), "alibi": (None, "heads", "batch"),
         "softcap": (0.0, 50.0), "packed": (False, True), "dtype": tuple(TYPES)}
CACHE = {"new_kv": (False, True), "causal": (False, True), "local": (False, True),
         "alibi": (None, "batch"), "new_is_query": (True, False), "interleaved": (True, False),
         "rotary": (0.0, 0.5, 1.0), "leftpad": (False, True), "batch_idx": (False, True),
         "dtype": tuple(TYPES)}


def cases(lengths, long, axes, count=96):
    """By day short ones, by night (--all) many, and long ones."""
    return [*grid.grid(lengths, count, 0, **axes), *(
        pytest.param(case, marks=pytest.mark.thorough)
        for case in [*grid.grid(lengths, 2 * count, 1, **axes), *grid.grid(long, 24, 2, **axes)])]


def drawn(case, batch=2):
    """q, k, v (batch, len, heads, head_dim) and slopes."""
    rng = np.random.default_rng(0)
    (query_len, key_len), (heads, kv_heads) = case["lengths"], grid.HEADS[case["kind"]]
    q, k, v = (rng.standard_normal((batch, length, count, case["head_dim"])).astype(case["dtype"])
               for length, count in ((query_len, heads), (key_len, kv_heads), (key_len, kv_heads)))
    slopes = {None: None, "heads": 0.3 * rng.random(heads),
              "batch": 0.3 * rng.random((batch, heads))}
    return q, k, v, slopes[case["alibi"]]


def own_slopes(slopes, s):
    return slopes if slopes is None or slopes.ndim == 1 else slopes[s]


def by_formula(q, k, v, slopes, s, **options):
    return grid.attention(np, *(array.astype(np.float64) for array in (q, k, v)),
                          slopes=own_slopes(slopes, s), **options)


def check(output, lse, wanted, wanted_lse, case, slopes):
    """Scores are sums of head_dim products and a bias, each rounded; a weight's relative error is
    the error of its score. The result is rounded once more, halves to their own type."""
    rounding = TYPES[np.dtype(np.float64 if output.dtype == np.float64 else np.float32)]
    largest_bias = 0 if slopes is None else slopes.max() * max(case["lengths"])
    of_scores = 4 * rounding * (10 + largest_bias + case.get("softcap", 0.0))
    error = np.abs(output.astype(np.float64) - wanted)
    bound = TYPES[output.dtype] * np.abs(wanted) + of_scores + 2.0**-25 * (output.itemsize == 2)
    assert (error <= bound).all(), (error.max(), (error / bound).max())
    assert lse.dtype == (np.float64 if output.dtype == np.float64 else np.float32)
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=of_scores)


@pytest.mark.parametrize("case", cases(grid.LENGTHS, grid.LONG, DENSE), ids=grid.name_of)
def test_dense(case):
    q, k, v, slopes = drawn(case)
    window = grid.window_of(case["local"], k.shape[1], 1)
    options = {"causal": case["causal"], "softcap": case["softcap"]}
    if case["packed"]:
        call, arrays = fa.flash_attn_kvpacked_func, (q, np.stack([k, v], axis=2))
    else:
        call, arrays = fa.flash_attn_func, (q, k, v)
    output, lse, dropped = call(*arrays, window_size=window, alibi_slopes=slopes,
                                return_attn_probs=True, **options)
    assert output.shape == (*q.shape[:3], v.shape[3]) and output.flags.c_contiguous
    assert dropped.shape == (0,)
    for b in range(len(q)):
        wanted = by_formula(q[b], k[b], v[b], slopes, b, window=window, **options)
        check(output[b], lse[b], *wanted[:2], case, slopes)


@pytest.mark.parametrize("case", cases(grid.LENGTHS, grid.LONG, DENSE), ids=grid.name_of)
def test_varlen(case):
    """Some sequences are empty, of queries, of keys or of both."""
    q, k, v, slopes = drawn(case, batch=5)
    rng = np.random.default_rng(2)
    counts = np.array([rng.integers(max(1, most // 2), most + 1, 5) for most in case["lengths"]])
    counts[0, 1] = counts[1, 2] = counts[0, 4] = counts[1, 4] = 0
    q_rows, k_rows, v_rows = (np.concatenate([array[s, :length] for s, length in enumerate(rows)])
                              for array, rows in ((q, counts[0]), (k, counts[1]), (v, counts[1])))
    starts = [np.concatenate([[0], np.cumsum(rows)]).astype(np.int32) for rows in counts]
    window = grid.window_of(case["local"], k.shape[1], 1)
    options = {"causal": case["causal"], "softcap": case["softcap"]}
    if case["packed"]:
        call = fa.flash_attn_varlen_kvpacked_func
        arrays = q_rows, np.stack([k_rows, v_rows], axis=1)
    else:
        call, arrays = fa.flash_attn_varlen_func, (q_rows, k_rows, v_rows)
    output, lse, _ = call(*arrays, *starts, *counts.max(axis=1), window_size=window,
                          alibi_slopes=slopes, return_attn_probs=True, **options)
    assert lse.shape == (q.shape[2], counts[0].sum())
    for s, (begin, end) in enumerate(zip(starts[0][:-1], starts[0][1:], strict=True)):
        if not counts[1, s]:
            assert not output[begin:end].any() and np.isneginf(lse[:, begin:end]).all()
        elif end > begin:
            wanted = by_formula(q[s, :counts[0, s]], k[s, :counts[1, s]], v[s, :counts[1, s]],
                                slopes, s, window=window, **options)
            check(output[begin:end], lse[:, begin:end], *wanted[:2], case, slopes)


@pytest.mark.parametrize("case", cases(grid.CACHES, grid.LONG_CACHES, CACHE), ids=grid.name_of)
def test_kvcache(case):
    rng = np.random.default_rng(3)
    q, k_cache, v_cache, slopes = drawn(case)
    if case["batch_idx"]:
        k_cache, v_cache = np.concatenate([k_cache] * 2), np.concatenate([v_cache] * 2)
    (_, query_len, _, head_dim), (_, capacity, kv_heads, _) = q.shape, k_cache.shape
    new_len = 0
    if case["new_kv"]:
        new_len = query_len if case["new_is_query"] else int(rng.integers(1, query_len + 1))
    new = [rng.standard_normal((2, new_len, kv_heads, head_dim)).astype(q.dtype) for _ in range(2)]
    most = capacity - (query_len if new_len else 0)
    lengths = rng.integers(0 if new_len else 1, most + 1, 2)
    rows = rng.permutation(len(k_cache))[:2] if case["batch_idx"] else np.arange(2)
    begins = rng.integers(0, lengths + 1) if case["leftpad"] else np.zeros(2, int)
    window = grid.window_of(case["local"], capacity, 1)
    dims = int(case["rotary"] * head_dim) // 16 * 16 if new_len else 0
    angles = rng.random((capacity, dims // 2)) * 2 * np.pi
    cosine, sine = np.cos(angles).astype(q.dtype), np.sin(angles).astype(q.dtype)
    before = k_cache.copy(), v_cache.copy()
    output, lse = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, *(new if new_len else (None, None)),
        *((cosine, sine) if dims else ()), cache_seqlens=lengths.astype(np.int32),
        cache_batch_idx=rows if case["batch_idx"] else None,
        cache_leftpad=begins if case["leftpad"] else None, causal=case["causal"],
        window_size=window, rotary_interleaved=case["interleaved"], alibi_slopes=slopes,
        return_softmax_lse=True)
    ordered = case["causal"] or case["local"]
    for b, row in enumerate(rows):
        at = slice(lengths[b], lengths[b] + new_len)
        wide = np.float64 if q.dtype == np.float64 else np.float32  # halves rotate in float32
        turned, own_key = q[b].astype(wide), new[0][b].astype(wide)
        if dims:
            tables = cosine.astype(wide), sine.astype(wide)
            steps = lengths[b] + (np.arange(query_len) if ordered else np.zeros(query_len, int))
            turned, own_key = (
                grid.rotated(np, x, *(table[where] for table in tables), case["interleaved"])
                for x, where in ((turned, steps), (own_key, at)))
        before[0][row, at], before[1][row, at] = own_key, new[1][b]
        np.testing.assert_array_equal(k_cache[row], before[0][row])
        np.testing.assert_array_equal(v_cache[row], before[1][row])
        seen = slice(begins[b], lengths[b] + new_len)
        if seen.stop > seen.start:
            wanted = by_formula(turned.astype(q.dtype), k_cache[row, seen], v_cache[row, seen],
                                slopes, b, causal=case["causal"], window=window)
            check(output[b], lse[b], *wanted[:2], case, slopes)
        else:
            assert not output[b].any() and np.isneginf(lse[b]).all()
    others = np.setdiff1d(np.arange(len(k_cache)), rows)
    for cache, old in zip((k_cache, v_cache), before, strict=True):
        np.testing.assert_array_equal(cache[others], old[others])


def test_qkvpacked_are_the_bits_of_three_arrays():
    rng = np.random.default_rng(4)
    qkv = rng.standard_normal((2, 97, 3, 6, 59)).astype(np.float32)
    q, k, v = (qkv[:, :, i] for i in range(3))
    options = {"causal": True, "window_size": (50, -1), "softcap": 30.0}
    found = fa.flash_attn_qkvpacked_func(qkv, **options)
    np.testing.assert_array_equal(found, fa.flash_attn_func(q, k, v, **options))
    np.testing.assert_array_equal(found.swapaxes(1, 2), mha.scaled_dot_product_attention(
        *(array.swapaxes(1, 2) for array in (q, k, v)), causal=True, window=(50, None),
        softcap=30.0))
    rows = qkv.reshape(-1, *qkv.shape[2:])
    starts = np.array([0, 97, 194], np.int32)
    np.testing.assert_array_equal(
        fa.flash_attn_varlen_qkvpacked_func(rows, starts, 97, **options),
        found.reshape(-1, 6, 59))


@pytest.mark.parametrize("alibi", [None, "batch"])
@pytest.mark.parametrize("ragged", [False, True])
def test_dropout(alibi, ragged):
    """S_dmask has the weights and says which are dropped; the output follows from it."""
    q, k, v, slopes = drawn({"lengths": (113, 203), "kind": "gqa", "head_dim": 32,
                             "dtype": np.float64, "alibi": alibi})
    p = 11141 / 65536  # about 0.17, one of those that dropout knows exactly
    call, arrays, more = fa.flash_attn_func, (q, k, v), ()
    if ragged:
        call = fa.flash_attn_varlen_func
        arrays = [array.reshape(-1, *array.shape[2:]) for array in arrays]
        more = np.array([0, 113, 226]), np.array([0, 203, 406]), 113, 203
    found = [call(*arrays, *more, p, causal=True, alibi_slopes=slopes, return_attn_probs=True,
                  rng=seed) for seed in (1, 1, 2)]
    output, lse, signed = found[0]
    np.testing.assert_array_equal(output, found[1][0])
    assert (output != found[2][0]).any()
    assert abs((signed < 0).sum() / (signed != 0).sum() - p) < 0.01
    output = output.reshape(2, 113, 6, 32)
    lse = lse.reshape(6, 2, 113).swapaxes(0, 1) if ragged else lse
    for b in range(2):
        _, wanted_lse, weights = by_formula(q[b], k[b], v[b], slopes, b, causal=True)
        np.testing.assert_allclose(np.abs(signed[b]), weights, atol=1e-13)
        kept = np.where(signed[b] < 0, 0, weights) / (1 - p)
        np.testing.assert_allclose(
            output[b], np.einsum("hqk,khd->qhd", kept, np.repeat(v[b], 3, axis=1)), atol=1e-12)
        np.testing.assert_allclose(lse[b], wanted_lse, rtol=1e-12)


def test_padding_there_and_back():
    rng = np.random.default_rng(5)
    hidden = rng.standard_normal((3, 7, 4, 2)).astype(np.float32)
    mask = np.array([[1, 1, 0, 1, 0, 0, 0], [0] * 7, [1] * 7])
    unused = np.zeros_like(mask)
    unused[1, 2] = 1
    rows, indices, starts, longest, used = bert_padding.unpad_input(hidden, mask, unused)
    assert longest == 7 and starts.dtype == used.dtype == np.int32
    assert starts.tolist() == [0, 3, 4, 11] and used.tolist() == [3, 0, 7]
    np.testing.assert_array_equal(rows, hidden[(mask | unused) == 1])
    padded = bert_padding.pad_input(rows, indices, 3, 7)
    np.testing.assert_array_equal(padded, np.where(((mask | unused) == 1)[:, :, None, None],
                                                   hidden, 0))
    plain = bert_padding.unpad_input(hidden, mask.astype(bool))
    np.testing.assert_array_equal(plain[0], hidden[mask == 1])
    nothing = bert_padding.unpad_input(hidden, np.zeros_like(mask))
    assert bert_padding.unpad_input(np.zeros((2, 3, 0)), np.ones((2, 3), int))[0].shape == (6, 0)
    assert nothing[0].shape == (0, 4, 2) and nothing[3] == 0
    assert not bert_padding.pad_input(nothing[0], nothing[1], 3, 7).any()


def test_varlen_takes_what_unpad_input_gives():
    """The program of flash-attention's readers: unpad, attend, pad."""
    rng = np.random.default_rng(6)
    mask = np.arange(50) < np.array([[50], [13], [31]])
    q, k, v = rng.standard_normal((3, 3, 50, 4, 16))
    (q_rows, indices, starts, longest, _), *others = (
        bert_padding.unpad_input(array, mask) for array in (q, k, v))
    output = fa.flash_attn_varlen_func(q_rows, others[0][0], others[1][0], starts, starts, longest,
                                       longest, causal=True)
    output = bert_padding.pad_input(output, indices, 3, 50)
    wanted = mha.scaled_dot_product_attention(
        *(array.swapaxes(1, 2) for array in (q, k, v)), causal=True, query_offset=0,
        key_lengths=mask.sum(axis=1)).swapaxes(1, 2)
    np.testing.assert_allclose(output[mask], wanted[mask], rtol=1e-13)
    assert not output[~mask].any()


def test_empty_shapes():
    def zeros(*shape):
        return np.zeros(shape, np.float32)

    for batch, query_len, key_len in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        q, k = zeros(batch, query_len, 4, 8), zeros(batch, key_len, 2, 8)
        for slopes in (None, np.arange(4 * batch, dtype=float).reshape(batch, 4)):
            output, lse, _ = fa.flash_attn_func(q, k, k, alibi_slopes=slopes,
                                                return_attn_probs=True)
            assert output.shape == q.shape and not output.any()
            assert lse.shape == (batch, 4, query_len) and np.isneginf(lse).all()
            rows = [array.reshape(-1, *array.shape[2:]) for array in (q, k, k)]
            starts = [np.arange(batch + 1) * length for length in (query_len, key_len)]
            ragged = fa.flash_attn_varlen_func(*rows, *starts, query_len, key_len,
                                               alibi_slopes=slopes)
            assert ragged.shape == rows[0].shape
            found = fa.flash_attn_with_kvcache(q, k, k, cache_seqlens=key_len, alibi_slopes=slopes)
            assert found.shape == q.shape and not found.any()
    none, cache = zeros(0, 1, 4, 8), zeros(0, 5, 4, 8)
    for slopes in (None, np.zeros((0, 4))):
        assert fa.flash_attn_with_kvcache(none, cache, cache.copy(), none, none, cache_seqlens=2,
                                          alibi_slopes=slopes).shape == none.shape
    no_columns = zeros(2, 3, 4, 0)
    for slopes in (None, np.arange(8.0).reshape(2, 4)):
        output, _, signed = fa.flash_attn_func(no_columns, no_columns, zeros(2, 3, 4, 5), 0.5,
                                               alibi_slopes=slopes, return_attn_probs=True)
        assert output.shape == (2, 3, 4, 5) and signed.shape == (2, 4, 3, 3)
    cache = zeros(2, 5, 2, 8)
    new = zeros(2, 0, 2, 8)
    assert fa.flash_attn_with_kvcache(zeros(2, 1, 4, 8), cache, cache, new, new,
                                      cache_seqlens=5).shape == (2, 1, 4, 8)


def test_names_and_defaults_are_flash_attentions():
    """In its order, so that calls by place mean the same; rng is ours, by keyword."""
    shared = ("dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
              " return_attn_probs")
    wanted = {
        "flash_attn_func": f"q k v {shared}", "flash_attn_qkvpacked_func": f"qkv {shared}",
        "flash_attn_kvpacked_func": f"q kv {shared}",
        "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
                                  f" {shared} block_table",
        "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {shared}",
        "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q"
                                           f" max_seqlen_k {shared}",
        "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens"
                                   " cache_batch_idx cache_leftpad block_table softmax_scale causal"
                                   " window_size softcap rotary_interleaved alibi_slopes"
                                   " num_splits return_softmax_lse"}
    for name, parameters in wanted.items():
        names = list(inspect.signature(getattr(fa, name)).parameters)
        assert [own for own in names if own not in ("rng", "unknown")] == parameters.split(), name


def test_scale_and_numbers_of_no_axes():
    q = np.random.default_rng(7).standard_normal((1, 20, 2, 8))
    found = fa.flash_attn_func(q, q, q, np.float64(0), np.float32(0.5), np.bool_(True),
                               np.array([3, -1]), np.array(2.0))
    wanted = grid.attention(np, q[0], q[0], q[0], True, (3, -1), 2.0, scale=0.5)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)


HALF_WRITTEN = {  # what attention itself refuses, or a conversion does
    "a flag": {"return_softmax_lse": 2}, "a scale": {"softmax_scale": 1e300},
    "a cap": {"softcap": 1e300}, "complex q": {"q": np.ones((1, 1, 2, 8), complex)},
    "words": {"v": np.full((1, 1, 2, 8), "a")}, "complex k": {"k": np.ones((1, 1, 2, 8), complex)},
    "dates": {"k": np.zeros((1, 1, 2, 8), "M8[s]")},
    "long doubles": {"alibi_slopes": np.ones(2, np.longdouble)},
    "a masked cache": {"v_cache": np.ma.array(np.zeros((1, 4, 2, 8), np.float32))},
    "a cache of repeats": {"v_cache": np.lib.stride_tricks.as_strided(
        np.zeros((1, 1, 2, 8), np.float32), (1, 4, 2, 8), (64, 0, 32, 4))},
    "two halves": {"q": np.ones((1, 1, 2, 8), np.float16),
                   "v_cache": np.zeros((1, 4, 2, 8), BFLOAT16)},
}


@pytest.mark.parametrize("name", HALF_WRITTEN)
def test_a_call_that_fails_writes_nothing(name):
    ones = np.ones((1, 1, 2, 8), np.float32)
    caches = {"k_cache": np.zeros((1, 4, 2, 8), np.float32),
              "v_cache": np.zeros((1, 4, 2, 8), np.float32)}
    given = {"q": ones, "k": ones, "v": ones, "cache_seqlens": 0, **caches, **HALF_WRITTEN[name]}
    with pytest.raises((TypeError, ValueError)):
        fa.flash_attn_with_kvcache(**given)
    assert not np.asarray(given["k_cache"]).any()
    assert not np.asarray(given["v_cache"]).astype(float).any()


def test_what_lies_in_the_caches_is_read_before_they_are_written():
    k_cache, v_cache = np.zeros((2, 1, 8, 1, 4), np.float32)
    k_cache[:, 0] = 1
    new = np.full((1, 1, 1, 4), 5, np.float32)
    apart = fa.flash_attn_with_kvcache(k_cache[:, :1].copy(), k_cache.copy(), v_cache.copy(), new,
                                       new, cache_seqlens=0, return_softmax_lse=True)
    inside = fa.flash_attn_with_kvcache(k_cache[:, :1], k_cache, v_cache, new, new,
                                        cache_seqlens=0, return_softmax_lse=True)
    for one, other in zip(inside, apart, strict=True):
        np.testing.assert_array_equal(one, other)
    k_cache[:, 0] = 7
    fa.flash_attn_with_kvcache(new, k_cache, v_cache, new, k_cache[:, :1], cache_seqlens=0)
    assert (v_cache[:, 0] == 7).all()


def test_starts_that_overflow():
    q = np.ones((10, 2, 8))
    starts = np.array([0, 2**62, -2**63, -2**62, 0, 10])
    with pytest.raises(ValueError, match=r"cu_seqlens_q: .* falls behind number 1"):
        fa.flash_attn_varlen_func(q, q, q, starts, starts, 2**62, 2**62,
                                  alibi_slopes=np.arange(10.0).reshape(5, 2))


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda q, c: fa.flash_attn_func(q[0], q, q), ValueError, r"q: got shape \(9, 4, 8\)"),
    (lambda q, c: fa.flash_attn_func(q, q[:1], q[:1]), ValueError, "k: got a batch of 1"),
    (lambda q, c: fa.flash_attn_func(q, q[:, :, :3], q[:, :, :3]), ValueError, "k: got 3 heads"),
    (lambda q, c: fa.flash_attn_func(q, q[..., :4], q), ValueError, "k: got a head_dim of 4"),
    (lambda q, c: fa.flash_attn_func(q, q, q[:, :5]), ValueError, "v: got shape"),
    (lambda q, c: fa.flash_attn_func(q, q, [1]), ValueError, r"v: got shape \(1,\)"),
    (lambda q, c: fa.flash_attn_func(q, q, q, 1.0), ValueError, r"dropout_p: got 1.0"),
    (lambda q, c: fa.flash_attn_func(q, q, q, softcap=-1), ValueError, "softcap: got -1"),
    (lambda q, c: fa.flash_attn_func(q, q, q, softmax_scale="a"), TypeError, "softmax_scale"),
    (lambda q, c: fa.flash_attn_func(q, q, q, window_size=3), TypeError, "window_size: got 3"),
    (lambda q, c: fa.flash_attn_func(q, q, q, window_size=(1.5, 0)), TypeError, "window_size"),
    (lambda q, c: fa.flash_attn_func(q, q, q, window_size={1, 2}), TypeError, "window_size"),
    (lambda q, c: fa.flash_attn_varlen_func(*[q[0, :0]] * 3, [0], [0], -3, 0), ValueError,
     "max_seqlen_q: got -3, wanted at least 0"),
    (lambda q, c: fa.flash_attn_func(q, q, q, causal="yes"), TypeError, "causal: got 'yes'"),
    (lambda q, c: fa.flash_attn_func(q, q, q, alibi_slopes=[1.0]), ValueError, "alibi_slopes"),
    (lambda q, c: fa.flash_attn_func(q, q, q, alibi_slopes=[1, 2, 3, 4]), TypeError, "alibi_sl"),
    (lambda q, c: fa.flash_attn_func(q, q, q, 0.5, rng="a"), TypeError, "rng"),
    (lambda q, c: fa.flash_attn_func(q, q, q, attn_mask=1), TypeError, "bert_padding"),
    (lambda q, c: fa.flash_attn_qkvpacked_func(q), ValueError, r"qkv: .* \(batch, seqlen, 3,"),
    (lambda q, c: fa.flash_attn_varlen_qkvpacked_func(q[0], [0], 1), ValueError, "qkv: .* 3, he"),
    (lambda q, c: fa.flash_attn_varlen_func(q[0], q[0], q[0], [0, 8], [0, 9], 9, 9), ValueError,
     "cu_seqlens_q: got 0 to 8, wanted numbers that never fall, from 0 to 9"),
    (lambda q, c: fa.flash_attn_varlen_func(q[0], q[0], q[0], [0, 9], [0, 5, 4, 9], 9, 9),
     ValueError, "cu_seqlens_k: got 0 to 9, and falls behind number 1"),
    (lambda q, c: fa.flash_attn_varlen_func(q[0], q[0], q[0], [0, 9], [0, 5, 9], 9, 9), ValueError,
     "cu_seqlens_k: got 2 sequences, wanted 1"),
    (lambda q, c: fa.flash_attn_varlen_func(q[0], q[0], q[0], [0, 9], [0, 9], 8, 9), ValueError,
     "max_seqlen_q: got 8, wanted at least 9"),
    (lambda q, c: fa.flash_attn_varlen_func(q[0], q[0], q[0], [0.0, 9], [0, 9], 9, 9), TypeError,
     "cu_seqlens_q"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c, c, q, q), ValueError, "cache_seqlens: got None"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c, c, q, None, cache_seqlens=1), ValueError,
     "v: got None beside k"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c, c, q, q, cache_seqlens=4), ValueError,
     r"cache_seqlens: got \[4, 4\], wanted 0 to 3"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c[:, :8], c[:, :8], q, q, cache_seqlens=0),
     ValueError, "k: got 9 positions, wanted at most 8"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c, c, cache_batch_idx=[0, 2]), ValueError,
     r"cache_batch_idx: got \[0, 2\], wanted 0 to 1"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c[:1], c[:1]), ValueError, "k_cache: got 1 seq"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c, c, cache_seqlens=[3, 4], cache_leftpad=[4, 4]),
     ValueError, "cache_leftpad"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c, c, rotary_cos=np.ones((12, 2)),
                                             rotary_sin=np.ones((12, 2))), ValueError, "rotary_co"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c, c, q, q, np.ones((12, 2)), cache_seqlens=1),
     ValueError, "rotary_cos, rotary_sin: got one"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c, c, q, q, *[np.ones((9, 2))] * 2,
                                             cache_seqlens=1), ValueError, "9 positions"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c, c, q, q, *[np.ones((12, 5))] * 2,
                                             cache_seqlens=1), ValueError, "rotary_dim at most 8"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c.tolist(), c, q, q, cache_seqlens=1), TypeError,
     "k_cache: got list"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, np.broadcast_to(c, c.shape), c, q, q,
                                             cache_seqlens=1), ValueError, "k_cache: got a read-o"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c.astype(int), c, q, q, cache_seqlens=1), TypeError,
     "k_cache: got an array of int64"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c, c, q, q, cache_seqlens=1), ValueError,
     "v_cache: got the memory of k_cache"),
    (lambda q, c: fa.flash_attn_with_kvcache(q, c, c.copy(), q, q, cache_seqlens=1,
                                             cache_batch_idx=[1, 1]), ValueError, "each one once"),
    (lambda q, c: fa.flash_attn_varlen_func(q[0], q[0], q[0], [9], [9], 9, 9), ValueError,
     r"cumsum\(lengths\)"),
    (lambda q, c: bert_padding.unpad_input(q, np.full((2, 9), -10000)), ValueError, "wanted 0 and"),
    (lambda q, c: bert_padding.unpad_input(q, np.ones((2, 8))), TypeError, "attention_mask"),
    (lambda q, c: bert_padding.unpad_input(q, np.ones((2, 8), bool)), ValueError, "attention_mask"),
    (lambda q, c: bert_padding.pad_input(q[0], [0], 1, 9), ValueError, "indices: got 1, wanted 9"),
    (lambda q, c: bert_padding.index_first_axis(q, [2]), ValueError, "indices: got 2 to 2"),
    (lambda q, c: bert_padding.index_first_axis(q, [[1]]), ValueError, r"indices: got shape"),
])
def test_errors_name_what_is_wrong_and_change_nothing(call, error, message):
    cache = np.ones((2, 12, 4, 8))
    with pytest.raises(error, match=message):
        call(np.full((2, 9, 4, 8), 2.0), cache)
    assert (cache == 1).all()
