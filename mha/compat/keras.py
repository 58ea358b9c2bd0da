"""Keras 3's attention layers by their own names, on NumPy arrays, without importing keras.

Arguments, their order (query, value, key), masks (True = attend), weights and what rows that see
no key get are those of Keras 3.15; the attention is `mha`'s. Tensors on the CPU are accepted
wherever arrays are.

    from mha.compat import keras

    layer = keras.MultiHeadAttention(num_heads=8, key_dim=64)
    layer.build((None, None, 512), (None, None, 512))
    layer.set_weights(keras_layer.get_weights())

Where this differs from Keras on purpose: query_mask acts where it is given (Keras 3.15 heeds in
MultiHeadAttention only the mask that the tensor carries), the output carries no mask, NaN or
infinity behind a mask never reaches the output, dropout draws from `seed`, which draws the initial
kernels too, flash_attention is ignored, errors are ValueError and TypeError.
"""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import DTypeLike

from mha._base.arguments import as_ints, as_size
from mha._base.keywords import checks_keywords, other_names
from mha.compat._shared.keras_attention import AdditiveAttention, Attention
from mha.compat._shared.keras_layer import Layer
from mha.compat._shared.keras_weights import Initializer

__all__ = ["AdditiveAttention", "Attention", "GroupQueryAttention", "MultiHeadAttention"]

other_names("mask attn_mask", "attention_mask", "attention_mask=, True = attend")
other_names("key_padding_mask padding_mask", "key_mask", "key_mask=, (batch, len), True = attend")
other_names("causal is_causal", "use_causal_mask")
other_names("return_weights need_weights output_attentions", "return_attention_scores")
other_names("embed_dim head_dim", "key_dim", "key_dim=, the width of one head")
other_names("num_heads", "num_query_heads")
other_names("num_kv_heads", "num_key_value_heads")
other_names("rng", "seed")
other_names("window", "sliding_window")


class MultiHeadAttention(Layer):
    """keras.layers.MultiHeadAttention.

    Parameters
    ----------
    num_heads, key_dim : int
        The heads, and the width of one of query and key.
    value_dim : int, by default key_dim
    dropout : float in [0, 1]
        On the attention weights, in calls with training=True.
    use_bias : bool
    output_shape : int or ints, by default the width of query
    attention_axes : int or ints, by default all between batch and features
    sliding_window : int, optional
        Query i sees the keys from i - sliding_window + 1 to i + sliding_window - 1.
    flash_attention : ignored; there is only one way, which never stores the scores
    kernel_initializer, bias_initializer : "glorot_uniform", "zeros" or a function
        Called with a shape and a dtype, as Keras' initializers are. Of an object of Keras each
        kernel gets a copy, so that without a seed they differ, as in Keras.
    kernel_regularizer, bias_regularizer, activity_regularizer, kernel_constraint, bias_constraint
        None: they act in Keras' training alone.
    use_gate : bool
        Whether sigmoid(query projected once more) multiplies the heads' output.
    seed : int, optional
        Draws the initial kernels, and the dropout.
    dtype : "float16", "bfloat16", "float32" (by default) or "float64"
        Of the weights and the output; inputs are cast to it. Halves are computed in float32, and
        bfloat16 wants the package ml_dtypes.
    name : str, optional

    Attributes
    ----------
    query_dense, key_dense, value_dense, output_dense: each with kernel and bias, once the layer is
    built. Kernels (in, num_heads, key_dim), for value (in, num_heads, value_dim), for the output
    (num_heads, value_dim, *output_shape); biases have the axes behind the input's.

    Raises
    ------
    ValueError: sizes below 1, dropout outside [0, 1], regularizers and constraints. TypeError:
    sizes that are no ints, another dtype.

    Source: Vaswani et al. 2017, section 3.2.2; the gate: Qiu et al. 2025, "Gated Attention for
    Large Language Models".

    >>> layer = MultiHeadAttention(num_heads=8, key_dim=64)
    >>> layer(np.ones((2, 10, 512)), np.ones((2, 7, 512))).shape
    (2, 10, 512)
    """

    _shown = ("num_heads", "key_dim", "value_dim")
    _configured = (*_shown, "dropout", "use_bias", "use_gate", "output_shape", "attention_axes",
                   "sliding_window", "kernel_initializer", "bias_initializer", "seed")

    @checks_keywords
    def __init__(self, num_heads: int, key_dim: int, value_dim: int | None = None,
                 dropout: float = 0.0, use_bias: bool = True,
                 output_shape: int | Sequence[int] | None = None,
                 attention_axes: int | Sequence[int] | None = None,
                 sliding_window: int | None = None, flash_attention: bool | None = None,
                 kernel_initializer: Initializer = "glorot_uniform",
                 bias_initializer: Initializer = "zeros", kernel_regularizer: object = None,
                 bias_regularizer: object = None, activity_regularizer: object = None,
                 kernel_constraint: object = None, bias_constraint: object = None,
                 use_gate: bool = False, seed: int | None = None, *,
                 dtype: DTypeLike | None = None, name: str | None = None) -> None:
        self.num_heads, self.key_dim = as_size(num_heads, "num_heads"), as_size(key_dim, "key_dim")
        self.value_dim = as_size(value_dim, "value_dim", self.key_dim)
        self._sizes = self.num_heads, self.num_heads, self.key_dim, self.value_dim
        if output_shape is not None:
            self._output_shape = tuple(as_size(size, "output_shape")
                                       for size in _as_tuple(output_shape, "output_shape"))
        self._given_axes = (None if attention_axes is None
                            else _as_tuple(attention_axes, "attention_axes"))
        self._configure(
            dropout=dropout, use_bias=use_bias, sliding_window=sliding_window,
            kernel_initializer=kernel_initializer, bias_initializer=bias_initializer,
            use_gate=use_gate, seed=seed, dtype=dtype, name=name,
            kernel_regularizer=kernel_regularizer, bias_regularizer=bias_regularizer,
            activity_regularizer=activity_regularizer, kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint)

    @property
    def attention_axes(self) -> tuple[int, ...] | None:
        """The axes that are attended over; None before the layer is built, unless given."""
        return self._attention_axes or self._given_axes

    @property
    def output_shape(self) -> tuple[int, ...] | None:
        """The axes behind the length of the output; None: query's width."""
        return self._output_shape

    query_dense = property(lambda self: self._projections["query"])
    key_dense = property(lambda self: self._projections["key"])
    value_dense = property(lambda self: self._projections["value"])
    output_dense = property(lambda self: self._projections["attention_output"])


