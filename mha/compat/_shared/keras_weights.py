"""What all of Keras' layers have: a type, weights that appear when the layer is built, a config."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mha._base.pieces import copied
from mha.compat._shared.dtypes import array_of_kind, as_float_dtype, as_own, own_copy, to_compute
from mha.compat._shared.flags import as_dropout
from mha.compat._shared.layers import uniform

Array = NDArray[Any]
Initializer = str | Callable[..., Any]

INITIALIZERS = {"GlorotUniform": "glorot_uniform", "Zeros": "zeros"}  # by the names of classes


class Weighted:
    """A layer with weights; a subclass calls `_start`, and says what its weights are."""

    _configured: tuple[str, ...] = ()  # the arguments that a config has, in Keras' order
    _of_training: tuple[str, ...] = ()  # those that it has as None
    _built = False

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
        return self._built

    def _weight_places(self) -> list[tuple[str, Any, str]]:
        """Of each weight: what errors call it, who has it, and as which attribute."""
        raise NotImplementedError

    @property
    def weights(self) -> list[Array]:
        """The live weights in Keras' order: kernels and biases of query, key, (gate,) value and
        output; or scale and concat_score_weight. Empty before the layer is built."""
        return [getattr(owner, name) for _, owner, name in self._weight_places()]

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
        places = self._weight_places()
        if len(weights) != len(places):
            shown = dict.fromkeys(shown for shown, _, _ in places)
            raise ValueError(f"weights: got {len(weights)} arrays, wanted {len(places)}: of"
                             f" {', '.join(shown) or 'nothing'}")
        copies = [self._own(array, getattr(owner, name).shape, f"weights[{index}]")
                  for index, (array, (_, owner, name)) in enumerate(zip(weights, places))]
        for (_, owner, name), array in zip(places, copies):
            setattr(owner, name, array)

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
            return self._own(initializer(shape, dtype=str(self.dtype)), shape, name)
        if initializer == "zeros":
            return np.zeros(shape, self.dtype)
        if initializer != "glorot_uniform":
            raise ValueError(f"{name}: got {initializer!r}, wanted 'glorot_uniform', 'zeros' or a"
                             " function of a shape and a dtype")
        fans = math.prod(shape[:input_axes]) + math.prod(shape[input_axes:])
        bound = math.sqrt(6 / fans)
        return uniform(self._generator, bound, shape, self.dtype)

    def _own(self, given: Any, shape: tuple[int, ...], name: str) -> Array:
        """A copy in the layer's type."""
        array = array_of_kind(given, name, "iuf", self.dtype)
        if array.shape != shape:
            raise ValueError(f"{name}: got shape {array.shape}, wanted {shape}")
        return own_copy(array, self.dtype)

    def _input(self, array: Any, name: str) -> Array:
        """As the layer's type has it, to be computed with."""
        if array is None:
            raise TypeError(f"{name}: got None, wanted an array")
        return to_compute(as_own(array_of_kind(array, name, "biuf", self.dtype), self.dtype))


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
