"""Language models whose query, key and value are apart, as the transformers package names them."""

from __future__ import annotations

from mha.parameters import config
from mha.parameters.table import Form, Layout, Stored, linears

NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
OF_META = {"q": "wq", "k": "wk", "v": "wv", "o": "wo"}
PLAIN: Form = linears(NAMES, bias=None)
HEAD_NORMS: Form = {"q_norm.weight": Stored(("q_norm",), ("head_dim",)),
                    "k_norm.weight": Stored(("k_norm",), ("head_dim",))}
WIDTH_NORMS: Form = {"q_norm.weight": Stored(("q_norm",), ("heads head_dim",)),
                     "k_norm.weight": Stored(("k_norm",), ("kv_heads head_dim",))}
SINKS: Form = {"sinks": Stored(("sinks",), ("heads",))}

ROTARY = {"rotary": config.rotary, "window": config.window}
NORMED = {**ROTARY, "norm_eps": config.norm_eps}
GEMMA3 = {**NORMED, "scale": config.scale_of_scalar}
GEMMA2 = {**ROTARY, "scale": config.scale_of_scalar, "softcap": config.softcap}
BUFFERS = ("rotary_emb.inv_freq",)
BOTH_WAYS = {"use_bidirectional_attention": "a layer made by hand: its windows look both ways"}

LAYOUTS = (
    Layout("llama", (PLAIN,), ROTARY, needs=("rotary",), passed_over=BUFFERS,
           model_types=("llama", "mistral", "qwen2"), partial_biases=("qkv",)),
    # Meta's own files, and those of Mistral AI: pairs of columns that stand beside each other.
    Layout("llama_meta", (linears(OF_META, bias=False),),
           {"rotary": config.rotary_of_meta, "window": config.window}, needs=("rotary",),
           rotary_layout="interleaved"),
    Layout("qwen3", ({**PLAIN, **HEAD_NORMS},), NORMED, needs=("rotary", "norm_eps"),
           constants={"norm_offset": 0.0}, passed_over=BUFFERS, model_types=("qwen3",)),
    Layout("gemma2", (PLAIN,), GEMMA2, needs=("rotary", "scale", "softcap", "window"),
           passed_over=BUFFERS, unsupported=BOTH_WAYS, model_types=("gemma2",), full_every=2),
    Layout("gemma3", ({**PLAIN, **HEAD_NORMS},), GEMMA3,
           needs=("rotary", "norm_eps", "scale", "window"), constants={"norm_offset": 1.0},
           passed_over=BUFFERS, unsupported=BOTH_WAYS, model_types=("gemma3_text",), full_every=6),
    Layout("olmo2", ({**PLAIN, **WIDTH_NORMS},), NORMED, needs=("rotary", "norm_eps"),
           constants={"norm_offset": 0.0}, passed_over=BUFFERS, model_types=("olmo2",)),
    Layout("gpt_oss", ({**PLAIN, **SINKS},), ROTARY, needs=("rotary", "window"),
           passed_over=BUFFERS, model_types=("gpt_oss",), full_every=2),
)
