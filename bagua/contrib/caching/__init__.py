"""What CacheLoader and CachedDataset are made of: stores, codecs, fingerprints, statistics."""
