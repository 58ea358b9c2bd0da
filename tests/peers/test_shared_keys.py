"""Keys and values that later layers take from an earlier one's cache, append=False, against
transformers' Gemma 3n, whole and token by token."""

import numpy as np
import pytest
import torch
from gate import SAME_FUNCTION, assert_agrees, assert_same
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n import modeling_gemma3n as gemma3n

import mha

WIDTH, LENGTH, WINDOW = 64, 260, 40
CONFIG = Gemma3nTextConfig(
    hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=32,
    vocab_size_per_layer_input=32, num_hidden_layers=4, num_kv_shared_layers=2, intermediate_size=8,
    layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=WINDOW,
    activation_sparsity_pattern=[0.0] * 4, attn_implementation="eager")
NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "q_norm": "q_norm.weight",
         "k_norm": "k_norm.weight"}


def modules(dtype):
    """The attention of the four layers, random: the last two have no keys and values."""
    torch.manual_seed(0)
    found = [gemma3n.Gemma3nTextAttention(CONFIG, i) for i in range(4)]
    for module in found:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    assert not hasattr(found[2], "k_proj")
    return [module.to(dtype).eval() for module in found]


def theirs(found, inputs, dtype):
    """Each layer's output over its input (LENGTH, WIDTH), as the model calls them."""
    rotary, shared, outputs = gemma3n.Gemma3nRotaryEmbedding(CONFIG), {}, []
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    for number, (module, x) in enumerate(zip(found, inputs, strict=True)):
        kind = CONFIG.layer_types[number]
        sees = (j <= i) & (j > i - (WINDOW if kind == "sliding_attention" else LENGTH))
        hidden = torch.from_numpy(x)[None].to(dtype)
        angles = rotary(hidden.double(), j[None], kind)
        with torch.no_grad():
            output, _ = module(
                hidden, [part.to(dtype) for part in angles],
                torch.where(sees, 0.0, -torch.inf).to(dtype)[None, None], shared_kv_states=shared)
        outputs.append(output[0].numpy())
    return outputs


def our_layers(found, dtype):
    state = [{name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
             for module in found]
    layers = []
    for number, own in enumerate(state):
        kind = CONFIG.layer_types[number]
        layers.append(mha.MultiHeadAttention.from_state(
            state[number % 2] | own, names=NAMES, transposed=True, num_heads=4, num_kv_heads=2,
            scale=1.0, norm_eps=CONFIG.rms_norm_eps, dtype=dtype, rotary=mha.Rotary.from_config(
                CONFIG.to_dict(), 32, layer_type=kind)))
    return layers


def append(layer, x, cache):
    """Gemma 3n norms values, too: keys and values are appended by hand."""
    def normed(heads, weight):
        mean = (heads.astype(np.float64)**2).mean(axis=-1, keepdims=True)
        return (heads / np.sqrt(mean + CONFIG.rms_norm_eps) * weight).astype(heads.dtype)

    key, value = (mha.split_heads(mha.linear(x[None], W), 2) for W in (layer.W_k, layer.W_v))
    positions = cache.lengths[0] + np.arange(len(x))
    cache.append(layer.rotary(normed(key, layer.k_norm), positions), normed(value, 1))


def ours(layers, inputs, sizes, dtype, windowed):
    """Four layers with two caches."""
    caches = [layers[0].new_cache(1, window=WINDOW if windowed else None), layers[1].new_cache(1)]
    outputs, at = [[] for _ in layers], 0
    for size in sizes:
        for number, (layer, x) in enumerate(zip(layers, inputs, strict=True)):
            rows, cache = x[at:at + size].astype(dtype), caches[number % 2]
            if number < 2:
                append(layer, rows, cache)
            window = (WINDOW - 1, 0) if number % 2 == 0 else None
            outputs[number].append(layer(rows, cache=cache, append=False, window=window))
        at += size
    assert not windowed or caches[0].start > 0 or len(sizes) == 1
    return [np.concatenate(pieces) for pieces in outputs]


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("sizes", [[LENGTH], [200, 1, 1, 30, *[1] * 28], [259, 1]])
def test_gemma_3n(sizes, windowed):
    inputs = np.random.default_rng(0).standard_normal((4, LENGTH, WIDTH))
    exact = modules(torch.float64)
    wanted = theirs(exact, inputs, torch.float64)
    found = modules(torch.float32)
    rounded = inputs.astype(np.float32)
    in_float32 = theirs(found, rounded, torch.float32)
    for number, (got, narrow, want) in enumerate(zip(
            ours(our_layers(exact, np.float64), inputs, sizes, np.float64, windowed),
            ours(our_layers(found, np.float32), rounded, sizes, np.float32, windowed),
            wanted, strict=True)):
        assert_same(got, want, number, SAME_FUNCTION)  # its norms and angles are float32's
        assert_agrees(narrow, in_float32[number], got, number)
