"""The layouts of language models whose query, key and value are apart, and of what is built alike.

A layout is a form, of names, with the options that its models' configs decide. Whether a layer is
causal is an option of each call, so encoders are here too.
"""

from __future__ import annotations

from mha.parameters import _config as config
from mha.parameters._table import Form, Layout, Stored, linears

NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
OF_META = {"q": "wq", "k": "wk", "v": "wv", "o": "wo"}
PLAIN: Form = linears(NAMES, bias=None)
# Each head's gate stands behind its query.
GATED: Form = {**linears({letter: NAMES[letter] for letter in "kvo"}, bias=None),
               "q_proj.weight": Stored(("W_q", "W_g"), ("heads 2 head_dim", "query_dim")),
               "q_proj.bias": Stored(("b_q", "b_g"), ("heads 2 head_dim",), optional=True)}
# The gate is a projection of its own.
GATE: Form = {"gate_proj.weight": Stored(("W_g",), ("heads value_head_dim", "query_dim"))}
GATE_BIAS: Form = {"gate_proj.bias": Stored(("b_g",), ("heads value_head_dim",), optional=True)}
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
LFM2_NORMS: Form = {"q_layernorm.weight": Stored(("q_norm",), ("head_dim",)),
                    "k_layernorm.weight": Stored(("k_norm",), ("head_dim",))}
SINKS: Form = {"sinks": Stored(("sinks",), ("heads",))}
PHI: Form = linears({**NAMES, "o": "dense"}, bias=None)
LFM2: Form = {**linears({**NAMES, "o": "out_proj"}, bias=None), **LFM2_NORMS}
MODERNBERT: Form = linears({**NAMES, "o": "Wo"}, bias=None)

ROTARY = {"rotary": config.rotary, "window": config.window}
NORMED = {**ROTARY, "norm_eps": config.norm_eps}
GEMMA3 = {**NORMED, "scale": config.scale_of_scalar}
GEMMA2 = {**ROTARY, "scale": config.scale_of_scalar, "softcap": config.softcap}
GRANITE = {**ROTARY, "scale": config.scale_of_multiplier}
SLIDING = {**ROTARY, "rotary": config.rotary_of_sliding}  # layers that see all do not rotate
BUFFERS = ("rotary_emb.inv_freq", *BESIDE_GGUF)
BOTH_WAYS = {"use_bidirectional_attention": "a layer made by hand: its windows look both ways"}
NO_MEAN = "attention by hand: mha's norms subtract no mean"
CLIPPED = {"clip_qkv": "attention by hand: projections are never clipped"}
LAYER_NORMS = {f"{letter}_{norm}": NO_MEAN for letter in "qk"
               for norm in ("norm.weight", "norm.bias", "layernorm.weight", "layernorm.bias",
                            "layernorm.norms.*")}
OF_QKV = {"attention_bias": "qkv", "qkv_bias": "qkv", "use_qkv_bias": "qkv"}

LLAMA = Layout(
    "llama", (PLAIN, GGUF), ROTARY, needs=("rotary",), passed_over=BUFFERS,
    unsupported={**CLIPPED, **BOTH_WAYS, "qk_layernorm": NO_MEAN}, partial_biases=("qkv",),
    biases={**OF_QKV, "attention_bias": "qkvo", "use_bias": "qkvo"},
    model_types=(
        "llama", "mistral", *config.OF_QWEN2, "arcee", "aria_text", "bamba", "csm",
        "csm_depth_decoder_model", "cwm", "emu3_text_model", "eurobert", "gemma",
        "gradium_phonon_tts", "gte", "higgs_audio_v2", "jais2", "jina_embeddings_v3",
        "lasr_encoder", "mimi_encoder", "ministral", "mixtral", "mllama_text_model", "nemotron",
        "nomic_bert", "olmo", "paddleocr_vl_text", "phimoe", "pocket_tts",
        "pocket_tts_audio_tokenizer_encoder", "qwen2_5_omni_text", "qwen2_moe", "seed_oss",
        "stablelm", "starcoder2"))
QWEN3 = Layout(
    "qwen3", ({**PLAIN, **HEAD_NORMS}, {**GGUF, **GGUF_NORMS}), NORMED,
    needs=("rotary", "norm_eps"), constants={"norm_offset": 0.0}, passed_over=BUFFERS,
    model_types=(
        "qwen3", "apertus", "dots1", "hy_v3", "mellum", "qwen3_moe", "qwen3_vl_moe_text",
        "qwen3_vl_text"))
GPT_OSS = Layout("gpt_oss", ({**PLAIN, **SINKS},), ROTARY, needs=("rotary", "window"),
                 passed_over=BUFFERS, model_types=("gpt_oss",), full_every=2)

