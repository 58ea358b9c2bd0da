"""What the config of a model says of its attention: each function reads one option of the layer.

A config is the mapping of a model's config.json, or its path. All but `needs` of a layout must do
with an empty one, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mha._base.arguments import as_bool, as_finite, as_size
from mha._functions.options import Window
from mha._functions.position_biases import alibi_slopes
from mha._functions.rotary import Rotary
from mha.parameters._folders import config_at
from mha.parameters._gguf_metadata import of_metadata
from mha.parameters._table import Context, Layout

Config = Mapping[str, Any] | str | os.PathLike[str]

# What models call it -> the sizes' name.
SIZES = {
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads",
              "attention_heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "d_kv"),
}
SIDES = ("encoder", "decoder")
# Text models whose query, key and value have biases; those that see images, too.
OF_QWEN2 = ("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")
# Models that rotate by another base than 10000, or fewer columns than all, where a config has no
# key that says it.
OTHER_BASE = frozenset((
    *OF_QWEN2[1:], "apertus", "blt_global_transformer", "blt_patcher", "cohere", "csm",
    "csm_depth_decoder_model", "cwm", "emu3_text_model", "ernie4_5", "ernie4_5_moe", "flex_olmo",
    "gemma3_text", "gpt_oss", "gte", "helium", "higgs_audio_v2", "hy_v3", "jina_embeddings_v3",
    "lfm2", "lfm2_moe", "mellum", "minimax", "minimax_m2", "mixtral", "mllama_text_model",
    "modernbert", "modernbert-decoder", "nomic_bert", "olmo3", "paddleocr_vl_text", "phimoe",
    "qwen2_5_omni_text", "qwen3_vl_moe_text", "qwen3_vl_text", "smollm3", "solar_open"))
FEWER_COLUMNS = frozenset((
    "bamba", "glm", "glm4", "glm4_moe", "glm4v_moe_text", "glm_image_text", "glm_ocr_text",
    "glmasr_encoder", "gpt_neox", "nemotron", "phi", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "recurrent_gemma", "stablelm"))
BASES = ("rope_theta", "rotary_emb_base", "global_rope_theta")
COLUMNS = ("partial_rotary_factor", "rotary_pct", "rotary_dim")
SLIDING, FULL = "sliding_attention", "full_attention"


def of_text(config: Any) -> Mapping[str, Any]:
    """The part of a config that is about the language model, where there are several; read, where a
    path says where it is."""
    if isinstance(config, str) or hasattr(config, "__fspath__"):
        config = config_at(config)
    if not isinstance(config, Mapping):
        wanted = "config.to_dict()" if hasattr(config, "to_dict") else "a mapping or a path"
        raise TypeError(f"config: got {type(config).__name__}, wanted {wanted}")
    config = of_metadata(config)
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def sizes(config: Mapping[str, Any], prefix: str) -> dict[str, int]:
    """heads, kv_heads and head_dim, where the config has them."""
    found = {size: as_size(config[name], f"config {name!r}") for size, names in SIZES.items()
             for name in names[::-1] if config.get(name) is not None}  # the first name is the last
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        found["kv_heads"] = 1  # what Falcon's other keys say is for its newer models
    sides = {side: as_size(config[name], f"config {name!r}") for side in SIDES
             if config.get(name := f"{side}_attention_heads") is not None}
    side = side_of(prefix)
    if side in sides:
        found["heads"] = sides[side]
    elif side is None and len(set(sides.values())) == 1:
        found["heads"] = next(iter(sides.values()))
    return found


def side_of(prefix: str) -> str | None:
    """The side of a model that a prefix is on: the last of its parts that is "encoder" or
    "decoder", or the only word of the two in it."""
    whole = [part for part in prefix.split(".") if part in SIDES]
    words = [side for side in SIDES if side in prefix]
    return whole[-1] if whole else words[0] if len(words) == 1 else None


def biases(config: Mapping[str, Any], layout: Layout, named: str | None) -> str:
    """Of "qkvo" the projections that have biases for sure, by a config and the layout, as it was
    named."""
    if named == "qwen2" or config.get("model_type") in OF_QWEN2:
        return "qkv"
    said = {letter for key, letters in layout.biases.items() if config.get(key) is True
            for letter in letters}
    if config.get("attention_out_bias") is False:
        said -= {"o"}
    return "".join(sorted(said))


def number(context: Context, name: str) -> float:
    if context.config.get(name) is None:
        raise ValueError(f"config: got none for {name!r}, wanted a number")
    return as_finite(context.config[name], f"config {name!r}", above=0)


def rotary(context: Context) -> Rotary:
    for models, keys in ((OTHER_BASE, BASES), (FEWER_COLUMNS, COLUMNS)):
        if context.config.get("model_type") in models and not _says(context.config, keys):
            raise ValueError(f"config: got none of {', '.join(keys)}, which models of type"
                             f" {context.config['model_type']!r} need, wanted one")
    nested = any(isinstance(value, Mapping) for value in _rope(context.config).values())
    by_type = nested or context.config.get("rope_local_base_freq") is not None
    return Rotary.from_config(context.config, context.sizes["head_dim"],
                                  layout=context.rotary_layout,
                                  layer_type=_layer_type(context) if by_type else None)


def rotary_of_sliding(context: Context) -> Rotary | None:
    """Of models whose layers that see all do not rotate."""
    if _layer_type(context) != SLIDING:
        return None
    number(context, "sliding_window")
    return rotary(context)


def rotary_of_exaone4(context: Context) -> Rotary | None:
    """Likewise, unless no layer slides."""
    if context.config.get("sliding_window") is None:
        return rotary(context)
    return rotary_of_sliding(context)


def rotary_of_some(context: Context) -> Rotary | None:
    """Of layers that a list names by 1."""
    layers = context.config.get("no_rope_layers")
    if layers is None:
        every = as_size(context.config.get("no_rope_layer_interval"),
                        "config 'no_rope_layer_interval'")
        return rotary(context) if (_index(context) + 1) % every else None
    return rotary(context) if _of_layer(context, layers, "no_rope_layers") else None


def rotary_of_esm(context: Context) -> Rotary | None:
    kind = context.config.get("position_embedding_type", "absolute")
    if kind not in ("absolute", "rotary"):
        raise ValueError(f"config 'position_embedding_type': got {kind!r}, wanted 'absolute' or"
                         " 'rotary'")
    return rotary(context) if kind == "rotary" else None


def rotary_by_type(context: Context) -> Rotary:
    """Of ModernBERT, whose older configs have two keys for two kinds of layers."""
    if not any(isinstance(value, Mapping) for value in _rope(context.config).values()):
        raise ValueError("config: got no rope_parameters of full_attention and sliding_attention,"
                         " wanted a config as transformers 5 writes it")
    return rotary(context)


def rotary_of_meta(context: Context) -> Rotary:
    """Of params.json, which does not say by how much it scales."""
    if context.config.get("use_scaled_rope") and context.config.get("rope_scaling") is None:
        raise ValueError("config 'use_scaled_rope': got it without a factor, wanted rope_scaling as"
                         " config.json has it: rope_type llama3, factor 8 (Llama 3.1, 3.3) or 32"
                         " (Llama 3.2), low_freq_factor 1, high_freq_factor 4,"
                         " original_max_position_embeddings 8192")
    return rotary(context)


def _says(config: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    """Whether a config has one of the keys, by the kinds of layers or at the top."""
    rope = _rope(config)
    return any(place.get(key) is not None for key in keys
               for place in (config, rope, *rope.values()) if isinstance(place, Mapping))


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("rope_parameters")
    return found if isinstance(found, Mapping) else {}


def window(context: Context) -> Window | None:
    """A window of w positions, the query's own among them, where the layer is one that slides."""
    width = context.config.get("sliding_window")
    if width is None or context.config.get("use_sliding_window") is False:
        return None
    if _layer_type(context) != SLIDING:
        return None
    return as_size(width, "config 'sliding_window'") - 1, 0


