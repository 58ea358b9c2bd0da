"""What all of Keras' layers have: a type, weights that appear when the layer is built, a config."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mha._base.arguments import check_kind, detached_array
from mha._base.dtypes import widened
from mha._base.pieces import copied
from mha.compat._shared.dtypes import as_float_dtype, as_own, own_copy, to_compute
from mha.compat._shared.flags import as_dropout
from mha.compat._shared.layers import uniform

Array = NDArray[Any]
Initializer = str | Callable[..., Any]

INITIALIZERS = {"GlorotUniform": "glorot_uniform", "Zeros": "zeros"}  # by the names of classes


class Weighted:
    """A layer with weights; a subclass calls `_start`, and says what its weights are."""

    _configured: tuple[str, ...] = ()  # the arguments that a config has, in Keras' order
    _of_training: tuple[str, ...] = ()  # those that it has as None

    def _start(self, dropout: float, seed: int | None, dtype: DTypeLike | None,
               name: str | None) -> None:
        self.dropout = as_dropout(dropout)
        self.seed = seed
        self.dtype = as_float_dtype(np.float32 if dtype is None else dtype)
        self.name = name
        self._generator = np.random.default_rng(seed)

    @property
    def built(self) -> bool:
        """Whether the weights are there: after `build`, or the first call."""
        raise NotImplementedError

    @property
    def weights(self) -> list[Array]:
        """The live weights in Keras' order. Empty before the layer is built."""
        raise NotImplementedError

    def _place(self, weights: list[Array]) -> None:
        """Puts these in the place of `weights`."""
        raise NotImplementedError

    def _weight_names(self) -> Sequence[str]:
        raise NotImplementedError

    def get_weights(self) -> list[Array]:
        """Copies of `weights`."""
        return [copied(array, order="C") for array in self.weights]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Copies in what `get_weights` of this layer or of Keras' gave.

        Raises ValueError for another number of arrays, another shape, or before the layer is
        built; TypeError for arrays that hold no numbers. Nothing changes then.
        """
        if not self.built:
            raise ValueError("weights: got them before the layer has any, wanted a call of build or"
                             " of the layer first")
        wanted = self.weights
        if len(weights) != len(wanted):
            raise ValueError(f"weights: got {len(weights)} arrays, wanted {len(wanted)}: of"
                             f" {', '.join(self._weight_names()) or 'nothing'}")
        self._place([self._own(detached_array(array, f"weights[{index}]"), own.shape,
                               f"weights[{index}]")
                     for index, (array, own) in enumerate(zip(weights, wanted))])

    def count_params(self) -> int:
        """How many numbers the weights are."""
        return sum(array.size for array in self.weights)

    def get_config(self) -> dict[str, Any]:
        """The arguments that make such a layer, without its weights: for `from_config`, here and of
        Keras' class of this name.

        >>> layer.from_config(layer.get_config())
        """
        config: dict[str, Any] = {"name": self.name, "dtype": str(self.dtype)}
        for name in self._configured:
            value = getattr(self, name)
            if "initializer" in name and hasattr(value, "get_config"):
                value = sys.modules["keras"].initializers.serialize(value)
            config[name] = value
        return {**config, **dict.fromkeys(self._of_training)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A layer made with these arguments: what `get_config` gave, here or of Keras.

        Raises
        ------
        ValueError, TypeError: as the class. ImportError: initializers that Keras alone can make.

        >>> MultiHeadAttention.from_config(keras_layer.get_config())
        """
        arguments = {name: value for name, value in config.items() if name != "trainable"}
        for name, value in arguments.items():
            if not isinstance(value, Mapping):
                continue
            if name == "dtype":  # a DTypePolicy
                arguments[name] = value["config"]["name"]
            elif "initializer" in name:
                arguments[name] = _initializer_of(value, name)
        return cls(**arguments)

    def _initial(self, initializer: Initializer, name: str, shape: tuple[int, ...],
                 input_axes: int) -> Array:
        """The first weights of this shape, of which the first axes are a kernel's inputs."""
        if callable(initializer):
            return self._own(detached_array(initializer(shape, dtype=str(self.dtype)), name), shape,
                             name)
        if initializer == "zeros":
            return np.zeros(shape, self.dtype)
        if initializer != "glorot_uniform":
            raise ValueError(f"{name}: got {initializer!r}, wanted 'glorot_uniform', 'zeros' or a"
                             " function of a shape and a dtype")
        fans = math.prod(shape[:input_axes]) + math.prod(shape[input_axes:])
        bound = math.sqrt(6 / fans)
        return uniform(self._generator, bound, shape, self.dtype)

    def _own(self, array: Array, shape: tuple[int, ...], name: str) -> Array:
        """A copy in the layer's type."""
        check_kind(widened(array), name, "iuf", self.dtype)
        if array.shape != shape:
            raise ValueError(f"{name}: got shape {array.shape}, wanted {shape}")
        return own_copy(array, self.dtype)

    def _input(self, array: Any, name: str) -> Array:
        """As the layer's type has it, to be computed with."""
        if array is None:
            raise TypeError(f"{name}: got None, wanted an array")
        array = detached_array(array, name)
        check_kind(widened(array), name, "biuf", self.dtype)
        return to_compute(as_own(array, self.dtype))


def _initializer_of(config: Mapping[str, Any], name: str) -> Initializer:
    """The initializer that Keras serialized."""
    known = INITIALIZERS.get(config["class_name"])
    if known is not None and (config.get("config") or {}).get("seed") is None:
        return known
    try:
        initializers = importlib.import_module("keras").initializers
    except ImportError as error:
        raise ImportError(f"{name}: got Keras' {config['class_name']} ({error}), wanted keras,"
                          " which alone can make it: pip install keras") from None
    return initializers.deserialize(dict(config))
