"""mha.compat.flex on NumPy arrays; tests/peers/test_compat_flex.py has PyTorch's beside it."""

import types

import mask_mods
import numpy as np
import pytest

import mha
from mha.compat import flex

LENGTH = 330
RNG = np.random.default_rng(0)
IDS = np.sort(RNG.integers(0, 5, LENGTH))
MODS = mask_mods.every_kind(IDS, np.sort(RNG.integers(0, 5, LENGTH)), np.array([30, 200]))


def arrays(kv_heads=2):
    rng = np.random.default_rng(1)
    return [rng.standard_normal((2, heads, LENGTH, 16)) for heads in (4, kv_heads, kv_heads)]


@pytest.mark.parametrize("name", MODS)
def test_masks(name):
    """Against the function asked pair by pair, and against the dense mask."""
    mask = flex.create_block_mask(MODS[name], 2, 4, LENGTH, LENGTH)
    index = np.ogrid[:2, :4, :LENGTH, :LENGTH]
    dense = np.broadcast_to(MODS[name](*index), (2, 4, LENGTH, LENGTH))
    np.testing.assert_array_equal(mask.to_dense(), dense)
    np.testing.assert_array_equal(flex.create_mask(MODS[name], 2, 4, LENGTH, LENGTH), dense)
    output, lse = flex.flex_attention(*arrays(), block_mask=mask, enable_gqa=True, return_lse=True)
    wanted = mha.scaled_dot_product_attention(*arrays(), mask=dense, return_lse=True)
    np.testing.assert_array_equal(output, wanted[0])
    np.testing.assert_array_equal(lse, wanted[1])


def test_masks_are_joined():
    both = flex.and_masks(mask_mods.causal, mask_mods.sliding_window, mask_mods.documents(IDS))
    either = flex.or_masks(mask_mods.documents(IDS), mask_mods.dilated_window(9, 2))
    one, *others = (flex.create_block_mask(mod, None, None, LENGTH, LENGTH) for mod in (
        mask_mods.causal, mask_mods.sliding_window, mask_mods.documents(IDS),
        mask_mods.dilated_window(9, 2)))
    made = flex.create_block_mask(both, None, None, LENGTH, LENGTH)
    assert made == one & others[0] & others[1]
    assert flex.create_block_mask(either, 1, 1, LENGTH, LENGTH) == others[1] | others[2]
    assert flex.create_mask(flex.and_masks(), 1, 1, 3, 3).all()
    assert not flex.create_mask(flex.or_masks(), 1, 1, 3, 3).any()


def test_what_else_it_takes_and_returns():
    query, key, value = arrays(4)
    plain = flex.flex_attention(query, key, value)
    np.testing.assert_array_equal(plain, mha.scaled_dot_product_attention(query, key, value))
    np.testing.assert_array_equal(flex.flex_attention(query, key[:1], value[:1], scale=0.5),
                                  mha.scaled_dot_product_attention(
                                      query, np.repeat(key[:1], 2, axis=0),
                                      np.repeat(value[:1], 2, axis=0), scale=0.5))
    asked = types.SimpleNamespace(lse=True, max_scores=False)
    output, aux = flex.flex_attention(query, key, value, return_aux=asked, kernel_options={"a": 1})
    np.testing.assert_array_equal(output, plain)
    assert aux.lse.shape == query.shape[:3]
    assert aux.max_scores is None
    mask = flex.create_block_mask(mask_mods.causal, 1, 1, LENGTH, LENGTH, "cpu", 64, True)
    assert mask == mha.BlockMask.causal(LENGTH)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda q: flex.flex_attention(q, q, q, lambda *a: a[0]), TypeError, "score_mod: .* alibi="),
    (lambda q: flex.flex_attention(q, q, q, mha.BlockMask.causal(9)), TypeError,
     "wanted it as block_mask="),
    (lambda q: flex.flex_attention(q, q, q, block_mask=np.ones((9, 9), bool)), TypeError,
     "block_mask: got ndarray"),
    (lambda q: flex.flex_attention(q, q, q, block_mask=mha.BlockMask.causal(8)), ValueError,
     r"block_mask: got one of lengths \(8, 8\), wanted \(9, 9\)"),
    (lambda q: flex.flex_attention(q, q[:, :1], q[:, :1]), ValueError, "enable_gqa=True"),
    (lambda q: flex.flex_attention(q[0], q, q), ValueError, "query: got shape"),
    (lambda q: flex.flex_attention(q, q[[0, 0, 0]], q), ValueError, "key: got a batch of 3"),
    (lambda q: flex.flex_attention(q, q, q, return_aux=types.SimpleNamespace(max_scores=True)),
     ValueError, "return_aux"),
    (lambda q: flex.create_block_mask(3, 1, 1, 9, 9), TypeError, "mask_mod: got int"),
    (lambda q: flex.create_block_mask(mask_mods.causal, 0, 1, 9, 9), ValueError, "B: got 0"),
    (lambda q: flex.create_block_mask(mask_mods.causal, 1, 1, 9, 9, BLOCK_SIZE=0), ValueError,
     "BLOCK_SIZE: got 0"),
    (lambda q: flex.create_block_mask(lambda b, h, q, k: q - k, 1, 1, 9, 9), TypeError,
     "mask_mod: got an array of int64"),
    (lambda q: flex.and_masks(mask_mods.causal, 3), TypeError, "mask_mods: got int"),
    (lambda q: flex.create_mask(mask_mods.causal, 1, 1, 9, 9, device="cuda"), ValueError, "device"),
    (lambda q: flex.flex_attention(q, q, q, attn_mask=None), TypeError, "block_mask="),
])
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(np.ones((2, 2, 9, 4)))
