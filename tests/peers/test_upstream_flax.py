"""Flax' own tests of its attention, from its sdist, with our layers and functions."""

import flax.linen
import flax.linen.attention
import flax.nnx
import pytest
import upstream

from mha.compat.flax import linen, nnx

pytestmark = [pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy"),
              pytest.mark.filterwarnings("ignore:You are passing an array of shape")]

OF_LINEN = {name: getattr(linen, name) for name in linen.__all__}
LINEN = upstream.Names(flax.linen, attention=upstream.Names(flax.linen.attention, **OF_LINEN),
                       **OF_LINEN)
NNX = upstream.Names(flax.nnx, MultiHeadAttention=nnx.MultiHeadAttention,
                     dot_product_attention=nnx.dot_product_attention)
LEFT_OUT = {
    """AttentionTest.test_decoding AttentionTest.test_autoregressive_receptive_field_1d""":
        "jax.jit, lax.scan and jax.grad trace the layer: ours computes with numbers",
    """AttentionTest.test_multihead_self_attention_explicit_dropout
    AttentionTest.test_multihead_sow_attention_weights AttentionTest.test_attention_alias_submodule
    TestMultiHeadAttention.test_multihead_sow_attention_weights""":
        "a module of Flax' holds the layers, and finds their variables",
    "TestMultiHeadAttention.test_keep_rngs":
        "nnx.split takes Flax' modules apart; tests/compat asks for rngs",
    "AttentionTest.test_dtype_infer": "complex numbers",
    "AttentionTest.test_multihead_mask_warning":
        "a mask in inputs_v's place: an error of flax.errors, and a warning of an old order",
}

LINENS, NNXS = upstream.of_sdist("flax", "tests/linen/linen_attention_test.py",
                                 "tests/nnx/nn/attention_test.py")
FOUND = upstream.cases(LINENS, "linen_attention_test.py", {"nn": LINEN})
FOUND |= upstream.cases(NNXS, "attention_test.py", {"nnx": NNX, "linen": LINEN,
                                                    "combine_masks": nnx.combine_masks})
RUN, ELSEWHERE = upstream.parameters(FOUND, LEFT_OUT)


@pytest.mark.parametrize("case", RUN)
def test_of_flax(case):
    upstream.run(case)


@pytest.mark.parametrize("case", ELSEWHERE)
def test_what_is_left_out_fails(case):
    upstream.assert_fails(case)


def test_what_is_left_out_exists():
    assert upstream.stale(FOUND, LEFT_OUT) == []
