"""A compressed all-reduce between replicas of a sharded model (hybrid sharding): a hook of FSDP, for one module.

FSDP averages gradients over the ranks that share a model and calls the hook with this rank's shard of them; the hook
averages it over the ranks that hold the same shard of other replicas. Each replica averages a part of the shard as
bagua.fsdp.reduce_scatter does, compresses it and sends it to the others, so that all replicas have the same bits.

Runs in autograd's thread, and on CUDA on FSDP's all-reduce stream.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.codecs import Codec
from bagua.fsdp.reduce_scatter import reduce_scatter
from bagua.fsdp.residual import Residual
from bagua.fsdp.traffic import Traffic
from bagua.job.torch_internals import all_gather_flat


class ReplicaAllReduce:
    """
    Args:
        group: the ranks that hold the same shard.
        codec: of the gradients.
        traffic: counts what is sent.
        residual: error feedback of what the ranks send to be averaged, or None.
    """

    def __init__(self, group: dist.ProcessGroup, codec: Codec, traffic: Traffic, residual: Residual | None) -> None:
        self._group = group
        self._codec = codec
        self._traffic = traffic
        self.residual = residual

    def __call__(self, reduce_output: Tensor) -> None:
        """
        Args:
            reduce_output: [elements], a dtype of the codec; it becomes the average over the replicas.
        """
        if reduce_output.is_cuda:
            # Its memory belongs to the reduce-scatter stream, whose next user would not wait for this stream: torch
            # frees it here where gradients are reduced in another dtype than they are kept.
            reduce_output.record_stream(torch.cuda.current_stream(reduce_output.device))
        ranks, elements = self._group.size(), reduce_output.numel()
        if ranks == 1 or elements == 0:
            return
        flat = torch.nn.functional.pad(reduce_output, (0, -elements % (ranks * self._codec.alignment)))
        part = flat.new_empty(flat.numel() // ranks, dtype=torch.float32)
        sent = reduce_scatter(part, flat, self._group, self._codec, 1.0 / ranks, self.residual)
        own = self._codec.compress(part)
        gathered = own.new_empty((ranks, own.shape[1]))
        all_gather_flat(gathered, own, group=self._group)
        self._codec.decompress(gathered, flat)
        reduce_output.copy_(flat[:elements])
        plain = 2 * (ranks - 1) * reduce_output.nbytes // ranks
        self._traffic.count(sent + (ranks - 1) * own.nbytes, plain)
