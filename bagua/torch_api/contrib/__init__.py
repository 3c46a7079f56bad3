"""Parts around the training loop: samplers, layers, optimizers and caches that data-parallel training needs in
addition to gradient communication."""

from __future__ import annotations

import importlib
import sys

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

# Modules that were here.
for _old, _new in (
    ("cache_loader", "caching.cache_loader"),
    ("cached_dataset", "caching.cached_dataset"),
    ("fuse.optimizer", "fuse.optimizer"),
    ("load_balancing_data_loader", "load_balancing_data_loader"),
    ("sync_batchnorm", "sync_batchnorm"),
):
    _parent, _, _name = f"{__name__}.{_old}".rpartition(".")
    sys.modules[f"{_parent}.{_name}"] = sys.modules[f"bagua.contrib.{_new}"]
    setattr(importlib.import_module(_parent), _name, sys.modules[f"bagua.contrib.{_new}"])
