"""Multi-head attention in plain NumPy: the text to learn from, and the oracle of the tests.

_forward.py is the figure, top-down, and every box of it a function; _backward.py has their
gradients, the same names with _vjp; _prepared_heads.py has what may stand between projections and
attention, there and back; _latent.py has latent attention; _varlen.py has ragged batches; _steps.py
shows the intermediates of a layer. The functions have the names, arguments and meanings of those of
`mha`, which do the same work in C.
"""

from mha.reference._backward import (
    additive_attention_vjp,
    linear_vjp,
    multi_head_attention_vjp,
    scaled_dot_product_attention_backward,
    scaled_dot_product_attention_vjp,
)
from mha.reference._forward import (
    additive_attention,
    dot_product_scores,
    dropout_mask,
    linear,
    mask_scores,
    merge_attention,
    merge_heads,
    multi_head_attention,
    scaled_dot_product_attention,
    softmax,
    split_heads,
    unmasked_attention,
    visible_pairs,
)
from mha.reference._latent import multi_head_latent_attention
from mha.reference._prepared_heads import rms_norm, rms_norm_vjp, rotary, rotary_vjp
from mha.reference._steps import STEPS, steps
from mha.reference._varlen import (
    scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_vjp,
)

__all__ = [
    "STEPS",
    "additive_attention",
    "additive_attention_vjp",
    "dot_product_scores",
    "dropout_mask",
    "linear",
    "linear_vjp",
    "mask_scores",
    "merge_attention",
    "merge_heads",
    "multi_head_attention",
    "multi_head_attention_vjp",
    "multi_head_latent_attention",
    "rms_norm",
    "rms_norm_vjp",
    "rotary",
    "rotary_vjp",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_backward",
    "scaled_dot_product_attention_varlen",
    "scaled_dot_product_attention_varlen_vjp",
    "scaled_dot_product_attention_vjp",
    "softmax",
    "split_heads",
    "steps",
    "unmasked_attention",
    "visible_pairs",
]


def __dir__() -> list[str]:
    return sorted(__all__)
