"""Steps 2 and 4 of the figure: split_heads and merge_heads."""

import numpy as np
import pytest

import mha
from mha import reference


def test_split_is_a_view():
    x = np.arange(2 * 3 * 8.0).reshape(2, 3, 8)
    heads = mha.split_heads(x, 4)
    assert heads.shape == (2, 4, 3, 2)
    assert np.shares_memory(heads, x)
    assert np.array_equal(heads, reference.split_heads(x, 4))
    heads[1, 2, 0, 1] = -1
    assert x[1, 0, 5] == -1


def test_split_of_a_read_only_array_is_read_only():
    x = np.zeros((3, 8))
    x.flags.writeable = False
    assert not mha.split_heads(x, 2).flags.writeable


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, bool, complex, "U3"])
def test_split_takes_any_type(dtype):
    x = np.ones((3, 8)).astype(dtype)
    assert mha.split_heads(x, 2).dtype == x.dtype


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6), (2, 1, 3, 4, 6), (0, 4, 6), (2, 0, 6),
                                   (2, 4, 0)])
def test_merge_undoes_split(shape):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for num_heads in (1, 2, 3):
        merged = mha.merge_heads(mha.split_heads(x, num_heads))
        assert merged.dtype == np.float32
        assert merged.flags.c_contiguous
        assert np.array_equal(merged, x)


@pytest.mark.parametrize("dtype", ["i8", "u2", "?", "f2", "c16", ">f4", "g", "O", "M8[s]", "S3"])
def test_merge_keeps_any_type(dtype):
    x = np.arange(24).reshape(2, 3, 4).astype(dtype)
    merged = mha.merge_heads(x.transpose(1, 0, 2))
    assert merged.dtype == x.dtype and merged.flags.c_contiguous
    assert np.array_equal(merged, x.reshape(2, 12))


def test_merge_of_any_strides():
    rng = np.random.default_rng(0)
    heads = rng.standard_normal((2, 4, 5, 6))
    wanted = reference.merge_heads(heads)
    for layout in (heads, np.asfortranarray(heads), np.ascontiguousarray(heads[::-1])[::-1],
                   np.repeat(heads, 2, axis=3)[..., ::2]):
        assert np.array_equal(mha.merge_heads(layout), wanted)
    assert np.array_equal(mha.merge_heads(np.broadcast_to(heads[:, :1], heads.shape)),
                          reference.merge_heads(np.broadcast_to(heads[:, :1], heads.shape)))


def test_the_view_keeps_its_array_alive():
    heads = mha.split_heads(np.arange(8.0).reshape(1, 8), 2)
    assert heads[1, 0].tolist() == [4, 5, 6, 7]
