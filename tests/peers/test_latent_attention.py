"""MultiHeadLatentAttention beside transformers' DeepseekV2Attention and DeepseekV3Attention, with
random weights: whole sequences, decoding with caches, YaRN, and states there and back."""

import numpy as np
import pytest
import torch
import transformers
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

import mha

pytestmark = pytest.mark.filterwarnings("ignore")  # the framework's own
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
         "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
         "rms_norm_eps": 1e-5, "num_hidden_layers": 1, "intermediate_size": 8,
         "max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 64}
ROPES = {"plain": {"rope_type": "default", "rope_theta": 1000.0},
         "yarn v2": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
         "yarn v3": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
         "yarn of two": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
         "yarn without": YARN}
MODULES = {"deepseek_v2": (v2.DeepseekV2Attention, v2.DeepseekV2RotaryEmbedding,
                           transformers.DeepseekV2Config),
           "deepseek_v3": (v3.DeepseekV3Attention, v3.DeepseekV3RotaryEmbedding,
                           transformers.DeepseekV3Config)}


class Peer:
    """A module of transformers with random weights, and its calls on NumPy arrays."""

    def __init__(self, layout, rope, **more):
        attention, rotary, config = MODULES[layout]
        torch.manual_seed(0)
        self.config = config(**{**SIZES, **more}, rope_parameters=ROPES[rope])
        self.config._attn_implementation = "eager"
        self.module = attention(self.config, 0).eval()
        self.rotary = rotary(self.config)
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=parameter.shape[1] ** -0.5)
                else:
                    parameter.normal_(std=0.3).add_(1)

    def state(self):
        return {name: tensor.numpy() for name, tensor in self.module.state_dict().items()}

    def __call__(self, x):
        """In float64, but for the angles, which it always has in float32."""
        n = x.shape[1]
        blocked = torch.full((n, n), float("-inf"), dtype=torch.float64).triu(1)
        angles = self.rotary(torch.ones(1, dtype=torch.float64), torch.arange(n)[None])
        module = self.module.double()
        try:
            with torch.inference_mode():
                return module(hidden_states=torch.from_numpy(x).double(), attention_mask=blocked,
                              position_embeddings=angles)[0].numpy()
        finally:
            module.float()

    def decoded(self, x, cuts):
        """float32, a piece at a time, with a cache of transformers."""
        cache, outputs = transformers.DynamicCache(config=self.config), []
        for a, b in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
            blocked = torch.full((b - a, b), float("-inf")).triu(1 + a)
            angles = self.rotary(torch.ones(1), torch.arange(a, b)[None])
            with torch.inference_mode():
                outputs.append(self.module(
                    hidden_states=torch.from_numpy(x[:, a:b]), attention_mask=blocked,
                    position_embeddings=angles, past_key_values=cache)[0].numpy())
        return np.concatenate(outputs, axis=1)


def error(got, wanted):
    return abs(got - wanted).max() / abs(wanted).max()


def rows(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("query_rank", [None, 24])
@pytest.mark.parametrize("layout", MODULES)
def test_the_modules_of_transformers(layout, query_rank, rope):
    peer = Peer(layout, rope, q_lora_rank=query_rank)
    x = rows(2, 90, 64)
    wanted = peer(x)
    for config in (peer.config.to_dict(), {
            **{name: value for name, value in peer.config.to_dict().items()
               if name not in ("rope_parameters", "head_dim", "qk_head_dim")},
            "rope_theta": 1000.0, "rope_scaling": {
                name: value for name, value in ROPES[rope].items() if name != "rope_theta"}}):
        layer = mha.MultiHeadLatentAttention.from_state(peer.state(), layout, config=config)
        assert layer.query_rank == query_rank and layer.dtype == np.float32
        assert (layer.scale is None) == (rope in ("plain", "yarn without"))
        assert error(layer(x, causal=True), wanted) < 2e-6
    for absorbed in (True, False):
        cache = layer.new_cache(2, absorbed=absorbed)
        cuts = [9, 10, 11, 89]
        parts = [layer(x[:, a:b], cache=cache)
                 for a, b in zip([0, *cuts], [*cuts, 90], strict=True)]
        ours = np.concatenate(parts, axis=1)
        assert error(ours, wanted) < 2e-6
        assert error(ours, peer.decoded(x, cuts)) < 4e-6  # the errors of both


@pytest.mark.parametrize("more", [{}, {"q_lora_rank": 24}, {"rope_interleave": False}])
def test_biases_and_halves_of_columns(more):
    peer = Peer("deepseek_v3", "yarn v3", attention_bias=True, **{"q_lora_rank": None, **more})
    layer = mha.MultiHeadLatentAttention.from_state(peer.state(), config=peer.config.to_dict())
    assert layer.use_bias and layer.rotary.layout == (
        "half" if "rope_interleave" in more else "interleaved")
    x = rows(2, 50, 64)
    assert error(layer(x, causal=True), peer(x)) < 2e-6


@pytest.mark.parametrize("query_rank", [None, 24])
@pytest.mark.parametrize("layout", MODULES)
def test_states_there_and_back(layout, query_rank):
    peer = Peer(layout, "plain", q_lora_rank=query_rank)
    layer = mha.MultiHeadLatentAttention.from_state(peer.state(), layout,
                                                    config=peer.config.to_dict())
    state = layer.to_state(layout)
    assert state.keys() == peer.state().keys()
    for name, array in peer.state().items():
        assert np.array_equal(state[name], array), name
    peer.module.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})


def test_gradients():
    """Those of torch, of inputs and of every weight."""
    peer = Peer("deepseek_v3", "yarn v3", q_lora_rank=24, attention_bias=True)
    layer = mha.MultiHeadLatentAttention.from_state(peer.state(), config=peer.config.to_dict())
    x, grad = rows(2, 20, 64), rows(2, 20, 64)[::-1].copy()
    tensor = torch.from_numpy(x).requires_grad_()
    blocked = torch.full((20, 20), float("-inf")).triu(1)
    output = peer.module(hidden_states=tensor, attention_mask=blocked,
                         position_embeddings=peer.rotary(tensor, torch.arange(20)[None]))[0]
    output.backward(torch.from_numpy(grad))
    gradients = layer.vjp(x, causal=True)[1](grad)
    assert error(gradients.query, tensor.grad.numpy()) < 5e-6
    theirs = mha.MultiHeadLatentAttention.from_state(
        {name: parameter.grad for name, parameter in peer.module.named_parameters()},
        config=peer.config.to_dict())
    for name, wanted in theirs.parameters().items():
        assert error(getattr(gradients, name), wanted) < 5e-6, name
