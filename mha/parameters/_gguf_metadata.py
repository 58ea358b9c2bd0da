"""What a .gguf file says of its model, and the same in the words of a config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from mha._base.arguments import printable
from mha.parameters._gguf_header import Later
from mha.parameters._regular_files import wrong

ARCHITECTURE = "general.architecture"
LONGEST_SHOWN = 40  # of a text in an error
LARGEST_COUNT = 2**31 - 1  # of heads, columns, positions
# Architectures by the names of llama.cpp -> the model_type of configs.
MODELS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
          "gemma3": "gemma3_text"}
LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}  # layers of those that scale by embed_dim / heads
FACTORS = "rope_freqs.weight"  # the array that Llama 3 divides its frequencies by
# Of the metadata -> of configs; the architecture stands in front. Whole numbers, and others.
COUNTS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
}
NUMBERS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
}
# What a model cannot do without, beside its heads and their width.
EPSILON, WINDOW = "attention.layer_norm_rms_epsilon", "attention.sliding_window"
NEEDED = {"qwen3": (EPSILON,), "gemma2": ("attn_logit_softcapping", WINDOW, "block_count"),
          "gemma3": (EPSILON, WINDOW, "block_count")}
# What scales the frequencies. Factors of ONES change nothing where they are 1.
SCALING = "rope.scaling."
TYPE, FACTOR, ORIGINAL = SCALING + "type", SCALING + "factor", SCALING + "original_context_length"
OLD_FACTOR = "rope.scale_linear"  # in files of 2023
BETAS = {SCALING + "yarn_beta_fast": "beta_fast", SCALING + "yarn_beta_slow": "beta_slow"}
ONES = tuple(SCALING + name for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"))
KNOWN = (TYPE, FACTOR, ORIGINAL, SCALING + "finetuned", *BETAS, *ONES)


class Metadata(Mapping[str, Any]):
    """What a file says of its model, by key; texts and arrays are read when they are asked for.
    `from_state` takes it as config=."""

    def __init__(self, path: str, values: dict[str, Any], opened_again: Callable[[], BinaryIO],
                 factors: Callable[[], Any]) -> None:
        """values: as the header has them; factors: FACTORS, or None."""
        self._path = path
        self._values = values
        self._opened_again = opened_again
        self._factors = factors

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, Later):
            with self._opened_again() as file:
                try:
                    value = value.read(file)
                except ValueError as error:
                    raise wrong(self._path, f"{key}: {error}") from error
            self._values[key] = value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __repr__(self) -> str:
        return f"<{len(self)} values of {self._path!r}>"

    @property
    def architecture(self) -> str | None:
        name = self.get(ARCHITECTURE)
        return name if isinstance(name, str) else None

    def config(self) -> dict[str, Any]:
        """The same in the words of a config.json."""
        if self.architecture not in MODELS:
            raise self._wrong(ARCHITECTURE, f"one of {', '.join(MODELS)}")
        for key in ("attention.head_count", *NEEDED.get(self.architecture, ())):
            self._check_has(key)
        found: dict[str, Any] = {"model_type": MODELS[self.architecture]}
        found |= {name: self.count(key) for key, name in COUNTS.items() if self._has(key)}
        found |= {name: self._number(key) for key, name in NUMBERS.items() if self._has(key)}
        return found | self._scale(found) | self._rope(found)

    def count(self, key: str) -> int:
        """A whole number of at least 1, by its key without the architecture."""
        value = self._raw(key)
        if type(value) is not int or not 1 <= value <= LARGEST_COUNT:
            raise self._wrong(self._full(key), f"a whole number from 1 to {LARGEST_COUNT}")
        return value

    def _number(self, key: str) -> float:
        """A number above 0: of a float32 the one that the config.json had, with fewest digits."""
        value = self._raw(key)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._wrong(self._full(key), "a finite number above 0")
        with np.errstate(all="ignore"):
            narrow = np.float32(value)
        return float(str(narrow)) if isinstance(value, float) and float(narrow) == value else value

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _has(self, key: str) -> bool:
        return self._full(key) in self

    def _raw(self, key: str) -> Any:
        return self._values.get(self._full(key))

    def _check_has(self, key: str, instead: str = "") -> None:
        if not self._has(key):
            raise self._wrong(self._full(key), f"it{instead} in the metadata, or config= of your"
                                               " own")

    def _wrong(self, key: str, wanted: str) -> ValueError:
        """Of a key that is not there, or whose value is of no use."""
        value = self._values.get(key)
        if isinstance(value, Later):
            shown = "an array" if value.length is not None else repr(self[key][:LONGEST_SHOWN])
        else:
            shown = "none" if value is None else repr(value)
        return ValueError(f"{printable(self._path)}: {printable(key)}: got {shown}, wanted"
                          f" {wanted}")

    def _head_dim(self, found: Mapping[str, Any]) -> int:
        if "head_dim" in found:
            return int(found["head_dim"])
        self._check_has("embedding_length", f", or {self._full('attention.key_length')},")
        return int(found["hidden_size"] // found["num_attention_heads"])

    def _scale(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """What Gemma's scores are scaled by."""
        if self.architecture not in LARGEST_GEMMAS:
            return {}
        if found["num_hidden_layers"] != LARGEST_GEMMAS[self.architecture]:
            return {"query_pre_attn_scalar": self._head_dim(found)}
        self._check_has("embedding_length")
        return {"query_pre_attn_scalar": found["hidden_size"] / found["num_attention_heads"]}

    def _rope(self, found: Mapping[str, Any]) -> dict[str, Any]:
        head_dim = self._head_dim(found)
        if self._raw("rope.dimension_count") not in (None, head_dim):
            raise self._wrong(self._full("rope.dimension_count"),
                              f"{head_dim}, all columns of a head")
        rope: dict[str, Any] = {}
        if self.architecture == "gemma3":
            swa = "rope.freq_base_swa"
            rope["rope_local_base_freq"] = self._number(swa) if self._has(swa) else 10000.0
        scaling = self._rope_scaling()
        factors = self._factors()
        if factors is not None:
            if scaling is not None:
                raise wrong(self._path, f"{FACTORS} beside {self._full(TYPE)}",
                            "one of the two")
            scaling = self._by_factors(factors, head_dim)
        return rope if scaling is None else {**rope, "rope_scaling": scaling}

    def _by_factors(self, factors: Any, head_dim: int) -> dict[str, Any]:
        numbers = np.asarray(factors, float)
        if numbers.shape != (head_dim // 2,) or not (np.isfinite(numbers) & (numbers > 0)).all():
            raise wrong(self._path, f"{FACTORS} of shape {numbers.shape}",
                        f"{head_dim // 2} finite numbers above 0")
        listed = numbers.tolist()
        return {"rope_type": "longrope", "short_factor": listed, "long_factor": listed,
                "attention_factor": 1.0, "original_max_position_embeddings": 1}

    def _rope_scaling(self) -> dict[str, Any] | None:
        """What a config says of it; a factor without a type is linear."""
        for key in self:
            known = key.removeprefix(self._full(""))
            if known.startswith(SCALING) and key != known and (
                    known not in KNOWN or (known in ONES and self._values[key] != 1)):
                raise self._wrong(key, "a model without it: mha does not have it")
        factor = OLD_FACTOR if self._has(OLD_FACTOR) and not self._has(FACTOR) else FACTOR
        kind = self.get(self._full(TYPE), "linear" if self._has(factor) else "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise self._wrong(self._full(TYPE), "none, linear or yarn")
        self._check_has(factor)
        scaling = {"rope_type": kind, "factor": self._number(factor)}
        return scaling | self._of_yarn() if kind == "yarn" else scaling

    def _of_yarn(self) -> dict[str, Any]:
        original = ORIGINAL if self._has(ORIGINAL) else "context_length"
        self._check_has(original, f", or {self._full(ORIGINAL)},")
        return {"original_max_position_embeddings": self.count(original),
                **{name: self._number(key) for key, name in BETAS.items() if self._has(key)}}


def of_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config that is the metadata of a file, as a config; any other as it is."""
    if isinstance(config, Metadata):
        return config.config()
    if ARCHITECTURE in config:
        raise TypeError("config: got a copy of a file's metadata, wanted the .metadata of the file"
                        " itself, which knows its rope_freqs, too")
    return config
