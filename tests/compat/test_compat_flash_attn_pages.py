"""block_table of mha.compat.flash_attn on NumPy arrays: keys and values in pages, against those of
pages gathered by hand, in float64 and bit by bit against contiguous caches."""

import itertools

import flash_attention_grid as grid
import numpy as np
import pytest
from half_types import BFLOAT16

from mha.compat import flash_attn as fa
from mha.compat.flash_attn import _pages

TYPES = (np.float32, np.float64, np.float16, BFLOAT16)
OPTIONS = {
    "plain": {}, "causal": {"causal": True}, "window": {"causal": True, "window_size": (40, 0)},
    "both sides": {"window_size": (300, 1)}, "softcap": {"softcap": 5.0, "causal": True},
    "slopes": {"alibi_slopes": np.array([0.5, 0.25, 0.1, 0.02], np.float32), "causal": True},
    "slopes of each": {"alibi_slopes": np.linspace(0, 0.5, 12, dtype=np.float32).reshape(3, 4)}}


def pages_of(contiguous, table, size, pages, seed=9):
    """A pool of numbers that mean nothing, but for the pages of the table. contiguous is
    (batch, most * size, kv_heads, columns)."""
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal((pages, size, *contiguous.shape[2:])).astype(contiguous.dtype)
    for s, row in enumerate(table):
        for i, page in enumerate(row):
            pool[page] = contiguous[s, i * size:(i + 1) * size]
    return pool


