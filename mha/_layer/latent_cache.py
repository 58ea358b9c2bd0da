"""LatentCache: what latent attention needs of the positions so far, a latent and rotated columns of
each, as keys of one head."""

from __future__ import annotations

from typing import Any, Never, Self, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha._base.dtypes import shown
from mha._base.keywords import names_its_keywords
from mha._layer.cache_state import read_only
from mha._layer.kv_cache import KVCache

Array = NDArray[Any]


class LatentCache(KVCache):
    """A KVCache of one key head, (kv_rank + rope_dim) columns, whose values are the first kv_rank
    columns of the keys: they are stored once, and the array of values has no columns."""

    __slots__ = ("_kv_rank",)

    def __init__(self, batch: int, kv_rank: int, rope_dim: int, *, capacity: int = 0,
                 dtype: DTypeLike) -> None:
        super().__init__(batch, 1, kv_rank + rope_dim, kv_rank, capacity=capacity, dtype=dtype)
        state = self._state
        self._state = state._replace(value=state.key[..., :0])
        self._kv_rank = kv_rank

    @property
    def value_head_dim(self) -> int:
        """kv_rank: the columns of a latent."""
        return self._kv_rank

    @property
    def value(self) -> Array:
        """(batch, 1, longest, kv_rank): the latents, a view of key."""
        return read_only(shown(self._state.held()[0])[..., :self._kv_rank])

    def value_parts(self) -> tuple[Array, Array]:
        """`key_parts`, but for the rotated columns: views, too."""
        first, second = self.key_parts()
        return first[..., :self._kv_rank], second[..., :self._kv_rank]

    @names_its_keywords
    def append(self, key: ArrayLike, value: ArrayLike, lengths: ArrayLike | None = None,
               **unknown: Never) -> None:
        """Raises a ValueError: a layer's call appends."""
        raise ValueError("cache: got an append to a latent cache, wanted a call of the layer with"
                         " cache=")

    def __copy__(self) -> Self:
        other = super().__copy__()
        other._kv_rank = self._kv_rank
        return other

    def __getstate__(self) -> dict[str, Any]:
        pickled = super().__getstate__()
        del pickled["value"]
        return {**pickled, "kv_rank": self._kv_rank}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        """Of what `__getstate__` gave; all else is a ValueError."""
        others = dict(pickled) if isinstance(pickled, dict) else {}
        kv_rank, key = others.pop("kv_rank", None), cast(Any, others.get("key"))
        shape: tuple[int, ...] = key.shape if type(key) is np.ndarray else ()
        if type(kv_rank) is not int or len(shape) != 4 or not 0 < kv_rank < shape[-1]:
            raise ValueError("state: got no latents of (batch, 1, len, kv_rank + rope_dim), wanted"
                             " what pickling a cache gives")
        super().__setstate__({**others, "value": key[..., :kv_rank]})
        self._state = self._state._replace(value=self._state.key[..., :0])
        self._kv_rank = kv_rank
