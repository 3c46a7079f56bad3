"""Stores of samples, and the interface of those of your own."""

from bagua.contrib.caching.lmdb_store import LmdbStore
from bagua.contrib.caching.store import ClusterStore, MemoryStore, Store, StoreError, StoreFullError

__all__ = ["ClusterStore", "LmdbStore", "MemoryStore", "Store", "StoreError", "StoreFullError"]
