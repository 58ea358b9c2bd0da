"""What models do that a layer does not, by what configs call them, and keys of configs that change
attention: refused by name where nothing reads them, never passed over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mha.parameters import _config as config
from mha.parameters._table import Layout, Setting

BY_HAND = "wanted attention by hand: mha.linear and mha.scaled_dot_product_attention"
# Why, beside what to do: the models.
REASONS: Mapping[str, tuple[str, ...]] = {
    "latent attention with more than DeepSeek-V3's has; wanted an mha.MultiHeadLatentAttention made"
    " by hand, where it does the same": (
        "axk1", "axk2", "bailing_hybrid", "deepseek_v32", "deepseek_v4", "dots3_note_text",
        "glm4_moe_lite", "glm5_next_text", "glm_moe_dsa", "hy_v4", "kimi_linear",
        "longcat_flash", "minicpm3", "mistral4", "mistral_large4_text", "youtu"),
    "norms of queries and keys behind the rotation; wanted the recipe \"A norm behind the"
    " rotation\"": ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "nanochat"),
    "norms that subtract the mean, which mha's do not; " + BY_HAND: (
        "chameleon", "esmc", "fuyu", "persimmon"),
    "values that are normed, or keys that are values; " + BY_HAND: (
        "diffusion_gemma_text", "embedding_gemma2_text", "gemma3n_text", "gemma4_text",
        "gemma4_unified_text"),
    "convolutions of queries, keys or values; " + BY_HAND: (
        "convbert", "cvt", "glpn", "inkling2_text", "inkling_text", "nystromformer", "pvt",
        "pvt_v2", "segformer", "zaya"),
    "scores with embeddings of relative positions; " + BY_HAND: (
        "bros", "deberta", "deberta-v2", "fastspeech2_conformer", "funnel", "gemma3n_audio",
        "layoutlmv2", "layoutlmv3", "longt5", "mpnet", "nemotron_asr_streaming_encoder",
        "parakeet_encoder", "prophetnet", "seamless_m4t", "seamless_m4t_v2", "sew-d", "speecht5",
        "swin", "swin2sr", "swinv2", "tapas", "udop", "vits", "wav2vec2-bert",
        "wav2vec2-conformer", "wavlm", "xlnet"),
    "attention to some of the keys alone, chosen by their numbers or in blocks; " + BY_HAND: (
        "doge", "eomt", "led", "longformer", "mra", "pegasus_x", "qwen4_exp_text", "reformer",
        "yoso"),
    "a difference of two softmaxes; " + BY_HAND: ("diffllama",),
    "a norm between attention and its output; " + BY_HAND: ("bitnet", "kosmos_2_text_model"),
    "queries that are scaled by their position, and chunks; " + BY_HAND: (
        "llama4_text", "ministral3"),
    "queries that are scaled by a learned number a column; " + BY_HAND: ("timesfm", "timesfm2_5"),
    "a fused weight whose heads stand in four blocks; wanted its rows in another order": (
        "codegen",),
    "a gate or a scale that layers do not have; " + BY_HAND: (
        "beam", "laguna", "mimo_v2_flash", "muse_glimmer_text", "muse_spark_text", "neomme",
        "openai_privacy_filter", "step3p5"),
    "rotations by rows and columns of an image; wanted rotary=, from the recipes of the page on"
    " rotary embeddings": (
        "cohere_compass_vision", "cosmos3_edge_vision", "dinov3_vit", "eomt_dinov3",
        "ernie4_5_vl_moe_vision", "exaone4_5_vision", "glm4v_moe_vision", "glm4v_vision",
        "glm_image_vision", "glm_ocr_vision", "hunyuan_vl_vision", "minimax_m3_vl_vision",
        "mlcd_vision_model", "paddleocr_vl_vision", "pixtral", "qwen2_5_vl_vision",
        "qwen2_vl_vision", "qwen3_5_moe_vision", "qwen3_5_vision", "qwen3_vl_moe_vision",
        "qwen3_vl_vision", "qwen4_exp_vision", "sam3_vit_model", "sapiens2", "step3p5_vision",
        "vjepa2"),
}
MODELS = {model: reason for reason, models in REASONS.items() for model in models}

# Of configs: who reads the key.
READERS: Mapping[str, tuple[Setting, ...]] = {
    "alibi": (config.alibi_of_mpt,),
    "attention_chunk_size": (),
    "attention_multiplier": (config.scale_of_multiplier,),
    "attention_value_scale": (),
    "attn_logit_softcapping": (config.softcap,),
    "attn_temperature_tuning": (),
    "clip_qkv": (),
    "key_multiplier": (config.scale_of_keys,),
    "no_rope_layer_interval": (config.rotary_of_some,),
    "no_rope_layers": (config.rotary_of_some,),
    "qk_layernorm": (),
    "query_pre_attn_scalar": (config.scale_of_scalar,),
    "scale_attn_by_inverse_layer_idx": (config.scale_of_gpt2,),
    "use_bidirectional_attention": (),
}
ROTATE = ("rope_parameters", "rope_scaling", "rope_theta")
NEUTRAL = {"key_multiplier": 1, "attention_value_scale": 1}


def refusal(model: Any) -> str | None:
    """Why no layout reads a config's model, where it is known."""
    return MODELS.get(model) if isinstance(model, str) else None


def unread_keys(layout: Layout, config: Mapping[str, Any],
                given: Collection[str]) -> list[str]:
    """What a config says of attention that a layout does not read; of models other than its own,
    whose configs have keys that they do not use."""
    if config.get("model_type") in layout.model_types:
        return []
    settings = set(layout.settings.values())
    problems = []
    for key, readers in READERS.items():
        value = config.get(key)
        if not value or value == NEUTRAL.get(key) or key in layout.unsupported:
            continue
        if isinstance(value, (list, tuple)) and all(value):
            continue  # every layer rotates
        if settings.isdisjoint(readers):
            problems.append(f"config: {key} is {value!r}, which layout {layout.name!r} does not"
                            " read, wanted the layout of its model, or a config without it")
    if "rotary" not in {*layout.settings, *given}:
        problems += [f"config: {key} is {config[key]!r}, and layout {layout.name!r} does not"
                     " rotate, wanted the layout of its model, or rotary="
                     for key in ROTATE if config.get(key)]
    return problems
