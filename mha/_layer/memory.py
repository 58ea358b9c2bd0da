"""Memory: the keys and values of an encoder, which a decoder asks again and again."""

from __future__ import annotations

from typing import Any, Never

from numpy.typing import ArrayLike, NDArray

from mha._base.keywords import names_its_keywords
from mha._layer.kv_cache import KVCache

Array = NDArray[Any]


class Memory(KVCache):
    """An encoder's keys and values: `MultiHeadAttention.new_memory` fills it, once."""

    __module__ = "mha"
    __slots__ = ()

    @names_its_keywords
    def append(self, key: ArrayLike, value: ArrayLike, lengths: ArrayLike | None = None,
               **unknown: Never) -> None:
        """Raises a ValueError: a memory is filled already."""
        raise ValueError("cache: got an append to a memory, wanted a new_cache()")

    def _fill(self, key: Array, value: Array, counts: Array | None) -> None:
        """Its positions, once; as those that `KVCache.append` takes."""
        self._extend(self._state, key.shape[2], counts, False,
                     lambda after, append: append(key, value))

    def __reduce__(self) -> tuple[Any, ...]:
        return KVCache._new_memory, (), self.__getstate__()
