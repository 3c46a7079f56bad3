"""ByteGrad: every rank steps with the mean (or sum) of all ranks' gradients, sent as a byte per element.

With C the compression MinMaxUInt8 (docs/design/compression.md), D its inverse, and a bucket cut into a chunk per rank:

    y[r] = C(1/n * sum over ranks i of D(C(g_i[r])))       the chunk of rank r, sent to all      (average=True)
    g[r] = D(y[r])                                         on every rank the same bits

With hierarchical=True there is a chunk per node: the ranks of a node add up their gradients as they are, and only the
leaders of nodes exchange bytes. Gradients of float32, float16 and bfloat16 are compressed; those of other dtypes
(float64, complex) are communicated as they are, as gradient_allreduce does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from bagua.comm_ops.compressed import COMPRESSED_DTYPES, MIN_MAX_UINT8, compressed_alignment
from bagua.comm_ops.public_bucket import BaguaBucket
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl

if TYPE_CHECKING:
    from bagua.collectives.process_group import BaguaProcessGroup
    from bagua.engine.algorithm_facade import AlgorithmFacade


class ByteGradAlgorithmImpl(AlgorithmImpl):
    """See ByteGradAlgorithm."""

    def __init__(self, process_group: BaguaProcessGroup, hierarchical: bool = True, average: bool = True) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.average = average

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        alignment = compressed_alignment(self.process_group, self.hierarchical)
        return [BaguaBucket(group, str(number), do_flatten, alignment) for number, group in enumerate(tensors)]

    def init_operations(self, bagua_ddp: AlgorithmFacade, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            average=self.average,
            compression=MIN_MAX_UINT8 if bucket.dtype in COMPRESSED_DTYPES else None,
            group=self.process_group,
        )


class ByteGradAlgorithm(Algorithm):
    """
    Args:
        hierarchical: reduce within each node first, without compression, so that only one rank per node sends to other
            nodes.
        average: the mean of the gradients; otherwise their sum.
    """

    is_interchangeable = True

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average

    def reify(self, process_group: BaguaProcessGroup) -> ByteGradAlgorithmImpl:
        return ByteGradAlgorithmImpl(process_group, self.hierarchical, self.average)
