"""Moves the bytes of flat, contiguous tensors between the ranks of a communicator, whatever they mean.

Every collective that computes nothing is done on bytes: so each takes every dtype, on every backend. Runs on the
caller's thread. On the CPU a call returns when it is done; on a GPU the caller's current stream is made to wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from bagua.collectives.communicator import BaguaCommunicator, under_way
from bagua.job import torch_internals


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as one dimension, sharing memory, without autograd."""
    # Not view(-1): a dimension of size 1 may have any stride, and the view would keep that.
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return flat(tensor).view(torch.uint8)


def parts(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """A flat tensor as `count` equal views."""
    return list(tensor.view(count, tensor.numel() // count).unbind())


# Of messages that are no collective's, so that they are not taken for those of a user, whose tag is 0 if he gives none.
_TAG = 0x6261


def without_overlap(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`source`, or a copy of it if it shares memory with `target`, which is written while it is read."""
    begin, end = source.data_ptr(), source.data_ptr() + source.nbytes
    is_apart = end <= target.data_ptr() or target.data_ptr() + target.nbytes <= begin
    return source if is_apart else source.clone()


def send(comm: BaguaCommunicator, tensor: torch.Tensor, destination: int) -> None:
    peer = comm.ranks[destination]
    with under_way(comm, f"send to rank {peer}", _pair(comm, peer)):
        dist.send(as_bytes(tensor), peer, group=comm.torch_group)


def receive(comm: BaguaCommunicator, tensor: torch.Tensor, source: int) -> None:
    peer = comm.ranks[source]
    with under_way(comm, f"recv from rank {peer}", _pair(comm, peer)):
        dist.recv(as_bytes(tensor), peer, group=comm.torch_group)


def _pair(comm: BaguaCommunicator, peer: int) -> tuple[int, int]:
    """Global ranks. The others of the communicator may do whatever they like meanwhile, so they are not asked."""
    return comm.ranks[comm.rank()], peer


def exchange(
    comm: BaguaCommunicator, peers: Sequence[int], sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
) -> None:
    """To each of `peers`, ranks of the communicator, its tensor of `sent`, and from each its tensor of `received`, at
    the same time. The relation is mutual."""
    # Receptions first: gloo then uses both directions of a link at once, otherwise one after the other.
    operations = [
        *(_message(comm, dist.irecv, tensor, peer) for tensor, peer in zip(received, peers, strict=True)),
        *(_message(comm, dist.isend, tensor, peer) for tensor, peer in zip(sent, peers, strict=True)),
    ]
    if operations:
        with under_way(comm, "exchange"):
            for work in dist.batch_isend_irecv(operations):
                work.wait()


def start_send(comm: BaguaCommunicator, tensor: torch.Tensor, destination: int) -> dist.Work:
    """On CPU: `tensor` on its way to a rank of the communicator, within the caller's `under_way`. Messages to one rank
    arrive in the order in which they were started."""
    return _started(dist.isend(as_bytes(tensor), comm.ranks[destination], group=comm.torch_group, tag=_TAG))


def start_receive(comm: BaguaCommunicator, tensor: torch.Tensor, source: int) -> dist.Work:
    """The other side of `start_send`: messages go into the tensors in the order in which receptions were started."""
    return _started(dist.irecv(as_bytes(tensor), comm.ranks[source], group=comm.torch_group, tag=_TAG))


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is a member of the communicator"
    return work


def _message(
    comm: BaguaCommunicator, operation: Callable[..., dist.Work | None], tensor: torch.Tensor, peer: int
) -> dist.P2POp:
    return dist.P2POp(operation, as_bytes(tensor), comm.ranks[peer], comm.torch_group, _TAG)


def broadcast(comm: BaguaCommunicator, tensor: torch.Tensor, source: int) -> None:
    comm.perform("broadcast", tensor, dist.broadcast, as_bytes(tensor), comm.ranks[source])


def all_gather(comm: BaguaCommunicator, source: torch.Tensor, target: torch.Tensor) -> None:
    source = without_overlap(source, target)
    comm.perform("all_gather", source, torch_internals.all_gather_flat, as_bytes(target), as_bytes(source))


def gather(comm: BaguaCommunicator, source: torch.Tensor, target: torch.Tensor | None, destination: int) -> None:
    """`target` is needed on the destination only."""
    received = None
    if comm.rank() == destination:
        assert target is not None
        source = without_overlap(source, target)
        received = parts(as_bytes(target), comm.nranks())
    comm.perform("gather", source, dist.gather, as_bytes(source), received, comm.ranks[destination])


def scatter(comm: BaguaCommunicator, source: torch.Tensor | None, target: torch.Tensor, root: int) -> None:
    """`source` is needed on the root only."""
    sent = None
    if comm.rank() == root:
        assert source is not None
        sent = parts(as_bytes(without_overlap(source, target)), comm.nranks())
    comm.perform("scatter", target, dist.scatter, as_bytes(target), sent, comm.ranks[root])


def all_to_all(comm: BaguaCommunicator, source: torch.Tensor, target: torch.Tensor) -> None:
    source = without_overlap(source, target)
    comm.perform("all_to_all", source, dist.all_to_all_single, as_bytes(target), as_bytes(source))


def all_to_all_segments(
    comm: BaguaCommunicator,
    source: torch.Tensor,
    sent: Sequence[slice],
    target: torch.Tensor,
    received: Sequence[slice],
) -> None:
    """Of flat tensors: to rank i goes the part `sent[i]` of `source`, and what comes from it fills `received[i]`."""
    packed = _adjacent(source, sent)
    packed = torch.cat([source[part] for part in sent]) if packed is None else without_overlap(packed, target)
    in_place = _adjacent(target, received)
    arrived = target.new_empty(sum(map(_length, received))) if in_place is None else in_place
    comm.perform(
        "all_to_all",
        source.device,
        dist.all_to_all_single,
        as_bytes(arrived),
        as_bytes(packed),
        [_length(part) * target.itemsize for part in received],
        [_length(part) * source.itemsize for part in sent],
    )
    if in_place is None:
        for part, values in zip(received, torch.split(arrived, [_length(part) for part in received]), strict=True):
            target[part].copy_(values)


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _adjacent(tensor: torch.Tensor, segments: Sequence[slice]) -> torch.Tensor | None:
    """The segments as one view, if each begins where the one before it ends."""
    if all(after.start == before.stop for before, after in itertools.pairwise(segments)):
        return tensor[segments[0].start : segments[-1].stop]
    return None
