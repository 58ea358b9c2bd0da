"""The layouts of latent attention; tests/peers compares them with transformers' modules."""

import math

import numpy as np
import pytest
from latent_layers import latent_layer, rows
from layouts import bits, error_of

import mha

from_state = mha.MultiHeadLatentAttention.from_state
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24,
          "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
          "rope_theta": 10000.0, "rms_norm_eps": 1e-5}
KINDS = {"plain": {"rotary": mha.Rotary(8, layout="interleaved"), "use_bias": True},
         "query_rank": {"use_bias": False}}
LAYOUTS = ("deepseek_v2", "deepseek_v3")


def layer_and_config(kind, dtype=np.float32):
    layer = latent_layer(kind, dtype, **KINDS[kind])
    return layer, {**CONFIG, "q_lora_rank": layer.query_rank}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_to_the_bits(layout, kind, dtype):
    layer, config = layer_and_config(kind, dtype)
    state = layer.to_state(layout, prefix="a.b.")
    for sizes in ({"config": config}, {"num_heads": 4, "rotary": layer.rotary}):
        again = from_state(state, layout, prefix="a.b.", **sizes)
        assert repr(again) == repr(layer)
        for name, parameter in layer.parameters().items():
            assert bits(again.parameters()[name]) == bits(parameter), name
            assert not any(np.shares_memory(parameter, array) for array in state.values())
            assert again.parameters()[name].flags.writeable
    back = again.to_state(layout, prefix="a.b.")
    assert {name: bits(array) for name, array in back.items()} == {
        name: bits(array) for name, array in state.items()}


def test_where_numbers_stand():
    layer = latent_layer()
    state = layer.to_state("deepseek_v3")
    assert list(state) == [
        "q_a_proj.weight", "q_a_proj.bias", "q_a_layernorm.weight", "q_b_proj.weight",
        "kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias", "kv_a_layernorm.weight",
        "kv_b_proj.weight", "o_proj.weight", "o_proj.bias"]
    assert np.array_equal(state["q_b_proj.weight"], layer.W_uq.T)
    both = state["kv_b_proj.weight"].reshape(4, 16 + 12, 32)
    for head in range(4):
        assert np.array_equal(both[head, :16].T, layer.W_uk[:, head * 16:(head + 1) * 16])
        assert np.array_equal(both[head, 16:].T, layer.W_uv[:, head * 12:(head + 1) * 12])


def test_all_layers_and_their_types(tmp_path):
    layers = [layer_and_config("query_rank")[0] for _ in range(2)]
    layers[1].W_o *= 2
    state = {name: array for index, layer in enumerate(layers) for name, array in layer.to_state(
        "deepseek_v2", prefix=f"model.layers.{index}.self_attn.").items()}
    config = {**CONFIG, "model_type": "deepseek_v2"}
    prefix = "model.layers.{layer}.self_attn."
    np.savez(tmp_path / "weights.npz", **state)
    for given in (state, mha.parameters.open(tmp_path / "weights.npz")):
        read = from_state(given, prefix=prefix, config=config)
        assert len(read) == 2 and np.array_equal(read[1].W_o, layers[1].W_o)
        one = from_state(given, prefix=prefix, config=config, layer_index=1, dtype=np.float64)
        assert one.dtype == np.float64 and np.array_equal(one.W_o, layers[1].W_o)


def test_the_scale_of_yarn():
    layer, config = layer_and_config("query_rank")
    state = layer.to_state("deepseek_v3")
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
            "mscale": 1.0, "mscale_all_dim": 1.0}
    scales = {1.0: (0.1 * math.log(40) + 1) ** 2 / math.sqrt(24), 0: None, None: None,
              0.5: (0.05 * math.log(40) + 1) ** 2 / math.sqrt(24)}
    for of_all, wanted in scales.items():
        read = from_state(state, "deepseek_v3", config={
            **config, "rope_scaling": {**yarn, "mscale_all_dim": of_all}})
        assert read.scale == wanted or abs(read.scale / wanted - 1) < 1e-15
        x = rows(2, 9, 40)
        assert np.array_equal(read(x), read(x, scale=wanted or 1 / math.sqrt(24)))
    own = from_state(state, "deepseek_v3", config={**config, "rope_scaling": yarn}, scale=0.3)
    assert own.scale == 0.3
    got = error_of(from_state, state, "deepseek_v3", config={
        **config, "rope_scaling": {**yarn, "mscale_all_dim": "1"}})
    assert "scale: mscale_all_dim: got str, wanted a number; or give scale=" in got


