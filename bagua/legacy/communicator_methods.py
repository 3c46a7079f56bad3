"""The collectives as methods of a communicator, by the names and arguments of Bagua 0.9's core.

The tensors are what `bagua_backend_tensor()` returns, or any others that the functions of bagua.collectives.collectives
take, which do the work and say what is raised. Any thread, by all members in the same order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua import launch_environment
from bagua.collectives import collectives
from bagua.collectives.carrier_device import on_stream
from bagua.collectives.communicator import BaguaCommunicator


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
