"""The layer, `mha.MultiHeadAttention`, and its cache, `mha.KVCache`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha._layer.kv_cache import KVCache as KVCache


def __getattr__(name: str) -> Any:
    """KVCache, for annotations: it loads when it is first used."""
    if name == "KVCache":
        from mha._layer.kv_cache import KVCache

        return KVCache
    raise AttributeError(name)
