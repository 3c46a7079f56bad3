"""Whether this process is a member of a group or communicator, and an operation by its number in torch, as old code
asks."""

from __future__ import annotations

import torch.distributed as dist

from bagua.collectives.communicator import BaguaCommunicator, CommMember
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.collectives.reduce_op import ReduceOp


class comm:  # noqa: N801 - the name of Bagua 0.9
    """`WORLD` is CommMember.WORLD."""

    WORLD = CommMember.WORLD


def _rank_not_in_comm(comm: BaguaCommunicator | None = None) -> bool:
    """Whether this process is no member. None stands for the global communicator of the default group."""
    return comm is CommMember.NON_COMM_MEMBER


def _rank_not_in_group(group: BaguaProcessGroup | dist.ProcessGroup | None = None) -> bool:
    """Whether this process is no member. None stands for the default group."""
    if isinstance(group, BaguaProcessGroup):
        return not group.is_member
    return group is not None and not isinstance(group, dist.ProcessGroup)


def torch_reduce_op_to_bagua(op: dist.ReduceOp.RedOpType) -> ReduceOp:
    """
    The operation of torch.distributed, SUM or MAX (or AVG), among Bagua's.

    Raises:
        ValueError: another operation.
    """
    from bagua.torch_api.data_parallel.functional import differentiable_op

    return differentiable_op("torch_reduce_op_to_bagua", op)
