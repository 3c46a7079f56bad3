"""Local steps of replicas that are sharded: FSDP2 within a replica, DiLoCo or local SGD between the replicas.

Averaging and the steps of outer optimizers are elementwise, so that each rank does for its shards what an unsharded
replica does for whole parameters. FSDP computes gradients; its passes are not seen here. A step is one of all listed
optimizers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bagua.collectives.process_group import BaguaProcessGroup, to_bagua_process_group
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.engine.bucket_plan import plan_buckets
from bagua.engine.comm_scheduler import CommScheduler
from bagua.engine.step_statistics import PassRecorder, StepStatistics
from bagua.job.told_by_all import told_by_all
from bagua.replicas.replica_check import Replica
from bagua.replicas.state_broadcast import broadcast_parameters
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.fragment_rounds import FragmentRounds
from bagua.torch_api.algorithms.local_steps import LocalSGDAlgorithm
from bagua.torch_api.algorithms.registry import resolve_algorithm
from bagua.torch_api.wrapping import check_optimizers

_ATTRIBUTE = "_bagua_shard_exchange"

_logger = logging.getLogger("bagua")


def exchange_shards(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm,
    replicas: BaguaProcessGroup | dist.ProcessGroup,
) -> ShardExchange:
    """Trains replicas of a sharded model with local steps. Call it after `fully_shard` on a mesh of the shards alone,
    on every rank, before training and before states are loaded. Parameters are broadcast from the first replica.

    Args:
        model: whose trained parameters are all DTensors.
        optimizers: of its parameters; after whose steps the shards are exchanged.
        algorithm: local_sgd, diloco or streaming_diloco, without warm-up: `Algorithm.init("diloco", sync_every=100)`.
            Fragments are of this rank's shards.
        replicas: this rank's group of ranks that hold the same shards of other replicas: mesh.get_group("replicate").

    Returns:
        a handle to save, observe and end it.

    Raises:
        TypeError: another algorithm, or something else than a list of optimizers.
        ValueError: a warm-up, a parameter that is not sharded, replicas that are on the model's mesh, other settings
            on another rank, or the model is exchanged already.
        RuntimeError: replicas differ, or a parameter is in none of the optimizers.
    """
    recipe = resolve_algorithm(algorithm)
    if not isinstance(recipe, LocalSGDAlgorithm):
        raise TypeError(
            f"algorithm is {getattr(recipe, 'public_name', recipe)}, which does not exchange shards.\n"
            "Use local_sgd, diloco or streaming_diloco."
        )
    if recipe.warmup_steps:
        raise ValueError(
            f"warmup_steps={recipe.warmup_steps}: FSDP makes the gradients, which Bagua does not see.\n"
            "Leave warmup_steps out and use momentum_rounds, or start with HSDP, a mesh of replicas and shards."
        )
    if _ATTRIBUTE in vars(model):
        raise ValueError(f"This {type(model).__name__} is exchanged already. Call remove() of the handle first.")
    group = to_bagua_process_group(replicas)
    shards: list[tuple[str, Tensor]] = []
    shard_of: dict[int, Tensor] = {}
    meshes: dict[DeviceMesh, None] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter, DTensor):
            raise ValueError(f"{name!r} is not sharded. Call fully_shard on the whole model first, or freeze it.")
        meshes[parameter.device_mesh] = None
        shard_of[id(parameter)] = cast("DTensor", parameter.detach()).to_local()
        shards.append((name, shard_of[id(parameter)]))
    _check_groups(list(meshes), group)
    communicator = group.get_global_communicator()
    settings = [recipe.public_name, *(f"{name}={value}" for name, value in sorted(recipe.shared_settings().items()))]
    _compare(settings, [*(one for mesh in meshes for one in mesh.get_all_groups()), group.torch_group])
    listed = check_optimizers(optimizers)
    Replica(shards, "shards", listed, settings).check(communicator)
    broadcast_parameters(cast("list[tuple[str, nn.Parameter]]", shards), communicator)
    view = _ShardFacade(model, group, listed, shards, shard_of)
    rounds = recipe.reify(group)
    exchange = ShardExchange(view, rounds)
    vars(model)[_ATTRIBUTE] = exchange
    if dist.get_rank() == 0:
        for one in rounds.options_without_effect(view):
            _logger.warning(f"exchange_shards: {one}")
    return exchange


def _check_groups(meshes: Sequence[DeviceMesh], replicas: BaguaProcessGroup) -> None:
    """A mesh that has a dimension for replicas averages gradients itself; one for tensor parallelism is fine."""
    me = dist.get_rank()
    for mesh in meshes:
        holders = mesh.mesh.flatten().tolist()
        if set(holders) & set(replicas.ranks) != {me}:
            raise ValueError(
                f"The model is on a mesh of ranks {holders}, and replicas has ranks {replicas.ranks}; they must have"
                f" this rank, {me}, in common and no other.\nGive fully_shard the mesh of the shards alone,"
                " mesh['shard'], and pass mesh.get_group('replicate')."
            )


def _compare(settings: list[str], groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Also of ranks of the same replica, whose shards would be exchanged in different steps."""
    known = told_by_all([one for one in groups if one is not None], settings)
    for rank, theirs in sorted(known.items()):
        if theirs != settings:
            mine, other = ([one for one in a if one not in b] for a, b in ((settings, theirs), (theirs, settings)))
            raise ValueError(
                f"exchange_shards: rank {dist.get_rank()} has {', '.join(mine)}, rank {rank} has {', '.join(other)}.\n"
                "Give the same algorithm on all ranks."
            )


