"""A layer's parameters from and to everyone's layouts, and the files that hold them.

`mha.MultiHeadAttention.from_state(state, layout, prefix=..., config=...)` makes a layer of what
a framework or a file keeps, `layer.to_state(layout)` the other way; `layouts()` lists the names of
layouts and models, `open(path)` reads .safetensors, .npz and .gguf, an array at a time. A layout is
a table: of frameworks in _layouts.py, of models in the files beside it.
"""

from __future__ import annotations

import os

from mha._base.keywords import checks_keywords
from mha.parameters._files import Arrays
from mha.parameters._folders import opened
from mha.parameters._layouts import LAYOUTS, OF_MODELS

__all__ = ["layouts", "open"]


def layouts() -> list[str]:
    """The names of layouts that `from_state` of layers takes.

    Models that have one are among them, by the model_type of their configs: those whose attention
    layers in transformers 5.23, small and of random numbers, give what those give that are read
    here. A model of several parts is read by the model_type of its text_config.
    Those of DeepSeek are of `MultiHeadLatentAttention`, the others of `MultiHeadAttention`.

    >>> [name for name in mha.parameters.layouts() if name.startswith("gemma")]
    ['gemma', 'gemma2', 'gemma3', 'gemma3_text']
    """
    return sorted(LAYOUTS | OF_MODELS)


@checks_keywords
def open(path: str | os.PathLike[str]) -> Arrays:
    """The arrays of a file, or of a model's folder, by name, each read when it is asked for.

    path is a .safetensors, .npz or .gguf file; the index of several (model.safetensors.index.json);
    or a folder as it was downloaded, whose config.json `from_state` then takes as its config. So a
    layer of a model of 10 GB is read without the rest. .safetensors needs the package of that name.

    A .gguf file has its arrays under the names of llama.cpp (`prefix="blk.{layer}."`), with the
    numbers that the model had before: rows of query and key in their old order, norms of Gemma
    without the added 1. Its `metadata`, whose texts and arrays are read when they are asked for,
    serves as config=, and does so where none is given. Arrays of F32, F16 and BF16 are NumPy's.
    Those of Q8_0, Q4_0, Q4_K and Q6_K keep their blocks: they have shape, dtype ("q8_0", ...),
    nbytes, T and `unpack()`, which makes float32 (out, in), as numpy.asarray does, to the bits of
    the gguf package; `array[rows]` makes float32 of some rows. `mha.pack(array.T)` and a layer keep
    blocks of Q8_0 and Q4_0 as they are, and the float32 numbers of the others. Other types are an
    error when they are asked for, and so are query and key of a model that is not llama, qwen2,
    qwen3, gemma2 or gemma3.

    bfloat16 is that of ml_dtypes where it is imported, and else fit for mha alone; in .npz it is
    what NumPy writes of it, two bytes of no type ("V2"). Nothing is ever unpickled. Several files
    as one: `collections.ChainMap(open(one), open(other))`.

    Returns
    -------
    A mapping of names to arrays, new ones (n, m), ... at each reading; `close()`, or leaving a
    `with` block, gives the file back. Its `config` is that of the folder or file, or None; of a
    .gguf file that lacks what it needs, a ValueError when it is asked for.

    Raises
    ------
    ValueError: another kind of file, among them PyTorch's pickles (the error says how to convert
    them), FIFOs and devices; one that does not fit together, when it is opened or the array is
    read: headers that are too long or too deep, offsets out of range or overlapping, sizes that
    overflow, names that come twice, pickled objects, a torn archive, shards that are not those of
    the index. OSError: what the system says. ImportError: .safetensors without the package.

    Source: the formats of safetensors 0.4 and NumPy 1.26, and version 3 of GGUF.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/weights.npz", W=np.ones((2, 3)))
    ...     mha.parameters.open(f"{folder}/weights.npz")["W"].shape
    (2, 3)
    """
    return opened(path)


def __dir__() -> list[str]:
    return sorted(__all__)
