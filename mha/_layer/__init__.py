"""The layer, `mha.MultiHeadAttention`, and its caches, `mha.KVCache` and `mha.PagedCache`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha._layer.kv_cache import KVCache as KVCache
    from mha._layer.paged_cache import PagedLayer as PagedLayer

_LATE = {"KVCache": "kv_cache", "PagedLayer": "paged_cache"}


def __getattr__(name: str) -> Any:
    """Classes of caches, for annotations: they load when they are first used."""
    if name not in _LATE:
        raise AttributeError(name)
    return getattr(import_module(f"mha._layer.{_LATE[name]}"), name)
