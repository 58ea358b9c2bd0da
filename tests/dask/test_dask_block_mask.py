"""A BlockMask over dask arrays: cut as the scores are; what nobody sees has no task."""

import pytest

pytest.importorskip("dask")

import dask.array as da
import numpy as np

import mha
from mha import BlockMask

BATCH, HEADS, LENGTH = 2, 4, 700


def arrays(chunks=(1, 2, 150, 16)):
    rng = np.random.default_rng(0)
    shapes = [(BATCH, HEADS, LENGTH, 16), (BATCH, 2, LENGTH, 16), (BATCH, 2, LENGTH, 16)]
    plain = [rng.standard_normal(shape) for shape in shapes]
    cut = [da.from_array(array, chunks=(chunks[0], min(chunks[1], array.shape[1]), *chunks[2:]))
           for array in plain]
    return plain, cut


def masks():
    rng = np.random.default_rng(1)
    ids = np.sort(rng.integers(0, 5, (BATCH, LENGTH)))
    yield BlockMask.documents(ids)
    yield BlockMask.sliding_window(LENGTH, window=(60, 10))
    yield BlockMask.from_dense(rng.random((BATCH, HEADS, LENGTH, LENGTH)) < 0.01)
    yield BlockMask.from_dense(np.zeros((LENGTH, LENGTH), bool))


OPTIONS = ({}, {"causal": True}, {"empty_rows": "uniform"}, {"sinks": np.linspace(-1, 1, HEADS)})


@pytest.mark.parametrize(("mask", "options"), [
    pytest.param(mask, options, marks=[pytest.mark.thorough] * (i != j))
    for i, mask in enumerate(masks()) for j, options in enumerate(OPTIONS)])
def test_as_the_whole(mask, options):
    plain, cut = arrays()
    wanted, weights, lse = mha.scaled_dot_product_attention(
        *plain, mask=mask, return_weights=True, return_lse=True, **options)
    found = mha.dask.scaled_dot_product_attention(
        *cut, mask=mask, return_weights=True, return_lse=True, **options)
    for one, other in zip(found, (wanted, weights, lse), strict=True):
        np.testing.assert_allclose(one.compute(scheduler="sync"), other, rtol=1e-10, atol=1e-12)
    grad_output = np.random.default_rng(2).standard_normal(wanted.shape)
    _, pullback = mha.scaled_dot_product_attention_vjp(*plain, mask=mask, **options)
    _, in_parts = mha.dask.scaled_dot_product_attention_vjp(*cut, mask=mask, **options)
    for name in ("query", "key", "value"):
        np.testing.assert_allclose(
            getattr(in_parts(grad_output), name).compute(scheduler="sync"),
            getattr(pullback(grad_output), name), rtol=1e-9, atol=1e-11)


def test_the_bits_of_a_dense_mask():
    """With sinks too, which one chunk of a row counts."""
    _, cut = arrays()
    mask = BlockMask.sliding_window(LENGTH, window=(60, 10))
    for options in ({}, {"sinks": np.ones(HEADS)}):
        one, other = (mha.dask.scaled_dot_product_attention(*cut, mask=given, **options).compute(
            scheduler="sync") for given in (mask, mask.to_dense()))
        np.testing.assert_array_equal(one, other)


def test_chunks_that_nobody_sees_have_no_task():
    _, cut = arrays((BATCH, HEADS, 100, 16))
    mask = BlockMask.documents(np.arange(LENGTH) // 100)
    graph = dict(mha.dask.scaled_dot_product_attention(*cut, mask=mask).__dask_graph__())
    tasks = [key for key in graph if isinstance(key, tuple) and key[0].startswith("mha-joined")]
    assert len(tasks) == LENGTH // 100
    assert not [key for key in graph if isinstance(key, tuple) and key[0].startswith("mha-part")]


def test_a_layer():
    layer = mha.MultiHeadAttention(16, 4, rng=0)
    x = np.random.default_rng(3).standard_normal((BATCH, LENGTH, 16)).astype(np.float32)
    mask = BlockMask.sliding_window(LENGTH, window=(60, 0))
    cut = da.from_array(x, chunks=(1, 200, 16))
    np.testing.assert_allclose(mha.dask.MultiHeadAttention(layer)(cut, mask=mask).compute(),
                               layer(x, mask=mask), rtol=1e-4, atol=1e-6)


def test_masks_that_do_not_fit():
    _, cut = arrays()
    for mask in (BlockMask.causal(LENGTH, 3), BlockMask.from_lengths([1] * 3, LENGTH, LENGTH)):
        with pytest.raises(ValueError, match="mask: got a BlockMask"):
            mha.dask.scaled_dot_product_attention(*cut, mask=mask)


def test_names_follow_the_mask():
    """Two calls with other masks are other arrays; with equal ones the same."""
    _, cut = arrays()
    names = [mha.dask.scaled_dot_product_attention(*cut, mask=mask).name for mask in (
        BlockMask.causal(LENGTH), BlockMask.prefix(0, LENGTH), BlockMask.prefix(9, LENGTH))]
    assert names[0] == names[1]
    assert len({*names}) == 2
