"""Process groups and collectives under their public names. The work is in bagua.collectives."""

from __future__ import annotations

from bagua.collectives.coalesced import allreduce_coalesced_inplace, broadcast_coalesced
from bagua.collectives.collectives import (
    allgather,
    allgather_inplace,
    allreduce,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    gather,
    gather_inplace,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)
from bagua.collectives.communicator import BaguaCommunicator, CommMember
from bagua.collectives.initialization import destroy_process_group, init_process_group
from bagua.collectives.object_collectives import broadcast_object
from bagua.collectives.process_group import (
    BaguaProcessGroup,
    _get_default_group,
    _torch_to_bagua_pg_map,
    from_torch_group,
    get_communicator,
    is_initialized,
    new_group,
)
from bagua.collectives.reduce_op import ReduceOp
from bagua.engine.comm_scheduler import CommScheduler
from bagua.engine.data_parallel import engine_named
from bagua.engine.gradient_owners import owners_by_name
from bagua.job.failure_report import CollectiveError

__all__ = [
    "BaguaCommunicator",
    "BaguaProcessGroup",
    "CollectiveError",
    "CommMember",
    "ReduceOp",
    "_get_default_group",
    "_torch_to_bagua_pg_map",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "destroy_process_group",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "get_backend",
    "get_communicator",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]


def get_backend(model_name: str) -> CommScheduler:
    """
    What launches the buckets of the module whose `bagua_module_name` this is.

    Raises:
        ValueError: no module of this name is trained with Bagua.
    """
    engine = engine_named(model_name)
    if engine is None:
        raise ValueError(f"no module named {model_name!r} is trained with Bagua; there are {sorted(owners_by_name)}")
    return engine.scheduler
