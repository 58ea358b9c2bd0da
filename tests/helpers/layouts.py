"""A layer and a config for every layout of `mha.parameters`, as the tests use them."""

import numpy as np
import pytest

import mha

WIDTH, HEADS, HEAD_DIM = 24, 4, 6
GROUPED = {"num_kv_heads": 2, "head_dim": 10}  # 4 heads of 10 columns in a width of 24
ROTARY = {"num_attention_heads": HEADS, "rope_theta": 500.0}
OF_GROUPED = {**ROTARY, "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 1e-5}
GEMMA = {**OF_GROUPED, "query_pre_attn_scalar": 16, "sliding_window": 3,
         "layer_types": ["sliding_attention", "full_attention"]}
SINKS = {key: value for key, value in GEMMA.items() if key != "query_pre_attn_scalar"}
GRANITE = {**SINKS, "attention_multiplier": 0.25}
MODERN = {**ROTARY, "local_attention": 6, "layer_types": SINKS["layer_types"], "rope_parameters": {
    kind: {"rope_type": "default", "rope_theta": 500.0} for kind in SINKS["layer_types"]}}
turned = mha.Rotary(10, base=500.0)

# layout: (the layer's options, the config that gives those which are not in its arrays)
LAYERS = {
    "bart": ({}, {"encoder_attention_heads": HEADS}),
    "bert": ({}, {"num_attention_heads": HEADS}),
    "bloom": ({"alibi": mha.alibi_slopes(HEADS)}, {"n_head": HEADS}),
    "flax": ({"head_dim": 10, "use_bias": False}, {}),
    "gemma2": ({**GROUPED, "use_bias": False, "rotary": turned, "scale": 0.25, "softcap": 20.0,
                "window": (2, 0)}, {**GEMMA, "attn_logit_softcapping": 20.0}),
    "gemma3": ({**GROUPED, "use_bias": False, "rotary": turned, "scale": 0.25, "window": (2, 0),
                "qk_norm": "head", "norm_eps": 1e-5, "norm_offset": 1.0}, GEMMA),
    "gpt2": ({}, {"n_head": HEADS}),
    "gpt_neox": ({"rotary": mha.Rotary(2)},
                 {"num_attention_heads": HEADS, "rotary_pct": 0.34, "rotary_emb_base": 10000}),
    "gpt_oss": ({**GROUPED, "sinks": True, "rotary": turned, "window": (2, 0)}, SINKS),
    "keras": ({**GROUPED, "value_head_dim": 5, "key_dim": 7, "value_dim": 8, "output_dim": 9},
              {}),
    "llama": ({**GROUPED, "use_bias": "qkv", "rotary": turned}, OF_GROUPED),
    "llama_meta": ({**GROUPED, "use_bias": False,
                    "rotary": mha.Rotary(10, base=500.0, layout="interleaved")},
                   {"n_heads": HEADS, "n_kv_heads": 2, "head_dim": 10, "rope_theta": 500.0}),
    "mpt": ({"use_bias": False, "alibi": mha.alibi_slopes(HEADS, 4.0), "scale": 0.5},
            {"n_heads": HEADS, "attn_config": {"alibi_bias_max": 4, "softmax_scale": 0.5}}),
    "olmo2": ({**GROUPED, "use_bias": False, "rotary": turned, "qk_norm": "width",
               "norm_eps": 1e-5}, OF_GROUPED),
    "onnx": ({}, {"num_attention_heads": HEADS}),
    "pytorch": ({}, {"num_attention_heads": HEADS}),
    "qwen3": ({**GROUPED, "use_bias": False, "rotary": turned, "qk_norm": "head",
               "norm_eps": 1e-5}, OF_GROUPED),
    "qwen3_next": ({**GROUPED, "use_bias": False, "rotary": turned, "qk_norm": "head",
                    "norm_eps": 1e-5, "norm_offset": 1.0, "output_gate": "element"}, OF_GROUPED),
    "t5": ({"head_dim": 10, "use_bias": False, "scale": 1.0, "relative_bias": 20},
           {"num_heads": HEADS, "d_kv": 10, "is_decoder": False,
            "relative_attention_max_distance": 20}),
    "vit": ({}, {"num_attention_heads": HEADS}),
    "whisper": ({"use_bias": "qvo"}, {"encoder_attention_heads": HEADS}),
}


# Layouts of models that differ from another's in what a config decides, or in their names alone.
PLAIN = {**GROUPED, "use_bias": False, "rotary": turned}
BESIDE = {**PLAIN, "rotary": mha.Rotary(10, base=500.0, layout="interleaved")}
NORMED = {**PLAIN, "qk_norm": "head", "norm_eps": 1e-5}
SLIDES = {"window": (2, 0)}
HEADS_ALONE = {"num_attention_heads": HEADS}
OF_WIDTH = {"rotary": mha.Rotary(6, base=500.0), "window": (3, 3)}
GATE = {"output_gate": "element"}
LAYERS |= {
    "afmoe": ({**NORMED, **SLIDES, **GATE}, SINKS), "aimv2": ({"use_bias": False}, HEADS_ALONE),
    "albert": LAYERS["bert"], "beit": ({"use_bias": "qvo"}, HEADS_ALONE),
    "blip": ({"use_bias": "o"}, HEADS_ALONE),
    "cohere": (BESIDE, OF_GROUPED), "cohere2": ({**BESIDE, **SLIDES}, SINKS),
    "ctrl": ({}, {"n_head": HEADS}), "detr": ({**GROUPED, "use_bias": "qvo"}, {
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 10}),
    "dia": ({**PLAIN, "scale": 1.0}, OF_GROUPED), "distilbert": ({}, {"n_heads": HEADS}),
    "esm": ({"rotary": mha.Rotary(6, base=500.0)}, {**ROTARY, "position_embedding_type": "rotary"}),
    "exaone4": ({**NORMED, **SLIDES}, SINKS), "falcon": (PLAIN, OF_GROUPED),
    "falcon_h1": ({**PLAIN, "scale": 0.5 * 10 ** -0.5}, {**OF_GROUPED, "key_multiplier": 0.5}),
    "flint": ({**NORMED, **SLIDES, "sinks": True}, SINKS), "glm": (BESIDE, OF_GROUPED),
    "glm4_moe": (NORMED, OF_GROUPED), "gpt_bigcode": ({"num_kv_heads": 1}, {
        "n_head": HEADS, "multi_query": True}),
    "gpt_neo": ({"use_bias": "o", "scale": 1.0, **SLIDES}, {
        "num_heads": HEADS, "attention_layers": ["local", "global"], "window_size": 3}),
    "gptj": ({"use_bias": False, "rotary": mha.Rotary(4, layout="interleaved")},
             {"n_head": HEADS, "rotary_dim": 4}),
    "granite": ({**PLAIN, **SLIDES, "scale": 0.25}, GRANITE),
    "granite_swa": ({**PLAIN, **SLIDES, "scale": 0.25, "sinks": True}, GRANITE),
    "hrm_text": ({**PLAIN, **GATE}, OF_GROUPED), "internvl": ({"use_bias": "o"}, HEADS_ALONE),
    "kolibri1": ({**NORMED, **SLIDES}, SINKS), "kosmos2_5": ({"use_bias": False}, HEADS_ALONE),
    "lfm2": (NORMED, OF_GROUPED), "mgp-str": ({}, HEADS_ALONE),
    "minimax": (PLAIN, OF_GROUPED), "mobilebert": LAYERS["bert"],
    "modernbert": ({"use_bias": False, **OF_WIDTH}, MODERN),
    "modernbert-decoder": ({**PLAIN, **SLIDES}, {**MODERN, **OF_GROUPED}),
    "molmo2": ({**NORMED, "use_bias": "qkv"}, OF_GROUPED), "phi": (PLAIN, OF_GROUPED),
    "phi3": (PLAIN, OF_GROUPED), "pix2struct": ({"use_bias": False, "scale": 1.0}, HEADS_ALONE),
    "recurrent_gemma": ({**PLAIN, "use_bias": "o"}, OF_GROUPED),
    "roformer": ({"rotary": mha.Rotary(6, base=500.0, layout="interleaved")}, ROTARY),
    "smollm3": ({**PLAIN}, {**OF_GROUPED, "no_rope_layers": [1, 0]}),
    "solar_open": ({**PLAIN, "use_bias": "qkv"}, OF_GROUPED),
    "timesformer": ({"use_bias": "o"}, HEADS_ALONE),
}


def layer_of(layout, dtype=np.float32, seed=0):
    """A layer of random parameters that the layout can hold."""
    rng = np.random.default_rng(seed)
    layer = mha.MultiHeadAttention(WIDTH, HEADS, rng=rng, dtype=dtype, **LAYERS[layout][0])
    for name, parameter in layer.parameters().items():
        numbers = rng.standard_normal(parameter.shape)
        if name == "relative_bias":  # one number a bucket
            numbers = mha.t5_relative_bias(rng.standard_normal((8, HEADS)), bidirectional=True,
                                           max_distance=20)
        setattr(layer, name, numbers.astype(dtype))
    return layer


def bits(array):
    array = np.ascontiguousarray(array)
    return array.dtype, array.shape, array.tobytes()


def read(layout, state, **options):
    """The layer in a state, with the layout's config."""
    return mha.MultiHeadAttention.from_state(state, layout, config=LAYERS[layout][1],
                                             layer_index=0, **options)


def error_of(call, *arguments, kind=ValueError, **options):
    """The message of the error that a call raises."""
    with pytest.raises(kind) as raised:
        call(*arguments, **options)
    return str(raised.value)


def flat(state, before=""):
    """A state's arrays by name, trees too."""
    return {full: array for name, value in state.items() for full, array in (
        flat(value, f"{before}{name}.") if isinstance(value, dict) else
        {before + name: value}).items()}
