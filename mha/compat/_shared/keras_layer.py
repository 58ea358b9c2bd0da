"""What Keras' layers with projections share: kernels, the masks and the call."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._base.arguments import as_size
from mha._base.keywords import checks_keywords
from mha.compat._shared.dtypes import as_own, to_compute
from mha.compat._shared.flags import as_flag, split_dropout
from mha.compat._shared.keras_weights import Initializer, Weighted
from mha.compat._shared.layers import described
from mha.compat._shared.projections import (
    Projection,
    as_visible,
    over_scores,
    project_and_attend,
)

Array = NDArray[Any]
Shape = Sequence[int | None]


class Layer(Weighted):
    """An attention layer; a subclass says its sizes, and calls `_configure`."""

    _of_training = ("kernel_regularizer", "bias_regularizer", "activity_regularizer",
                    "kernel_constraint", "bias_constraint")

    _sizes: tuple[int, int, int, int]  # heads, key and value heads, key_dim, value_dim of a head
    _output_shape: tuple[int, ...] | None = None
    _given_axes: tuple[int, ...] | None = (1,)

    def _configure(self, *, dropout: float, use_bias: bool, sliding_window: int | None,
                   kernel_initializer: Initializer, bias_initializer: Initializer, use_gate: bool,
                   seed: int | None, dtype: DTypeLike | None, name: str | None,
                   **of_training: object) -> None:
        for argument, value in of_training.items():
            if value is not None:
                raise ValueError(f"{argument}: got {value!r}, wanted None: it acts in the training"
                                 " loop of Keras, which this layer does not have")
        self._start(dropout, seed, dtype, name)
        self.use_bias = bool(use_bias)
        self.use_gate = bool(use_gate)
        self.sliding_window = (None if sliding_window is None
                               else as_size(sliding_window, "sliding_window"))
        self.kernel_initializer = kernel_initializer
        self.bias_initializer = bias_initializer
        self._projections: dict[str, Projection] = {}
        self._attention_axes: tuple[int, ...] = ()

    def __repr__(self) -> str:
        others = {"dropout": 0.0, "use_bias": True, "sliding_window": None, "use_gate": False}
        return described(self, self._shown, others)

    _shown: tuple[str, ...] = ()

    @property
    def built(self) -> bool:
        """Whether the weights are there: after `build`, or the first call."""
        return bool(self._projections)

    def build(self, query_shape: Shape, value_shape: Shape, key_shape: Shape | None = None) -> None:
        """Draws the weights for inputs of these shapes, of which only the last axis and how many
        there are matter.

        Raises ValueError where value and key differ in an axis other than the last, or where an
        attention axis is none between batch and features.
        """
        key_shape = _checked_key_shape(value_shape, key_shape)
        axes = self._resolved_axes(len(query_shape))
        heads, kv_heads, key_dim, value_dim = self._sizes
        query_dim, key_in, value_in = (
            as_size(shape[-1], f"the last axis of {name}") for shape, name in (
                (query_shape, "query_shape"), (key_shape, "key_shape"),
                (value_shape, "value_shape")))
        kernels = {"query": (query_dim, heads, key_dim), "key": (key_in, kv_heads, key_dim)}
        if self.use_gate:
            kernels["gate"] = (query_dim, heads, value_dim)
        kernels["value"] = (value_in, kv_heads, value_dim)
        drawn = {name: self._drawn(shape, 1) for name, shape in kernels.items()}
        output_shape = self._output_shape or (query_dim,)
        drawn["attention_output"] = self._drawn((heads, value_dim, *output_shape), 2)
        self._projections, self._attention_axes = drawn, axes

    def _resolved_axes(self, dimensions: int) -> tuple[int, ...]:
        """The attention axes of inputs of so many dimensions, counted from the front."""
        if dimensions < 3:
            raise ValueError(f"query: got {dimensions} dimensions, wanted (batch, len, dim), or"
                             " more axes between batch and dim")
        if self._given_axes is None:
            return tuple(range(1, dimensions - 1))
        axes = tuple(axis if axis >= 0 else dimensions + axis for axis in self._given_axes)
        if len(set(axes)) < len(axes) or not all(0 < axis < dimensions - 1 for axis in axes):
            raise ValueError(f"attention_axes: got {self._given_axes}, wanted axes of query between"
                             f" the first and the last of its {dimensions}, each once")
        return axes

    def _drawn(self, shape: tuple[int, ...], input_axes: int) -> Projection:
        kernel_initializer, bias_initializer = (
            _copied(initializer)
            for initializer in (self.kernel_initializer, self.bias_initializer))
        kernel = self._initial(_told_axes(kernel_initializer, input_axes, len(shape)),
                               "kernel_initializer", shape, input_axes)
        bias = self._initial(bias_initializer, "bias_initializer", shape[input_axes:], 0)
        return Projection(kernel, bias if self.use_bias else None, input_axes)

    def _weight_places(self) -> list[tuple[str, Any, str]]:
        return [(shown, projection, name) for shown, projection in self._projections.items()
                for name in ("kernel", "bias") if getattr(projection, name) is not None]

    def compute_output_shape(self, query_shape: Shape, value_shape: Shape,
                             key_shape: Shape | None = None) -> tuple[int | None, ...]:
        """The shape of the output for inputs of these shapes, None where they have it.

        Raises ValueError where value and key differ in an axis other than the last.
        """
        _checked_key_shape(value_shape, key_shape)
        return (*query_shape[:-1], *(self._output_shape or (query_shape[-1],)))

    @checks_keywords
    def __call__(self, query: ArrayLike, value: ArrayLike, key: ArrayLike | None = None,
                 query_mask: ArrayLike | None = None, value_mask: ArrayLike | None = None,
                 key_mask: ArrayLike | None = None, attention_mask: ArrayLike | None = None,
                 return_attention_scores: bool = False, training: bool | None = None,
                 use_causal_mask: bool = False) -> Any:
        """Attend.

        Parameters
        ----------
        query : array (batch, query_len, dim)
        value : array (batch, key_len, dim)
        key : array (batch, key_len, dim), by default value
            The widths may differ. MultiHeadAttention takes more axes between batch and dim.
        query_mask : (batch, query_len), value_mask, key_mask : (batch, key_len), optional
            True = real. A query that is not real sees no key. By default the mask that the tensor
            carries, as those do that come from an Embedding of Keras with mask_zero.
        attention_mask : (batch, query_len, key_len), optional, True = attend
            Without batch, or with an axis of heads behind it, too. With other attention axes:
            batch and other axes, then those of the queries, then those of the keys.
        return_attention_scores : bool
            Whether to return the weights, before dropout.
        training : bool
            Whether the layer's dropout acts.
        use_causal_mask : bool
            Query i sees keys 0 to i.

        Returns
        -------
        output (batch, query_len, dim of query, or output_shape); then the weights
        (batch, heads, query_len, key_len) where asked for. A query that sees no key gets the mean
        of all values; where weights are returned, the layer has dropout or there are more than
        three axes, zeros (before the output projection), as in Keras.

        Raises
        ------
        ValueError: shapes that do not fit; causal, windows or masks of padding where the attention
        axes are not (1,). TypeError: arrays that hold no numbers.
        """
        return_weights = as_flag(return_attention_scores, "return_attention_scores")
        causal = as_flag(use_causal_mask, "use_causal_mask")
        query_mask, value_mask, key_mask = (
            getattr(array, "_keras_mask", None) if mask is None else mask for array, mask in (
                (query, query_mask), (value, value_mask), (key, key_mask)))
        query, value = self._input(query, "query"), self._input(value, "value")
        key = value if key is None else self._input(key, "key")
        if not self.built:
            self.build(query.shape, value.shape, key.shape)
        uniform = not (self.dropout or return_weights or query.ndim > 3)
        window = None if self.sliding_window is None else (self.sliding_window - 1,) * 2
        return self._attend_over_axes(
            query, key, value, (query_mask, value_mask, key_mask, attention_mask),
            return_weights=return_weights, causal=causal, window=window,
            query_offset=0, empty_rows="uniform" if uniform else "zeros",
            dropout=self.dropout if as_flag(training, "training") else 0.0, rng=self._generator)

    call = __call__

    def _attend_over_axes(self, query: Array, key: Array, value: Array,
                          masks: tuple[ArrayLike | None, ...], *, return_weights: bool,
                          **options: Any) -> Any:
        """The axes between batch and features laid out as one batch and one length, and back."""
        batch_axes = self._checked_batch_axes(query, key, value)
        order = [*batch_axes, *self._attention_axes]
        batch = tuple(query.shape[axis] for axis in batch_axes)
        query_shape, key_shape = (tuple(array.shape[axis] for axis in self._attention_axes)
                                  for array in (query, key))
        scores = batch, (self._sizes[0],), query_shape, key_shape
        mask = self._visible(scores, masks, options["causal"] or options["window"] is not None)
        found = self._attend(
            *(array.transpose(*order, -1).reshape(math.prod(batch), math.prod(lengths),
                                                  array.shape[-1])
              for array, lengths in ((query, query_shape), (key, key_shape), (value, key_shape))),
            return_weights=return_weights, mask=mask, **options)
        output, *weights = (as_own(array, self.dtype) for array in found)
        ends = self._projections["attention_output"].kernel.shape[2:]
        output = output.reshape(*batch, *query_shape, *ends)
        output = output.transpose(*np.argsort(order), *range(len(order), output.ndim))
        return (output, weights[0].reshape(sum(scores, ()))) if return_weights else output

    def _attend(self, query: Array, key: Array, value: Array, *, dropout: float,
                return_weights: bool, **options: Any) -> list[Array]:
        """The figure: [output] or [output, weights]. Where all weights are dropped, the last bias
        alone is left of the output."""
        dropout, drops_all = split_dropout(dropout)
        heads, kv_heads, *_ = self._sizes
        parts = {name: part.mapped(to_compute) for name, part in self._projections.items()}
        found = project_and_attend(
            [parts[name] for name in ("query", "key", "value", "attention_output")], query, key,
            value, gate=parts.get("gate"), num_heads=heads, num_kv_heads=kv_heads,
            return_weights=return_weights, dropout=dropout, **options)
        output, *weights = found if return_weights else (found,)
        if drops_all:
            bias = parts["attention_output"].offset
            output[...] = 0 if bias is None else bias
        return [output, *weights]

    def _checked_batch_axes(self, query: Array, key: Array, value: Array) -> list[int]:
        """The axes that are neither attended over nor features, after checking the shapes."""
        if self._resolved_axes(query.ndim) != self._attention_axes:
            raise ValueError(f"query: got shape {query.shape}, wanted as many axes as the layer was"
                             " built for")
        for name, array in (("query", query), ("value", value), ("key", key)):
            width = self._projections[name].kernel.shape[0]
            if array.ndim != query.ndim or array.shape[-1] != width:
                raise ValueError(f"{name}: got shape {array.shape}, wanted {query.ndim} dimensions"
                                 f" as query has, the last of them {width}")
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(f"value: got shape {value.shape}, wanted key's {key.shape} but for"
                             " the last axis")
        axes = [axis for axis in range(query.ndim - 1) if axis not in self._attention_axes]
        if any(query.shape[axis] != key.shape[axis] for axis in axes):
            raise ValueError(f"key: got shape {key.shape}, wanted query's {query.shape} in the axes"
                             f" {axes}, which are not attended over")
        return axes

    def _visible(self, scores: tuple[tuple[int, ...], ...], given: tuple[ArrayLike | None, ...],
                 by_position: bool) -> Array | None:
        """The masks of queries, values, keys and attention as one over the scores (batch, heads,
        query_len, key_len)."""
        batch, _, query_shape, key_shape = scores
        query_mask, value_mask, key_mask, attention_mask = given
        padding = [(name, mask, lengths) for name, mask, lengths in (
            ("query_mask", query_mask, (*query_shape, 1)),
            ("value_mask", value_mask, (1, *key_shape)),
            ("key_mask", key_mask, (1, *key_shape))) if mask is not None]
        if (by_position or padding) and self._attention_axes != (1,):
            raise ValueError(f"attention_axes: got {self._attention_axes} together with a causal"
                             " mask, a window or a mask of padding, which are about axis 1; wanted"
                             " attention_axes=(1,), or attention_mask alone")
        masks = []
        if attention_mask is not None:
            array = as_visible(attention_mask, "attention_mask")
            own, most = 2 * len(query_shape), sum(map(len, scores))
            if not own <= array.ndim <= most:
                raise ValueError(f"attention_mask: got shape {array.shape}, wanted {own} to {most}"
                                 " axes, the last of them those of queries and keys")
            leading = array.ndim - own
            apart = array.reshape(*array.shape[:leading], *(1,) * (most - array.ndim),
                                  *array.shape[leading:])
            masks.append(over_scores(apart, "attention_mask", scores, array.shape))
        for name, mask, lengths in padding:
            array = as_visible(mask, name)
            if array.shape != (batch[0], math.prod(lengths)):
                raise ValueError(f"{name}: got shape {array.shape}, wanted"
                                 f" {(batch[0], math.prod(lengths))}")
            masks.append(over_scores(array.reshape(batch[0], *(1,) * len(batch), *lengths), name,
                                     scores))
        return functools.reduce(np.logical_and, masks) if masks else None


def _checked_key_shape(value_shape: Shape, key_shape: Shape | None) -> Shape:
    """key_shape, by default value_shape, which may differ in the last axis alone."""
    if key_shape is None:
        return value_shape
    if not isinstance(key_shape, Sequence):
        raise TypeError(f"key_shape: got {type(key_shape).__name__}, wanted a tuple of ints")
    if tuple(value_shape[1:-1]) != tuple(key_shape[1:-1]):
        raise ValueError(f"key_shape: got {tuple(key_shape)}, wanted value's {tuple(value_shape)}"
                         " but for the last axis")
    return key_shape


def _copied(initializer: Any) -> Any:
    """A copy of Keras' object, as a layer of Keras makes one for each projection: the object draws
    the same numbers at every call, a copy of one without a seed draws others. What is no such
    object stays; a class becomes an object."""
    if isinstance(initializer, type):
        initializer = initializer()
    if not (hasattr(initializer, "get_config") and hasattr(initializer, "from_config")):
        return initializer
    return type(initializer).from_config(initializer.get_config())


def _told_axes(initializer: Any, input_axes: int, axes: int) -> Any:
    """Keras' object that scales by a kernel's inputs and outputs (VarianceScaling), told which axes
    they are: from a shape alone it would take the kernel for one of a convolution."""
    names = "input_axes", "output_axes"
    if None not in [getattr(initializer, name, ()) for name in names]:
        return initializer
    told = zip(names, (list(range(input_axes)), list(range(input_axes, axes))))
    config = {**initializer.get_config(), **dict(told), "seed": initializer.seed}
    return type(initializer).from_config(config)
