"""A reduce-scatter that sends compressed gradients: torch's interface ReduceScatter, for one FSDP module.

Every rank compresses its gradients, one chunk for each shard, sends chunk r to rank r, and adds up what comes in fp32.
Nothing is rounded twice, and what a rank keeps for itself is not rounded at all. The sum runs in the order of the
ranks, so that its bits depend on the gradients alone. Over several nodes, the ranks of a node first reduce exactly, and
what is compressed is their sum (fsdp/nodes.py).

Runs in autograd's thread. On CUDA all of it is put on the current stream, which is FSDP's reduce-scatter stream; the
exchange runs on NCCL's own between two parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.codecs import Codec
from bagua.codecs.fused import decompress_reduce
from bagua.fsdp.collective_errors import named_errors
from bagua.fsdp.nodes import Hops, Nodes, Traffic
from bagua.fsdp.residual import Residual
from bagua.job.torch_internals import reduce_scatter_flat


class CompressedReduceScatter:
    """
    Args:
        hops: of `nodes`; None: one exchange between all ranks.
        residual: error feedback, or None.
    """

    def __init__(
        self,
        codec: Codec,
        nodes: Nodes,
        traffic: Traffic,
        hops: Hops | None = None,
        residual: Residual | None = None,
        title: str = "the model",
    ) -> None:
        self._codec = codec
        self._nodes = nodes
        self._hops = hops
        self._what = f"The reduce-scatter of {codec.name} gradients of {title}"
        self._traffic = traffic
        self.residual = residual

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """
        Args:
            output_tensor: [elements], a dtype of the codec.
            input_tensor: [ranks * elements], of the same dtype; it is overwritten.
            op: AVG, SUM or PREMUL_SUM.
            async_op: without effect: on CUDA the result is there for the current stream, on CPUs it is there.

        Raises:
            CollectiveError: a rank or the network failed.
        """
        plain = self._nodes.leaving_ring(input_tensor.nbytes)
        factor = factor_of(op, group.size())
        hops, gradients = self._hops, input_tensor
        with named_errors(self._what, group):
            if hops is not None:
                gradients, factor = reduce_within_nodes(gradients, hops, factor)
            between = group if hops is None else hops.between
            each = reduce_scatter(output_tensor, gradients, between, self._codec, factor, self.residual)
        sent = self._nodes.leaving_all_to_all(each) if hops is None else (hops.between.size() - 1) * each
        self._traffic.count(sent, plain)


def reduce_within_nodes(gradients: Tensor, hops: Hops, factor: float) -> tuple[Tensor, float]:
    """The first hop: sums over the ranks of a node, of the chunks for the ranks that share this rank's position.

    Args:
        gradients: [ranks * elements], contiguous; it is overwritten.
        factor: what their sum is to be multiplied by.

    Returns:
        [nodes * elements], the first part of the memory of `gradients`, and what its sum is to be multiplied by.
    """
    by_position = gradients.view(len(hops.order), -1).index_select(0, hops.order).view(-1)
    ranks = hops.within.size()
    if gradients.dtype == torch.float16:  # as torch's mean: a sum may be more than the largest number
        by_position, factor = by_position.mul_(1 / ranks), factor * ranks
    summed = gradients[: gradients.numel() // ranks]
    reduce_scatter_flat(summed, by_position, group=hops.within)
    return summed, factor


def reduce_scatter(
    output: Tensor,
    gradients: Tensor,
    group: dist.ProcessGroup,
    codec: Codec,
    factor: float,
    residual: Residual | None = None,
) -> int:
    """Writes factor * the sum over ranks of their chunk `rank` of `gradients` into `output`.

    Args:
        output: [elements], the dtype of `gradients` or fp32.
        gradients: [ranks * elements], contiguous; it is overwritten.
        factor: 1 / ranks for the mean.

    Returns:
        the bytes that this rank has sent to each other rank.
    """
    ranks, rank, elements = group.size(), group.rank(), output.numel()
    if elements == 0:
        return 0
    if residual is not None:
        residual.add_to(gradients, ranks)
    sent = codec.compress(gradients, ranks)
    received = torch.empty_like(sent)
    exchange = dist.all_to_all_single(received, sent, group=group, async_op=True)
    if residual is not None:
        residual.keep(gradients, sent, codec, rank)
    exchange.wait()
    decompress_reduce(codec, received, gradients.view(ranks, elements)[rank], rank, factor, output)
    return sent.shape[1]


def factor_of(op: Any, ranks: int) -> float:
    """What a sum over `ranks` ranks is multiplied by to give torch's reduction `op`.

    Raises:
        ValueError: `op` is not one that FSDP uses.
    """
    if op == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if op == dist.ReduceOp.SUM:
        return 1.0
    # PREMUL_SUM carries its factor, which only its pickled form tells.
    if op == dist.ReduceOp.PREMUL_SUM:
        _, factor = op.__getstate__()
        return float(factor)
    raise ValueError(f"bagua.fsdp reduces gradients by AVG, SUM or PREMUL_SUM, and was asked for {op}")
