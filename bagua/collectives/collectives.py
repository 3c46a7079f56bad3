"""The collectives. Called by all members of a communicator in the same order; for other processes they do nothing.

Tensors are dense and contiguous, on one device that the group has a backend for (CPU: gloo, CUDA: NCCL), and of the
same dtype and size on all ranks unless it says otherwise; those that reduce take the dtypes that `ReduceOp` is defined
for, the others all dtypes. Ranks are those of the communicator; `comm` None is the global communicator of the default
group. A collective on the CPU is done when it returns; on a GPU the caller's current stream waits for it. Source and
destination may share memory.

Raises, all of them, before anything is sent: TypeError and ValueError for wrong arguments, naming them; on CPUs, in the
first collectives of a communicator, ValueError on all ranks if they call different ones; RuntimeError without a default
group or after an abort. What fails while it is under way because of a peer or the network is a CollectiveError, which
names the ranks that are gone (see bagua.job.failure_report); on CPUs within the group's timeout and the seconds in
which the others are asked. `send` and `recv` ask their peer alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec

import torch

from bagua.collectives import byte_transport, reduction
from bagua.collectives.arguments import (
    check_disjoint,
    check_divisible,
    check_integer,
    check_op,
    check_rank,
    check_segments,
    check_size,
    check_tensors,
    resolve,
)
from bagua.collectives.byte_transport import flat, without_overlap
from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.reduce_op import ReduceOp
from bagua.misuse import explains_calls

P = ParamSpec("P")

_OF_TORCH = {
    "group": "Pass a communicator: comm=from_torch_group(group).get_global_communicator().",
    "async_op": "Leave async_op out: on a GPU, the call does not wait for the collective, but the current stream does.",
}


def _collective(function: Callable[P, None]) -> Callable[P, None]:
    """People also call it as they would torch.distributed's, with one tensor."""
    name, parameters = function.__name__, ", ".join(inspect.signature(function).parameters)
    right = f"Call {name}({parameters})"
    if "recv_tensor" in parameters:
        right += f", or {name}_inplace for one tensor that is sent and overwritten"
    return explains_calls(f"{right}.", **_OF_TORCH)(function)


@_collective
def send(tensor: torch.Tensor, dst: int, comm: BaguaCommunicator | None = None) -> None:
    """To one rank, which calls `recv`.

    Raises:
        ValueError: `dst` is this process itself, and see the module.
    """
    if member := resolve(comm, "send"):
        check_tensors("send", member, tensor=tensor)
        destination = check_rank("send", "dst", dst, member)
        if destination == member.rank():
            raise ValueError(f"send: dst={destination} is this process itself")
        byte_transport.send(member, tensor, destination)


@_collective
def recv(tensor: torch.Tensor, src: int, comm: BaguaCommunicator | None = None) -> None:
    """From one rank, which calls `send`.

    Raises:
        ValueError: `src` is this process itself, and see the module.
    """
    if member := resolve(comm, "recv"):
        check_tensors("recv", member, tensor=tensor)
        source = check_rank("recv", "src", src, member)
        if source == member.rank():
            raise ValueError(f"recv: src={source} is this process itself")
        byte_transport.receive(member, tensor, source)


@_collective
def broadcast(tensor: torch.Tensor, src: int = 0, comm: BaguaCommunicator | None = None) -> None:
    """`tensor` becomes that of rank `src`."""
    if member := resolve(comm, "broadcast"):
        check_tensors("broadcast", member, tensor=tensor)
        member.compare_first("broadcast", tensor)
        byte_transport.broadcast(member, tensor, check_rank("broadcast", "src", src, member))


@_collective
def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: BaguaCommunicator | None = None,
) -> None:
    """On rank `dst`, `recv_tensor` becomes the reduction of all `send_tensor`; elsewhere it is left alone."""
    if member := resolve(comm, "reduce"):
        check_tensors("reduce", member, send_tensor=send_tensor, recv_tensor=recv_tensor)
        check_size("reduce", "recv_tensor", recv_tensor, send_tensor.numel(), "as send_tensor has")
        destination = check_rank("reduce", "dst", dst, member)
        plan = reduction.plan(member, send_tensor, check_op("reduce", op))
        member.compare_first("reduce", send_tensor)
        result = flat(send_tensor)
        if member.rank() == destination:
            result = _copied(send_tensor, recv_tensor)
        reduction.reduce(member, result, destination, plan)


@_collective
def reduce_inplace(
    tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: BaguaCommunicator | None = None
) -> None:
    """On rank `dst`, `tensor` becomes the reduction of all; elsewhere it is left alone."""
    reduce(tensor, tensor, dst, op, comm)


