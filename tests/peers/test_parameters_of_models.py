"""Every model of transformers that `mha.parameters.layouts()` lists: its own attention layers,
small and of random numbers, beside those that are read from its state and its config.

In float64, but for the parts that models compute in float32: their rotary embeddings and norms.
Whether a layer is causal is an option of each call: one of the two answers must be the model's.
"""

import numpy as np
import pytest
from transformers import CONFIG_MAPPING
from transformers_models import attention_of

import mha
from mha.parameters._config import FEWER_COLUMNS, OTHER_BASE
from mha.parameters._layouts import OF_MODELS
from mha.parameters._names import left_over
from mha.parameters._refused import MODELS

TOLERANCE = 1e-6  # of the largest entry
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                "mrope_section": [2, 3, 3]}}
NO_NORMS = {"use_qk_norm": False}
# Fields of configs, by the model's type.
GIVEN = {
    "cohere": NO_NORMS, "esm": {"position_embedding_type": "rotary"},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]}, "gptj": {"rotary_dim": 8},
    "internvl_vision": NO_NORMS, "janus_vision_model": NO_NORMS,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax": {"sliding_window": None}, "qianfan_ocr_vision": NO_NORMS,
    **{f"qwen2{version}_vl": {"text_config": SECTIONS} for version in ("", "_5")},
    **{name: SECTIONS for name in OF_MODELS if "_vl_" in name and "text" in name},
    "glm4v_text": SECTIONS, **{name: {"rope_parameters": {
        **SECTIONS["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
        for name in ("glm4v_moe_text", "glm_image_text", "glm_ocr_text")},
    "qwen2_5_omni_text": SECTIONS, "yolos": {"num_detection_tokens": 5},
}

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own


@pytest.mark.parametrize("model_type", [
    model_type for model_type, layout in OF_MODELS.items()
    if not layout.latent])  # in test_latent_attention.py
def test_model(model_type):
    layout = OF_MODELS[model_type]
    config, state, calls = attention_of(model_type, layout, **GIVEN.get(model_type, {}))
    assert calls
    for call in calls:
        layer = mha.MultiHeadAttention.from_state(
            state, prefix=call.prefix, config={**config, "model_type": model_type},
            layer_index=call.layer_index)
        query, key, value = (batched(array) for array in call[2:5])
        theirs = batched(call.output)
        distances = [np.abs(layer(query, key, value, causal=causal) - theirs).max()
                     for causal in (False, True)]
        assert min(distances) <= TOLERANCE * np.abs(theirs).max(), (call.prefix, layer)
        own = {name: array for name, array in state.items() if name.startswith(call.prefix)}
        check_round_trip(layer, layout, call.prefix, own)


def batched(array):
    """(batch, len, width), of images and of what has no batch too."""
    return array.reshape(-1, *array.shape[-2:])


def check_round_trip(layer, layout, prefix, state):
    back = layer.to_state(layout.name, prefix=prefix)
    under = {name.removeprefix(prefix) for name in state}
    for form in layout.forms:
        if not left_over(layout, form, under):
            for name in form.keys() & under - {"relative_attention_bias.weight"}:
                full = prefix + name
                if full in back:
                    assert back[full].tobytes() == state[full].tobytes(), full


def text_config(model_type):
    try:
        return CONFIG_MAPPING[model_type]().get_text_config().to_dict()
    except ValueError:  # of several
        return {}


def test_what_models_leave_to_their_defaults():
    """Configs without a base, or without how many columns rotate, are told to say it."""
    other_base, fewer_columns = set(), set()
    for model_type, layout in OF_MODELS.items():
        if "rotary" not in layout.settings:
            continue
        config = text_config(model_type)
        rope = config.get("rope_parameters") or {}
        places = [config, rope, *(each for each in rope.values() if isinstance(each, dict))]
        said = {key: {place[key] for place in places if place.get(key) is not None}
                for key in ("rope_theta", "partial_rotary_factor")}
        if said["rope_theta"] - {10000.0}:
            other_base.add(model_type)
        if said["partial_rotary_factor"] - {1.0}:
            fewer_columns.add(model_type)
    assert other_base <= OTHER_BASE and fewer_columns <= FEWER_COLUMNS


def test_refused_models_are_models():
    own_parts = {"seamless_m4t", "hunyuan_vl_text"}
    assert not {model for model in MODELS if model not in CONFIG_MAPPING} - own_parts
