"""DistributedDataParallel with Bagua's algorithms, and functional collectives."""

from __future__ import annotations

from bagua.torch_api.data_parallel.distributed import DistributedDataParallel, to_bagua_process_group

__all__ = ["DistributedDataParallel", "to_bagua_process_group"]
