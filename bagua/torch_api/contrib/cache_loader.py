"""The kept path of CacheLoader."""

from bagua.contrib.caching.cache_loader import CacheLoader as CacheLoader
