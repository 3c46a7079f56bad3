"""Parts around the training loop: each is loaded when it is asked for, and most need nothing else of Bagua."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "fuse_optimizer": "bagua.torch_api.contrib.fuse.optimizer",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