LAYOUTS = (
    LLAMA,
    # Meta's own files, and those of Mistral AI: pairs of columns that stand beside each other.
    Layout("llama_meta", (linears(OF_META, bias=False),),
           {"rotary": config.rotary_of_meta, "window": config.window}, needs=("rotary",),
           rotary_layout="interleaved"),
    LLAMA._replace(name="cohere", forms=(PLAIN,), rotary_layout="interleaved",
                   unsupported={**CLIPPED, **LAYER_NORMS},
                   model_types=(
                       "cohere", "blt_global_transformer", "blt_patcher", "ernie4_5",
                       "ernie4_5_moe")),
    LLAMA._replace(name="glm", forms=(PLAIN,), rotary_layout="interleaved", biases=OF_QKV,
                   model_types=("glm", "glm4", "glm4v_text", "glm_ocr_text", "helium")),
    LLAMA._replace(name="solar_open", forms=(PLAIN,), biases=OF_QKV, model_types=("solar_open",)),
    LLAMA._replace(name="minimax", forms=(PLAIN,), model_types=("minimax",), unsupported={
        **LLAMA.unsupported, "sliding_window": "window=, since all layers have it"}),
    LLAMA._replace(name="recurrent_gemma", forms=(PLAIN,), partial_biases=("o", "qkv", "qvo"),
                   biases={"attention_bias": "o"},
                   model_types=(
                       "recurrent_gemma", "glmasr_encoder", "voxtral_realtime_encoder")),
    LLAMA._replace(name="cohere2", forms=(PLAIN,), settings=SLIDING, needs=("rotary", "window"),
                   rotary_layout="interleaved", full_every=4, model_types=("cohere2",)),
    LLAMA._replace(name="smollm3", forms=(PLAIN,),
                   settings={**ROTARY, "rotary": config.rotary_of_some},
                   model_types=("smollm3",)),
    LLAMA._replace(name="granite", forms=(PLAIN,), settings=GRANITE, needs=("rotary", "scale"),
                   model_types=(
                       "granite", "granite4_vision_text", "granite_docling_text", "granitemoe",
                       "granitemoeshared", "hyperclovax")),
    LLAMA._replace(name="falcon_h1", forms=(PLAIN,), needs=("rotary", "scale"),
                   settings={**ROTARY, "scale": config.scale_of_keys},
                   model_types=("falcon_h1",)),
    LLAMA._replace(name="dia", forms=(PLAIN,), constants={"scale": 1.0},
                   model_types=("dia_encoder",)),
    LLAMA._replace(name="phi", forms=(PHI,), unsupported={"qk_layernorm": NO_MEAN, **LAYER_NORMS},
                   model_types=("phi",)),
    LLAMA._replace(name="modernbert-decoder", forms=(MODERNBERT,), needs=("rotary", "window"),
                   settings={"rotary": config.rotary_by_type, "window": config.window_of_half},
                   model_types=("modernbert-decoder",)),
    QWEN3,
    QWEN3._replace(name="molmo2", forms=({**PLAIN, **HEAD_NORMS},), partial_biases=("qkv",),
                   biases=OF_QKV, model_types=("molmo2_text",)),
    LLAMA._replace(name="glm4_moe", forms=(PLAIN, {**PLAIN, **HEAD_NORMS}), settings=NORMED,
                   needs=("rotary", "norm_eps"), constants={"norm_offset": 0.0}, biases=OF_QKV,
                   model_types=("glm4_moe", "glm4v_moe_text", "glm_image_text")),
    QWEN3._replace(name="exaone4", forms=({**PLAIN, **HEAD_NORMS},),
                   settings={**NORMED, "rotary": config.rotary_of_exaone4},
                   needs=("rotary", "norm_eps", "window"),
                   model_types=("exaone4", "exaone_moe")),
    QWEN3._replace(name="kolibri1", forms=({**PLAIN, **HEAD_NORMS},),
                   settings={**NORMED, "rotary": config.rotary_of_sliding},
                   needs=("rotary", "norm_eps", "window"), model_types=("kolibri1",)),
    QWEN3._replace(name="lfm2", forms=(LFM2,), model_types=("lfm2", "lfm2_moe")),
    QWEN3._replace(name="olmo2", forms=({**PLAIN, **WIDTH_NORMS},), unsupported=CLIPPED,
                   model_types=(
                       "olmo2", "flex_olmo", "minimax_m2", "olmo3", "olmo_hybrid", "olmoe")),
    Layout("gemma2", (PLAIN, GGUF), GEMMA2, needs=("rotary", "scale", "softcap", "window"),
           passed_over=BUFFERS, unsupported=BOTH_WAYS, model_types=("gemma2", "vaultgemma"),
           full_every=2),
    Layout("gemma3", ({**PLAIN, **HEAD_NORMS}, {**GGUF, **GGUF_NORMS}), GEMMA3,
           needs=("rotary", "norm_eps", "scale", "window"), constants={"norm_offset": 1.0},
           passed_over=BUFFERS, unsupported=BOTH_WAYS, model_types=("gemma3_text",), full_every=6),
    QWEN3._replace(name="qwen3_next", forms=({**GATED, **HEAD_NORMS},),
                   constants={"norm_offset": 1.0},
                   model_types=("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")),
    QWEN3._replace(name="afmoe", forms=({**PLAIN, **HEAD_NORMS, **GATE},),
                   settings={**NORMED, "rotary": config.rotary_of_sliding},
                   needs=("rotary", "norm_eps", "window"), model_types=("afmoe",)),
    LLAMA._replace(name="hrm_text", forms=({**PLAIN, **GATE, **GATE_BIAS},),
                   model_types=("hrm_text",)),
    GPT_OSS,
    GPT_OSS._replace(name="granite_swa", settings=GRANITE, needs=("rotary", "scale", "window"),
                     model_types=("granite_swa", "granitemoe_swa")),
    QWEN3._replace(name="flint", forms=({**PLAIN, **HEAD_NORMS, **SINKS},),
                   settings={**NORMED, "rotary": config.rotary_of_sliding},
                   needs=("rotary", "norm_eps", "window"), model_types=("flint",)),
)