def by_hand(pool, row, length):
    """(length, kv_heads, columns) in float64, a position at a time."""
    size = pool.shape[1]
    rows = [pool[row[p // size], p % size] for p in range(length)]
    return np.array(rows, np.float64).reshape(length, *pool.shape[2:])


def drawn(size, dtype=np.float32, most=3, batch=3, kv_heads=2, seed=0):
    """Contiguous caches (batch, most * size, kv_heads, ...), a table, and pools that hold them."""
    rng = np.random.default_rng(seed)
    caches = [rng.standard_normal((batch, most * size, kv_heads, columns)).astype(dtype)
              for columns in (32, 24)]
    pages = batch * most + 4
    table = rng.permutation(pages)[:batch * most].reshape(batch, most).astype(np.int32)
    return rng, caches, table, [pages_of(cache, table, size, pages) for cache in caches]


def forgotten(table, lengths, size, by=-1):
    """The table with something else where no page is needed."""
    table = table.copy()
    table[np.arange(table.shape[1]) * size >= np.asarray(lengths)[:, None]] = by
    return table


def check(output, lse, q, keys, values, s, options, bound):
    """One sequence against the formula: q (query_len, heads, dim)."""
    if not len(keys):
        assert not output.astype(float).any() and np.isneginf(lse).all()
        return
    slopes = options.get("alibi_slopes")
    wanted, wanted_lse, _ = grid.attention(
        np, q.astype(np.float64), keys, values, options.get("causal", False),
        options.get("window_size", (-1, -1)), options.get("softcap", 0.0),
        slopes if slopes is None or slopes.ndim == 1 else slopes[s].astype(float))
    np.testing.assert_allclose(output.astype(np.float64), wanted, rtol=0, atol=bound)
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=max(bound / 100, 3e-5))


BOUNDS = {np.dtype(np.float64): 1e-12, np.dtype(np.float32): 1e-5, np.dtype(np.float16): 2e-3,
          BFLOAT16: 2e-2}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("size", [256, 512, 128, 16, 7])
@pytest.mark.parametrize("dtype", TYPES)
def test_kvcache(dtype, size, name):
    """Appends that cross a page, sequences of no positions, entries that nobody needs."""
    rng, caches, table, pools = drawn(size, dtype)
    options, lengths = OPTIONS[name], np.array([0, size - 1, 2 * size + 1])
    q, k, v = (rng.standard_normal((3, 3, heads, columns)).astype(dtype)
               for heads, columns in ((4, 32), (2, 32), (2, 24)))
    before = [pool.copy() for pool in pools]
    table = forgotten(table, lengths + 3, size, 2**31 - 1)
    output, lse = fa.flash_attn_with_kvcache(
        q, *pools, k, v, cache_seqlens=lengths, block_table=table, return_softmax_lse=True,
        **options)
    wanted = fa.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths,
                                        return_softmax_lse=True, **options)
    for one, other in zip((output, lse), wanted, strict=True):
        assert one.flags.c_contiguous and one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    for pool, old, new in zip(pools, before, (k, v), strict=True):
        for s, length in enumerate(lengths):
            for i in range(3):
                old[table[s, (length + i) // size], (length + i) % size] = new[s, i]
        np.testing.assert_array_equal(pool, old)  # and nothing but the new rows is written
    for s, length in enumerate(lengths + 3):
        check(output[s], lse[s], q[s], *(by_hand(pool, table[s], length) for pool in pools), s,
              options, BOUNDS[np.dtype(dtype)])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_rotation(causal, interleaved):
    rng, caches, table, pools = drawn(256)
    lengths = [255, 0, 700]
    q, k, v = (rng.standard_normal((3, 2, heads, columns)).astype(np.float32)
               for heads, columns in ((4, 32), (2, 32), (2, 24)))
    angles = rng.random((768, 8)).astype(np.float32)
    found, wanted = (fa.flash_attn_with_kvcache(
        q, *given, k, v, np.cos(angles), np.sin(angles), np.int32(lengths), causal=causal,
        rotary_interleaved=interleaved, block_table=pages, num_splits=3)
        for given, pages in ((pools, table), (caches, None)))
    np.testing.assert_array_equal(found, wanted)
    for pool, cache in zip(pools, caches, strict=True):
        np.testing.assert_array_equal(pool[table].reshape(cache.shape), cache)


def test_without_new_keys():
    """Pools are only read, then, and may be read-only; by default sequences are as long as their
    rows of the table."""
    rng, caches, table, pools = drawn(256)
    q = rng.standard_normal((3, 1, 4, 32)).astype(np.float32)
    for pool in pools:
        pool.flags.writeable = False
    for lengths in (None, 5, [0, 256, 300]):
        np.testing.assert_array_equal(
            fa.flash_attn_with_kvcache(q, *pools, cache_seqlens=lengths, block_table=table),
            fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths))


@pytest.mark.parametrize("seed", [*range(12), *(
    pytest.param(seed, marks=pytest.mark.thorough) for seed in range(12, 300))])
def test_steps_of_random_sequences(seed):
    """Sequences that grow step by step in pages taken as they need them, beside a contiguous
    cache; freed ones begin anew in pages that others had."""
    rng = np.random.default_rng(seed)
    size, batch, most = int(rng.choice([256, 128, 384, 48])), int(rng.integers(1, 5)), 3
    dtype, kv_heads = TYPES[rng.integers(4)], int(rng.choice([1, 2, 4]))
    caches = [np.zeros((batch, most * size, kv_heads, columns), dtype) for columns in (16, 8)]
    pages = batch * most + 1
    pools = [np.full((pages, size, kv_heads, columns), np.nan, dtype) for columns in (16, 8)]
    free, lengths = list(rng.permutation(pages)), np.zeros(batch, np.int32)
    table = np.full((batch, most), -1, np.int32)
    for _ in range(6):
        count = int(rng.integers(0, min(size + 9, most * size - int(lengths.max())) + 1))
        for s in range(batch):
            for i in range(-(-(lengths[s] + count) // size)):
                table[s, i] = free.pop() if table[s, i] < 0 else table[s, i]
        q, k, v = (rng.standard_normal((batch, rows, heads, columns)).astype(dtype)
                   for rows, heads, columns in ((int(rng.integers(1, 5)), 4, 16),
                                                (count, kv_heads, 16), (count, kv_heads, 8)))
        options = {"causal": bool(rng.integers(2)), "softcap": float(rng.choice([0, 3])),
                   "window_size": tuple(rng.choice([-1, 30, 300], 2).tolist()),
                   "return_softmax_lse": True}
        found, wanted = (fa.flash_attn_with_kvcache(
            q, *given, k, v, cache_seqlens=lengths, block_table=rows, **options)
            for given, rows in ((pools, table), (caches, None)))
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
        lengths += count
        for s in np.flatnonzero((rng.random(batch) < 0.3) | (lengths > (most - 1) * size)):
            free += [page for page in table[s] if page >= 0]
            table[s], lengths[s] = -1, 0


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("size", [256, 128, 60])
@pytest.mark.parametrize("dtype", TYPES)
def test_varlen(dtype, size, name):
    """Prompts and single queries; a sequence without keys, one without queries is in the next."""
    rng, caches, table, pools = drawn(size, dtype)
    options, counts, lengths = OPTIONS[name], [5, 1, 30], [size + 3, 0, 3 * size]
    q = rng.standard_normal((36, 4, 32)).astype(dtype)
    q_starts, k_starts = (np.cumsum([0, *some]).astype(np.int32) for some in (counts, lengths))
    output, lse, dropped = fa.flash_attn_varlen_func(
        q, *pools, q_starts, k_starts, 30, 3 * size, return_attn_probs=True,
        block_table=forgotten(table, lengths, size), **options)
    rows = [np.concatenate([cache[s, :n] for s, n in enumerate(lengths)]) for cache in caches]
    wanted = fa.flash_attn_varlen_func(q, *rows, q_starts, k_starts, 30, 3 * size,
                                       return_attn_probs=True, **options)
    for one, other in zip((output, lse), wanted, strict=False):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert dropped.shape == (0,)
    for s, (begin, end) in enumerate(itertools.pairwise(q_starts)):
        keys = (by_hand(pool, table[s], lengths[s]) for pool in pools)
        check(output[begin:end], lse[:, begin:end], q[begin:end], *keys, s, options,
              BOUNDS[np.dtype(dtype)])


def test_varlen_with_dropout_drops_what_it_drops_without_pages():
    rng, caches, table, pools = drawn(256, np.float64)
    q = rng.standard_normal((9, 4, 32))
    starts, lengths = ([0, 4, 4, 9], [0, 300, 340, 600]), np.array([300, 40, 260])
    rows = [np.concatenate([cache[s, :n] for s, n in enumerate(lengths)]) for cache in caches]
    found, wanted = (fa.flash_attn_varlen_func(
        q, *given, *starts, 5, 300, 0.25, return_attn_probs=True, block_table=pages, rng=3)
        for given, pages in ((pools, table), (rows, None)))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (found[2] < 0).any()


@pytest.mark.parametrize("size", [256, 50])
def test_pages_that_sequences_share(size):
    """Full pages of a common beginning."""
    rng, _, table, pools = drawn(size)
    table[1, :2] = table[2, :2] = table[0, :2]
    q, k, v = (rng.standard_normal((3, 1, heads, columns)).astype(np.float32)
               for heads, columns in ((4, 32), (2, 32), (2, 24)))
    lengths = np.array([2 * size, 2 * size + 3, 2 * size + 9])
    output, lse = fa.flash_attn_with_kvcache(
        q, *pools, k, v, cache_seqlens=lengths, block_table=table, return_softmax_lse=True)
    for s, length in enumerate(lengths + 1):
        check(output[s], lse[s], q[s], *(by_hand(pool, table[s], length) for pool in pools), s,
              {}, 1e-5)


OTHER_POOLS = {
    "views of one array": lambda k, v: tuple(np.concatenate([k, v], axis=3)[..., part]
                                             for part in (slice(32), slice(32, None))),
    "heads first": lambda k, v: tuple(np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
                                      for x in (k, v)),
    "backwards": lambda k, v: (k[::-1].copy()[::-1], v[:, ::-1].copy()[:, ::-1]),
    "columns apart": lambda k, v: tuple(np.repeat(x, 2, axis=3)[..., ::2] for x in (k, v)),
    "another byte order": lambda k, v: tuple(x.astype(">f4") for x in (k, v)),
    "halves": lambda k, v: tuple(x.astype(np.float16) for x in (k, v)),
    "doubles": lambda k, v: tuple(x.astype(np.float64) for x in (k, v)),
    "of two types": lambda k, v: (k, v.astype(np.float64))}


@pytest.mark.parametrize("name", OTHER_POOLS)
def test_pools_of_other_strides_and_types(name):
    """They are read where they lie or copied; results are those of contiguous caches alike."""
    rng, caches, table, pools = drawn(256)
    pools, caches = OTHER_POOLS[name](*pools), OTHER_POOLS[name](*caches)
    before = [pool.copy() for pool in pools]
    q, k, v = (rng.standard_normal((3, 2, heads, columns)).astype(np.float32)
               for heads, columns in ((4, 32), (2, 32), (2, 24)))
    found, wanted = (fa.flash_attn_with_kvcache(
        q, *given, k, v, cache_seqlens=[0, 255, 256], return_softmax_lse=True, block_table=pages)
        for given, pages in ((pools, table), (caches, None)))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    for pool, old, new in zip(pools, before, (k, v), strict=True):
        for s, place in enumerate([(0, [0, 1]), ([0, 1], [255, 0]), (1, [0, 1])]):
            old[table[s, place[0]], place[1]] = new[s]
        np.testing.assert_array_equal(pool, old)


@pytest.mark.parametrize("change", [
    lambda pool: pool.astype(">f4"),
    lambda pool: np.frombuffer(b"-" + pool.tobytes(), np.uint8)[1:].view("f4").reshape(pool.shape),
], ids=["another byte order", "between numbers"])
def test_query_and_pools_of_a_type_that_is_converted(change):
    rng, _, table, pools = drawn(256)
    q = rng.standard_normal((3, 2, 4, 32)).astype(np.float32)
    found, wanted = (fa.flash_attn_with_kvcache(given, *some, cache_seqlens=300, block_table=table)
                     for given, some in ((change(q), map(change, pools)), (q, pools)))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [128, 256, 1024])
def test_pages_that_the_core_reads_are_not_copied(monkeypatch, size, dtype):
    def copied(*_):
        raise AssertionError("copied")

    monkeypatch.setattr(_pages, "gathered", copied)
    _, _, table, pools = drawn(size, dtype, most=1)
    wide = np.concatenate(pools, axis=3)
    q, starts = np.ones((3, 1, 4, 32), dtype), [0, 1, 2, 3]
    for pair in (pools, (wide[..., :32], wide[..., 32:]), (pools[0][::-1], pools[1][::-1])):
        fa.flash_attn_with_kvcache(q, *pair, cache_seqlens=99, block_table=table // 2)
        fa.flash_attn_varlen_func(q[:, 0], *pair, starts, starts, 1, 1, block_table=table // 2)
    with pytest.raises(AssertionError):
        fa.flash_attn_with_kvcache(q, pools[0].astype(np.longdouble), pools[1], block_table=table)


def test_what_lies_in_the_pools_is_read_before_they_are_written():
    _, _, table, pools = drawn(256)
    q, k, v = pools[0][:3, :1], pools[0][1:4, :1], pools[0][2:5, :1, :, :24]
    apart, table[:, 0] = [pool.copy() for pool in pools], [0, 1, 2]
    options = {"cache_seqlens": 0, "block_table": table, "return_softmax_lse": True}
    wanted = fa.flash_attn_with_kvcache(q.copy(), *apart, k.copy(), v.copy(), **options)
    found = fa.flash_attn_with_kvcache(q, *pools, k, v, **options)
    for one, other in zip((*found, *pools), (*wanted, *apart), strict=True):
        np.testing.assert_array_equal(one, other)


def test_empty_shapes():
    def zeros(*shape):
        return np.zeros(shape, np.float32)

    pool, none = zeros(4, 256, 2, 8), zeros(0, 256, 2, 8)
    for batch, pages, table in ((0, pool, zeros(0, 3).astype(int)), (2, none, [[], []]),
                                (2, pool, [[], []]), (2, zeros(4, 0, 2, 8), [[7], [7]]),
                                (2, none, [[-1], [-1]])):
        q, new = zeros(batch, 3, 4, 8), zeros(batch, 0, 2, 8)
        for slopes in (None, np.arange(4.0 * batch).reshape(batch, 4)):
            for added in ((None, None), (new, new)):
                output, lse = fa.flash_attn_with_kvcache(
                    q, pages, pages.copy(), *added, cache_seqlens=0, alibi_slopes=slopes,
                    block_table=table, return_softmax_lse=True)
                assert output.shape == q.shape and not output.any()
                assert lse.shape == (batch, 4, 3) and np.isneginf(lse).all()
            output = fa.flash_attn_varlen_func(
                q.reshape(-1, 4, 8), pages, pages, np.arange(batch + 1) * 3, [0] * (batch + 1), 3,
                0, alibi_slopes=slopes, block_table=table)
            assert output.shape == (3 * batch, 4, 8) and not output.any()


NEW = np.full((2, 1, 2, 8), 5.0, np.float32)
GIVEN = {"q": np.ones((2, 1, 4, 8), np.float32), "k": NEW, "v": NEW, "cache_seqlens": [255, 3],
         "block_table": [[1, 2], [3, 9]]}


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"block_table": [[1, 4], [3, 9]], "cache_seqlens": [256, 3]}, ValueError,
     r"got 4 at \[0, 1\], .* 0 to 3, since sequence 0 has 257 positions"),
    ({"block_table": [[1, -1], [3, 9]], "cache_seqlens": [256, 3]}, ValueError,
     r"got -1 at \[0, 1\]"),
    ({"block_table": [[1, 2], [-7, 0]]}, ValueError, r"got -7 at \[1, 0\]"),
    ({"block_table": [[1, 2]]}, ValueError, r"block_table: got shape \(1, 2\), wanted \(2, max"),
    ({"block_table": [1, 2]}, ValueError, r"block_table: got shape \(2,\)"),
    ({"block_table": [[1.0, 2], [3, 0]]}, TypeError, "block_table: got an array of float64"),
    ({"block_table": [[True, False]] * 2}, TypeError, "block_table: got an array of bool"),
    ({"block_table": 3}, ValueError, r"block_table: got shape \(\)"),
    ({"cache_seqlens": None}, ValueError, "cache_seqlens: got None"),
    ({"cache_seqlens": [512, 3]}, ValueError, r"cache_seqlens: got \[512, 3\], wanted 0 to 511"),
    ({"cache_seqlens": -1}, ValueError, "cache_seqlens: got"),
    ({"cache_batch_idx": [0, 1]}, ValueError, "cache_batch_idx: got it beside block_table"),
    ({"cache_leftpad": [0, 1]}, ValueError, "cache_leftpad: got it beside block_table"),
    ({"block_table": [[1, 2], [1, 9]]}, ValueError, "page 1, .* sequence 1 would be written over"),
    ({"block_table": [[1, 2], [1, 9]], "cache_seqlens": 7}, ValueError, "page 1, .* a copy of"),
    ({"block_table": [[2, 2], [3, 9]], "cache_seqlens": [256, 3]}, ValueError, "page 2, .*ence 0"),
    ({"k": NEW[:1]}, ValueError, "k: got shape"), ({"v": None}, ValueError, "v: got None beside"),
    ({"v_cache": np.zeros((4, 128, 2, 8), np.float32)}, ValueError, "v_cache: got shape"),
    ({"v_cache": np.zeros((4, 256, 16), np.float32)}, ValueError, r"wanted \(num_blocks, page_b"),
    ({"q": np.ones((2, 1, 4, 8), complex)}, TypeError, "q: got an array of complex"),
    ({"softcap": 1e300}, ValueError, "softcap"), ({"softmax_scale": 1e300}, ValueError, "scale"),
    ({"q": np.ones((2, 1, 4, 8), np.float16), "v_cache": np.zeros((4, 256, 2, 8), BFLOAT16)},
     TypeError, "float16"),
    ({"rotary_cos": np.ones((200, 2)), "rotary_sin": np.ones((200, 2))}, ValueError, "200 posit"),
])
def test_errors_change_nothing(changes, error, message):
    pools = {name: np.zeros((4, 256, 2, 8), np.float32) for name in ("k_cache", "v_cache")}
    given = {**GIVEN, **pools, **changes}
    with pytest.raises(error, match=message):
        fa.flash_attn_with_kvcache(**given)
    assert not given["k_cache"].any() and not given["v_cache"].astype(float).any()


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"block_table": [[1, 4], [0, 0]]}, ValueError, r"block_table: got 4 at \[0, 1\]"),
    ({"block_table": [[1], [0]]}, ValueError, "rows of 1 pages of 256, wanted enough for 300"),
    ({"block_table": [[1, 2]]}, ValueError, r"block_table: got shape \(1, 2\)"),
    ({"block_table": None}, ValueError, r"k: got shape \(4, 256, 2, 8\), wanted \(total_len"),
    ({"k": np.ones((9, 2, 8))}, ValueError, r"k: got shape \(9, 2, 8\), wanted \(num_blocks"),
    ({"cu_seqlens_k": [0, 300]}, ValueError, "cu_seqlens_k: got 1 sequences"),
    ({"cu_seqlens_k": [1, 300, 310]}, ValueError, "cu_seqlens_k: got 1 to 310, .* from 0: "),
    ({"cu_seqlens_k": [0, 300, 299]}, ValueError, "falls behind number 1, .* from 0$"),
    ({"max_seqlen_k": 299}, ValueError, "max_seqlen_k: got 299"),
    ({"cu_seqlens_q": [0, 1, 3]}, ValueError, "from 0 to 2, the rows there are"),
])
def test_errors_of_varlen(changes, error, message):
    pool = np.ones((4, 256, 2, 8))
    given = {"q": np.ones((2, 4, 8)), "k": pool, "v": pool, "cu_seqlens_q": [0, 1, 2],
             "cu_seqlens_k": [0, 300, 310], "max_seqlen_q": 1, "max_seqlen_k": 300,
             "block_table": [[1, 2], [0, -1]]}
    assert fa.flash_attn_varlen_func(**given).shape == (2, 4, 8)
    with pytest.raises(error, match=message):
        fa.flash_attn_varlen_func(**{**given, **changes})
