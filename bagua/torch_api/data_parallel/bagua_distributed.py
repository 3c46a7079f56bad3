"""The kept path of the engine."""

from __future__ import annotations

from bagua.engine.data_parallel import DataParallelEngine

__all__ = ["BaguaDistributedDataParallel"]

BaguaDistributedDataParallel = DataParallelEngine
