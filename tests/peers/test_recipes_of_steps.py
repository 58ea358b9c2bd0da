"""docs/recipes.md against transformers' own modules, with random weights."""

import numpy as np
import pytest
import torch
from code_of_pages import names_of
from transformers import NanoChatConfig
from transformers.models.nanochat import modeling_nanochat

import mha


@pytest.mark.parametrize("seed", range(5))
def test_nanochat(seed):
    torch.manual_seed(seed)
    kv_heads, head_dim, length = 1 + seed % 3, 2 * (4 + seed), 3 + 2 * seed
    heads = 2 * kv_heads
    config = NanoChatConfig(hidden_size=heads * head_dim, num_attention_heads=heads,
                            num_key_value_heads=kv_heads, rms_norm_eps=1e-6)
    config._attn_implementation = "eager"
    theirs = modeling_nanochat.NanoChatAttention(config, 0).eval()
    x = torch.randn(2, length, heads * head_dim)
    tables = modeling_nanochat.NanoChatRotaryEmbedding(config)(x, torch.arange(length)[None])
    mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
    with torch.no_grad():
        wanted = theirs(x, position_embeddings=tables, attention_mask=mask)[0].numpy()
    W = [getattr(theirs, f"{name}_proj").weight.detach().numpy().T for name in "qkvo"]
    rotary = mha.Rotary(head_dim, base=config.rope_parameters["rope_theta"])
    attend = names_of("docs/recipes.md")["attend"]
    got = attend(x.numpy(), *W, heads, kv_heads, rotary, -np.arange(length))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())
