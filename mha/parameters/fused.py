"""Language models with query, key and value in one weight, as the transformers package names them.

The axis "3" is where the three stand beside each other: outermost in GPT-2 and MPT, within each
head in GPT-NeoX and BLOOM.
"""

from __future__ import annotations

from mha.parameters import config
from mha.parameters.table import AXES, BESIDE, Layout, Stored, fused, linear

BY_HEAD = "heads 3 head_dim"
MASKS = ("bias", "masked_bias", "attn_bias")  # buffers: a triangle, and what blocks

LAYOUTS = (
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
