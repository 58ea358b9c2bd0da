"""Keras' attention layers without projections: dot products, and additive attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._base.arguments import as_size, detached_array
from mha._base.keywords import checks_keywords
from mha._functions.additive_attention import additive_attention
from mha._functions.options import AdditiveKeywords
from mha._functions.scaled_dot_product_attention import scaled_dot_product_attention
from mha.compat._shared.broadcast import broadcast_leading, check_over_scores
from mha.compat._shared.dtypes import as_own, to_compute
from mha.compat._shared.flags import after_dropout, as_flag, split_dropout
from mha.compat._shared.keras_weights import Weighted
from mha.compat._shared.layers import described, uniform
from mha.compat._shared.projections import as_visible

Array = NDArray[Any]
Shapes = Sequence[Sequence[int | None]]


class Attention(Weighted):
    """keras.layers.Attention: softmax(query key^T) value, without projections and without heads.

    Parameters
    ----------
    use_scale : bool
        Whether a number that is learned, at first 1, multiplies the scores; with "concat" it
        multiplies query + key. Nothing else scales them.
    score_mode : "dot" or "concat"
        Of query and key: their dot product, or the sum of tanh(query + key), times a number that
        is learned, at first 1.
    dropout : float in [0, 1]
        On the attention weights, in calls with training=True.
    seed : int, optional
        Draws the dropout.
    dtype : "float16", "bfloat16", "float32" (by default) or "float64"
        Of the weights and the output; inputs are cast to it. Halves are computed in float32, and
        bfloat16 wants the package ml_dtypes.
    name : str, optional

    Attributes
    ----------
    scale, concat_score_weight : arrays (), or None
        Once the layer is built; the list `weights` has them in this order.

    Raises
    ------
    ValueError: another score_mode, dropout outside [0, 1]. TypeError: another dtype.

    Source: Luong, Pham & Manning 2015, "Effective Approaches to Attention-based Neural Machine
    Translation", section 3.1.

    >>> layer = Attention()
    >>> layer([np.ones((2, 10, 512)), np.ones((2, 7, 512))]).shape
    (2, 10, 512)
    """

    __module__ = "mha.compat.keras"  # where users import it from, and so do pickles

    _configured: tuple[str, ...] = ("use_scale", "score_mode", "dropout", "seed")

    @checks_keywords
    def __init__(self, use_scale: bool = False, score_mode: Literal["dot", "concat"] = "dot",
                 dropout: float = 0.0, seed: int | None = None, *,
                 dtype: DTypeLike | None = None, name: str | None = None) -> None:
        if score_mode not in ("dot", "concat"):
            raise ValueError(f"score_mode: got {score_mode!r}, wanted 'dot' or 'concat'")
        self._start(dropout, seed, dtype, name)
        self.use_scale = as_flag(use_scale, "use_scale")
        self.score_mode = score_mode
        self.scale: Array | None = None
        self.concat_score_weight: Array | None = None

    def __repr__(self) -> str:
        scale = isinstance(self, AdditiveAttention)
        return described(self, (), {"use_scale": scale, "score_mode": "dot", "dropout": 0.0})

    def _weight_places(self) -> list[tuple[str, Any, str]]:
        return [(name, self, name) for name in ("scale", "concat_score_weight")
                if getattr(self, name) is not None]

    def build(self, input_shape: Shapes) -> None:
        """Makes the weights for inputs of these shapes, [query's, value's] or with key's."""
        _checked_inputs(input_shape, "input_shape")
        self.scale = self._first_scale(input_shape[0]) if self.use_scale else None
        if self.score_mode == "concat":
            self.concat_score_weight = np.ones((), self.dtype)
        self._built = True

    def _first_scale(self, query_shape: Sequence[int | None]) -> Array:
        return np.ones((), self.dtype)

    def compute_output_shape(self, input_shape: Shapes) -> tuple[int | None, ...]:
        """The shape of the output for inputs of these shapes, None where they have it."""
        return (*input_shape[0][:-1], input_shape[1][-1])

    def compute_mask(self, inputs: Sequence[ArrayLike],
                     mask: Sequence[ArrayLike | None] | None = None) -> Array | None:
        """query's mask, which is the output's too."""
        _checked_inputs(inputs, "inputs")
        masks = _checked_masks(mask)
        return None if masks[0] is None else detached_array(masks[0], "mask[0]")

    @checks_keywords
    def __call__(self, inputs: Sequence[ArrayLike],
                 mask: Sequence[ArrayLike | None] | None = None, training: bool | None = False,
                 return_attention_scores: bool = False, use_causal_mask: bool = False) -> Any:
        """Attend.

        Parameters
        ----------
        inputs : list [query, value] or [query, value, key]
            query (batch..., query_len, dim), value (batch..., key_len, value_dim), key (batch...,
            key_len, dim), by default value.
        mask : list [query_mask, value_mask], each an array or None, optional
            query_mask (batch..., query_len): the output is 0 where it is False. value_mask
            (batch..., key_len): what is False is not attended to; it may be (batch..., query_len,
            key_len) too. By default the masks that the tensors carry, as those do that come from
            an Embedding of Keras with mask_zero.
        training : bool
            Whether the layer's dropout acts.
        return_attention_scores : bool
            Whether to return the weights, after dropout.
        use_causal_mask : bool
            Query i sees keys 0 to i.

        Returns
        -------
        output (batch..., query_len, value_dim); then the weights (batch..., query_len, key_len)
        where asked for. A query that sees no key gets the mean of all values.

        Raises
        ------
        ValueError: no list of two or three, shapes that do not fit. TypeError: arrays that hold no
        numbers.
        """
        _checked_inputs(inputs, "inputs")
        if mask is None:
            carried = [getattr(array, "_keras_mask", None) for array in inputs]
            mask = carried if any(array is not None for array in carried) else None
        query_mask, value_mask = _checked_masks(mask)
        causal = as_flag(use_causal_mask, "use_causal_mask")
        return_weights = as_flag(return_attention_scores, "return_attention_scores")
        query, value = self._input(inputs[0], "query"), self._input(inputs[1], "value")
        key = self._input(inputs[2], "key") if len(inputs) > 2 else value
        _check_shapes(query, value, key)
        if not self.built:
            self.build([query.shape, value.shape, key.shape])
        visible = _visible(value_mask, value, (*query.shape[:-1], key.shape[-2]), causal)
        kept = None if query_mask is None else _kept(query_mask, query.shape[:-1])
        output, weights = self._attend(query, key, value, visible, causal,
                                       as_flag(training, "training"))
        if kept is not None:
            output = np.where(kept[..., None], output, output.dtype.type(0))
        output = as_own(output, self.dtype)
        return (output, as_own(weights, self.dtype)) if return_weights else output

    call = __call__

    def _attend(self, query: Array, key: Array, value: Array, visible: Array | None, causal: bool,
                training: bool) -> tuple[Array, Array]:
        """Output and weights, the axes before the last two laid out as one batch."""
        query, key, value = broadcast_leading(query, key, value, own_axes=2)
        batch = query.shape[:-2]
        scores = *query.shape[:-1], key.shape[-2]
        if visible is not None:
            visible = np.broadcast_to(visible, scores).reshape(-1, *scores[-2:])
        dropout, drops_all = split_dropout(self.dropout if training else 0.0)
        seed = int(self._generator.integers(2**64, dtype=np.uint64)) if dropout else 0
        output, weights = self._scored(
            *(array.reshape(math.prod(batch), *array.shape[-2:]) for array in (query, key, value)),
            mask=visible, causal=causal, query_offset=0, empty_rows="uniform", dropout=dropout,
            rng=seed)
        weights = after_dropout(weights, dropout, seed)
        if drops_all:
            output[...], weights[...] = 0, 0
        return output.reshape(*batch, *output.shape[1:]), weights.reshape(scores)

    def _scored(self, query: Array, key: Array, value: Array,
                **options: Any) -> tuple[Array, Array]:
        scale = 1.0 if self.scale is None else float(self.scale)
        if self.concat_score_weight is not None:
            width = query.shape[-1]
            return _additive(query, key, value, scale,
                             np.full(width, float(self.concat_score_weight)), **options)
        return scaled_dot_product_attention(query * query.dtype.type(scale), key, value, scale=1.0,
                                            return_weights=True, **options)


