"""Names that people look for in `mha` and its submodules, and where what they want is."""

from __future__ import annotations

from types import ModuleType

# Where it is: the names by which it is looked for, words apart.
PLACES = {
    "mha.MultiHeadAttention": "MultiheadAttention MHA Attention SelfAttention CrossAttention"
                              " MultiHeadSelfAttention Layer",
    "mha.MultiHeadAttention.from_state": "from_state from_pretrained load_state load_weights",
    "mha.MultiHeadAttention(...).new_cache(batch)": "new_cache Cache",
    "mha.scaled_dot_product_attention": "sdpa dot_product_attention scaled_dot_product"
                                        " attention_function flash_attention",
    "mha.multi_head_attention": "multihead_attention mha self_attention",
    "mha.merge_heads": "combine_heads concat_heads join_heads",
    "mha.split_heads": "separate_heads",
    "mha.linear": "Linear Dense dense matmul project",
    "mha.Rotary": "rotary_embedding RotaryEmbedding rope RoPE apply_rotary",
    "mha.alibi_slopes": "alibi",
    "mha.masks.causal": "causal causal_mask create_causal_mask make_causal_mask look_ahead_mask"
                        " lookahead_mask subsequent_mask look_ahead triangular",
    "mha.masks.sliding_window": "sliding_window window window_mask local_mask",
    "mha.masks.from_lengths, or key_lengths= in the call": "from_lengths padding padding_mask"
        " create_padding_mask make_padding_mask lengths length_mask sequence_mask valid_lens"
        " key_padding_mask",
    "mha.masks.from_attend": "from_attend attention_mask",
    "mha.masks.from_blocked": "from_blocked",
    "mha.reference.softmax": "softmax Softmax log_softmax masked_softmax",
    "mha.reference.steps": "steps",
    "mha.reference.dot_product_scores": "dot_product_scores attention_scores",
    "mha.reference.mask_scores": "mask_scores masked_fill",
    "mha.testing.diagnose": "diagnose check_attention",
    "mha.importance.ablation": "ablation",
    "mha.importance.confidence": "confidence",
    "mha.importance.entropy": "entropy",
    "mha.importance.gradient": "gradient",
    "mha.importance.rollout": "rollout attention_rollout",
    "mha.importance.variance": "variance",
    "mha.parameters.layouts": "layouts",
    "mha.parameters.open": "open load load_file load_safetensors safetensors",
    "mha.plot.heads": "heatmap plot_attention plot_heads show_attention visualize visualise"
                      " head_view",
    "mha.view.model": "model_view bertviz",
    "the vjp functions, as mha.scaled_dot_product_attention_vjp": "grad backward vjp gradients",
}
_PLACE_OF = {name: place for place, names in PLACES.items() for name in names.split()}


def no_such_name(module: ModuleType, name: str) -> AttributeError:
    """The error for a name that a module does not have: where it is, or for Python's own "Did you
    mean"."""
    message = f"module {module.__name__!r} has no attribute {name!r}"
    if name in _PLACE_OF:
        return AttributeError(f"{message}, wanted {_PLACE_OF[name]}")
    return AttributeError(message, name=name, obj=module)
