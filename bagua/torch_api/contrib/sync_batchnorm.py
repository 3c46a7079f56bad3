"""The kept path of SyncBatchNorm."""

from bagua.contrib.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
