"""Checks what a caller gives to a collective, before anything is sent. Pure functions; any thread.

A check that fails does so on the process that gave the wrong argument, and where all give the same, on all of them at
once. What only one process can see, such as the length of the buffer on the root, the others cannot learn without
another exchange before every collective: they wait until the failed process ends or the group's timeout is over.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
import torch.distributed as dist

from bagua.collectives.communicator import BaguaCommunicator, CommMember
from bagua.collectives.process_group import _get_default_group
from bagua.collectives.reduce_op import ReduceOp
from bagua.job import torch_internals


def resolve(comm: BaguaCommunicator | None, what: str) -> BaguaCommunicator | None:
    """
    The communicator to use; None if this process is no member and has nothing to do.

    Raises:
        RuntimeError: None is given and there is no default group, or the communicator was aborted.
        TypeError: something else than a communicator is given.
    """
    if comm is None or comm is CommMember.WORLD:
        comm = _get_default_group().get_global_communicator()
    if comm is CommMember.NON_COMM_MEMBER:
        return None
    if not isinstance(comm, BaguaCommunicator):
        raise TypeError(f"{what}: comm is {comm!r}, must be a communicator, such as {_call_for(comm)} gives, or None")
    comm.raise_if_aborted(what)
    return comm


def check_tensors(what: str, comm: BaguaCommunicator, **tensors: torch.Tensor) -> None:
    """
    All must be dense, contiguous, of one dtype and on one device that the communicator serves.

    Raises:
        TypeError, ValueError: names the argument.
    """
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        check_tensor(what, comm, name, tensor)
        if not tensor.is_contiguous():
            raise ValueError(
                f"{what}: {name} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}); give "
                f"{name}.contiguous(), and copy the result back if it is an output"
            )
        if tensor.dtype != first.dtype:
            raise TypeError(f"{what}: {name} is {tensor.dtype} and {first_name} is {first.dtype}; they must agree")
        if tensor.device != first.device:
            raise ValueError(f"{what}: {name} is on {tensor.device} and {first_name} on {first.device}; must be one")


def check_tensor(what: str, comm: BaguaCommunicator, name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError, ValueError: it is no dense tensor on a device that the communicator serves."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{what}: {name} is {type(tensor).__name__}, must be a torch.Tensor" + _instead_of(tensor, what, name)
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"{what}: {name} is {tensor.layout}, quantized or sparse; give a dense tensor")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{what}: {name} is a view that stands for other values than its memory holds; give "
            f"{name}.resolve_conj().resolve_neg()"
        )
    served = torch_internals.device_types(comm.torch_group)
    if tensor.device.type not in served:
        raise ValueError(
            f"{what}: {name} is on {tensor.device}, and the group has backends for {', '.join(served)} only; move the "
            "tensor, or make the group with the backend cpu:gloo,cuda:nccl, as bagua.torch_api.init_process_group does"
        )


def _call_for(group: object) -> str:
    given = "from_torch_group(group)" if isinstance(group, dist.ProcessGroup) else "group"
    return f"{given}.get_global_communicator()"


def _instead_of(given: object, what: str, name: str) -> str:
    """What torch.distributed has in this place."""
    if isinstance(given, list | tuple):
        return "; give one tensor for all of the list, such as torch.cat(list)"
    return f"; for one tensor that is sent and overwritten, call {what}_inplace" if name == "recv_tensor" else ""


def repeats_elements(tensor: torch.Tensor) -> bool:
    """Whether it is expanded: what is written into one element appears in others, and torch refuses to write."""
    if not tensor.numel():
        return False
    return any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))


def check_size(what: str, name: str, tensor: torch.Tensor, expected: int, why: str) -> None:
    if tensor.numel() != expected:
        raise ValueError(f"{what}: {name} has {tensor.numel()} elements, must have {expected}, {why}")


def check_divisible(what: str, name: str, tensor: torch.Tensor, ranks: int) -> int:
    """Returns the size of the part of one rank."""
    if tensor.numel() % ranks:
        raise ValueError(f"{what}: {name} has {tensor.numel()} elements, must be a multiple of the {ranks} ranks")
    return tensor.numel() // ranks


def check_rank(what: str, name: str, rank: int, comm: BaguaCommunicator) -> int:
    """A rank of the communicator. Raises TypeError for what is no integer, ValueError out of range."""
    number = check_integer(what, name, rank)
    if not 0 <= number < comm.nranks():
        raise ValueError(f"{what}: {name}={number} must be between 0 and {comm.nranks() - 1}, it is a rank of {comm!r}")
    return number


def check_integer(what: str, name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what}: {name} is {value!r}, must be an integer") from None


def check_op(what: str, op: ReduceOp | int | dist.ReduceOp.RedOpType) -> ReduceOp:
    """torch's own operations are taken as well. Raises ValueError."""
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        for candidate in ReduceOp:
            if op == candidate.torch_op:
                return candidate
    elif isinstance(op, int):
        try:
            return ReduceOp(op)
        except ValueError:
            pass
    known = ", ".join(f"{candidate.name} ({candidate.value})" for candidate in ReduceOp)
    raise ValueError(f"{what}: op is {op!r}, must be one of {known}")


def check_segments(
    what: str, side: str, tensor: torch.Tensor, counts: Sequence[int], displacements: Sequence[int], ranks: int
) -> list[slice]:
    """
    The parts of a buffer that belong to each rank, in elements.

    Raises:
        TypeError, ValueError: not one count and one displacement per rank, or a part outside the buffer.
    """
    if len(counts) != ranks or len(displacements) != ranks:
        raise ValueError(
            f"{what}: {side}counts has {len(counts)} and {side}displs {len(displacements)} numbers, must have one for "
            f"each of the {ranks} ranks"
        )
    segments = []
    for rank, (count, start) in enumerate(zip(counts, displacements, strict=True)):
        count = check_integer(what, f"{side}counts[{rank}]", count)
        start = check_integer(what, f"{side}displs[{rank}]", start)
        if count < 0 or start < 0 or start + count > tensor.numel():
            raise ValueError(
                f"{what}: {side}counts[{rank}]={count} at {side}displs[{rank}]={start} is outside the buffer of "
                f"{tensor.numel()} elements"
            )
        segments.append(slice(start, start + count))
    return segments


def check_disjoint(what: str, segments: Sequence[slice]) -> None:
    """Of what is received: two ranks must not write the same elements. Raises ValueError."""
    filled = sorted(
        (segment.start, segment.stop, rank) for rank, segment in enumerate(segments) if segment.stop > segment.start
    )
    for (_, stop, one), (start, _, other) in itertools.pairwise(filled):
        if start < stop:
            raise ValueError(f"{what}: what ranks {one} and {other} send would be received into the same elements")
