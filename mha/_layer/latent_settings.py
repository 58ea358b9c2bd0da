"""What a layer of latent attention is made with: its settings, checked."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mha._base.arguments import as_bool, as_finite, as_size
from mha._base.dtypes import layer_dtype, shown_dtype
from mha._functions.rotary import Rotary
from mha._layer.settings import check_rotary

MATRICES = ("W_dq", "W_uq", "W_q", "W_dkv", "W_uk", "W_uv", "W_o")


class LatentSettings(NamedTuple):
    """The constructor's arguments, defaults filled in. Under the names of `LayerSettings` there is
    what a call asks of both."""

    embed_dim: int
    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_head_dim: int
    use_bias: bool
    dtype: np.dtype[Any]
    query_rank: int | None = None  # None: one matrix W_q
    rotary: Rotary | None = None
    norm_eps: float = 1e-6
    scale: float | None = None

    @property
    def is_latent(self) -> bool:
        """Whether they are those of latent attention."""
        return True

    @property
    def matrices(self) -> tuple[str, ...]:
        """The names of what is packed when the layer freezes."""
        return MATRICES

    @property
    def norm_offset(self) -> float:
        """What is added to the weights of norms."""
        return 0.0

    @property
    def head_dim(self) -> int:
        """Of queries and of expanded keys."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Of what an absorbed cache holds of a position: the latent and the rotated columns."""
        return self.kv_rank + self.rope_dim

    @property
    def num_kv_heads(self) -> int:
        """Of an expanded cache."""
        return self.num_heads

    @property
    def query_dim(self) -> int:
        """The width of rows."""
        return self.embed_dim

    @property
    def key_dim(self) -> int:
        """The same."""
        return self.embed_dim

    @property
    def value_dim(self) -> int:
        """The same."""
        return self.embed_dim

    @property
    def call_scale(self) -> float:
        """What dot products are multiplied by where a call does not say."""
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by its name."""
        queries = self.num_heads * self.head_dim
        values = self.num_heads * self.value_head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        if self.query_rank is None:
            shapes["W_q"] = (self.embed_dim, queries)
        else:
            shapes |= {"W_dq": (self.embed_dim, self.query_rank), "q_norm": (self.query_rank,),
                       "W_uq": (self.query_rank, queries)}
        shapes |= {"W_dkv": (self.embed_dim, self.latent_dim), "kv_norm": (self.kv_rank,),
                   "W_uk": (self.kv_rank, self.num_heads * self.nope_dim),
                   "W_uv": (self.kv_rank, values), "W_o": (values, self.embed_dim)}
        if self.use_bias:
            shapes |= {f"b_{name}": shapes[f"W_{name}"][1:] for name in ("dq", "dkv", "o")
                       if f"W_{name}" in shapes}
        return shapes

    def wanted_for(self, name: str) -> str:
        """What a layer must be made with to have a parameter that this one has not."""
        if name == "W_q":
            return "one made with query_rank=None"
        if name.startswith("b_") and not self.use_bias:
            return "use_bias=True"
        return "one made with query_rank=r"


def checked_latent_settings(
        embed_dim: int, num_heads: int, *, query_rank: int | None, kv_rank: int, nope_dim: int,
        rope_dim: int, value_head_dim: int, rotary: Rotary | None, norm_eps: float,
        scale: float | None, use_bias: bool, dtype: DTypeLike) -> LatentSettings:
    """The constructor's arguments, checked."""
    settings = LatentSettings(
        as_size(embed_dim, "embed_dim"), as_size(num_heads, "num_heads"),
        as_size(kv_rank, "kv_rank"), as_size(nope_dim, "nope_dim"), as_size(rope_dim, "rope_dim"),
        as_size(value_head_dim, "value_head_dim"), as_bool(use_bias, "use_bias"),
        layer_dtype(dtype), None if query_rank is None else as_size(query_rank, "query_rank"),
        rotary, as_finite(norm_eps, "norm_eps", least=0),
        None if scale is None else as_finite(scale, "scale"))
    check_rotary(rotary, settings.rope_dim, "rope_dim")
    return settings


def spelled(settings: LatentSettings) -> list[str]:
    """The constructor's arguments as repr has them: those that are not the defaults."""
    plain = {"query_rank": None, "kv_rank": 0, "nope_dim": 0, "rope_dim": 0, "value_head_dim": 0,
             "rotary": None, "norm_eps": 1e-6, "scale": None, "use_bias": False}
    return [str(settings.embed_dim), str(settings.num_heads),
            *(f"{name}={getattr(settings, name)!r}" for name, default in plain.items()
              if getattr(settings, name) != default),
            f"dtype={shown_dtype(settings.dtype)}"]
