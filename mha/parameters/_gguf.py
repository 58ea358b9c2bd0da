"""Files of llama.cpp, .gguf: their arrays as the model had them before it was converted, under the
names of llama.cpp; and the config that their metadata is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mha._functions.quantised_array import KINDS, QuantisedArray
from mha.parameters._files import Array, PlainFile, Tensor
from mha.parameters._gguf_header import MAGIC, header_of
from mha.parameters._gguf_metadata import FACTORS, MODELS, Metadata
from mha.parameters._regular_files import not_read, open_regular, wrong

# What GGUF calls the types of numbers; its other ones are blocks of a few bits.
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
         "I16": "<i2", "I8": "i1"}
HEADS, KEY_HEADS = "attention.head_count", "attention.head_count_kv"
PERMUTED = {"attn_q": HEADS, "attn_k": KEY_HEADS}  # of llama
OFFSET_NORMS = ("gemma", "gemma2", "gemma3")  # whose converters add 1 to every norm


class Gguf(PlainFile):
    """Bytes are read, not mapped: a mapped file that is cut ends the process."""

    metadata: Metadata
    _types = TYPES
    _other_types = "".join(f", {kind.upper()}" for kind in KINDS)

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with open_regular(path) as file:
            self._remember(file)
            try:
                header = header_of(file)
            except ValueError as error:
                raise not_read(path, error, lambda start: start.startswith(MAGIC)) from error
        self._names = header.tensors
        self.metadata = Metadata(path, header.values, self._opened_again,
                                 self._factors)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """What the metadata says, of a model that is known here."""
        return self.metadata.config() if self.metadata.architecture in MODELS else None

    def _factors(self) -> Any:
        return self.get(FACTORS)

    def _read(self, name: str, where: Tensor) -> Any:
        kind = where.dtype.lower()
        if kind not in KINDS:
            return self._as_before(name, super()._read(name, where))
        *axes, width = where.shape
        row = width // KINDS[kind].numbers * KINDS[kind].nbytes
        data = self._numbers(name, "u1", math.prod(axes) * row, where.start)
        data = self._shaped(name, data, (math.prod(axes), row))
        return self._as_before(name, QuantisedArray(kind, where.shape, data))

    def _as_before(self, name: str, array: Array | QuantisedArray) -> Array | QuantisedArray:
        """Without what the converter has done to it."""
        *_, kind, last = ("", *name.split("."))
        architecture = self.metadata.architecture
        if kind in PERMUTED and architecture not in MODELS:
            raise wrong(self._path, f"{name} of a model {architecture!r}",
                        f"one of {', '.join(MODELS)}: others may have their rows in another order")
        if kind in PERMUTED and architecture == "llama":
            order = self._halves_before(name, kind, array)
            return array.in_rows(order) if isinstance(array, QuantisedArray) else array[order]
        if kind.endswith("norm") and last == "weight" and architecture in OFFSET_NORMS:
            plain = np.asarray(array)
            return plain - plain.dtype.type(1)
        return array

    def _halves_before(self, name: str, kind: str,
                       array: Array | QuantisedArray) -> np.ndarray[Any, np.dtype[np.intp]]:
        """The rows of query and key in the order in which they had the pairs of rotary embeddings
        in two halves of a head; the file has them beside each other."""
        key = PERMUTED[kind] if f"llama.{PERMUTED[kind]}" in self.metadata else HEADS
        heads = self.metadata.count(key)
        rows = array.shape[0] if array.shape else 0
        if not array.shape or rows % (2 * heads):
            raise wrong(self._path, f"{name} of {rows} rows for {heads} heads")
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).ravel()
