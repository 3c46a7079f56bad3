"""The collectives as methods of a communicator, by the names and arguments of Bagua 0.9's core.

Importing bagua.torch_api puts the methods of CollectiveMethods on BaguaCommunicator. The tensors are what
`bagua_backend_tensor()` returns, or any others that the functions of bagua.collectives.collectives take, which do the
work and say what is raised. Any thread, by all members in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.collectives import collectives
from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.reduce_op import ReduceOp
from bagua.job import launch_environment


class CollectiveMethods:
    """Never constructed: these are methods of BaguaCommunicator. In a process that is no member of the communicator,
    each raises AttributeError."""

    def device_id(self) -> int:
        """The index of the CUDA device of `cuda_stream`; without CUDA the local rank."""
        stream = _communicator(self).cuda_stream
        return launch_environment.local_rank() if stream is None else stream.device.index

    def send(self, tensor: Tensor, peer_rank: int) -> None:
        """To one rank, which calls `recv`."""
        _run(self, collectives.send, tensor, peer_rank)

    def recv(self, tensor: Tensor, peer_rank: int) -> None:
        """From one rank, which calls `send`."""
        _run(self, collectives.recv, tensor, peer_rank)

    def broadcast(self, tensor: Tensor, root_rank: int) -> None:
        """`tensor` becomes that of rank `root_rank`."""
        _run(self, collectives.broadcast, tensor, root_rank)

    def reduce(self, send_tensor: Tensor, recv_tensor: Tensor, dst: int, op: ReduceOp | int) -> None:
        """On rank `dst`, `recv_tensor` becomes the reduction of all `send_tensor`."""
        _run(self, collectives.reduce, send_tensor, recv_tensor, dst, op)

    def reduce_inplace(self, tensor: Tensor, dst: int, op: ReduceOp | int) -> None:
        """On rank `dst`, `tensor` becomes the reduction of all."""
        _run(self, collectives.reduce_inplace, tensor, dst, op)

    def allreduce(self, send_tensor: Tensor, recv_tensor: Tensor, op: ReduceOp | int) -> None:
        """`recv_tensor` becomes the reduction of all `send_tensor`."""
        _run(self, collectives.allreduce, send_tensor, recv_tensor, op)

    def allreduce_inplace(self, tensor: Tensor, op: ReduceOp | int) -> None:
        """`tensor` becomes the reduction of all."""
        _run(self, collectives.allreduce_inplace, tensor, op)

    def allgather(self, send_tensor: Tensor, recv_tensor: Tensor) -> None:
        """`recv_tensor`, n times as long, becomes all `send_tensor` in the order of the ranks."""
        _run(self, collectives.allgather, send_tensor, recv_tensor)

    def allgather_inplace(self, tensor: Tensor) -> None:
        """The part of rank i of `tensor` becomes what rank i has there."""
        _run(self, collectives.allgather_inplace, tensor)

    def gather(self, send_tensor: Tensor, recv_tensor: Tensor, dst: int) -> None:
        """On rank `dst`, `recv_tensor`, n times as long, becomes all `send_tensor`."""
        _run(self, collectives.gather, send_tensor, recv_tensor, dst)

    def gather_inplace(self, tensor: Tensor, count: int, dst: int) -> None:
        """On rank `dst`, the part of rank i of `tensor`, n * count elements, becomes what rank i gives."""
        _run(self, collectives.gather_inplace, tensor, count, dst)

    def scatter(self, send_tensor: Tensor, recv_tensor: Tensor, src: int) -> None:
        """`recv_tensor` becomes this rank's part of `send_tensor`, n times as long, of rank `src`."""
        _run(self, collectives.scatter, send_tensor, recv_tensor, src)

    def scatter_inplace(self, tensor: Tensor, count: int, src: int) -> None:
        """`tensor`, `count` elements, becomes this rank's part of that of rank `src`, n * count elements."""
        _run(self, collectives.scatter_inplace, tensor, count, src)

    def reduce_scatter(self, send_tensor: Tensor, recv_tensor: Tensor, op: ReduceOp | int) -> None:
        """`recv_tensor` becomes this rank's part of the reduction of all `send_tensor`, n times as long."""
        _run(self, collectives.reduce_scatter, send_tensor, recv_tensor, op)

    def reduce_scatter_inplace(self, tensor: Tensor, op: ReduceOp | int) -> None:
        """The first n-th of `tensor` becomes this rank's part of the reduction."""
        _run(self, collectives.reduce_scatter_inplace, tensor, op)

    def alltoall(self, send_tensor: Tensor, recv_tensor: Tensor) -> None:
        """Part i of `recv_tensor` becomes this rank's part of rank i's `send_tensor`."""
        _run(self, collectives.alltoall, send_tensor, recv_tensor)

    def alltoall_inplace(self, tensor: Tensor) -> None:
        """Part i of `tensor` becomes this rank's part of rank i's."""
        _run(self, collectives.alltoall_inplace, tensor)

    def alltoall_v(
        self,
        send_tensor: Tensor,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv_tensor: Tensor,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
    ) -> None:
        """With rank i, other numbers of elements than with others, from and to the places given."""
        _run(self, collectives.alltoall_v, send_tensor, send_counts, send_displs, recv_tensor, recv_counts, recv_displs)

    def alltoall_v_inplace(self, tensor: Tensor, counts: Sequence[int], displs: Sequence[int]) -> None:
        """With rank i, `counts[i]` elements of `tensor` from `displs[i]` on are exchanged."""
        _run(self, collectives.alltoall_v_inplace, tensor, counts, displs)


def _communicator(self: Any) -> BaguaCommunicator:
    communicator: BaguaCommunicator = self
    return communicator


def _run(methods: CollectiveMethods, collective: Callable[..., None], *arguments: Any) -> None:
    """On the communicator's stream, as the core did, so that whoever waits for that stream waits for the result.
    The core left it to the caller to order that stream after and before the current one; we do it."""
    communicator = _communicator(methods)
    stream = communicator.cuda_stream
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    if stream is None or not tensors or tensors[0].device != stream.device:
        collective(*arguments, communicator)
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        collective(*arguments, communicator)
    current.wait_stream(stream)


def patch_communicator() -> None:
    """Adds the methods to BaguaCommunicator. Again is harmless."""
    for name, member in vars(CollectiveMethods).items():
        if not name.startswith("__"):
            setattr(BaguaCommunicator, name, member)
