"""Which layout a state is read by: that of a config's model, a model's name, names of a program's
own; and which columns of Llama's turn together."""

import numpy as np
import pytest
from layouts import HEADS, LAYERS, OF_GROUPED, WIDTH, error_of, flat, layer_of, read

import mha

from_state = mha.MultiHeadAttention.from_state
ALIASES = {"mistral": "llama", "qwen2": "llama", "roberta": "bert", "xlm-roberta": "bert",
           "camembert": "bert", "mbart": "bart", "deit": "vit", "gemma3_text": "gemma3",
           "mt5": "t5"}
X = np.random.default_rng(3).standard_normal((2, 7, WIDTH)).astype(np.float32)


def same(layer, other):
    assert repr(layer) == repr(other)
    for name, parameter in other.parameters().items():
        np.testing.assert_array_equal(layer.parameters()[name], parameter, err_msg=name)


@pytest.mark.parametrize(("model", "layout"), [
    *ALIASES.items(), *((name, name) for name in (
        "llama", "qwen3", "gemma2", "olmo2", "gpt_oss", "bert", "bart", "whisper", "vit", "gpt2",
        "gpt_neox", "bloom", "mpt", "t5"))])
def test_what_configs_call_a_model_names_its_layout(model, layout):
    state, config = layer_of(layout).to_state(layout), LAYERS[layout][1]
    wanted = read(layout, state)
    same(from_state(state, model, config=config, layer_index=0), wanted)
    same(from_state(state, config={**config, "model_type": model}, layer_index=0), wanted)
    back = wanted.to_state(model)
    assert back.keys() == state.keys()


def test_the_text_part_of_a_config_says_it():
    state = layer_of("gemma3").to_state("gemma3")
    config = {"model_type": "gemma3", "text_config": {**LAYERS["gemma3"][1],
                                                      "model_type": "gemma3_text"}}
    same(from_state(state, config=config, layer_index=0), read("gemma3", state))


def test_qwen2_has_biases_by_its_name():
    state = layer_of("llama").to_state("llama")
    del state["k_proj.bias"], state["q_proj.bias"], state["v_proj.bias"]
    assert "missing k_proj.bias, q_proj.bias, v_proj.bias" in error_of(
        from_state, state, "qwen2", config=OF_GROUPED)
    from_state(state, "mistral", config=OF_GROUPED)


@pytest.mark.parametrize(("config", "message"), [
    (None, "layout: got none, and no config, wanted one of mha.parameters.layouts()"),
    ({}, "layout: got none, and no model_type in config, wanted one of mha.parameters"),
    ({"model_type": "cats"}, "layout: got none, and model_type 'cats' in config, which has no"),
    ({"model_type": []}, "layout: got none, and model_type [] in config, which has no layout")])
def test_no_layout(config, message):
    state = layer_of("gpt_oss").to_state("gpt_oss", prefix="a.3.")
    for prefix, index in (("a.3.", None), ("a.{layer}.", 3)):
        told = error_of(from_state, state, config=config, prefix=prefix, layer_index=index)
        assert told.startswith(message)
        assert told.endswith("; state has the names of gpt_oss") == (index is None), told
    assert "state has" not in error_of(from_state, {"a": X}, config=config)


def test_a_hint_names_a_layout_only_if_all_its_names_fit():
    state = layer_of("qwen3").to_state("qwen3", prefix="model.")
    extra = state | {"model.gate.weight": X}
    assert "looks like qwen3 elsewhere" in error_of(from_state, state, "bert", num_heads=HEADS)
    assert "looks like" not in error_of(from_state, extra, "bert", num_heads=HEADS)
    config = {**LAYERS["qwen3"][1], "model_type": "bert"}
    told = error_of(from_state, state, "qwen3", prefix="model.", config=config)
    assert "model_type is 'bert': wanted its own config" in told and "layout='bert'" not in told
    config["model_type"] = "qwen3"
    assert "try layout='qwen3'" in error_of(from_state, state, "llama", prefix="model.",
                                            config=config)
    assert "try layout" not in error_of(from_state, extra, "llama", prefix="model.",
                                        config=config)


def test_hints_among_many_prefixes_are_found_soon():
    layer = flat(layer_of("t5").to_state("t5"))
    state = {f"{index}.{name}": array for index in range(3000) for name, array in layer.items()}
    assert "looks like t5 elsewhere: try layout='t5', prefix='{layer}.'" in error_of(
        from_state, state, "bert", num_heads=HEADS)


# Rotary pairs that are beside each other

