"""Fields of configs that small_configs cannot guess, by the config's class."""

_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_FORECAST = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2],
             "num_time_features": 1}
_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}

OVERRIDES = {
    "ASTConfig": {"max_length": 64},
    "BambaConfig": {"attn_layer_indices": [1]},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 4}},
    "DbrxConfig": {"attn_config": {
        "rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "DecisionTransformerConfig": {"vocab_size": 128},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "DiffusionGemmaTextConfig": _EXPERTS,
    "Dots1Config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "EsmConfig": {"vocab_size": 33, "mask_token_id": 32},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "Gemma4AssistantConfig": {"text_config": {"hidden_size_per_layer_input": 0}},
    "Gemma4UnifiedAssistantConfig": {"text_config": {
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}},
    "Glm46VConfig": {"text_config": {"rope_parameters": {**_ROTARY, "mrope_section": [2, 3, 3]}}},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "InformerConfig": _FORECAST,
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "NemotronHConfig": {"layers_block_type": ["mamba", "attention"], "n_groups": 1},
    "PaddleOCRTextConfig": {"rope_parameters": {**_ROTARY, "mrope_section": [2, 3, 3]}},
    "PatchTSMixerConfig": {"self_attn": True, "context_length": 32, "self_attn_heads": 2},
    "Qwen2_5OmniTextConfig": {"rope_parameters": {**_ROTARY, "mrope_section": [2, 3, 3]}},
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 33},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 33},
    "ShieldGemma2Config": {"yes_token_index": 50, "no_token_index": 51},
    "SwinConfig": {"window_size": 2},
    "TimeSeriesTransformerConfig": _FORECAST,
    "TimesFmConfig": {"context_length": 64, "horizon_length": 32},
    "TimesFm2_5Config": {"context_length": 64},
    "XmodConfig": {"default_language": "en_XX"},
    "Zamba2Config": {"layers_block_type": ["linear_attention", "hybrid"]},
}

# Networks of convolutions, whose widths are in many lists that have to agree: kept as they are.
WHOLE = {"HGNetV2Config", "RTDetrResNetConfig"}
