"""The book's layers (Dive into Deep Learning, chapter 11), one module for each framework's form.

    from mha.compat.d2l import torch as d2l    # or tensorflow, jax, mxnet

The cells of section 11.5, those that write the layer out as a class too, run when their imports
are changed to these, the framework's own among them:

    PyTorch       from mha.compat.d2l import torch as d2l, torch
                  from mha.compat.d2l.torch import nn
    TensorFlow    from mha.compat.d2l import tensorflow as d2l, tensorflow as tf
    JAX           from mha.compat.d2l import jax as d2l
                  from mha.compat.d2l.jax import nn
                  import numpy as jnp
    MXNet         from mha.compat.d2l import mxnet as d2l
                  from mha.compat.d2l.mxnet import nn, np, npx

This package itself exports the PyTorch form.
"""

import importlib
from types import ModuleType

from mha.compat.d2l.torch import *  # noqa: F403
from mha.compat.d2l.torch import __all__ as __all__


def __getattr__(name: str) -> ModuleType:
    if name in ("jax", "mxnet", "tensorflow"):
        return importlib.import_module(f"mha.compat.d2l.{name}")
    raise AttributeError(f"module 'mha.compat.d2l' has no attribute {name!r}")
