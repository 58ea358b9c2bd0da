"""Adapters: the names, argument orders and mask meanings of other programs, computed here."""

import importlib
import importlib.util
from types import ModuleType

_ADAPTERS = ("d2l", "flax", "jax", "keras", "numpy_tutorial", "onnx", "pytorch", "pytorch_notebook",
             "threadpoolctl", "transformers")
_NEEDS = {"transformers": "torch", "threadpoolctl": "threadpoolctl"}


def __getattr__(name: str) -> ModuleType:
    if name in _ADAPTERS:
        return importlib.import_module(f"mha.compat.{name}")
    raise AttributeError(f"module 'mha.compat' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Without those whose import would fail: help() and inspect import them all."""
    return [name for name in _ADAPTERS
            if name not in _NEEDS or importlib.util.find_spec(_NEEDS[name])]
