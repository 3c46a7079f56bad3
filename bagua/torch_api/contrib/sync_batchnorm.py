"""The kept path of SyncBatchNorm."""

from bagua.contrib.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