@pytest.mark.parametrize(("change", "message"), [
    ({"kv_lora_rank": 16}, "kv_a_layernorm.weight: got shape"),
    ({"qk_rope_head_dim": 4}, "q_b_proj.weight: got shape (96, 24), wanted (heads 4 * head_dim 20"),
    ({"v_head_dim": 10}, "kv_b_proj.weight: got shape (112, 32), wanted (heads 4 * kv_dim 26"),
    ({"num_attention_heads": 5}, "5 heads do not divide"),
    ({"num_attention_heads": None, "v_head_dim": None, "qk_nope_head_dim": None},
     "num_heads: needed and given nowhere"),
    ({"rope_scaling": {"type": "yarn"}}, "rotary: max_position_embeddings: got none"),
    ({"model_type": "llama"}, "config: model_type is 'llama'"),
    ({"q_lora_rank": None}, "config 'q_lora_rank': got None, wanted the width of q_a_proj.weight"),
])
def test_configs_that_do_not_fit(change, message):
    layer, config = layer_and_config("query_rank")
    assert message in error_of(from_state, layer.to_state("deepseek_v3"), "deepseek_v3",
                               config={**config, **change})


def test_a_config_with_a_latent_of_queries_that_the_state_has_not():
    layer, config = layer_and_config("plain")
    state = layer.to_state("deepseek_v3")
    got = error_of(from_state, state, "deepseek_v3", config={**config, "q_lora_rank": 24})
    assert "config 'q_lora_rank': got 24, wanted None, as q_proj.weight is there" in got
    del config["q_lora_rank"]  # a config that does not say
    assert from_state(state, "deepseek_v3", config=config).query_rank is None


def test_states_that_do_not_fit():
    layer, config = layer_and_config("query_rank")
    state = layer.to_state("deepseek_v3")
    got = error_of(from_state, {name: array for name, array in state.items()
                                if name != "q_a_layernorm.weight"}, "deepseek_v3", config=config)
    assert "missing q_a_layernorm.weight" in got
    got = error_of(from_state, {**state, "q_proj.weight": state["o_proj.weight"]}, "deepseek_v3",
                   config=config)
    assert "left over q_proj.weight" in got
    got = error_of(from_state, {**state, "kv_b_proj.weight": state["kv_b_proj.weight"][:48]},
                   "deepseek_v3", num_heads=4, rotary=None)
    assert "kv_b_proj.weight: got 12 rows a head beside values of 12 columns" in got
    got = error_of(from_state, {**state, "kv_a_proj_with_mqa.weight":
                                state["kv_a_proj_with_mqa.weight"][:36]},
                   "deepseek_v3", num_heads=4, rotary=None)
    assert "kv_a_proj_with_mqa.weight: got 36 rows, wanted kv_rank 32 and 8" in got


def test_classes_have_their_own_layouts():
    layer, config = layer_and_config("query_rank")
    state = layer.to_state("deepseek_v3")
    plain = mha.MultiHeadAttention(64, 4, rng=0)
    for call, message in (
            (lambda: mha.MultiHeadAttention.from_state(state, "deepseek_v3", config=config),
             "layout: got 'deepseek_v3', which is one of mha.MultiHeadLatentAttention"),
            (lambda: plain.to_state("deepseek_v2"), "which is one of mha.MultiHeadLatentAttention"),
            (lambda: from_state(plain.to_state("bert"), "bert", num_heads=4),
             "layout: got 'bert', which is one of mha.MultiHeadAttention"),
            (lambda: layer.to_state("llama"), "which is one of mha.MultiHeadAttention"),
            (lambda: layer.to_state("deepseek_v4"),
             "layout: got 'deepseek_v4', which has latent attention with more"),
            (lambda: latent_layer("rotary").to_state("deepseek_v3"), "norm_eps is 0.001, wanted"),
            (lambda: latent_layer("plain", rotary=mha.Rotary(8)).to_state("deepseek_v3"),
             "rotary rotates pairs of columns that are 'half', wanted 'interleaved'"),
            (lambda: mha.MultiHeadAttention.from_state(state, "llama", num_heads=4),
             "looks like deepseek_v2: try")):
        with pytest.raises(ValueError) as raised:
            call()
        assert message in str(raised.value)