class AdditiveAttention(Attention):
    """keras.layers.AdditiveAttention: scores of sum(scale * tanh(query + key)), no projections.

    Parameters
    ----------
    use_scale : bool
        Whether a vector that is learned multiplies the tanh.
    The rest : as in `Attention`, by keyword

    Attributes
    ----------
    scale : array (dim,), or None

    Raises
    ------
    ValueError, TypeError: as `Attention`.

    Source: Bahdanau, Cho & Bengio 2015, section 3.1.

    >>> layer = AdditiveAttention()
    >>> layer([np.ones((2, 10, 512)), np.ones((2, 7, 512))]).shape
    (2, 10, 512)
    """

    __module__ = "mha.compat.keras"  # where users import it from, and so do pickles

    _configured = ("use_scale", "dropout", "seed")

    @checks_keywords
    def __init__(self, use_scale: bool = True, dropout: float = 0.0, *, seed: int | None = None,
                 dtype: DTypeLike | None = None, name: str | None = None) -> None:
        super().__init__(use_scale=use_scale, dropout=dropout, seed=seed, dtype=dtype, name=name)

    def _first_scale(self, query_shape: Sequence[int | None]) -> Array:
        width = as_size(query_shape[-1], "the last axis of query's shape")
        bound = math.sqrt(6 / (width + width))  # glorot_uniform, for which a vector's width is both
        return uniform(self._generator, bound, (width,), self.dtype)

    def _scored(self, query: Array, key: Array, value: Array,
                **options: Any) -> tuple[Array, Array]:
        width = query.shape[-1]
        w_v = np.ones(width) if self.scale is None else to_compute(self.scale)
        if w_v.shape != (width,):
            raise ValueError(f"query: got shape {query.shape}, wanted {w_v.size} as last axis, as"
                             " the layer was built for")
        return _additive(query, key, value, 1.0, w_v, **options)


