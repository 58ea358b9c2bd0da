"""What the configs of models say of a layer that `from_state` makes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import HEADS, LAYERS, OF_GROUPED, error_of, flat, layer_of, read

import mha

from_state = mha.MultiHeadAttention.from_state


def test_windows_go_by_the_layers_types():
    config = LAYERS["gemma3"][1]
    state = layer_of("gemma3").to_state("gemma3")
    windows = [from_state(state, "gemma3", config=config, layer_index=index).window
               for index in range(2)]
    assert windows == [(2, 0), None]
    with pytest.raises(ValueError, match="layer_index: got none, wanted the layer's number"):
        from_state(state, "gemma3", config=config)
    with pytest.raises(ValueError, match="layer_index: got 2, wanted one of the 2 layers"):
        from_state(state, "gemma3", config=config, layer_index=2)


@pytest.mark.parametrize(("layout", "extra", "windows"), [
    ("llama", {"sliding_window": 3}, [(2, 0)] * 4),                              # Mistral
    ("llama", {"sliding_window": 3, "use_sliding_window": False}, [None] * 4),   # Qwen 2
    ("llama", {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 2},
     [None, None, (2, 0), (2, 0)]),
    ("llama", {"sliding_window": None}, [None] * 4),
    ("gpt_oss", {"sliding_window": 3}, [(2, 0), None] * 2),
    ("gpt_oss", {"sliding_window": 3, "sliding_window_pattern": 3},
     [(2, 0), (2, 0), None, (2, 0)]),
    ("gemma2", {"sliding_window": 3, "query_pre_attn_scalar": 4}, [(2, 0), None] * 2),
    ("gemma3", {"sliding_window": 3, "query_pre_attn_scalar": 4, "rope_local_base_freq": 10.0},
     [*[(2, 0)] * 5, None]),
])
def test_windows_of_older_configs(layout, extra, windows):
    state = layer_of(layout).to_state(layout)
    assert [from_state(state, layout, config={**OF_GROUPED, **extra}, layer_index=index).window
            for index in range(len(windows))] == windows


def test_each_kind_of_layer_has_its_rotary():
    state = layer_of("gemma3").to_state("gemma3")
    types = LAYERS["gemma3"][1]["layer_types"]
    for config in ({"rope_theta": 1e6, "rope_local_base_freq": 100.0},
                   {"rope_parameters": {types[0]: {"rope_theta": 100.0},
                                        types[1]: {"rope_theta": 1e6}}}):
        config = {**LAYERS["gemma3"][1], **config}
        bases = [from_state(state, "gemma3", config=config, layer_index=index).rotary.base
                 for index in range(2)]
        assert bases == [100.0, 1e6]


def test_gpt2_scales_by_its_config():
    state = layer_of("gpt2").to_state("gpt2")
    def scale(**config):
        return from_state(state, "gpt2", config={"n_head": HEADS, **config}, layer_index=1).scale
    assert scale() is None
    assert scale(scale_attn_weights=False) == 1.0
    assert scale(scale_attn_by_inverse_layer_idx=True) == 6 ** -0.5 / 2
    assert scale(scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True) == 0.5


def test_arguments_win_over_the_config():
    state = layer_of("gemma3").to_state("gemma3")
    layer = read("gemma3", state, scale=0.5, softcap=None, window=None, rotary=None, norm_eps=0.5,
                 norm_offset=0.25, dropout=0.1, dtype=np.float64)
    assert (layer.scale, layer.softcap, layer.window, layer.rotary) == (0.5, None, None, None)
    assert (layer.norm_eps, layer.norm_offset, layer.dropout) == (0.5, 0.25, 0.1)
    assert layer.W_q.dtype == np.float64
    sized = from_state(state, "gemma3", config={**LAYERS["gemma3"][1], "num_attention_heads": 9},
                       num_heads=HEADS, layer_index=0)
    assert sized.num_heads == HEADS


def test_the_two_sides_of_a_model_have_their_own_heads():
    config = {"encoder_attention_heads": 2, "decoder_attention_heads": 8}
    for prefix, heads in (("encoder.layers.0.self_attn.", 2), ("decoder.layers.0.self_attn.", 8),
                          ("decoder.layers.0.encoder_attn.", 8),
                          ("encoder_decoder.encoder.layers.0.self_attn.", 2),
                          ("my_decoder.0.self_attn.", 8)):
        state = layer_of("bart").to_state("bart", prefix=prefix)
        assert from_state(state, "bart", prefix=prefix, config=config).num_heads == heads
    assert "num_heads: needed" in error_of(from_state, layer_of("bart").to_state("bart"), "bart",
                                           config=config)


def test_the_sizes_follow_from_what_is_known():
    state = layer_of("llama").to_state("llama")
    for known in ({"num_heads": HEADS}, {"head_dim": 10}, {"num_kv_heads": 2}):
        layer = from_state(state, "llama", rotary=None, **known)
        assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (HEADS, 2, 10)
    assert from_state(layer_of("qwen3").to_state("qwen3"), "qwen3", rotary=None,
                      norm_eps=1e-6).num_heads == HEADS  # by the norm of a head
    assert from_state(layer_of("keras").to_state("keras"), "keras").value_head_dim == 5


def test_a_config_of_another_model_is_told_its_layout():
    state = layer_of("gemma3").to_state("gemma3")
    config = {**LAYERS["gemma3"][1], "model_type": "gemma3_text"}
    message = error_of(from_state, state, "qwen3", config=config, layer_index=0)
    assert "model_type is 'gemma3_text': try layout='gemma3'" in message
    whole = {"model_type": "gemma3", "text_config": config}
    assert from_state(state, "gemma3", config=whole, layer_index=0).norm_offset == 1.0


KEYS = ("num_attention_heads", "n_head", "num_key_value_heads", "head_dim", "rms_norm_eps",
        "rope_theta", "rope_parameters", "rope_scaling", "layer_types", "sliding_window",
        "sliding_window_pattern", "max_window_layers", "use_sliding_window", "text_config",
        "query_pre_attn_scalar", "attn_logit_softcapping", "attn_config", "model_type",
        "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "is_decoder",
        "relative_attention_max_distance", "encoder_attention_heads", "decoder_attention_heads")
values = st.one_of(st.none(), st.booleans(), st.integers(-3, 70), st.just(2**70), st.floats(),
                   st.text(max_size=3), st.lists(st.text(max_size=3), max_size=2),
                   st.dictionaries(st.sampled_from(["alibi", "alibi_bias_max", "softmax_scale",
                                                    "clip_qkv", "rope_type", "factor"]),
                                   st.one_of(st.none(), st.booleans(), st.floats(), st.text())))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(layout=st.sampled_from(sorted(LAYERS)), index=st.none() | st.integers(0, 2),
       changes=st.dictionaries(st.sampled_from(KEYS), values, max_size=4))
def test_any_config_gives_a_layer_or_one_value_error(layout, index, changes):
    state = layer_of(layout).to_state(layout)
    try:
        from_state(state, layout, config={**LAYERS[layout][1], **changes}, layer_index=index)
    except ValueError as error:
        told = str(error)
    else:
        told = "state: got what does not fit"
    assert told.startswith("state: got what does not fit")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), layout=st.sampled_from(sorted(LAYERS)),
       shapes=st.lists(st.lists(st.sampled_from([0, 1, 4, 6, 12, 20, 24, 40, 72]), max_size=4),
                       max_size=3),
       known=st.dictionaries(st.sampled_from(["num_heads", "num_kv_heads", "head_dim"]),
                             st.integers(1, 13)))
def test_any_shapes_give_a_layer_or_one_value_error(data, layout, shapes, known):
    state = flat(layer_of(layout).to_state(layout))
    for shape in shapes:
        name = data.draw(st.sampled_from([*state, "another"]))
        state[name] = np.zeros(shape, np.float32)
    try:
        layer = read(layout, state, **known)
    except ValueError as error:
        assert str(error).startswith("state: got what does not fit")  # noqa: PT017
        return
    again = flat(layer.to_state(layout))
    assert {name: array.shape for name, array in again.items() if array.ndim > 1} == {
        name: array.shape for name, array in state.items() if array.ndim > 1}


@pytest.mark.parametrize(("types", "message"), [
    (["chunked_attention"] * 2, "got 'chunked_attention' for layer 1, wanted 'sliding_attention'"),
    ("sliding_attention", "'layer_types': got str, wanted a list")])
def test_types_of_layers_that_are_not_known(types, message):
    state = mha.MultiHeadAttention(8, 2, rng=0, use_bias=False).to_state("llama")
    with pytest.raises(ValueError, match=message):
        mha.MultiHeadAttention.from_state(
            state, "llama", num_heads=2, layer_index=1,
            config={"rope_theta": 1e4, "sliding_window": 4, "layer_types": types})


def test_a_size_that_only_the_config_has_is_not_computed_with():
    state = mha.MultiHeadAttention(8, 2, rng=0, use_bias=False).to_state("llama")
    with pytest.raises(ValueError, match=r"q_proj\.weight: got shape"):
        mha.MultiHeadAttention.from_state(
            state, "llama", num_heads=2, config={"rope_theta": 1e4, "head_dim": 10**9})
