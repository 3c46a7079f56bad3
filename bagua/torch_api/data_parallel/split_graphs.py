"""torch.compile of a whole wrapper: its graph is cut where a bucket is full, as torch does for its own wrapper.

A compiled graph returns all its gradients at its end. So one graph for the whole model would send the first bucket when
the backward pass is nearly over. torch's compiler asks torch's wrapper class whether a forward pass of a wrapper runs,
and how large its buckets are (`torch._dynamo.config.optimize_ddp`, on by default).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from bagua.engine.bucket_plan import FIRST_BUCKET_BYTES


class SplitGraphs:
    """
    Attributes:
        bucket_bytes_cap: the name that the compiler reads: parameters of so many bytes make a graph.
        call: `call(module, inputs, kwargs)` is `module(*inputs, **kwargs)`.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes_cap = max(bucket_bytes, FIRST_BUCKET_BYTES)  # the compiler takes no smaller one
        # This call runs as it is, so that what it sets is there when the compiler meets the module.
        self.call: Any = torch.compiler.disable(self._call, recursive=False)  # type: ignore[no-untyped-call]

    def _call(self, module: nn.Module, inputs: Any, kwargs: Any) -> Any:
        ddp: Any = TorchDDP
        outer = ddp._active_ddp_module
        ddp._active_ddp_module = self
        try:
            return module(*inputs, **kwargs)
        finally:
            ddp._active_ddp_module = outer