def window_both_ways(context: Context) -> Window | None:
    """Of ModernBERT: half of local_attention to either side, beside the query's own position."""
    half = _half_of_local(context)
    return None if half is None else (half, half)


def _half_of_local(context: Context) -> int | None:
    """Of layers that slide."""
    if _of_layer(context, context.config.get("layer_types"), "layer_types") != SLIDING:
        return None
    return as_size(context.config.get("local_attention"), "config 'local_attention'", least=2) // 2


def window_of_half(context: Context) -> Window | None:
    """Of its decoder, whose half counts the query's own position."""
    half = _half_of_local(context)
    return None if half is None else (half - 1, 0)


def window_of_gpt_neo(context: Context) -> Window | None:
    config = context.config
    types = config.get("attention_layers")
    if types is None:
        raise ValueError("config: got none for 'attention_layers', wanted the list of 'global' and"
                         " 'local', one a layer")
    if _of_layer(context, types, "attention_layers") != "local":
        return None
    return as_size(config.get("window_size"), "config 'window_size'", 256) - 1, 0


def _index(context: Context) -> int:
    if context.layer_index is None:
        raise ValueError("layer_index: got none, wanted the layer's number, since the config's"
                         " layers differ")
    return context.layer_index


def _of_layer(context: Context, values: Any, name: str) -> Any:
    """The layer's own of a config's list."""
    index = _index(context)
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"config {name!r}: got {type(values).__name__}, wanted a list")
    if not 0 <= index < len(values):
        raise ValueError(f"layer_index: got {index}, wanted one of the {len(values)} layers of"
                         f" the config's {name}")
    return values[index]


