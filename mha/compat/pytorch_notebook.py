"""The PyTorch notebook's names on NumPy arrays: in its masks 0 is blocked and 1 attends.

    from mha.compat.pytorch_notebook import MultiHeadAttention, create_causal_mask
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import plot
from mha._base.arguments import as_size
from mha._functions.heads import merge_heads, split_heads
from mha._functions.multi_head_attention import multi_head_attention
from mha._functions.options import RandomSource
from mha.compat._shared.broadcast import attention_with_weights
from mha.compat._shared.flags import after_dropout, as_dropout, split_dropout
from mha.compat._shared.layers import Linear, Trained, as_numbers, checked_heads, checked_mask
from mha.masks import causal

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:  # for typing.get_type_hints, which shall not import it
    Figure = Any

__all__ = ["MultiHeadAttention", "create_causal_mask", "create_sentence_example",
           "scaled_dot_product_attention", "visualize_attention", "visualize_multihead_attention",
           "visualize_sentence_attention"]


def scaled_dot_product_attention(query: ArrayLike, key: ArrayLike, value: ArrayLike,
                                 mask: ArrayLike | None = None
                                 ) -> tuple[NDArray[Any], NDArray[Any]]:
    """(output, attention_weights).

    query (..., query_len, d_k), key (..., key_len, d_k), value (..., key_len, d_v) -> output
    (..., query_len, d_v) and weights (..., query_len, key_len). The axes before the last two
    broadcast. mask broadcasts to the weights: 0 is blocked, anything else attends; a row that is
    blocked throughout is uniform. Sizes that do not fit are a ValueError.

    >>> Q = np.ones((2, 4, 8), np.float32)
    >>> [array.shape for array in scaled_dot_product_attention(Q, Q, Q)]
    [(2, 4, 8), (2, 4, 4)]
    """
    return attention_with_weights(as_numbers(query, "query"), as_numbers(key, "key"),
                                  as_numbers(value, "value"),
                                  _visible(mask))


class MultiHeadAttention(Trained):
    """The notebook's layer, with biases; it starts in training mode as PyTorch's modules do.

    Parameters
    ----------
    d_model : int
        The width of input and output.
    num_heads : int
        Must divide d_model (ValueError).
    dropout : float in [0, 1]
        On the attention weights, in training mode. Kept weights are divided by the kept
        fraction, (65536 - round(65536 dropout)) / 65536; 1 keeps none.
    rng : None, int or numpy.random.Generator
        Draws the parameters, and the dropout of every call.

    Attributes
    ----------
    W_q, W_k, W_v, W_o : Linear
        Each with weight (d_model, d_model) as PyTorch stores it, used as x @ weight.T, and bias
        (d_model,); both may be set.
    d_model, num_heads, d_k, dropout, training

    >>> layer = MultiHeadAttention(512, 8).eval()
    >>> sum(parameter.size for parameter in layer.parameters())
    1050624
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.1, *,
                 rng: RandomSource = None) -> None:
        self.num_heads, self.d_model = checked_heads(num_heads, d_model, "d_model")
        self.d_k = self.d_model // self.num_heads
        self.dropout = as_dropout(dropout)
        self._rng = np.random.default_rng(rng)
        self.W_q, self.W_k, self.W_v, self.W_o = (
            Linear(self.d_model, bias=True, in_features=self.d_model, rng=self._rng)
            for _ in range(4))

    def __repr__(self) -> str:
        return (f"MultiHeadAttention(d_model={self.d_model}, num_heads={self.num_heads},"
                f" dropout={self.dropout})")

    def parameters(self) -> list[NDArray[Any]]:
        """The live weights and biases, in PyTorch's order and layout."""
        return [parameter for linear in (self.W_q, self.W_k, self.W_v, self.W_o)
                for parameter in linear.parameters()]

    def split_heads(self, x: ArrayLike) -> NDArray[Any]:
        """(batch, seq_len, d_model) -> (batch, num_heads, seq_len, d_k)."""
        x = as_numbers(x, "x")
        if x.ndim != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"x: got shape {x.shape}, wanted (batch, seq_len, {self.d_model})")
        return split_heads(x, self.num_heads)

    def combine_heads(self, x: ArrayLike) -> NDArray[Any]:
        """(batch, num_heads, seq_len, d_k) -> (batch, seq_len, d_model)."""
        x = as_numbers(x, "x")
        if x.ndim != 4 or x.shape[1] * x.shape[3] != self.d_model:
            raise ValueError(f"x: got shape {x.shape}, wanted (batch, {self.num_heads}, seq_len,"
                             f" {self.d_k})")
        return merge_heads(x)

    def forward(self, query: ArrayLike, key: ArrayLike, value: ArrayLike,
                mask: ArrayLike | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """(output, attention_weights), the weights after dropout.

        query (batch, query_len, d_model), key and value (batch, key_len, d_model) -> output
        (batch, query_len, d_model) and weights (batch, num_heads, query_len, key_len). mask
        broadcasts to the weights: 0 is blocked, 1 attends.
        """
        dropout, drops_all = split_dropout(self.dropout if self.training else 0.0)
        seed = int(self._rng.integers(2**64, dtype=np.uint64))
        visible = _visible(mask)
        if visible is not None and visible.ndim < 4:
            visible = visible.reshape((1,) * (4 - visible.ndim) + visible.shape)
        output, weights = multi_head_attention(
            query, key, value, self.W_q.kernel, self.W_k.kernel, self.W_v.kernel, self.W_o.kernel,
            b_q=self.W_q.bias, b_k=self.W_k.bias, b_v=self.W_v.bias, b_o=self.W_o.bias,
            num_heads=self.num_heads, mask=visible, empty_rows="uniform", dropout=dropout,
            rng=seed, return_weights=True)
        if drops_all:
            output[...], weights[...] = self.W_o.bias, 0
        return output, after_dropout(weights, dropout, seed)

    __call__ = forward


def create_causal_mask(seq_len: int) -> NDArray[Any]:
    """(1, 1, seq_len, seq_len) in float32: 1 where a token may attend, at itself and before.

    >>> create_causal_mask(3)[0, 0].tolist()
    [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    """
    return causal(seq_len)[None, None].astype(np.float32)


def create_sentence_example(seed: int | None = None) -> NDArray[Any]:
    """(1, 6, 64): random embeddings of "The cat sat on the mat" with two planted likenesses.

    Half of word 4 is added to word 1, half of word 5 to word 2. seed makes it repeatable.

    >>> create_sentence_example(seed=0).shape
    (1, 6, 64)
    """
    embeddings = np.random.default_rng(seed).standard_normal((1, 6, 64), np.float32)
    embeddings[0, 1] += 0.5 * embeddings[0, 4]
    embeddings[0, 2] += 0.5 * embeddings[0, 5]
    return embeddings


def visualize_attention(attention_weights: ArrayLike, title: str = "Attention Weights") -> Figure:
    """The first item of (batch, query_len, key_len) as an annotated heat map: its figure."""
    weights = as_numbers(attention_weights, "attention_weights")
    return plot.attention(weights[0], annotate=True, cmap="YlOrRd", title=title)


def visualize_multihead_attention(attention_weights: ArrayLike,
                                  num_heads_to_show: int = 4) -> Figure:
    """The first heads of the first item of (batch, num_heads, query_len, key_len), in two rows."""
    weights = as_numbers(attention_weights, "attention_weights")
    heads = _first_heads(weights, num_heads_to_show)
    return plot.heads(weights, batch=0, heads=heads, columns=-(-len(heads) // 2),
                      annotate=False, cmap="YlOrRd", title="Multi-Head Attention Weights")


def visualize_sentence_attention(attention_weights: ArrayLike, words: Sequence[str],
                                 num_heads_to_show: int = 4) -> Figure:
    """The same in one row, annotated and labelled with the words of the sentence."""
    weights = as_numbers(attention_weights, "attention_weights")
    heads = _first_heads(weights, num_heads_to_show)
    return plot.heads(weights, query_labels=words, key_labels=words, batch=0, heads=heads,
                      columns=len(heads), annotate=True, cmap="YlOrRd",
                      title="Sentence Attention Weights")


def _first_heads(weights: NDArray[Any], num_heads_to_show: int) -> list[int]:
    if weights.ndim != 4:
        raise ValueError(f"attention_weights: got shape {weights.shape}, wanted (batch, num_heads,"
                         " query_len, key_len)")
    return list(range(min(as_size(num_heads_to_show, "num_heads_to_show"), weights.shape[1])))


def _visible(mask: ArrayLike | None) -> NDArray[Any] | None:
    """The notebook's mask (0 is blocked) as this library's (True attends)."""
    return None if mask is None else checked_mask(mask) != 0
