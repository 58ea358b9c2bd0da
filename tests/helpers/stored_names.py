"""What stands where in every layout of `mha.parameters`, written out, not by its tables."""

import numpy as np
from layouts import HEADS, WIDTH


def by_head(columns, heads=HEADS):
    """(heads, width of a head, in) of a weight x @ W, (heads, width of a head) of a bias."""
    return np.swapaxes(columns, 0, -1).reshape(heads, -1, *columns.shape[:-1])


# Of a layer: names of a state, with its parameters as they are there.
def separate(q, k, v, o):
    def wanted(layer):
        for letter, name in zip("qkvo", (q, k, v, o)):
            yield f"{name}.weight", getattr(layer, "W_" + letter).T
            if getattr(layer, "b_" + letter) is not None:
                yield f"{name}.bias", getattr(layer, "b_" + letter)
        for name in ("q_norm", "k_norm"):
            if getattr(layer, name) is not None:
                yield f"{name}.weight", getattr(layer, name)
        if layer.sinks is not None:
            yield "sinks", layer.sinks
        if layer.W_g is not None:
            yield "gate_proj.weight", layer.W_g.T
    return wanted


def of_heads(layer):
    """q0 k0 v0 q1 k1 v1 ..., a head each."""
    for kind in "Wb":
        parts = [by_head(getattr(layer, f"{kind}_{letter}")) for letter in "qkv"]
        rows = [part[head] for head in range(HEADS) for part in parts]
        yield f"query_key_value.{'weight' if kind == 'W' else 'bias'}", np.concatenate(rows)
    yield "dense.weight", layer.W_o.T
    yield "dense.bias", layer.b_o


def beside(layer, kind="W"):
    return np.concatenate([getattr(layer, f"{kind}_{letter}") for letter in "qkv"], axis=-1)


def gpt2(layer):
    yield "c_attn.weight", beside(layer)
    yield "c_attn.bias", beside(layer, "b")
    yield "c_proj.weight", layer.W_o
    yield "c_proj.bias", layer.b_o


def mpt(layer):
    yield "Wqkv.weight", beside(layer).T
    yield "out_proj.weight", layer.W_o.T


def pytorch(layer):
    yield "in_proj_weight", beside(layer).T
    yield "in_proj_bias", beside(layer, "b")
    yield "out_proj.weight", layer.W_o.T
    yield "out_proj.bias", layer.b_o


def onnx(layer):
    yield "weights", beside(layer)
    yield "bias", beside(layer, "b")
    yield "output_weights", layer.W_o
    yield "output_bias", layer.b_o


def kernels(separator, output):
    def wanted(layer):
        for letter, name in zip("qkv", ("query", "key", "value")):
            heads = layer.num_heads if letter == "q" else layer.num_kv_heads
            weight, bias = (getattr(layer, f"{kind}_{letter}") for kind in "Wb")
            yield f"{name}{separator}kernel", weight.reshape(len(weight), heads, -1)
            if bias is not None:
                yield f"{name}{separator}bias", bias.reshape(heads, -1)
        yield f"{output}{separator}kernel", layer.W_o.reshape(HEADS, -1, layer.output_dim)
        if layer.b_o is not None:
            yield f"{output}{separator}bias", layer.b_o
    return wanted


def t5(layer):
    yield from separate("q", "k", "v", "o")(layer)
    table = np.zeros((8, HEADS), np.float32)
    # Of 8 buckets 4 are for keys behind: distances 0, 1, then 2 to 6, then the rest.
    for bucket, distance in ((0, 0), (1, -1), (2, -2), (3, -20), (5, 1), (6, 2), (7, 20)):
        table[bucket] = layer.relative_bias[:, 20 + distance]
    yield "relative_attention_bias.weight", table


def qwen3_next(layer):
    """Each head's gate behind its query."""
    both = [weight.T.reshape(HEADS, 10, WIDTH) for weight in (layer.W_q, layer.W_g)]
    yield "q_proj.weight", np.concatenate(both, axis=1).reshape(-1, WIDTH)
    yield from (item for item in PROJECTIONS(layer)
                if item[0] not in ("q_proj.weight", "gate_proj.weight"))


def lfm2(layer):
    for name, array in OF_BART(layer):
        yield name.replace("_norm", "_layernorm"), array


def in_one(name, output, groups=1):
    """All heads of the query, the key, the value; or those of each group."""
    def wanted(layer):
        for kind, ending in (("W", "weight"), ("b", "bias")):
            arrays = [getattr(layer, f"{kind}_{letter}") for letter in "qkv"]
            if arrays[0] is not None:
                parts = [by_head(array, groups) for array in arrays]
                yield f"{name}.{ending}", np.concatenate(
                    [part[group] for group in range(groups) for part in parts])
        yield f"{output}.weight", layer.W_o.T
        if layer.b_o is not None:
            yield f"{output}.bias", layer.b_o
    return wanted


PROJECTIONS = separate("q_proj", "k_proj", "v_proj", "o_proj")
OF_BERT = separate("self.query", "self.key", "self.value", "output.dense")
OF_VIT = separate("attention.query", "attention.key", "attention.value", "output.dense")
OF_BART = separate("q_proj", "k_proj", "v_proj", "out_proj")
WANTED = {
    "bart": OF_BART, "whisper": OF_BART,
    "bert": OF_BERT,
    "beit": OF_VIT, "vit": OF_VIT,
    "llama_meta": separate("wq", "wk", "wv", "wo"),
    **dict.fromkeys((
        "llama", "qwen3", "gemma2", "gemma3", "olmo2", "gpt_oss", "afmoe", "cohere", "cohere2",
        "detr", "dia", "exaone4", "falcon_h1", "flint", "glm", "glm4_moe", "granite",
        "granite_swa", "hrm_text", "kolibri1", "minimax", "molmo2", "recurrent_gemma", "smollm3",
        "solar_open"), PROJECTIONS),
    **dict.fromkeys(("aimv2", "gpt_neo", "gptj"), OF_BART), "lfm2": lfm2,
    **dict.fromkeys(("esm", "mobilebert", "roformer"), OF_BERT),
    "albert": separate("query", "key", "value", "dense"),
    "ctrl": separate("Wq", "Wk", "Wv", "dense"),
    "distilbert": separate("q_lin", "k_lin", "v_lin", "out_lin"),
    "internvl": separate("q_proj", "k_proj", "v_proj", "projection_layer"),
    **dict.fromkeys(("kosmos2_5", "pix2struct"), separate("query", "key", "value", "output")),
    "modernbert-decoder": separate("q_proj", "k_proj", "v_proj", "Wo"),
    "phi": separate("q_proj", "k_proj", "v_proj", "dense"),
    "blip": in_one("qkv", "projection"), "mgp-str": in_one("qkv", "proj"),
    "modernbert": in_one("Wqkv", "Wo"), "timesformer": in_one("attention.qkv", "output.dense"),
    "phi3": in_one("qkv_proj", "o_proj"), "gpt_bigcode": in_one("c_attn", "c_proj"),
    "falcon": in_one("query_key_value", "dense", groups=2),
    "qwen3_next": qwen3_next, "bloom": of_heads, "gpt_neox": of_heads, "gpt2": gpt2, "mpt": mpt,
    "t5": t5,
    "pytorch": pytorch, "onnx": onnx, "keras": kernels("/", "attention_output"),
    "flax": kernels(".", "out")}
