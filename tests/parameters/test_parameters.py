"""Layers from and to everyone's layouts: where each number goes, what comes back, what is wrong."""

import re

import ml_dtypes
import numpy as np
import pytest
from half_types import BFLOAT16
from layouts import GROUPED, HEADS, LAYERS, WIDTH, bits, error_of, flat, layer_of, read
from stored_names import WANTED

import mha
from mha.parameters._layouts import LAYOUTS
from mha.parameters._refused import MODELS

from_state = mha.MultiHeadAttention.from_state
every_layout = pytest.mark.parametrize("layout", sorted(LAYERS))


def test_the_tests_have_every_layout():
    of_latents = {"deepseek_v2", "deepseek_v3"}  # in test_latent_layouts.py
    assert {*LAYERS, *of_latents} == LAYOUTS.keys()


def test_layouts_and_models_are_listed():
    listed = mha.parameters.layouts()
    assert listed == sorted(listed) and {"llama", "mistral", "gpt2", "t5", "keras"} < {*listed}
    assert {model for layout in LAYOUTS.values() for model in layout.model_types} < {*listed}
    assert not MODELS.keys() & {*listed}


@every_layout
def test_every_number_stands_where_the_framework_has_it(layout):
    layer = layer_of(layout)
    state = flat(layer.to_state(layout))
    wanted = dict(WANTED[layout](layer))
    assert state.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)
        assert not any(np.shares_memory(state[name], own) for own in layer.parameters().values())


@every_layout
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BFLOAT16], ids=str)
def test_round_trip_to_the_bits(layout, dtype):
    layer = layer_of(layout, dtype)
    state = layer.to_state(layout, prefix="a.b.")
    again = read(layout, state, prefix="a.b.")
    assert repr(again) == repr(layer)
    assert again.parameters().keys() == layer.parameters().keys()
    for name, parameter in layer.parameters().items():
        assert bits(again.parameters()[name]) == bits(parameter), name
    back = flat(again.to_state(layout, prefix="a.b."))
    assert {name: bits(array) for name, array in back.items()} == {
        name: bits(array) for name, array in flat(state).items()}


@every_layout
def test_nothing_is_shared_with_the_state(layout):
    state = layer_of(layout).to_state(layout)
    layer = read(layout, state)
    for parameter in layer.parameters().values():
        assert parameter.flags.writeable and parameter.flags.c_contiguous
        assert not any(np.shares_memory(parameter, array) for array in flat(state).values())


def several_layers(layout, prefix, count):
    """Layers, and the state that has all of them."""
    layers, state = [layer_of(layout, seed=seed) for seed in range(count)], {}
    for index, layer in enumerate(layers):
        state |= flat(layer.to_state(layout, prefix=prefix.replace("{layer}", str(index))))
    return layers, state


@every_layout
def test_a_prefix_with_layer_reads_them_all(layout):
    layers, state = several_layers(layout, "h.{layer}.attention.", 2)
    read_back = from_state(state, layout, prefix="h.{layer}.attention.", config=LAYERS[layout][1])
    assert len(read_back) == 2
    for index, layer in enumerate(layers):
        for name, parameter in layer.parameters().items():
            np.testing.assert_array_equal(getattr(read_back[index], name), parameter)
    one = from_state(state, layout, prefix="h.{layer}.attention.", config=LAYERS[layout][1],
                     layer_index=1)
    np.testing.assert_array_equal(one.W_q, layers[1].W_q)


def test_pytorchs_weights_are_apart_where_their_widths_differ():
    layer = mha.MultiHeadAttention(WIDTH, HEADS, key_dim=5, value_dim=7, rng=0)
    state = layer.to_state("pytorch")
    assert {name: array.shape for name, array in state.items()} == {
        "q_proj_weight": (24, 24), "k_proj_weight": (24, 5), "v_proj_weight": (24, 7),
        "in_proj_bias": (72,), "out_proj.weight": (24, 24), "out_proj.bias": (24,)}
    again = from_state(state, "pytorch", num_heads=HEADS)
    assert repr(again) == repr(layer)
    ours = mha.compat.pytorch.MultiheadAttention(WIDTH, HEADS, kdim=5, vdim=7)
    ours.load_state_dict(state)


def test_vit_is_read_by_the_names_of_modules_too():
    state = layer_of("vit").to_state("vit")
    renamed = {name.replace("attention.query", "q_proj").replace("attention.key", "k_proj")
               .replace("attention.value", "v_proj").replace("output.dense", "o_proj"): array
               for name, array in state.items()}
    np.testing.assert_array_equal(read("vit", renamed).W_o, layer_of("vit").W_o)


