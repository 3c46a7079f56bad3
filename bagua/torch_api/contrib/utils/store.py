"""The kept path of the stores' interface."""

from __future__ import annotations

from bagua.torch_api.contrib.caching.store import ClusterStore, Store, StoreError

__all__ = ["ClusterStore", "Store", "StoreError"]
