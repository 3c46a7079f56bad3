"""Makes parameters and optimizer state of every replica equal to those of rank 0.

Owned by nobody: functions. They run on the training thread, before the first step and when an algorithm starts anew.
Every rank of the communicator has to call them in the same order, and no other collective may be under way there.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from bagua.collectives.arguments import repeats_elements
from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.object_collectives import all_gather_object, broadcast_object
from bagua.error_text import listed, one_line
from bagua.rank_list import rank_list
from bagua.replicas import optimizer_description as described
from bagua.replicas.tensor_broadcast import broadcast_tensors, why_unsendable

MAX_PROBLEMS = 3  # that one error tells


def broadcast_parameters(named_tensors: Iterable[tuple[str, torch.Tensor]], communicator: BaguaCommunicator) -> None:
    """
    Overwrites the tensors, in place and unseen by autograd, with those of the communicator's rank 0.

    Small tensors travel together: one flat buffer per dtype and kind of device. Tensors that are not contiguous keep
    their strides, which may differ between ranks.

    Args:
        named_tensors: the same names, shapes and dtypes in the same order on every rank (bagua.replicas.replica_check).
            Any dtype, CPU or CUDA, also on a device that the group has no backend for.

    Raises:
        ValueError: a tensor is sparse, expanded, or has no storage yet.
    """
    tensors = []
    for name, tensor in named_tensors:
        problem = why_unsendable(tensor)
        if problem is None and repeats_elements(tensor):
            # On rank 0, too, which would only read it: the others would stop, and it would go on alone.
            problem = f"it is expanded (strides {tensor.stride()}) and cannot be written into; call contiguous()"
        if problem is not None:
            raise ValueError(f"{name} cannot be broadcast: {problem}")
        tensors.append(tensor)
    broadcast_tensors(tensors, communicator)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, communicator: BaguaCommunicator, left_out: Collection[int] = ()
) -> None:
    """
    Makes `optimizer.state`, the options in `optimizer.param_groups` (lr and the others) and `optimizer.defaults` those
    of the communicator's rank 0: what only rank 0 has is created, what it lacks is removed.

    State belongs to a parameter by its position in `param_groups`. A tensor of the same shape, dtype and device is
    overwritten in place, so that captured CUDA graphs stay valid. `.grad` is not touched. State under a tensor that is
    in no group has no position and stays as it is. So do values that cannot be sent (a lambda, a lock), with a warning
    that names them, and modules, which belong to each rank.

    Args:
        left_out: ids of parameters that differ by rank on purpose, at the same positions on every rank: of any shape,
            and their state stays as it is.

    Raises:
        ValueError: the optimizer is LBFGS.
        RuntimeError: on every rank, if one of them has other groups or parameters, or lacks a value that cannot be
            sent.
    """
    refuse_lbfgs(optimizer)
    if communicator.nranks() == 1:
        return
    is_source = communicator.rank() == 0
    description: described.Description | str | None = None
    tensors: list[torch.Tensor] = []
    entries: dict[described.EntryKey, Any] = {}
    if is_source:
        description, tensors = described.describe(optimizer, left_out)
    description = broadcast_object(description, 0, communicator)
    problem: str | None = None
    if not isinstance(description, described.Description):
        problem = description if is_source else None
    elif not is_source:
        try:
            entries, tensors = prepare_entries(optimizer, description, left_out, communicator)
        except Exception as error:  # whatever unpickling raises; the other ranks wait for us
            problem = one_line(error, described.MAX_PROBLEM_LENGTH)
    _raise_together(problem, communicator)
    broadcast_tensors(tensors, communicator)
    assert isinstance(description, described.Description)
    if not is_source:
        install_entries(optimizer, entries, left_out)
    elif any(one.reason for one in description.kept):
        warnings.warn(_about_kept(optimizer, description.kept), stacklevel=2)


def refuse_lbfgs(optimizer: torch.optim.Optimizer) -> None:
    if any(kind.__name__ == "LBFGS" for kind in type(optimizer).__mro__):
        raise ValueError(
            f"{type(optimizer).__name__} cannot be synchronized: Bagua does not support L-BFGS.\n"
            "One step evaluates its closure as often as the local loss requires, so that ranks would communicate"
            " unequally often.\n"
            "Use another optimizer, or train without Bagua and average loss and gradients inside the closure."
        )


def refuse_divided_steps(optimizer: torch.optim.Optimizer, ranks: Collection[int], algorithm: str) -> None:
    """
    Args:
        ranks: global, of those that train together, each with gradients of its own.
        algorithm: its name, for the message.

    Raises:
        ValueError: the optimizer is a ZeroRedundancyOptimizer that divides its steps among several of these ranks.
    """
    if all(kind.__name__ != "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        return
    sharing = set(ranks) & set(dist.get_process_group_ranks(getattr(optimizer, "process_group", None)))
    if len(sharing) > 1:
        inner = getattr(optimizer, "optim", None)
        raise ValueError(
            f"{type(optimizer).__name__} divides its step among {rank_list(sorted(sharing))}, and {algorithm} does not"
            " average gradients.\n"
            "Each parameter would be stepped on one of these ranks, with the gradients of that rank's data alone.\n"
            f"Use {'its inner optimizer' if inner is None else type(inner).__name__} without"
            f" {type(optimizer).__name__}, or an algorithm that averages gradients."
        )


def _about_kept(optimizer: torch.optim.Optimizer, kept: Sequence[described.Kept]) -> str:
    told = [f"{one} ({one.reason})" for one in kept if one.reason]
    return (
        f"Of {type(optimizer).__name__}, values that cannot be sent stay as each rank has them:"
        f" {listed(told, MAX_PROBLEMS, '; ')}.\n"
        "Give the same on every rank, or something that pickle can send: a function of a module instead of a lambda."
    )


def prepare_entries(
    optimizer: torch.optim.Optimizer,
    description: described.Description,
    left_out: Collection[int],
    communicator: BaguaCommunicator,
) -> tuple[dict[described.EntryKey, Any], list[torch.Tensor]]:
    """The entries as rank 0 has them, and the tensors in them, which wait for their values.

    Raises:
        ValueError: this optimizer has other groups or parameters, or lacks a value that cannot be sent.
    """
    shapes = described.shapes_of(optimizer, left_out)
    if shapes != description.shapes:
        raise ValueError(shapes_difference(shapes, description.shapes))
    local = described.entries_of(optimizer, left_out)
    parameters = described.parameters_of(optimizer)
    tensors: list[torch.Tensor] = []
    taken: set[int] = set()
    for slot in description.slots:
        present = dict(described.items_of(local.get(slot.entry))).get(slot.name)
        tensor = (
            present if _fits(present, slot) and id(present) not in taken else _allocate(slot, parameters, communicator)
        )
        taken.add(id(tensor))
        tensors.append(tensor)
    entries = described.entries_in(description, tensors)
    for kept in description.kept:
        mine = local.get(kept.entry)
        if kept.name is None and kept.entry in local:
            entries[kept.entry] = mine
        elif kept.name is not None and kept.name in dict(described.items_of(mine)):
            entries[kept.entry][kept.name] = dict(described.items_of(mine))[kept.name]
        else:
            raise ValueError(
                f"rank 0's {kept} cannot be sent ({kept.reason or 'it refers to a module'}), and is not here"
            )
    return entries, tensors


def _fits(present: object, slot: described.Slot) -> TypeGuard[torch.Tensor]:
    """Whether rank 0's values can be written into a tensor that is there."""
    return (
        isinstance(present, torch.Tensor)
        and why_unsendable(present) is None
        and (tuple(present.shape), present.dtype, present.device.type) == (slot.shape, slot.dtype, slot.device_type)
        and not repeats_elements(present)
    )