@_collective
def allreduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: BaguaCommunicator | None = None,
) -> None:
    """`recv_tensor` becomes the reduction of all `send_tensor`. They may be the same tensor."""
    if member := resolve(comm, "allreduce"):
        check_tensors("allreduce", member, send_tensor=send_tensor, recv_tensor=recv_tensor)
        check_size("allreduce", "recv_tensor", recv_tensor, send_tensor.numel(), "as send_tensor has")
        plan = reduction.plan(member, send_tensor, check_op("allreduce", op))
        member.compare_first("all_reduce", send_tensor)
        reduction.all_reduce(member, _copied(send_tensor, recv_tensor), plan)


@_collective
def allreduce_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: BaguaCommunicator | None = None) -> None:
    """`tensor` becomes the reduction of all."""
    allreduce(tensor, tensor, op, comm)


@_collective
def allgather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: BaguaCommunicator | None = None) -> None:
    """`recv_tensor`, n times as long, becomes all `send_tensor` in the order of the ranks."""
    if member := resolve(comm, "allgather"):
        check_tensors("allgather", member, send_tensor=send_tensor, recv_tensor=recv_tensor)
        _check_whole("allgather", "recv_tensor", recv_tensor, "send_tensor", send_tensor, member.nranks())
        member.compare_first("all_gather", send_tensor)
        byte_transport.all_gather(member, flat(send_tensor), flat(recv_tensor))


@_collective
def allgather_inplace(tensor: torch.Tensor, comm: BaguaCommunicator | None = None) -> None:
    """`tensor` has a part for each rank; that of rank i becomes what rank i has there."""
    if member := resolve(comm, "allgather_inplace"):
        check_tensors("allgather_inplace", member, tensor=tensor)
        check_divisible("allgather_inplace", "tensor", tensor, member.nranks())
        whole = flat(tensor)
        own = byte_transport.parts(whole, member.nranks())[member.rank()]
        member.compare_first("all_gather", own)
        byte_transport.all_gather(member, own, whole)


@_collective
def gather(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: BaguaCommunicator | None = None
) -> None:
    """On rank `dst`, `recv_tensor`, n times as long, becomes all `send_tensor`; elsewhere it may be anything."""
    if member := resolve(comm, "gather"):
        destination = check_rank("gather", "dst", dst, member)
        member.compare_first("gather", send_tensor)
        if member.rank() != destination:
            check_tensors("gather", member, send_tensor=send_tensor)
            byte_transport.gather(member, flat(send_tensor), None, destination)
            return
        check_tensors("gather", member, send_tensor=send_tensor, recv_tensor=recv_tensor)
        _check_whole("gather", "recv_tensor", recv_tensor, "send_tensor", send_tensor, member.nranks())
        byte_transport.gather(member, flat(send_tensor), flat(recv_tensor), destination)


@_collective
def gather_inplace(tensor: torch.Tensor, count: int, dst: int, comm: BaguaCommunicator | None = None) -> None:
    """
    On rank `dst`, the part of rank i of `tensor`, n * count elements, becomes what rank i gives; its own is there
    already. Elsewhere `tensor` has `count` elements.
    """
    if member := resolve(comm, "gather_inplace"):
        destination = check_rank("gather_inplace", "dst", dst, member)
        whole, own = _check_rooted("gather_inplace", tensor, count, destination == member.rank(), member)
        member.compare_first("gather", own)
        byte_transport.gather(member, own, whole, destination)


@_collective
def scatter(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: BaguaCommunicator | None = None
) -> None:
    """`recv_tensor` becomes this rank's part of `send_tensor`, n times as long, of rank `src`; others' is not read."""
    if member := resolve(comm, "scatter"):
        root = check_rank("scatter", "src", src, member)
        member.compare_first("scatter", recv_tensor)
        if member.rank() != root:
            check_tensors("scatter", member, recv_tensor=recv_tensor)
            byte_transport.scatter(member, None, flat(recv_tensor), root)
            return
        check_tensors("scatter", member, send_tensor=send_tensor, recv_tensor=recv_tensor)
        _check_whole("scatter", "send_tensor", send_tensor, "recv_tensor", recv_tensor, member.nranks())
        byte_transport.scatter(member, flat(send_tensor), flat(recv_tensor), root)


@_collective
def scatter_inplace(tensor: torch.Tensor, count: int, src: int, comm: BaguaCommunicator | None = None) -> None:
    """
    `tensor`, `count` elements, becomes this rank's part of that of rank `src`, n * count elements, which stays as it
    is.
    """
    if member := resolve(comm, "scatter_inplace"):
        root = check_rank("scatter_inplace", "src", src, member)
        whole, own = _check_rooted("scatter_inplace", tensor, count, root == member.rank(), member)
        member.compare_first("scatter", own)
        byte_transport.scatter(member, whole, own, root)


