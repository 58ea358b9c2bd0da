"""Files of llama.cpp, .gguf: their arrays as the model had them before it was converted, under the
names of llama.cpp; and the config that their metadata is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mha.parameters._files import Array, PlainFile, Tensor
from mha.parameters._regular_files import not_read, open_regular, wrong

# What GGUF calls the types that arrays can have here; its other ones are blocks of a few bits.
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
         "I16": "<i2", "I8": "i1"}
# Architectures by the names of llama.cpp -> the model_type of configs.
MODELS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
          "gemma3": "gemma3_text"}
PERMUTED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}  # of llama
OFFSET_NORMS = ("gemma", "gemma2", "gemma3")  # whose converters add 1 to every norm
LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}  # layers of those that scale by embed_dim / heads
FACTORS = "rope_freqs.weight"  # what Llama 3 divides its frequencies by
# Of the metadata -> of configs; the architecture stands in front.
KEYS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
}
BROKEN = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError)


class Metadata(dict[str, Any]):
    """What a file says of its model; `from_state` takes it as config=."""

    rope_factors: list[float] | None = None

    def config(self) -> dict[str, Any]:
        """The same in the words of a config.json."""
        architecture = self.get("general.architecture")
        if not isinstance(architecture, str):
            raise ValueError(f"general.architecture: got {architecture!r}, wanted a name")
        if architecture not in MODELS:
            raise ValueError(f"general.architecture: got {architecture!r}, wanted one of"
                             f" {', '.join(MODELS)}")
        found = {ours: _as_written(self[key]) for theirs, ours in KEYS.items()
                 if (key := f"{architecture}.{theirs}") in self}
        found["model_type"] = MODELS[architecture]
        turned = self.get(f"{architecture}.rope.dimension_count")
        head_dim = (found["head_dim"] if "head_dim" in found
                    else found["hidden_size"] // found["num_attention_heads"])
        if turned not in (None, head_dim):
            raise ValueError(f"rope.dimension_count: got {turned}, wanted {head_dim}, all columns"
                             " of a head")
        if architecture in LARGEST_GEMMAS:
            is_largest = found.get("num_hidden_layers") == LARGEST_GEMMAS[architecture]
            found["query_pre_attn_scalar"] = (
                found["hidden_size"] / found["num_attention_heads"] if is_largest
                else head_dim)
        if architecture == "gemma3":
            found["rope_local_base_freq"] = 10000.0
        scaling = self._rope_scaling(architecture)
        return found if scaling is None else {**found, "rope_scaling": scaling}

    def _rope_scaling(self, architecture: str) -> dict[str, Any] | None:
        before = f"{architecture}.rope.scaling."
        said = {key.removeprefix(before): value for key, value in self.items()
                if key.startswith(before)}
        if self.rope_factors is not None:
            return {"rope_type": "longrope", "short_factor": self.rope_factors,
                    "long_factor": self.rope_factors, "attention_factor": 1.0,
                    "original_max_position_embeddings": self.get(f"{architecture}.context_length")}
        if said.get("type") in (None, "none"):
            return None
        scaling = {"rope_type": said["type"], "factor": _as_written(said.get("factor"))}
        if "original_context_length" in said:
            scaling["original_max_position_embeddings"] = said["original_context_length"]
        return scaling


def _as_written(value: Any) -> Any:
    """A float32 as the config.json had it, with the fewest digits."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


class Gguf(PlainFile):
    """The gguf package reads the header; bytes are read here, since it maps the file, and a mapped
    file that is cut ends the process."""

    metadata: Metadata
    _types = TYPES
    _unread = ": quantised arrays are not read yet"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with open_regular(path) as file:
            self._remember(file)
        try:
            self.metadata, self._names = _header(path)
        except BROKEN as error:
            raise not_read(path, error, lambda start: start.startswith(b"GGUF")) from error
        architecture = self.metadata.get("general.architecture")
        self._architecture = architecture if isinstance(architecture, str) else None
        if self._architecture in MODELS:
            self.config = self._config(path)

    def _config(self, path: str) -> dict[str, Any]:
        if FACTORS in self._names:
            self.metadata.rope_factors = self[FACTORS].astype(float).ravel().tolist()
        try:
            return self.metadata.config()
        except BROKEN as error:
            raise wrong(path, error) from error

    def _read(self, name: str, where: Tensor) -> Array:
        return self._as_before(name, super()._read(name, where))

    def _as_before(self, name: str, array: Array) -> Array:
        """Without what the converter has done to it."""
        *_, kind, last = ("", *name.split("."))
        if kind in PERMUTED and self._architecture not in MODELS:
            raise wrong(self._path, f"{name} of a model {self._architecture!r}",
                        f"one of {', '.join(MODELS)}: others may have their rows in another order")
        if kind in PERMUTED and self._architecture == "llama":
            config = self.config or {}
            heads = config.get(PERMUTED[kind], config.get("num_attention_heads"))
            if type(heads) is not int or heads < 1 or len(array) % (2 * heads):
                raise wrong(self._path, f"{name} of {len(array)} rows for {heads} heads")
            pairs = array.reshape(heads, len(array) // heads // 2, 2, *array.shape[1:])
            return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
        if kind.endswith("norm") and last == "weight" and self._architecture in OFFSET_NORMS:
            return array - array.dtype.type(1)
        return array


def _header(path: str) -> tuple[Metadata, dict[str, Tensor]]:
    try:
        import gguf
    except ImportError as error:
        raise ImportError("gguf: got no package to read such files with, wanted"
                          " pip install gguf") from error

    class Reader(gguf.GGUFReader):
        """It believes every length; behind the file's end it finds nothing, for ever."""

        def _get(self, offset: int, dtype: Any, count: int = 1,
                 override_order: Any = None) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError("a file that ends before what it has said")
            return super()._get(int(offset), dtype, count, override_order)

    reader = Reader(path)
    if reader.byte_order == "S":
        raise ValueError("numbers in the other byte order")
    metadata = Metadata((name, field.contents()) for name, field in reader.fields.items()
                        if not name.startswith("GGUF."))
    names = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in tensor.shape)[::-1]
        kind = tensor.tensor_type.name
        if kind in TYPES and math.prod(shape) * np.dtype(TYPES[kind]).itemsize != tensor.n_bytes:
            raise ValueError(f"{tensor.name} of shape {shape} in {tensor.n_bytes} bytes")
        names[tensor.name] = Tensor(kind, shape, int(tensor.data_offset))
    return metadata, names


def of_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config that is the metadata of a file, as a config; any other as it is."""
    if isinstance(config, Metadata):
        return config.config()
    if "general.architecture" in config:
        raise TypeError("config: got a copy of a file's metadata, wanted the .metadata of the file"
                        " itself, which knows its rope_freqs, too")
    return config
