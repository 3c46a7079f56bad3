"""Puts what old code looks for to where it looks: members of classes, and names in modules."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from bagua.collectives.communicator import BaguaCommunicator
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.engine.bucket import Bucket
from bagua.legacy import communication, service_settings
from bagua.legacy.members import BucketMembers, CollectiveMethods, FacadeMembers, ProcessGroupMethods
from bagua.legacy.tensor_methods import BaguaTensor

_MEMBERS: dict[type, type] = {
    Tensor: BaguaTensor,
    dist.ProcessGroup: ProcessGroupMethods,
    BaguaCommunicator: CollectiveMethods,
    Bucket: BucketMembers,
    AlgorithmFacade: FacadeMembers,
}


def install_in_torch_api() -> None:
    """By bagua.torch_api alone, when its modules are imported. Again is harmless."""
    # Not at the top: bagua.torch_api, which is imported with its modules, imports this file.
    from bagua.torch_api import communication as communication_now
    from bagua.torch_api import env
    from bagua.torch_api.algorithms import decentralized, gradient_allreduce, low_precision_decentralized
    from bagua.torch_api.data_parallel import distributed, functional

    for kind, members in _MEMBERS.items():
        for name, member in vars(members).items():
            if not name.startswith("__"):
                setattr(kind, name, member)

    _add(env, **{name: getattr(service_settings, name) for name in service_settings.__all__})
    _add(
        communication_now,
        comm=communication.comm,
        _rank_not_in_comm=communication._rank_not_in_comm,
        _rank_not_in_group=communication._rank_not_in_group,
    )
    _add(functional, torch_reduce_op_to_bagua=communication.torch_reduce_op_to_bagua)
    _add(gradient_allreduce, GradientAllReduce=gradient_allreduce.GradientAllReduceAlgorithm)
    _add(
        decentralized,
        LowPrecisionDecentralizedAlgorithm=low_precision_decentralized.LowPrecisionDecentralizedAlgorithm,
        LowPrecisionDecentralizedAlgorithmImpl=low_precision_decentralized.LowPrecisionDecentralizedAlgorithmImpl,
    )
    _add(
        distributed,
        DistributedDataParallel_V1_9_0=distributed.DistributedDataParallel,
        DistributedDataParallel_V1_9_0_Interface=distributed.DistributedDataParallel,
    )


def _add(module: ModuleType, **names: Any) -> None:
    vars(module).update(names)
    if "__all__" in vars(module):
        vars(module)["__all__"] = sorted({*vars(module)["__all__"], *names})
