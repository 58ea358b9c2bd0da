"""The book's JAX form on NumPy arrays: `from mha.compat.d2l import jax as d2l`.

Calls return (output, attention_weights); dropout acts in calls with training=True. Weights have
Flax's layout, kernel (in, out); `weight` is the same as (out, in). For the section's own class
there is `nn`, with Flax's Module, Dense and compact; NumPy itself does as jnp:

    from mha.compat.d2l.jax import nn
    import numpy as jnp
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import secrets
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha._functions.options import RandomSource
from mha.compat._shared.layers import Linear
from mha.compat.d2l import _common, _helpers
from mha.compat.d2l._helpers import *  # noqa: F403

__all__ = ["AdditiveAttention", "DotProductAttention", "Module", "MultiHeadAttention", "get_key",
           "nn"]
__all__ += _helpers.__all__

OutputAndWeights = tuple[NDArray[Any], NDArray[Any]]
Variables = Mapping[str, dict[str, Any]]  # {"params": {"W_q": {"kernel": ...}, ...}}


def get_key() -> int:
    """A fresh key for `init_with_output`; any int will do for a repeatable one."""
    return secrets.randbits(63)


class Module:
    """Flax's way in and out of the parameters: init_with_output, init and apply.

    Unlike in Flax the module keeps its parameters, so that it may be called directly too. The
    parameters are {"params": {"W_q": {"kernel": ...}, ...}}, nested as the modules are.

    The annotations of a subclass are its fields, as in a dataclass; `setup`, which makes its
    parts, runs when it is made.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if inspect.get_annotations(cls) and "__init__" not in vars(cls):
            dataclasses.dataclass(eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        self.setup()

    def setup(self) -> None:
        """Makes the parts that have parameters; a subclass says which."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """What a call computes; a subclass says it."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__")

    def init_with_output(self, key: Any, *arguments: Any,
                         **options: Any) -> tuple[Any, Variables]:
        """(what a call returns, the parameters that key drew for it).

        key is an int, or anything else that `numpy.random.default_rng` takes.
        """
        generator = np.random.default_rng(key)
        _forget_parameters(self, generator)
        _draw_dropout_from(self, generator)
        returned = self(*arguments, **options)
        return returned, {"params": _parameters(self)}

    def init(self, key: Any, *arguments: Any, **options: Any) -> Variables:
        """The parameters that key draws for the sizes of the arguments."""
        return self.init_with_output(key, *arguments, **options)[1]

    def apply(self, variables: Variables, *arguments: Any, rngs: Mapping[str, Any] | None = None,
              **options: Any) -> Any:
        """What a call with these parameters returns; rngs={"dropout": key} draws its dropout."""
        _load(self, variables["params"])
        if rngs is not None:
            _draw_dropout_from(self, np.random.default_rng(rngs["dropout"]))
        return self(*arguments, **options)


_running = threading.local()  # depth: of calls by methods that are compact


