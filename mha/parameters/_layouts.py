"""The layouts: what frameworks and models call their arrays, and how these are arranged.

Frameworks first; then, as the transformers package names them, language models whose query, key and
value are apart, language models that have them in one weight, and encoders. T5's is in _t5.py.
"""

from __future__ import annotations

from mha.parameters import _config as config
from mha.parameters import _latent, _t5
from mha.parameters._table import (
    AXES,
    BESIDE,
    EQUAL_HEADS,
    Form,
    Layout,
    Stored,
    fused,
    linear,
    linears,
)

# The attention layers of frameworks themselves: PyTorch, Keras, Flax, ONNX Runtime.

APPENDED = "mha.compat.pytorch.MultiheadAttention, which appends a learned key and value"
SEPARATE: Form = {f"{letter}_proj_weight": Stored((f"W_{letter}",), AXES[f"W_{letter}"][::-1])
                  for letter in "qkv"}
PYTORCH: tuple[Form, ...] = tuple(
    {**weights, "in_proj_bias": Stored(("b_q", "b_k", "b_v"), (BESIDE,), optional=True),
     **linear("o", "out_proj", bias=None)}
    for weights in ({"in_proj_weight": fused("", BESIDE)[".weight"]}, SEPARATE))

NO_RMS = "a layer without normalize_qk: Flax's norms subtract the mean, which mha's do not"


def kernels(separator: str, output: str) -> Form:
    """Kernels (in, heads, head_dim) and, of the output, (heads, head_dim, out)."""
    names = {"q": "query", "k": "key", "v": "value", "o": output}
    return {f"{name}{separator}{kind}": Stored(
                (f"{parameter}_{letter}",),
                tuple(" ".join(AXES[f"{parameter}_{letter}"]).split()), kind == "bias")
            for letter, name in names.items()
            for kind, parameter in (("kernel", "W"), ("bias", "b"))}


OF_FRAMEWORKS = (
    Layout("pytorch", PYTORCH, unsupported={"bias_k": APPENDED, "bias_v": APPENDED},
           equal=EQUAL_HEADS),
    Layout("keras", (kernels("/", "attention_output"),), equal=()),
    Layout("flax", (kernels(".", "out"),), nested=True, equal=(),
           unsupported={"query_ln.scale": NO_RMS, "key_ln.scale": NO_RMS}),
    # The inputs of the operator Attention of com.microsoft, and of the MatMul and Add behind it.
    Layout("onnx", ({"weights": Stored(("W_q", "W_k", "W_v"), ("query_dim", BESIDE)),
                     "bias": Stored(("b_q", "b_k", "b_v"), (BESIDE,), optional=True),
                     "output_weights": Stored(("W_o",), AXES["W_o"]),
                     "output_bias": Stored(("b_o",), AXES["b_o"], optional=True)},),
           {"scale": config.given_only}, partial_biases=("qkv", "o")),
)


# Language models whose query, key and value are apart.

NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
OF_META = {"q": "wq", "k": "wk", "v": "wv", "o": "wo"}
PLAIN: Form = linears(NAMES, bias=None)
# Each head's gate stands behind its query.
GATED: Form = {**linears({letter: NAMES[letter] for letter in "kvo"}, bias=None),
               "q_proj.weight": Stored(("W_q", "W_g"), ("heads 2 head_dim", "query_dim")),
               "q_proj.bias": Stored(("b_q", "b_g"), ("heads 2 head_dim",), optional=True)}
# The same in files of llama.cpp, under "blk.{layer}.", and what else is there.
OF_GGUF = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
GGUF: Form = linears(OF_GGUF, bias=None)
GGUF_NORMS: Form = {"attn_q_norm.weight": Stored(("q_norm",), ("head_dim",)),
                    "attn_k_norm.weight": Stored(("k_norm",), ("head_dim",))}
BESIDE_GGUF = ("attn_norm.*", "ffn_*", "post_attention_norm.*", "post_ffw_norm.*")
HEAD_NORMS: Form = {"q_norm.weight": Stored(("q_norm",), ("head_dim",)),
                    "k_norm.weight": Stored(("k_norm",), ("head_dim",))}
WIDTH_NORMS: Form = {"q_norm.weight": Stored(("q_norm",), ("heads head_dim",)),
                     "k_norm.weight": Stored(("k_norm",), ("kv_heads head_dim",))}
SINKS: Form = {"sinks": Stored(("sinks",), ("heads",))}

ROTARY = {"rotary": config.rotary, "window": config.window}
NORMED = {**ROTARY, "norm_eps": config.norm_eps}
GEMMA3 = {**NORMED, "scale": config.scale_of_scalar}
GEMMA2 = {**ROTARY, "scale": config.scale_of_scalar, "softcap": config.softcap}
BUFFERS = ("rotary_emb.inv_freq", *BESIDE_GGUF)
BOTH_WAYS = {"use_bidirectional_attention": "a layer made by hand: its windows look both ways"}

