"""Masks and biases whose heads lie last, (query, key, heads) turned around: the core copies them
with the heads first. The bits are those of contiguous ones, the numbers those of the reference."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mha


def heads_last(array):
    """The same numbers, whose heads are the last axis in memory."""
    return np.ascontiguousarray(np.moveaxis(array, -3, -1)).transpose(
        *range(array.ndim - 3), -1, -3, -2)


def with_both(query, key, value, options):
    """Outputs and gradients of a call."""
    wanted = ["query", "key", "value", *(["bias"] if "bias" in options else [])]
    output, pullback = mha.scaled_dot_product_attention_vjp(query, key, value, wrt=wanted,
                                                            **options)
    gradients = pullback(np.cos(output))
    return [output, *(getattr(gradients, name) for name in wanted),
            *mha.scaled_dot_product_attention(query, key, value, return_weights=True,
                                              return_lse=True, **options)]


def compare(arrays, options):
    """Heads last beside heads first."""
    turned = {name: heads_last(option) if name in ("mask", "bias") else option
              for name, option in options.items()}
    for name in ("mask", "bias"):
        if name in options:
            assert np.array_equal(turned[name], options[name])
    for one, other in zip(with_both(*arrays, turned), with_both(*arrays, options), strict=True):
        np.testing.assert_array_equal(one, other)


def draw_arrays(rng, batch, heads, query_len, key_len, head_dim, dtype):
    return [rng.standard_normal((*batch, heads, length, head_dim)).astype(dtype)
            for length in (query_len, key_len, key_len)]


def draw_pairs(rng, batch, heads, query_len, key_len, dtype):
    bias = rng.standard_normal((*batch, heads, query_len, key_len)).astype(dtype)
    bias[..., query_len // 4:query_len // 2, :key_len // 2] = -np.inf
    return {"bias": bias, "mask": rng.random(bias.shape) < .7}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("heads", [2, 3, 4, 5, 8, 11, 16, 21])
def test_the_bits_of_contiguous_ones(heads, dtype, threads):
    rng = np.random.default_rng(heads)
    arrays = draw_arrays(rng, (2,), heads, 211, 290, 20, dtype)
    pairs = draw_pairs(rng, (2,), heads, 211, 290, dtype)
    with mha.threads(threads):
        compare(arrays, pairs)
        compare(arrays, {"bias": pairs["bias"][:1]})
        compare(arrays, {"mask": pairs["mask"][:1], "causal": True, "query_offset": 30})


@pytest.mark.parametrize("options", [
    {"causal": True}, {"causal": True, "query_offset": [-30, 60]}, {"window": (37, 11)},
    {"window": (5, 0), "query_offset": 400}, {"key_lengths": [0, 77]},
    {"key_lengths": [list(range(230)), list(range(333, 103, -1))]}, {"softcap": 3.0},
    {"dropout": .3, "rng": 4}], ids=lambda options: "_".join(options))
def test_options_beside_them(options):
    """The copies hold the keys that the options leave, and zeros elsewhere."""
    options = {name: np.asarray(option) if isinstance(option, list) else option
               for name, option in options.items()}
    rng = np.random.default_rng(8)
    arrays = draw_arrays(rng, (2,), 6, 230, 333, 24, np.float32)
    pairs = draw_pairs(rng, (2,), 6, 230, 333, np.float32)
    for threads in (1, 3):
        with mha.threads(threads):
            compare(arrays, {**pairs, **options})
            compare(arrays, {"bias": pairs["bias"][1:], **options})
            compare(arrays, {"mask": pairs["mask"][1:], **options})


@pytest.mark.parametrize("options", [
    {"key_lengths": [10, 300, 10, 300]}, {"causal": True, "query_offset": [-60, 236, -60, 236]},
    {"window": (5, 5), "query_offset": [0, 200, 100, 5]}], ids=lambda options: "_".join(options))
@pytest.mark.parametrize("shared", ["one item", "repeated"])
def test_batch_items_that_share_a_mask_see_other_keys_of_it(options, shared):
    """What the copy for one item says of blocks of keys is not believed for the next."""
    options = {name: np.asarray(option) if name != "window" and option is not True else option
               for name, option in options.items()}
    rng = np.random.default_rng(9)
    arrays = draw_arrays(rng, (4,), 5, 64, 300, 8, np.float32)
    mask = np.ones((1, 5, 64, 300), bool)
    wanted = mha.scaled_dot_product_attention(*arrays, mask=mask, **options)
    turned = heads_last(mask)
    if shared == "repeated":
        turned = np.broadcast_to(turned, (4, 5, 64, 300))
    for threads in (1, 4):
        with mha.threads(threads):
            found = mha.scaled_dot_product_attention(*arrays, mask=turned, **options)
            np.testing.assert_array_equal(found, wanted)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 18), st.integers(0, 300),
       st.integers(0, 500), st.sampled_from([1, 3, 64]), st.booleans())
def test_any_shape(seed, batch, heads, query_len, key_len, head_dim, shared):
    rng = np.random.default_rng(seed)
    arrays = draw_arrays(rng, (batch,), heads, query_len, key_len, head_dim, np.float32)
    compare(arrays, draw_pairs(rng, (1,) if shared else (batch,), heads, query_len, key_len,
                               np.float32))


def test_numbers_of_the_reference():
    rng = np.random.default_rng(3)
    arrays = draw_arrays(rng, (2,), 12, 140, 260, 32, np.float64)
    pairs = {name: heads_last(option)
             for name, option in draw_pairs(rng, (1,), 12, 140, 260, np.float64).items()}
    np.testing.assert_allclose(mha.scaled_dot_product_attention(*arrays, **pairs),
                               mha.reference.scaled_dot_product_attention(*arrays, **pairs),
                               rtol=1e-9, atol=1e-12)


def test_more_keys_than_a_copy_holds():
    """They are read where they lie."""
    rng = np.random.default_rng(5)
    arrays = draw_arrays(rng, (), 4, 40, 50_000, 4, np.float32)
    pairs = draw_pairs(rng, (), 4, 40, 50_000, np.float32)
    compare(arrays, pairs)


def test_heads_behind_the_length():
    """Of query, key and value as well: (batch, len, heads * head_dim) split by views."""
    rng = np.random.default_rng(6)
    arrays = [np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)
              for array in draw_arrays(rng, (2,), 8, 600, 640, 16, np.float32)]
    compare(arrays, draw_pairs(rng, (1,), 8, 600, 640, np.float32))
