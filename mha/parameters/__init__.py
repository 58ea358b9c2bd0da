"""A layer's parameters from and to everyone's layouts, and the files that hold them.

`mha.MultiHeadAttention.from_state(state, layout, prefix=..., config=...)` makes a layer of what
a framework or a file keeps, `layer.to_state(layout)` the other way; `layouts()` lists the names of
layouts, `open(path)` reads .safetensors and .npz, an array at a time. A layout is a table: those
of the frameworks are in frameworks.py, of encoders in encoders.py, of language models in
decoders.py, fused.py and t5.py.
"""

from __future__ import annotations

__all__ = ["layouts"]


def layouts() -> list[str]:
    """The names of the layouts that `MultiHeadAttention.from_state` knows.

    >>> mha.parameters.layouts()[:3]
    ['bart', 'bert', 'bloom']
    """
    from mha.parameters.names import LAYOUTS

    return sorted(LAYOUTS)


def __dir__() -> list[str]:
    return sorted(__all__)
