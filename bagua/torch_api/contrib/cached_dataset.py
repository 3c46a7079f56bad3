"""The kept path of CachedDataset."""

from bagua.contrib.caching.cached_dataset import CachedDataset

__all__ = ["CachedDataset"]
