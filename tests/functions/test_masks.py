"""mha.masks: every function gives True = attend."""

import numpy as np
import pytest

import mha
from mha import masks


def test_causal():
    assert masks.causal(3).tolist() == np.tril(np.ones((3, 3), bool)).tolist()
    assert masks.causal(2, 4).tolist() == [[True, True, True, False], [True] * 4]
    assert masks.causal(2, 4, query_offset=0).tolist() == [[True, False, False, False],
                                                           [True, True, False, False]]
    assert masks.causal(2, 2, query_offset=-1).tolist() == [[False, False], [True, False]]
    assert masks.causal(0, 3).shape == (0, 3)


def test_sliding_window():
    assert masks.sliding_window(4, window=(1, 0)).astype(int).tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert masks.sliding_window(3, window=(None, None)).all()
    assert masks.sliding_window(1, 5, window=(1, 0)).tolist() == [[False] * 3 + [True] * 2]


def test_from_lengths():
    assert masks.from_lengths([1, 3], 3)[:, 0, 0].tolist() == [[True, False, False], [True] * 3]
    assert masks.from_lengths([[0, 1]], 2).shape == (1, 1, 2, 2)
    assert masks.from_lengths([], 3).shape == (0, 1, 1, 3)


def test_polarity():
    ones = np.array([[1, 0], [1, 1]])
    for mask in (ones, ones.astype(bool), ones.astype(np.float32)):
        assert masks.from_attend(mask).tolist() == [[True, False], [True, True]]
        assert masks.from_blocked(mask).tolist() == [[False, True], [False, False]]


def test_options_and_masks_say_the_same():
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 3, 6, 8)), rng.standard_normal((2, 3, 9, 8))
    attend = mha.scaled_dot_product_attention
    for mask, options in (
            (masks.causal(6, 9), {"causal": True}),
            (masks.causal(6, 9, 1), {"causal": True, "query_offset": 1}),
            (masks.sliding_window(6, 9, window=(2, 1)), {"window": (2, 1)}),
            (masks.from_lengths([4, 9], 9), {"key_lengths": [4, 9]})):
        assert np.array_equal(attend(query, key, key, mask=mask),
                              attend(query, key, key, **options))


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: masks.causal(-1), ValueError, "query_len: got -1"),
    (lambda: masks.causal(2.5), TypeError, "float"),
    (lambda: masks.sliding_window(3, window=(-1, 0)), ValueError, "window: got -1"),
    (lambda: masks.from_lengths([4], 3), ValueError, "key_lengths: got values from 4"),
    (lambda: masks.from_lengths([1.5], 3), TypeError, "key_lengths: got an array of float64"),
    (lambda: masks.from_lengths(3, 3), ValueError, r"key_lengths: got shape \(\)"),
    (lambda: masks.from_attend([-1e9, 0.0]), ValueError, "additive mask goes to bias="),
    (lambda: masks.from_blocked(["a"]), TypeError, "mask: got an array of"),
])
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
