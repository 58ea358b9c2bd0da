"""The layouts of latent attention: DeepSeek-V2 and -V3, as the transformers package names them.

kv_b_proj has a head's key, the columns that do not rotate, and its value beside each other. While a
layer is read or written the two are one parameter, W_ukv (kv_rank, heads * kv_dim).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mha._base.arguments import as_size
from mha._base.pieces import copied
from mha._functions.quantised_array import QuantisedArray
from mha._functions.rotary import Rotary
from mha._functions.rotary_scaling import latent_scale
from mha.parameters._table import Context, Form, Layout, Stored, linear

Array = NDArray[Any]


def rotary(context: Context) -> Rotary:
    rope_dim = context.sizes["latent_dim"] - context.sizes["kv_rank"]
    is_half = context.config.get("rope_interleave") is False
    return Rotary.from_config(context.config, rope_dim,
                              layout="half" if is_half else context.rotary_layout)


def scale(context: Context) -> float | None:
    return latent_scale(context.config, context.sizes["head_dim"])


OF_KEYS: Form = {**linear("dkv", "kv_a_proj_with_mqa", bias=None),
                 "kv_a_layernorm.weight": Stored(("kv_norm",), ("kv_rank",)),
                 **linear("ukv", "kv_b_proj", bias=False), **linear("o", "o_proj", bias=None)}
FORMS: tuple[Form, ...] = (
    {**linear("dq", "q_a_proj", bias=None),
     "q_a_layernorm.weight": Stored(("q_norm",), ("query_rank",)),
     **linear("uq", "q_b_proj", bias=False), **OF_KEYS},
    {**linear("q", "q_proj", bias=False), **OF_KEYS})

LAYOUTS = tuple(
    Layout(name, FORMS, {"rotary": rotary, "scale": scale}, needs=("rotary",),
           constants={"norm_eps": 1e-6},  # of latents, whatever rms_norm_eps is
           passed_over=("rotary_emb.inv_freq",), model_types=(name,),
           rotary_layout="interleaved", equal=(("query_dim", "output_dim"),), latent=True)
    for name in ("deepseek_v2", "deepseek_v3"))

SIZES = {"heads": "num_attention_heads", "query_rank": "q_lora_rank", "kv_rank": "kv_lora_rank",
         "nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim",
         "value_head_dim": "v_head_dim"}


def sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Those that a config has, by the names of axes, too."""
    return _with_sums({size: as_size(config[name], f"config {name!r}")
                       for size, name in SIZES.items() if config.get(name) is not None})


def contradictions(config: Mapping[str, Any], form: Form) -> list[str]:
    """Where the config says that queries have a latent of their own and the arrays do not, or the
    other way round."""
    is_there, given = "q_a_proj.weight" in form, config.get("q_lora_rank", ...)
    if given is ... or is_there == (given is not None):
        return []
    return [f"config 'q_lora_rank': got {given}, wanted"
            + (" the width of q_a_proj.weight" if is_there else " None, as q_proj.weight is there")]


def sizes_of(settings: Any) -> dict[str, int]:
    """The same of a layer's settings."""
    own = {name: getattr(settings, name) for name in (
        "query_rank", "kv_rank", "nope_dim", "rope_dim", "value_head_dim")
        if getattr(settings, name) is not None}
    return _with_sums({**own, "heads": settings.num_heads, "query_dim": settings.embed_dim,
                       "output_dim": settings.embed_dim})


def _with_sums(known: dict[str, int]) -> dict[str, int]:
    sums = {"head_dim": ("nope_dim", "rope_dim"), "kv_dim": ("nope_dim", "value_head_dim"),
            "latent_dim": ("kv_rank", "rope_dim")}
    return known | {size: known[one] + known[other] for size, (one, other) in sums.items()
                    if one in known and other in known}


def apart(parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """With W_uk and W_uv in the place of W_ukv."""
    others = dict(parameters)
    both = others.pop("W_ukv")
    numbers = both.unpack() if isinstance(both, QuantisedArray) else both
    nope_dim = sizes["kv_dim"] - sizes["value_head_dim"]
    if not 0 < nope_dim < sizes["head_dim"]:
        raise ValueError(f"kv_b_proj.weight: got {sizes['kv_dim']} rows a head beside values of"
                         f" {sizes['value_head_dim']} columns and queries of {sizes['head_dim']},"
                         " wanted those of keys that do not rotate, and of the value")
    if sizes["latent_dim"] != sizes["kv_rank"] + sizes["head_dim"] - nope_dim:
        raise ValueError(f"kv_a_proj_with_mqa.weight: got {sizes['latent_dim']} rows, wanted"
                         f" kv_rank {sizes['kv_rank']} and {sizes['head_dim'] - nope_dim}, the"
                         " columns of queries that rotate")
    by_head = numbers.reshape(sizes["kv_rank"], sizes["heads"], sizes["kv_dim"])
    for name, part in (("W_uk", by_head[..., :nope_dim]), ("W_uv", by_head[..., nope_dim:])):
        others[name] = copied(part, order="C").reshape(sizes["kv_rank"], -1)
    return others


def together(parameters: Mapping[str, Array], sizes: Mapping[str, int]) -> dict[str, Array]:
    """The other way."""
    others = dict(parameters)
    parts = [others.pop(name).reshape(sizes["kv_rank"], sizes["heads"], -1)
             for name in ("W_uk", "W_uv")]
    return {**others, "W_ukv": np.concatenate(parts, axis=-1).reshape(sizes["kv_rank"], -1)}


def settings(parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The constructor's sizes."""
    rope_dim = sizes["latent_dim"] - sizes["kv_rank"]
    return {"embed_dim": sizes["query_dim"], "num_heads": sizes["heads"],
            "query_rank": sizes["query_rank"] if "W_dq" in parameters else None,
            "kv_rank": sizes["kv_rank"], "nope_dim": sizes["head_dim"] - rope_dim,
            "rope_dim": rope_dim, "value_head_dim": sizes["value_head_dim"],
            "use_bias": "b_o" in parameters, "scale": None}
