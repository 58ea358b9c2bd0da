"""What a layer offers for decoding: its caches and memories. Loaded with the layer, so that
kv_cache.py and layer_cache.py need not be."""

from __future__ import annotations

from typing import Never

from numpy.typing import ArrayLike, DTypeLike

import mha
from mha.keywords import OwnNames, names_its_keywords, unknown_keyword
from mha.layer_state import LayerState


class Decoding(OwnNames):
    """The part of MultiHeadAttention that decodes."""

    _state: LayerState

    @names_its_keywords
    def new_cache(self, batch: int, capacity: int = 0, *, dtype: DTypeLike | None = None,
                  window: int | None = None, **unknown: Never) -> mha.KVCache:
        """An empty `mha.KVCache` for calls with cache=: key (batch, num_kv_heads, len, head_dim).

        capacity and window are the cache's; dtype is the layer's unless it is given, and may be
        narrower.

        Raises
        ------
        ValueError, TypeError, MemoryError: as `mha.KVCache`.

        Source: Shazeer 2019, "Fast Transformer Decoding"; Vaswani et al. 2017, section 3.2.2.

        >>> layer = mha.MultiHeadAttention(512, 8)
        >>> cache = layer.new_cache(batch=2)
        >>> prompt, token = np.ones((2, 10, 512)), np.ones((2, 1, 512))  # (batch, len, embed_dim)
        >>> layer(prompt, cache=cache).shape, layer(token, cache=cache).shape
        ((2, 10, 512), (2, 1, 512))
        """
        if unknown:
            raise unknown_keyword(Decoding.new_cache, unknown)
        from mha import layer_cache

        settings = self._state.settings
        cache = mha.KVCache(batch, settings.num_kv_heads, settings.head_dim,
                            settings.value_head_dim, capacity=capacity, window=window,
                            dtype=settings.dtype if dtype is None else dtype)
        layer_cache.check_cache_dtype(settings, cache, "dtype")
        return cache

    @names_its_keywords
    def new_memory(self, key: ArrayLike, value: ArrayLike | None = None,
                   key_lengths: ArrayLike | None = None,
                   key_positions: ArrayLike | None = None, **unknown: Never) -> mha.KVCache:
        """An encoder's keys and values, projected once.

        layer(query, cache=memory) then gives the bits of layer(query, key, value,
        key_lengths=key_lengths); of a layer of halves, whose memory is rounded, nearly.

        Parameters
        ----------
        key : array (batch, key_len, key_dim), or (key_len, key_dim) for one sequence
        value : array (batch, key_len, value_dim), by default key
        key_lengths : ints (batch,), optional
            How many of the key_len rows are real, the first ones; the others are not stored.
        key_positions : ints (key_len,) or (batch, key_len), by default 0, 1, ...
            Where the rows stand; moves only what rotates.

        Returns
        -------
        A `mha.KVCache` that refuses append. Changes of the parameters do not reach it.

        Raises
        ------
        ValueError, TypeError: as a call.

        Source: Vaswani et al. 2017, section 3.2.3, encoder-decoder attention.

        >>> layer = mha.MultiHeadAttention(512, 8)
        >>> memory = layer.new_memory(np.ones((2, 30, 512)), key_lengths=[30, 21])
        >>> layer(np.ones((2, 1, 512)), cache=memory).shape
        (2, 1, 512)
        """
        if unknown:
            raise unknown_keyword(Decoding.new_memory, unknown)
        from mha import layer_cache

        return layer_cache.new_memory(self._state, key, value, key_lengths, key_positions)
