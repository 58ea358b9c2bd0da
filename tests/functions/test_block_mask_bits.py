"""A BlockMask as mask=: the bits of the dense mask of the same pairs, whatever else is asked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import mha
from mha import BlockMask

MASKS = ["pairs", "blocks", "halves", "documents", "window", "end", "nothing", "everything"]
SHAPES = [(5, 1100), (200, 260), *(
    pytest.param(*shape, marks=pytest.mark.thorough)
    for shape in [(1, 40), (1, 1100), (48, 300), (300, 129)])]
OPTIONS = {
    "plain": {},
    "weights": {"return_weights": True, "return_lse": True},
    "causal": {"causal": True},
    "window": {"window": (100, 40)},
    "softcap": {"softcap": 5.0},
    "dropout": {"dropout": 0.3, "rng": 7},
    "alibi": {"alibi": [0.5, 0.1, 0.9, 0.3]},
    "sinks": {"sinks": [0.0, 1.0, -1.0, 2.0]},
    "uniform": {"empty_rows": "uniform", "return_lse": True},
    "lengths": {"key_lengths": [30, 1], "causal": True, "query_offset": 20},
}
BATCH, HEADS, KV_HEADS = 2, 4, 2


def pairs_of(kind, rng, shape):
    """A dense mask (batch, heads, query_len, key_len)."""
    query_len, key_len = shape[2:]
    if kind == "pairs":
        return rng.random(shape) < 0.3
    if kind in ("blocks", "halves"):
        size = 128 if kind == "blocks" else 64
        blocks = rng.random((*shape[:2], -(-query_len // size), -(-key_len // size))) < 0.4
        return np.kron(blocks, np.ones((size, size), bool))[..., :query_len, :key_len].copy()
    if kind == "documents":
        ids = np.sort(rng.integers(0, 4, (shape[0], 1, max(shape[2:]))))
        return np.broadcast_to(ids[..., :query_len, None] == ids[..., None, :key_len], shape)
    if kind == "window":
        return np.broadcast_to(mha.masks.sliding_window(query_len, key_len, window=(70, 3)), shape)
    visible = np.zeros(shape, bool)
    visible[..., {"end": key_len * 2 // 3, "nothing": key_len, "everything": 0}[kind]:] = True
    return visible


def inputs(rng, query_len, key_len, dtype, head_dim=40):
    shapes = [(BATCH, HEADS, query_len, head_dim), (BATCH, KV_HEADS, key_len, head_dim),
              (BATCH, KV_HEADS, key_len, 24)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
        if one is not None:
            is_zero = np.asarray(one) == 0
            np.testing.assert_array_equal(np.signbit(one)[is_zero], np.signbit(other)[is_zero])


def outputs(*arrays, **options):
    found = mha.scaled_dot_product_attention(*arrays, **options)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize(("kind", "options"), [*itertools.product(MASKS, OPTIONS)])
@pytest.mark.parametrize(("query_len", "key_len"), SHAPES)
def test_forward_and_gradients(kind, options, query_len, key_len):
    """Also of a dense mask with one array a head, and of one whose keys lie apart."""
    number = MASKS.index(kind) * 100 + [*OPTIONS].index(options)
    rng = np.random.default_rng(number)
    arrays = inputs(rng, query_len, key_len, (np.float32, np.float64)[number % 2])
    groups = ((1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS))[number % 4]
    dense = pairs_of(kind, rng, (*groups, query_len, key_len))
    mask = BlockMask.from_dense(dense)
    given = OPTIONS[options]
    wanted = outputs(*arrays, mask=dense, **given)
    by_head = np.broadcast_to(dense, (BATCH, HEADS, query_len, key_len)).copy()
    apart = dense.swapaxes(2, 3).copy().swapaxes(2, 3)
    for other in (mask, by_head, apart):
        assert_same(outputs(*arrays, mask=other, **given), wanted)
    with mha.threads(1):
        assert_same(outputs(*arrays, mask=mask, **given), wanted)
    given = {name: value for name, value in given.items() if not name.startswith("return")}
    grad_output = rng.standard_normal(wanted[0].shape).astype(wanted[0].dtype)
    found = []
    for other in (dense, mask, by_head, apart):
        _, pullback = mha.scaled_dot_product_attention_vjp(*arrays, mask=other, **given)
        found.append(pullback(grad_output))
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.parametrize("kind", ["pairs", "blocks", "documents"])
@pytest.mark.parametrize(("query_len", "key_len"), [(1, 1100), (6, 1100), (200, 300)])
def test_as_the_reference(kind, query_len, key_len):
    """The reference takes a BlockMask too. In float64."""
    rng = np.random.default_rng(5)
    arrays = inputs(rng, query_len, key_len, np.float64)
    dense = pairs_of(kind, rng, (BATCH, HEADS, query_len, key_len))
    mask = BlockMask.from_dense(dense)
    wanted, lse = mha.reference.scaled_dot_product_attention(*arrays, mask=mask, return_lse=True)
    np.testing.assert_array_equal(
        wanted, mha.reference.scaled_dot_product_attention(*arrays, mask=dense))
    found = outputs(*arrays, mask=mask, return_lse=True)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(found[1], lse, rtol=1e-12)
    grad_output = rng.standard_normal(wanted.shape)
    _, pullback = mha.scaled_dot_product_attention_vjp(*arrays, mask=mask)
    _, by_reference = mha.reference.scaled_dot_product_attention_vjp(*arrays, mask=mask)
    found, wanted = pullback(grad_output), by_reference(grad_output)
    for name in ("query", "key", "value"):
        np.testing.assert_allclose(getattr(found, name), wanted[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bias_groups", [(1, 1), (BATCH, HEADS)])
@pytest.mark.parametrize(("query_len", "key_len"), SHAPES)
def test_a_bias_of_minus_infinity(query_len, key_len, bias_groups):
    """It hides as a mask does beside a bias of zeros, forward and backward."""
    rng = np.random.default_rng(6)
    arrays = inputs(rng, query_len, key_len, np.float32)
    dense = pairs_of("halves", rng, (*bias_groups, query_len, key_len))
    bias = np.where(dense, 0, -np.inf).astype(np.float32)
    zeros = np.zeros_like(bias)
    found = []
    for options in ({"bias": bias}, {"bias": zeros, "mask": dense}):
        output, pullback = mha.scaled_dot_product_attention_vjp(*arrays, **options)
        found.append((output, *pullback(np.ones_like(output))[:4],
                      *outputs(*arrays, **options, return_lse=True)))
    assert_same(*found)


@pytest.mark.parametrize("hidden", [np.nan, np.inf])
@pytest.mark.parametrize(("query_len", "key_len"), SHAPES)
def test_what_is_hidden_may_be_anything(query_len, key_len, hidden):
    """NaN behind the mask counts for nothing, in blocks that are skipped and in others."""
    rng = np.random.default_rng(7)
    arrays = inputs(rng, query_len, key_len, np.float32)
    seen = rng.random(key_len) < 0.2
    seen[:min(key_len, 150) // 2] = False
    wanted = outputs(*arrays, mask=seen[None])
    for array in arrays[1:]:
        array[:, :, ~seen] = hidden
    dense = np.broadcast_to(seen, (query_len, key_len))
    for mask in (seen[None], dense.copy(), BlockMask.from_dense(dense)):
        assert_same(outputs(*arrays, mask=mask), wanted)


def test_halves():
    rng = np.random.default_rng(8)
    arrays = inputs(rng, 200, 300, np.float16)
    dense = pairs_of("blocks", rng, (BATCH, 1, 200, 300))
    assert_same(outputs(*arrays, mask=BlockMask.from_dense(dense)), outputs(*arrays, mask=dense))


@pytest.mark.parametrize("axes", [2, 3, 5])
def test_other_axes(axes):
    """2-D and 3-D queries have no heads; several batch axes count flattened."""
    rng = np.random.default_rng(9)
    leading = {2: (), 3: (6,), 5: (2, 3, 4)}[axes]
    arrays = [rng.standard_normal((*leading, length, 16)) for length in (140, 200, 200)]
    batch = {2: 1, 3: 6, 5: 6}[axes]
    heads = 4 if axes == 5 else 1
    dense = rng.random((batch, heads, 140, 200)) < 0.3
    mask = BlockMask.from_dense(dense)
    shaped = dense.reshape(*leading, 140, 200)
    assert_same(outputs(*arrays, mask=mask), outputs(*arrays, mask=shaped))
    assert_same([mha.reference.scaled_dot_product_attention(*arrays, mask=mask)],
                [mha.reference.scaled_dot_product_attention(*arrays, mask=shaped)])


def test_additive_attention():
    rng = np.random.default_rng(10)
    query, key, value = (rng.standard_normal((2, n, 8)) for n in (60, 300, 300))
    weights = [rng.standard_normal(shape) for shape in ((8, 16), (8, 16), (16,))]
    dense = rng.random((2, 60, 300)) < 0.2
    dense[:, :, :140] = False
    mask = BlockMask.from_dense(dense[:, None])
    found = []
    for given in (dense, mask):
        output, pullback = mha.additive_attention_vjp(query, key, value, *weights, mask=given)
        found.append((output, *pullback(np.ones_like(output))))
    assert_same(*found)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (40, 1), (40, 4)])
def test_layers(frozen, groups):
    """Frozen ones go through a batch some sequences at a time."""
    rng = np.random.default_rng(11)
    layer = mha.MultiHeadAttention(32, 4, rng=0)
    if frozen:
        layer.freeze()
    x = rng.standard_normal((40, 20, 32)).astype(np.float32)
    dense = rng.random((*groups, 20, 20)) < 0.4
    mask = BlockMask.from_dense(dense)
    np.testing.assert_array_equal(layer(x, mask=mask), layer(x, mask=dense))
    np.testing.assert_array_equal(layer(x[0], mask=BlockMask.from_dense(dense[:1])),
                                  layer(x[0], mask=dense[:1]))
    if not frozen:
        found = []
        for given in (mask, dense):
            output, pullback = layer.vjp(x, mask=given)
            found.append((output, *(g for g in pullback(np.ones_like(output)) if g is not None)))
        assert_same(*found)


@pytest.mark.parametrize("window", [None, 150])
def test_a_cache(window):
    """Columns are positions from 0, of which a cache with a window has dropped some; rows are the
    rows of the call."""
    rng = np.random.default_rng(12)
    layer = mha.MultiHeadAttention(32, 4, rng=0)
    x = rng.standard_normal((2, 420, 32)).astype(np.float32)
    dense = rng.random((2, 1, 420, 420)) < 0.5
    dense[:, :, :, 128:256] = False
    dense |= np.eye(420, dtype=bool)
    mask = BlockMask.from_dense(dense)
    caches = [layer.new_cache(2, window=window) for _ in range(2)]
    done = 0
    for rows in (130, 1, 1, 60, 1, 200, 1, 3):
        part = x[:, done:done + rows]
        found = [layer(part, cache=cache, mask=given) for cache, given in zip(
            caches, (mask[done:done + rows, :done + rows],
                     dense[:, :, done:done + rows, :done + rows]), strict=True)]
        assert_same([found[0]], [found[1]])
        done += rows
    with pytest.raises(ValueError, match="mask: got a BlockMask of key_len 3"):
        layer(x[:, :1], cache=caches[0], mask=BlockMask.causal(1, 3))


@pytest.mark.parametrize("mask", [
    BlockMask.causal(5, 7), BlockMask.causal(6, 8), BlockMask.from_lengths([1] * 3, 6, 7),
    BlockMask.from_dense(np.ones((1, 3, 6, 7), bool))])
def test_masks_that_do_not_fit(mask):
    arrays = [np.ones((2, 4, n, 8)) for n in (6, 7, 7)]
    with pytest.raises(ValueError, match=r"mask: got a BlockMask of .* scores \(2, 4, 6, 7\)"):
        mha.scaled_dot_product_attention(*arrays, mask=mask)
    with pytest.raises(ValueError, match="mask: got a BlockMask of batch"):
        mha.scaled_dot_product_attention(np.ones((6, 8)), np.ones((7, 8)), np.ones((7, 8)),
                                         mask=BlockMask.from_dense(np.ones((1, 4, 6, 7), bool)))


def test_a_block_mask_is_no_bias():
    arrays = [np.ones((6, 8))] * 3
    with pytest.raises(TypeError, match=r"bias: got BlockMask.*mask="):
        mha.scaled_dot_product_attention(*arrays, bias=BlockMask.causal(6))


def broken_records():
    """Of a mask (1, 1, 300, 300), each with one fault."""
    shape, arrays = BlockMask.causal(300)._core_record[:4], BlockMask.causal(300)._core_record[4:]
    starts, columns, contents, patterns = (
        np.frombuffer(array, dtype).copy()
        for array, dtype in zip(arrays, (np.int64, np.int32, np.int32, np.uint8), strict=True))

    def record(starts=starts, columns=columns, contents=contents, patterns=patterns, shape=shape):
        return (*shape, *(array.tobytes() for array in (starts, columns, contents, patterns)))

    def changed(array, place, number):
        array = array.copy()
        array[place] = number
        return array

    yield record(starts=changed(starts, 0, 1))
    yield record(starts=changed(starts, 1, 10**12))
    yield record(starts=changed(starts, 1, -1))
    yield record(starts=starts[:-1])
    yield record(columns=changed(columns, -1, 3))
    yield record(columns=changed(columns, 0, -1))
    yield record(columns=columns[::-1].copy())
    yield record(columns=columns[:-1])
    yield record(contents=changed(contents, 0, len(patterns) // 2048))
    yield record(contents=changed(contents, 0, -2))
    yield record(patterns=patterns[:-1])
    yield record(patterns=patterns[:0])
    yield record(shape=(2**62, 2**62, 300, 300))
    yield record(shape=(1, 1, -300, 300))
    yield record(shape=(1, 1, 300.0, 300))
    yield record()[:-1]
    yield (*record()[:-1], None)
    yield (*record()[:-1], bytearray(record()[-1]))


@pytest.mark.parametrize("record", [*broken_records()])
def test_broken_records(record):
    """Of a pickle that somebody made: refused where it is loaded, and by the core before anything
    is read by them."""
    arrays = [np.ones((300, 8))] * 3
    with pytest.raises(ValueError, match="BlockMask: got a pickle"):
        BlockMask._restored(record)
    with pytest.raises(ValueError, match="mask: got a BlockMask whose blocks do not fit"):
        mha.scaled_dot_product_attention(*arrays, mask=BlockMask._holding(record))
