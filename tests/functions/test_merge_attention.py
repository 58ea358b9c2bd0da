"""merge_attention: attention over parts of the keys, joined exactly."""

import itertools

import numpy as np
import pytest
from agreement import assert_accurate

import mha
from mha import reference


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8), (2, 0, 8), (5, 0)])
def test_parts_give_the_whole(dtype, shape):
    rng = np.random.default_rng(0)
    query = rng.standard_normal(shape).astype(dtype)
    key, value = (rng.standard_normal((*shape[:-2], 100, shape[-1])).astype(dtype) for _ in "kv")
    whole = mha.scaled_dot_product_attention(query, key, value, return_lse=True)
    for cuts in ((0, 100), (0, 1, 100), (0, 30, 31, 90, 100), (0, 50, 50, 100)):
        parts = [mha.scaled_dot_product_attention(query, key[..., a:b, :], value[..., a:b, :],
                                                  return_lse=True)
                 for a, b in itertools.pairwise(cuts)]
        outputs, lses = zip(*parts, strict=True)
        merged = mha.merge_attention(outputs, lses)
        for got, wanted in zip(merged, whole, strict=True):
            assert got.shape == wanted.shape
            assert np.allclose(got, wanted, rtol=0, atol=2e-6 if dtype == np.float32 else 1e-14)
        if query.size:
            assert_accurate(lambda *a: mha.merge_attention(a[:len(a) // 2], a[len(a) // 2:]),
                            lambda *a: reference.merge_attention(a[:len(a) // 2], a[len(a) // 2:]),
                            [*outputs, *lses], {})


def test_a_part_that_saw_nothing_is_ignored():
    output, lse = mha.merge_attention([[[1.0, 2.0]], [[np.nan, np.inf]]], [[0.5], [-np.inf]])
    assert output.tolist() == [[1, 2]]
    assert lse.tolist() == [0.5]
    output, lse = mha.merge_attention([[[np.nan, 3.0]]], [[-np.inf]])
    assert output.tolist() == [[0, 0]]
    assert lse.tolist() == [-np.inf]


def test_large_lses_do_not_overflow():
    output, lse = mha.merge_attention([[[2.0]], [[4.0]]], [[1e300], [1e300]])
    assert output.tolist() == [[3]]
    assert lse.tolist() == [1e300]


def test_types():
    one, two = np.ones((2, 3), np.float32), np.ones((2, 3))
    assert mha.merge_attention([one, one], [one[:, 0]] * 2)[0].dtype == np.float32
    assert mha.merge_attention([one, two], [one[:, 0]] * 2)[0].dtype == np.float64
    assert mha.merge_attention([one, one.astype(np.int8)], [one[:, 0]] * 2)[0].dtype == np.float32
    assert mha.merge_attention([one], [two[:, 0]])[1].dtype == np.float64
