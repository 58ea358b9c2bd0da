"""What a layer does with its parameters, whatever it computes with them: shows, loads, converts,
freezes, copies and pickles them."""

from __future__ import annotations

import copy
import math
import os
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._base.arguments import as_array, wanted_names
from mha._base.atomic import Step, assign, one_go, take
from mha._base.dtypes import layer_dtype, shown
from mha._base.keywords import OwnNames, checks_keywords
from mha._base.pieces import deep_copied
from mha._functions.packed_weight import PackedWeight, numbers_of
from mha._layer import state as layer_state
from mha._layer.state import LayerState

Array = NDArray[Any]

# Held while a layer changes, by one thread at a time: two changes at once would lose one, and
# load_parameters writes where prune_heads and freeze read. Calls need no lock.
changing = threading.RLock()


def _unlock_after_fork() -> None:
    global changing
    changing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_after_fork)


class OwnParameters(OwnNames):
    """A layer that owns parameters: its settings and they are one value, `_state`."""

    _state: LayerState
    _settings: type[Any]                   # the class of its settings
    _checked_settings: Callable[..., Any]  # makes them of its fields, which nobody has checked

    @classmethod
    def _of(cls, read: LayerState | list[LayerState]) -> Any:
        """The layer, or layers, that `from_state` has read."""
        if isinstance(read, list):
            return [cls._of(state) for state in read]
        layer = cls.__new__(cls)
        layer._state = read
        return layer

    def parameters(self) -> dict[str, Array]:
        """The live arrays by name: changing one in place changes the layer.

        Of matrices that are quantised they are float32 copies.

        >>> layer = mha.MultiHeadAttention(512, 8, use_bias=False)
        >>> list(layer.parameters())
        ['W_q', 'W_k', 'W_v', 'W_o']
        """
        return {name: shown(numbers_of(parameter))
                for name, parameter in self._state.parameters.items()}

    @checks_keywords
    def load_parameters(self, mapping: Mapping[str, ArrayLike]) -> None:
        """Copy the arrays of a mapping with the names of `parameters()` into the layer.

        They are written into the arrays that `parameters()` gave before; where two of these share
        memory, or one is read-only, new arrays take their place. A call that runs meanwhile in
        another thread may see some of them.

        Raises
        ------
        ValueError: missing or unknown names, wrong shapes, a frozen layer. TypeError: arrays that
        are not numbers. Nothing has changed then.

        >>> layer, other = mha.MultiHeadAttention(512, 8), mha.MultiHeadAttention(512, 8)
        >>> layer.load_parameters(other.parameters())
        """
        layer_state.check_not_frozen(self._state, "mapping")
        arrays = layer_state.arrays_to_load(self._state, mapping)
        self._change_and_write(lambda state: layer_state.loaded(state, arrays))

    @property
    def num_parameters(self) -> int:
        """How many numbers the layer learns: 4 * embed_dim**2 without biases in the plain case.

        >>> mha.MultiHeadAttention(512, 8, use_bias=False).num_parameters
        1048576
        """
        return sum(math.prod(parameter.shape) for parameter in self._state.parameters.values())

    @checks_keywords
    def astype(self, dtype: DTypeLike) -> Self:
        """A copy of the layer that computes in dtype.

        Raises
        ------
        TypeError: a dtype other than float16, bfloat16, float32 and float64.

        >>> mha.MultiHeadAttention(512, 8).astype(np.float64).W_q.dtype
        dtype('float64')
        """
        known_dtype = layer_dtype(dtype)
        other = copy.copy(self)
        other._change(lambda state: layer_state.in_dtype(state, known_dtype))
        return other

    def freeze(self) -> Self:
        """Copy and pack the parameters for inference: faster, and read-only until `unfreeze()`.

        The result's bits stay the same. Returns the layer.

        >>> mha.MultiHeadAttention(512, 8).freeze().frozen
        True
        """
        self._change(layer_state.frozen)
        return self

    def unfreeze(self) -> Self:
        """Make the parameters writable again. Returns the layer.

        >>> mha.MultiHeadAttention(512, 8).freeze().unfreeze().frozen
        False
        """
        self._change(layer_state.unfrozen)
        return self

    @property
    def frozen(self) -> bool:
        """Whether `freeze()` is in force."""
        return self._state.packed is not None

    def _change(self, changed: Callable[[LayerState], LayerState]) -> None:
        """Put changed(state) in the state's place."""
        self._change_and_write(lambda state: (changed(state), []))

    def _change_and_write(
            self, changed: Callable[[LayerState], tuple[LayerState, list[Step]]]) -> None:
        """The same, with steps that go with it; again, where a signal handler was faster."""
        with changing:
            while True:
                old = self._state
                new, writing = changed(old)
                steps = one_go((assign, self, "_state", new), *writing)
                if self._state is old:
                    take(steps)
                    return

    def _quantize(self, kind: str, parameters: Collection[str], matrices: tuple[str, ...]) -> Self:
        """`quantize`, of these matrices: by default all that the layer has."""
        names = wanted_names(parameters, matrices, "parameters")
        for name in names if parameters is not matrices else ():
            layer_state.check_has(self._state.settings, name)
        self._change(lambda state: layer_state.in_blocks(state, kind, names))
        return self

    def _set_parameter(self, name: str, array: ArrayLike) -> None:
        layer_state.check_not_frozen(self._state, name)
        layer_state.check_has(self._state.settings, name)
        converted = as_array(array, name)
        self._change(lambda state: layer_state.with_parameter(state, name, converted))

    def __getstate__(self) -> dict[str, Any]:
        others = {name: value for name, value in vars(self).items() if name != "_state"}
        return {**layer_state.to_pickle(self._state), **others}

    def __setstate__(self, state: dict[str, Any]) -> None:
        known, others = layer_state.from_pickle(state, self._settings, self._checked_settings)
        vars(self).update(others, _state=known)

    def __copy__(self) -> Self:
        other = self.__class__.__new__(self.__class__)
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = copy.copy(self)
        memo[id(self)] = other
        with changing:
            state = other._state
            parameters = {name: parameter if isinstance(parameter, PackedWeight)
                          else deep_copied(parameter, memo)
                          for name, parameter in state.parameters.items()}
        others = {name: copy.deepcopy(value, memo) for name, value in vars(other).items()
                  if name != "_state"}
        copied = layer_state.new_state(state.settings, parameters)
        if state.packed is not None:
            copied = layer_state.frozen(copied)
        vars(other).update(others, _state=copied)
        return other
