"""The book's layers (Dive into Deep Learning, chapter 11), one module for each framework's form.

    from mha.compat.d2l import torch as d2l    # or tensorflow, jax, mxnet

This package itself exports the PyTorch form.
"""

from mha.compat.d2l.torch import *  # noqa: F403
from mha.compat.d2l.torch import __all__ as __all__