OF_DECODERS = (
    Layout("llama", (PLAIN, GGUF), ROTARY, needs=("rotary",), passed_over=BUFFERS,
           model_types=("llama", "mistral", *config.OF_QWEN2), partial_biases=("qkv",)),
    # Meta's own files, and those of Mistral AI: pairs of columns that stand beside each other.
    Layout("llama_meta", (linears(OF_META, bias=False),),
           {"rotary": config.rotary_of_meta, "window": config.window}, needs=("rotary",),
           rotary_layout="interleaved"),
    Layout("qwen3", ({**PLAIN, **HEAD_NORMS}, {**GGUF, **GGUF_NORMS}), NORMED,
           needs=("rotary", "norm_eps"),
           constants={"norm_offset": 0.0}, passed_over=BUFFERS,
           model_types=("qwen3", "qwen3_vl_text")),
    Layout("gemma2", (PLAIN, GGUF), GEMMA2, needs=("rotary", "scale", "softcap", "window"),
           passed_over=BUFFERS, unsupported=BOTH_WAYS, model_types=("gemma2",), full_every=2),
    Layout("gemma3", ({**PLAIN, **HEAD_NORMS}, {**GGUF, **GGUF_NORMS}), GEMMA3,
           needs=("rotary", "norm_eps", "scale", "window"), constants={"norm_offset": 1.0},
           passed_over=BUFFERS, unsupported=BOTH_WAYS, model_types=("gemma3_text",), full_every=6),
    Layout("olmo2", ({**PLAIN, **WIDTH_NORMS},), NORMED, needs=("rotary", "norm_eps"),
           constants={"norm_offset": 0.0}, passed_over=BUFFERS, model_types=("olmo2",)),
    Layout("qwen3_next", ({**GATED, **HEAD_NORMS},), NORMED, needs=("rotary", "norm_eps"),
           constants={"norm_offset": 1.0}, passed_over=BUFFERS,
           model_types=("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")),
    Layout("gpt_oss", ({**PLAIN, **SINKS},), ROTARY, needs=("rotary", "window"),
           passed_over=BUFFERS, model_types=("gpt_oss",), full_every=2),
)


# Language models with query, key and value in one weight. The axis "3" is where the three stand
# beside each other: outermost in GPT-2 and MPT, within each head in GPT-NeoX and BLOOM.

BY_HEAD = "heads 3 head_dim"
MASKS = ("bias", "masked_bias", "attn_bias")  # buffers: a triangle, and what blocks

OF_FUSED_DECODERS = (
    # GPT-2's Conv1D stores (in, out).
    Layout("gpt2", ({**fused("c_attn", BESIDE, transposed=False),
                     "c_proj.weight": Stored(("W_o",), AXES["W_o"]),
                     "c_proj.bias": Stored(("b_o",), AXES["b_o"])},),
           {"scale": config.scale_of_gpt2}, passed_over=MASKS, model_types=("gpt2",)),
    Layout("gpt_neox", ({**fused("query_key_value", BY_HEAD, bias=None),
                         **linear("o", "dense", bias=None)},),
           {"rotary": config.rotary}, needs=("rotary",),
           passed_over=(*MASKS, "rotary_emb.inv_freq"), model_types=("gpt_neox",)),
    Layout("bloom", ({**fused("query_key_value", BY_HEAD), **linear("o", "dense")},),
           {"alibi": config.alibi}, model_types=("bloom",)),
    Layout("mpt", ({**fused("Wqkv", BESIDE, bias=None), **linear("o", "out_proj", bias=None)},),
           {"alibi": config.alibi_of_mpt, "scale": config.scale_of_mpt},
           unsupported={"attn_config.clip_qkv": "attention by hand: projections are never clipped",
                        "attn_config.qk_ln": "attention by hand: mha's norms subtract no mean",
                        "attn_config.prefix_lm": "mask=, at each call"},
           model_types=("mpt",)),
)


# Encoders, and encoders with decoders.

OF_BART = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
OF_BERT = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
# The other side of a model may be of another width.
CROSS = (("key_dim", "value_dim"), *EQUAL_HEADS)
OF_VIT = {"q": "attention.query", "k": "attention.key", "v": "attention.value"}

OF_ENCODERS = (
    Layout("bert", (linears(OF_BERT),), passed_over=("output.LayerNorm.*",),
           model_types=("bert", "roberta", "xlm-roberta", "camembert"), equal=CROSS),
    Layout("bart", (linears(OF_BART),), model_types=("bart", "mbart"), equal=CROSS),
    Layout("whisper", ({**linears({letter: OF_BART[letter] for letter in "qvo"}),
                        **linear("k", OF_BART["k"], bias=False)},), model_types=("whisper",),
           equal=CROSS),
    # Files have the first names; the modules of transformers 5, whose names changed, the others.
    Layout("vit", ({**linears(OF_VIT, bias=None), **linear("o", "output.dense")},
                   {**linears({letter: NAMES[letter] for letter in "qkv"}, bias=None),
                    **linear("o", NAMES["o"])}),
           model_types=("vit", "deit"), equal=CROSS),
)


LAYOUTS = {layout.name: layout for layout in (
    *OF_FRAMEWORKS, *OF_DECODERS, *OF_FUSED_DECODERS, *OF_ENCODERS, *_t5.LAYOUTS, *_latent.LAYOUTS)}
OF_MODELS = {model: layout for layout in LAYOUTS.values() for model in layout.model_types}
