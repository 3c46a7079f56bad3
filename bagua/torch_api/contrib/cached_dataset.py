"""The kept path of CachedDataset."""

from bagua.contrib.caching.cached_dataset import CachedDataset as CachedDataset