def test_detr_is_read_by_the_names_of_older_files_too():
    state = layer_of("detr").to_state("detr")
    renamed = {name.replace("o_proj", "out_proj"): array for name, array in state.items()}
    np.testing.assert_array_equal(read("detr", renamed).W_o, layer_of("detr").W_o)


def test_a_fused_bias_has_zeros_where_the_layer_has_none():
    layer = mha.MultiHeadAttention(WIDTH, HEADS, use_bias="qv", rng=0)
    state = layer.to_state("gpt2")
    assert not state["c_attn.bias"].any() and not state["c_proj.bias"].any()
    assert state["c_attn.bias"].shape == (72,)
    assert not mha.MultiHeadAttention(WIDTH, HEADS, use_bias=False).to_state("bert")[
        "self.key.bias"].any()


@pytest.mark.parametrize(("layout", "lost", "config", "missing"), [
    ("llama", "q_proj.bias", {}, "missing q_proj.bias;"),
    ("llama", "o_proj.bias", {"attention_bias": True}, "missing o_proj.bias;"),
    ("llama", "[qkvo]_proj.bias", {"model_type": "qwen2"},
     "missing k_proj.bias, q_proj.bias, v_proj.bias;"),
    ("qwen3", "o_proj.bias", {}, "missing o_proj.bias;"),
    ("pytorch", "in_proj_bias", {}, "missing in_proj_bias;"),
    ("keras", "value/bias", {}, "missing value/bias;"),
    ("vit", "attention.key.bias", {}, "missing attention.key.bias;")])
def test_a_lost_bias_is_missed(layout, lost, config, missing):
    layer = mha.MultiHeadAttention(WIDTH, HEADS, rng=0, **(
        {"qk_norm": "head", "rotary": mha.Rotary(4)} if layout == "qwen3" else
        {"rotary": mha.Rotary(4)} if layout == "llama" else {}))
    state = {name: array for name, array in layer.to_state(layout).items()
             if not re.fullmatch(lost, name)}
    config = {"num_attention_heads": HEADS, "rope_theta": 1e4, "rms_norm_eps": 1e-6, **config}
    assert missing in error_of(from_state, state, layout, config=config) + ";"


def test_biases_that_models_have_together_are_written_together():
    layer = mha.MultiHeadAttention(WIDTH, HEADS, use_bias="kv", rng=0, rotary=mha.Rotary(4))
    state = layer.to_state("llama")
    assert not state["q_proj.bias"].any() and "o_proj.bias" not in state
    read = from_state(state, "llama", num_heads=HEADS, rotary=mha.Rotary(4))
    np.testing.assert_array_equal(read(np.ones((1, 3, WIDTH), np.float32)),
                                  layer(np.ones((1, 3, WIDTH), np.float32)))


def test_a_number_that_counts_no_layers_stays_in_the_prefix():
    state = {f"attention_6/{name}": array for name, array in
             layer_of("keras").to_state("keras").items()}
    assert "try prefix='attention_6/'" in error_of(from_state, state, "keras", prefix="attention/")


def test_a_prefix_may_name_the_layer_twice():
    prefix = "stage.{layer}.layer.{layer}.attention."
    layers, state = several_layers("bert", prefix, 3)
    state |= {"stage.0.layer.5.attention.self.query.bias": np.zeros(3)}  # of two numbers
    read_back = from_state(state, "bert", prefix=prefix, num_heads=HEADS)
    assert len(read_back) == 3
    for one, other in zip(read_back, layers, strict=True):
        np.testing.assert_array_equal(one.W_q, other.W_q)


@pytest.mark.parametrize(("before", "is_decoder"), [
    ("decoder.block.0.", True), ("encoder.block.0.", False), ("encoder_decoder.decoder.", True),
    ("decoder.encoder.", False), ("autodecoder.", True)])
def test_t5s_side_is_the_prefixes(before, is_decoder):
    prefix = before + "layer.0.SelfAttention."
    state = layer_of("t5").to_state("t5", prefix=prefix)
    table = state[prefix + "relative_attention_bias.weight"]
    layer = from_state(state, "t5", prefix=prefix,
                       config={**LAYERS["t5"][1], "is_decoder": not is_decoder})
    farthest = LAYERS["t5"][1].get("relative_attention_max_distance", 128)
    np.testing.assert_array_equal(layer.relative_bias, mha.t5_relative_bias(
        table, bidirectional=not is_decoder, max_distance=farthest))


