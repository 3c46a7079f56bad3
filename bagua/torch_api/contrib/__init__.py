"""Parts around the training loop: samplers, layers, optimizers and caches that data-parallel training needs in
addition to gradient communication. Each is loaded when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "BalancedSampler": "bagua.torch_api.contrib.balanced_sampler",
    "CacheLoader": "bagua.torch_api.contrib.cache_loader",
    "CachedDataset": "bagua.torch_api.contrib.cached_dataset",
    "LoadBalancingDistributedBatchSampler": "bagua.torch_api.contrib.load_balancing_data_loader",
    "LoadBalancingDistributedSampler": "bagua.torch_api.contrib.load_balancing_data_loader",
    "RegroupSampler": "bagua.torch_api.contrib.regroup_sampler",
    "SyncBatchNorm": "bagua.torch_api.contrib.sync_batchnorm",
    "fuse_optimizer": "bagua.torch_api.contrib.fuse.optimizer",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__} has no attribute {name!r}; it has {', '.join(_LAZY)}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(_LAZY)