def compact(method: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a call, as in Flax; its parts are made in `setup` all the same (RuntimeError)."""
    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        _running.depth = getattr(_running, "depth", 0) + 1
        try:
            return method(*arguments, **options)
        finally:
            _running.depth -= 1
    return call


class Dense(Linear):
    """x @ kernel + bias, sized at its first call.

    >>> Dense(4, use_bias=False)(np.ones((2, 3), np.float32)).shape
    (2, 4)
    """

    def __init__(self, features: int, use_bias: bool = True, *, rng: RandomSource = None) -> None:
        if getattr(_running, "depth", 0):
            raise RuntimeError("Dense: made in a call, where it would have other weights each"
                               " time; make it in setup(self), as self.name = nn.Dense(...)")
        super().__init__(features, bias=use_bias, rng=rng)


nn = SimpleNamespace(Module=Module, Dense=Dense, compact=compact)


class _Call(Module, _common.Attention):
    """How this form of the book calls DotProductAttention and AdditiveAttention."""

    def __call__(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
                 valid_lens: ArrayLike | None = None, training: bool = False) -> OutputAndWeights:
        """(output (batch, num_queries, v), weights (batch, num_queries, num_keys))."""
        output = self._attend(queries, keys, values, valid_lens, training)
        return output, self.attention_weights


class DotProductAttention(_Call, _common.DotProductAttention):
    """Scaled dot-product attention (d2l, section 11.3.3).

    >>> attention = DotProductAttention(dropout=0.5)
    >>> inputs = ones((2, 1, 2)), ones((2, 10, 2)), ones((2, 10, 4)), tensor([2, 6])
    >>> (output, weights), parameters = attention.init_with_output(get_key(), *inputs)
    """


class AdditiveAttention(_Call, _common.AdditiveAttention):
    """Additive attention (d2l, section 11.3.4), for queries and keys of unlike sizes.

    >>> attention = AdditiveAttention(num_hiddens=8, dropout=0.1)
    >>> inputs = ones((2, 1, 20)), ones((2, 10, 2)), ones((2, 10, 4)), tensor([2, 6])
    >>> (output, weights), parameters = attention.init_with_output(get_key(), *inputs)
    """


class MultiHeadAttention(Module, _common.MultiHeadAttention):
    """Multi-head attention (d2l, section 11.5), sized at the first call.

    Parameters
    ----------
    num_hiddens : int
        The width of the projections and of the output.
    num_heads : int
        Must divide num_hiddens (ValueError).
    dropout : float in [0, 1]
        On the attention weights, in calls with training=True.
    bias : bool
        Whether the four projections have biases.
    rng : None, int or numpy.random.Generator
        Draws the weights and the dropout of direct calls.

    >>> attention = MultiHeadAttention(100, 5, 0.5)
    >>> inputs = ones((2, 4, 100)), ones((2, 6, 100)), ones((2, 6, 100)), tensor([3, 2])
    >>> attention.init_with_output(get_key(), *inputs, training=False)[0][0].shape
    (2, 4, 100)
    """

    _dot_product_attention = DotProductAttention

    def __call__(self, queries: ArrayLike, keys: ArrayLike, values: ArrayLike,
                 valid_lens: ArrayLike | None = None, training: bool = False) -> OutputAndWeights:
        """(output (batch, num_queries, num_hiddens),
        weights (batch * num_heads, num_queries, num_keys))."""
        arguments = self._split(queries, keys, values, valid_lens)
        output, attention_weights = self.attention(*arguments, training=training)
        return self._join(output), attention_weights


def _parts(module: Module) -> dict[str, Any]:
    """The attributes that own parameters: Linear, and modules with such attributes."""
    return {name: part for name, part in vars(module).items()
            if isinstance(part, Linear) or (isinstance(part, Module) and _parts(part))}


def _parameters(module: Module) -> dict[str, Any]:
    """The parameters of a module by name, copied: {"W_q": {"kernel": ..., "bias": ...}, ...}."""
    found = {}
    for name, part in _parts(module).items():
        if isinstance(part, Linear):
            arrays = {"kernel": part.kernel, "bias": part.bias}
            found[name] = {kind: array.copy() for kind, array in arrays.items()
                           if array is not None}
        else:
            found[name] = _parameters(part)
    return found


def _load(module: Module, parameters: dict[str, Any]) -> None:
    """The inverse of `_parameters`."""
    parts = _parts(module)
    if parameters.keys() != parts.keys():
        raise ValueError(f"variables: got parameters of {sorted(parameters)}, wanted those of"
                         f" {sorted(parts)}")
    for name, part in parts.items():
        if isinstance(part, Linear):
            for kind in ("kernel", "bias") if part.bias is not None else ("kernel",):
                setattr(part, kind, parameters[name][kind])
        else:
            _load(part, parameters[name])


def _forget_parameters(module: Module, generator: np.random.Generator) -> None:
    """Back to the unsized start; generator draws what comes."""
    for part in _parts(module).values():
        if isinstance(part, Linear):
            part.forget(generator)
        else:
            _forget_parameters(part, generator)


def _draw_dropout_from(module: Module, generator: np.random.Generator) -> None:
    for part in (module, *vars(module).values()):
        if isinstance(part, _common.Attention):
            part._rng = generator
