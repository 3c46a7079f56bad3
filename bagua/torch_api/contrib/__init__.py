"""Parts around the training loop: samplers, layers, optimizers and caches that data-parallel training needs in
addition to gradient communication."""

from bagua.contrib.caching.cache_loader import CacheLoader, CacheStatistics
from bagua.contrib.caching.cached_dataset import CachedDataset
from bagua.contrib.fuse.optimizer import fuse_optimizer
from bagua.contrib.load_balancing_data_loader import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from bagua.contrib.sync_batchnorm import SyncBatchNorm
from bagua.torch_api.contrib.balanced_sampler import BalancedSampler
from bagua.torch_api.contrib.regroup_sampler import RegroupSampler

__all__ = [
    "BalancedSampler",
    "CacheLoader",
    "CacheStatistics",
    "CachedDataset",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "RegroupSampler",
    "SyncBatchNorm",
    "fuse_optimizer",
]
