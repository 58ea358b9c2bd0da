"""Text models of transformers whose tokens have several positions, and "proportional" frequencies.

Their attention with random weights beside the layer that `from_state` makes of them.
"""

import numpy as np
import pytest
import torch
import transformers
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.glm4v import configuration_glm4v, modeling_glm4v
from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl, modeling_qwen2_5_vl
from transformers.models.qwen2_vl import configuration_qwen2_vl, modeling_qwen2_vl
from transformers.models.qwen3_vl import configuration_qwen3_vl, modeling_qwen3_vl

import mha

pytestmark = pytest.mark.filterwarnings("ignore")  # the framework's own

SIZES = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 2, "max_position_embeddings": 4096, "attn_implementation": "eager"}
DEFAULT = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 5, 5]}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "mrope_section": [4, 4, 4],
        "original_max_position_embeddings": 1024}
IN_TURNS = {**DEFAULT, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
CASES = {
    "Qwen2-VL": (configuration_qwen2_vl.Qwen2VLTextConfig(**SIZES, rope_parameters=DEFAULT),
                 modeling_qwen2_vl.Qwen2VLAttention, modeling_qwen2_vl.Qwen2VLRotaryEmbedding),
    "Qwen2.5-VL": (configuration_qwen2_5_vl.Qwen2_5_VLTextConfig(**SIZES, rope_parameters=YARN),
                   modeling_qwen2_5_vl.Qwen2_5_VLAttention,
                   modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding),
    "Qwen3-VL": (configuration_qwen3_vl.Qwen3VLTextConfig(
        **SIZES, head_dim=32, rope_parameters=IN_TURNS), modeling_qwen3_vl.Qwen3VLTextAttention,
        modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding),
    "Qwen3-VL, unsaid": (configuration_qwen3_vl.Qwen3VLTextConfig(
        **SIZES, head_dim=32, rope_parameters={**DEFAULT, "mrope_section": [8, 4, 4]}),
        modeling_qwen3_vl.Qwen3VLTextAttention, modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding)}


def positions_of_an_image(length):
    """(3, length): text, an image of 3 x 4 patches, and text behind the largest."""
    text = np.stack([np.arange(5)] * 3)
    image = 5 + np.stack([np.zeros(12, int), np.arange(12) // 4, np.arange(12) % 4])
    rest = np.stack([9 + np.arange(length - 17)] * 3)
    return np.concatenate([text, image, rest], axis=1)


@pytest.fixture(params=CASES)
def case(request):
    """(config, attention with random weights, rotary embedding, layer)."""
    config, attention_type, rotary_type = CASES[request.param]
    torch.manual_seed(0)
    attention = attention_type(config, 0).eval()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0, parameter.shape[-1]**-0.5)
    state = {name: parameter.numpy() for name, parameter in attention.state_dict().items()}
    layer = mha.MultiHeadAttention.from_state(state, config=config.to_dict(), layer_index=0)
    return config, attention, rotary_type(config), layer


def called(case, x, positions):
    """Theirs, causal: x (batch, len, width), positions (3, batch, len)."""
    _, attention, rotary, _ = case
    length = x.shape[1]
    turned = rotary(torch.from_numpy(x), torch.from_numpy(positions))
    blocked = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        return attention(torch.from_numpy(x), position_embeddings=turned,
                         attention_mask=blocked)[0].numpy()


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-6 * np.abs(theirs).max())


def test_text_and_an_image(case):
    config, _, _, layer = case
    assert layer.rotary.sections == tuple(config.rope_parameters["mrope_section"])
    x = np.random.default_rng(1).standard_normal((2, 23, 96)).astype(np.float32)
    one = positions_of_an_image(23)
    shifted = one + np.array([0, 40])[:, None, None]  # (2, 3, len): each sequence its own
    positions = np.ascontiguousarray(shifted.swapaxes(0, 1))
    wanted = called(case, x, positions)
    close(layer(x, positions=positions, causal=True), wanted)
    cache = layer.new_cache(2)
    parts = [layer(x[:, i:j], cache=cache, positions=positions[..., i:j])
             for i, j in ((0, 17), (17, 18), (18, 23))]
    close(np.concatenate(parts, axis=1), wanted)
    rows = layer(x.reshape(46, 96), starts=[0, 23, 46], causal=True,
                 positions=positions.reshape(3, 46))
    close(rows.reshape(2, 23, 96), wanted)


def test_text_alone(case):
    _, _, _, layer = case
    x = np.random.default_rng(2).standard_normal((3, 11, 96)).astype(np.float32)
    wanted = called(case, x, np.broadcast_to(np.arange(11), (3, 3, 11)).copy())
    close(layer(x, causal=True), wanted)
    cache = layer.new_cache(3)
    close(np.concatenate([layer(x[:, :7], cache=cache), layer(x[:, 7:], cache=cache)], axis=1),
          wanted)


def test_the_gradient(case):
    _, attention, rotary, layer = case
    x = np.random.default_rng(3).standard_normal((1, 23, 96)).astype(np.float32)
    positions = positions_of_an_image(23)[:, None]
    given = torch.from_numpy(x).requires_grad_()
    turned = rotary(given, torch.from_numpy(positions))
    output = attention(given, position_embeddings=turned, attention_mask=None)[0]
    output.square().sum().backward()
    ours, pullback = layer.vjp(x, positions=positions)
    gradients = pullback(2 * ours)
    close(gradients.query, given.grad.numpy())
    close(gradients.W_q.T, attention.q_proj.weight.grad.numpy())
    close(gradients.W_k.T, attention.k_proj.weight.grad.numpy())


def test_half_of_the_columns_in_pairs_of_neighbours():
    """GLM-4.1V."""
    config = configuration_glm4v.Glm4vTextConfig(**SIZES, rope_parameters={
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "mrope_section": [2, 2, 2]})
    rotary = mha.Rotary.from_config(config.to_dict(), 24, layout="interleaved")
    assert rotary.dims == 12 and rotary.sections == (2, 2, 2)
    x = np.random.default_rng(0).standard_normal((1, 4, 23, 24)).astype(np.float32)
    positions = positions_of_an_image(23)[:, None]
    cos, sin = modeling_glm4v.Glm4vTextRotaryEmbedding(config)(
        torch.from_numpy(x), torch.from_numpy(positions))
    wanted, _ = modeling_glm4v.apply_rotary_pos_emb(torch.from_numpy(x), torch.from_numpy(x), cos,
                                                    sin)
    np.testing.assert_allclose(rotary(x, positions), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_the_proportional_frequencies_of_gemma_4(share):
    config = transformers.Gemma4TextConfig(
        head_dim=32, rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": share,
                               "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})
    theirs = modeling_gemma4.Gemma4TextRotaryEmbedding(config)
    x = np.random.default_rng(0).standard_normal((1, 2, 30, 512)).astype(np.float32)
    for kind in ("full_attention", "sliding_attention"):
        head_dim = 2 * len(getattr(theirs, f"{kind}_inv_freq"))
        ours = mha.Rotary.from_config(config.to_dict(), head_dim, layer_type=kind)
        heads = torch.from_numpy(x[..., :head_dim].copy())
        cos, sin = theirs(heads, torch.arange(30)[None], kind)
        wanted = modeling_gemma4.apply_rotary_pos_emb(heads, cos, sin, unsqueeze_dim=1)
        np.testing.assert_allclose(ours(heads.numpy()), wanted.numpy(), rtol=0, atol=2e-5)