def _additive(query: Array, key: Array, value: Array, scale: float, w_v: Array,
              **options: Any) -> tuple[Array, Array]:
    """Of w_v . tanh(scale * (query + key)); a matrix of zeros but for its diagonal projects
    exactly."""
    diagonal = np.eye(query.shape[-1], dtype=query.dtype) * query.dtype.type(scale)
    chosen: AdditiveKeywords = options  # type: ignore[assignment]
    return additive_attention(query, key, value, diagonal, diagonal,
                              w_v.astype(query.dtype), return_weights=True, **chosen)


def _checked_inputs(inputs: object, name: str) -> None:
    if not isinstance(inputs, list) or not 2 <= len(inputs) <= 3:
        got = f"a list of {len(inputs)}" if isinstance(inputs, list) else type(inputs).__name__
        raise ValueError(f"{name}: got {got}, wanted a list [query, value] or [query, value, key]")


def _checked_masks(masks: object) -> list[Any]:
    """query's and value's; a third is heeded by nobody."""
    if masks is None:
        return [None, None]
    if not isinstance(masks, list) or not 2 <= len(masks) <= 3:
        got = f"a list of {len(masks)}" if isinstance(masks, list) else type(masks).__name__
        raise ValueError(f"mask: got {got}, wanted a list [query_mask, value_mask]")
    return masks[:2]


def _check_shapes(query: Array, value: Array, key: Array) -> None:
    for name, array in (("query", query), ("value", value), ("key", key)):
        if array.ndim < 2:
            raise ValueError(f"{name}: got shape {array.shape}, wanted (batch..., len, dim)")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: got shape {key.shape}, wanted query's {query.shape} in the last"
                         " axis")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key: got shape {key.shape}, wanted as many keys as value has"
                         f" {value.shape}")


def _visible(mask: ArrayLike | None, value: Array, scores: tuple[int, ...],
             causal: bool) -> Array | None:
    """value's mask, over the scores (batch..., query_len, key_len)."""
    if mask is None:
        return None
    given = as_visible(mask, "value_mask")
    visible = given
    if given.ndim == 2 or given.shape == value.shape[:-1] or causal:
        visible = given[..., None, :]
    check_over_scores(visible, "value_mask", scores, given.shape)
    return visible


def _kept(mask: ArrayLike, shape: tuple[int, ...]) -> Array:
    kept = as_visible(mask, "query_mask")
    if kept.shape != shape:
        raise ValueError(f"query_mask: got shape {kept.shape}, wanted {shape}")
    return kept