class _ShardFacade(AlgorithmFacade):
    """What local steps see of the engine, of shards instead of parameters. There is no engine, because FSDP
    communicates gradients, and a facade's other members are missing."""

    def __init__(
        self,
        model: nn.Module,
        group: BaguaProcessGroup,
        optimizers: Sequence[torch.optim.Optimizer],
        shards: Sequence[tuple[str, Tensor]],
        shard_of: Mapping[int, Tensor],
    ) -> None:
        self.module, self.process_group, self.parameters_to_ignore = model, group, []
        self.bagua_module_name = f"shards of {type(model).__name__} {id(model)}"
        self._optimizers, self._shards, self._shard_of = list(optimizers), list(shards), shard_of
        # Without buckets: fragments have schedulers of their own.
        self._scheduler = CommScheduler([], group, PassRecorder())

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        return self._optimizers

    @property
    def synchronized_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return cast("list[tuple[str, nn.Parameter]]", self._shards)

    @property
    def scheduler(self) -> CommScheduler:
        return self._scheduler

    def tensors_of(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [self._shard_of[id(one)] for one in super().tensors_of(optimizer) if id(one) in self._shard_of]


class ShardExchange:
    """What `exchange_shards` has set up. Training thread only."""

    def __init__(self, view: AlgorithmFacade, rounds: FragmentRounds) -> None:
        self._view, self._rounds = view, rounds
        tensors = rounds.init_tensors(view)
        groups = [[tensors[index] for index in group] for group in plan_buckets(tensors)]
        for bucket in rounds.tensors_to_buckets(groups, do_flatten=False):
            rounds.init_operations(view, bucket)
        note_step = rounds.init_post_optimizer_step_hook(view)

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            rounds.note_backward()
            note_step(optimizer)

        self._hooks = [optimizer.register_step_post_hook(after_step) for optimizer in view.bagua_optimizers]

    @property
    def rounds(self) -> int:
        """That are over."""
        return self._rounds.rounds

    def stats(self) -> StepStatistics:
        """Of the exchanges; as bagua_ddp.stats()."""
        return self._view.scheduler.recorder.statistics()

    def state_dict(self) -> dict[str, Any]:
        """Of this rank, to be saved with its shards and its optimizers' states: one file per rank."""
        return self._rounds.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the same rank did when it gave `state`. Load it last.

        Raises:
            ValueError: the state is of another model, or of other fragments.
        """
        self._rounds.load_state_dict(self._view, state)

    def remove(self) -> None:
        """Exchange no more; an exchange under way takes effect. On every rank, between two steps."""
        for hook in self._hooks:
            hook.remove()
        self._rounds.finish(self._view)
        self._rounds.start_from_broadcast()
        vars(self._view.module).pop(_ATTRIBUTE, None)