def turned(heads, base):
    """(batch, heads, len, dim) in float64: pairs beside each other as complex numbers times
    exp(i position frequency), as Meta's reference code has it."""
    pairs = heads[..., 0::2] + 1j * heads[..., 1::2]
    frequencies = base ** (-2 * np.arange(pairs.shape[-1]) / heads.shape[-1])
    pairs = pairs * np.exp(1j * np.arange(pairs.shape[-2])[:, None] * frequencies)
    return np.stack([pairs.real, pairs.imag], -1).reshape(heads.shape)


def attention_of_meta(state, x, heads, kv_heads, base):
    """Causal self-attention in float64 of weights (out, in) by the names of Meta's files."""
    x = x.astype(float)
    batch, length, _ = x.shape

    def split(name, count):
        return (x @ state[name].astype(float).T).reshape(batch, length, count, -1).swapaxes(1, 2)

    query = turned(split("wq.weight", heads), base)
    key = turned(split("wk.weight", kv_heads), base).repeat(heads // kv_heads, 1)
    value = split("wv.weight", kv_heads).repeat(heads // kv_heads, 1)
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    scores[..., ~np.tri(length, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    merged = (weights @ value).swapaxes(1, 2).reshape(batch, length, -1)
    return merged @ state["wo.weight"].astype(float).T


def test_metas_weights_turn_pairs_that_are_beside_each_other():
    state = layer_of("llama_meta").to_state("llama_meta")
    wanted = attention_of_meta(state, X, HEADS, 2, 500.0)
    largest = np.abs(wanted).max()
    layer = read("llama_meta", state)
    assert layer.rotary == mha.Rotary(10, base=500.0, layout="interleaved")
    np.testing.assert_allclose(layer(X, causal=True), wanted, rtol=0, atol=1e-6 * largest)

    names = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
    under_other_names = {names[name[:2]] + name[2:]: array for name, array in state.items()}
    layer = from_state(under_other_names, "llama", config=OF_GROUPED, rotary_layout="interleaved")
    np.testing.assert_allclose(layer(X, causal=True), wanted, rtol=0, atol=1e-6 * largest)
    wrong = from_state(under_other_names, "llama", config=OF_GROUPED)
    assert np.abs(wrong(X, causal=True) - wanted).max() > 0.01 * largest
    same(from_state(layer.to_state("llama_meta"), "llama_meta", config=LAYERS["llama_meta"][1]),
         layer)


@pytest.mark.parametrize(("layout", "rotary_layout"), [("llama", "interleaved"),
                                                       ("llama_meta", "half")])
def test_a_layout_of_the_other_pairs_is_not_written(layout, rotary_layout):
    layer = from_state(layer_of(layout).to_state(layout), layout, config=LAYERS[layout][1],
                       rotary_layout=rotary_layout)
    assert layer.rotary.layout == rotary_layout
    told = error_of(layer.to_state, layout)
    assert f"rotary rotates pairs of columns that are {rotary_layout!r}, wanted" in told


@pytest.mark.parametrize(("layout", "options", "kind", "message"), [
    ("llama", {"rotary_layout": "split"}, ValueError, "rotary_layout: got 'split', wanted"),
    ("llama", {"rotary_layout": 1}, TypeError, "rotary_layout: got 1, wanted"),
    ("llama", {"rotary_layout": "half", "rotary": None}, ValueError, "'half' beside rotary="),
    ("bert", {"rotary_layout": "half"}, ValueError, "'half' with layout 'bert', which reads no"),
    ("llama", {"transposed": True}, ValueError, "transposed: got it without names"),
    ("llama", {"names": {}}, ValueError, "names: got names beside layout 'llama', wanted one"),
])
def test_wrong_options(layout, options, kind, message):
    state = layer_of(layout).to_state(layout)
    assert message in error_of(read, layout, state, kind=kind, **options)


def test_metas_config_does_not_say_by_how_much_it_scales():
    state = layer_of("llama_meta").to_state("llama_meta")
    config = {**LAYERS["llama_meta"][1], "use_scaled_rope": True}
    told = error_of(from_state, state, "llama_meta", config=config)
    assert "rotary: config 'use_scaled_rope': got it without a factor, wanted rope_scaling" in told
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rotary = mha.Rotary.from_config({"rope_theta": 500.0, "rope_scaling": scaling}, 10,
                                    layout="interleaved")
    for options in ({"config": {**config, "rope_scaling": scaling}},
                    {"config": config, "rotary": rotary}):
        assert from_state(state, "llama_meta", **options).rotary == rotary
