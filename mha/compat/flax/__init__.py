"""Flax' attention layers by their own names, on NumPy arrays, without importing flax or jax.

    from mha.compat.flax import linen as nn    # or nnx

Arguments, masks (True = attend), parameter trees and caches are those of Flax 0.12; the attention
is `mha`'s. Arrays of JAX on the CPU are accepted wherever NumPy's are. This package itself exports
Linen's names.

Where this differs from Flax on purpose: random numbers are NumPy's, keys may be ints, arrays of
ints, those of jax.random, flax.nnx.Rngs or generators; a query that sees no key gets the mean of
all values, as in Flax; NaN or infinity behind a mask never reaches the output; LayerNorm subtracts
the mean before it squares; a full cache is a ValueError; halves are computed in float32 and rounded
once; errors are ValueError and TypeError.
"""

import importlib
from types import ModuleType

from mha.compat.flax.linen import *  # noqa: F403
from mha.compat.flax.linen import __all__ as __all__


def __getattr__(name: str) -> ModuleType:
    if name in ("linen", "nnx"):
        return importlib.import_module(f"mha.compat.flax.{name}")
    raise AttributeError(f"module 'mha.compat.flax' has no attribute {name!r}")
