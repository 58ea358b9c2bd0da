"""Models by their configs: what a layout reads of them, and what is refused by name."""

from pathlib import Path

import numpy as np
import pytest
from layouts import GROUPED, HEADS, LAYERS, OF_GROUPED, ROTARY, WIDTH, error_of, layer_of, read

import mha
from mha.parameters._config import BASES, COLUMNS, FEWER_COLUMNS, OTHER_BASE
from mha.parameters._layouts import LAYOUTS, OF_MODELS
from mha.parameters._refused import MODELS, READERS

OF_HEADS = [model for model, layout in OF_MODELS.items() if not layout.latent]
from_state = mha.MultiHeadAttention.from_state
SLIDING = {**OF_GROUPED, "sliding_window": 3,
           "layer_types": ["sliding_attention", "full_attention"]}


def of_layer(layout, config, index=0, **options):
    state = layer_of(layout).to_state(layout)
    return from_state(state, layout, config=config, layer_index=index, **options)


@pytest.mark.parametrize("model", OF_HEADS)
def test_a_model_names_its_layout(model):
    layout = OF_MODELS[model].name
    state, config = layer_of(layout).to_state(layout), {**LAYERS[layout][1], "model_type": model}
    if model in FEWER_COLUMNS:
        config.setdefault("partial_rotary_factor", 1.0)
    if not model.startswith("qwen2"):  # which has biases for sure
        assert repr(from_state(state, config=config, layer_index=0)).startswith("MultiHead")


@pytest.mark.parametrize("model", MODELS)
def test_what_is_not_read_is_refused_by_name(model):
    state = layer_of("llama").to_state("llama")
    why = MODELS[model]
    assert "wanted" in why
    assert f"layout: got {model!r}, which has {why}" in error_of(from_state, state, model)
    assert f"model_type {model!r} in config, which has {why}" in error_of(
        from_state, state, config={"model_type": model})
    assert f"model_type is {model!r}, which has {why}" in error_of(
        from_state, state, "llama", config={**OF_GROUPED, "model_type": model})
    from_state(state, names={letter: f"{letter}_proj" for letter in "qkvo"}, transposed=True,
               config={**OF_GROUPED, "model_type": model})  # names of one's own are one's own


@pytest.mark.parametrize("key", READERS)
def test_a_key_that_changes_attention_is_never_passed_over(key):
    value = [1, 0] if key == "no_rope_layers" else 0.5
    for config in ({key: value}, {key: value, "model_type": "of tomorrow"}):
        assert f"config: {key} is {value!r}" in error_of(
            of_layer, "llama", {**OF_GROUPED, **config})
    for neutral in (None, False, 0, *([[1, 1]] if key == "no_rope_layers" else [])):
        of_layer("llama", {**OF_GROUPED, key: neutral})
    # Of a model whose own layers have been compared, the layout knows what its keys mean.
    if key not in OF_MODELS["apertus"].unsupported:
        state = layer_of("qwen3").to_state("qwen3")
        from_state(state, config={**OF_GROUPED, "model_type": "apertus", key: value})


@pytest.mark.parametrize("key", ["rope_theta", "rope_scaling", "rope_parameters"])
def test_a_layout_that_does_not_rotate_refuses_a_config_that_does(key):
    config = {"num_attention_heads": HEADS, key: {"rope_type": "default"}}
    assert f"config: {key} is" in error_of(of_layer, "bart", config)
    of_layer("bart", config, rotary=None)
    of_layer("bart", {**config, "model_type": "bart"})


@pytest.mark.parametrize(("models", "keys"), [(OTHER_BASE, BASES), (FEWER_COLUMNS, COLUMNS)])
def test_what_a_config_leaves_to_its_model_is_needed(models, keys):
    for model in models:
        layout = OF_MODELS[model].name
        state = layer_of(layout).to_state(layout)
        config = {key: value for key, value in LAYERS[layout][1].items() if key not in keys}
        if "rope_parameters" in config:
            config["rope_parameters"] = {"full_attention": {}, "sliding_attention": {}}
        assert f"which models of type {model!r} need" in error_of(
            from_state, state, config={**config, "model_type": model}, layer_index=0)


