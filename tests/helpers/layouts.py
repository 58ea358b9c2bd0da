"""A layer and a config for every layout of `mha.parameters`, as the tests use them."""

import numpy as np
import pytest

import mha

WIDTH, HEADS, HEAD_DIM = 24, 4, 6
GROUPED = {"num_kv_heads": 2, "head_dim": 10}  # 4 heads of 10 columns in a width of 24
ROTARY = {"num_attention_heads": HEADS, "rope_theta": 500.0}
OF_GROUPED = {**ROTARY, "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 1e-5}
GEMMA = {**OF_GROUPED, "query_pre_attn_scalar": 16, "sliding_window": 3,
         "layer_types": ["sliding_attention", "full_attention"], "attn_logit_softcapping": 20.0}
turned = mha.Rotary(10, base=500.0)

# layout: (the layer's options, the config that gives those which are not in its arrays)
LAYERS = {
    "bart": ({}, {"encoder_attention_heads": HEADS}),
    "bert": ({}, {"num_attention_heads": HEADS}),
    "bloom": ({"alibi": mha.alibi_slopes(HEADS)}, {"n_head": HEADS}),
    "flax": ({"head_dim": 10, "use_bias": False}, {}),
    "gemma2": ({**GROUPED, "use_bias": False, "rotary": turned, "scale": 0.25, "softcap": 20.0,
                "window": (2, 0)}, GEMMA),
    "gemma3": ({**GROUPED, "use_bias": False, "rotary": turned, "scale": 0.25, "window": (2, 0),
                "qk_norm": "head", "norm_eps": 1e-5, "norm_offset": 1.0}, GEMMA),
    "gpt2": ({}, {"n_head": HEADS}),
    "gpt_neox": ({"rotary": mha.Rotary(2)},
                 {"num_attention_heads": HEADS, "rotary_pct": 0.34, "rotary_emb_base": 10000}),
    "gpt_oss": ({**GROUPED, "sinks": True, "rotary": turned, "window": (2, 0)}, GEMMA),
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