class GroupQueryAttention(Layer):
    """keras.layers.GroupQueryAttention: each key and value head serves several of query's.

    Parameters
    ----------
    head_dim : int
    num_query_heads, num_key_value_heads : int
        The second divides the first.
    The rest : as in `MultiHeadAttention`

    Attributes
    ----------
    Those above, num_repeats, and the list `weights`: kernels (in, heads, head_dim), and
    (num_query_heads, head_dim, dim of query) for the output.

    Raises
    ------
    ValueError, TypeError: as `MultiHeadAttention`.

    Source: Ainslie et al. 2023, "GQA".

    >>> layer = GroupQueryAttention(head_dim=64, num_query_heads=8, num_key_value_heads=2)
    >>> layer(np.ones((2, 10, 512)), np.ones((2, 7, 512))).shape
    (2, 10, 512)
    """

    _shown = ("head_dim", "num_query_heads", "num_key_value_heads")
    _configured = (*_shown, "use_bias", "use_gate", "sliding_window", "dropout",
                   "kernel_initializer", "bias_initializer", "seed")

    @checks_keywords
    def __init__(self, head_dim: int, num_query_heads: int, num_key_value_heads: int,
                 dropout: float = 0.0, use_bias: bool = True, sliding_window: int | None = None,
                 flash_attention: bool | None = None,
                 kernel_initializer: Initializer = "glorot_uniform",
                 bias_initializer: Initializer = "zeros", kernel_regularizer: object = None,
                 bias_regularizer: object = None, activity_regularizer: object = None,
                 kernel_constraint: object = None, bias_constraint: object = None,
                 use_gate: bool = False, seed: int | None = None, *,
                 dtype: DTypeLike | None = None, name: str | None = None) -> None:
        self.head_dim = as_size(head_dim, "head_dim")
        self.num_query_heads = as_size(num_query_heads, "num_query_heads")
        self.num_key_value_heads = as_size(num_key_value_heads, "num_key_value_heads")
        if self.num_query_heads % self.num_key_value_heads:
            raise ValueError(f"num_query_heads: got {num_query_heads}, wanted a multiple of"
                             f" num_key_value_heads ({num_key_value_heads})")
        self.num_repeats = self.num_query_heads // self.num_key_value_heads
        self._sizes = (self.num_query_heads, self.num_key_value_heads, self.head_dim,
                       self.head_dim)
        self._configure(
            dropout=dropout, use_bias=use_bias, sliding_window=sliding_window,
            kernel_initializer=kernel_initializer, bias_initializer=bias_initializer,
            use_gate=use_gate, seed=seed, dtype=dtype, name=name,
            kernel_regularizer=kernel_regularizer, bias_regularizer=bias_regularizer,
            activity_regularizer=activity_regularizer, kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint)

    def _resolved_axes(self, dimensions: int) -> tuple[int, ...]:
        if dimensions != 3:
            raise ValueError(f"query: got {dimensions} dimensions, wanted (batch, len, dim)")
        return (1,)


def _as_tuple(values: int | Sequence[int], name: str) -> tuple[int, ...]:
    return (values,) if isinstance(values, int) else tuple(as_ints(values, name))
