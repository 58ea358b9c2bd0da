"""The layouts of models that have query, key and value in one weight.

The axis "3" is where the three stand beside each other: outermost in GPT-2 and MPT, within each
head in GPT-NeoX and BLOOM. Where key and value have fewer heads, these stand behind the query's, in
Phi-3, or behind those of the query that share them, in Falcon.
"""

from __future__ import annotations

from mha.parameters import _config as config
from mha.parameters._table import (
    AXES,
    BESIDE,
    BESIDE_FEWER,
    BY_GROUP,
    Form,
    Layout,
    Stored,
    fused,
    linear,
)

BY_HEAD = "heads 3 head_dim"
MASKS = ("bias", "masked_bias", "attn_bias")  # buffers: a triangle, and what blocks
ROTARY = {"rotary": config.rotary, "window": config.window}


def of_two(name: str, output: str, columns: str = BESIDE, bias: bool | None = None) -> Form:
    """All three, and the output, as PyTorch's Linear keeps them."""
    return {**fused(name, columns, bias=bias), **linear("o", output, bias=bias)}


LAYOUTS = (
    # GPT-2's Conv1D stores (in, out).
    Layout("gpt2", ({**fused("c_attn", BESIDE, transposed=False),
                     "c_proj.weight": Stored(("W_o",), AXES["W_o"]),
                     "c_proj.bias": Stored(("b_o",), AXES["b_o"])},),
           {"scale": config.scale_of_gpt2}, passed_over=MASKS,
           model_types=("gpt2", "decision_transformer", "imagegpt", "openai-gpt")),
    Layout("gpt_bigcode", (of_two("c_attn", "c_proj", BY_GROUP, bias=True),),
           {"scale": config.scale_of_gpt2}, passed_over=MASKS, model_types=("gpt_bigcode",)),
    Layout("gpt_neox", (of_two("query_key_value", "dense", BY_HEAD),),
           {"rotary": config.rotary}, needs=("rotary",),
           passed_over=(*MASKS, "rotary_emb.inv_freq"), model_types=("gpt_neox",)),
    Layout("falcon", (of_two("query_key_value", "dense", BY_GROUP),), ROTARY, needs=("rotary",),
           passed_over=("rotary_emb.inv_freq",),
           unsupported={"alibi": "alibi=mha.alibi_slopes(heads) / sqrt(head_dim), whose biases"
                                 " Falcon rounds to bfloat16"},
           model_types=("falcon",)),
    Layout("phi3", (of_two("qkv_proj", "o_proj", BESIDE_FEWER),), ROTARY, needs=("rotary",),
           passed_over=("rotary_emb.inv_freq",), model_types=("phi3", "phi4_multimodal")),
    Layout("bloom", (of_two("query_key_value", "dense", BY_HEAD, bias=True),),
           {"alibi": config.alibi}, model_types=("bloom",)),
    Layout("mpt", (of_two("Wqkv", "out_proj"),),
           {"alibi": config.alibi_of_mpt, "scale": config.scale_of_mpt},
           unsupported={"attn_config.clip_qkv": "attention by hand: projections are never clipped",
                        "attn_config.qk_ln": "attention by hand: mha's norms subtract no mean",
                        "attn_config.prefix_lm": "mask=, at each call"},
           model_types=("mpt",)),
    Layout("modernbert", (of_two("Wqkv", "Wo"),),
           {"rotary": config.rotary_by_type, "window": config.window_both_ways},
           needs=("rotary", "window"), model_types=("modernbert",)),
    Layout("blip", (of_two("qkv", "projection"),), partial_biases=("o",),
           model_types=(
               "blip_vision_model", "blip_2_vision_model", "instructblip_vision_model",
               "instructblipvideo_vision_model", "pp_ocrv5_server_rec")),
    Layout("mgp-str", (of_two("qkv", "proj"),), partial_biases=("o",), model_types=("mgp-str",)),
    Layout("timesformer", (of_two("attention.qkv", "output.dense"),), partial_biases=("o",),
           model_types=("timesformer",)),
)
