"""Adapters: the names, argument orders and mask meanings of other programs, computed here."""

import importlib
from types import ModuleType

_ADAPTERS = ("d2l", "flax", "jax", "keras", "numpy_tutorial", "onnx", "pytorch", "pytorch_notebook",
             "threadpoolctl", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in _ADAPTERS:
        return importlib.import_module(f"mha.compat.{name}")
    raise AttributeError(f"module 'mha.compat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_ADAPTERS)