def test_t5s_distance_costs_no_more_than_models_need():
    state = layer_of("t5").to_state("t5")
    config = {**LAYERS["t5"][1], "relative_attention_max_distance": 10**8}
    assert "got 100000000, wanted at most 65536" in error_of(from_state, state, "t5", config=config)


def test_t5_layers_share_the_table_of_the_first():
    prefix = "encoder.block.{layer}.layer.0.SelfAttention."
    layers, state = several_layers("t5", prefix, 2)
    del state["encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"]
    config = {**LAYERS["t5"][1], "is_decoder": True}  # the prefix says better
    for one, other in (from_state(state, "t5", prefix=prefix, config=config),
                       [from_state(state, "t5", prefix=prefix.replace("{layer}", str(index)),
                                   config=config) for index in range(2)]):
        np.testing.assert_array_equal(one.relative_bias, layers[0].relative_bias)
        np.testing.assert_array_equal(other.relative_bias, layers[0].relative_bias)
    cross = {name.replace("layer.0.SelfAttention", "layer.1.EncDecAttention"): array
             for name, array in state.items() if "bias" not in name}
    layer = from_state(cross, "t5", prefix="encoder.block.1.layer.1.EncDecAttention.",
                       config=config)
    assert layer.relative_bias is None and layer.scale == 1.0
    with pytest.raises(ValueError, match="missing relative_attention_bias"):
        from_state({name: array for name, array in state.items() if "bias" not in name}, "t5",
                   prefix=prefix, config=config)


@pytest.mark.parametrize(("buckets", "bidirectional", "distance"), [
    (32, True, 128), (32, False, 128), (8, False, 20), (4, True, 5)])
