"""Local steps of replicas that are sharded: FSDP2 within a replica, DiLoCo or local SGD between the replicas.

Averaging and the steps of outer optimizers are elementwise, so that each rank does for its shards what an unsharded
replica does for whole parameters. FSDP computes gradients; its passes are not seen here. A step is one of all listed
optimizers, before which the shards are compared with those that are exchanged: FSDP and users replace them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bagua.collectives.carrier_device import gpus_of
from bagua.collectives.process_group import BaguaProcessGroup, to_bagua_process_group
from bagua.collectives.tensor import drop_record
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.engine.bucket_plan import plan_buckets
from bagua.engine.comm_scheduler import CommScheduler
from bagua.engine.module_hooks import ModuleHooks
from bagua.engine.step_statistics import PassRecorder, StepStatistics
from bagua.fsdp.model import Shard, Shards, replicated_tensors
from bagua.job.all_gather_across_groups import all_gather_across_groups
from bagua.replicas.replica_check import Replica
from bagua.replicas.saved_rank import check_rank
from bagua.replicas.state_broadcast import broadcast_parameters
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.base import resolve_algorithm
from bagua.torch_api.algorithms.fragment_rounds import FragmentRounds
from bagua.torch_api.algorithms.local_steps import LocalSGDAlgorithm
from bagua.torch_api.wrapping import check_optimizers

_logger = logging.getLogger("bagua")


def exchange_shards(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm,
    replicas: BaguaProcessGroup | dist.ProcessGroup,
) -> ShardExchange:
    """Trains replicas of a sharded model with local steps. Call it after `fully_shard` on a mesh of the shards alone,
    on every rank, before training and before states are loaded. Parameters, frozen ones as well, and buffers are
    broadcast from the first replica. Parameters may be frozen, unfrozen, loaded (also with assign=True) and converted
    later, between two steps and on all ranks alike.

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
        ValueError: a warm-up, shares of the steps, a parameter that is not sharded, replicas that are on the model's
            mesh, other settings on another rank, or a parameter of the model is exchanged already.
        RuntimeError: replicas differ, or a parameter is in none of the optimizers. Steps raise it, too: for a parameter
            that was unfrozen and is in none of them, and if an optimizer that is not listed steps instead of them.
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
    if recipe.shares is not None:
        raise ValueError(
            f"shares={recipe.shares!r}: ranks that hold shards of a replica cannot agree on steps.\n"
            "Leave shares out: all replicas make as many steps."
        )
    replicated = replicated_tensors(model)
    shards = Shards(model)
    found = shards.all
    for one in found:
        if one.is_trained and not one.is_sharded:
            raise ValueError(f"{one.name!r} is not sharded. Call fully_shard on the whole model first, or freeze it.")
    _refuse_second_exchange(model, found)
    group = to_bagua_process_group(replicas)
    meshes = dict.fromkeys(one.parameter.device_mesh for one in found if isinstance(one.parameter, DTensor))
    _check_groups(list(meshes), group)
    local = [one for _, one in replicated]
    communicator = group.communicator_for(type(model).__name__, local)
    settings = [recipe.public_name, *(f"{name}={value}" for name, value in sorted(recipe.shared_settings().items()))]
    groups = [*(one for mesh in meshes for one in mesh.get_all_groups()), group.torch_group]
    _compare(settings, groups, next(iter(gpus_of(local)), None))
    listed = check_optimizers(optimizers)
    Replica(replicated, "shards and buffers", listed, settings).check(communicator)
    broadcast_parameters(replicated, communicator)
    view = ShardFacade(shards, group, listed)
    rounds = recipe.reify(group)
    members = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    exchange = ShardExchange(view, rounds, members.index(dist.get_rank()), len(members))
    if dist.get_rank() == 0:
        for line in rounds.options_without_effect(view):
            _logger.warning(f"exchange_shards: {line}")
    return exchange


def _check_groups(meshes: Sequence[DeviceMesh], replicas: BaguaProcessGroup) -> None:
    # A mesh that has a dimension for replicas averages gradients itself; one for tensor parallelism is fine.
    me = dist.get_rank()
    for mesh in meshes:
        holders = mesh.mesh.flatten().tolist()
        if set(holders) & set(replicas.ranks) != {me}:
            raise ValueError(
                f"The model is on a mesh of ranks {holders}, and replicas has ranks {replicas.ranks}; they must have"
                f" this rank, {me}, in common and no other.\nGive fully_shard the mesh of the shards alone,"
                " mesh['shard'], and pass mesh.get_group('replicate')."
            )


def _compare(settings: list[str], groups: Sequence[dist.ProcessGroup | None], gpu: torch.device | None) -> None:
    # Also of ranks of the same replica, whose shards would be exchanged in different steps.
    known = all_gather_across_groups([one for one in groups if one is not None], settings, gpu)
    for rank, theirs in sorted(known.items()):
        if theirs != settings:
            mine, other = ([one for one in a if one not in b] for a, b in ((settings, theirs), (theirs, settings)))
            raise ValueError(
                f"exchange_shards: rank {dist.get_rank()} has {', '.join(mine)}, rank {rank} has {', '.join(other)}.\n"
                "Give the same algorithm on all ranks."
            )


# At work; for who exchanges a parameter.
_exchanges: weakref.WeakSet[ShardExchange] = weakref.WeakSet()


def _refuse_second_exchange(model: nn.Module, found: Sequence[Shard]) -> None:
    named = {id(one.parameter): one.name for one in found}
    for exchange in _exchanges:
        for one in exchange.shards:
            if id(one.parameter) in named:
                raise ValueError(
                    f"{named[id(one.parameter)]!r} of this {type(model).__name__} is exchanged already, as"
                    f" {one.name!r} of a {type(exchange.module).__name__}.\nCall remove() of the handle first."
                )


