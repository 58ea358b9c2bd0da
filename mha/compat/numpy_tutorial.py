"""The NumPy tutorial's three names, in float64: in its masks 1 is blocked and 0 attends.

    from mha.compat.numpy_tutorial import MultiHeadAttention, scaled_dot_product_attention, softmax
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import reference
from mha._base.arguments import check_kind
from mha._base.pieces import converted
from mha._functions.heads import split_heads
from mha._functions.multi_head_attention import multi_head_attention
from mha.compat._shared.broadcast import attention_with_weights
from mha.compat._shared.layers import checked_heads, checked_mask

__all__ = ["MultiHeadAttention", "scaled_dot_product_attention", "softmax"]


def softmax(x: ArrayLike, axis: int | None = -1) -> NDArray[Any]:
    """exp(x) / sum(exp(x)) along axis, shaped as x; axis=None is over all of x.

    float32 stays float32, integers become float64. An axis that x lacks is a ValueError.

    >>> softmax([[0.0, 0.0], [1.0, 1.0]]).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    x = np.asarray(x)
    check_kind(x, "x", "biuf", "numbers")
    if x.dtype.kind != "f":
        x = x.astype(np.float64)
    if axis is None:
        return reference.softmax(x.reshape(-1))[0].reshape(x.shape)
    weights, _ = reference.softmax(np.moveaxis(x, axis, -1))
    return np.moveaxis(weights, -1, axis)


def scaled_dot_product_attention(Q: ArrayLike, K: ArrayLike, V: ArrayLike,
                                 mask: ArrayLike | None = None
                                 ) -> tuple[NDArray[Any], NDArray[Any]]:
    """(output, attention_weights) in float64.

    Q (..., seq_len_q, d_k), K (..., seq_len_k, d_k), V (..., seq_len_k, d_v) -> output
    (..., seq_len_q, d_v) and weights (..., seq_len_q, seq_len_k). The axes before the last two
    broadcast. mask broadcasts to the weights: 0 attends, anything else is blocked; a row that is
    blocked throughout is uniform. Sizes that do not fit are a ValueError.

    >>> Q = np.ones((2, 4, 8))
    >>> [array.shape for array in scaled_dot_product_attention(Q, Q, Q)]
    [(2, 4, 8), (2, 4, 4)]
    """
    return attention_with_weights(_float64(Q, "Q"), _float64(K, "K"), _float64(V, "V"),
                                  _visible(mask))


class MultiHeadAttention:
    """The tutorial's layer: four square weights without biases, used as x @ W.

    Parameters
    ----------
    d_model : int
        The width of input and output.
    num_heads : int
        Must divide d_model (ValueError).
    seed : int, optional
        Draws the weights that the tutorial draws after np.random.seed(seed): standard normal
        numbers, W_q, W_k, W_v, W_o in turn. NumPy's global random state is neither read nor
        changed; without a seed the weights are fresh.

    Attributes
    ----------
    W_q, W_k, W_v, W_o (d_model, d_model); d_model, num_heads; d_k = d_v = d_model // num_heads

    >>> layer = MultiHeadAttention(12, 3, seed=42)
    >>> [array.shape for array in layer.forward(*[np.ones((2, 4, 12))] * 3)]
    [(2, 4, 12), (2, 3, 4, 4)]
    """

    def __init__(self, d_model: int, num_heads: int, seed: int | None = None) -> None:
        self.num_heads, self.d_model = checked_heads(num_heads, d_model, "d_model")
        self.d_k = self.d_v = self.d_model // self.num_heads
        # The legacy generator, because it is the one whose numbers the tutorial prints.
        generator = np.random.RandomState(seed)
        shape = (self.d_model, self.d_model)
        self.W_q = generator.standard_normal(shape)
        self.W_k = generator.standard_normal(shape)
        self.W_v = generator.standard_normal(shape)
        self.W_o = generator.standard_normal(shape)

    def __repr__(self) -> str:
        return f"MultiHeadAttention(d_model={self.d_model}, num_heads={self.num_heads})"

    def split_heads(self, x: ArrayLike, batch_size: int) -> NDArray[Any]:
        """(batch_size, seq_len, d_model) -> (batch_size, num_heads, seq_len, d_k)."""
        x = np.asarray(x)
        if x.ndim != 3 or x.shape[0] != batch_size:
            raise ValueError(f"x: got shape {x.shape}, wanted ({batch_size}, seq_len, d_model)")
        return split_heads(x, self.num_heads)

    def forward(self, Q_in: ArrayLike, K_in: ArrayLike, V_in: ArrayLike,
                mask: ArrayLike | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """(output, attention_weights) in float64.

        Q_in (batch, seq_len_q, d_model), K_in and V_in (batch, seq_len_k, d_model) -> output
        (batch, seq_len_q, d_model) and weights (batch, num_heads, seq_len_q, seq_len_k). mask
        (batch, seq_len_q, seq_len_k), the same for all heads: 0 attends, 1 is blocked.
        """
        query, key, value = _float64(Q_in, "Q_in"), _float64(K_in, "K_in"), _float64(V_in, "V_in")
        for array, name in ((query, "Q_in"), (key, "K_in"), (value, "V_in")):
            if array.ndim != 3 or array.shape[2] != self.d_model:
                raise ValueError(f"{name}: got shape {array.shape}, wanted (batch, seq_len,"
                                 f" {self.d_model})")
        visible = _visible(mask)
        if visible is not None:
            if visible.ndim != 3:
                raise ValueError(f"mask: got shape {visible.shape}, wanted (batch, seq_len_q,"
                                 " seq_len_k)")
            visible = visible[:, None]  # (batch, 1, seq_len_q, seq_len_k): one for all heads
        return multi_head_attention(
            query, key, value, self.W_q, self.W_k, self.W_v, self.W_o, num_heads=self.num_heads,
            mask=visible, empty_rows="uniform", return_weights=True)


def _float64(array: ArrayLike, name: str) -> NDArray[Any]:
    array = np.asarray(array)
    check_kind(array, name, "biuf", "numbers")
    return converted(array, np.float64)


def _visible(mask: ArrayLike | None) -> NDArray[Any] | None:
    """The tutorial's mask (0 attends) as this library's (True attends)."""
    return None if mask is None else checked_mask(mask) == 0
