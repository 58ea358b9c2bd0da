"""Multi-head latent attention in plain NumPy (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

`multi_head_latent_attention` is the text of `mha.MultiHeadLatentAttention`, top-down. Complex
numbers go through, so that derivatives can be taken by complex steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._functions.rotary import Rotary
from mha.reference._forward import (
    _batch_of_one,
    _cast,
    _returned,
    linear,
    merge_heads,
    scaled_dot_product_attention,
    split_heads,
)
from mha.reference._prepared_heads import rms_norm, rotary

Array = NDArray[Any]


def multi_head_latent_attention(
        query: ArrayLike, key: ArrayLike | None = None, *, W_q: ArrayLike | None = None,
        W_dq: ArrayLike | None = None, q_norm: ArrayLike | None = None,
        W_uq: ArrayLike | None = None, W_dkv: ArrayLike, kv_norm: ArrayLike, W_uk: ArrayLike,
        W_uv: ArrayLike, W_o: ArrayLike, b_dq: ArrayLike | None = None,
        b_dkv: ArrayLike | None = None, b_o: ArrayLike | None = None, num_heads: int,
        rotary: Rotary | None = None, norm_eps: float = 1e-6, scale: float | None = None,
        head_gate: ArrayLike | None = None, positions: ArrayLike | None = None,
        key_positions: ArrayLike | None = None, absorbed: bool = False,
        return_weights: bool = False, return_lse: bool = False, **options: Any) -> Any:
    """query (batch, query_len, embed_dim), key (batch, key_len, embed_dim) -> output (batch,
    query_len, embed_dim); then weights (batch, heads, query_len, key_len) and lse (batch, heads,
    query_len) where asked for. Parameters as those of the layer.
    """
    if key is None:
        key, key_positions = query, positions if key_positions is None else key_positions
    is_one = np.ndim(query) == 2  # one sequence: a batch of one, and back
    if is_one:
        query, key = map(_batch_of_one, (query, key))
        options["key_lengths"] = _batch_of_one(options.get("key_lengths"))
    kv_rank = np.shape(kv_norm)[0]
    nope_dim = np.shape(W_uk)[1] // num_heads

    # 1. Queries, straight or by a latent of their own: (batch, heads, query_len, nope + rope).
    if W_dq is None or q_norm is None or W_uq is None:
        assert W_q is not None, "wanted W_q, or W_dq, q_norm and W_uq"
        projected = linear(query, W_q)
    else:
        projected = linear(rms_norm(linear(query, W_dq, b_dq), q_norm, norm_eps), W_uq)
    query_heads = split_heads(projected, num_heads)
    query_nope = query_heads[..., :nope_dim]
    query_rope = _rotated(query_heads[..., nope_dim:], rotary, positions)

    # 2. The latent (batch, key_len, kv_rank), and columns that rotate (batch, key_len, rope_dim),
    #    the same ones for all heads. These two are what an absorbed cache holds.
    compressed = linear(key, W_dkv, b_dkv)
    latent = rms_norm(compressed[..., :kv_rank], kv_norm, norm_eps)
    key_rope = _rotated(compressed[..., kv_rank:], rotary, key_positions)
    if scale is None:
        scale = 1 / np.sqrt(query_heads.shape[-1])

    # 3. Attention of every head: over its own keys and values, or over the latents themselves.
    if absorbed:
        absorbing = split_heads(W_uk, num_heads).swapaxes(1, 2)  # (heads, nope_dim, kv_rank)
        query_heads = _beside(query_nope @ _cast(absorbing, query_nope.dtype), query_rope)
        key_heads = _beside(latent, key_rope)[:, None]
        value_heads = latent[:, None]
    else:
        query_heads = _beside(query_nope, query_rope)
        key_nope = split_heads(linear(latent, W_uk), num_heads)
        key_heads = _beside(key_nope, np.broadcast_to(
            key_rope[:, None], (*key_nope.shape[:3], key_rope.shape[-1])))
        value_heads = split_heads(linear(latent, W_uv), num_heads)
    attended, weights, lse = scaled_dot_product_attention(
        query_heads, key_heads, value_heads, scale=scale, return_weights=True, return_lse=True,
        **options)
    if absorbed:
        attended = attended @ _cast(split_heads(W_uv, num_heads), attended.dtype)
    if head_gate is not None:
        attended = attended * _cast(head_gate, attended.dtype)[:, None, None]

    # 4. Merge heads, and the output projection.
    output = linear(merge_heads(attended), W_o, b_o)
    return _returned(output, weights, lse, return_weights, return_lse, is_one)


def _rotated(x: Array, rotary_: Rotary | None, positions: ArrayLike | None) -> Array:
    return x if rotary_ is None else rotary(x, rotary_, positions)


def _beside(one: Array, other: Array) -> Array:
    return np.concatenate([one, other], axis=-1)
