"""The book's layers but for their calls, which each form's module adds: where training is said,
and what is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_size
from mha._functions.additive_attention import additive_attention
from mha._functions.heads import merge_heads, split_heads
from mha._functions.options import AdditiveKeywords, RandomSource
from mha._functions.scaled_dot_product_attention import scaled_dot_product_attention
from mha.compat._shared.flags import as_dropout, split_dropout
from mha.compat._shared.layers import Linear, as_numbers, checked_heads
from mha.compat.d2l._helpers import check_three_axes, key_lengths

HeadsAndLengths = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[np.int64] | None]


class ScoredAttention:
    """What dot-product and additive attention share: dropout, and the weights of the last call.

    attention_weights (batch, num_queries, num_keys), before dropout; None before the first call.
    """

    def __init__(self, dropout: float, rng: RandomSource = None) -> None:
        self.dropout = as_dropout(dropout)
        self.attention_weights: NDArray[Any] | Any = None  # Any for None, as in Linear.kernel
        self._rng = np.random.default_rng(rng)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dropout={self.dropout})"

    def _options(self, queries: NDArray[Any], keys: NDArray[Any], values: NDArray[Any],
                 valid_lens: ArrayLike | None, training: bool | None) -> AdditiveKeywords:
        """The options of one call of `mha`, with the shapes checked under the book's names."""
        for array, name in ((queries, "queries"), (keys, "keys"), (values, "values")):
            check_three_axes(array, name)
        batch, num_queries, _ = queries.shape
        return {"key_lengths": key_lengths(valid_lens, batch, num_queries, keys.shape[1]),
                "empty_rows": "uniform",
                "dropout": split_dropout(self.dropout)[0] if training else 0.0, "rng": self._rng}

    def _remember(self, attended: tuple[NDArray[Any], NDArray[Any]],
                  training: bool | None) -> NDArray[Any]:
        """The output of (output, weights), zeros where all is dropped; the weights are kept."""
        output, self.attention_weights = attended
        if training and split_dropout(self.dropout)[1]:
            output[...] = 0
        return output


class DotProductAttention(ScoredAttention):
    """softmax(queries keys^T / sqrt(d)) values over the valid keys."""

    def _attend(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
                valid_lens: ArrayLike | None, training: bool | None) -> NDArray[Any]:
        """(batch, num_queries, d), (batch, num_keys, d), (batch, num_keys, v) -> (..., v)."""
        arrays = (as_numbers(queries, "queries"), as_numbers(keys, "keys"),
                  as_numbers(values, "values"))
        options = self._options(*arrays, valid_lens, training)
        return self._remember(scaled_dot_product_attention(
            *arrays, return_weights=True, **options), training)


class AdditiveAttention(ScoredAttention):
    """Attention with the scores w_v . tanh(queries W_q + keys W_k) over the valid keys.

    W_q, W_k and w_v are Linear, sized at the first call; w_v.weight is (1, num_hiddens).
    """

    def __init__(self, num_hiddens: int, dropout: float, rng: RandomSource = None) -> None:
        super().__init__(dropout, rng)
        num_hiddens = as_size(num_hiddens, "num_hiddens")
        self.W_k = Linear(num_hiddens, rng=self._rng)
        self.W_q = Linear(num_hiddens, rng=self._rng)
        self.w_v = Linear(1, rng=self._rng)

    def __repr__(self) -> str:
        return f"AdditiveAttention(num_hiddens={self.W_q.out_features}, dropout={self.dropout})"

    def _attend(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
                valid_lens: ArrayLike | None, training: bool | None) -> NDArray[Any]:
        """(batch, num_queries, q), (batch, num_keys, k), (batch, num_keys, v) -> (..., v)."""
        arrays = (as_numbers(queries, "queries"), as_numbers(keys, "keys"),
                  as_numbers(values, "values"))
        options = self._options(*arrays, valid_lens, training)
        W_q, W_k = self.W_q.sized_for(arrays[0]), self.W_k.sized_for(arrays[1])
        w_v = self.w_v.sized_for(W_k)[:, 0]
        return self._remember(additive_attention(
            *arrays, W_q, W_k, w_v, return_weights=True, **options), training)


class MultiHeadAttention:
    """The book's layer but for its call: four Linear around a replaceable `attention`.

    W_q, W_k, W_v, W_o : Linear, sized at the first call; weight (num_hiddens, in) or kernel
        (in, num_hiddens), and bias (num_hiddens,) or None, may be set at any time.
    attention : called with (batch * num_heads, length, num_hiddens / num_heads) and the lengths of
        every head; its `attention_weights` are (batch * num_heads, num_queries, num_keys).
    """

    _linear: type[Linear] = Linear

    def __init__(self, num_hiddens: int, num_heads: int, bias: bool,
                 attention: Callable[..., Any], rng: np.random.Generator) -> None:
        self.num_heads, self.num_hiddens = checked_heads(num_heads, num_hiddens, "num_hiddens")
        self.attention = attention
        self.W_q = self._linear(self.num_hiddens, bias=bias, rng=rng)
        self.W_k = self._linear(self.num_hiddens, bias=bias, rng=rng)
        self.W_v = self._linear(self.num_hiddens, bias=bias, rng=rng)
        self.W_o = self._linear(self.num_hiddens, bias=bias, rng=rng)

    def __repr__(self) -> str:
        return (f"MultiHeadAttention(num_hiddens={self.num_hiddens}, num_heads={self.num_heads},"
                f" bias={self.W_o.bias is not None}, attention={self.attention!r})")

    def transpose_qkv(self, X: ArrayLike) -> NDArray[Any]:
        """(batch, length, num_hiddens) -> (batch * num_heads, length, num_hiddens / num_heads)."""
        X = as_numbers(X, "X")
        check_three_axes(X, "X")
        heads = split_heads(X, self.num_heads)  # (batch, num_heads, length, d)
        return heads.reshape(X.shape[0] * self.num_heads, *heads.shape[2:])

    def transpose_output(self, X: ArrayLike) -> NDArray[Any]:
        """(batch * num_heads, length, d) -> (batch, length, num_heads * d)."""
        X = as_numbers(X, "X")
        check_three_axes(X, "X")
        if X.shape[0] % self.num_heads:
            raise ValueError(f"X: got shape {X.shape}, wanted a multiple of num_heads"
                             f" ({self.num_heads}) items")
        heads = X.reshape(X.shape[0] // self.num_heads, self.num_heads, *X.shape[1:])
        return merge_heads(heads)

    def _split(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
               valid_lens: ArrayLike | None) -> HeadsAndLengths:
        """The four arguments of `attention`: projected, the heads as items of the batch."""
        arrays = (as_numbers(queries, "queries"), as_numbers(keys, "keys"),
                  as_numbers(values, "values"))
        for array, name in zip(arrays, ("queries", "keys", "values")):
            check_three_axes(array, name)
        batch, num_queries, _ = arrays[0].shape
        lengths = key_lengths(valid_lens, batch, num_queries, arrays[1].shape[1])
        if lengths is not None:
            lengths = np.repeat(lengths, self.num_heads, axis=0)  # one for each head
        query_heads, key_heads, value_heads = (
            self.transpose_qkv(linear(array))
            for linear, array in zip((self.W_q, self.W_k, self.W_v), arrays))
        return query_heads, key_heads, value_heads, lengths

    def _join(self, attended: ArrayLike) -> NDArray[Any]:
        """(batch * num_heads, num_queries, d) -> (batch, num_queries, num_hiddens)."""
        return self.W_o(self.transpose_output(attended))
