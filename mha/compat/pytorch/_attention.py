"""What torch.nn.MultiheadAttention and multi_head_attention_forward compute, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import detached_array
from mha._base.dtypes import widened
from mha._functions.heads import merge_heads, split_heads
from mha._functions.linear_projection import linear
from mha._functions.multi_head_attention import multi_head_attention
from mha._functions.options import AttentionKeywords, LayerKeywords
from mha._functions.scaled_dot_product_attention import scaled_dot_product_attention
from mha.compat._shared.dtypes import array_of_kind, as_own, to_compute
from mha.compat._shared.flags import after_dropout, split_dropout
from mha.compat.pytorch._functional import is_bool


@dataclass(eq=False, repr=False)
class Attention:
    """The parameters by PyTorch's names and in its layouts, and the call. The layer owns its
    parameters, the function takes them as arguments."""

    num_heads: int
    embed_dim: int
    kdim: int
    vdim: int
    dropout: float
    add_zero_attn: bool
    batch_first: bool
    training: bool
    dtype: np.dtype[Any]
    in_proj_weight: NDArray[Any] | None
    q_proj_weight: NDArray[Any] | None
    k_proj_weight: NDArray[Any] | None
    v_proj_weight: NDArray[Any] | None
    in_proj_bias: NDArray[Any] | None
    bias_k: NDArray[Any] | None
    bias_v: NDArray[Any] | None
    out_proj: SimpleNamespace  # weight, and bias or None
    _generator: np.random.Generator

    def _forward(self, query: ArrayLike, key: ArrayLike, value: ArrayLike,
                 attn_mask: ArrayLike | None, key_padding_mask: ArrayLike | None,
                 need_weights: bool, average_attn_weights: bool, is_causal: bool,
                 static_k: NDArray[Any] | None = None, static_v: NDArray[Any] | None = None,
                 ) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """`forward`, or with static heads (batch, num_heads, key_len, head_dim) in the place of
        what key or value are projected to."""
        need_weights, is_causal = bool(need_weights), bool(is_causal)
        if is_causal and attn_mask is None:
            raise ValueError("attn_mask: got None with is_causal=True, wanted the causal mask,"
                             " np.triu(np.ones((len, len), bool), 1): is_causal is only a hint"
                             " about it")
        masks = [None if mask is None else widened(detached_array(mask, name)) for mask, name in (
            (attn_mask, "attn_mask"), (key_padding_mask, "key_padding_mask"))]
        fast_path = query is key is value and self._takes_fast_path(np.ndim(query), masks)
        arrays = [to_compute(as_own(array_of_kind(array, name, "iuf", self.dtype), self.dtype))
                  for array, name in ((query, "query"), (key, "key"), (value, "value"))]
        batched = self._check_shapes(*arrays)
        query, key, value = (self._batch_first(array) for array in arrays)
        key_len = key.shape[1] if static_k is None else static_k.shape[2]
        _check_static(key_len, value.shape[1], static_k, static_v)

        hint_is_enough = (is_causal and key_padding_mask is None and not need_weights
                          and not fast_path)
        if hint_is_enough:
            visibility: LayerKeywords = {"causal": True, "query_offset": 0}
        else:
            visibility = self._visibility(masks[0], masks[1], query.shape[:2], key_len,
                                          batched)
        dropout, drops_all = split_dropout(self.dropout if self.training else 0.0)
        seed = int(self._generator.integers(2**64, dtype=np.uint64)) if dropout else 0
        output, *asked_for, lse = self._attend(
            query, key, value, static_k, static_v, need_weights, **visibility, dropout=dropout,
            rng=seed)

        weights = asked_for[0] if need_weights else None
        if weights is not None:
            weights = after_dropout(weights, dropout, seed)
        if drops_all:
            bias = self.out_proj.bias
            output[...] = 0 if bias is None else to_compute(bias)
            if weights is not None:
                weights[...] = 0
        if (weights is not None or fast_path) and key_len:
            empty = lse == -np.inf
            output[empty.any(axis=1)] = np.nan
            if weights is not None:
                weights[empty] = np.nan
        if weights is not None and average_attn_weights:
            weights = weights.mean(axis=1)
        output = as_own(output, self.dtype)
        weights = None if weights is None else as_own(weights, self.dtype)
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.swapaxes(0, 1), weights

    def _attend(self, query: NDArray[Any], key: NDArray[Any], value: NDArray[Any],
                static_k: NDArray[Any] | None, static_v: NDArray[Any] | None,
                need_weights: bool, **options: Unpack[AttentionKeywords]
                ) -> tuple[NDArray[Any], ...]:
        """Output, weights if needed, and lse (batch, num_heads, query_len): the figure; step by
        step where keys are appended or static, which comes after the projections."""
        W_q, W_k, W_v = self._projection_weights()
        biases: Sequence[NDArray[Any] | None] = (
            [None] * 3 if self.in_proj_bias is None
            else np.split(to_compute(self.in_proj_bias), 3))
        b_q, b_k, b_v = biases
        W_o, b_o = to_compute(self.out_proj.weight).T, self.out_proj.bias
        b_o = None if b_o is None else to_compute(b_o)
        if static_k is None and static_v is None and not self._appended_keys:
            return multi_head_attention(
                query, key, value, W_q, W_k, W_v, W_o, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o,
                num_heads=self.num_heads, return_weights=need_weights, return_lse=True, **options)
        heads = [split_heads(linear(query, W_q, b_q), self.num_heads)]
        for array, weight, bias, appended, static in (
                (key, W_k, b_k, self.bias_k, static_k), (value, W_v, b_v, self.bias_v, static_v)):
            if static is None:
                static = split_heads(linear(array, weight, bias), self.num_heads)
            heads.append(self._append(to_compute(static), appended))
        attended, *extra = scaled_dot_product_attention(
            *heads, return_weights=need_weights, return_lse=True, **options)
        return (linear(merge_heads(attended), W_o, b_o), *extra)

    def _projection_weights(self) -> list[NDArray[Any]]:
        """W_q, W_k, W_v as `mha` takes them: (in, out), views of the parameters."""
        if self.in_proj_weight is not None:
            return [weight.T for weight in np.split(to_compute(self.in_proj_weight), 3)]
        apart = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        return [to_compute(weight).T for weight in apart if weight is not None]

    @property
    def _appended_keys(self) -> int:
        return (self.bias_k is not None) + bool(self.add_zero_attn)

    def _append(self, heads: NDArray[Any], bias: NDArray[Any] | None) -> NDArray[Any]:
        """Append bias_k or bias_v, then zeros, to keys or values (batch, heads, key_len, dim)."""
        shape = (*heads.shape[:2], 1, heads.shape[3])
        parts = [heads]
        if bias is not None:
            parts.append(np.broadcast_to(split_heads(to_compute(bias), self.num_heads), shape))
        if self.add_zero_attn:
            parts.append(np.zeros(shape))
        return np.concatenate(parts, axis=2, dtype=heads.dtype)

    def _visibility(self, attn_mask: NDArray[Any] | None, key_padding_mask: NDArray[Any] | None,
                    query_shape: tuple[int, int], key_len: int, batched: bool) -> LayerKeywords:
        """The options mask= and bias= from PyTorch's two masks, appended keys left visible."""
        batch, query_len = query_shape
        over_scores = []
        if attn_mask is not None:
            wanted = ((query_len, key_len), (batch * self.num_heads, query_len, key_len))
            _check_shape(attn_mask, "attn_mask", *wanted)
            heads = (batch, self.num_heads) if attn_mask.ndim == 3 else (1, 1)
            over_scores.append(("attn_mask", attn_mask.reshape(*heads, query_len, key_len)))
        if key_padding_mask is not None:
            _check_shape(key_padding_mask, "key_padding_mask",
                         (batch, key_len) if batched else (key_len,))
            over_scores.append(("key_padding_mask", key_padding_mask.reshape(batch, 1, 1, key_len)))
        mask: NDArray[Any] | None = None
        bias: NDArray[Any] | None = None
        for name, given in over_scores:
            padded = np.pad(given, [(0, 0)] * 3 + [(0, self._appended_keys)])
            if is_bool(padded, name, true_blocks=True):
                mask = ~padded if mask is None else mask & ~padded
            else:
                bias = padded if bias is None else bias + padded
        return {"mask": mask, "bias": bias}

    def _takes_fast_path(self, dimensions: int, masks: list[NDArray[Any] | None]) -> bool:
        return (not self.training and self.batch_first and dimensions == 3
                and self.num_heads % 2 == 0 and self.in_proj_weight is not None
                and self.in_proj_bias is not None and not self._appended_keys
                and not any(mask is not None and mask.dtype.kind == "f" for mask in masks))

    def _check_shapes(self, query: NDArray[Any], key: NDArray[Any], value: NDArray[Any]) -> bool:
        """Whether the input is batched, after checking that the three shapes go together."""
        if query.ndim not in (2, 3):
            raise ValueError(f"query: got shape {query.shape}, wanted 2 dimensions (one sequence)"
                             " or 3")
        batch_axis = (0 if self.batch_first else 1) if query.ndim == 3 else None
        for name, array, width in (("query", query, self.embed_dim), ("key", key, self.kdim),
                                   ("value", value, self.vdim)):
            if array.ndim != query.ndim or array.shape[-1] != width:
                raise ValueError(f"{name}: got shape {array.shape}, wanted {query.ndim} dimensions"
                                 f" as query has, the last of them {width}")
            if batch_axis is not None and array.shape[batch_axis] != query.shape[batch_axis]:
                raise ValueError(f"{name}: got shape {array.shape}, wanted a batch of"
                                 f" {query.shape[batch_axis]} (axis {batch_axis}) as query has")
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(f"value: got shape {value.shape}, wanted key's {key.shape} but for"
                             " the last axis")
        return query.ndim == 3

    def _batch_first(self, array: NDArray[Any]) -> NDArray[Any]:
        """(batch, len, dim), whatever the layout it came in."""
        if array.ndim == 2:
            return array[None]
        return array if self.batch_first else array.swapaxes(0, 1)


def _check_shape(array: NDArray[Any], name: str, *wanted: tuple[int, ...]) -> None:
    if array.shape not in wanted:
        raise ValueError(f"{name}: got shape {array.shape}, wanted"
                         f" {' or '.join(str(shape) for shape in wanted)}")


def _check_static(key_len: int, value_len: int, static_k: NDArray[Any] | None,
                  static_v: NDArray[Any] | None) -> None:
    """As many values as keys, where either is static: the ValueError names one that is."""
    if static_v is not None and static_v.shape[2] != key_len:
        beside = "key" if static_k is None else "static_k"
        raise ValueError(f"static_v: got length {static_v.shape[2]}, wanted {key_len} as {beside}"
                         " has")
    if static_v is None and key_len != value_len:
        raise ValueError(f"static_k: got length {key_len}, wanted {value_len} as value has")
