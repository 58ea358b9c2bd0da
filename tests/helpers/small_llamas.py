"""Small random models of the kinds that examples/llama.py reads: their files, and what they say by
plain NumPy in float64."""

import json

import numpy as np

VOCABULARY = 272  # 256 bytes, and tokens of more
SHARED = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
          "intermediate_size": 64, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
          "max_position_embeddings": 512, "num_hidden_layers": 2}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}
CONFIGS = {
    "llama": {**SHARED, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA_3,
              "hidden_act": "silu"},
    "qwen3": {**SHARED, "model_type": "qwen3", "rope_theta": 1e6, "hidden_act": "silu",
              "tie_word_embeddings": True},
    "gemma3": {**SHARED, "model_type": "gemma3_text", "rope_theta": 1e6, "num_hidden_layers": 7,
               "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
               "sliding_window": 9, "sliding_window_pattern": 6, "query_pre_attn_scalar": 24,
               "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}}


def draw(config, seed=0):
    """A model's arrays, as transformers has them."""
    rng = np.random.default_rng(seed)
    width, size, dim = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    of_gemma = config["model_type"].startswith("gemma")

    def matrix(rows, columns):
        return rng.normal(0, 1.5 / columns**0.5, (rows, columns)).astype(np.float32)

    def norm(length):
        return rng.normal(not of_gemma, 0.2, length).astype(np.float32)

    # Small ones: a tied model that hardly looks at what it sees repeats its last token.
    arrays = {"model.embed_tokens.weight": matrix(config["vocab_size"], width) / np.float32(8),
              "model.norm.weight": norm(width)}
    if not config.get("tie_word_embeddings"):
        arrays["lm_head.weight"] = matrix(config["vocab_size"], width)
    for index in range(config["num_hidden_layers"]):
        layer = {"self_attn.q_proj": matrix(heads * dim, width),
                 "self_attn.k_proj": matrix(kv_heads * dim, width),
                 "self_attn.v_proj": matrix(kv_heads * dim, width),
                 "self_attn.o_proj": matrix(width, heads * dim),
                 "mlp.gate_proj": matrix(size, width), "mlp.up_proj": matrix(size, width),
                 "mlp.down_proj": matrix(width, size),
                 "input_layernorm": norm(width), "post_attention_layernorm": norm(width)}
        if config["model_type"] != "llama":
            layer |= {"self_attn.q_norm": norm(dim), "self_attn.k_norm": norm(dim)}
        if of_gemma:
            layer |= {"pre_feedforward_layernorm": norm(width),
                      "post_feedforward_layernorm": norm(width)}
        arrays |= {f"model.layers.{index}.{name}.weight": array for name, array in layer.items()}
    return arrays


def write_folder(folder, config, arrays, *, shards=1, **more):
    """config.json, generation_config.json with what is more of it, and .safetensors."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(more))
    names = sorted(arrays)
    files = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1}-of-{shards}.safetensors"
        files |= dict.fromkeys(names[shard::shards], file)
        save_file({name: arrays[name] for name in names[shard::shards]}, folder / file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


OF_GGUF = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
           "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
           "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
           "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
           "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
           "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name, of_gemma):
    *layer, last = name.removesuffix(".weight").split(".", 3)
    if layer[:2] != ["model", "layers"]:
        return OF_GGUF[name.removesuffix(".weight")] + ".weight"
    behind = "post_attention_norm" if of_gemma else "ffn_norm"
    return f"blk.{layer[2]}.{OF_GGUF.get(last, behind)}.weight"


def write_gguf(path, config, arrays, quantised=None, **metadata):
    """As llama.cpp's converter does, with metadata behind "tokenizer.ggml."; all matrices of the
    type quantised."""
    import gguf

    kind = config["model_type"].removesuffix("_text")
    of_gemma = kind.startswith("gemma")
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if of_gemma:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    for name, value in metadata.items():
        key = f"tokenizer.ggml.{name}"
        add = (writer.add_bool if isinstance(value, bool) else writer.add_array if isinstance(
            value, list) else writer.add_uint32 if isinstance(value, int) else writer.add_string)
        add(key, value)
    for name, array in arrays.items():
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = len(array) // config["head_dim"]  # halves become pairs
            array = np.ascontiguousarray(array.reshape(
                heads, 2, -1, array.shape[1]).swapaxes(1, 2)).reshape(array.shape)
        if of_gemma and name.endswith("norm.weight"):
            array = array + np.float32(1)
        of = quantised and array.ndim == 2 and gguf.GGMLQuantizationType[quantised.upper()]
        writer.add_tensor(gguf_name(name, of_gemma),
                          gguf.quants.quantize(array, of) if of else array, raw_dtype=of or None)
    if kind == "llama" and config.get("rope_scaling"):
        plain = {**config, "rope_scaling": None}
        factors = frequencies(plain, 0) / frequencies(config, 0)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# What the model says, written from the papers: every position again for every token.

def is_sliding(config, index):
    return "sliding_window" in config and (index + 1) % config["sliding_window_pattern"] != 0


def frequencies(config, index):
    """Radians a position, (head_dim / 2,)."""
    dim = config["head_dim"]
    base = config["rope_local_base_freq"] if is_sliding(config, index) else config["rope_theta"]
    plain = base ** -(np.arange(0, dim, 2) / dim)
    scaling = config.get("rope_scaling")
    if scaling is None or is_sliding(config, index):
        return plain
    if scaling["rope_type"] == "linear":
        return plain / scaling["factor"]
    # Llama 3.1: slow ones are divided, fast ones stay, and those between are in between.
    turns = scaling["original_max_position_embeddings"] * plain / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * plain + (1 - kept) * plain / scaling["factor"]


def reference_logits(config, arrays, tokens):
    """(len, vocabulary) in float64."""
    arrays = {name.removesuffix(".weight"): np.asarray(array, np.float64)
              for name, array in arrays.items()}
    of_gemma = config["model_type"].startswith("gemma")

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * (
            arrays[name] + of_gemma)

    embedding = arrays["model.embed_tokens"]
    x = embedding[np.asarray(tokens)]
    if of_gemma:
        x = x * np.float32(config["hidden_size"]**0.5)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        attended = _attend(config, arrays, norm, norm(x, at + "input_layernorm"), index)
        x = x + (norm(attended, at + "post_attention_layernorm") if of_gemma else attended)
        inner = norm(x, at + ("pre_feedforward_layernorm" if of_gemma
                              else "post_attention_layernorm"))
        gate, up = (inner @ arrays[f"{at}mlp.{name}_proj"].T for name in ("gate", "up"))
        if of_gemma:
            gate = gate / 2 * (1 + np.tanh((2 / np.pi)**0.5 * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        fed = (gate * up) @ arrays[at + "mlp.down_proj"].T
        x = x + (norm(fed, at + "post_feedforward_layernorm") if of_gemma else fed)
    return norm(x, "model.norm") @ arrays.get("lm_head", embedding).T


def _attend(config, arrays, norm, x, index):
    """A head at a time."""
    at, length, dim = f"model.layers.{index}.self_attn.", len(x), config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    angles = np.arange(length)[:, None] * frequencies(config, index)
    turns = np.exp(1j * angles)

    def turned(rows, letter):
        if f"{at}{letter}_norm" in arrays:
            rows = norm(rows, f"{at}{letter}_norm")
        both = (rows[:, :dim // 2] + 1j * rows[:, dim // 2:]) * turns
        return np.concatenate([both.real, both.imag], axis=1)

    query, key, value = (x @ arrays[f"{at}{letter}_proj"].T for letter in "qkv")
    behind = np.arange(length)[:, None] - np.arange(length)
    seen = (behind >= 0) & (behind < (config["sliding_window"] if is_sliding(config, index)
                                      else length))
    scale = config.get("query_pre_attn_scalar", dim)**-0.5
    outputs = []
    for head in range(heads):
        of_query = slice(head * dim, (head + 1) * dim)
        shared = head // (heads // kv_heads)
        of_key = slice(shared * dim, (shared + 1) * dim)
        scores = turned(query[:, of_query], "q") @ turned(key[:, of_key], "k").T * scale
        weights = np.where(seen, np.exp(scores - scores.max()), 0)
        outputs.append(weights / weights.sum(-1, keepdims=True) @ value[:, of_key])
    return np.concatenate(outputs, axis=1) @ arrays[at + "o_proj"].T
