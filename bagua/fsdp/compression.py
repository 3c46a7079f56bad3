"""compress_communication: checks a sharded model, and puts compressed collectives into it. The user's thread."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bagua.codecs import Codec, dtype_names, get_codec
from bagua.collectives.process_group import to_bagua_process_group
from bagua.fsdp.all_gather import CompressedAllGather, WeightReference
from bagua.fsdp.collective_errors import named_errors
from bagua.fsdp.handle import CompressedModule, CompressionHandle, why_incompressible
from bagua.fsdp.model import ShardedModel, replicated_tensors
from bagua.fsdp.nodes import Nodes, Traffic
from bagua.fsdp.reduce_scatter import CompressedReduceScatter
from bagua.fsdp.replica_all_reduce import ReplicaAllReduce, ReplicaGroup, ReplicaHook
from bagua.fsdp.residual import Residual
from bagua.fsdp.torch_internals import ShardedModule
from bagua.job.all_gather_across_groups import all_gather_across_groups
from bagua.job.places import Place, place_of_this_process
from bagua.misuse import explains_calls
from bagua.regroup import coordinator
from bagua.replicas.replica_check import Replica
from bagua.replicas.state_broadcast import broadcast_parameters
from bagua.replicas.tensor_broadcast import why_unsendable

_logger = logging.getLogger("bagua")


@explains_calls(
    "Call compress_communication(model, gradients='int8'), with other arguments by their names.",
    codec="Name a codec for gradients, weights or both: gradients='int8', weights='int8'.",
)
def compress_communication(
    model: nn.Module,
    gradients: str | None = "int8",
    weights: str | None = None,
    error_feedback: bool = False,
    *,
    weight_differences: bool = False,
    exact_weights_every: int | None = None,
    replicas: dist.ProcessGroup | None = None,
    compress_shard: bool = False,
    grad_scaler: Any = None,
) -> CompressionHandle:
    """Lets the FSDP2 modules of `model` send compressed gradients, and on request compressed weights. Call it after
    `fully_shard`, with the same arguments on all ranks of the model; it compares them.

    Args:
        model: A module that is `fully_shard`ed, or contains modules that are. On a mesh of two dimensions (hybrid
            sharding), gradients are compressed between replicas. Frozen and shared parameters, mixed precision, CPU
            offload, several optimizers and `torch.compile` are supported.
        gradients: The codec of gradients: "int8", "int4", "fp8_e4m3" or "bf16"; None: they are not compressed. Sums
            are made in fp32, and nothing is rounded twice on the way to a shard. On several nodes with as many ranks
            each, the ranks of a node first reduce in the dtype of the gradients, and their sum is compressed.
        weights: The codec of the weights that forward and backward passes in training mode compute with; None: they
            are exact. Shards, checkpoints and evaluation mode are exact in any case.
        error_feedback: Add what compression takes from a gradient to the next one of the same module (Seide et al.,
            2014; LoCo, arXiv:2407.04480). It takes a byte per parameter of the whole model on each rank, on several
            nodes divided by the ranks of a node, or where gradients are compressed between replicas alone a byte per
            parameter of this rank's shard.
        weight_differences: Send the difference to the weights of the last pass instead of the weights (SDP4Bit,
            arXiv:2410.15526). Only for modules with `reshard_after_forward=False`. Each rank keeps a copy of their
            weights.
        exact_weights_every: Every so many forward passes in training mode use exact weights. All
            calls of the model, its parts and its registered methods up to a backward pass are one.
        replicas: On a mesh of shards alone, this rank's group of ranks that hold the same shard of other replicas of
            the model. Gradients are averaged over it with a compressed all-reduce, and parameters and buffers are
            broadcast once from its first rank.
        compress_shard: With replicas, compress gradients between the ranks that share a replica too.
        grad_scaler: The torch.amp.GradScaler that scales the loss, if there is one. With `error_feedback`, what is to
            be added to the next gradient is multiplied when its scale changes.

    Returns:
        a handle to remove, save and observe what has been set up.

    Raises:
        ValueError: an argument does not fit, or `model` is not sharded in a way that can be compressed; nothing has
            changed then.
        TypeError: an argument is of another type.
        CollectiveError: a rank did not call this within its group's timeout. Steps raise it, too, if a compressed
            collective loses a rank.
        NotImplementedError: the job regroups (bagua.torch_api.Regroup).
        RuntimeError: this version of torch is not supported, or replicas differ in more than values.
    """
    coordinator.refuse("compress_communication() of FSDP2", "Train a replicated model, such as DistributedDataParallel")
    if exact_weights_every is not None and (type(exact_weights_every) is not int or exact_weights_every < 1):
        raise ValueError(f"exact_weights_every is {exact_weights_every!r}; give a whole number of at least 1, or None")
    flags = {
        "error_feedback": error_feedback,
        "weight_differences": weight_differences,
        "compress_shard": compress_shard,
    }
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is {flag!r}; give True or False")
    if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(f"replicas is {replicas!r}; give torch's process group, such as mesh.get_group('replicate')")
    if gradients is None and weights is None:
        raise ValueError("gradients and weights are both None; name the codec of one of them, such as gradients='int8'")
    if gradients is None and (error_feedback or replicas is not None):
        raise ValueError("error_feedback and replicas are about gradients, but gradients is None; name a codec for it")
    if weights is None and (weight_differences or exact_weights_every is not None):
        raise ValueError("weight_differences and exact_weights_every are about weights, but weights is None")
    gradient_codec = None if gradients is None else get_codec(gradients)
    weight_codec = None if weights is None else get_codec(weights)
    sharded = ShardedModel(model)
    found = sharded.modules
    for one in found:
        _check(one, gradient_codec, weight_differences, replicas)
    groups = [replicas if one.replica_group is None else one.replica_group for one in found]
    if compress_shard and all(group is None for group in groups):
        raise ValueError("compress_shard is for use with replicas; without them, gradients of shards are compressed")
    settings: dict[str, Any] = {
        "gradients": None if gradient_codec is None else gradient_codec.name,
        "weights": None if weight_codec is None else weight_codec.name,
        "error_feedback": error_feedback,
        "weight_differences": weight_differences,
        "exact_weights_every": exact_weights_every,
        "compress_shard": compress_shard,
        "replicas": max((group.size() for group in groups if group is not None), default=1),
        "ranks": dist.get_world_size(),
    }
    shards = dict.fromkeys(one.shard_group for one in found)
    places = _compare([*shards, *dict.fromkeys(group for group in groups if group is not None)], found, settings)
    reduced = {
        one.shard_group
        for one, group in zip(found, groups, strict=True)
        if gradient_codec is not None and (group is None or compress_shard)
    }
    nodes, untold = _nodes_of(shards, places)
    hops = {group: nodes[group].hops(found[0].device) for group in shards if group in reduced}
    settings["rank"] = dist.get_rank()
    settings["nodes"] = next((nodes[group].nodes for group, one in hops.items() if one is not None), None)
    if replicas is not None:
        named = replicated_tensors(model)
        communicator = to_bagua_process_group(replicas).communicator_for(
            type(model).__name__, [one for _, one in named]
        )
        Replica(named, "shards and buffers").check(communicator)
        broadcast_parameters(named, communicator)

    if dist.get_rank() == 0:
        for line in _of_one_hop([nodes[group] for group in hops], untold):
            _logger.warning(f"compress_communication: {line}")
        if weight_codec is not None and weight_codec.name == "int4" and not weight_differences:
            _logger.warning(
                "compress_communication: weights='int4' without weight_differences rounds whole weights to 4 bits, and"
                " raises the loss.\nPass weight_differences=True, for modules with reshard_after_forward=False, or"
                " weights='int8'."
            )
        for line in _without_effect(found, groups, gradient_codec, weight_codec, compress_shard, exact_weights_every):
            _logger.warning(f"compress_communication: {line}")
        if found[0].device.type == "cpu":
            for name in sorted({one.name for one in (gradient_codec, weight_codec) if one and one.is_slow_on_cpus}):
                _logger.warning(
                    f"compress_communication: {name} is not compiled for CPUs, and takes many operations of torch."
                    " Use int8 unless the network is far slower than the CPUs."
                )

    traffic = {"gradients": Traffic(), "weights": Traffic()}
    told: set[torch.dtype] = set()
    modules = []
    for one, group in zip(found, groups, strict=True):
        built = CompressedModule(one, gradient_codec)
        if gradient_codec is not None and (group is None or compress_shard):
            residual = Residual(one.name, one.trained, grad_scaler) if error_feedback else None
            built.reduce_scatter = CompressedReduceScatter(
                gradient_codec,
                nodes[one.shard_group],
                traffic["gradients"],
                hops[one.shard_group],
                residual,
                one.title,
            )
        if gradient_codec is not None and group is not None:
            residual = Residual(one.name, one.trained, grad_scaler) if error_feedback else None
            built.all_reduce = ReplicaAllReduce(group, gradient_codec, traffic["gradients"], residual, one.title)
        if weight_codec is not None:
            reference = WeightReference(one.shard_group) if weight_differences else None
            built.all_gather = CompressedAllGather(
                one,
                weight_codec,
                one.all_gather,
                sharded,
                exact_weights_every,
                nodes[one.shard_group],
                traffic["weights"],
                reference,
                told,
            )
        modules.append(built)
    for built in modules:
        built.install()
    return CompressionHandle(modules, settings, traffic, sharded)


def _nodes_of(
    groups: Iterable[dist.ProcessGroup], places: Mapping[int, Place]
) -> tuple[dict[dist.ProcessGroup, Nodes], str]:
    """Of each group, and why that is not known; "" if it is."""
    try:
        return {group: Nodes.of(group, places) for group in groups}, ""
    except ValueError as error:
        return {group: Nodes.unknown(group) for group in groups}, str(error)


def _of_one_hop(nodes: Sequence[Nodes], untold: str) -> Iterator[str]:
    """Why gradients are not reduced within the nodes first, where several ranks share one."""
    if untold:
        yield f"gradients are exchanged between all ranks, as if each had a node of its own: {untold}"
    for sizes in dict.fromkeys(one.sizes for one in nodes if len(set(one.sizes)) > 1):
        yield (
            f"gradients are exchanged between all ranks, and leave a node once for each of its ranks, because the nodes"
            f" have {', '.join(map(str, sizes))} ranks. With as many on each, they would be summed within the nodes"
            " first"
        )


def _without_effect(
    found: list[ShardedModule],
    groups: list[dist.ProcessGroup | None],
    gradients: Codec | None,
    weights: Codec | None,
    compress_shard: bool,
    exact_weights_every: int | None,
) -> Iterator[str]:
    """Arguments that change nothing on this model, each with the reason. No error: a script may run on fewer ranks."""
    if dist.get_world_size() == 1:
        return
    reduced = set[torch.dtype]().union(*(one.reduced_dtypes for one in found))
    if gradients is not None:
        if not compress_shard and all(group is not None and group.size() == 1 for group in groups):
            yield (
                f"gradients={gradients.name!r} has no effect: without compress_shard they are compressed between"
                " replicas, and there is one"
            )
        elif reduced and all(_shrinks_not(gradients, dtype) for dtype in reduced):
            yield f"gradients={gradients.name!r} saves nothing: they are reduced in {dtype_names(reduced)}"
    if weights is not None:
        gathered = {one.gathered_dtype(parameter) for one in found for parameter in one.parameters()}
        if exact_weights_every == 1:
            yield f"weights={weights.name!r} has no effect: with exact_weights_every=1 all passes have exact weights"
        elif all(_shrinks_not(weights, dtype) for dtype in gathered):
            yield f"weights={weights.name!r} saves nothing: they are gathered in {dtype_names(gathered)}"


def _shrinks_not(codec: Codec, dtype: torch.dtype) -> bool:
    """Of many elements; of a few, a scale may be more than what is saved."""
    many = 1 << 20
    return codec.compressed_bytes(many) >= many * dtype.itemsize


def _check(
    one: ShardedModule, gradients: Codec | None, weight_differences: bool, replicas: dist.ProcessGroup | None
) -> None:
    where = one.subject
    if not one.has_shards:
        raise ValueError(
            f"{where} is not fully_shard'ed, but replicated on all ranks.\n"
            "Shard it with torch.distributed.fsdp.fully_shard, or train it with bagua's with_bagua."
        )
    if (
        isinstance(one.reduce_scatter, CompressedReduceScatter)
        or isinstance(one.all_gather, CompressedAllGather)
        or isinstance(one.all_reduce_hook, ReplicaHook)
        or isinstance(one.replica_group, ReplicaGroup)
    ):
        raise ValueError(f"{where} is compressed already; call remove() of the handle that did it first")
    if (problem := why_incompressible(one, gradients)) is not None:
        raise ValueError(problem)
    if weight_differences and one.reshards_after_forward:
        raise ValueError(
            f"{where} frees its weights after forward, and weight_differences would keep them.\n"
            "Shard it with reshard_after_forward=False, or leave weight_differences out."
        )
    if replicas is not None:
        if one.replica_group is not None:
            raise ValueError(f"{where} is on a mesh that has a dimension for replicas; leave the argument replicas out")
        if one.all_reduce_hook is not None:
            raise ValueError(f"{where} has an all-reduce hook, whose place replicas needs; remove one of them")
        shared = set(dist.get_process_group_ranks(replicas)) & set(dist.get_process_group_ranks(one.shard_group))
        if shared != {dist.get_rank()}:
            raise ValueError(
                f"{where} is sharded over ranks {dist.get_process_group_ranks(one.shard_group)} and replicas has ranks "
                f"{dist.get_process_group_ranks(replicas)}; they must have this rank, {dist.get_rank()}, in common and "
                "no other"
            )
        for parameter in one.parameters():
            if (problem := why_unsendable(parameter)) is not None:
                raise ValueError(
                    f"A parameter of {one.title} cannot be broadcast to the replicas: {problem}.\nOf a model on the"
                    " meta device: call to_empty() and initialize it, then compress_communication."
                )


def _compare(
    groups: Sequence[dist.ProcessGroup], found: list[ShardedModule], settings: dict[str, Any]
) -> dict[int, Place]:
    """Ranks with other settings would send messages of other sizes: NCCL would hang.

    Returns:
        where the ranks of the groups run.

    Raises:
        ValueError: they have.
        CollectiveError: a rank has not called, or is gone.
    """
    told = (settings, [one.name for one in found])
    with named_errors("compress_communication, which every rank of the model has to call,", *groups):
        known = all_gather_across_groups(groups, (told, place_of_this_process()), found[0].device)
    other = sorted(rank for rank, (theirs, _) in known.items() if theirs != told)
    if other:
        raise ValueError(
            f"Ranks {other} call compress_communication with {known[other[0]][0]}, rank {dist.get_rank()} with {told}."
            "\nGive the same arguments on all ranks."
        )
    return {rank: place for rank, (_, place) in known.items()}