class ShardFacade(AlgorithmFacade):
    """What local steps see of the engine, of shards instead of parameters. There is no engine, because FSDP
    communicates gradients, and a facade's other members are missing.

    Attributes:
        shards: of the model.
        begin: exchanges what is covered now.
    """

    begin: Callable[[], None]

    def __init__(self, shards: Shards, group: BaguaProcessGroup, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.module, self.process_group, self.parameters_to_ignore = shards.model, group, []
        self.bagua_module_name = f"shards of {type(shards.model).__name__} {id(shards.model)}"
        self.shards = shards
        self._optimizers = list(optimizers)
        # Without buckets: fragments have schedulers of their own.
        self._scheduler = CommScheduler([], group, PassRecorder())

    @property
    def batch_weights(self) -> None:
        return None

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        return self._optimizers

    @property
    def synchronized_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(one.name, cast("nn.Parameter", one.tensor)) for one in self.shards.all if self._is_covered(one)]

    def _is_covered(self, one: Shard) -> bool:
        return one.name in self.shards.covered

    @property
    def replicated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(one.name, cast("nn.Parameter", one.tensor)) for one in self.shards.all]

    def communicate(self, names: Collection[str]) -> None:
        self.shards.cover(names)
        self.begin()

    @property
    def scheduler(self) -> CommScheduler:
        return self._scheduler

    def tensors_of(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        shard_of = {id(one.parameter): one.tensor for one in self.shards.all if self._is_covered(one)}
        return [shard_of[id(one)] for one in super().tensors_of(optimizer) if id(one) in shard_of]


class ShardExchange:
    """What `exchange_shards` has set up. Training thread only.

    Args:
        view: of the shards.
        rounds: of this rank's shards.
        rank: this one's number among those that share its replica: the same number in all replicas has the same shards.
        ranks: how many share a replica.
    """

    def __init__(self, view: ShardFacade, rounds: FragmentRounds, rank: int, ranks: int) -> None:
        self._view, self._rounds = view, rounds
        self._rank, self._ranks = rank, ranks
        view.begin = self._begin
        self._begin()
        self._note_step = rounds.init_post_optimizer_step_hook(view)
        # Optimizers that are not listed and have stepped since a listed one did.
        self._strangers: set[int] = set()
        self._hooks = ModuleHooks()
        self._hooks.before_each_step(view.bagua_optimizers, self._before_step)
        self._hooks.after_each_step(view.bagua_optimizers, self._after_step)
        self._hooks.before_all_steps(self)
        _exchanges.add(self)

    @property
    def module(self) -> nn.Module:
        """The model, or the part of one, whose shards these are."""
        return self._view.module

    @property
    def shards(self) -> Sequence[Shard]:
        """As they were last seen."""
        return self._view.shards.all

    def _begin(self) -> None:
        """Exchange what is covered now."""
        tensors = self._rounds.init_tensors(self._view)
        groups = [[tensors[index] for index in group] for group in plan_buckets(tensors)]
        for bucket in self._rounds.tensors_to_buckets(groups, do_flatten=False):
            self._rounds.init_operations(self._view, bucket)

    def _before_step(self, *_: object) -> None:
        """Exchange other shards, if there are. Before one is trained that was not: the outer parameters begin with what
        all replicas have."""
        now = self._view.shards.look()
        if now is not None:
            self._rounds.finish(self._view)
            self._view.shards.take(now, self._view.bagua_optimizers)
            self._begin()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._strangers.clear()
        self._rounds.note_backward(self._view.shards.trained)
        self._note_step(optimizer)

    def before_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer of the process is about to step.

        Raises:
            RuntimeError: one that is not listed steps the shards, and none that is.
        """
        # It may be what a listed one steps by: then the listed one's step follows.
        if any(one is optimizer for one in self._view.bagua_optimizers):
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if stepped.isdisjoint(id(one) for one in self.module.parameters() if one.requires_grad):
            return
        if id(optimizer) in self._strangers:
            raise RuntimeError(
                f"exchange_shards: an optimizer that it was not given, {type(optimizer).__name__}, steps parameters of"
                f" {type(self.module).__name__}, and none that it was given does: no step is counted, and replicas grow"
                " apart.\nCall remove() of the handle, and exchange_shards with the optimizers that step."
            )
        self._strangers.add(id(optimizer))

    @property
    def rounds(self) -> int:
        """That are over."""
        return self._rounds.rounds

    def stats(self) -> StepStatistics:
        """Of the exchanges; as bagua_ddp.stats()."""
        return self._view.scheduler.recorder.statistics()

    def state_dict(self) -> dict[str, Any]:
        """Of this rank, to be saved with its shards and its optimizers' states: one file per rank."""
        return {**self._rounds.state_dict(), "rank": self._rank, "ranks": self._ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the same rank did when it gave `state`, or the one that has the same shards of another replica. Load
        it last.

        Raises:
            ValueError: the state is of another model, of other fragments, of a rank with other shards, or of an outer
                optimizer of another class or with another momentum to come.
        """
        check_rank(state, self._rank, self._ranks, "has other shards of its replica")
        self._rounds.load_state_dict(self._view, state)

    def remove(self) -> None:
        """Exchange no more; an exchange under way takes effect. On every rank, between two steps."""
        self._hooks.remove()
        self._rounds.finish(self._view)
        self._rounds.start_from_broadcast()
        for one in self.shards:
            drop_record(one.tensor)
        _exchanges.discard(self)
