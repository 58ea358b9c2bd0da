"""Adapters: the names, argument orders and mask meanings of other programs, computed here.

d2l, flash_attn, flax, flex, jax, keras, numpy_tutorial, onnx, pytorch, pytorch_notebook,
threadpoolctl, transformers. All but the last two need NumPy alone: docs/coming_from.md.
"""

import importlib
import importlib.util
from types import ModuleType

_ADAPTERS = ("d2l", "flash_attn", "flax", "flex", "jax", "keras", "numpy_tutorial", "onnx",
             "pytorch", "pytorch_notebook", "threadpoolctl", "transformers")
_NEEDS = {"transformers": "torch transformers", "threadpoolctl": "threadpoolctl"}


def __getattr__(name: str) -> ModuleType:
    if name in _ADAPTERS:
        try:
            return importlib.import_module(f"mha.compat.{name}")
        except ModuleNotFoundError as error:
            if name not in _NEEDS:
                raise
            raise ModuleNotFoundError(f"mha.compat.{name}: {error}, wanted what it works with: pip"
                                      f" install {_NEEDS[name]}", name=error.name) from error
    raise AttributeError(f"module 'mha.compat' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Without those whose import would fail: help() and inspect import them all."""
    return [name for name in _ADAPTERS
            if all(map(importlib.util.find_spec, _NEEDS.get(name, "").split()))]