def _allocate(
    slot: described.Slot, parameters: Sequence[torch.Tensor], communicator: BaguaCommunicator
) -> torch.Tensor:
    """On the parameter's device, if of that kind, and with its strides: fused kernels rely on equal ones."""
    kind, key = slot.entry
    owner = parameters[key] if kind == "state" and isinstance(key, int) else next(iter(parameters), None)
    if owner is None or owner.device.type != slot.device_type:
        device = communicator.gpu if slot.device_type == "cuda" else slot.device_type
        return torch.empty(slot.shape, dtype=slot.dtype, device=device)
    if kind == "state" and tuple(owner.shape) == slot.shape:
        return torch.empty_like(owner.detach(), dtype=slot.dtype)
    return torch.empty(slot.shape, dtype=slot.dtype, device=owner.device)


def install_entries(
    optimizer: torch.optim.Optimizer, entries: Mapping[described.EntryKey, Any], left_out: Collection[int]
) -> None:
    """The dicts that are there stay the same objects: schedulers and captured graphs may hold them."""
    parameters = described.parameters_of(optimizer)
    positions = {id(one): position for position, one in enumerate(parameters) if id(one) not in left_out}
    state: dict[Any, Any] = optimizer.state
    for key in list(state):
        if isinstance(key, torch.Tensor):
            is_stale = id(key) in positions and ("state", positions[id(key)]) not in entries
        else:
            is_stale = ("shared", key) not in entries
        if is_stale:
            del state[key]
    for (kind, key), value in entries.items():
        if kind == "group":
            assert isinstance(key, int)
            group = optimizer.param_groups[key]
            _assign(group, {"params": group["params"], **value})
        elif kind == "defaults":
            _assign(optimizer.defaults, value)
        else:
            owner: Any = parameters[key] if kind == "state" and isinstance(key, int) else key
            present = state.get(owner)
            if isinstance(present, dict) and type(present) is type(value):
                _assign(present, value)
            else:
                state[owner] = value


def _assign(target: dict[Any, Any], source: Mapping[Any, Any]) -> None:
    target.clear()
    target.update(source)


def shapes_difference(ours: Sequence[Sequence[described.Shape]], theirs: Sequence[Sequence[described.Shape]]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} param_groups, rank 0 has {len(theirs)}"
    group = next(index for index, (our, their) in enumerate(zip(ours, theirs, strict=True)) if our != their)
    our, their = ours[group], theirs[group]
    if len(our) != len(their):
        return f"{len(our)} parameters in param_groups[{group}], rank 0 has {len(their)}"
    index = next(index for index, (mine, other) in enumerate(zip(our, their, strict=True)) if mine != other)
    return f"shape {our[index]} of parameter {index} in param_groups[{group}], rank 0 has {their[index]}"


def _raise_together(problem: str | None, communicator: BaguaCommunicator) -> None:
    """RuntimeError on every rank if one of them has a problem: a rank that left alone would let the others wait."""
    problems: list[str | None] = all_gather_object(problem, communicator)
    told = [f"rank {communicator.ranks[index]}: {text}" for index, text in enumerate(problems) if text is not None]
    if told:
        raise RuntimeError(
            f"the optimizer cannot follow rank 0: {listed(told, MAX_PROBLEMS, '; ', 'other ranks')}.\n"
            "Build the same optimizer on every rank, with the same parameters in the same groups and order."
        )