def _layer_type(context: Context) -> str:
    """Sliding or full, by what a config says or, where it is an older one, the layout."""
    config = context.config
    types = config.get("layer_types")
    pattern = (config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
               or context.full_every)
    first_full = config.get("max_window_layers") if config.get("use_sliding_window") else None
    if types is None and pattern is None and first_full is None:
        return SLIDING if config.get("sliding_window") is not None else FULL
    index = _index(context)
    if types is not None:
        kind = _of_layer(context, types, "layer_types")
        if kind not in (SLIDING, FULL):
            raise ValueError(f"config 'layer_types': got {kind!r} for layer {index}, wanted"
                             f" {SLIDING!r} or {FULL!r}")
        return str(kind)
    if pattern is not None:
        every = as_size(pattern, "config 'sliding_window_pattern'")
        return SLIDING if (index + 1) % every else FULL
    return SLIDING if index >= as_size(first_full, "config 'max_window_layers'", least=0) else FULL


def norm_eps(context: Context) -> float:
    """What is added to the mean of squares, as a config calls it."""
    names = ("rms_norm_eps", "norm_eps", "layer_norm_eps")
    return number(context, next((name for name in names if name in context.config), names[0]))


def softcap(context: Context) -> float | None:
    name = "attn_logit_softcapping"
    return None if context.config.get(name) is None else number(context, name)


def scale_of_scalar(context: Context) -> float:
    return number(context, "query_pre_attn_scalar") ** -0.5


def scale_of_multiplier(context: Context) -> float:
    """Of Granite, which says it itself."""
    return number(context, "attention_multiplier")


def scale_of_keys(context: Context) -> float:
    """Of keys that are multiplied by a number."""
    return number(context, "key_multiplier") * context.sizes["head_dim"] ** -0.5


def scale_of_gpt2(context: Context) -> float | None:
    config = context.config
    scale = 1.0
    if as_bool(config.get("scale_attn_weights", True), "config 'scale_attn_weights'"):
        scale = context.sizes["head_dim"] ** -0.5
    if config.get("scale_attn_by_inverse_layer_idx"):
        return scale / (_index(context) + 1)
    return scale if scale == 1.0 else None


def alibi(context: Context) -> Any:
    return alibi_slopes(context.sizes["heads"])


def alibi_of_mpt(context: Context) -> Any:
    attention = _of_mpt(context)
    if attention.get("alibi", True) is False:
        return None
    return alibi_slopes(context.sizes["heads"], float(attention.get("alibi_bias_max", 8)))


def scale_of_mpt(context: Context) -> float | None:
    scale = _of_mpt(context).get("softmax_scale")
    return None if scale is None else as_finite(scale, "config 'softmax_scale'")


def _of_mpt(context: Context) -> Mapping[str, Any]:
    attention = context.config.get("attn_config")
    return attention if isinstance(attention, Mapping) else {}


def given_only(context: Context) -> None:
    """For an option that no config has, but the framework."""
