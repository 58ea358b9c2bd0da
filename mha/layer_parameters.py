"""A layer's parameters as a mapping and as attributes, and how a layer changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any, Never

from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha import layer_state
from mha.arguments import as_array
from mha.half_precision import shown
from mha.keywords import OwnNames, names_its_keywords, unknown_keyword
from mha.layer_attributes import Parameter
from mha.layer_state import LayerState
from mha.one_go import Step, assign, one_go, take
from mha.options import Window
from mha.rotary import Layout as RotaryLayout
from mha.rotary import Rotary

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
        self._change_and_write(lambda state: layer_state.loaded(state, arrays))

    @classmethod
    @names_its_keywords
    def from_state(
            cls, state: Mapping[str, Any], layout: str | None = None, *, prefix: str = "",
            config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
            layer_index: int | None = None, num_heads: int | None = None,
            num_kv_heads: int | None = None, head_dim: int | None = None,
            names: Mapping[str, str] | None = None, transposed: bool | None = None,
            rotary_layout: RotaryLayout | None = None, dtype: DTypeLike | None = None,
            dropout: float = 0.0,
            scale: float | EllipsisType | None = ..., softcap: float | EllipsisType | None = ...,
            window: Window | EllipsisType | None = ...,
            alibi: ArrayLike | EllipsisType | None = ...,
            rotary: Rotary | EllipsisType | None = ..., norm_eps: float | EllipsisType = ...,
            norm_offset: float | EllipsisType = ..., **unknown: Never) -> Any:
        """A layer of the parameters that a framework or a model's file keeps.

        Parameters
        ----------
        state : names with arrays, or tensors on the CPU
            Of `mha.parameters.open`, a state_dict, a tree of Flax, ...
        layout : str, by default that of config's model_type
            How they are named and arranged: one of `mha.parameters.layouts()`, or what configs call
            one of their models ("mistral").
        prefix : str
            What stands before the layer's own names: "encoder.layer.0.attention.". With {layer} in
            it, for the number of a layer, and without layer_index: all layers.
        config : a mapping, as a model's config.json, or a path of that file or its folder
            Gives heads, head_dim, scale, softcap, window, alibi, rotary and norm_eps. By default
            that of the folder where state is one that `mha.parameters.open` opened.
        layer_index : int, optional
            Which layer it is, where the config's layers differ.
        num_heads, num_kv_heads, head_dim : int
            By default what the config says, or follows from the shapes.
        names : ours with theirs, in place of layout
            Of a program with names of its own, {"q": "W_query", "k": "W_key", "v": "W_value",
            "o": "out_proj"}: layers, whose arrays are W_query.weight and W_query.bias, or
            W_query.kernel, or W_query itself; "qkv" is one layer of all three, beside each other.
            Or arrays: "W_q", ..., "b_o", "q_norm", "k_norm" (of each head), "sinks". Of a config
            sizes and norm_eps alone are read; masks that are stored are passed over.
        transposed : bool
            With names: whether weights are (out, in), as PyTorch's Linear has them. By default what
            the shapes say; where they fit both ways, it is needed.
        rotary_layout : "half" or "interleaved"
            Which columns the config's rotary embeddings turn together, by default as the layout's
            models do. Names do not tell: Llama's weights in Meta's own order, under Hugging Face's
            names, are "interleaved".
        dtype : by default that of the arrays
        The rest : as in `mha.MultiHeadAttention`, in place of what the config says.

        Returns
        -------
        A layer with copies of the arrays, or with {layer} the list of all. Arrays with biases
        decide use_bias. W_q is (query_dim, num_heads * head_dim), whatever the layout's shape.

        Raises
        ------
        ValueError: arrays that are missing, left over under the prefix or of a wrong shape, what
        is needed and given nowhere, what is not supported: all of it in one error, beside what was
        found, and the layout or the prefix that would fit. TypeError: other types.

        Source: Vaswani et al. 2017, section 3.2.2; the layouts are those of each framework.

        >>> layer = mha.MultiHeadAttention(64, 4)
        >>> state = layer.to_state("bert", prefix="encoder.layer.0.attention.")
        >>> mha.MultiHeadAttention.from_state(
        ...     state, "bert", prefix="encoder.layer.{layer}.attention.", num_heads=4)
        [MultiHeadAttention(64, 4, dtype=float32)]
        """
        if unknown:
            raise unknown_keyword(Parameters.from_state, unknown)
        from mha.parameters.reading import layers_from_state

        read = layers_from_state(
            state, layout, names, transposed, prefix, config, layer_index,
            {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}, dtype,
            rotary_layout,
            {"dropout": dropout, "scale": scale, "softcap": softcap, "window": window,
             "alibi": alibi, "rotary": rotary, "norm_eps": norm_eps, "norm_offset": norm_offset})
        return [*map(cls._of, read)] if isinstance(read, list) else cls._of(read)

    @classmethod
    def _of(cls, state: LayerState) -> Any:
        layer = cls.__new__(cls)
        layer._state = state
        return layer

    @names_its_keywords
    def to_state(self, layout: str, *, prefix: str = "", **unknown: Never) -> dict[str, Any]:
        """The parameters as a framework keeps them: the other way of `from_state`.

        Returns
        -------
        Copies by name, `prefix` before each; for "flax" a tree. A weight that PyTorch keeps is
        (out, in). Biases that the layout must have and the layer has not are zeros; options (scale,
        rotary, ...) belong to the model's config. Of bfloat16 numpy.savez keeps the bits alone,
        which `mha.parameters.open` reads back.

        Raises
        ------
        ValueError: parameters, sizes or options that the layout has no place for; an unknown
        layout. TypeError: other types.

        Source: Vaswani et al. 2017, section 3.2.2; the layouts are those of each framework.

        >>> mha.MultiHeadAttention(64, 4).to_state("pytorch")["in_proj_weight"].shape
        (192, 64)
        """
        if unknown:
            raise unknown_keyword(Parameters.to_state, unknown)
        from mha.parameters.writing import state_of_layer

        return state_of_layer(self._state, layout, prefix)

    @property
    def num_parameters(self) -> int:
        """How many numbers the layer learns: 4 * embed_dim**2 without biases in the plain case.

        >>> mha.MultiHeadAttention(512, 8, use_bias=False).num_parameters
        1048576
        """
        return sum(parameter.size for parameter in self._state.parameters.values())

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

    def _set_parameter(self, name: str, array: ArrayLike) -> None:
        layer_state.check_not_frozen(self._state, name)
        layer_state.check_has(self._state.settings, name)
        converted = as_array(array, name)
        self._change(lambda state: layer_state.with_parameter(state, name, converted))