def test_t5s_table_comes_back_but_for_what_no_distance_has(buckets, bidirectional, distance):
    table = np.random.default_rng(0).standard_normal((buckets, HEADS)).astype(np.float32)
    side = "encoder" if bidirectional else "decoder"
    state = layer_of("t5").to_state("t5", prefix=side + ".")
    state[side + ".relative_attention_bias.weight"] = table
    config = {**LAYERS["t5"][1], "relative_attention_max_distance": distance}
    layer = from_state(state, "t5", prefix=side + ".", config=config)
    np.testing.assert_array_equal(layer.relative_bias, mha.t5_relative_bias(
        table, bidirectional=bidirectional, max_distance=distance))
    back = layer.to_state("t5")["relative_attention_bias.weight"]
    if bidirectional:
        table[buckets // 2] = 0  # distance 0 behind the query
    np.testing.assert_array_equal(back, table)


def test_all_that_is_wrong_is_one_error():
    state = layer_of("qwen3").to_state("qwen3", prefix="a.")
    del state["a.v_proj.weight"]
    state["a.k_proj.weight"] = state["a.k_proj.weight"][:, 1:]
    state["a.extra.weight"] = np.zeros(3)
    message = error_of(from_state, state, "qwen3", prefix="a.", num_heads=HEADS)
    for part in ("layout 'qwen3' under prefix 'a.'", "missing v_proj.weight",
                 "left over extra.weight", "needed and given nowhere, wanted config= or rotary=",
                 "norm_eps: needed and given nowhere", "found q_proj.weight (40, 24)",
                 "a.k_proj.weight: got shape (20, 23), wanted (kv_heads 2 * head_dim 10, key_dim"):
        assert part in message, message
    assert "looks like" not in error_of(from_state, layer_of("llama").to_state("llama"), "llama",
                                        num_heads=HEADS)


OTHERS = [  # read as, what it is, what is advised
    ("bert", "llama", "looks like llama: try"), ("llama", "bert", "try layout='bert'"),
    ("llama", "qwen3", "looks like qwen3"), ("bart", "whisper", "try layout='whisper'"),
    ("whisper", "bart", "try layout='bart'"),
    ("gpt2", "gpt_neox", "looks like gpt_neox or falcon or bloom"),
    ("keras", "flax", "try layout='flax'"), ("bert", "pytorch", "try layout='pytorch'"),
    ("llama", "gpt_oss", "try layout='gpt_oss'"), ("t5", "mpt", "try layout='mpt'"),
    ("llama", "t5", "try layout='t5'"), ("bert", "vit", "try layout='vit'"),
    ("vit", "gpt2", "try layout='gpt2'"), ("gpt2", "onnx", "try layout='onnx'")]


@pytest.mark.parametrize(("layout", "other", "advice"), OTHERS)
def test_a_wrong_layout_is_told_the_right_one(layout, other, advice):
    state = flat(layer_of(other).to_state(other, prefix="a."))
    assert advice in error_of(read, layout, state, prefix="a.")


@every_layout
def test_a_wrong_prefix_is_told_the_right_one(layout):
    layer = layer_of(layout)
    one = flat(layer.to_state(layout, prefix="model.layers.7.attention."))
    both = one | flat(layer.to_state(layout, prefix="model.layers.0.attention."))
    for state, number in ((one, "7"), (both, "{layer}")):
        for prefix in ("", "model.", "nowhere."):
            message = error_of(read, layout, state, prefix=prefix)
            assert re.search(r"elsewhere: try.* prefix='model\.layers\." + re.escape(number)
                             + r"\.attention\.'", message), message


@pytest.mark.parametrize(("layout", "names", "config", "message"), [
    ("pytorch", ["bias_k", "bias_v"], {}, "wanted mha.compat.pytorch.MultiheadAttention"),
    ("flax", ["query_ln.scale"], {}, "wanted a layer without normalize_qk"),
    ("mpt", [], {"attn_config": {"clip_qkv": 6}}, "attn_config.clip_qkv is 6"),
    ("gemma3", [], {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("llama", [], {"rope_theta": -1}, "rope_theta: got -1"),
    ("llama", [], {"num_attention_heads": 0}, "'num_attention_heads': got 0"),
    ("llama", [], {"num_attention_heads": "four"}, "'num_attention_heads': got str"),
    ("llama", [], {"head_dim": 7}, "got shape (40, 24), wanted (heads 4 * head_dim 7, query_dim"),
    ("llama", [], {"num_key_value_heads": 3}, "wanted (kv_heads 3 * head_dim 10, key_dim 24)"),
    ("qwen3", [], {"rms_norm_eps": None}, "got none for 'rms_norm_eps'"),
    ("t5", [], {"is_decoder": None}, "got none for 'is_decoder'"),
    ("gpt2", [], {"n_head": 5}, "got shape (24, 72), wanted (query_dim 24, 3 * heads 5 * head_dim"),
])
def test_what_cannot_be_is_an_error_that_says_why(layout, names, config, message):
    state = flat(layer_of(layout).to_state(layout))
    state |= {name: np.ones(3, np.float32) for name in names}
    got = error_of(from_state, state, layout, config={**LAYERS[layout][1], **config},
                   layer_index=0)
    assert message in got, got


@pytest.mark.parametrize(("layout", "options", "message"), [
    ("bert", {"scale": 0.5}, "scale is 0.5, wanted None"),
    ("bert", {"rotary": mha.Rotary(6)}, "rotary is Rotary(6"),
    ("t5", {"use_bias": False}, "scale is None, wanted 1.0"),
    ("gpt2", {"num_kv_heads": 2}, "kv_heads is 2, wanted 4 as heads"),
    ("mpt", {"value_head_dim": 3}, "value_head_dim is 3, wanted 6 as head_dim"),
    ("llama", {"sinks": True}, "no place for sinks"),
    ("llama", {"output_gate": "element", "use_bias": False}, "no place for W_g"),
    ("qwen3_next", {"output_gate": "head"}, "the layer has a gate a head, wanted one a column"),
    ("gpt_oss", {}, "the layer has no sinks"),
    ("qwen3", {"qk_norm": "width"}, "q_norm has shape (24,), wanted (6,)"),
    ("gemma3", {"qk_norm": "head"}, "norm_offset is None, wanted 1.0"),
    ("bert", {"relative_bias": 3}, "no place for relative_bias"),
])
def test_what_a_layout_cannot_hold_is_an_error(layout, options, message):
    layer = mha.MultiHeadAttention(WIDTH, HEADS, **options)
    got = error_of(layer.to_state, layout)
    assert f"layout {layout!r} cannot hold" in got and message in got, got


def test_a_bias_by_distance_that_is_no_table_is_an_error():
    layer = mha.MultiHeadAttention(WIDTH, HEADS, use_bias=False, scale=1.0, relative_bias=1000)
    layer.relative_bias = np.random.default_rng(0).standard_normal(layer.relative_bias.shape)
    assert "no table of T5's buckets" in error_of(layer.to_state, "t5")


@pytest.mark.parametrize(("arguments", "kind", "message"), [
    (([], "bert"), TypeError, "state: got list"),
    (({3: 1}, "bert"), TypeError, "state: got the name 3"),
    (({}, "brt"), ValueError, "layout: got 'brt', wanted one of bert, bart, mbart, plbart; or"),
    (({}, "?"), ValueError, "layout: got '?', wanted one of mha.parameters.layouts()"),
    (({}, "deepseek_v32"), ValueError, "layout: got 'deepseek_v32', which has latent attention"),
    (({}, 3), TypeError, "layout: got int"),
    (({}, "bert"), ValueError, "missing self.query.weight"),
])
def test_other_arguments(arguments, kind, message):
    assert message in error_of(from_state, *arguments, kind=kind)


@pytest.mark.parametrize(("name", "value", "kind", "message"), [
    ("prefix", 3, TypeError, "prefix: got int"), ("config", 3, TypeError, "config: got int"),
    ("layer_index", 1.5, TypeError, "layer_index: got float"),
    ("layer_index", -1, ValueError, "layer_index: got -1"),
    ("num_heads", 0, ValueError, "num_heads: got 0"),
    ("dtype", "int8", TypeError, "dtype: got 'int8'"),
    ("window", 3, TypeError, "window: got int"),
])
def test_other_options(name, value, kind, message):
    state = layer_of("bert").to_state("bert")
    assert message in error_of(from_state, state, "bert", kind=kind,
                               **{"num_heads": HEADS, name: value})


@pytest.mark.parametrize("array", [np.zeros((24, 24), int), np.zeros((24, 24), complex), "text",
                                   np.zeros((24, 0), np.float32), np.zeros((), np.float32),
                                   np.zeros((24, 24), np.longdouble),
                                   np.zeros((24, 24), ml_dtypes.float8_e4m3fn)])
def test_arrays_that_are_no_weights(array):
    state = layer_of("bert").to_state("bert", prefix="a.")
    state["a.self.key.weight"] = array
    assert "a.self.key.weight: got" in error_of(from_state, state, "bert", prefix="a.",
                                                num_heads=HEADS)


def test_layers_that_are_missing():
    state = {}
    for index in (0, 2):
        state |= layer_of("bert").to_state("bert", prefix=f"layer.{index}.")
    message = error_of(from_state, state, "bert", prefix="layer.{layer}.", num_heads=HEADS)
    assert "got layers 0, 2 under prefix 'layer.{layer}.', wanted 1 too" in message
    message = error_of(from_state, state, "bert", prefix="block.{layer}.", num_heads=HEADS)
    assert "prefix='layer.{layer}.'" in message


def test_types_that_differ_meet_in_one_that_holds_both():
    state = layer_of("bert", np.float16).to_state("bert")
    for dtype, wanted in ((np.float64, np.float64), (BFLOAT16, np.float32),
                          (np.float32, np.float32)):
        mixed = {**state, "self.key.bias": state["self.key.bias"].astype(dtype)}
        assert from_state(mixed, "bert", num_heads=HEADS).W_q.dtype == wanted


def test_the_other_order_of_bytes():
    state = layer_of("bert").to_state("bert")
    layer = from_state({name: array.astype(">f4") for name, array in state.items()}, "bert",
                       num_heads=HEADS)
    assert bits(layer.W_q) == bits(layer_of("bert").W_q)


def test_buffers_and_the_blocks_norm_are_passed_over():
    state = layer_of("bert").to_state("bert") | {"output.LayerNorm.weight": np.ones(WIDTH)}
    from_state(state, "bert", num_heads=HEADS)
    state = layer_of("gpt2").to_state("gpt2") | {"bias": np.ones((1, 1, 9, 9), bool)}
    from_state(state, "gpt2", num_heads=HEADS)


def test_a_subclass_stays_one():
    class Mine(mha.MultiHeadAttention):
        pass

    state = layer_of("bert").to_state("bert")
    assert type(Mine.from_state(state, "bert", num_heads=HEADS)) is Mine


def test_a_layer_that_was_read_computes_what_it_did():
    layer = layer_of("llama")
    x = np.random.default_rng(1).standard_normal((2, 5, WIDTH)).astype(np.float32)
    again = read("llama", layer.to_state("llama"))
    assert GROUPED["head_dim"] == again.head_dim
    np.testing.assert_array_equal(again(x, causal=True), layer(x, causal=True))
    np.testing.assert_array_equal(again.freeze()(x, causal=True), layer(x, causal=True))
