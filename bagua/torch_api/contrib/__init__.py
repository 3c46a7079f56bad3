"""Parts around the training loop: each is loaded when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "CacheLoader": "bagua.torch_api.contrib.cache_loader",
    "CachedDataset": "bagua.torch_api.contrib.cached_dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
