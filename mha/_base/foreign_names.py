"""Names that people know from other libraries or look for in `mha`, and what to write instead.

Loaded when an error is made. keywords.py makes the errors.
"""

from __future__ import annotations

from types import ModuleType

# What other libraries call a keyword, words apart; our keyword, which the function must have; and
# what to write where that is not the keyword alone. Several rows for a name are tried in turn.
KEYWORDS = [
    ("need_weights return_attention_scores output_attentions return_attention", "return_weights",
     ""),
    ("average_attn_weights", "return_weights",
     "return_weights=, the weights of every head: their .mean(axis=-3) is the average"),
    ("return_softmax_lse", "return_lse", ""),
    ("dropout_p dropout_rate p", "p", ""),
    ("p", "dropout", ""),
    ("head_mask", "head_gate", ""),
    ("head_mask", "embed_dim", "nothing: head_gate= of a call, num_heads numbers"),
    ("head_mask", "value", "value= times it, as head_gate= of a layer's call does"),
    ("attn_drop attention_dropout attn_pdrop dropout_prob", "dropout", ""),
    ("device", "dtype", "nothing: all is computed on the CPU"),
    ("deterministic", "training", "training=, its opposite"),
    ("enable_gqa", "num_kv_heads", ""),
    ("enable_gqa", "key", "nothing: key and value with fewer heads are shared among query's"),
    ("n_heads n_head nhead heads h num_attention_heads", "num_heads", ""),
    ("n_kv_heads num_key_value_heads num_query_groups", "num_kv_heads", ""),
    ("d_model num_hiddens hidden_size hidden_dim model_dim units dim qkv_features", "embed_dim",
     ""),
    ("in_dim input_dim d_in in_features", "query_dim", "query_dim=, or embed_dim= for all"),
    ("d_out out_dim out_features", "output_dim", "output_dim=, or embed_dim= for all"),
    ("bias qkv_bias add_bias", "use_bias", ""),
    ("page_size block_size", "page_len", ""),
    ("kdim", "key_dim", ""),
    ("vdim", "value_dim", ""),
    ("head_size dim_head d_head d_k d_kv", "head_dim", ""),
    ("d_v", "value_head_dim", ""),
    ("rope rotary_emb rope_scaling", "rotary", "rotary=, a mha.Rotary"),
    ("theta rope_theta rotary_emb_base", "base", ""),
    ("inv_freq", "frequencies", ""),
    ("mrope_section", "sections", ""),
    ("attention_scaling attention_factor", "magnitude", ""),
    ("position_ids input_pos offset", "positions", ""),
    ("seq_len max_position_embeddings", "length", ""),
    ("past_key_value past_key_values kv_cache layer_past", "cache", ""),
    ("batch_size", "batch", ""),
    ("max_len max_length max_seq_len max_cache_len", "capacity", ""),
    ("num_sink_tokens sink_token_length start_size", "keep_first", ""),
    ("cu_seqlens cu_seqlens_q sequence_starts", "starts", ""),
    ("batch_first", "embed_dim", "nothing: arrays are (batch, len, dim)"),
    ("q queries Q inputs_q", "query", ""),
    ("x inputs hidden_states", "query", ""),
    ("k keys K inputs_k inputs_kv context encoder_hidden_states memory", "key", ""),
    ("v values V inputs_v", "value", ""),
    ("input inputs hidden_states X", "x", ""),
    ("W kernel", "weight", ""),
    ("b", "bias", ""),
    ("left right", "window", "window=(left, right)"),
    ("causal mask key_lengths return_weights training", "embed_dim",
     "nothing: layer(x, {name}=...), a call, has it"),
    ("return_weights return_lse", "wrt", "nothing: a call without vjp returns them"),
    ("cache padding", "wrt", "nothing: calls with a cache have no gradients"),
    ("dropout dropout_p", "training",
     "training=True: the dropout is the layer's, given to its constructor"),
    ("bias window scale", "w_v",
     "nothing: additive attention has no dot products to scale or bias"),
]

# What other libraries' layers have -> what to write.
OF_LAYERS = {
    "state_dict": 'parameters(), or to_state("pytorch")',
    "load_state_dict": 'load_parameters(), or from_state(state, "pytorch", num_heads=...)',
    "get_weights": "parameters()",
    "set_weights": "load_parameters()",
    "save": "to_state(), and numpy.savez or safetensors of that",
    "shape": "embed_dim and head_dim",
    "forward": "a call, layer(x)",
    "apply": "a call, layer(x)",
    "call": "a call, layer(x)",
    "copy": "copy.deepcopy(layer)",
    "q_proj": "W_q",
    "k_proj": "W_k",
    "v_proj": "W_v",
    "o_proj": "W_o",
    "out_proj": "W_o",
    "attention_weights": "return_weights=True in a call",
    "zero_grad": "nothing: vjp() returns gradients, none are kept",
    "backward": "vjp(), whose pullback gives the gradients",
    "train": "training=True in the calls that train",
    "eval": "nothing: a call without training=True drops nothing",
    "to": "astype(dtype)",
    "half": "astype(numpy.float16)",
    "float": "astype(numpy.float32)",
    "double": "astype(numpy.float64)",
}

# What other libraries' caches have -> what to write.
OF_CACHES = {
    "clear": "reset()",
    "crop": "truncate(lengths)",
    "get_seq_length": "lengths",
    "key_cache": "key",
    "keys": "key",
    "max_cache_len": "capacity",
    "reorder_cache": "select(indices)",
    "seen_tokens": "lengths",
    "update": "append(key, value)",
    "value_cache": "value",
    "values": "value",
}

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
