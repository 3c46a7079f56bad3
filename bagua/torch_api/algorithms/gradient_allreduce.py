"""Gradient all-reduce: every rank steps with the mean (or sum) of all ranks' gradients, as torch's DDP does.

g = 1/n * sum over ranks i of g_i        (average=True)
"""

from __future__ import annotations

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.public_bucket import BaguaBucket
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl


class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    """See GradientAllReduceAlgorithm."""

    def __init__(self, process_group: BaguaProcessGroup, hierarchical: bool = False, average: bool = True) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.average = average

    def init_operations(self, bagua_ddp: AlgorithmFacade, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical, average=self.average, group=self.process_group
        )

    def options_without_effect(self, bagua_ddp: AlgorithmFacade) -> list[str]:
        group = self.process_group
        if not self.hierarchical or group.size == 1 or not group.topology.is_one_node:
            return []
        return ["hierarchical=True has no effect: there is one node"]


class GradientAllReduceAlgorithm(Algorithm):
    """
    Args:
        hierarchical: reduce within each node first, so that only one rank per node sends to other nodes.
        average: the mean of the gradients; otherwise their sum.
    """

    is_interchangeable = True
    follows_regroup = True
    weighs_batches = True

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average

    def equivalents(self, process_group: BaguaProcessGroup) -> list[GradientAllReduceAlgorithm]:
        if type(self) is not GradientAllReduceAlgorithm:
            return []
        nodes = process_group.topology.nodes
        if len(nodes) == 1 or len(nodes) == process_group.size:
            return []  # the same operations
        return [GradientAllReduceAlgorithm(not self.hierarchical, self.average)]

    def reify(self, process_group: BaguaProcessGroup) -> GradientAllReduceAlgorithmImpl:
        return GradientAllReduceAlgorithmImpl(process_group, self.hierarchical, self.average)
