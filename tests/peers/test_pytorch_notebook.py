"""The notebook's last cell, live: its layer against torch.nn.MultiheadAttention, same weights."""

import numpy as np
import pytest
import torch

from mha.compat import pytorch_notebook as notebook

# Sums of 512 terms in float32 (1.2e-7 a rounding) in different orders, relative to the largest.
TOLERANCE = 2e-6


def layers_with_the_same_weights(d_model, num_heads, seed):
    torch.manual_seed(seed)
    theirs = torch.nn.MultiheadAttention(d_model, num_heads, dropout=0.0, batch_first=True).eval()
    with torch.no_grad():
        theirs.in_proj_bias.normal_(std=0.1)
        theirs.out_proj.bias.normal_(std=0.1)
    ours = notebook.MultiHeadAttention(d_model, num_heads, dropout=0.1, rng=seed).eval()
    weights = (*theirs.in_proj_weight.detach().chunk(3), theirs.out_proj.weight.detach())
    biases = (*theirs.in_proj_bias.detach().chunk(3), theirs.out_proj.bias.detach())
    for linear, weight, bias in zip((ours.W_q, ours.W_k, ours.W_v, ours.W_o), weights, biases):
        linear.weight, linear.bias = weight.numpy(), bias.numpy()
    return ours, theirs


def assert_close(ours, theirs):
    theirs = theirs.numpy()
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * abs(theirs).max())


@pytest.mark.parametrize("seed", range(3))
def test_layer_is_torchs_layer(seed):
    ours, theirs = layers_with_the_same_weights(512, 8, seed)
    x = np.random.default_rng(seed).normal(size=(2, 10, 512)).astype(np.float32)
    output, weights = ours(x, x, x)
    with torch.no_grad():
        tensor = torch.from_numpy(x)
        torch_output, averaged = theirs(tensor, tensor, tensor)
        _, per_head = theirs(tensor, tensor, tensor, average_attn_weights=False)
    assert averaged.shape == (2, 10, 10)
    assert weights.shape == (2, 8, 10, 10)
    assert_close(output, torch_output)
    assert_close(weights, per_head)
    assert_close(weights.mean(axis=1), averaged)


def test_causal_mask_is_torchs_with_the_opposite_meaning():
    ours, theirs = layers_with_the_same_weights(64, 4, seed=3)
    x = np.random.default_rng(4).normal(size=(2, 6, 64)).astype(np.float32)
    mask = notebook.create_causal_mask(6)
    output, weights = ours(x, x, x, mask)
    with torch.no_grad():
        tensor = torch.from_numpy(x)
        torch_output, per_head = theirs(tensor, tensor, tensor, average_attn_weights=False,
                                        attn_mask=torch.from_numpy(mask[0, 0] == 0))
    assert_close(output, torch_output)
    assert_close(weights, per_head)


def test_both_count_the_same_parameters():
    ours, theirs = layers_with_the_same_weights(512, 8, seed=0)
    assert sum(parameter.size for parameter in ours.parameters()) == 1_050_624
    assert sum(parameter.numel() for parameter in theirs.parameters()) == 1_050_624
