"""A layer's parameters as a mapping and as attributes, and how a layer changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Never

from numpy.typing import ArrayLike, NDArray

from mha import layer_state
from mha.arguments import as_array
from mha.half_precision import shown
from mha.keywords import OwnNames, names_its_keywords, unknown_keyword
from mha.layer_attributes import Parameter
from mha.layer_state import LayerState

Array = NDArray[Any]

# Held while a layer changes, by one thread at a time: two changes at once would lose one, and
# load_parameters writes where prune_heads and freeze read. Calls need no lock.
changing = threading.RLock()


def _unlock_after_fork() -> None:
    global changing
    changing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_after_fork)


class Parameters(OwnNames):
    """The part of MultiHeadAttention that learns."""

    _state: LayerState

    W_q = Parameter()
    W_k = Parameter()
    W_v = Parameter()
    W_o = Parameter()
    b_q = Parameter()
    b_k = Parameter()
    b_v = Parameter()
    b_o = Parameter()
    sinks = Parameter()
    relative_bias = Parameter()
    q_norm = Parameter()
    k_norm = Parameter()

    def parameters(self) -> dict[str, Array]:
        """The live arrays by name: changing one in place changes the layer.

        >>> layer = mha.MultiHeadAttention(512, 8, use_bias=False)
        >>> list(layer.parameters())
        ['W_q', 'W_k', 'W_v', 'W_o']
        """
        return {name: shown(parameter) for name, parameter in self._state.parameters.items()}

    @names_its_keywords
    def load_parameters(self, mapping: Mapping[str, ArrayLike], **unknown: Never) -> None:
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
        if unknown:
            raise unknown_keyword(Parameters.load_parameters, unknown)
        layer_state.check_not_frozen(self._state, "mapping")
        arrays = layer_state.arrays_to_load(self._state, mapping)
        self._change(lambda state: layer_state.loaded(state, arrays))

    @property
    def num_parameters(self) -> int:
        """How many numbers the layer learns: 4 * embed_dim**2 without biases in the plain case.

        >>> mha.MultiHeadAttention(512, 8, use_bias=False).num_parameters
        1048576
        """
        return sum(parameter.size for parameter in self._state.parameters.values())

    def _change(self, changed: Callable[[LayerState], LayerState]) -> None:
        """Put changed(state) in the state's place; again, where a signal handler was faster."""
        with changing:
            while True:
                old = self._state
                new = changed(old)
                if self._state is old:
                    self._state = new
                    return

    def _set_parameter(self, name: str, array: ArrayLike) -> None:
        layer_state.check_not_frozen(self._state, name)
        layer_state.check_has(self._state.settings, name)
        converted = as_array(array, name)
        self._change(lambda state: layer_state.with_parameter(state, name, converted))
