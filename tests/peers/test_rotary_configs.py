"""The configs of transformers: which are read, and Llama's weights in the order of Meta's files."""

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama
from transformers.models.phimoe import modeling_phimoe

import mha

pytestmark = pytest.mark.filterwarnings("ignore")  # the framework's own

# Models whose rotary embeddings mha has, and what the others are refused for.
READ = (
    "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Qwen3Next", "Gemma",
    "Gemma2", "Gemma3Text", "Olmo", "Olmo2", "Olmo3", "GptOss", "Phi", "Phi3", "Phimoe", "GPTNeoX",
    "Cohere", "Cohere2", "Granite", "StableLm", "Starcoder2", "Nemotron", "Glm", "Glm4", "Apertus",
    "Arcee", "SmolLM3", "Exaone4", "Persimmon", "Falcon", "DeepseekV3", "ModernBert", "Helium",
    "HunYuanDenseV1", "Ernie4_5", "Jamba", "Lfm2", "MiniMax", "Dots1", "SeedOss", "BitNet",
    "Gemma4Text", "Cosmos3EdgeText")
REFUSED = {"Ministral3": "llama_4_scaling_beta: got it inside rope_parameters",
           "Mistral4": "llama_4_scaling_beta: got it inside rope_parameters"}


def rotaries(name):
    """Those of each kind of the layers of a default config."""
    config = getattr(transformers, name + "Config")()
    mapping = config.to_dict()
    kinds = [kind for kind, value in (mapping.get("rope_parameters") or {}).items()
             if isinstance(value, dict)]
    head_dim = mapping.get("head_dim") or config.hidden_size // config.num_attention_heads
    return [mha.Rotary.from_config(mapping, head_dim, layer_type=kind) for kind in kinds or [None]]


@pytest.mark.parametrize("name", READ)
def test_a_default_config_is_read(name):
    assert all(isinstance(rotary, mha.Rotary) for rotary in rotaries(name))


@pytest.mark.parametrize("name", REFUSED)
def test_a_default_config_is_refused(name):
    with pytest.raises(ValueError, match=REFUSED[name]):
        rotaries(name)


@pytest.mark.parametrize("length", [30, 90])
def test_the_magnitudes_of_phi_moe(length):
    """Of equal factors, since this model of transformers takes the short ones at any length."""
    config = transformers.PhimoeConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=128, rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 4,
            "long_factor": [1.5] * 4, "short_mscale": 1.2, "long_mscale": 1.3,
            "original_max_position_embeddings": 64})
    positions = torch.arange(length)[None]
    cos, sin = modeling_phimoe.PhimoeRotaryEmbedding(config)(torch.ones(1), positions)
    x = np.random.default_rng(0).standard_normal((length, 8)).astype(np.float32)
    ours = mha.Rotary.from_config(config.to_dict(), 8, length=length)(x)
    theirs = torch.from_numpy(x) * cos + modeling_phimoe.rotate_half(torch.from_numpy(x)) * sin
    np.testing.assert_allclose(ours, theirs[0], rtol=0, atol=1e-5)


def permuted(weight, heads):
    """As transformers' conversion of Llama's files has it."""
    out, width = weight.shape
    return weight.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def test_llama_in_metas_order():
    rng = np.random.default_rng(0)
    config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1,
                                      num_key_value_heads=2, attn_implementation="eager")
    shapes = {"wq": (32, 32), "wk": (16, 32), "wv": (16, 32), "wo": (32, 32)}
    meta = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) / 6
            for name, shape in shapes.items()}
    attention = modeling_llama.LlamaAttention(config, 0).eval()
    theirs = {"q_proj": permuted(meta["wq.weight"], 4), "k_proj": permuted(meta["wk.weight"], 2),
              "v_proj": meta["wv.weight"], "o_proj": meta["wo.weight"]}
    attention.load_state_dict({f"{name}.weight": torch.from_numpy(weight.copy())
                               for name, weight in theirs.items()})
    x = rng.standard_normal((2, 9, 32)).astype(np.float32)
    turned = modeling_llama.LlamaRotaryEmbedding(config)(torch.from_numpy(x),
                                                         torch.arange(9)[None])
    blocked = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)[None, None]
    wanted = attention(torch.from_numpy(x), position_embeddings=turned,
                       attention_mask=blocked)[0].detach().numpy()
    layer = mha.MultiHeadAttention.from_state(meta, "llama_meta", config={
        "n_heads": 4, "n_kv_heads": 2, "rope_theta": 10000.0})
    np.testing.assert_allclose(layer(x, causal=True), wanted, rtol=0,
                               atol=2e-6 * np.abs(wanted).max())
