"""What old code asks of objects of torch and of the core: members of torch's process groups, of communicators, of
buckets and of the facade that algorithms are given.

The collectives are methods of a communicator, by the names and arguments of Bagua 0.9's core. The tensors are what
`bagua_backend_tensor()` returns, or any others that the functions of bagua.collectives.collectives take, which do the
work and say what is raised. Any thread, by all members in the same order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua import launch_environment
from bagua.collectives import collectives
from bagua.collectives.carrier_device import on_stream
from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import BaguaProcessGroup, from_torch_group
from bagua.engine.bucket import Bucket
from bagua.engine.comm_scheduler import CommScheduler


def _method(collective: Callable[..., None], **renamed: str) -> Callable[..., None]:
    """`collective` on the communicator whose method it is. `renamed`: arguments that have another name here."""
    of_function = inspect.signature(collective).parameters.values()
    arguments = [one.replace(name=renamed.get(one.name, one.name)) for one in of_function if one.name != "comm"]
    signature = inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *arguments])

    @functools.wraps(collective)
    def method(*arguments: Any, **named: Any) -> None:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        communicator, *given = bound.arguments.values()
        _run(communicator, collective, given)

    vars(method)["__signature__"] = signature
    return method


class CollectiveMethods:
    """Never constructed: these are methods of BaguaCommunicator. In a process that is no member of the communicator,
    each raises AttributeError."""

    def device_id(self: Any) -> int:
        """The index of the CUDA device of `cuda_stream`; without CUDA the local rank."""
        stream: torch.cuda.Stream | None = self.cuda_stream
        return launch_environment.local_rank() if stream is None else stream.device.index

    send = _method(collectives.send, dst="peer_rank")
    recv = _method(collectives.recv, src="peer_rank")
    broadcast = _method(collectives.broadcast, src="root_rank")
    reduce = _method(collectives.reduce)
    reduce_inplace = _method(collectives.reduce_inplace)
    allreduce = _method(collectives.allreduce)
    allreduce_inplace = _method(collectives.allreduce_inplace)
    allgather = _method(collectives.allgather)
    allgather_inplace = _method(collectives.allgather_inplace)
    gather = _method(collectives.gather)
    gather_inplace = _method(collectives.gather_inplace)
    scatter = _method(collectives.scatter)
    scatter_inplace = _method(collectives.scatter_inplace)
    reduce_scatter = _method(collectives.reduce_scatter)
    reduce_scatter_inplace = _method(collectives.reduce_scatter_inplace)
    alltoall = _method(collectives.alltoall)
    alltoall_inplace = _method(collectives.alltoall_inplace)
    alltoall_v = _method(collectives.alltoall_v)
    alltoall_v_inplace = _method(collectives.alltoall_v_inplace)


def _run(communicator: BaguaCommunicator, collective: Callable[..., None], arguments: Sequence[Any]) -> None:
    """On the communicator's stream, as the core did, so that whoever waits for that stream waits for the result.
    The core left it to the caller to order that stream after and before the current one; we do it."""
    stream = communicator.cuda_stream
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    if stream is None or not tensors or tensors[0].device != stream.device:
        collective(*arguments, communicator)
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with on_stream(stream):
        collective(*arguments, communicator)
    current.wait_stream(stream)


class ProcessGroupMethods:
    """Never constructed: these are members of torch.distributed.ProcessGroup. The Bagua group is made once for a torch
    group and goes with it."""

    def bagua_patch(self: Any, stream: torch.cuda.Stream | None = None) -> dist.ProcessGroup:
        """
        Makes the Bagua group of this torch group, unless it has one.

        Args:
            stream: for work beside the caller's; None: a new one of high priority when it is needed.

        Returns:
            This same torch group.
        """
        from_torch_group(self, stream)
        group: dist.ProcessGroup = self
        return group

    @property
    def bagua_pg(self: Any) -> BaguaProcessGroup:
        """The Bagua group on top of this torch group."""
        return from_torch_group(self)

    def bagua_get_global_communicator(self: Any) -> BaguaCommunicator:
        """Of all members."""
        return from_torch_group(self).get_global_communicator()

    def bagua_get_inter_node_communicator(self: Any) -> BaguaCommunicator:
        """Of the first member of every node; NON_COMM_MEMBER for the others."""
        return from_torch_group(self).get_inter_node_communicator()

    def bagua_get_intra_node_communicator(self: Any) -> BaguaCommunicator:
        """Of the members on this node."""
        return from_torch_group(self).get_intra_node_communicator()


class BucketMembers:
    """Never constructed: these are members of Bucket."""

    @property
    def backend_bucket(self: Any) -> Bucket:
        """This bucket: what operations are handed."""
        bucket: Bucket = self
        return bucket


class FacadeMembers:
    """Never constructed: these are members of AlgorithmFacade."""

    @property
    def _bagua_backend(self: Any) -> CommScheduler:
        """The scheduler."""
        scheduler: CommScheduler = self.scheduler
        return scheduler
