"""PowerSGD: every rank steps with an approximation of low rank of the mean gradients, and adds what that leaves out to
its next gradients. bagua.comm_ops.powersgd has the formula and the source.

Gradients of float32, float16 and bfloat16 are compressed; factors and what is owed are float32. Those of other dtypes
(float64, complex) are communicated as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.powersgd import LowRankMemory, PowerSGD, memory_for
from bagua.comm_ops.public_bucket import BaguaBucket
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.kernels.argument_checks import FLOAT_DTYPES
from bagua.replicas.saved_rank import check_rank
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl


class PowerSGDAlgorithmImpl(AlgorithmImpl):
    """See PowerSGDAlgorithm."""

    # Parameters are equal, but each rank owes something else.
    keeps_replicas_equal = False
    keeps_parameters_equal = True
    added_to_state = ("rank",)

    def __init__(self, process_group: BaguaProcessGroup, rank: int, grad_scaler: Any) -> None:
        super().__init__(process_group)
        self._rank = rank
        self._grad_scaler = grad_scaler
        # By parameter, of frozen ones, too.
        self._memories: dict[str, LowRankMemory] = {}

    def start_from_broadcast(self) -> None:
        self._memories.clear()

    def init_operations(self, bagua_ddp: AlgorithmFacade, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        if bucket.dtype not in FLOAT_DTYPES:
            bucket.append_centralized_synchronous_op(group=self.process_group)
            return
        memories = []
        for record, view in zip(bucket.records, bucket.views, strict=True):
            memory = self._memories.get(record.name) or memory_for(view, record.name, self._rank, self._grad_scaler)
            if memory is not None:
                self._memories[record.name] = memory
            memories.append(memory)
        bucket.append_op(PowerSGD(bucket.everybody(self.process_group), memories))

    def state_dict(self) -> dict[str, Any]:
        return {
            "rank": self.process_group.get_global_communicator().rank(),
            "ranks": self.process_group.size,
            "owed": {name: one.owed for name, one in self._memories.items()},
            "factors": {name: one.factor for name, one in self._memories.items()},
            "scales": {name: one.scale.value for name, one in self._memories.items() if one.scale.value is not None},
        }

    @torch.no_grad()
    def load_state_dict(self, bagua_ddp: AlgorithmFacade, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: the state is of another model, another `rank` of the approximation, another number of ranks, or
                another one of them.
        """
        if state["ranks"] != self.process_group.size:
            raise ValueError(
                f"the state is of one of {state['ranks']} ranks, here are {self.process_group.size}: what each of them"
                " owes cannot be divided among others.\nLoad the weights alone, before wrapping."
            )
        rank = self.process_group.get_global_communicator().rank()
        check_rank(state, rank, self.process_group.size, "owes something else")
        ours, theirs = (
            {name: tuple(one.shape) for name, one in factors.items()}
            for factors in ({name: one.factor for name, one in self._memories.items()}, state["factors"])
        )
        if ours != theirs:
            raise ValueError(
                f"the state has factors of {theirs}, this module has {ours} (columns and rank): it is of another model,"
                f" or was saved with another rank than {self._rank}"
            )
        for name, memory in self._memories.items():
            memory.owed.copy_(state["owed"][name])
            memory.factor.copy_(state["factors"][name])
            memory.scale.value = state.get("scales", {}).get(name)


class PowerSGDAlgorithm(Algorithm):
    """
    Args:
        rank: of the approximation. A matrix of n rows and m columns is sent as rank * (n + m) numbers, float32.
        grad_scaler: the torch.amp.GradScaler that scales the loss, if there is one. What is owed is multiplied when its
            scale changes.

    Raises:
        ValueError: `rank` is not a whole number of at least 1.
    """

    weighs_batches = True

    def __init__(self, rank: int = 4, grad_scaler: Any = None) -> None:
        if type(rank) is not int or rank < 1:
            raise ValueError(f"rank={rank!r}: must be a whole number of at least 1")
        self.rank = rank
        self.grad_scaler = grad_scaler

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles, which a copied wrapper has, are trained with another scaler, or with none.
        return {**self.__dict__, "grad_scaler": None}

    def reify(self, process_group: BaguaProcessGroup) -> PowerSGDAlgorithmImpl:
        return PowerSGDAlgorithmImpl(process_group, self.rank, self.grad_scaler)