@pytest.mark.parametrize(("layout", "config", "rotates"), [
    ("cohere2", SLIDING, (True, False)), ("exaone4", SLIDING, (True, False)),
    ("exaone4", {**SLIDING, "sliding_window": None}, (True, True)),
    ("smollm3", {**OF_GROUPED, "no_rope_layers": [0, 1]}, (False, True)),
    ("smollm3", {**OF_GROUPED, "no_rope_layer_interval": 2}, (True, False)),
    ("esm", {**ROTARY, "position_embedding_type": "absolute"}, (False, False))])
def test_layers_that_do_not_rotate(layout, config, rotates):
    for index, does in enumerate(rotates):
        assert (of_layer(layout, config, index).rotary is not None) == does


@pytest.mark.parametrize(("layout", "config", "message"), [
    ("cohere2", {**SLIDING, "sliding_window": None}, "got none for 'sliding_window'"),
    ("smollm3", {**OF_GROUPED, "no_rope_layers": [1]}, "got 1, wanted one of the 1 layers"),
    ("smollm3", {**OF_GROUPED, "no_rope_layers": 3}, "'no_rope_layers': got int, wanted a list"),
    ("smollm3", OF_GROUPED, "no_rope_layer_interval"),
    ("esm", {**ROTARY, "position_embedding_type": "relative_key"}, "got 'relative_key'"),
    ("modernbert", {**ROTARY, "local_attention": 6}, "wanted a config as transformers 5"),
    ("gpt_neo", {"num_heads": HEADS}, "got none for 'attention_layers'"),
    ("granite", OF_GROUPED, "got none for 'attention_multiplier'"),
    ("falcon", {**OF_GROUPED, "alibi": True}, "config: alibi is True"),
    ("roformer", {**ROTARY, "rotary_value": True}, "config: rotary_value is True")])
def test_configs_that_do_not_say_enough(layout, config, message):
    assert message in error_of(of_layer, layout, config, int(layout == "smollm3"))


@pytest.mark.parametrize(("config", "kv_heads"), [
    ({"multi_query": True, "num_kv_heads": HEADS}, 1), ({"multi_query": False}, HEADS),
    ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2)])
def test_falcons_heads(config, kv_heads):
    layer = mha.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=kv_heads, use_bias=False, rng=0,
                                   rotary=mha.Rotary(6, base=500.0))
    state = layer.to_state("falcon")
    config = {**ROTARY, "model_type": "falcon", **config}
    again = from_state(state, config=config)
    np.testing.assert_array_equal(again.W_k, layer.W_k)
    assert again.num_kv_heads == kv_heads


@pytest.mark.parametrize("layout", ["phi3", "falcon"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 1), (6, 2), (6, 3), (6, 6)])
def test_heads_of_two_counts_in_one_weight(layout, heads, kv_heads):
    layer = mha.MultiHeadAttention(12, heads, num_kv_heads=kv_heads, head_dim=4, rng=1,
                                   rotary=mha.Rotary(4))
    state = layer.to_state(layout)
    for sizes in ({"num_heads": heads, "num_kv_heads": kv_heads}, {"num_heads": heads}):
        again = from_state(state, layout, rotary=mha.Rotary(4), **sizes)
        for name, parameter in layer.parameters().items():
            np.testing.assert_array_equal(getattr(again, name), parameter, err_msg=name)
    wrong = error_of(from_state, state, layout, rotary=None, num_heads=heads, num_kv_heads=7,
                     head_dim=4)
    assert "got shape" in wrong and "wanted" in wrong


def test_groups_that_do_not_divide_the_heads():
    state = {"query_key_value.weight": np.ones((14 * 4, 12), np.float32),
             "dense.weight": np.ones((12, 6 * 4), np.float32)}
    assert "wanted one that divides num_heads 6" in error_of(
        from_state, state, "falcon", num_heads=6, num_kv_heads=4, rotary=None)


def test_every_models_layout_is_written_too():
    for model in OF_HEADS:
        layer, layout = layer_of(OF_MODELS[model].name), OF_MODELS[model].name
        assert layer.to_state(model).keys() == layer.to_state(layout).keys()


def test_the_page_has_every_layout():
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in row.split("`")[1::2]} >= LAYOUTS.keys()


def test_a_layer_of_groups_computes_what_it_did():
    x = np.random.default_rng(0).standard_normal((2, 5, WIDTH)).astype(np.float32)
    for layout in ("falcon", "phi3", "gpt_bigcode"):
        layer = layer_of(layout)
        again = read(layout, layer.to_state(layout))
        np.testing.assert_array_equal(again(x, causal=True), layer(x, causal=True))
    assert GROUPED["num_kv_heads"] == 2
