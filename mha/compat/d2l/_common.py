"""The layers of "Dive into Deep Learning" that its four forms (PyTorch, TensorFlow, JAX, MXNet)
share. Each form's module adds the call: how training is said, and what is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._base.arguments import as_size
from mha._functions.additive_attention import additive_attention
from mha._functions.heads import merge_heads, split_heads
from mha._functions.options import RandomSource
from mha._functions.scaled_dot_product_attention import scaled_dot_product_attention
from mha.compat._shared.flags import as_dropout, split_dropout
from mha.compat._shared.layers import Linear, checked_heads
from mha.compat.d2l._helpers import checked_inputs, three_axes


class Attention:
    """What dot-product and additive attention share: dropout, and the weights of the last call.

    attention_weights (batch, num_queries, num_keys), before dropout; None before the first call.
    """

    _output_and_weights: Callable[..., Any]  # of the three arrays and mha's options

    def __init__(self, dropout: float, *, rng: RandomSource = None) -> None:
        self.dropout = as_dropout(dropout)
        self.attention_weights: NDArray[Any] | Any = None  # Any for None, as in Linear.kernel
        self._rng = np.random.default_rng(rng)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dropout={self.dropout})"

    def _attend(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
                valid_lens: ArrayLike | None, training: bool | None) -> NDArray[Any]:
        """(batch, num_queries, q), (batch, num_keys, k), (batch, num_keys, v) -> (..., v); zeros
        where all is dropped. The weights are kept."""
        *arrays, lengths = checked_inputs(queries, keys, values, valid_lens)
        dropout, drops_all = split_dropout(self.dropout if training else 0.0)
        output, self.attention_weights = self._output_and_weights(
            *arrays, key_lengths=lengths, empty_rows="uniform", dropout=dropout, rng=self._rng,
            return_weights=True)
        if drops_all:
            output[...] = 0
        return output


class DotProductAttention(Attention):
    """softmax(queries keys^T / sqrt(d)) values over the valid keys."""

    _output_and_weights = staticmethod(scaled_dot_product_attention)


class AdditiveAttention(Attention):
    """Attention with the scores w_v . tanh(queries W_q + keys W_k) over the valid keys.

    W_q, W_k and w_v are Linear, sized at the first call; w_v.weight is (1, num_hiddens).
    """

    def __init__(self, num_hiddens: int, dropout: float, *, rng: RandomSource = None) -> None:
        super().__init__(dropout, rng=rng)
        num_hiddens = as_size(num_hiddens, "num_hiddens")
        self.W_k = Linear(num_hiddens, rng=self._rng)
        self.W_q = Linear(num_hiddens, rng=self._rng)
        self.w_v = Linear(1, rng=self._rng)

    def __repr__(self) -> str:
        return f"AdditiveAttention(num_hiddens={self.W_q.out_features}, dropout={self.dropout})"

    def _output_and_weights(self, queries: NDArray[Any], keys: NDArray[Any], values: NDArray[Any],
                            **options: Any) -> Any:
        W_q, W_k = self.W_q.sized_for(queries), self.W_k.sized_for(keys)
        w_v = self.w_v.sized_for(W_k)[:, 0]
        return additive_attention(queries, keys, values, W_q, W_k, w_v, **options)


class MultiHeadAttention:
    """The book's layer but for its call: four Linear around a replaceable `attention`.

    W_q, W_k, W_v, W_o : Linear, sized at the first call; weight (num_hiddens, in) or kernel
        (in, num_hiddens), and bias (num_hiddens,) or None, may be set at any time.
    attention : called with (batch * num_heads, length, num_hiddens / num_heads) and the lengths of
        every head; its `attention_weights` are (batch * num_heads, num_queries, num_keys).
    """

    _linear: type[Linear] = Linear
    _dot_product_attention: type[DotProductAttention]

    def __init__(self, num_hiddens: int, num_heads: int, dropout: float, bias: bool = False, *,
                 rng: RandomSource = None) -> None:
        self.num_heads, self.num_hiddens = checked_heads(num_heads, num_hiddens, "num_hiddens")
        rng = np.random.default_rng(rng)
        self.attention: Any = self._dot_product_attention(dropout, rng=rng)
        self.W_q = self._linear(self.num_hiddens, bias=bias, rng=rng)
        self.W_k = self._linear(self.num_hiddens, bias=bias, rng=rng)
        self.W_v = self._linear(self.num_hiddens, bias=bias, rng=rng)
        self.W_o = self._linear(self.num_hiddens, bias=bias, rng=rng)

    def __repr__(self) -> str:
        return (f"MultiHeadAttention(num_hiddens={self.num_hiddens}, num_heads={self.num_heads},"
                f" bias={self.W_o.bias is not None}, attention={self.attention!r})")

    def transpose_qkv(self, X: ArrayLike) -> NDArray[Any]:
        """(batch, length, num_hiddens) -> (batch * num_heads, length, num_hiddens / num_heads)."""
        X = three_axes(X, "X")
        heads = split_heads(X, self.num_heads)  # (batch, num_heads, length, d)
        return heads.reshape(X.shape[0] * self.num_heads, *heads.shape[2:])

    def transpose_output(self, X: ArrayLike) -> NDArray[Any]:
        """(batch * num_heads, length, d) -> (batch, length, num_heads * d)."""
        X = three_axes(X, "X")
        if X.shape[0] % self.num_heads:
            raise ValueError(f"X: got shape {X.shape}, wanted a multiple of num_heads"
                             f" ({self.num_heads}) items")
        heads = X.reshape(X.shape[0] // self.num_heads, self.num_heads, *X.shape[1:])
        return merge_heads(heads)

    def _split(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
               valid_lens: ArrayLike | None) -> list[Any]:
        """The four arguments of `attention`: projected, the heads as items of the batch."""
        *arrays, lengths = checked_inputs(queries, keys, values, valid_lens)
        if lengths is not None:
            lengths = np.repeat(lengths, self.num_heads, axis=0)  # one for each head
        heads = [self.transpose_qkv(linear(array))
                 for linear, array in zip((self.W_q, self.W_k, self.W_v), arrays)]
        return [*heads, lengths]

    def _join(self, attended: ArrayLike) -> NDArray[Any]:
        """(batch * num_heads, num_queries, d) -> (batch, num_queries, num_hiddens)."""
        return self.W_o(self.transpose_output(attended))