@_collective
def reduce_scatter(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: BaguaCommunicator | None = None,
) -> None:
    """`recv_tensor` becomes this rank's part of the reduction of all `send_tensor`, n times as long."""
    if member := resolve(comm, "reduce_scatter"):
        check_tensors("reduce_scatter", member, send_tensor=send_tensor, recv_tensor=recv_tensor)
        _check_whole("reduce_scatter", "send_tensor", send_tensor, "recv_tensor", recv_tensor, member.nranks())
        plan = reduction.plan(member, send_tensor, check_op("reduce_scatter", op))
        member.compare_first("reduce_scatter", send_tensor)
        result = flat(recv_tensor)
        reduction.reduce_scatter(member, without_overlap(flat(send_tensor), result), result, plan)


@_collective
def reduce_scatter_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: BaguaCommunicator | None = None
) -> None:
    """The first n-th of `tensor` becomes this rank's part of the reduction; the rest is left alone."""
    if member := resolve(comm, "reduce_scatter_inplace"):
        check_tensors("reduce_scatter_inplace", member, tensor=tensor)
        part = check_divisible("reduce_scatter_inplace", "tensor", tensor, member.nranks())
        reduce_scatter(tensor, flat(tensor)[:part], op, member)


@_collective
def alltoall(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: BaguaCommunicator | None = None) -> None:
    """Both have a part for each rank: part i of `recv_tensor` becomes this rank's part of rank i's `send_tensor`."""
    if member := resolve(comm, "alltoall"):
        check_tensors("alltoall", member, send_tensor=send_tensor, recv_tensor=recv_tensor)
        check_divisible("alltoall", "send_tensor", send_tensor, member.nranks())
        check_size("alltoall", "recv_tensor", recv_tensor, send_tensor.numel(), "as send_tensor has")
        member.compare_first("all_to_all", send_tensor)
        byte_transport.all_to_all(member, flat(send_tensor), flat(recv_tensor))


@_collective
def alltoall_inplace(tensor: torch.Tensor, comm: BaguaCommunicator | None = None) -> None:
    """Part i of `tensor` becomes this rank's part of rank i's."""
    alltoall(tensor, tensor, comm)


@_collective
def alltoall_v(
    send_tensor: torch.Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: torch.Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: BaguaCommunicator | None = None,
) -> None:
    """
    To rank i go `send_counts[i]` elements of `send_tensor` from `send_displs[i]` on; what comes from it, of
    `recv_counts[i]` elements, is put at `recv_displs[i]` of `recv_tensor`. Other elements are left alone.

    Raises:
        ValueError: this process would send itself another number of elements than it receives, and see the module.
    """
    if member := resolve(comm, "alltoall_v"):
        check_tensors("alltoall_v", member, send_tensor=send_tensor, recv_tensor=recv_tensor)
        sent = check_segments("alltoall_v", "send_", send_tensor, send_counts, send_displs, member.nranks())
        received = check_segments("alltoall_v", "recv_", recv_tensor, recv_counts, recv_displs, member.nranks())
        check_disjoint("alltoall_v", received)
        me = member.rank()
        if send_counts[me] != recv_counts[me]:
            raise ValueError(
                f"alltoall_v: send_counts[{me}]={send_counts[me]} and recv_counts[{me}]={recv_counts[me]} are both "
                "what this process sends to itself"
            )
        member.compare_first("all_to_all", send_tensor, has_size=False)
        byte_transport.all_to_all_segments(member, flat(send_tensor), sent, flat(recv_tensor), received)


@_collective
def alltoall_v_inplace(
    tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: BaguaCommunicator | None = None
) -> None:
    """With rank i, `counts[i]` elements of `tensor` from `displs[i]` on are exchanged."""
    alltoall_v(tensor, counts, displs, tensor, counts, displs, comm)


@_collective
def barrier(comm: BaguaCommunicator | None = None) -> None:
    """Returns when every member has called it."""
    if member := resolve(comm, "barrier"):
        member.barrier()


def _copied(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The flat target, with the values of the source. They may be the same, or overlap."""
    result = flat(target)
    if source.data_ptr() != target.data_ptr():
        result.copy_(without_overlap(flat(source), target))
    return result


def _check_whole(what: str, name: str, whole: torch.Tensor, part_name: str, part: torch.Tensor, ranks: int) -> None:
    check_size(what, name, whole, ranks * part.numel(), f"{ranks} (ranks) times the {part.numel()} of {part_name}")


def _check_rooted(
    what: str, tensor: torch.Tensor, count: int, is_root: bool, comm: BaguaCommunicator
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The whole buffer, on the root, and the part of this rank."""
    check_tensors(what, comm, tensor=tensor)
    count = check_integer(what, "count", count)
    if is_root:
        check_size(what, "tensor", tensor, comm.nranks() * count, f"{comm.nranks()} (ranks) times count on the root")
        whole = flat(tensor)
        return whole, byte_transport.parts(whole, comm.nranks())[comm.rank()]
    check_size(what, "tensor", tensor, count, "which is count")
    return None, flat(tensor)
